// What the weights' gradients from columns multiply: which neurons are steady, and each run's lists.

#include "sm90/common/launch.h"
#include "sm90/common/prefix_sum.cuh"
#include "sm90/common/primitives.cuh"
#include "sm90/training/weights_columns.h"

namespace twell::sm90 {
namespace {

constexpr int kSteadyWarps = 4;

__device__ __forceinline__ int steps_of(const Active& active, int run) {
  return 2 * min(kRunBlocks, active.blocks - run * kRunBlocks);
}

// A warp for a word of 32 neurons. Each lane is a run of tokens, then a neuron.
__global__ void __launch_bounds__(kSteadyWarps * 32)
    steady_kernel(const Active active, int width, int runs, uint32_t* steady_words) {
#if defined(TWELL_SM90_DEVICE)
  wait_for_previous();
  launch_dependents();
  const int lane = threadIdx.x % 32, word = static_cast<int>(blockIdx.x) * kSteadyWarps + threadIdx.x / 32;
  if (word >= active.words) return;
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
  const uint32_t steady = __ballot_sync(~0u, word * 32 + lane < width && 2 * active_runs > runs);
  if (lane == 0) steady_words[word] = steady;
#endif
}

// A thread block for a run and a range, a thread for each neuron. The range's neurons it finds for itself.
__global__ void __launch_bounds__(kRangeNeurons)
    list_kernel(const Active active, int width, int runs, const WeightScratch scratch) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ int warp_counts[kRangeNeurons / 32];
  __shared__ uint16_t neurons[kRangeNeurons];
  launch_dependents();
  wait_for_previous();
  const int index = static_cast<int>(blockIdx.x) / runs, run = static_cast<int>(blockIdx.x) % runs;
  const int place = threadIdx.x, lane = place % 32, warp = place / 32;

  const int share = (active.words + kRangeNeurons - 1) / kRangeNeurons;  // words of a thread
  const int begin = min(active.words, place * share), end = min(active.words, begin + share);
  int steady_neurons = 0;
  for (int word = begin; word < end; ++word) steady_neurons += __popc(__ldcg(scratch.steady_words + word));
  const ThreadSums sums = sum_threads<kRangeNeurons>(steady_neurons, warp, lane, warp_counts, 1);
  const int others = width - sums.all;
  if (blockIdx.x == 0) {
    if (place == 0) *scratch.order = {others, 0};
    for (int part = place; part < scratch.piece_parts; part += kRangeNeurons) scratch.pieces_added[part] = 0;
  }
  const Ranges ranges(others, width);
  if (index >= ranges.count) return;
  const Range range = ranges.at(index);
  // Where the thread's next neuron of the range's kind comes, counted from the range's first.
  int next = range.steady ? others + sums.before - range.first : begin * 32 - sums.before - range.first;
  for (int word = begin; word < end; ++word) {
    const uint32_t steady = __ldcg(scratch.steady_words + word);
    uint32_t rest = range.steady ? steady : ~steady;  // bits beyond the last neuron are beyond the range, too
    for (; rest != 0 && next < range.size; rest &= rest - 1, ++next) {
      if (next >= 0) neurons[next] = static_cast<uint16_t>(word * 32 + __ffs(rest) - 1);
    }
  }
  __syncthreads();

  const bool inside = place < range.size;
  const int neuron = inside ? neurons[place] : 0, steps = steps_of(active, run);
  if (inside && run == 0) scratch.neurons[range.first + place] = static_cast<uint16_t>(neuron);
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
  RunList& list = scratch.lists[blockIdx.x];
  if (wanted) {
    list.entries[before] = halves << 16 | place;
    list.neurons[before] = static_cast<uint16_t>(neuron);
  }
  if (place == 0) list.count = all;
#endif
}

}  // namespace

cudaError_t launch_weights_lists(const Ffn& ffn, const Chunk& chunk, const WeightScratch& scratch,
                                 cudaStream_t stream) {
  const Active& active = chunk.active;
  const int runs = count_runs(active.blocks), steady_blocks = (active.words + kSteadyWarps - 1) / kSteadyWarps;
  // Multiprocessors are not to divide their memory anew for these, as down_proj may be transposed beside them.
  TWELL_RETURN_IF_ERROR(launch_with_carveout(100, steady_kernel, steady_blocks, kSteadyWarps * 32, 1, 0, stream, active,
                                             ffn.width, runs, scratch.steady_words));
  return launch_with_carveout(100, list_kernel, runs * most_ranges(ffn), kRangeNeurons, 1, 0, stream, active, ffn.width,
                              runs, scratch);
}

}  // namespace twell::sm90
