// Where the pairs of a chunk's blocks go, while thread blocks still find them: each learns from the others' slots.
#pragma once

#include "sm90/training/pairs.cuh"

namespace twell::sm90 {

constexpr int kSaveWarps = 4, kSaveThreads = kSaveWarps * 32;
constexpr int kSlotBatch = kSlots / kSaveThreads;  // that a thread reads

// A thread block's part of a block of tokens.
struct BlockPart {
  int share, block, index;  // thread blocks of a block; which block; which of its thread blocks
};

// Pairs and groups that come before a thread block's own.
struct Before {
  uint32_t groups, pairs;  // of earlier blocks
  uint32_t here;           // pairs of this block's earlier thread blocks
  uint32_t block;          // all pairs of this block
};

// Adds up the values of all threads.
__device__ __forceinline__ Before add_threads(Before own, Before* warp_sums) {
  own = {__reduce_add_sync(~0u, own.groups), __reduce_add_sync(~0u, own.pairs), __reduce_add_sync(~0u, own.here),
         __reduce_add_sync(~0u, own.block)};
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = own;
  __syncthreads();
  Before sum{};
#pragma unroll
  for (int w = 0; w < kSaveWarps; ++w) {
    const Before other = warp_sums[w];
    sum = {sum.groups + other.groups, sum.pairs + other.pairs, sum.here + other.here, sum.block + other.block};
  }
  return sum;
}

// A slot says all that other thread blocks need to know: nothing else has to be visible with it.
__device__ __forceinline__ void fill_slot(const Saving& saving, uint32_t pairs) {
  *const_cast<volatile uint64_t*>(saving.slots + blockIdx.x) = static_cast<uint64_t>(saving.turn) << 32 | pairs;
}

// Waits for the thread blocks up to the last of this block. All of them come: the GPU starts thread blocks in order,
// and those of one block fit at once.
__device__ __forceinline__ Before wait_for_slots(const Active& a, const Saving& saving, const BlockPart& part,
                                                 Before* warp_sums) {
  int entries[kMaxBlocks / kSaveThreads];
#pragma unroll
  for (int i = 0; i < kMaxBlocks / kSaveThreads; ++i) {
    const int b = i * kSaveThreads + static_cast<int>(threadIdx.x);
    entries[i] = b < part.block ? a.counts[b].all() : 0;
  }
  const volatile uint64_t* slots = saving.slots;
  const int first = part.block * part.share, mine = first + part.index, end = first + part.share;
  uint64_t seen[kSlotBatch] = {};
  bool missing;
  do {
#pragma unroll
    for (int i = 0; i < kSlotBatch; ++i) {
      const int slot = i * kSaveThreads + static_cast<int>(threadIdx.x);
      if (slot < end && seen[i] >> 32 != saving.turn) seen[i] = slots[slot];
    }
    missing = false;
#pragma unroll
    for (int i = 0; i < kSlotBatch; ++i) {
      const int slot = i * kSaveThreads + static_cast<int>(threadIdx.x);
      missing = missing || (slot < end && seen[i] >> 32 != saving.turn);
    }
    if (missing) __nanosleep(50);
  } while (missing);
  Before before{};
#pragma unroll
  for (const int count : entries) before.groups += group_count(count);
#pragma unroll
  for (int i = 0; i < kSlotBatch; ++i) {
    const int slot = i * kSaveThreads + static_cast<int>(threadIdx.x);
    const uint32_t pairs = slot < end ? static_cast<uint32_t>(seen[i]) : 0;
    if (slot < first) before.pairs += pairs;
    if (slot >= first && slot < mine) before.here += pairs;
    if (slot >= first) before.block += pairs;
  }
  return add_threads(before, warp_sums);
}

struct BlockPlace {
  bool kept;
  int64_t first_entry, first_pair;  // of the block
};

// Where the chunk starts, if it is kept. Totals only grow, and are at least its first block if and only if all blocks
// before it were kept: no matter what this chunk's have added to them.
__device__ __forceinline__ BlockPlace start_of_chunk(const State& state, int64_t first_block) {
  if (first_block == 0) return {true, 0, 0};
  const BlockState last = state.blocks[first_block - 1];
  return {*const_cast<const volatile int64_t*>(state.totals) >= first_block,
          last.first_entry + int64_t{group_count(last.counts.all())} * kGroup, last.first_pair + last.pairs};
}

// A block fits if what all blocks up to it take fits: no block after the first that does not can.
__device__ __forceinline__ BlockPlace place_block(const State& state, const BlockPlace& chunk, const Before& before,
                                                  int groups) {
  const int64_t first_entry = chunk.first_entry + int64_t{before.groups} * kGroup;
  const int64_t first_pair = chunk.first_pair + before.pairs;
  const bool kept = chunk.kept && first_entry + int64_t{groups} * kGroup <= state.entries &&
                    first_pair + before.block <= state.pairs;
  return {kept, first_entry, first_pair};
}

__device__ __forceinline__ void keep_block(const State& state, int64_t block, const BlockState& kept) {
  state.blocks[block] = kept;
  const int64_t entries = kept.first_entry + int64_t{group_count(kept.counts.all())} * kGroup;
  const int64_t ends[3] = {block + 1, entries, kept.first_pair + kept.pairs};
  long long* totals = reinterpret_cast<long long*>(state.totals);
#pragma unroll
  for (int i = 0; i < 3; ++i) atomicMax(totals + i, static_cast<long long>(ends[i]));
}

}  // namespace twell::sm90
