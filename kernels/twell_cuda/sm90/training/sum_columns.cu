// The report's sums from columns of h, where no kernel goes through pairs.

#include "sm90/common/launch.h"
#include "sm90/training/pairs.cuh"
#include "sm90/training/training.h"

namespace twell::sm90 {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kResident = 4;  // thread blocks that an SM holds at once
constexpr int kLaneTokens = kBlockTokens / 32, kBatch = 8;            // of a column; columns of a lane under way

struct Arguments {
  Chunk chunk;
  Saving saving;
  const void* h;
  const float* token_weight;
  int width, share;  // `share` thread blocks for each block of tokens
};

// A warp takes groups of entries; four tokens of each are a lane's.
template <typename T>
__global__ void __launch_bounds__(kThreads, kResident) sum_kernel(const __grid_constant__ Arguments a) {
#if defined(TWELL_SM90_DEVICE)
  launch_dependents();
  wait_for_previous();
  const Active& active = a.chunk.active;
  const int lane = threadIdx.x % 32, half = lane / 16, block = static_cast<int>(blockIdx.x) / a.share;
  const int warp = static_cast<int>(blockIdx.x) % a.share * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int warps = a.share * kWarps, first_token = block * kBlockTokens + lane * kLaneTokens;
  const int64_t row = a.saving.waiting + block;
  float weights[kLaneTokens];
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    const int64_t token = first_token + i;
    weights[i] = token >= a.chunk.tokens     ? 0.0f
                 : a.token_weight == nullptr ? 1.0f
                                             : a.token_weight[a.chunk.first + token];
  }
  const Counts counts = active.counts[block];
  const int entries = counts.all(), groups = group_count(entries), half_begin = half == 0 ? 0 : counts.first_only;
  const int half_end = half == 0 ? counts.first_only + counts.both : entries;
  const uint16_t* neurons = active.neurons + static_cast<int64_t>(block) * active.row;
  const T* columns = static_cast<const T*>(a.h) + static_cast<int64_t>(block) * a.width * kBlockTokens;
  float* const activity = a.saving.activity + row * a.width;
  float* const l1_sums = a.saving.l1 + row * a.saving.groups;
  for (int group = warp; group < groups; group += warps) {
    const int mine = group * kGroup + lane, neuron = mine < entries ? neurons[mine] : 0;
    float l1 = 0.0f, sum = 0.0f;  // `sum`: of the lane's entry
#pragma unroll 1
    for (int first = 0; first < kGroup; first += kBatch) {
      uint2 values[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int entry = group * kGroup + first + i;
        const int64_t column = __shfl_sync(~0u, neuron, first + i) * int64_t{kBlockTokens};
        values[i] = uint2{};
        if (entry >= half_begin && entry < half_end) {
          values[i] = __ldcg(reinterpret_cast<const uint2*>(columns + column + lane * kLaneTokens));
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float2 low = unpack<T>(values[i].x), high = unpack<T>(values[i].y);
        const float sizes[kLaneTokens] = {fabsf(low.x), fabsf(low.y), fabsf(high.x), fabsf(high.y)};
        float count = 0.0f;
#pragma unroll
        for (int t = 0; t < kLaneTokens; ++t) {
          const float counted = sizes[t] != 0.0f ? weights[t] : 0.0f;
          count += counted;
          l1 += counted != 0.0f ? counted * sizes[t] : 0.0f;  // no weight: not even NaN counts
        }
#pragma unroll
        for (int d = 16; d > 0; d /= 2) count += __shfl_xor_sync(~0u, count, d);
        if (lane == first + i) sum = count;
      }
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) l1 += __shfl_xor_sync(~0u, l1, d);
    if (lane == 0) l1_sums[group] = l1;
    if (mine < entries) activity[neuron] = sum;
  }
  // Where there is no entry.
  for (int group = groups + warp * 32 + lane; group < a.saving.groups; group += warps * 32) l1_sums[group] = 0.0f;
  const uint32_t* masks = active.masks + int64_t{block} * 2 * active.words;
  for (int word = warp; word < active.words; word += warps) {
    const uint32_t listed = __ldcg(masks + word) | __ldcg(masks + active.words + word);
    const int empty = word * 32 + lane;
    if (empty < a.width && (listed >> lane & 1) == 0) activity[empty] = 0.0f;
  }
#endif
}

template <typename T>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const void* h, const Saving& saving, const Terms& terms,
                   const Device& device, cudaStream_t stream) {
  const int most = (group_count(chunk.active.row) + kWarps - 1) / kWarps;
  const int share = min(most, max(1, device.sm_count * kResident / chunk.active.blocks));
  const Arguments arguments{chunk, saving, h, terms.token_weight, ffn.width, share};
  return launch_kernel(sum_kernel<T>, chunk.active.blocks * share, kThreads, 1, 0, stream, arguments);
}

}  // namespace

cudaError_t launch_sum_columns(const Ffn& ffn, const Chunk& chunk, const void* h, const Saving& saving,
                               const Terms& terms, const Device& device, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch<__nv_bfloat16>(ffn, chunk, h, saving, terms, device, stream)
                                       : launch<__half>(ffn, chunk, h, saving, terms, device, stream);
}

}  // namespace twell::sm90
