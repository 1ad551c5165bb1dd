// From each block's two bit masks the list of its active neurons.

#include "sm90/common/chunk.h"
#include "sm90/common/launch.h"
#include "sm90/common/prefix_sum.cuh"

namespace twell::sm90 {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;

// Three counts of up to 2^16 in one word: a sum of it is three sums.
__device__ __forceinline__ uint64_t count_classes(uint32_t first, uint32_t second) {
  return static_cast<uint64_t>(__popc(first & ~second)) | static_cast<uint64_t>(__popc(first & second)) << 21 |
         static_cast<uint64_t>(__popc(second & ~first)) << 42;
}
__device__ __forceinline__ Counts counts_of(uint64_t sums) {
  constexpr uint64_t kMask = (1 << 21) - 1;
  return {static_cast<int>(sums & kMask), static_cast<int>(sums >> 21 & kMask), static_cast<int>(sums >> 42)};
}

// A thread block for each block of tokens; each warp lists a run of words, 32 at a time, and in each word a lane the
// bit that is its own. Each lane keeps the first words that it counts.
__global__ void __launch_bounds__(kThreads)
    list_kernel(const Chunk chunk, const Zeroed first_zeroed, const Zeroed second_zeroed) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ uint64_t warp_sums[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Active& a = chunk.active;
  launch_dependents();
  const bool skipped = chunk.known_skipped();
  wait_for_previous();
  if (skipped || chunk.skipped()) return;
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < first_zeroed.count; i += kThreads) first_zeroed.words[i] = 0;
    for (int i = threadIdx.x; i < second_zeroed.count; i += kThreads) second_zeroed.words[i] = 0;
  }
  const uint32_t* first_half = a.masks + static_cast<int64_t>(blockIdx.x) * 2 * a.words;
  const uint32_t* second_half = first_half + a.words;
  const int share = (a.words + kWarps - 1) / kWarps, begin = warp * share, end = min(a.words, begin + share);
  uint32_t kept_first = 0, kept_second = 0;
  if (begin + lane < end) {
    kept_first = __ldcg(first_half + begin + lane), kept_second = __ldcg(second_half + begin + lane);
  }
  uint64_t count = count_classes(kept_first, kept_second);
  for (int w = begin + lane + 32; w < end; w += 32) {
    count += count_classes(__ldcg(first_half + w), __ldcg(second_half + w));
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) count += __shfl_xor_sync(~0u, count, d);
  if (lane == 0) warp_sums[warp] = count;
  __syncthreads();
  const uint64_t mine = lane < kWarps ? warp_sums[lane] : 0, before_warp = sum_before(mine, lane);
  const Counts counts = counts_of(__shfl_sync(~0u, before_warp + mine, 31));
  uint64_t rank = __shfl_sync(~0u, before_warp, warp);
  uint16_t* neurons = a.neurons + static_cast<int64_t>(blockIdx.x) * a.row;
  for (int start = begin; start < end; start += 32) {
    const int word = start + lane;
    uint32_t first = kept_first, second = kept_second;
    if (start > begin) {
      first = word < end ? __ldcg(first_half + word) : 0, second = word < end ? __ldcg(second_half + word) : 0;
    }
    const uint64_t words_count = count_classes(first, second);
    const uint64_t before = rank + sum_before(words_count, lane);
    rank = __shfl_sync(~0u, before + words_count, 31);
#pragma unroll 4
    for (int i = 0; i < min(32, end - start); ++i) {
      const uint32_t f = __shfl_sync(~0u, first, i), s = __shfl_sync(~0u, second, i), below = (1u << lane) - 1;
      const Counts at = counts_of(__shfl_sync(~0u, before, i) + count_classes(f & below, s & below));
      const bool in_first = f >> lane & 1, in_second = s >> lane & 1;
      if (in_first || in_second) {
        const int place = !in_second ? at.first_only
                          : in_first ? counts.first_only + at.both
                                     : counts.first_only + counts.both + at.second_only;
        neurons[place] = static_cast<uint16_t>((start + i) * 32 + lane);
      }
    }
  }
  if (threadIdx.x == 0) a.counts[blockIdx.x] = counts;
#endif
}

}  // namespace

cudaError_t launch_list(const Ffn&, const Chunk& chunk, const Device&, cudaStream_t stream, Zeroed first,
                        Zeroed second) {
  // Multiprocessors are not to divide their memory anew for this one.
  return launch_with_carveout(100, list_kernel, chunk.active.blocks, kThreads, 1, 0, stream, chunk, first, second);
}

}  // namespace twell::sm90
