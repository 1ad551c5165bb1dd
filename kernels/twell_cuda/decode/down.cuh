// Second of a decode call's two kernels: y = h Wd^T + bd from what the first one left (layout: decode/plan.h).
//
// A thread block owns a slice of y's columns and, with `splits` of them to a slice, its own share of the neurons. Each
// of its warps takes masks in a fixed stride, lists their quads of active neurons, and multiplies the columns of those
// neurons' rows (gathered straight into registers) with h. Columns are the rows of the product, tokens its columns.
// `Weight` is the call's own type, or an 8-bit one.
#pragma once

#include "decode/decode.h"
#include "decode/launch.h"
#include "decode/quads.cuh"
#include "decode/reduce.cuh"

namespace twell::decoding {
namespace {

template <typename Half, typename Weight, int kColumns, int kGroups>
__global__ void __launch_bounds__(kDecodeThreads, kGroups <= 2 ? (kColumns == 2 ? 3 : 2) : 1)
    down_kernel(const __grid_constant__ DownParams p) {
  constexpr int kTiles = kColumns / 2 * kGroups;
  constexpr int kSlots = kTiles >= 16 ? kDecodeWarps / 2 : kDecodeWarps;
  constexpr int kElements = kTiles * 32;
  constexpr int kDepth = kGroups == 8 ? 3 : kColumns == 8 ? 2 : 4;  // steps in flight
  __shared__ float4 slots[kSlots * kElements];
  __shared__ uint32_t lists[kDecodeWarps][kMaxQuads];
  __shared__ bool is_last;

  let_next_kernel_start();  // the next call's gate rows then flow beside this
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int split = blockIdx.y, splits = gridDim.y;
  const int column = (blockIdx.x * 8 + lane / 4) * kColumns;  // the lane's first

  float sum[kTiles][4];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0.f;

  wait_for_previous_kernel();
  multiply_quads<Half, Weight, kColumns, kGroups, kDepth>(sum, p, lists[warp], split * kDecodeWarps + warp,
                                                          splits * kDecodeWarps, column);
  leave_partials<kSlots>(slots, sum, warp, lane);

  if (splits > 1) {
    float4* const slice = p.partials + static_cast<int64_t>(blockIdx.x) * splits * kElements;
    for (int e = thread; e < kElements; e += kDecodeThreads) {
      slice[split * kElements + e] = sum_of_partials<kSlots>(slots, kElements, e);
    }
    __threadfence();
    __syncthreads();
    const uint32_t last = splits - 1;
    if (thread == 0) is_last = atomicInc(p.arrivals + blockIdx.x, last) == last;  // back to 0 after the last
    __syncthreads();
    if (!is_last) return;
    __threadfence();
  }

  // The last block of a slice adds up all of them: whichever it is, in the same order.
  for (int e = thread; e < kElements; e += kDecodeThreads) {
    float4 v;
    if (splits == 1) {
      v = sum_of_partials<kSlots>(slots, kElements, e);
    } else {
      const float4* const slice = p.partials + static_cast<int64_t>(blockIdx.x) * splits * kElements + e;
      v = __ldcg(slice);
      for (int s = 1; s < splits; ++s) {
        const float4 other = __ldcg(slice + s * kElements);
        v.x += other.x, v.y += other.y, v.z += other.z, v.w += other.w;
      }
    }
    const int tile = e / 32;
    const int d = column + tile / kGroups * 2;  // this lane's columns: e % 32 == lane
    const int token = tile % kGroups * 8 + lane % 4 * 2;
    if constexpr (kScaled<Weight>) scale_outputs(v, p, d);
    write_outputs<Half>(v, p, d, token);
  }
}

template <typename Half, typename Weight, int kColumns, int kGroups>
cudaError_t launch(const DecodePlan& plan, const DownParams& params, cudaStream_t stream) {
  return launch_decode_kernel(down_kernel<Half, Weight, kColumns, kGroups>, {dim3(plan.slices, plan.splits)}, params,
                              plan.kernels, stream);
}

template <typename Half, typename Weight>
cudaError_t launch_down_of(const Ffn& ffn, const DecodePlan& plan, void* workspace, cudaStream_t stream) {
  const DownParams params = down_params(ffn, plan, workspace);
  if (plan.groups == 4) return launch<Half, Weight, 4, 4>(plan, params, stream);
  if (plan.groups == 8) return launch<Half, Weight, 4, 8>(plan, params, stream);
  switch (plan.lane_columns * 10 + plan.groups) {
    case 21:
      if constexpr (sizeof(Weight) == 2) return launch<Half, Weight, 2, 1>(plan, params, stream);
      return cudaErrorInvalidValue;
    case 22:
      if constexpr (sizeof(Weight) == 2) return launch<Half, Weight, 2, 2>(plan, params, stream);
      return cudaErrorInvalidValue;
    case 41: return launch<Half, Weight, 4, 1>(plan, params, stream);
    case 42: return launch<Half, Weight, 4, 2>(plan, params, stream);
    case 81: return launch<Half, Weight, 8, 1>(plan, params, stream);
    default: return launch<Half, Weight, 8, 2>(plan, params, stream);
  }
}

}  // namespace
}  // namespace twell::decoding
