// The L1 term's part of the gradient of h, the one definition of its subgradient on CPUs; `l1_gradient` of the vector
// types in simd/ is the same for each lane.
#pragma once

namespace {  // each instruction set has its own copy

// pull * sign(h), and 0 where h is 0 or NaN; `pull` is the term's scale times the token's weight.
inline float l1_gradient(float pull, float h) { return h > 0.0f ? pull : h < 0.0f ? -pull : 0.0f; }

}  // namespace
