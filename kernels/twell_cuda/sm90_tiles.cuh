// Products over the hidden size: what their fetching and multiplying warpgroups share, and which tiles of a block's
// active neurons there are.
#pragma once

#include <cstddef>

#include "sm90_call.h"
#include "sm90_primitives.cuh"

namespace twell::sm90::tiles {

constexpr int kFetchers = 128, kThreads = kFetchers + 256, kConsumerWarps = 8, kDepth = 64, kMaxNeurons = 256;
constexpr int kTokenBytes = kBlockTokens * kDepth * 2, kStageBytes = kTokenBytes + kMaxNeurons * kDepth * 2;
constexpr int kMaxStages = 8, kRingBytes = 4 * kStageBytes;
constexpr int kTurnNeurons = 128;  // columns of the activations in a stage: 256 bytes each
constexpr int kBoxRows = 64;

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
constexpr int kShared = 1024 + kRingBytes + sizeof(Control);
static_assert(kShared <= 227 * 1024);
static_assert(offsetof(Control, neurons) % 16 == 0);

struct Arguments {
  const void* rows;  // (F, D)
  void* columns[2];  // (block, F, 2 halves, 64), of which a product uses as many as its Epilogue::kBuffers
  Chunk chunk;
  int hidden, width;
};

__device__ __forceinline__ int stage_bytes(int tile) { return kTokenBytes + tile * kDepth * 2; }

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

// Items come in ascending order: `block` is where the one before was.
__device__ __forceinline__ Item item_at(int index, int block, const Control& c) {
  while (index >= c.first_item[block + 1]) ++block;
  const int first = (index - c.first_item[block]) * c.tile;
  return {block, first, min(c.tile, c.counts[block].all() - first)};
}

}  // namespace twell::sm90::tiles
