// Second of the two kernels of routed experts: y from what the first one left (experts/experts.h).
//
// Thread blocks walk items of a group and a slice of y's columns. A warp has 8 * kColumns of them, and kSplit warps
// share out the group's masks; they multiply the columns of its active neurons' rows with h (decode/quads.cuh). Each
// visit's result, times its share, goes to the workspace. Whichever block brings a token's last one adds up all K, in
// the order of `index`.

#include "decode/launch.h"
#include "decode/quads.cuh"
#include "decode/reduce.cuh"
#include "experts/experts.h"

namespace twell::experts {
namespace {

using namespace decoding;

constexpr int residents(int octets, int split) { return octets == 1 && split == 2 ? 3 : 2; }

__device__ __forceinline__ float share_of(const Experts& call, int visit) {
  if (call.share_dtype == DType::kFloat32) return static_cast<const float*>(call.share)[visit];
  if (call.share_dtype == DType::kFloat16) return to_float(static_cast<const __half*>(call.share)[visit]);
  return to_float(static_cast<const __nv_bfloat16*>(call.share)[visit]);
}

template <typename Half, int kColumns, int kOctets, int kSplit>
__global__ void __launch_bounds__(kDecodeThreads, residents(kOctets, kSplit))
    down_kernel(const __grid_constant__ Params p) {
  constexpr int kElements = kColumns / 2 * kOctets * 32;  // of four sums, of a warp
  constexpr int kRoom = 8 * kOctets;                      // visits
  constexpr int kWarpColumns = 8 * kColumns, kParts = kDecodeWarps / kSplit, kSliceColumns = kParts * kWarpColumns;
  constexpr int kDepth = kColumns == 8 ? 2 : 3;  // steps in flight
  __shared__ float4 slots[kDecodeWarps * kElements];
  __shared__ uint32_t lists[kDecodeWarps][kMaxQuads];
  __shared__ uint32_t groups[kMaxGroups];
  __shared__ int visit[kRoom], finished[kRoom];  // the group's; tokens whose last result came now, or -1
  __shared__ float share[kRoom];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const Experts& call = p.call;

  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int i = thread; i < p.groups; i += kDecodeThreads) groups[i] = __ldcg(p.routing->group + i);
  const int items = __ldcg(&p.routing->groups) * p.slices, routed = __ldcg(&p.routing->routed);
  __syncthreads();
#pragma unroll 1
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int g = item / p.slices, slice = item - g * p.slices;
    const Group group = unpack_group(groups[g]);
    const bool is_routed = g < routed;
    if (thread < group.visits) {
      const int mine = __ldcg(p.routing->order + group.first + thread);
      visit[thread] = mine;
      share[thread] = is_routed ? share_of(call, mine) : 0.f;
    }
    DownParams down{};
    down.down = call.down.data + (is_routed ? group.expert * call.down.expert_bytes : 0);
    down.masks = reinterpret_cast<const uint32_t*>(p.masks) + int64_t{g} * p.mask_pairs;
    down.products = reinterpret_cast<const char*>(p.products + int64_t{g} * p.blocks * kQuadsPerBlock * kRoom);
    down.hidden = call.hidden;
    down.mask_pairs = is_routed ? p.mask_pairs : 0;
    const int first = slice * kSliceColumns;
    const int column = first + warp / kSplit * kWarpColumns + lane / 4 * kColumns;  // the lane's first

    float sum[kElements / 32][4];
#pragma unroll
    for (auto& each : sum) each[0] = each[1] = each[2] = each[3] = 0.f;
    multiply_quads<Half, Half, kColumns, kOctets, kDepth>(sum, down, lists[warp], warp % kSplit, kSplit, column);
    leave_partials<kDecodeWarps>(slots, sum, warp, lane);

    for (int e = thread; e < kParts * kElements; e += kDecodeThreads) {  // e % 32 == lane
      const int part = e / kElements, tile = e % kElements / 32, slot = tile % kOctets * 8 + lane % 4 * 2;
      const int d = first + part * kWarpColumns + lane / 4 * kColumns + tile / kOctets * 2;
      const float4 v = sum_of_partials<kSplit>(slots + part * kSplit * kElements, kElements, e % kElements);
      const auto leave = [&](int s, float low, float high) {
        if (s >= group.visits || d >= call.hidden) return;
        float2* const to = reinterpret_cast<float2*>(p.partials + int64_t{visit[s]} * call.hidden + d);
        *to = is_routed ? make_float2(share[s] * low, share[s] * high) : make_float2(0.f, 0.f);
      };
      leave(slot, v.x, v.z);
      leave(slot + 1, v.y, v.w);
    }
    __threadfence();
    __syncthreads();
    if (thread < group.visits) {
      const int token = visit[thread] / call.top_k;
      const uint32_t last = call.top_k - 1;
      finished[thread] = atomicInc(p.arrivals + slice * call.tokens + token, last) == last ? token : -1;
    }
    __syncthreads();
    __threadfence();
    for (int i = thread; i < group.visits * (kSliceColumns / 2); i += kDecodeThreads) {
      const int token = finished[i / (kSliceColumns / 2)], d = first + i % (kSliceColumns / 2) * 2;
      if (token < 0 || d >= call.hidden) continue;
      const float* from = p.partials + int64_t{token} * call.top_k * call.hidden + d;
      float2 all = make_float2(0.f, 0.f);
#pragma unroll 4
      for (int k = 0; k < call.top_k; ++k, from += call.hidden) {
        const float2 one = __ldcg(reinterpret_cast<const float2*>(from));
        all.x += one.x, all.y += one.y;
      }
      static_cast<uint32_t*>(call.y)[(int64_t{token} * call.hidden + d) / 2] = pack<Half>(all.x, all.y);
    }
  }
}

template <typename Half, int kColumns, int kOctets, int kSplit>
cudaError_t launch(const Plan& plan, const Params& p, const Device& device, cudaStream_t stream) {
  const int64_t items = int64_t{plan.groups} * plan.slices,
                most = int64_t{residents(kOctets, kSplit)} * device.sm_count;
  const dim3 grid(static_cast<unsigned>(items < most ? items : most));
  return launch_decode_kernel(down_kernel<Half, kColumns, kOctets, kSplit>, {grid}, p, kernels_of(plan, device),
                              stream);
}

template <typename Half, int kSplit>
cudaError_t launch_split(const Plan& plan, const Params& p, const Device& device, cudaStream_t stream) {
  switch (plan.octets) {
    case 1: return launch<Half, 8, 1, kSplit>(plan, p, device, stream);
    case 2: return launch<Half, 8, 2, kSplit>(plan, p, device, stream);
    case 3: return launch<Half, 4, 3, kSplit>(plan, p, device, stream);
    default: return launch<Half, 4, 4, kSplit>(plan, p, device, stream);
  }
}

template <typename Half>
cudaError_t launch_type(const Plan& plan, const Params& p, const Device& device, cudaStream_t stream) {
  return (plan.split == 8 ? launch_split<Half, 8> : launch_split<Half, 2>)(plan, p, device, stream);
}

}  // namespace

cudaError_t launch_down(const Plan& plan, const Params& p, const Device& device, cudaStream_t stream) {
  return p.call.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(plan, p, device, stream)
                                          : launch_type<__half>(plan, p, device, stream);
}

}  // namespace twell::experts
