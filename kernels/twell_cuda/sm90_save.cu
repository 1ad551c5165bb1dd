// The pairs of kept blocks go to the state, h takes the place of relu(gate), and the report's sums are taken on the
// way. Where there is no pair a column is zero already.

#include "sm90_launch.h"
#include "sm90_pairs.cuh"

namespace twell::sm90 {
namespace {

constexpr int kBatch = 4;  // pairs of a lane under way

struct Arguments {
  Chunk chunk;
  Saving saving;
  Training training;
  int width;
};

// Adds 32 neighbouring pairs to their entries' sums. Each lane brings one, its entry's `rank`-th; lanes past the last
// pair bring zero, and kGroup for the entry.
__device__ __forceinline__ void add_by_entry(float* sums, float value, int entry, int rank, int lane) {
  const int same_before = min(lane, rank);
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float other = __shfl_up_sync(~0u, value, d);
    if (d <= same_before) value += other;
  }
  const bool last = __shfl_down_sync(~0u, entry, 1) != entry || lane == 31;
  if (last && entry < kGroup) sums[entry] += value;
  __syncwarp();
}

template <typename T, bool kGated, bool kReport>
__global__ void __launch_bounds__(kPairThreads) save_kernel(const Arguments arguments) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ GroupPairs all_pairs[kPairWarps];
  __shared__ float all_sums[kPairWarps][kGroup];
  const Active& a = arguments.chunk.active;
  const Saving& saving = arguments.saving;
  const State& state = arguments.training.state;
  const float* token_weight = arguments.training.token_weight;
  GroupPairs& pairs = all_pairs[threadIdx.x / 32];
  float* sums = all_sums[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  launch_dependents();
  wait_for_previous();
  const WarpGroups groups = warp_groups(a.blocks);
  const int64_t block = groups.block, absolute = arguments.chunk.first_block() + block;
  const int entries = a.counts[block].all(), end = group_count(entries);
  const bool kept = state.totals[0] > absolute;
  const int64_t first_entry = kept ? state.blocks[absolute].first_entry : 0;
  const int64_t first_pair = kept ? state.blocks[absolute].first_pair : 0;
  const int64_t offset = block * arguments.width * kBlockTokens;
  uint16_t* columns = static_cast<uint16_t*>(a.columns) + offset;
  const uint16_t* ups = static_cast<const uint16_t*>(a.ups) + (kGated ? offset : 0);
  for (int group = groups.first; group < end; group += groups.stride) {
    const int mine = group * kGroup + lane;
    const int neuron = mine < entries ? a.neurons[block * a.row + mine] : 0;
    const uint4 tokens = mine < entries ? __ldcg(saving.tokens + block * a.row + mine) : uint4{};
    const uint32_t before_group = __ldcg(saving.pairs + block * saving.groups + group);
    const EntryPairs own = expand_group(pairs, tokens, lane);
    if (kept) {
      state.tokens[first_entry + mine] = tokens;
      state.neurons[first_entry + mine] = static_cast<uint16_t>(neuron);
      if (lane == 0) state.first_pairs[first_entry / kGroup + group] = before_group;
    }
    uint16_t* gate_to = static_cast<uint16_t*>(state.gate) + first_pair + before_group;
    uint16_t* up_to = static_cast<uint16_t*>(state.up) + (kGated ? first_pair + before_group : 0);
    sums[lane] = 0.0f;
    __syncwarp();
    float l1 = 0.0f;
    for (uint32_t start = 0; start < own.count; start += kBatch * 32) {
      uint16_t gate[kBatch], up[kBatch];
      int entry[kBatch], column[kBatch];
      float weight[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t index = min(start + i * 32 + lane, own.count - 1);
        const int token = pairs.token(index);
        entry[i] = pairs.entry(index);
        column[i] = __shfl_sync(~0u, neuron, entry[i]) * kBlockTokens + token;
        gate[i] = __ldcg(columns + column[i]);
        if constexpr (kGated) up[i] = __ldcg(ups + column[i]);
        if constexpr (kReport) {
          weight[i] = 1.0f;
          if (token_weight != nullptr) weight[i] = token_weight[arguments.chunk.first + block * kBlockTokens + token];
        }
      }
      __syncwarp();  // the last pair is read by several lanes and written by one
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t index = start + i * 32 + lane;
        const bool valid = index < own.count;
        uint16_t h = gate[i];
        if constexpr (kGated) h = multiply<T>(gate[i], up[i]);
        if (valid && kept) {
          gate_to[index] = gate[i];
          if constexpr (kGated) up_to[index] = up[i];
        }
        if (valid && kGated) columns[column[i]] = h;
        if constexpr (kReport) {
          const float size = fabsf(unpack<T>(h).x), counted = valid && size != 0.0f ? weight[i] : 0.0f;
          l1 += counted != 0.0f ? counted * size : 0.0f;  // no weight: not even NaN counts
          const int rank = index - __shfl_sync(~0u, own.before, entry[i]);
          add_by_entry(sums, counted, valid ? entry[i] : kGroup, rank, lane);
        }
      }
    }
    if constexpr (kReport) {
#pragma unroll
      for (int d = 16; d > 0; d /= 2) l1 += __shfl_xor_sync(~0u, l1, d);
      if (lane == 0) saving.l1[block * saving.groups + group] = l1;
      if (mine < entries) saving.activity[block * arguments.width + neuron] = sums[lane];
    }
  }
#endif
}

template <typename T, bool kGated>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const Saving& saving, const Training& training,
                   const Device& device, cudaStream_t stream) {
  const auto kernel = training.report != nullptr ? save_kernel<T, kGated, true> : save_kernel<T, kGated, false>;
  return launch_kernel(kernel, pair_grid(chunk.active, device), kPairThreads, 1, 0, stream,
                       Arguments{chunk, saving, training, ffn.width});
}

template <typename T>
cudaError_t launch_type(const Ffn& ffn, const Chunk& chunk, const Saving& saving, const Training& training,
                        const Device& device, cudaStream_t stream) {
  return ffn.up != nullptr ? launch<T, true>(ffn, chunk, saving, training, device, stream)
                           : launch<T, false>(ffn, chunk, saving, training, device, stream);
}

}  // namespace

cudaError_t launch_save(const Ffn& ffn, const Chunk& chunk, const Saving& saving, const Training& training,
                        const Device& device, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(ffn, chunk, saving, training, device, stream)
                                       : launch_type<__half>(ffn, chunk, saving, training, device, stream);
}

}  // namespace twell::sm90
