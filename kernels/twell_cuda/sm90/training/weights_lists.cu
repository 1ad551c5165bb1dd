// What the weights' gradients from columns multiply: which neurons are steady, and each run's lists.

#include "sm90/common/launch.h"
#include "sm90/common/prefix_sum.cuh"
#include "sm90/common/primitives.cuh"
#include "sm90/training/weights_columns.h"

namespace twell::sm90 {
namespace {

constexpr int kOrderThreads = 1024, kMostWords = 65'536 / 32;

__device__ __forceinline__ int steps_of(const Active& active, int run) {
  return 2 * min(kRunBlocks, active.blocks - run * kRunBlocks);
}

// One thread block. A warp takes a word of 32 neurons, each lane a run of tokens; then each lane is a neuron.
__global__ void __launch_bounds__(kOrderThreads)
    order_kernel(const Active active, int width, int runs, Order* order, uint16_t* neurons) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ uint32_t steady_words[kMostWords];
  __shared__ int warp_sums[kOrderThreads / 32];
  wait_for_previous();
  launch_dependents();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int word = warp; word < active.words; word += kOrderThreads / 32) {
    int active_runs = 0;
    for (int first = 0; first < runs; first += 32) {
      const int run = first + lane, steps = run < runs ? steps_of(active, run) : 0;
      const uint32_t* const masks = active.masks + static_cast<int64_t>(run) * kRunSteps * active.words + word;
      uint32_t bits = 0;
#pragma unroll
      for (int step = 0; step < kRunSteps; ++step) {
        if (step < steps) bits |= __ldcg(masks + static_cast<int64_t>(step) * active.words);
      }
#pragma unroll
      for (int bit = 0; bit < 32; ++bit) {
        const int count = __popc(__ballot_sync(~0u, bits >> bit & 1));
        if (lane == bit) active_runs += count;
      }
    }
    const bool steady = word * 32 + lane < width && 2 * active_runs > runs;
    const uint32_t all_steady = __ballot_sync(~0u, steady);
    if (lane == 0) steady_words[word] = all_steady;
  }
  __syncthreads();
  const int share = (active.words + kOrderThreads - 1) / kOrderThreads, begin = threadIdx.x * share;
  const int end = min(active.words, begin + share);
  int count = 0;
  for (int word = begin; word < end; ++word) count += __popc(steady_words[word]);
  const ThreadSums sums = sum_threads<kOrderThreads>(count, warp, lane, warp_sums, 1);
  const int others = width - sums.all;
  int next_steady = others + sums.before, next_other = begin * 32 - sums.before;
  for (int word = begin; word < end; ++word) {
    const uint32_t steady = steady_words[word];
    for (int neuron = word * 32; neuron < min(word * 32 + 32, width); ++neuron) {
      neurons[steady >> neuron % 32 & 1 ? next_steady++ : next_other++] = static_cast<uint16_t>(neuron);
    }
  }
  if (threadIdx.x == 0) *order = {others, 0};
#endif
}

// A thread block for a run and a range, a thread for each neuron.
__global__ void __launch_bounds__(kRangeNeurons)
    list_kernel(const Active active, int width, int runs, const Order* order, const uint16_t* neurons, RunList* lists) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ int warp_counts[kRangeNeurons / 32];
  launch_dependents();
  wait_for_previous();
  const int index = static_cast<int>(blockIdx.x) / runs, run = static_cast<int>(blockIdx.x) % runs;
  const Ranges ranges(__ldcg(&order->others), width);
  if (index >= ranges.count) return;
  const Range range = ranges.at(index);
  const int place = threadIdx.x, lane = place % 32, warp = place / 32, steps = steps_of(active, run);
  const bool inside = place < range.size;
  const int neuron = inside ? __ldcg(neurons + range.first + place) : 0;
  const uint32_t* const masks = active.masks + static_cast<int64_t>(run) * kRunSteps * active.words + neuron / 32;
  uint32_t halves = 0;
#pragma unroll
  for (int step = 0; step < kRunSteps; ++step) {
    if (inside && step < steps) {
      halves |= (__ldcg(masks + static_cast<int64_t>(step) * active.words) >> neuron % 32 & 1) << step;
    }
  }
  const bool wanted = inside && (range.steady || halves != 0);
  const uint32_t listed = __ballot_sync(~0u, wanted);
  if (lane == 0) warp_counts[warp] = __popc(listed);
  __syncthreads();
  int before = __popc(listed & ((1u << lane) - 1)), all = 0;
#pragma unroll
  for (int w = 0; w < kRangeNeurons / 32; ++w) {
    before += w < warp ? warp_counts[w] : 0;
    all += warp_counts[w];
  }
  RunList& list = lists[blockIdx.x];
  if (wanted) {
    list.entries[before] = halves << 16 | place;
    list.neurons[before] = static_cast<uint16_t>(neuron);
  }
  if (place == 0) list.count = all;
#endif
}

}  // namespace

// Multiprocessors are not to divide their memory anew for these, as down_proj may be transposed beside them.

cudaError_t launch_weights_order(const Ffn& ffn, const Chunk& chunk, const WeightScratch& scratch,
                                 cudaStream_t stream) {
  return launch_with_carveout(100, order_kernel, 1, kOrderThreads, 1, 0, stream, chunk.active, ffn.width,
                              count_runs(chunk.active.blocks), scratch.order, scratch.neurons);
}

cudaError_t launch_weights_lists(const Ffn& ffn, const Chunk& chunk, const WeightScratch& scratch,
                                 cudaStream_t stream) {
  const int runs = count_runs(chunk.active.blocks);
  return launch_with_carveout(100, list_kernel, runs * most_ranges(ffn), kRangeNeurons, 1, 0, stream, chunk.active,
                              ffn.width, runs, scratch.order, scratch.neurons, scratch.lists);
}

}  // namespace twell::sm90
