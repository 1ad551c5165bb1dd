// Sums over the lanes of a warp, or the threads of a block, up to each one.
#pragma once

#include "sm90/common/primitives.cuh"

namespace twell::sm90 {

// Each lane's sum of the lanes up to it, itself included.
template <typename V>
__device__ __forceinline__ V sum_until(V value, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const V other = __shfl_up_sync(~0u, value, d);
    if (lane >= d) value += other;
  }
  return value;
}

// Each lane's sum of the lanes before it.
template <typename V>
__device__ __forceinline__ V sum_before(V value, int lane) {
  return sum_until(value, lane) - value;
}

struct ThreadSums {
  int before, all;  // of the threads before this one; of all threads
};

// By all threads of the block, which meet at the named barrier. `warp_sums` (kThreads / 32) lie in shared memory.
template <int kThreads>
__device__ __forceinline__ ThreadSums sum_threads(int value, int warp, int lane, int* warp_sums, int barrier) {
  const int until = sum_until(value, lane);
  if (lane == 31) warp_sums[warp] = until;
  named_barrier<kThreads>(barrier);
  ThreadSums sums{until - value, 0};
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    const int sum = warp_sums[w];
    sums.before += w < warp ? sum : 0;
    sums.all += sum;
  }
  return sums;
}

}  // namespace twell::sm90
