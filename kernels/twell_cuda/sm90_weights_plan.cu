// Units of work for the weights' gradients: a neuron's pairs, or equal shares of them where they are many, in order of
// falling size. How many pairs are many follows from how many sums the scratch holds.

#include "sm90_launch.h"
#include "sm90_primitives.cuh"
#include "sm90_weights.h"
#include "sm90_workspace.h"

namespace twell::sm90 {
namespace {

constexpr int kThreads = 1024, kMantissa = 3;  // eight classes of size between powers of two
constexpr int kClasses = 32 * (1 << kMantissa) + 1;

// 0 for no pairs; the others by the leading bits of the number as float.
__host__ __device__ constexpr int class_of_power(int exponent) { return (exponent << kMantissa) + 1; }
constexpr int kFirstClass = class_of_power(7);
static_assert(kShortest == 1 << 7);

__device__ __forceinline__ int class_of(uint32_t pairs) {
  if (pairs == 0) return 0;
  return static_cast<int>(__float_as_uint(__uint2float_rz(pairs)) >> (23 - kMantissa)) - class_of_power(127) + 2;
}
// The fewest pairs of a class from kFirstClass on.
__device__ __forceinline__ uint64_t least_of(int c) {
  const int steps = c - 1, octave = steps >> kMantissa, eighth = steps & ((1 << kMantissa) - 1);
  return static_cast<uint64_t>((1 << kMantissa) + eighth) << (octave - kMantissa);
}

template <typename V>
__device__ __forceinline__ V sum_until(V value, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const V other = __shfl_up_sync(~0u, value, d);
    if (lane >= d) value += other;
  }
  return value;
}

// The lowest class to split at its least size: with that all sums have a place.
__device__ int find_threshold(const int* counts, int slots, int lane) {
  uint64_t pairs = 0;
  int neurons = 0, threshold = kClasses;
  for (int top = kClasses - 1; top >= kFirstClass; top -= 32) {
    const int c = top - lane, count = c >= kFirstClass ? counts[c] : 0;
    const uint64_t most = c >= kFirstClass ? count * least_of(c + 1) : 0;
    const uint64_t pairs_until = pairs + sum_until(most, lane);
    const int neurons_until = neurons + sum_until(count, lane);
    const uint64_t least = c >= kFirstClass ? least_of(c) : 0;
    const bool fits = c >= kFirstClass && pairs_until + neurons_until * least <= slots * least;
    const int fitting = __popc(__ballot_sync(~0u, fits));  // the first lanes
    threshold -= fitting;
    if (fitting < 32) break;
    pairs = __shfl_sync(~0u, pairs_until, 31);
    neurons = __shfl_sync(~0u, neurons_until, 31);
  }
  return threshold;
}

__global__ void __launch_bounds__(kThreads) plan_kernel(const int64_t* first, const Scratch scratch, int width) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ int counts[kClasses], starts[kClasses], threshold, slots, splits;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  launch_dependents();
  wait_for_previous();
  if (threadIdx.x < kClasses) counts[threadIdx.x] = 0;
  if (threadIdx.x == 0) slots = splits = 0;
  __syncthreads();
  const auto pairs_of = [&](int n) { return static_cast<uint32_t>(__ldcg(first + n + 1) - __ldcg(first + n)); };
#pragma unroll 4
  for (int n = threadIdx.x; n < width; n += kThreads) atomicAdd(counts + class_of(pairs_of(n)), 1);
  __syncthreads();
  if (warp == 0) {
    const int lowest = find_threshold(counts, scratch.slots, lane);
    if (lane == 0) threshold = lowest;
    int before = 0;
    for (int top = lowest - 1; top >= 0; top -= 32) {
      const int c = top - lane, count = c >= 0 ? counts[c] : 0, until = before + sum_until(count, lane);
      if (c >= 0) starts[c] = until - count;
      before = __shfl_sync(~0u, until, 31);
    }
  }
  __syncthreads();
  const uint32_t longest = threshold < kClasses ? static_cast<uint32_t>(least_of(threshold)) : ~0u;
  for (int n = threadIdx.x; n < width; n += kThreads) {
    const uint32_t pairs = pairs_of(n);
    if (class_of(pairs) < threshold) continue;
    const int units = static_cast<int>((pairs - 1) / longest + 1), slot = atomicAdd(&slots, units);
    const uint32_t share = (pairs - 1) / units + 1, begin = static_cast<uint32_t>(__ldcg(first + n));
    scratch.splits[atomicAdd(&splits, 1)] = {n, slot, units};
    for (int i = 0; i < units; ++i) {
      scratch.units[slot + i] = {begin + i * share, min(share, pairs - i * share), n, slot + i};
    }
  }
  __syncthreads();
  for (int base = warp * 32; base < width; base += kThreads) {
    const int n = base + lane;
    const uint32_t pairs = n < width ? pairs_of(n) : 0;
    const int c = n < width ? class_of(pairs) : kClasses;
    const bool whole = c < threshold;
    const uint32_t peers = __match_any_sync(~0u, whole ? c : kClasses);
    const int leader = __ffs(peers) - 1, rank = __popc(peers & ((1u << lane) - 1));
    int start = 0;
    if (whole && lane == leader) start = atomicAdd(starts + c, __popc(peers));
    start = __shfl_sync(~0u, start, leader);
    if (whole) scratch.units[slots + start + rank] = {static_cast<uint32_t>(__ldcg(first + n)), pairs, n, -1};
  }
  if (threadIdx.x == 0) *scratch.plan = {0, slots + width - splits, splits};
#endif
}

}  // namespace

int64_t place_scratch(const Ffn& ffn, int64_t pairs, void* partials, Scratch* scratch) {
  constexpr int64_t kSumBytes = int64_t{22} << 20;
  scratch->matrices = ffn.up == nullptr ? 2 : 3;
  const int64_t slot_bytes = int64_t{scratch->matrices} * ffn.hidden * 4;
  const int64_t useful = 2 * pairs / kShortest, room = kSumBytes / slot_bytes;
  const int64_t slots = useful < room ? useful : room;
  scratch->slots = static_cast<int>(slots);
  Cutter cutter(partials);
  cutter.cut(scratch->plan, sizeof(Plan));
  cutter.cut(scratch->units, (ffn.width + slots) * static_cast<int64_t>(sizeof(Unit)));
  cutter.cut(scratch->splits, slots * static_cast<int64_t>(sizeof(Split)));
  cutter.cut(scratch->biases, slots * 2 * 4);
  cutter.cut(scratch->sums, slots * slot_bytes);
  return cutter.used();
}

int64_t weights_partial_bytes(const Ffn& ffn, int64_t pairs) {
  Scratch scratch;
  return place_scratch(ffn, pairs, nullptr, &scratch);
}

cudaError_t launch_plan(const int64_t* first, const Scratch& scratch, int width, cudaStream_t stream) {
  return launch_kernel(plan_kernel, 1, kThreads, 1, 0, stream, first, scratch, width);
}

}  // namespace twell::sm90
