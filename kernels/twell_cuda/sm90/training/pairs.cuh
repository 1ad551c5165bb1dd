// A warp and a group of a block's entries: which tokens activate each, and the group's pairs in order.
#pragma once

#include "sm90/common/prefix_sum.cuh"
#include "sm90/training/training.h"

namespace twell::sm90 {

constexpr int kPartTokens = 8, kParts = kBlockTokens / kPartTokens;  // a lane's part of a column: 16 bytes
constexpr int kTurns = kGroup * kParts / 32;                         // to read a group's columns, two at a time

__host__ __device__ constexpr int group_count(int entries) { return (entries + kGroup - 1) / kGroup; }

// A warp's shared memory.
struct GroupPairs {
  uint4 tokens[kGroup];  // of each entry, while they are found
  union {
    uint4 columns[kTurns][32];              // first the columns, two at a time,
    uint16_t codes[kGroup * kBlockTokens];  // then of each pair its entry and its token
  };
  __device__ __forceinline__ int entry(uint32_t index) const { return codes[index] / kBlockTokens; }
  __device__ __forceinline__ int token(uint32_t index) const { return codes[index] % kBlockTokens; }
};

// A bit for each of eight values that is not zero.
__device__ __forceinline__ uint32_t active_bits(uint4 values) {
  const uint32_t words[4] = {values.x, values.y, values.z, values.w};
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    bits |= ((words[i] & 0xFFFFu) != 0 ? 1u : 0u) << (2 * i) | (words[i] >> 16 != 0 ? 2u : 0u) << (2 * i);
  }
  return bits;
}

__device__ __forceinline__ uint32_t count_tokens(uint4 tokens) {
  return __popc(tokens.x) + __popc(tokens.y) + __popc(tokens.z) + __popc(tokens.w);
}

// The tokens of the entry first + lane, whose neuron the lane brings; none past the last entry. `columns` are the
// block's.
__device__ __forceinline__ uint4 find_tokens(GroupPairs& pairs, const uint16_t* columns, const Counts& counts,
                                             int first, int neuron, int lane) {
  const int side = lane / kParts, part = lane % kParts, half = part / (kParts / 2);
  const int begin = half == 0 ? 0 : counts.first_only, both_end = counts.first_only + counts.both;
  const int end = half == 0 ? both_end : counts.all();
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int entry = first + 2 * i + side, column = __shfl_sync(~0u, neuron, 2 * i + side) * kBlockTokens;
    const bool there = entry >= begin && entry < end;
    copy_16(smem_address(&pairs.columns[i][lane]), columns + column + part * kPartTokens, there);
  }
  __syncwarp();  // everyone has taken the tokens of the group before
  wait_for_copies();
  uint8_t* bytes = reinterpret_cast<uint8_t*>(pairs.tokens);
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    bytes[i * 32 + lane] = static_cast<uint8_t>(active_bits(pairs.columns[i][lane]));
  }
  __syncwarp();
  return pairs.tokens[lane];
}

struct EntryPairs {
  uint32_t before, count;  // the group's pairs before this lane's entry; all of the group
};

// Lane i brings which tokens activate entry i.
__device__ __forceinline__ EntryPairs expand_group(GroupPairs& pairs, uint4 tokens, int lane) {
  const uint32_t words[4] = {tokens.x, tokens.y, tokens.z, tokens.w};
  const uint32_t own = count_tokens(tokens), before = sum_before(own, lane);
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
