// From each block's two bit masks the list of its active neurons.

#include "sm90_call.h"
#include "sm90_launch.h"
#include "sm90_primitives.cuh"

namespace twell::sm90 {
namespace {

constexpr int kThreads = 256, kMostWords = 65536 / 32 / kThreads;  // of a thread

// Three counts of up to 2^16 in one word: a scan of it is three scans.
__device__ __forceinline__ uint64_t count_classes(uint32_t first, uint32_t second) {
  return static_cast<uint64_t>(__popc(first & ~second)) | static_cast<uint64_t>(__popc(first & second)) << 21 |
         static_cast<uint64_t>(__popc(second & ~first)) << 42;
}
__device__ __forceinline__ Counts counts_of(uint64_t sums) {
  constexpr uint64_t kMask = (1 << 21) - 1;
  return {static_cast<int>(sums & kMask), static_cast<int>(sums >> 21 & kMask), static_cast<int>(sums >> 42)};
}

__device__ __forceinline__ void append(uint16_t*& list, uint32_t bits, int word) {
  for (; bits != 0; bits &= bits - 1) *list++ = static_cast<uint16_t>(word * 32 + __ffs(bits) - 1);
}

__global__ void __launch_bounds__(kThreads) list_kernel(const Active a) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ uint64_t warp_sums[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  launch_dependents();
  wait_for_previous();
  const uint32_t* first_half = a.masks + static_cast<int64_t>(blockIdx.x) * 2 * a.words;
  const uint32_t* second_half = first_half + a.words;
  const int share = (a.words + kThreads - 1) / kThreads, begin = threadIdx.x * share;
  uint32_t first[kMostWords], second[kMostWords];
  uint64_t count = 0;
#pragma unroll
  for (int i = 0; i < kMostWords; ++i) {
    const bool mine = i < share && begin + i < a.words;
    first[i] = mine ? __ldcg(first_half + begin + i) : 0;
    second[i] = mine ? __ldcg(second_half + begin + i) : 0;
    count += count_classes(first[i], second[i]);
  }
  uint64_t sum = count;  // of this warp's threads up to this one
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint64_t other = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  uint64_t before = sum - count, total = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += warp_sums[w];
    total += warp_sums[w];
  }
  const Counts rank = counts_of(before), counts = counts_of(total);
  uint16_t* neurons = a.neurons + static_cast<int64_t>(blockIdx.x) * a.row;
  uint16_t* first_only = neurons + rank.first_only;
  uint16_t* both = neurons + counts.first_only + rank.both;
  uint16_t* second_only = neurons + counts.first_only + counts.both + rank.second_only;
#pragma unroll
  for (int i = 0; i < kMostWords; ++i) {
    append(first_only, first[i] & ~second[i], begin + i);
    append(both, first[i] & second[i], begin + i);
    append(second_only, second[i] & ~first[i], begin + i);
  }
  if (threadIdx.x == 0) a.counts[blockIdx.x] = counts;
#endif
}

}  // namespace

cudaError_t launch_list(const Ffn&, const Chunk& chunk, const Device&, cudaStream_t stream) {
  return launch_kernel(list_kernel, chunk.active.blocks, kThreads, 1, 0, stream, chunk.active);
}

}  // namespace twell::sm90
