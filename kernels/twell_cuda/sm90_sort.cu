// Where each kept block's pairs of each neuron go: counts by block and neuron, then sums down each neuron's column of
// counts and over the neurons. A block without pairs of a neuron has the place of that neuron's next pair.

#include "sm90_launch.h"
#include "sm90_primitives.cuh"
#include "sm90_training.h"

namespace twell::sm90 {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32, kPrefixThreads = 1024, kAhead = 8;

// Each lane's sum of the lanes before it.
__device__ __forceinline__ int64_t sum_before(int64_t value, int lane) {
  int64_t sum = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int64_t other = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += other;
  }
  return sum - value;
}

// A thread block for each block of tokens. A count is at most 128, so a row of them fits into shared memory as bytes.
__global__ void __launch_bounds__(kThreads) count_kernel(const State state, uint32_t* places, int width) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ uint32_t shared[];
  uint8_t* pairs = reinterpret_cast<uint8_t*>(shared);
  launch_dependents();
  wait_for_previous();
  const int64_t kept = __ldcg(state.totals);
  for (int64_t b = blockIdx.x; b < kept; b += gridDim.x) {
    for (int i = threadIdx.x; i < (width + 3) / 4; i += kThreads) shared[i] = 0;
    const int entries = state.blocks[b].counts.all();
    const uint4* tokens = state.tokens + state.blocks[b].first_entry;
    const uint16_t* neurons = state.neurons + state.blocks[b].first_entry;
    __syncthreads();
#pragma unroll 4
    for (int e = threadIdx.x; e < entries; e += kThreads) {
      const uint4 t = __ldcg(tokens + e);
      pairs[__ldcg(neurons + e)] = static_cast<uint8_t>(__popc(t.x) + __popc(t.y) + __popc(t.z) + __popc(t.w));
    }
    __syncthreads();
    uint32_t* row = places + b * width;
    for (int n = threadIdx.x; n < width; n += kThreads) row[n] = pairs[n];
    __syncthreads();
  }
#endif
}

// A thread block for 32 neurons; each warp has a run of the blocks. Without kPlace: each neuron's pairs to `first`.
// With it `first` is where they go, and counts become places.
template <bool kPlace>
__global__ void __launch_bounds__(kThreads)
    column_kernel(const int64_t* totals, uint32_t* places, int64_t* first, int width) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ uint32_t sums[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, neuron = blockIdx.x * 32 + lane;
  const bool inside = neuron < width;
  launch_dependents();
  wait_for_previous();
  const int64_t kept = __ldcg(totals), share = (kept + kWarps - 1) / kWarps;
  const int64_t begin = warp * share, end = inside ? min(kept, begin + share) : 0;
  uint32_t* column = places + neuron;
  uint32_t sum = 0;
#pragma unroll 8
  for (int64_t b = begin; b < end; ++b) sum += __ldcg(column + b * width);
  sums[warp][lane] = sum;
  __syncthreads();
  if constexpr (kPlace) {
    uint32_t place = inside ? static_cast<uint32_t>(__ldcg(first + neuron)) : 0;
    for (int w = 0; w < warp; ++w) place += sums[w][lane];
    for (int64_t b = begin; b < end; b += kAhead) {
      uint32_t counts[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) counts[i] = b + i < end ? __ldcg(column + (b + i) * width) : 0;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (b + i < end) column[(b + i) * width] = place;
        place += counts[i];
      }
    }
  } else if (warp == 0 && inside) {
    int64_t total = 0;
    for (int w = 0; w < kWarps; ++w) total += sums[w][lane];
    first[neuron] = total;
  }
#endif
}

// One thread block: counts of F neurons become F + 1 sums of those before.
__global__ void __launch_bounds__(kPrefixThreads) prefix_kernel(int64_t* first, int width) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ int64_t warp_sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  launch_dependents();
  wait_for_previous();
  const int share = (width + kPrefixThreads - 1) / kPrefixThreads;
  const int begin = threadIdx.x * share, end = min(width, begin + share);
  int64_t sum = 0;
#pragma unroll 8
  for (int n = begin; n < end; ++n) sum += __ldcg(first + n);
  const int64_t before = sum_before(sum, lane);
  if (lane == 31) warp_sums[warp] = before + sum;
  __syncthreads();
  int64_t place = before + __shfl_sync(~0u, sum_before(warp_sums[lane], lane), warp);
  for (int n = begin; n < end; n += kAhead) {
    int64_t counts[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) counts[i] = n + i < end ? __ldcg(first + n + i) : 0;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (n + i < end) first[n + i] = place;
      place += counts[i];
    }
  }
  if (threadIdx.x == kPrefixThreads - 1) first[width] = place;
#endif
}

}  // namespace

cudaError_t launch_sort(const Ffn& ffn, const State& state, const Sorted& sorted, int64_t blocks, const Device& device,
                        cudaStream_t stream) {
  const int count_grid = static_cast<int>(blocks < 4 * device.sm_count ? blocks : 4 * device.sm_count);
  const int column_grid = (ffn.width + 31) / 32, row_bytes = (ffn.width + 15) / 16 * 16;
  TWELL_RETURN_IF_ERROR(
      launch_kernel(count_kernel, count_grid, kThreads, 1, row_bytes, stream, state, sorted.places, ffn.width));
  TWELL_RETURN_IF_ERROR(launch_kernel(column_kernel<false>, column_grid, kThreads, 1, 0, stream, state.totals,
                                      sorted.places, sorted.first, ffn.width));
  TWELL_RETURN_IF_ERROR(launch_kernel(prefix_kernel, 1, kPrefixThreads, 1, 0, stream, sorted.first, ffn.width));
  return launch_kernel(column_kernel<true>, column_grid, kThreads, 1, 0, stream, state.totals, sorted.places,
                       sorted.first, ffn.width);
}

}  // namespace twell::sm90
