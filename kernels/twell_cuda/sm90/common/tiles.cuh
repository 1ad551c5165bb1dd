// Products over the hidden size: what their fetching and multiplying warpgroups share, and which tiles of a block's
// active neurons there are.
#pragma once

#include <cstddef>

#include "sm90/common/chunk.h"
#include "sm90/common/primitives.cuh"
#include "sm90/common/wgmma.cuh"

namespace twell::sm90::tiles {

constexpr int kFetchers = 128, kThreads = kFetchers + 256, kConsumerWarps = 8, kDepth = 64, kMaxNeurons = 256;
constexpr int kTokenBytes = kBlockTokens * kDepth * 2, kStageBytes = kTokenBytes + kMaxNeurons * kDepth * 2;
constexpr int kMaxStages = 8, kRingBytes = 4 * kStageBytes;
constexpr int kBoxRows = 64;
constexpr int kFetchRows = kFetchers / 8, kFetchShare = kMaxNeurons / kFetchRows;  // rows at a time; of each thread

constexpr int kFetchRegisters = 88, kMultiplyRegisters = 208;
static_assert(check_registers(kFetchRegisters, kMultiplyRegisters));

constexpr int kLists = 8;  // more than a ring of kMaxStages can be ahead in tiles

struct Control {
  uint64_t full[kMaxStages], empty[kMaxStages], listed[kLists];
  uint16_t neurons[kLists][kMaxNeurons];
  Counts counts[kMaxBlocks];
  int first_item[kMaxBlocks + 1];
  int tile;  // neurons
};
static_assert(offsetof(Control, neurons) % 16 == 0);

// What follows the ring of stages.
template <typename Job>
struct alignas(16) Shared {
  Control control;
  typename Job::Own own;
};
template <typename Job>
constexpr int kSharedBytes = 1024 + kRingBytes + sizeof(Shared<Job>);

struct Arguments {
  const void* rows;  // (F, D)
  Chunk chunk;
  int hidden, width;
};

__device__ __forceinline__ int stage_bytes(int tile) { return kTokenBytes + tile * kDepth * 2; }

// When the fetching warpgroup copies what the end of a tile needs beside the ring, and when the multiplying ones take
// it up: their loads then have the last steps' time.
__device__ __forceinline__ int aside_step(int steps) { return max(steps - 6, 0); }
__device__ __forceinline__ int prepare_step(int steps) { return max(steps - 3, 0); }

struct Item {
  int block, first, count;  // `count` of the block's active neurons, from its `first` on
};

// Tiles of the width that takes the least time, and each block's first tile.
__device__ __forceinline__ void plan(Control& c, int blocks) {
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    int64_t best_cost = INT64_MAX;
    for (int tile = kMaxNeurons; tile >= 64; tile -= 64) {
      int items = 0;
      for (int b = lane; b < blocks; b += 32) items += (c.counts[b].all() + tile - 1) / tile;
      items = __reduce_add_sync(~0u, items);
      // The tokens' share of the traffic does not shrink with the tile.
      const int64_t cost = static_cast<int64_t>((items + gridDim.x - 1) / gridDim.x) * (tile + 96);
      if (cost < best_cost) {
        best_cost = cost;
        if (lane == 0) c.tile = tile;
      }
    }
    __syncwarp();
    const int tile = c.tile;
    int total = 0;
    for (int start = 0; start < blocks; start += 32) {
      const int items = start + lane < blocks ? (c.counts[start + lane].all() + tile - 1) / tile : 0;
      int sum = items;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += other;
      }
      if (start + lane < blocks) c.first_item[start + lane] = total + sum - items;
      total += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) c.first_item[blocks] = total;
  }
  __syncthreads();
}

// What a warp multiplies of a tile: 16 tokens by `groups` times 64 neurons from `low` on, of which those in [begin,
// end) are active in its half of the block.
struct Part {
  int warp, lane, begin, end, groups, low;
};

// Items come in ascending order: `block` is where the one before was.
__device__ __forceinline__ Item item_at(int index, int block, const Control& c) {
  while (index >= c.first_item[block + 1]) ++block;
  const int first = (index - c.first_item[block]) * c.tile;
  return {block, first, min(c.tile, c.counts[block].all() - first)};
}

// Whether the tile's list ascends without a gap; it ascends within each class of neurons.
__device__ __forceinline__ bool are_neighbours(const uint16_t* list, const Item& item, const Counts& counts) {
  const int borders[2] = {counts.first_only - item.first, counts.first_only + counts.both - item.first};
  for (const int border : borders) {
    if (border > 0 && border < item.count) return false;
  }
  return item.count % kBoxRows == 0 && list[item.count - 1] - list[0] == item.count - 1;
}

// Begins one step of a product: this warpgroup's tokens by N of the tile's neurons, from the one at `skipped` bytes on.
// T is the operands' type: 16-bit, or e4m3 (sm90/common/wgmma.cuh), of which a step has twice as many.
template <typename T, int N>
__device__ __forceinline__ void multiply_stage(float* sum, uint32_t stage, int skipped, int step, int warpgroup) {
  fence_async_proxy();  // cp.async wrote, tensor cores read
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    Wgmma<T, N, 0, 0>::multiply(sum, matrix_descriptor(stage + warpgroup * kHalfTokens * 128 + k * 32, 16),
                                matrix_descriptor(stage + kTokenBytes + skipped + k * 32, 16), step + k);
  }
  wgmma_commit();
}

// A whole product. Near its end `end` may prepare what comes after.
template <typename T, int N, typename End>
__device__ __forceinline__ void multiply_tile(float* sum, Ring& ring, uint32_t stages, int bytes, int skipped,
                                              int steps, int warpgroup, int lane, End& end) {
  for (int step = 0; step < steps; ++step, ring.advance()) {
    ring.wait_full();
    if constexpr (N > 0) {
      multiply_stage<T, N>(sum, stages + ring.stage * bytes, skipped, step, warpgroup);
      if (step == prepare_step(steps)) end.prepare();
      wgmma_wait<1>();
    } else {
      __syncwarp();  // nobody's lanes may still wait for what is released
    }
    if (step > 0 && lane == 0) barrier_arrive(ring.empty + ring.previous());
  }
  wgmma_wait<0>();
  if (lane == 0) barrier_arrive(ring.empty + ring.previous());
}

}  // namespace twell::sm90::tiles
