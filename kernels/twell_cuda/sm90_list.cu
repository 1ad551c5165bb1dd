// From each block's bit mask the list of its active neurons, in ascending order.

#include "sm90_call.h"
#include "sm90_launch.h"
#include "sm90_primitives.cuh"

namespace twell::sm90 {
namespace {

constexpr int kThreads = 256, kMostWords = 65536 / 32 / kThreads;  // of a thread

__global__ void __launch_bounds__(kThreads) list_kernel(const Active a, int width) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ int warp_sums[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  launch_dependents();
  wait_for_previous();
  const uint32_t* mask = a.masks + static_cast<int64_t>(blockIdx.x) * a.words;
  uint16_t* neurons = a.neurons + static_cast<int64_t>(blockIdx.x) * width;
  const int share = (a.words + kThreads - 1) / kThreads, begin = threadIdx.x * share;
  uint32_t bits[kMostWords];
  int count = 0;
#pragma unroll
  for (int i = 0; i < kMostWords; ++i) {
    bits[i] = i < share && begin + i < a.words ? __ldcg(mask + begin + i) : 0;
    count += __popc(bits[i]);
  }
  int sum = count;  // of this warp's threads up to this one
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int rank = sum - count;
  for (int w = 0; w < warp; ++w) rank += warp_sums[w];
#pragma unroll
  for (int i = 0; i < kMostWords; ++i) {
    for (; bits[i] != 0; bits[i] &= bits[i] - 1) {
      neurons[rank++] = static_cast<uint16_t>((begin + i) * 32 + __ffs(bits[i]) - 1);
    }
  }
  if (threadIdx.x == kThreads - 1) a.counts[blockIdx.x] = rank;
#endif
}

}  // namespace

cudaError_t launch_list(const Ffn& ffn, const Chunk& chunk, const Device&, cudaStream_t stream) {
  return launch_kernel(list_kernel, chunk.active.blocks, kThreads, 1, 0, stream, chunk.active, ffn.width);
}

}  // namespace twell::sm90
