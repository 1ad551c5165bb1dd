// The gradient of x from pairs: what a thread block's warpgroups share, and the order of its work.
//
// An item is a block of tokens and a slice of hidden units; a step of it is a group of the block's entries, with all
// terms (of the gate and of up) in one stage of the ring.
#pragma once

#include "sm90/common/slice_product.cuh"
#include "sm90/training/pairs.cuh"

namespace twell::sm90::dx {

constexpr int kWarps = 4;  // that gather, and that build
constexpr int kGatherers = kWarps * 32, kBuilders = kWarps * 32, kMultipliers = 256;  // threads
constexpr int kHelpers = kGatherers + kBuilders, kThreads = kHelpers + kMultipliers;
constexpr int kMultiplyWarps = kMultipliers / 32;
constexpr int kArrivals = kGatherers + 1;  // at `full`: each thread's copies, and the tile's warp
constexpr int kHelpRegisters = 72, kMultiplyRegisters = 184;
// Taking more registers than the block starts with would wait for ever.
static_assert(kHelpRegisters * (kHelpers / 128) + 2 * kMultiplyRegisters <=
              kThreads / 128 * (65536 / kThreads / 8 * 8));
constexpr int kProduct = 128;  // columns; 256 want more registers than a block of 512 threads starts with

constexpr int kPartBytes = 64 * kGroup * 2;  // 64 tokens or hidden units x a group of entries
constexpr int kRingBytes = 192 << 10, kMaxStages = 8;
constexpr int kLists = 16, kListLead = 4;  // steps' neurons in shared memory; how many steps ahead they are asked for
constexpr int kKnown = 256;                // pairs of a tile whose places are remembered
static_assert(kLists >= kMaxStages + kListLead);

template <int kTerms, int kHidden>
struct Shape {
  static constexpr int kTermBytes = 2 * kPartBytes + kHidden / 64 * kPartBytes;  // tokens of both halves, then rows
  static constexpr int kStageBytes = kTerms * kTermBytes;
  static constexpr int kStages = kRingBytes / kStageBytes < kMaxStages ? kRingBytes / kStageBytes : kMaxStages;
};

// A kept block; its place in the pools counts from the chunk's first block.
struct KeptBlock {
  Counts counts;
  uint32_t pairs, first_entry, first_pair;
};

// Where the tile in a stage is not zero: all places if `count` is at most kKnown.
struct Known {
  uint16_t places[kKnown];
  uint32_t count;
};

struct Control {
  uint64_t full[kMaxStages], empty[kMaxStages], listed[kLists];
  alignas(16) uint16_t neurons[kLists][kGroup];
  Known known[kMaxStages];
  KeptBlock blocks[kMaxBlocks];
};
constexpr int kShared = 1024 + kRingBytes + kMultiplyWarps * kTurnBytes + sizeof(Control);
static_assert(kShared <= 227 * 1024);

// Of the gate, and of up if there is one: terms' values lie in this order in PairGradients::values.
template <int kTerms>
struct Arguments {
  const void* rows[kTerms];  // (F, D)
  PairGradients pairs;
  slices::Output out;
  State state;
  int64_t first_block;
  int blocks;
};

struct Position {
  int item, block, slice, step, steps;
  int shift;  // of the step that comes first
  // The step's first entry. Those of the first half alone, of both and of the second alone lie one after the other:
  // with a third of each by turns, every few steps have as much to multiply. Each block begins elsewhere, so that not
  // all thread blocks want the same rows at once.
  __device__ __forceinline__ int start() const {
    const int third = steps / 3, turned = step + shift, s = turned < steps ? turned : turned - steps;
    return (s < 3 * third ? s % 3 * third + s / 3 : s) * kGroup;
  }
};

// A thread block's items, and the chunk's kept blocks. Thread blocks that work at the same time share a slice, so that
// the rows they read lie in L2.
struct Work {
  const Control& c;
  int blocks, items;
  int64_t first_entry, first_pair;  // of the first block

  // Every thread of a thread block calls it; the blocks are valid after the next barrier.
  template <int kTerms>
  __device__ __forceinline__ Work(const Arguments<kTerms>& a, Control& control)
      : c(control),
        blocks(static_cast<int>(min(max(a.state.totals[0] - a.first_block, int64_t{0}), int64_t{a.blocks}))),
        items(blocks * a.out.slices),
        first_entry(blocks > 0 ? a.state.blocks[a.first_block].first_entry : 0),
        first_pair(blocks > 0 ? a.state.blocks[a.first_block].first_pair : 0) {
    for (int b = threadIdx.x; b < blocks; b += kThreads) {
      const BlockState s = a.state.blocks[a.first_block + b];
      control.blocks[b] = {s.counts, s.pairs, static_cast<uint32_t>(s.first_entry - first_entry),
                           static_cast<uint32_t>(s.first_pair - first_pair)};
    }
  }

  __device__ __forceinline__ Position at(int item) const {
    const int block = item % blocks;
    const int steps = group_count(c.blocks[block].counts.all());
    return {item, block, item / blocks, 0, steps, steps > 0 ? block % steps : 0};
  }
  // The first step from `item` on.
  __device__ __forceinline__ Position first_from(int item) const {
    for (; item < items; item += gridDim.x) {
      const Position p = at(item);
      if (p.steps > 0) return p;
    }
    return {item, 0, 0, 0, 0, 0};
  }
  __device__ __forceinline__ bool exists(const Position& p) const { return p.item < items; }
  __device__ __forceinline__ void advance(Position& p) const {
    if (++p.step == p.steps) p = first_from(p.item + gridDim.x);
  }
  __device__ __forceinline__ void advance(Position& p, int count) const {
    for (int i = 0; i < count && exists(p); ++i) advance(p);
  }
  __device__ __forceinline__ int left(const Position& p) const { return c.blocks[p.block].counts.all() - p.start(); }
  // Whether the step from entry `start` on has any that the half block's tokens activate.
  static __device__ __forceinline__ bool has(const Counts& counts, int half, int start) {
    const int both_end = counts.first_only + counts.both;
    return half == 0 ? start < both_end : start + kGroup > counts.first_only && start < counts.all();
  }
};

}  // namespace twell::sm90::dx
