// The L1 term's part of the gradient of h, the one definition of its subgradient on the device.
#pragma once

namespace twell {

// pull * sign(h), and 0 where h is 0 or NaN; `pull` is the term's scale times the token's weight.
__device__ __forceinline__ float l1_gradient(float pull, float h) { return h > 0.0f ? pull : h < 0.0f ? -pull : 0.0f; }

}  // namespace twell
