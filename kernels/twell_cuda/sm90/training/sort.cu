// Where each kept block's pairs of each neuron go: counts by block and neuron, then sums down each neuron's column of
// counts and over the neurons. A block without pairs of a neuron has the place of that neuron's next pair.

#include "sm90/common/launch.h"
#include "sm90/common/prefix_sum.cuh"
#include "sm90/training/training.h"

namespace twell::sm90 {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32, kAhead = 8;
constexpr uint64_t kFilled = uint64_t{1} << 63;  // of a slot

// A thread block for each block of tokens. A count is at most 128, so a row of them fits into shared memory as bytes.
__global__ void __launch_bounds__(kThreads) count_kernel(const State state, const Sorted sorted, int width) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ uint32_t shared[];
  uint8_t* pairs = reinterpret_cast<uint8_t*>(shared);
  wait_for_previous();
  launch_dependents();  // not earlier: what runs beside this relies on what came before it
  const int64_t kept = __ldcg(state.totals);
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < sort_slots(width); i += kThreads) sorted.slots[i] = 0;
  }
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
    uint32_t* row = sorted.places + b * width;
    for (int n = threadIdx.x; n < width; n += kThreads) row[n] = pairs[n];
    __syncthreads();
  }
#endif
}

// A thread block for 32 neurons; each warp has a run of the blocks. Counts become places: a thread block learns from
// the slots of those before it, which the GPU starts first, where its own neurons' pairs begin.
__global__ void __launch_bounds__(kThreads) place_kernel(const int64_t* totals, const Sorted sorted, int width) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ uint32_t sums[kWarps][32];
  __shared__ int64_t warp_before[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, neuron = blockIdx.x * 32 + lane;
  const bool inside = neuron < width;
  launch_dependents();
  wait_for_previous();
  const int64_t kept = __ldcg(totals), share = (kept + kWarps - 1) / kWarps;
  const int64_t begin = warp * share, end = inside ? min(kept, begin + share) : 0;
  uint32_t* column = sorted.places + neuron;
  uint32_t sum = 0;
#pragma unroll 8
  for (int64_t b = begin; b < end; ++b) sum += __ldcg(column + b * width);
  sums[warp][lane] = sum;
  __syncthreads();
  uint32_t warps_before = 0, total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const uint32_t other = sums[w][lane];
    if (w < warp) warps_before += other;
    total += other;
  }
  const int64_t neurons_before = sum_before<int64_t>(total, lane);
  volatile uint64_t* slots = sorted.slots;
  if (threadIdx.x == 31) slots[blockIdx.x] = kFilled | static_cast<uint64_t>(neurons_before + total);
  int64_t before = 0;
  for (unsigned b = threadIdx.x; b < blockIdx.x; b += kThreads) {
    uint64_t seen;
    while (((seen = slots[b]) & kFilled) == 0) __nanosleep(20);
    before += static_cast<int64_t>(seen & ~kFilled);
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) before += __shfl_xor_sync(~0u, before, d);
  if (lane == 0) warp_before[warp] = before;
  __syncthreads();
  int64_t first = neurons_before;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) first += warp_before[w];
  if (warp == 0 && inside) sorted.first[neuron] = first;
  if (warp == 0 && neuron == width - 1) sorted.first[width] = first + total;
  uint32_t place = static_cast<uint32_t>(first) + warps_before;
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
#endif
}

}  // namespace

cudaError_t launch_sort(const Ffn& ffn, const State& state, const Sorted& sorted, int64_t blocks, const Device& device,
                        cudaStream_t stream) {
  const int count_grid = static_cast<int>(blocks < 4 * device.sm_count ? blocks : 4 * device.sm_count);
  const int row_bytes = (ffn.width + 15) / 16 * 16;
  TWELL_RETURN_IF_ERROR(
      launch_kernel(count_kernel, count_grid, kThreads, 1, row_bytes, stream, state, sorted, ffn.width));
  return launch_kernel(place_kernel, sort_slots(ffn.width), kThreads, 1, 0, stream, state.totals, sorted, ffn.width);
}

}  // namespace twell::sm90
