// Which of a chunk's blocks are kept, and where in the pools; where each group's pairs start in its block.

#include "sm90_launch.h"
#include "sm90_pairs.cuh"

namespace twell::sm90 {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kBatch = 4;  // loads of a lane under way

// The sums before each group take the groups' place; returns the sum of all.
__device__ __forceinline__ uint32_t scan_groups(uint32_t* pairs, int groups, int lane) {
  uint32_t total = 0;
  for (int start = 0; start < groups; start += kBatch * 32) {
    uint32_t values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int group = start + i * 32 + lane;
      values[i] = group < groups ? __ldcg(pairs + group) : 0;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int group = start + i * 32 + lane;
      const uint32_t before = total + sum_before(values[i], lane);
      if (group < groups) pairs[group] = before;
      total = __shfl_sync(~0u, before + values[i], 31);
    }
  }
  return total;
}

__global__ void __launch_bounds__(kThreads)
    place_kernel(const Active a, const Saving saving, const State state, int64_t first_block) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ Counts counts[kMaxBlocks];
  __shared__ uint32_t sums[kMaxBlocks];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  launch_dependents();
  wait_for_previous();
  if (threadIdx.x < a.blocks) counts[threadIdx.x] = a.counts[threadIdx.x];
  __syncthreads();
  for (int b = warp; b < a.blocks; b += kWarps) {
    const uint32_t sum =
        scan_groups(saving.pairs + static_cast<int64_t>(b) * saving.groups, group_count(counts[b].all()), lane);
    if (lane == 0) saving.sums[b] = sums[b] = sum;
  }
  __syncthreads();
  if (warp != 0) return;
  int64_t kept = state.totals[0], entries = state.totals[1], pairs = state.totals[2];
  // A block fits if what all blocks up to it take fits: no block after the first that does not can.
  bool open = kept == first_block;
  for (int start = 0; start < a.blocks && open; start += 32) {
    const int b = start + lane;
    const bool exists = b < a.blocks;
    const int64_t own_entries = exists ? int64_t{group_count(counts[b].all())} * kGroup : 0;
    const int64_t own_pairs = exists ? sums[b] : 0;
    const int64_t first_entry = entries + sum_before(own_entries, lane);
    const int64_t first_pair = pairs + sum_before(own_pairs, lane);
    const int64_t entry_end = first_entry + own_entries, pair_end = first_pair + own_pairs;
    const bool fits = exists && entry_end <= state.entries && pair_end <= state.pairs;
    if (fits) state.blocks[first_block + b] = {counts[b], sums[b], first_entry, first_pair};
    const int count = __popc(__ballot_sync(~0u, fits)), last = max(count - 1, 0);
    kept += count;
    entries = count > 0 ? __shfl_sync(~0u, entry_end, last) : entries;
    pairs = count > 0 ? __shfl_sync(~0u, pair_end, last) : pairs;
    open = count == 32;
  }
  if (lane == 0) {
    state.totals[0] = kept;
    state.totals[1] = entries;
    state.totals[2] = pairs;
  }
#endif
}

}  // namespace

cudaError_t launch_place(const Chunk& chunk, const Saving& saving, const State& state, const Device&,
                         cudaStream_t stream) {
  return launch_kernel(place_kernel, 1, kThreads, 1, 0, stream, chunk.active, saving, state, chunk.first_block());
}

}  // namespace twell::sm90
