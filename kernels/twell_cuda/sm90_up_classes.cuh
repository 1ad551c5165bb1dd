// How up's tiles are cut where each is of one class of neurons: those that both halves of a block's tokens activate, and
// those of one half alone, for which only that half's tokens are fetched. A class's tiles in a block are equally wide.
#pragma once

#include "sm90_up_tiles.cuh"

namespace twell::sm90::up_classes {

using tiles::kBoxRows, tiles::kConsumerWarps, tiles::kDepth, tiles::kFetchers, tiles::kFetchRegisters, tiles::kLists,
    tiles::kMaxNeurons, tiles::kMaxStages, tiles::kMultiplyRegisters, tiles::kThreads, tiles::kTokenBytes,
    tiles::multiply_stage, tiles::stage_bytes;
using up::gather, up::kRingBytes, up::kTurnNeurons, up::kUnit, up::kWarps, up::release;

constexpr int kHalfBytes = kTokenBytes / 2;
constexpr int kListRoom = kMaxNeurons + 8;  // a list is copied from a multiple of 16 bytes on
constexpr int kBoth = 2;                    // an Item's half
constexpr int kLimits = kWarps;             // widths that are tried for each class

// What a tile costs beside its neurons, in their units: its tokens, and its end.
constexpr int kBothCost = 144, kOneCost = 80;

// a / b, exact below 2^20: the quotient of a + 1/2 is further from a whole number than the error.
__device__ __forceinline__ int divide(int a, int b) {
  return __float2int_rd(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
}
__device__ __forceinline__ int tiles_of(int neurons, int limit) { return divide(neurons + limit - 1, limit); }
__device__ __forceinline__ int width_of(int neurons, int limit) {
  const int units = max(tiles_of(neurons, limit), 1) * kUnit;
  return divide(neurons + units - 1, units) * kUnit;
}

// A tile: its kind and which of that kind's.
struct Place {
  int kind, index;
};

// Who gets which tiles. Those of both halves are dealt round by round. Where the last round has only `over` of them,
// the thread blocks without one begin with `ahead` of the others; then these are dealt round by round, too, beginning
// with the same thread blocks.
struct Deal {
  int one, thread_blocks, rounds, over, ahead;

  __device__ __forceinline__ bool has(const Place& place) const { return place.kind == 0 || place.index < one; }
  __device__ __forceinline__ int cost(const int (&cost)[2]) const {
    const int under = thread_blocks - over, left = one - under * ahead;
    const int full = over > 0 ? (rounds + 1) * cost[0] : 0;
    if (left <= 0) return max(full, rounds * cost[0] + divide(one + under - 1, under) * cost[1]);
    const int more = divide(left, thread_blocks), rest = left - more * thread_blocks;
    const int with = full + (rest > under ? more + 1 : more) * cost[1];
    return max(over > 0 ? with : 0, rounds * cost[0] + (ahead + more + (rest > 0)) * cost[1]);
  }
};

__device__ __forceinline__ Deal deal_of(int both, int one, const int (&cost)[2], int thread_blocks) {
  const int rounds = divide(both, thread_blocks);
  return {one, thread_blocks, rounds, both - rounds * thread_blocks, divide(cost[0], cost[1])};
}

// Tiles by kind: 0 of both halves, 1 of one.
struct Control {
  uint64_t full[kMaxStages], empty[kMaxStages], listed[kLists];
  uint16_t neurons[kLists][kListRoom];
  Counts counts[kMaxBlocks];
  int first_tile[2][kMaxBlocks + 1];
  int tiles[2][kLimits], widest[2][kLimits];
  uint32_t best[kWarps];
  Deal deal;
  int limit[2], tile;  // neurons; no tile is wider than `tile`
};
static_assert(offsetof(Control, neurons) % 16 == 0 && kListRoom % 8 == 0);
static_assert(sizeof(Control) >= 64 * kDepth * 2);  // products read up to 63 rows past the last stage
constexpr int kShared = 1024 + kRingBytes + sizeof(Control);
static_assert(kShared <= 227 * 1024);

struct Item {
  int block, first, count, width;  // `count` of the block's active neurons, from its `first` on; at most its `width`
  int half;                        // whose tokens activate them: 0, 1 or kBoth
  __device__ __forceinline__ int shift() const { return first % 8; }  // of its list
};

// The n-th tile of a thread block, past the last where there is none.
__device__ __forceinline__ Place place_of(int n, int thread_block, const Deal& d) {
  const bool is_over = thread_block < d.over;
  const int both = d.rounds + is_over;
  if (n < both) return {0, n * d.thread_blocks + thread_block};
  n -= both;
  const int under = d.thread_blocks - d.over;
  if (is_over) return {1, under * d.ahead + n * d.thread_blocks + under + thread_block};
  const int at = thread_block - d.over;
  return {1, n < d.ahead ? n * under + at : under * d.ahead + (n - d.ahead) * d.thread_blocks + at};
}

__device__ __forceinline__ int count_tiles(const Counts& counts, int kind, int limit) {
  return kind == 0 ? tiles_of(counts.both, limit)
                   : tiles_of(counts.first_only, limit) + tiles_of(counts.second_only, limit);
}

// The limits that take the least time, of all pairs, and each block's first tiles. Counts are there.
__device__ __forceinline__ void make_plan(Control& c, int blocks) {
  static_assert(kMaxNeurons - kUnit * (kLimits - 1) >= 64 && kLimits * kLimits <= 256 && kLimits * kLimits <= kThreads);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own_limit = kMaxNeurons - kUnit * warp;
  int both = 0, one = 0, tiles[2] = {0, 0}, widest[2] = {0, 0};
  for (int b = lane; b < blocks; b += 32) {
    const Counts counts = c.counts[b];
    both += counts.both, one += counts.first_only + counts.second_only;
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) tiles[kind] += count_tiles(counts, kind, own_limit);
    widest[0] = max(widest[0], width_of(counts.both, own_limit));
    widest[1] = max(widest[1], max(width_of(counts.first_only, own_limit), width_of(counts.second_only, own_limit)));
  }
  both = __reduce_add_sync(~0u, both), one = __reduce_add_sync(~0u, one);
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
    tiles[kind] = __reduce_add_sync(~0u, tiles[kind]), widest[kind] = __reduce_max_sync(~0u, widest[kind]);
    if (lane == 0) c.tiles[kind][warp] = tiles[kind], c.widest[kind][warp] = widest[kind];
  }
  __syncthreads();
  const auto cost_of = [&](int kind, int limit) {
    return divide(kind == 0 ? both : one, max(c.tiles[kind][limit], 1)) + (kind == 0 ? kBothCost : kOneCost);
  };
  uint32_t key = ~0u;
  if (threadIdx.x < kLimits * kLimits) {
    const int pair[2] = {static_cast<int>(threadIdx.x / kLimits), static_cast<int>(threadIdx.x % kLimits)};
    const int cost[2] = {cost_of(0, pair[0]), cost_of(1, pair[1])};
    const Deal deal = deal_of(c.tiles[0][pair[0]], c.tiles[1][pair[1]], cost, gridDim.x);
    key = static_cast<uint32_t>(deal.cost(cost)) * 256 + threadIdx.x;
  }
  key = __reduce_min_sync(~0u, key);
  if (lane == 0) c.best[warp] = key;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) key = min(key, c.best[w]);
  const int pair[2] = {static_cast<int>(key % 256 / kLimits), static_cast<int>(key % 256 % kLimits)};
  if (threadIdx.x == 0) {
    const int cost[2] = {cost_of(0, pair[0]), cost_of(1, pair[1])};
    c.tile = max(c.widest[0][pair[0]], c.widest[1][pair[1]]);
    c.deal = deal_of(c.tiles[0][pair[0]], c.tiles[1][pair[1]], cost, gridDim.x);
  }
  if (warp < 2) {
    const int kind = warp, limit = kMaxNeurons - kUnit * pair[kind];
    if (lane == 0) c.limit[kind] = limit;
    int total = 0;
    for (int start = 0; start < blocks; start += 32) {
      const int own = start + lane < blocks ? count_tiles(c.counts[start + lane], kind, limit) : 0;
      int sum = own;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += other;
      }
      if (start + lane < blocks) c.first_tile[kind][start + lane] = total + sum - own;
      total += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) c.first_tile[kind][blocks] = total;
  }
  __syncthreads();
}

// Within a kind tiles come in ascending order: `before` is the item before. Called by whole warps.
__device__ __forceinline__ Item item_at(const Place& place, int before_kind, int before_block, int blocks,
                                        const Control& c) {
  int block = place.kind == before_kind ? before_block : 0;
  const int* first_tile = c.first_tile[place.kind];
  for (;; block += 32) {
    const bool ends_later = first_tile[min(block + 1 + static_cast<int>(threadIdx.x % 32), blocks)] > place.index;
    const uint32_t later = __ballot_sync(~0u, ends_later);
    if (later == 0) continue;
    block += __ffs(static_cast<int>(later)) - 1;
    break;
  }
  const Counts counts = c.counts[block];
  const int limit = c.limit[place.kind];
  int index = place.index - first_tile[block], half = kBoth, start = counts.first_only, all = counts.both;
  if (place.kind == 1) {
    const int of_first = tiles_of(counts.first_only, limit);
    half = index >= of_first;
    if (half == 1) index -= of_first;
    start = half == 0 ? 0 : counts.first_only + counts.both;
    all = half == 0 ? counts.first_only : counts.second_only;
  }
  const int width = width_of(all, limit), first = index * width;
  return {block, start + first, max(min(width, all - first), 0), width, half};
}

}  // namespace twell::sm90::up_classes
