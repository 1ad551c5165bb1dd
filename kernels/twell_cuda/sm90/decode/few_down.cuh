// Second of Hopper's two decode kernels, for 1 to 64 tokens: y = h Wd^T + bd from what the first one left
// (sm90/decode/few_gate_up.cuh, or bulk_gate_up.cuh).
//
// A thread block owns 64 columns of y and, with `splits` of them to a cluster, its own share of the active neurons. All
// threads list those; then some warps multiply and the others gather columns of Wd and h. The blocks of a cluster
// add up through each other's shared memory: each finishes some of the columns. `Weight` is the call's own type, or
// an 8-bit one, whose scales belong to the columns.
#pragma once

#include "decode/decode.h"
#include "decode/launch.h"
#include "sm90/decode/few_down_product.cuh"
#include "sm90/decode/few_plan.h"

namespace twell::decoding {
namespace {

using namespace few;
using namespace few::down;

#if defined(TWELL_SM90_DEVICE)

// Which bounds each block of a cluster finishes, and where it finds what block `from` has of them.
template <int kSplits>
struct Shares {
  static __device__ __forceinline__ int first(int owner) { return kBounds * owner / kSplits; }
  static __device__ __forceinline__ int count(int owner) { return first(owner + 1) - first(owner); }
  static __device__ __forceinline__ int owner(int bound) { return ((bound + 1) * kSplits - 1) / kBounds; }
  static __device__ __forceinline__ int slot(int owner, int from, int bound) {
    // Of three blocks the owner comes last: only it knows that its list is over, where the last may lie.
    const int turn = kSplits != 3 ? from : from == owner ? 2 : from < owner ? from : from - 1;
    return turn * count(owner) + bound;
  }
};

// Adds up what the cluster's blocks left for this one, in their order, and writes its columns.
template <typename Half, typename Weight, int kSplits, bool kSixteen>
__device__ __forceinline__ void finish(const FewDownParams& p, const ControlOf<Weight>& c, uint32_t exchange, int slice,
                                       int split) {
  using Share = Shares<kSplits>;
  using F = Form<Weight, kSixteen>;
  constexpr int kBoundThreads = F::kBoundThreads, kBoundBytes = F::kBoundBytes;
  constexpr int kApart = kTokensApart<Weight, kSixteen>;
#pragma unroll 1
  for (int item = threadIdx.x; item < kBoundThreads * Share::count(split); item += kThreads) {
    const int bound = item / kBoundThreads, thread = item % kBoundThreads;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (int s = 0; s < kSplits; ++s) {
      const uint4 part = sm90::load_shared_16(exchange + Share::slot(split, s, bound) * kBoundBytes + thread * 16);
      v.x += __uint_as_float(part.x), v.y += __uint_as_float(part.y);
      v.z += __uint_as_float(part.z), v.w += __uint_as_float(part.w);
    }
    const int token = token_of<Weight, kSixteen>(Share::first(split) + bound, thread);
    const int place = column_of<Weight, kSixteen>(Share::first(split) + bound, thread);
    const int column = slice * kColumns + place;
    if (token >= p.tokens || column >= p.hidden) continue;
    if constexpr (kScaled<Weight>) {
      const float low = c.scales[place], high = c.scales[place + 1];
      v.x *= low, v.y *= high, v.z *= low, v.w *= high;
    }
    float2 bias{};
    if (p.b_down != nullptr) bias = sm90::unpack<Half>(static_cast<const uint32_t*>(p.b_down)[column / 2]);
    uint32_t* const y = static_cast<uint32_t*>(p.y) + (token * p.hidden + column) / 2;
    y[0] = sm90::pack<Half>(v.x + bias.x, v.y + bias.y);
    if (token + kApart < p.tokens) y[p.hidden * kApart / 2] = sm90::pack<Half>(v.z + bias.x, v.w + bias.y);
  }
}

#endif

// 64 registers, so that it fits beside the first kernel.
template <typename Half, typename Weight, int kSplits, bool kSixteen>
__global__ void __launch_bounds__(kThreads, 3) few_down_kernel(const __grid_constant__ FewDownParams p) {
#if defined(TWELL_SM90_DEVICE)
  using Share = Shares<kSplits>;
  using F = Form<Weight, kSixteen>;
  extern __shared__ __align__(1024) uint8_t stage_bytes[];
  const int ring_bytes = p.stages * F::kStageBytes;
  const uint32_t stages = smem_address(stage_bytes), exchange = stages + ring_bytes;
  auto& c = *reinterpret_cast<ControlOf<Weight>*>(stage_bytes + ring_bytes + F::kExchangeBytes);
  const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread / 32, 0);
  const int slice = blockIdx.x / kSplits, split = blockIdx.x % kSplits;
  constexpr bool kSends = kSplits > 1;  // st.async wants a launch in clusters
  const int multiplying = F::kByTokens && p.tokens <= 32 ? 4 : F::kMultipliers / 32;  // warps
  sm90::launch_dependents();
  if (thread == 0) {
#pragma unroll
    for (int s = 0; s < kMaxStages; ++s) {
      sm90::barrier_init(c.full + s, F::kFetchers);
      sm90::barrier_init(c.empty + s, multiplying);
    }
    sm90::barrier_init(&c.sums, 1);
    sm90::fence_barrier_init();
    // From the whole cluster what this block finishes: sums of 16 tokens a warp, or bounds that have tokens.
    if constexpr (F::kByTokens) {
      const int bounds = min(max((p.tokens + 7) / 8 - Share::first(split), 0), Share::count(split));
      sm90::barrier_arrive_expect(&c.sums, kSplits * bounds * F::kBoundBytes);
    } else {
      sm90::barrier_arrive_expect(&c.sums, kSplits * Share::count(split) * ((p.tokens + 15) / 16) * 32 * 16);
    }
  }
  __syncthreads();
  cluster_arrive();  // who has started may be written to
  Neurons<kSplits> neurons(p, split);
  if constexpr (kScaled<Weight>) {  // seen by all once neurons are found
    const int column = slice * kColumns + thread;
    if (thread < kColumns) c.scales[thread] = scale_of(p.s_down, column, p.hidden);
  }
  sm90::wait_for_previous();
  neurons.find(p, c);
  Ring ring(c.full, c.empty, p.stages);

  if (warp >= F::kMultipliers / 32) {
#pragma unroll 1
    for (int from = 0; from < neurons.count; from += kListed) {
      neurons.list(p, c, from);
      const int listed = min(kListed, neurons.count - from);
      if constexpr (F::kByTokens) {
        const int first = from == 0 ? F::kFirstStages : 0;
        ring.stage += first;
        fetch_narrow<Weight>(p, c, ring, stages, slice, first * kDepth, listed);
      } else {
        fetch<Weight, kSixteen>(p, c, ring, stages, slice, listed);
      }
    }
    __syncwarp();
    cluster_wait();
  } else {
    float sum[F::kOwn];
#pragma unroll
    for (int i = 0; i < F::kOwn; ++i) sum[i] = 0.f;
#pragma unroll 1
    for (int from = 0; from < neurons.count; from += kListed) {
      neurons.list(p, c, from);
      if constexpr (F::kByTokens) {
        if (from == 0) {
          const int stage = warp / (F::kFetchers / 32), first = stage * kDepth;
          Ring own = ring;
          own.stage = stage;
          fetch_narrow<Weight>(p, c, own, stages, slice, first, min(neurons.count, first + kDepth));
          __syncwarp();
        }
      }
      if (!F::kByTokens || warp < multiplying) {
        multiply_listed<Half, Weight>(sum, ring, stages, min(kListed, neurons.count - from));
      }
    }
    if constexpr (kScaled<Weight>) join_columns(sum);
    __syncwarp();
    cluster_wait();
    if (kSixteen || F::kByTokens || warp * 16 < p.tokens) {
#pragma unroll
      for (int i = 0; i < F::kOwn / 4; ++i) {
        const int j = kSixteen ? 2 * warp + i : F::kByTokens ? warp / 4 * 4 + i : i, owner = Share::owner(j);
        if (F::kByTokens && 8 * j >= p.tokens) break;
        const uint32_t to = exchange + Share::slot(owner, split, j - Share::first(owner)) * F::kBoundBytes +
                            thread % F::kBoundThreads * 16;
        if constexpr (kSends) {
          send_at_rank(to, owner, sum + 4 * i, &c.sums);
        } else {
          store_at_rank(to, owner, sum + 4 * i);
        }
      }
    }
    __syncwarp();
  }
  if constexpr (kSends) {
    wait_for_sent(&c.sums);
  } else {
    cluster_arrive();
    cluster_wait();
  }
  finish<Half, Weight, kSplits, kSixteen>(p, c, exchange, slice, split);
#endif
}

template <typename Half, typename Weight, int kSplits, bool kSixteen>
cudaError_t launch(const DecodePlan& plan, const FewDownParams& p, int shared_bytes, cudaStream_t stream) {
  const int slices = (p.hidden + kColumns - 1) / kColumns;
  const Launch launch{dim3(slices * kSplits), kThreads, shared_bytes, kSplits};
  return launch_decode_kernel(few_down_kernel<Half, Weight, kSplits, kSixteen>, launch, p, plan.kernels, stream);
}

template <typename Half, typename Weight, bool kSixteen>
cudaError_t launch_for(const Ffn& ffn, const DecodePlan& plan, const Device& device, FewDownParams& p,
                       cudaStream_t stream) {
  const bool beside = fits_beside(ffn, device);
  const int bytes = shared_bytes<Weight, kSixteen>(beside);
  const int splits = few_splits(ffn, device);
  p.stages = down_stages(kSixteen, beside, kScaled<Weight>);
  if (splits == 1) return launch<Half, Weight, 1, kSixteen>(plan, p, bytes, stream);
  if (splits == 2) return launch<Half, Weight, 2, kSixteen>(plan, p, bytes, stream);
  if (splits == 3) return launch<Half, Weight, 3, kSixteen>(plan, p, bytes, stream);
  if (splits == 4) return launch<Half, Weight, 4, kSixteen>(plan, p, bytes, stream);
  return launch<Half, Weight, 8, kSixteen>(plan, p, bytes, stream);
}

template <typename Half, typename Weight>
cudaError_t launch_few_down_of(const Ffn& ffn, const DecodePlan& plan, const Device& device, void* workspace,
                               cudaStream_t stream) {
  FewDownParams p{};
  static_cast<DownParams&>(p) = down_params(ffn, plan, workspace);
  p.groups = plan.groups;
  return plan.groups <= 2 ? launch_for<Half, Weight, true>(ffn, plan, device, p, stream)
                          : launch_for<Half, Weight, false>(ffn, plan, device, p, stream);
}

}  // namespace
}  // namespace twell::decoding
