// For each entry of a chunk's blocks a bit mask of the tokens that activate it, and how many each group has.

#include "sm90_launch.h"
#include "sm90_pairs.cuh"

namespace twell::sm90 {
namespace {

constexpr int kTurns = kGroup * kParts / 32;  // to read a group's columns
constexpr int kBatch = 8;                     // loads of a lane under way

// A bit for each of eight values that is not zero.
__device__ __forceinline__ uint32_t active_bits(uint4 values) {
  const uint32_t words[4] = {values.x, values.y, values.z, values.w};
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    bits |= ((words[i] & 0xFFFFu) != 0 ? 1u : 0u) << (2 * i) | (words[i] >> 16 != 0 ? 2u : 0u) << (2 * i);
  }
  return bits;
}

__global__ void __launch_bounds__(kPairThreads) mark_kernel(const Active a, const Saving saving, int width) {
#if defined(TWELL_SM90_DEVICE)
  const int lane = threadIdx.x % 32, side = lane / kParts, part = lane % kParts, half = part / (kParts / 2);
  launch_dependents();
  wait_for_previous();
  const WarpGroups groups = warp_groups(a.blocks);
  const int64_t block = groups.block;
  const Counts counts = a.counts[block];
  const int entries = counts.all(), end = group_count(entries);
  const HalfEntries half_entries(counts, half);
  const uint16_t* columns =
      static_cast<const uint16_t*>(a.columns) + block * width * kBlockTokens + part * kPartTokens;
  uint32_t* words = reinterpret_cast<uint32_t*>(saving.tokens + block * a.row) + part / 4;
  for (int group = groups.first; group < end; group += groups.stride) {
    const int first = group * kGroup;
    const int neuron = first + lane < entries ? a.neurons[block * a.row + first + lane] : 0;
    uint32_t pairs = 0;
#pragma unroll
    for (int start = 0; start < kTurns; start += kBatch) {
      uint4 values[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int entry = 2 * (start + i) + side;
        const int64_t column = __shfl_sync(~0u, neuron, entry);
        values[i] = {};
        if (half_entries.contain(first + entry)) {
          values[i] = __ldcg(reinterpret_cast<const uint4*>(columns + column * kBlockTokens));
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int entry = first + 2 * (start + i) + side;
        const uint32_t bits = active_bits(values[i]);
        pairs += __popc(bits);
        uint32_t word = bits << (part % 4 * kPartTokens);
        word |= __shfl_xor_sync(~0u, word, 1);
        word |= __shfl_xor_sync(~0u, word, 2);
        if (part % 4 == 0 && entry < entries) words[static_cast<int64_t>(entry) * 4] = word;
      }
    }
    pairs = __reduce_add_sync(~0u, pairs);
    if (lane == 0) saving.pairs[block * saving.groups + group] = pairs;
  }
#endif
}

}  // namespace

cudaError_t launch_mark(const Ffn& ffn, const Chunk& chunk, const Saving& saving, const Device& device,
                        cudaStream_t stream) {
  return launch_kernel(mark_kernel, pair_grid(chunk.active, device), kPairThreads, 1, 0, stream, chunk.active, saving,
                       ffn.width);
}

}  // namespace twell::sm90
