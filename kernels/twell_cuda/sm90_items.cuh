// Which work there is, from the blocks' bit masks: every thread block works it out by itself, so that no kernel in
// between has to.
#pragma once

#include "sm90_call.h"
#include "sm90_primitives.cuh"

namespace twell::sm90 {

// Active neurons of each block of tokens. All threads of the thread block take part; ends with a barrier.
__device__ __forceinline__ void count_active(const uint32_t* masks, int blocks, int words, int* counts) {
  const int lane = threadIdx.x % 32;
  for (int block = threadIdx.x / 32; block < blocks; block += blockDim.x / 32) {
    const uint32_t* row = masks + static_cast<int64_t>(block) * words;
    int count = 0;
    for (int w = lane; w < words; w += 32) count += __popc(__ldcg(row + w));
    count = __reduce_add_sync(~0u, count);
    if (lane == 0) counts[block] = count;
  }
  __syncthreads();
}

// The first kThreads threads write the neurons of ranks [first, first + count) among a mask's set bits to `list`, in
// order, and may read it afterwards. `scratch`: an int for each of their warps.
template <int kThreads>
__device__ __forceinline__ void list_active(const uint32_t* mask, int words, int first, int count, uint16_t* list,
                                            int* scratch, int barrier_id) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int share = (words + kThreads - 1) / kThreads, begin = min(words, thread * share), end = min(words, begin + share);
  int before = 0;
  for (int w = begin; w < end; ++w) before += __popc(__ldcg(mask + w));
  int sum = before;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += other;
  }
  named_barrier<kThreads>(barrier_id);  // everyone is done with the last list and scratch
  if (lane == 31) scratch[warp] = sum;
  named_barrier<kThreads>(barrier_id);
  int rank = sum - before - first;
  for (int w = 0; w < warp; ++w) rank += scratch[w];
  for (int w = begin; w < end && rank < count; ++w) {
    for (uint32_t bits = __ldcg(mask + w); bits != 0; bits &= bits - 1, ++rank) {
      if (rank >= 0 && rank < count) list[rank] = static_cast<uint16_t>(w * 32 + __ffs(bits) - 1);
    }
  }
  named_barrier<kThreads>(barrier_id);
}

}  // namespace twell::sm90
