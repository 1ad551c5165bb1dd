// How up's tiles are cut: all of a block's are equally wide, so that no thread block gets the narrow ones alone.
#pragma once

#include "sm90_call.h"
#include "sm90_primitives.cuh"
#include "sm90_tiles.cuh"
#include "sm90_up.h"

namespace twell::sm90::up {

using tiles::Item, tiles::are_neighbours, tiles::stage_bytes;
using tiles::kBoxRows, tiles::kConsumerWarps, tiles::kDepth, tiles::kFetchers, tiles::kLists, tiles::kMaxNeurons,
    tiles::kMaxStages, tiles::kThreads, tiles::kTokenBytes;

constexpr int kFetchRegisters = 104, kMultiplyRegisters = 200;
static_assert(check_registers(kFetchRegisters, kMultiplyRegisters));

constexpr int kRingBytes = 216 * 1024;
constexpr int kUnit = 16;          // widths are multiples of it
constexpr int kTurnNeurons = 128;  // columns of relu(gate) in a stage: 256 bytes each
constexpr int kWarps = kThreads / 32;

struct Control {
  uint64_t full[kMaxStages], empty[kMaxStages], listed[kLists];
  uint16_t neurons[kLists][kMaxNeurons];
  Item items[kLists];  // those that neurons[] belong to; the last has none
  Counts counts[kMaxBlocks];
  int first_item[kMaxBlocks + 1], first_both[kMaxBlocks + 1];  // of all tiles, of those that both halves activate
  int costs[kWarps], widest[kWarps];
  int limit, tile;  // neurons; no tile is wider than `tile`
  UpOrder order;
};
static_assert(offsetof(Control, neurons) % 16 == 0);
static_assert(sizeof(Control) >= 64 * kDepth * 2);  // products read up to 63 rows past the last stage
constexpr int kShared = 1024 + kRingBytes + sizeof(Control);
static_assert(kShared <= 227 * 1024);

// A warp is done with a stage.
__device__ __forceinline__ void release(const Ring& ring, int stage) {
  if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + stage);
}

__device__ __forceinline__ int tiles_of(int neurons, int limit) { return (neurons + limit - 1) / limit; }
// As there are no more tiles than that, none of them is empty.
__device__ __forceinline__ int width_of(int neurons, int limit) {
  const int tiles = max(tiles_of(neurons, limit), 1);
  return (neurons + tiles * kUnit - 1) / (tiles * kUnit) * kUnit;
}

// How a block's neurons are cut. Both halves activate tiles [both_begin, both_end), told apart where they are dealt.
struct Cut {
  int tiles, width, both_begin, both_end;
};
__device__ __forceinline__ Cut cut_of(const Counts& counts, int limit, UpOrder order) {
  Cut cut{tiles_of(counts.all(), limit), width_of(counts.all(), limit), 0, 0};
  if (order == UpOrder::kDealt && cut.tiles > 0) {
    cut.both_begin = counts.first_only / cut.width;
    cut.both_end = (counts.first_only + counts.both + cut.width - 1) / cut.width;
  }
  return cut;
}

// The limit that takes the least time, a warp for each, and each block's first tile. Counts are there.
__device__ __forceinline__ void make_plan(Control& c, int blocks, UpOrder order) {
  static_assert(kMaxNeurons - kUnit * (kWarps - 1) >= 64);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own_limit = kMaxNeurons - kUnit * warp;
  int items = 0, widest = 0;
  for (int b = lane; b < blocks; b += 32) {
    const int neurons = c.counts[b].all();
    items += tiles_of(neurons, own_limit);
    widest = max(widest, width_of(neurons, own_limit));
  }
  items = __reduce_add_sync(~0u, items);
  widest = __reduce_max_sync(~0u, widest);
  if (lane == 0) {
    c.costs[warp] = (items + gridDim.x - 1) / gridDim.x * (widest + 96);  // x's share does not shrink with the tile
    c.widest[warp] = widest;
  }
  __syncthreads();
  int best = 0;
  for (int w = 1; w < kWarps; ++w) {
    if (c.costs[w] < c.costs[best]) best = w;
  }
  if (warp < 2) {
    const int limit = kMaxNeurons - kUnit * best;
    if (threadIdx.x == 0) c.limit = limit, c.tile = c.widest[best], c.order = order;
    int* firsts = warp == 0 ? c.first_item : c.first_both;
    int total = 0;
    for (int start = 0; start < blocks; start += 32) {
      int own = 0;
      if (start + lane < blocks) {
        const Cut cut = cut_of(c.counts[start + lane], limit, order);
        own = warp == 0 ? cut.tiles : cut.both_end - cut.both_begin;
      }
      int sum = own;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += other;
      }
      if (start + lane < blocks) firsts[start + lane] = total + sum - own;
      total += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) firsts[blocks] = total;
  }
  __syncthreads();
}

// The block that holds a tile of some kind, `block` or a later one; `first(b)` is b's first. Called by whole warps.
template <typename First>
__device__ __forceinline__ int block_of(int tile, int block, int blocks, const First& first) {
  for (;; block += 32) {
    const bool ends_later = first(min(block + 1 + static_cast<int>(threadIdx.x % 32), blocks)) > tile;
    const uint32_t later = __ballot_sync(~0u, ends_later);
    if (later != 0) return block + __ffs(static_cast<int>(later)) - 1;
  }
}

// The tiles of a thread block: of each kind every gridDim.x-th, in the order of their blocks.
struct Hand {
  int both, other;  // the next of each kind
  int both_block = 0, other_block = 0;

  __device__ __forceinline__ Hand(const Control& c, int blocks) : both(blockIdx.x) {
    const int grid = gridDim.x;  // others begin where the last round of the first kind has ended
    other = (both + grid - c.first_both[blocks] % grid) % grid;
  }
  // One without neurons after the last. Called by whole warps.
  __device__ __forceinline__ Item next(const Control& c, int blocks) {
    const auto first_other = [&](int b) { return c.first_item[b] - c.first_both[b]; };
    const bool has_both = both < c.first_both[blocks], has_other = other < first_other(blocks);
    if (!has_both && !has_other) return {0, 0, 0};
    if (has_both) both_block = block_of(both, both_block, blocks, [&](int b) { return c.first_both[b]; });
    if (has_other) other_block = block_of(other, other_block, blocks, first_other);
    const bool takes_both = has_both && (!has_other || both_block <= other_block);
    const int block = takes_both ? both_block : other_block, all = c.counts[block].all();
    const Cut cut = cut_of(c.counts[block], c.limit, c.order);
    int tile;
    if (takes_both) {
      tile = cut.both_begin + both - c.first_both[block];
      both += gridDim.x;
    } else {
      tile = other - first_other(block);
      if (tile >= cut.both_begin) tile += cut.both_end - cut.both_begin;
      // Without a turn, the same thread block could get those that take longest of every block.
      if (c.order == UpOrder::kTurned) tile = (tile + block) % cut.tiles;
      other += gridDim.x;
    }
    return {block, tile * cut.width, min(cut.width, all - tile * cut.width)};
  }
};

}  // namespace twell::sm90::up
