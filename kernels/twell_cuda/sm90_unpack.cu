// The lists and columns of relu(gate) and u of a chunk that is kept as a whole, from the state. Columns are put
// together in shared memory, a few entries at a time.

#include "sm90_launch.h"
#include "sm90_pairs.cuh"

namespace twell::sm90 {
namespace {

constexpr int kTileEntries = 8, kTileParts = kTileEntries * kParts;

template <bool kGated>
struct Tile {
  uint4 gate[kTileParts], up[kGated ? kTileParts : 1];
};

template <bool kGated>
__global__ void __launch_bounds__(kPairThreads) unpack_kernel(const Chunk chunk, const State state, int width) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ GroupPairs all_pairs[kPairWarps];
  __shared__ Tile<kGated> tiles[kPairWarps];
  const Active& a = chunk.active;
  GroupPairs& pairs = all_pairs[threadIdx.x / 32];
  Tile<kGated>& tile = tiles[threadIdx.x / 32];
  uint16_t* tile_gate = reinterpret_cast<uint16_t*>(tile.gate);
  uint16_t* tile_up = reinterpret_cast<uint16_t*>(tile.up);
  const int lane = threadIdx.x % 32, part = lane % kParts, half = part / (kParts / 2);
  launch_dependents();
  wait_for_previous();
  if (!chunk.skipped()) return;
  const WarpGroups groups = warp_groups(a.blocks);
  const int64_t block = groups.block;
  const BlockState from = state.blocks[chunk.first_block() + block];
  const int entries = from.counts.all(), end = group_count(entries);
  const HalfEntries half_entries(from.counts, half);
  if (groups.first == 0 && lane == 0) a.counts[block] = from.counts;
  const int64_t offset = block * width * kBlockTokens + part * kPartTokens;
  uint16_t* columns = static_cast<uint16_t*>(a.columns) + offset;
  uint16_t* ups = static_cast<uint16_t*>(a.ups) + (kGated ? offset : 0);
  for (int group = groups.first; group < end; group += groups.stride) {
    const int mine = group * kGroup + lane;
    const int neuron = mine < entries ? state.neurons[from.first_entry + mine] : 0;
    const uint4 tokens = mine < entries ? __ldcg(state.tokens + from.first_entry + mine) : uint4{};
    const int64_t first_pair = from.first_pair + state.first_pairs[from.first_entry / kGroup + group];
    const uint16_t* gate = static_cast<const uint16_t*>(state.gate) + first_pair;
    const uint16_t* up = static_cast<const uint16_t*>(state.up) + (kGated ? first_pair : 0);
    if (mine < entries) a.neurons[block * a.row + mine] = static_cast<uint16_t>(neuron);
    const EntryPairs own = expand_group(pairs, tokens, lane);
    uint32_t index = 0;
    for (int first = 0; first < kGroup && group * kGroup + first < entries; first += kTileEntries) {
#pragma unroll
      for (int i = lane; i < kTileParts; i += 32) {
        tile.gate[i] = {};
        if constexpr (kGated) tile.up[i] = {};
      }
      __syncwarp();
      const int next = first + kTileEntries;
      const uint32_t before_next = __shfl_sync(~0u, own.before, next % kGroup);
      const uint32_t stop = next < kGroup ? before_next : own.count;
      for (uint32_t i = index + lane; i < stop; i += 32) {
        const int to = (pairs.entry(i) - first) * kBlockTokens + pairs.token(i);
        tile_gate[to] = gate[i];
        if constexpr (kGated) tile_up[to] = up[i];
      }
      index = stop;
      __syncwarp();
#pragma unroll
      for (int i = lane; i < kTileParts; i += 32) {
        const int entry = first + i / kParts;
        const int64_t column = __shfl_sync(~0u, neuron, entry) * kBlockTokens;
        if (half_entries.contain(group * kGroup + entry)) {
          __stcg(reinterpret_cast<uint4*>(columns + column), tile.gate[i]);
          if constexpr (kGated) __stcg(reinterpret_cast<uint4*>(ups + column), tile.up[i]);
        }
      }
      __syncwarp();
    }
  }
#endif
}

}  // namespace

cudaError_t launch_unpack(const Ffn& ffn, const Chunk& chunk, const State& state, const Device& device,
                          cudaStream_t stream) {
  const auto kernel = ffn.up != nullptr ? unpack_kernel<true> : unpack_kernel<false>;
  return launch_kernel(kernel, pair_grid(chunk.active, device), kPairThreads, 1, 0, stream, chunk, state, ffn.width);
}

}  // namespace twell::sm90
