// Eight 16-bit values at a time, as 16 bytes and as fp32.
#pragma once

#include "common/mma.cuh"

namespace twell {

constexpr int kVector = 8;

template <typename Half>
__device__ __forceinline__ void widen(const uint4& from, float (&to)[kVector]) {
  const Half* values = reinterpret_cast<const Half*>(&from);
#pragma unroll
  for (int i = 0; i < kVector; ++i) to[i] = decoding::to_float(values[i]);
}

template <typename Half>
__device__ __forceinline__ uint4 narrow(const float (&v)[kVector]) {
  using decoding::pack;
  return {pack<Half>(v[0], v[1]), pack<Half>(v[2], v[3]), pack<Half>(v[4], v[5]), pack<Half>(v[6], v[7])};
}

}  // namespace twell
