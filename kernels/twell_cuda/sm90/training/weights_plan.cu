// Which neurons are heavy; units of work for the others' weights' gradients: a neuron's pairs, or equal shares of them
// where they are many, in order of falling size. How many are many follows from how many sums the scratch holds.

#include "sm90/common/launch.h"
#include "sm90/common/prefix_sum.cuh"
#include "sm90/common/workspace.h"
#include "sm90/training/weights.h"

namespace twell::sm90 {
namespace {

constexpr int kThreads = 1024, kMantissa = 4;  // sixteen classes of size between powers of two
constexpr int kClasses = 32 * (1 << kMantissa) + 1;

// Heavy neurons pay where a tile of them has more pairs a token than this: there, its product with all tokens' rows
// takes as long as a row for each pair.
constexpr float kTilePairs = 2.5f;
constexpr int kMostTiles = 16;
// Room for their rows: so many bytes for each pair that the state has room for, but for the first of a token. Where
// tokens have so few active neurons hardly one is heavy; each 16 more make a tile of them, and chunks that were not
// kept take as much room anyway where a token has 64.
constexpr int kRowBytes = 48, kLightPairs = 24;

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
  const int steps = c - 1, octave = steps >> kMantissa, part = steps & ((1 << kMantissa) - 1);
  return static_cast<uint64_t>((1 << kMantissa) + part) << (octave - kMantissa);
}

// The lowest class of heavy neurons, of those below `end`: the one that saves most; `end`: none.
__device__ int find_heavy(const int* counts, const uint32_t* class_pairs, const Heavy& heavy, int end, int lane) {
  const int room = heavy.rows();
  int64_t pairs = 0, best_gain = heavy.tile_pairs / 4;  // the launches take time too
  int neurons = 0, best = end;
  for (int top = end - 1; top > 0 && neurons < room; top -= 32) {
    const int c = top - lane;
    const int neurons_until = neurons + sum_until(c > 0 ? counts[c] : 0, lane);
    const int64_t pairs_until = pairs + sum_until(c > 0 ? int64_t{class_pairs[c]} : 0, lane);
    const int64_t gain = pairs_until - (neurons_until + kHeavyNeurons - 1) / kHeavyNeurons * heavy.tile_pairs;
    if (c > 0 && neurons_until <= room && gain > best_gain) best_gain = gain, best = c;
    neurons = __shfl_sync(~0u, neurons_until, 31);
    pairs = __shfl_sync(~0u, pairs_until, 31);
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    const int64_t gain = __shfl_xor_sync(~0u, best_gain, d);
    const int other = __shfl_xor_sync(~0u, best, d);
    if (gain > best_gain || (gain == best_gain && other < best)) best_gain = gain, best = other;
  }
  return best;
}

// The lowest class to split at its least size, of those below `end`: with that all sums have a place.
__device__ int find_threshold(const int* counts, int slots, int end, int lane) {
  uint64_t pairs = 0;
  int neurons = 0, threshold = end;
  for (int top = end - 1; top >= kFirstClass; top -= 32) {
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

__global__ void __launch_bounds__(kThreads)
    plan_kernel(const int64_t* first, const Scratch scratch, int width, int64_t tokens) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ int counts[kClasses], starts[kClasses], threshold, heavy_from, slots, splits, heavies;
  __shared__ uint32_t class_pairs[kClasses];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  launch_dependents();
  wait_for_previous();
  if (threadIdx.x < kClasses) counts[threadIdx.x] = class_pairs[threadIdx.x] = 0;
  if (threadIdx.x == 0) slots = splits = heavies = 0;
  __syncthreads();
  const auto pairs_of = [&](int n) { return static_cast<uint32_t>(__ldcg(first + n + 1) - __ldcg(first + n)); };
#pragma unroll 4
  for (int n = threadIdx.x; n < width; n += kThreads) {
    const uint32_t pairs = pairs_of(n);
    atomicAdd(counts + class_of(pairs), 1);
    atomicAdd(class_pairs + class_of(pairs), pairs);
  }
  __syncthreads();
  if (warp == 0) {
    const int end = class_of(static_cast<uint32_t>(tokens)) + 1;
    const int heavy = find_heavy(counts, class_pairs, scratch.heavy, end, lane);
    const int lowest = find_threshold(counts, scratch.slots, heavy, lane);
    if (lane == 0) threshold = lowest, heavy_from = heavy;
    int before = 0;
    for (int top = lowest - 1; top >= 0; top -= 32) {
      const int c = top - lane, count = c >= 0 ? counts[c] : 0, until = before + sum_until(count, lane);
      if (c >= 0) starts[c] = until - count;
      before = __shfl_sync(~0u, until, 31);
    }
  }
  __syncthreads();
  // Below kFirstClass only heavy neurons are left, and nothing is split.
  const uint32_t longest = threshold < kClasses ? static_cast<uint32_t>(least_of(max(threshold, kFirstClass))) : ~0u;
  for (int n = threadIdx.x; n < width; n += kThreads) {
    const uint32_t pairs = pairs_of(n);
    if (class_of(pairs) < threshold) continue;
    if (class_of(pairs) >= heavy_from) {
      scratch.heavy.neurons[atomicAdd(&heavies, 1)] = n;
      continue;
    }
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
  if (threadIdx.x == 0) *scratch.plan = {0, 0, slots + width - splits - heavies, splits, heavies};
#endif
}

}  // namespace

int64_t place_scratch(const Ffn& ffn, int64_t pairs, void* partials, Scratch* scratch) {
  constexpr int64_t kSumBytes = int64_t{22} << 20;
  scratch->matrices = !ffn.gated() ? 2 : 3;
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
  const int64_t row_tokens = count_blocks(ffn) * kBlockTokens;  // products are of whole blocks
  const int64_t row_bytes = row_tokens * 2;
  Heavy& heavy = scratch->heavy;
  const int64_t room_pairs = std::max(pairs - kLightPairs * ffn.tokens, int64_t{0});
  const int64_t tiles = kRowBytes * room_pairs / (row_bytes * kHeavyNeurons * scratch->matrices);
  heavy.tiles = static_cast<int>(std::min(tiles, int64_t{kMostTiles}));
  heavy.tile_pairs = static_cast<int64_t>(kTilePairs * row_tokens * scratch->matrices / 3);
  cutter.cut(heavy.neurons, int64_t{heavy.rows()} * 4);
  for (int m = 0; m < 3; ++m) {
    heavy.factors[m] = nullptr;
    if (m < scratch->matrices) cutter.cut(heavy.factors[m], heavy.rows() * row_bytes);
  }
  return cutter.used();
}

int64_t weights_partial_bytes(const Ffn& ffn, int64_t pairs) {
  Scratch scratch;
  return place_scratch(ffn, pairs, nullptr, &scratch);
}

cudaError_t launch_plan(const Ffn& ffn, const int64_t* first, const Scratch& scratch, cudaStream_t stream) {
  return launch_kernel(plan_kernel, 1, kThreads, 1, 0, stream, first, scratch, ffn.width, ffn.tokens);
}

}  // namespace twell::sm90
