// How up's tiles are cut: all of a block's are equally wide, so that no thread block gets the narrow ones alone.
#pragma once

#include <type_traits>

#include "sm90/common/chunk.h"
#include "sm90/common/primitives.cuh"
#include "sm90/common/tiles.cuh"
#include "sm90/common/wgmma.cuh"

namespace twell::sm90::up {

using tiles::kBoxRows, tiles::kConsumerWarps, tiles::kDepth, tiles::kFetchers, tiles::kFetchRegisters, tiles::kLists,
    tiles::kMaxNeurons, tiles::kMaxStages, tiles::kMultiplyRegisters, tiles::kThreads, tiles::kTokenBytes,
    tiles::multiply_stage, tiles::stage_bytes;

constexpr int kRingBytes = 216 * 1024;
constexpr int kRowBytes = kDepth * 2;  // of a row in a step: kDepth 16-bit values, or twice as many of e4m3
constexpr int kUnit = 16;          // widths are multiples of it
constexpr int kTurnNeurons = 128;  // columns of relu(gate) in a stage: 256 bytes each
constexpr int kWarps = kThreads / 32;

struct Control {
  uint64_t full[kMaxStages], empty[kMaxStages], listed[kLists];
  uint16_t neurons[kLists][kMaxNeurons];
  Counts counts[kMaxBlocks];
  int first_tile[kMaxBlocks + 1];
  int costs[kWarps], widest[kWarps];
  int limit, tile;  // neurons; no tile is wider than `tile`
  bool turned;      // each block of tokens begins with another of its tiles
};
static_assert(offsetof(Control, neurons) % 16 == 0);
static_assert(sizeof(Control) >= 64 * kDepth * 2);  // products read up to 63 rows past the last stage

// Operands are of the type of activations, or e4m3 with scales (prefill_fp8.h).
template <typename E>
constexpr bool kScaled = sizeof(E) == 1;

// What the sums of a tile of e4m3 are multiplied by. One place is enough: the fetching warpgroup writes it with the
// tile's first stage of relu(gate), and in a ring of at most steps + 1 stages that one is free only once the tile
// before has given back its last.
struct ScaledControl : Control {
  alignas(16) float neuron_scales[kMaxNeurons];
  alignas(16) float token_scales[kBlockTokens];  // 0 past the last token
};
template <typename E>
using ControlOf = std::conditional_t<kScaled<E>, ScaledControl, Control>;
template <typename E>
constexpr int kShared = 1024 + kRingBytes + static_cast<int>(sizeof(ControlOf<E>));
static_assert(kShared<uint16_t> <= 227 * 1024 && kShared<uint8_t> <= 227 * 1024);

// A ring needs three stages, as two of relu(gate) may be held at once: so e4m3 has two steps at least, of which the
// second may be zeros.
template <typename E>
__device__ __forceinline__ int steps_of(int hidden) {
  constexpr int kValues = kRowBytes / static_cast<int>(sizeof(E));
  const int steps = (hidden + kValues - 1) / kValues;
  return kScaled<E> ? max(steps, 2) : steps;
}
template <typename E>
__device__ __forceinline__ int stages_of(const Control& c, int hidden) {
  const int stages = min(kMaxStages, kRingBytes / stage_bytes(c.tile));
  return kScaled<E> ? min(stages, steps_of<E>(hidden) + 1) : stages;
}

struct Item {
  int block, first, count, width;  // `count` of the block's active neurons, from its `first` on; at most its `width`
};

// A warp is done with a stage.
__device__ __forceinline__ void release(const Ring& ring, int stage) {
  if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + stage);
}

__device__ __forceinline__ int tiles_of(int neurons, int limit) {
  return (neurons + limit - 1) / limit;
}
__device__ __forceinline__ int width_of(int neurons, int limit) {
  const int tiles = max(tiles_of(neurons, limit), 1);
  return (neurons + tiles * kUnit - 1) / (tiles * kUnit) * kUnit;
}

// The limit that takes the least time, a warp for each, and each block's first tile. Counts are there.
__device__ __forceinline__ void make_plan(Control& c, int blocks, bool turned) {
  static_assert(kMaxNeurons - kUnit * (kWarps - 1) >= 64);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own_limit = kMaxNeurons - kUnit * warp;
  const int thread_blocks = gridDim.x;
  int tiles = 0, widest = 0;
  for (int b = lane; b < blocks; b += 32) {
    const int neurons = c.counts[b].all();
    tiles += tiles_of(neurons, own_limit);
    widest = max(widest, width_of(neurons, own_limit));
  }
  tiles = __reduce_add_sync(~0u, tiles);
  widest = __reduce_max_sync(~0u, widest);
  if (lane == 0) {
    c.costs[warp] = (tiles + thread_blocks - 1) / thread_blocks * (widest + 96);  // x's share does not shrink with the tile
    c.widest[warp] = widest;
  }
  __syncthreads();
  int best = 0;
  for (int w = 1; w < kWarps; ++w) {
    if (c.costs[w] < c.costs[best]) best = w;
  }
  if (warp == 0) {
    const int limit = kMaxNeurons - kUnit * best;
    if (lane == 0) c.limit = limit, c.tile = c.widest[best], c.turned = turned;
    int total = 0;
    for (int start = 0; start < blocks; start += 32) {
      const int own = start + lane < blocks ? tiles_of(c.counts[start + lane].all(), limit) : 0;
      int sum = own;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += other;
      }
      if (start + lane < blocks) c.first_tile[start + lane] = total + sum - own;
      total += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) c.first_tile[blocks] = total;
  }
  __syncthreads();
}

// Tiles come in ascending order: `block` is where the one before was. Called by whole warps.
__device__ __forceinline__ Item item_at(int tile, int block, int blocks, const Control& c) {
  for (;; block += 32) {
    const bool ends_later = c.first_tile[min(block + 1 + static_cast<int>(threadIdx.x % 32), blocks)] > tile;
    const uint32_t later = __ballot_sync(~0u, ends_later);
    if (later == 0) continue;
    block += __ffs(static_cast<int>(later)) - 1;
    break;
  }
  const int all = c.counts[block].all(), width = width_of(all, c.limit);
  // Tiles that both halves activate take longest: without a turn, the same thread block could get them of every block.
  int index = tile - c.first_tile[block];
  if (c.turned) index = (index + block) % tiles_of(all, c.limit);
  const int first = index * width;
  return {block, first, max(min(width, all - first), 0), width};
}

// Whether the tile's list ascends without a gap; it ascends within each class of neurons.
__device__ __forceinline__ bool are_neighbours(const uint16_t* list, const Item& item, const Counts& counts) {
  const int borders[2] = {counts.first_only - item.first, counts.first_only + counts.both - item.first};
  for (const int border : borders) {
    if (border > 0 && border < item.count) return false;
  }
  return item.count > 0 && item.count % kBoxRows == 0 && list[item.count - 1] - list[0] == item.count - 1;
}

}  // namespace twell::sm90::up
