// Adds a chunk's sums to the report. The order depends on the chunk alone.

#include "sm90_launch.h"
#include "sm90_pairs.cuh"

namespace twell::sm90 {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kBatch = 16;  // loads of a lane under way

struct Arguments {
  Active active;
  Saving saving;
  float* report;
  int width;
};

// One thread block adds up all groups.
__device__ void add_l1(const Arguments& a) {
  __shared__ int ends[kMaxBlocks];
  __shared__ double warp_sums[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, groups = a.saving.groups;
  if (threadIdx.x < a.active.blocks) ends[threadIdx.x] = group_count(a.active.counts[threadIdx.x].all());
  __syncthreads();
  double sum = 0.0;
#pragma unroll 8
  for (int i = threadIdx.x; i < a.active.blocks * groups; i += kThreads) {
    sum += i % groups < ends[i / groups] ? __ldcg(a.saving.l1 + i) : 0.0f;
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (lane == 0) warp_sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kWarps; ++w) sum += warp_sums[w];
    a.report[0] = static_cast<float>(a.report[0] + sum);
  }
}

// A warp adds up 32 neurons: a word of each block's masks.
__device__ void add_activity(const Arguments& a, int word) {
  const int lane = threadIdx.x % 32, neuron = word * 32 + lane;
  const Active& active = a.active;
  double sum = 0.0;
  for (int start = 0; start < active.blocks; start += 32) {
    uint32_t mask = 0;
    if (start + lane < active.blocks) {
      const uint32_t* masks = active.masks + static_cast<int64_t>(start + lane) * 2 * active.words + word;
      mask = __ldcg(masks) | __ldcg(masks + active.words);
    }
    for (int b = start; b < min(start + 32, active.blocks); b += kBatch) {
      float values[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool listed = __shfl_sync(~0u, mask, b - start + i) >> lane & 1;
        values[i] = listed ? __ldcg(a.saving.activity + static_cast<int64_t>(b + i) * a.width + neuron) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) sum += values[i];
    }
  }
  if (neuron < a.width) a.report[1 + neuron] = static_cast<float>(a.report[1 + neuron] + sum);
}

__global__ void __launch_bounds__(kThreads) report_kernel(const Arguments a) {
#if defined(TWELL_SM90_DEVICE)
  launch_dependents();
  wait_for_previous();
  if (blockIdx.x == 0) {
    add_l1(a);
  } else {
    const int word = (blockIdx.x - 1) * kWarps + threadIdx.x / 32;
    if (word < a.active.words) add_activity(a, word);
  }
#endif
}

}  // namespace

cudaError_t launch_report(const Ffn& ffn, const Chunk& chunk, const Saving& saving, const Training& training,
                          const Device&, cudaStream_t stream) {
  if (training.report == nullptr) return cudaSuccess;
  return launch_kernel(report_kernel, 1 + (chunk.active.words + kWarps - 1) / kWarps, kThreads, 1, 0, stream,
                       Arguments{chunk.active, saving, training.report, ffn.width});
}

}  // namespace twell::sm90
