// What the terms of sparse training add to a pair's gradients: the one definition of each on the device. A `pull` is a
// term's scale times the token's weight.
#pragma once

namespace twell {

// Of L1, to the gradient of h: pull * sign(h), and 0 where h is 0 or NaN.
__device__ __forceinline__ float l1_gradient(float pull, float h) { return h > 0.0f ? pull : h < 0.0f ? -pull : 0.0f; }

// Of the count, to the gradient of an active gate: pull * p'(gate), with p(a) = tanh(a / 0.2) of
// hf_twell/ops/reference.py. p'(a) = 20 e / (1 + e)^2 with e = exp(-10 a), which loses no digits where p is near 1. A
// NaN counts as far from 0, where p' is 1e-36. A token without such a pull costs a comparison.
__device__ __forceinline__ float count_gradient(float pull, float gate) {
  if (pull == 0.0f) return 0.0f;
  const float e = __expf(-10.0f * fminf(gate, 8.5f));
  return pull * __fdividef(20.0f * e, (1.0f + e) * (1.0f + e));
}

}  // namespace twell
