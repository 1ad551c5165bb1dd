// Adds the sums of blocks to the report, in an order that depends on their number alone.

#include "sm90/common/launch.h"
#include "sm90/common/primitives.cuh"
#include "sm90/training/training.h"

namespace twell::sm90 {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kBatch = 16;  // loads of a lane under way

// Every `stride`-th value from `first` on.
__device__ __forceinline__ double add_up(const float* values, int64_t first, int64_t end, int64_t stride) {
  double sum = 0.0;
  for (int64_t start = first; start < end; start += kBatch * stride) {
    float batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) batch[i] = start + i * stride < end ? __ldcg(values + start + i * stride) : 0.0f;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) sum += batch[i];
  }
  return sum;
}

// The first thread block adds up the groups' L1, each of the others 32 neurons' activity, a warp every 16th part.
__global__ void __launch_bounds__(kThreads) report_kernel(const Saving saving, float* report, int width) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ double sums[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, neuron = (static_cast<int>(blockIdx.x) - 1) * 32 + lane;
  launch_dependents();
  wait_for_previous();
  const int64_t rows = saving.waiting;
  double sum = 0.0;
  if (blockIdx.x == 0) {
    sum = add_up(saving.l1, threadIdx.x, rows * saving.groups, kThreads);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  } else if (neuron < width) {
    const int64_t values = rows * saving.parts * width;
    sum = add_up(saving.activity, int64_t{warp} * width + neuron, values, int64_t{kWarps} * width);
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || (blockIdx.x == 0 ? lane != 0 : neuron >= width)) return;
  float* to = blockIdx.x == 0 ? report : report + 1 + neuron;
  sum = saving.reported ? *to : 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += sums[w][lane];
  *to = static_cast<float>(sum);
#endif
}

}  // namespace

cudaError_t launch_report(const Ffn& ffn, const Saving& saving, float* report, cudaStream_t stream) {
  // Shared memory as the kernels beside this have it.
  return launch_with_carveout(100, report_kernel, 1 + (ffn.width + 31) / 32, kThreads, 1, 0, stream, saving, report,
                              ffn.width);
}

}  // namespace twell::sm90
