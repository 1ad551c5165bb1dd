// What the kernels that move pairs share. A warp works on a group of a block's entries: on whole columns two at a time,
// a lane eight tokens of one of them, or on pairs, 32 at a time whatever entries they belong to.
#pragma once

#include "sm90_primitives.cuh"
#include "sm90_training.h"

namespace twell::sm90 {

constexpr int kPairWarps = 4, kPairThreads = kPairWarps * 32;
constexpr int kPairBlocks = 6;  // thread blocks that an SM holds at once
constexpr int kPartTokens = 8, kParts = kBlockTokens / kPartTokens;  // a lane's part of a column: 16 bytes

__host__ __device__ constexpr int group_count(int entries) { return (entries + kGroup - 1) / kGroup; }

// A multiple of the chunk's blocks, about as many as the GPU holds at once.
inline int pair_grid(const Active& active, const Device& device) {
  const int most = (group_count(active.row) + kPairWarps - 1) / kPairWarps;
  const int share = max(1, device.sm_count * kPairBlocks / active.blocks);
  return active.blocks * min(most, share);
}

// The groups of one block that a warp works on: `first`, `first` + `stride`, ...
struct WarpGroups {
  int block, first, stride;
};
__device__ __forceinline__ WarpGroups warp_groups(int blocks) {
  const int share = gridDim.x / blocks;
  return {static_cast<int>(blockIdx.x) / share,
          static_cast<int>(blockIdx.x) % share * kPairWarps + static_cast<int>(threadIdx.x) / 32, share * kPairWarps};
}

// The entries whose columns have that half.
struct HalfEntries {
  int begin, end;
  __device__ HalfEntries(const Counts& counts, int half)
      : begin(half == 0 ? 0 : counts.first_only), end(half == 0 ? counts.first_only + counts.both : counts.all()) {}
  __device__ bool contain(int entry) const { return entry >= begin && entry < end; }
};

// Each lane's sum of the lanes before it.
template <typename Number>
__device__ __forceinline__ Number sum_before(Number value, int lane) {
  Number sum = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const Number other = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += other;
  }
  return sum - value;
}

// A group's pairs in order: entries of up to kBlockTokens pairs each.
struct GroupPairs {
  uint16_t codes[kGroup * kBlockTokens];
  __device__ __forceinline__ int entry(uint32_t index) const { return codes[index] / kBlockTokens; }
  __device__ __forceinline__ int token(uint32_t index) const { return codes[index] % kBlockTokens; }
};
struct EntryPairs {
  uint32_t before, count;  // the group's pairs before this lane's entry; all of the group
};

// Lane i brings which tokens activate entry i.
__device__ __forceinline__ EntryPairs expand_group(GroupPairs& pairs, uint4 tokens, int lane) {
  const uint32_t words[4] = {tokens.x, tokens.y, tokens.z, tokens.w};
  const uint32_t own = __popc(words[0]) + __popc(words[1]) + __popc(words[2]) + __popc(words[3]);
  const uint32_t before = sum_before(own, lane);
  __syncwarp();  // everyone is done with the group before
  uint16_t* to = pairs.codes + before;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    for (uint32_t bits = words[w]; bits != 0; bits &= bits - 1) {
      *to++ = static_cast<uint16_t>(lane * kBlockTokens + w * 32 + __ffs(bits) - 1);
    }
  }
  __syncwarp();
  return {before, __shfl_sync(~0u, before + own, 31)};
}

// Of two 2-byte values, rounded.
template <typename T>
__device__ __forceinline__ uint16_t multiply(uint16_t a, uint16_t b) {
  return static_cast<uint16_t>(pack<T>(unpack<T>(a).x * unpack<T>(b).x, 0.0f));
}

}  // namespace twell::sm90
