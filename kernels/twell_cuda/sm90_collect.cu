// h, du and dg of a chunk's pairs to their places among those of all blocks, by neuron.

#include "sm90_launch.h"
#include "sm90_pairs.cuh"

namespace twell::sm90 {
namespace {

constexpr int kBatch = 4;  // pairs of a lane under way

struct Arguments {
  Chunk chunk;
  State state;
  Sorted sorted;
  int width;
};

template <typename T, bool kGated>
__global__ void __launch_bounds__(kPairThreads) collect_kernel(const Arguments arguments) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ GroupPairs all_pairs[kPairWarps];
  const Active& a = arguments.chunk.active;
  const State& state = arguments.state;
  const Sorted& sorted = arguments.sorted;
  GroupPairs& pairs = all_pairs[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  launch_dependents();
  wait_for_previous();
  const WarpGroups groups = warp_groups(a.blocks);
  const int64_t block = groups.block, absolute = arguments.chunk.first_block() + block;
  if (state.totals[0] <= absolute) return;
  const BlockState from = state.blocks[absolute];
  const int entries = from.counts.all(), end = group_count(entries);
  const int64_t offset = block * arguments.width * kBlockTokens;
  const uint16_t* gate_gradients = static_cast<const uint16_t*>(a.columns) + offset;
  const uint16_t* up_gradients = static_cast<const uint16_t*>(a.ups) + (kGated ? offset : 0);
  for (int group = groups.first; group < end; group += groups.stride) {
    const int mine = group * kGroup + lane;
    const int neuron = mine < entries ? state.neurons[from.first_entry + mine] : 0;
    const uint4 tokens = mine < entries ? __ldcg(state.tokens + from.first_entry + mine) : uint4{};
    const int64_t first_pair = from.first_pair + state.first_pairs[from.first_entry / kGroup + group];
    const uint16_t* gate = static_cast<const uint16_t*>(state.gate) + first_pair;
    const uint16_t* up = static_cast<const uint16_t*>(state.up) + (kGated ? first_pair : 0);
    const uint32_t place = mine < entries ? sorted.places[absolute * arguments.width + neuron] : 0;
    const EntryPairs own = expand_group(pairs, tokens, lane);
    const uint32_t shift = place - own.before;  // from a pair's index in the group to its place, modulo 2^32
    for (uint32_t start = 0; start < own.count; start += kBatch * 32) {
      uint16_t h[kBatch], du[kBatch], dg[kBatch];
      int token[kBatch];
      uint32_t to[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t index = min(start + i * 32 + lane, own.count - 1);
        const int entry = pairs.entry(index);
        token[i] = pairs.token(index);
        to[i] = __shfl_sync(~0u, shift, entry) + index;
        const int column = __shfl_sync(~0u, neuron, entry) * kBlockTokens + token[i];
        h[i] = gate[index];
        dg[i] = __ldcg(gate_gradients + column);
        if constexpr (kGated) {
          h[i] = multiply<T>(h[i], up[index]);
          du[i] = __ldcg(up_gradients + column);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (start + i * 32 + lane < own.count) {
          sorted.tokens[to[i]] = static_cast<int32_t>(absolute * kBlockTokens + token[i]);
          static_cast<uint16_t*>(sorted.h)[to[i]] = h[i];
          if constexpr (kGated) static_cast<uint16_t*>(sorted.du)[to[i]] = du[i];
          static_cast<uint16_t*>(sorted.dg)[to[i]] = dg[i];
        }
      }
    }
  }
#endif
}

template <typename T>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const State& state, const Sorted& sorted, const Device& device,
                   cudaStream_t stream) {
  const auto kernel = ffn.up != nullptr ? collect_kernel<T, true> : collect_kernel<T, false>;
  return launch_kernel(kernel, pair_grid(chunk.active, device), kPairThreads, 1, 0, stream,
                       Arguments{chunk, state, sorted, ffn.width});
}

}  // namespace

cudaError_t launch_collect(const Ffn& ffn, const Chunk& chunk, const State& state, const Sorted& sorted,
                           const Device& device, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch<__nv_bfloat16>(ffn, chunk, state, sorted, device, stream)
                                       : launch<__half>(ffn, chunk, state, sorted, device, stream);
}

}  // namespace twell::sm90
