// What the terms of sparse training add to a pair's gradients: the one definition of each on CPUs. `l1_gradient` of the
// vector types in simd/ is the same for each lane. A `pull` is a term's scale times the token's weight.
#pragma once

#include <cstdint>
#include <cstring>

namespace {  // each instruction set has its own copy

// Of L1, to the gradient of h: pull * sign(h), and 0 where h is 0 or NaN.
inline float l1_gradient(float pull, float h) { return h > 0.0f ? pull : h < 0.0f ? -pull : 0.0f; }

// Of the count, to the gradient of an active gate: pull * p'(gate), with p(a) = tanh(a / 0.2) of
// hf_twell/ops/reference.py. p'(a) = 20 e / (1 + e)^2 with e = exp(-10 a), which loses no digits where p is near 1.
// Without branches and library calls, so that compilers make vectors of it. A NaN counts as far from 0.
inline float count_gradient(float pull, float gate) {
  // The smaller of |gate| and 8.5, where p' is 1e-36: as numbers above 0 and their bits are in one order.
  int32_t bits;
  std::memcpy(&bits, &gate, 4);
  bits &= 0x7fffffff;
  bits = bits < 0x41080000 ? bits : 0x41080000;
  float near;
  std::memcpy(&near, &bits, 4);
  const float power = near * 14.4269504f;  // e = 2^-power
  const int32_t whole = static_cast<int32_t>(power + 0.5f);
  const float part = static_cast<float>(whole) - power;  // within a half
  float e = 1.54035304e-4f;                              // ln(2)^n / n!, from n = 6 on
  e = e * part + 1.33335581e-3f;
  e = e * part + 9.61812911e-3f;
  e = e * part + 5.55041087e-2f;
  e = e * part + 0.240226507f;
  e = e * part + 0.693147181f;
  e = e * part + 1.0f;
  bits = (127 - whole) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  e *= scale;
  return pull * 20.0f * e / ((1.0f + e) * (1.0f + e));
}

}  // namespace
