// A thread block a row, which stays in registers: each value is read once, all at the same time, as few rows wait for
// memory and for each other, not for bytes. Between attention's last product and a block of few tokens this kernel is
// on its way alone, so it lets the block's kernel start at once: that one fetches weights while this one works.

#include "common/add_rms_norm.h"
#include "common/vector.cuh"
#include "twell_limits.h"

namespace twell {
namespace {

constexpr int kMaxThreads = 1024;

// The block's, in a fixed order.
__device__ __forceinline__ float sum_of_all(float value) {
  __shared__ float warp_sums[kMaxThreads / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  if (lane == 0) warp_sums[warp] = value;
  __syncthreads();
  value = lane < warps ? warp_sums[lane] : 0.f;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  return value;
}

template <typename Half, int kVectors>
__global__ void __launch_bounds__(kMaxThreads) add_rms_norm_kernel(const AddRmsNorm n, uint4* y, uint4* sum) {
  const int vectors = n.columns / kVector;
  const int64_t first = int64_t{blockIdx.x} * vectors;
  decoding::wait_for_previous_kernel();
  decoding::let_next_kernel_start();  // not earlier: what runs beside this may rely on what came before it
  uint4 x[kVectors] = {}, residual[kVectors] = {}, weight[kVectors] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int i = threadIdx.x + v * blockDim.x;
    if (i < vectors) {
      x[v] = static_cast<const uint4*>(n.x)[first + i];
      residual[v] = static_cast<const uint4*>(n.residual)[first + i];
      weight[v] = __ldg(static_cast<const uint4*>(n.weight) + i);
    }
  }
  float total[kVectors][kVector], squares = 0.f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float more[kVector];
    widen<Half>(x[v], total[v]);
    widen<Half>(residual[v], more);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      total[v][k] += more[k];
      squares = fmaf(total[v][k], total[v][k], squares);
    }
  }
  const float scale = rsqrtf(sum_of_all(squares) / n.columns + n.epsilon);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int i = threadIdx.x + v * blockDim.x;
    if (i >= vectors) break;
    float normed[kVector];
    widen<Half>(weight[v], normed);
#pragma unroll
    for (int k = 0; k < kVector; ++k) normed[k] *= total[v][k] * scale;
    y[first + i] = narrow<Half>(normed);
    sum[first + i] = narrow<Half>(total[v]);
  }
}

template <typename Half, int kVectors>
cudaError_t launch(const AddRmsNorm& n, void* y, void* sum, const Device& device, cudaStream_t stream) {
  const int vectors = n.columns / kVector, lanes = (vectors + kVectors - 1) / kVectors;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(n.tokens));
  config.blockDim = dim3(static_cast<unsigned>((lanes + 31) / 32 * 32));
  config.stream = stream;
  config.attrs = &attribute;
  // Of many rows, those that wait would take room from the kernel they wait for.
  config.numAttrs = device.major >= 9 && n.tokens <= device.sm_count ? 1 : 0;
  return cudaLaunchKernelEx(&config, add_rms_norm_kernel<Half, kVectors>, n, static_cast<uint4*>(y),
                            static_cast<uint4*>(sum));
}

template <typename Half>
cudaError_t launch_type(const AddRmsNorm& n, void* y, void* sum, const Device& device, cudaStream_t stream) {
  return n.columns <= kMaxThreads * kVector ? launch<Half, 1>(n, y, sum, device, stream)
                                            : launch<Half, 2>(n, y, sum, device, stream);
}

}  // namespace

cudaError_t add_rms_norm(const AddRmsNorm& n, void* y, void* sum, const Device& device, cudaStream_t stream) {
  static_assert(2 * kMaxThreads * kVector == kMaxHidden);
  if (n.tokens == 0) return cudaSuccess;
  if (n.columns % kVector != 0 || n.columns > kMaxHidden) return cudaErrorInvalidValue;
  return n.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(n, y, sum, device, stream)
                                     : launch_type<__half>(n, y, sum, device, stream);
}

}  // namespace twell
