// The gradient of x from pairs: the warps that put entries' columns of 128 tokens together in shared memory, for each
// term, from the pairs. Each builds whole tiles, which are dealt out in turn.
#pragma once

#include "sm90/training/pair_dx_steps.cuh"

namespace twell::sm90::dx {

template <int kTerms, int kHidden>
struct Builder {
  using Stage = Shape<kTerms, kHidden>;
  static constexpr int kRounds = kKnown / 32;

  const Arguments<kTerms>& a;
  Control& c;
  const Work& work;
  const int lane = threadIdx.x % 32;
  Position p;           // of the tile after the next
  uint32_t begin, end;  // its pairs, in its block
  int64_t pair;         // the next tile's first,
  uint32_t count;       // how many, and some of them: each lane one of every 32
  uint32_t values[kRounds], places[kRounds];

  __device__ __forceinline__ Builder(const Arguments<kTerms>& arguments, Control& control, const Work& w, int warp)
      : a(arguments), c(control), work(w), p(w.first_from(blockIdx.x)) {
    work.advance(p, warp);
    find();
    next();
  }

  __device__ __forceinline__ void find() {
    if (!work.exists(p)) return;
    const KeptBlock& block = c.blocks[p.block];
    const int start = p.start();
    const uint32_t* pairs = a.state.first_pairs + (work.first_entry + block.first_entry + start) / kGroup;
    begin = __ldcg(pairs);
    end = start + kGroup < block.counts.all() ? __ldcg(pairs + 1) : block.pairs;
  }

  // Asks for the next tile's pairs, long before they are needed.
  __device__ __forceinline__ void next() {
    if (!work.exists(p)) return;
    pair = work.first_pair + c.blocks[p.block].first_pair + begin;
    count = end - begin;
    load(0);
    work.advance(p, kWarps);
    find();
  }

  __device__ __forceinline__ void load(uint32_t from) {
    const uint32_t* value = a.pairs.values + pair + from + lane;
    const uint16_t* place = a.pairs.places + pair + from + lane;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (from + r * 32 + lane < count) {
        values[r] = __ldcg(value + r * 32);
        places[r] = __ldcg(place + r * 32);
      }
    }
  }

  static __device__ __forceinline__ void put(uint8_t* tile, uint32_t place, uint32_t value) {
#pragma unroll
    for (int t = 0; t < kTerms; ++t) {
      *reinterpret_cast<uint16_t*>(tile + t * Stage::kTermBytes + place) = static_cast<uint16_t>(value >> 16 * t);
    }
  }

  // Of the tile that was here only what it had set, if that is known.
  __device__ __forceinline__ void clear(uint8_t* tile, const Known& known) const {
    const uint32_t old = known.count;
    if (old <= kKnown) {
      for (uint32_t i = lane; i < old; i += 32) put(tile, known.places[i], 0);
    } else {
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
#pragma unroll 8
        for (int i = 0; i < 2 * kPartBytes / 16; i += 32) {
          reinterpret_cast<uint4*>(tile + t * Stage::kTermBytes)[i + lane] = uint4{};
        }
      }
    }
    __syncwarp();
  }

  // The next tile, in a stage that is free.
  __device__ __forceinline__ void build(uint8_t* tile, Known& known) {
    clear(tile, known);
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (r * 32 + lane < count) {
        put(tile, places[r], values[r]);
        known.places[r * 32 + lane] = static_cast<uint16_t>(places[r]);
      }
    }
#pragma unroll 1
    for (uint32_t from = kKnown; from < count; from += kKnown) {
      load(from);
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        if (from + r * 32 + lane < count) put(tile, places[r], values[r]);
      }
    }
    if (lane == 0) known.count = count;
    __syncwarp();
  }
};

// The tiles that are the warp's.
template <bool kBuild, int kTerms, int kHidden>
__device__ __forceinline__ void build_all(const Arguments<kTerms>& a, Control& c, const Work& work, uint8_t* shared,
                                          Ring ring) {
  const int warp = threadIdx.x / 32 % kWarps;
  Builder<kTerms, kHidden> builder(a, c, work, warp);
  Position p = work.first_from(blockIdx.x);
  for (uint32_t turn = 0; work.exists(p); ++turn, ring.advance(), work.advance(p)) {
    if (turn % kWarps != warp) continue;
    ring.wait_empty();
    if constexpr (kBuild) builder.build(shared + ring.stage * Shape<kTerms, kHidden>::kStageBytes, c.known[ring.stage]);
    if (builder.lane == 0) barrier_arrive(ring.full + ring.stage);  // the multiplying warps fence
    if constexpr (kBuild) builder.next();
  }
}

}  // namespace twell::sm90::dx
