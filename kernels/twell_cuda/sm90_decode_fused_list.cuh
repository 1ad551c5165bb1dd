// Sums over the warps of a fused decode kernel's thread block, and the list of its active neurons.
#pragma once

#include "sm90_decode_fused.cuh"

namespace twell::decoding::fused {

// In front of the rows of up and down, where rows of the gate were.
template <int kTokens>
struct Sums {
  static constexpr int kPairs = kTokens / 2;
  struct alignas(kPairs == 1 ? 8 : 16) Values {
    float2 pair[kPairs];
  };
  // What each warp leaves, of a pair of tokens: (tile, 8 rows) of four: row, both tokens; row + 8, the same. Each pair
  // has an order of rows of its own, so that neither who writes nor who reads meets a bank twice.
  float4 slots[kDecodeWarps][kPairs][kTiles * 8];
  Values values[kFusedMaxRows];  // relu(gate), then h

  __device__ static __forceinline__ int place(int row, int pair) { return kPairs == 1 ? row : row ^ 2 * pair; }
};

#if defined(TWELL_SM90_DEVICE)

template <int kTokens>
__device__ __forceinline__ void leave_sums(Sums<kTokens>& sums, const float (&sum)[kTiles][4], int tiles,
                                           const Lane& l) {
  const int pair = l.lane % 4;  // of tokens: only the first ones are real
  __syncthreads();              // all are done with what lay there
  if (pair < Sums<kTokens>::kPairs) {
    float4* const mine = sums.slots[l.warp][pair] + sums.place(l.row, pair);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (i < tiles) mine[i * 8] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    }
  }
  __syncthreads();
}

// For one warp: relu(gate) of all tokens, which neurons are active, and how many.
template <int kTokens>
__device__ __forceinline__ void list_active(const FusedParams& p, Control& c, Sums<kTokens>& sums, int count) {
  const int lane = threadIdx.x % 32;
  const int low = lane / 8 * 16 + lane % 8, high = low + 8;  // neurons
  constexpr int kPairs = Sums<kTokens>::kPairs;
  float4 v[kPairs] = {};
  if (low < count) {
#pragma unroll
    for (int q = 0; q < kPairs; ++q) {
      const int at = sums.place(lane, q);
      v[q] = sums.slots[0][q][at];
#pragma unroll
      for (int s = 1; s < kDecodeWarps; ++s) {
        const float4 other = sums.slots[s][q][at];
        v[q].x += other.x, v[q].y += other.y, v[q].z += other.z, v[q].w += other.w;
      }
      const bool first = q == 0 || 2 * q < p.tokens, second = 2 * q + 1 < p.tokens;
      v[q].x = activate(v[q].x, c.b_gate[low], first);
      v[q].y = activate(v[q].y, c.b_gate[low], second);
      v[q].z = activate(v[q].z, c.b_gate[min(high, count - 1)], high < count && first);
      v[q].w = activate(v[q].w, c.b_gate[min(high, count - 1)], high < count && second);
      sums.values[low].pair[q] = make_float2(v[q].x, v[q].y);
      if (high < count) sums.values[high].pair[q] = make_float2(v[q].z, v[q].w);
    }
  }
  bool low_active = false, high_active = false;
#pragma unroll
  for (const float4& of : v) {
    low_active |= of.x != 0.f || of.y != 0.f, high_active |= of.z != 0.f || of.w != 0.f;
  }
  const uint32_t lows = __ballot_sync(0xffffffffu, low_active), highs = __ballot_sync(0xffffffffu, high_active);
  const uint32_t before = (1u << lane / 8 * 8) - 1, up_to = (1u << lane) - 1;  // tiles before; rows before as well
  if (low_active) c.list[__popc(lows & up_to) + __popc(highs & before)] = static_cast<uint16_t>(low);
  const uint32_t with_tile = lane < 24 ? (1u << (lane / 8 + 1) * 8) - 1 : 0xffffffffu;
  if (high_active) c.list[__popc(lows & with_tile) + __popc(highs & up_to)] = static_cast<uint16_t>(high);
  if constexpr (kQuiet<kTokens>) {
    uint32_t loud = 0;
#pragma unroll
    for (int q = 0; q < kPairs; ++q) {
      loud |= (v[q].x != 0.f || v[q].z != 0.f) << 2 * q | (v[q].y != 0.f || v[q].w != 0.f) << (2 * q + 1);
    }
    loud = __reduce_or_sync(0xffffffffu, loud);
    if (lane == 0) c.loud = loud;
  }
  if (lane == 0) c.active = __popc(lows) + __popc(highs);
  __syncwarp();
}

#endif

}  // namespace twell::decoding::fused
