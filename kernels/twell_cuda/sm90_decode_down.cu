// Hopper's form of the second of a decode call's two kernels (the portable one: decode_down.cu; layout:
// decode_plan.cuh): y = h Wd^T + bd.
//
// A cluster of thread blocks owns a slice of y's columns, as wide as makes whole 128-byte (or 64-byte) requests of down
// rows; its thread blocks share out the neurons, and add up through each other's shared memory in a fixed order.

#include "decode_quads.cuh"
#include "decode_reduce.cuh"
#include "sm90_primitives.cuh"

namespace twell::decoding {
namespace {

#if defined(TWELL_SM90_DEVICE)
// 16 bytes of the same place in another thread block of the cluster.
__device__ __forceinline__ float4 load_from(const float4* place, int rank) {
  float4 v;
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n}\n"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(sm90::smem_address(place)), "r"(rank)
      : "memory");
  return v;
}
#endif

template <int kColumns, int kGroups>
struct DownShape {
  static constexpr int kTiles = kColumns / 2 * kGroups;
  static constexpr int kSlots = kTiles >= 8 ? kDecodeWarps / 2 : kDecodeWarps;
  static constexpr int kElements = kTiles * 32;
  static constexpr int kShared = kSlots * kElements * 16;
  static constexpr int kDepth =  // steps in flight
      kColumns == 4 ? (kGroups <= 4 ? 4 : 3) : kGroups == 1 ? 4 : kGroups == 2 ? 3 : 2;
  static_assert(kDepth > 0);
  static constexpr int kResident = kGroups <= 2 ? 2 : 1;
  static_assert(kShared >= kDecodeWarps * kMaxQuads * 4);
};

template <typename Half, int kColumns, int kGroups>
__global__ void __launch_bounds__(kDecodeThreads, DownShape<kColumns, kGroups>::kResident) cluster_down_kernel(
    const __grid_constant__ DownParams p) {
#if defined(TWELL_SM90_DEVICE)
  using S = DownShape<kColumns, kGroups>;
  extern __shared__ float4 slots[];  // before the sums: every warp's list

  if (p.lets_next_start) let_next_kernel_start();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int rank = sm90::cluster_rank(), splits = p.splits;
  const int first_column = blockIdx.x / splits * (8 * kColumns);  // of the slice

  float sum[S::kTiles][4];
#pragma unroll
  for (int i = 0; i < S::kTiles; ++i) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0.f;
  wait_for_previous_kernel();
  multiply_quads<Half, kColumns, kGroups, S::kDepth>(sum, p, reinterpret_cast<uint32_t*>(slots) + warp * kMaxQuads,
                                                     rank * kDecodeWarps + warp, splits * kDecodeWarps,
                                                     first_column + lane / 4 * kColumns);
  __syncthreads();  // the lists are done with
  leave_partials<S::kSlots>(slots, sum, warp, lane);
  for (int e = thread; e < S::kElements; e += kDecodeThreads) {
    slots[e] = sum_of_partials<S::kSlots>(slots, S::kElements, e);  // element e is this thread's alone
  }
  sm90::cluster_sync();
  const int begin = S::kElements * rank / splits, end = S::kElements * (rank + 1) / splits;
  for (int e = begin + thread; e < end; e += kDecodeThreads) {
    float4 v = load_from(slots + e, 0);
    for (int r = 1; r < splits; ++r) {
      const float4 other = load_from(slots + e, r);
      v.x += other.x, v.y += other.y, v.z += other.z, v.w += other.w;
    }
    const int tile = e / 32, of_lane = e % 32;
    write_outputs<Half>(v, p, first_column + of_lane / 4 * kColumns + tile / kGroups * 2,
                        tile % kGroups * 8 + of_lane % 4 * 2);
  }
  sm90::cluster_sync();  // the others have read what is here
  if (!p.lets_next_start) let_next_kernel_start();
#endif
}

template <typename Half, int kColumns, int kGroups>
cudaError_t launch(const DecodePlan& plan, DownParams params, const Device& device, cudaStream_t stream) {
  using S = DownShape<kColumns, kGroups>;
  const int slices = (params.hidden + 8 * kColumns - 1) / (8 * kColumns);
  params.splits = 8;
  while (params.splits > 1 && slices * params.splits > S::kResident * device.sm_count) params.splits /= 2;
  return launch_kernel(cluster_down_kernel<Half, kColumns, kGroups>,
                       {dim3(static_cast<unsigned>(slices * params.splits)), kDecodeThreads, S::kShared, params.splits},
                       params, plan.kernels, stream);
}

template <typename Half, int kColumns>
cudaError_t launch_columns(const DecodePlan& plan, const DownParams& params, const Device& device,
                           cudaStream_t stream) {
  switch (plan.groups) {
    case 1: return launch<Half, kColumns, 1>(plan, params, device, stream);
    case 2: return launch<Half, kColumns, 2>(plan, params, device, stream);
    case 4: return launch<Half, kColumns, 4>(plan, params, device, stream);
    default: return launch<Half, kColumns, 8>(plan, params, device, stream);
  }
}

template <typename Half>
cudaError_t launch_for(const DecodePlan& plan, const DownParams& params, const Device& device, cudaStream_t stream) {
  return plan.kernels.cluster_columns == 4 ? launch_columns<Half, 4>(plan, params, device, stream)
                                           : launch_columns<Half, 8>(plan, params, device, stream);
}

}  // namespace

cudaError_t launch_cluster_down(const Ffn& ffn, const DecodePlan& plan, const Device& device, void* workspace,
                                cudaStream_t stream) {
  const DownParams params = down_params(ffn, plan, workspace);
  return ffn.dtype == DType::kBFloat16 ? launch_for<__nv_bfloat16>(plan, params, device, stream)
                                       : launch_for<__half>(plan, params, device, stream);
}

}  // namespace twell::decoding
