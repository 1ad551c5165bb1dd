// Sums over the warps of a thread block, in a fixed order.
#pragma once

#include "decode/plan.h"

namespace twell::decoding {

// Sums of `kTiles` 16 x 8 products over the warps, in a fixed order. Each warp leaves its own in one of kSlots slots of
// shared memory; with half as many slots as warps, the upper half of the warps goes through the lower half's registers.
// Element e of a slot is lane e % 32 of tile e / 32. Ends with a barrier; the slots must be free when it starts.
template <int kSlots, int kTiles>
__device__ __forceinline__ void leave_partials(float4* slots, float (&sum)[kTiles][4], int warp, int lane) {
  static_assert(kSlots == kDecodeWarps || 2 * kSlots == kDecodeWarps, "one fold at most");
  float4* mine = slots + warp % kSlots * (kTiles * 32) + lane;
  if constexpr (kSlots < kDecodeWarps) {
    if (warp >= kSlots) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) mine[i * 32] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    }
    __syncthreads();
    if (warp < kSlots) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const float4 other = mine[i * 32];
        mine[i * 32] = make_float4(sum[i][0] + other.x, sum[i][1] + other.y, sum[i][2] + other.z, sum[i][3] + other.w);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) mine[i * 32] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
  }
  __syncthreads();
}

template <int kSlots>
__device__ __forceinline__ float4 sum_of_partials(const float4* slots, int slot_elements, int element) {
  float4 sum = slots[element];
#pragma unroll
  for (int s = 1; s < kSlots; ++s) {
    const float4 other = slots[s * slot_elements + element];
    sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
  }
  return sum;
}

}  // namespace twell::decoding
