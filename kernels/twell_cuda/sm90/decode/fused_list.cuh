// Sums over the warps of a fused decode kernel's thread block, and which of its neurons are active.
#pragma once

#include "sm90/decode/fused.cuh"

namespace twell::decoding::fused {

template <int kTokens>
struct Sums {
  static constexpr int kPairs = kTokens / 2;
  // Whether they lie where rows of the gate were, not in front of them: they take more than there is.
  static constexpr bool kOverGate = kTokens > 2;
  struct alignas(kPairs == 1 ? 8 : 16) Values {
    float2 pair[kPairs];
  };
  // What each warp leaves, of a pair of tokens: (tile, 8 rows) of four: row, both tokens; row + 8, the same. Each pair
  // has an order of rows of its own, so that neither who writes nor who reads meets a bank twice.
  float4 slots[kDecodeWarps][kPairs][kTiles * 8];
  Values values[kFusedMaxRows];  // relu(gate), then h; by multiply_staged()

  __device__ static __forceinline__ int place(int row, int pair) { return kPairs == 1 ? row : row ^ 2 * pair; }
};
static_assert(sizeof(Sums<2>) == kFusedSumsBytes && Sums<4>::kOverGate);

#if defined(TWELL_SM90_DEVICE)

// Where nobody reads or writes any more.
template <int kTokens>
__device__ __forceinline__ void leave_sums(Sums<kTokens>& sums, const float (&sum)[kTiles][4], int tiles,
                                           const Lane& l) {
  const int pair = l.lane % 4;  // of tokens: only the first ones are real
  if (pair < Sums<kTokens>::kPairs) {
    float4* const mine = sums.slots[l.warp][pair] + sums.place(l.row, pair);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (i < tiles) mine[i * 8] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    }
  }
  __syncthreads();
}

// What each warp finds for itself. Lane 8 m + r has row r of tile m, and the neuron eight after it.
template <int kTokens>
struct Active {
  float4 gate[kTokens / 2];  // relu of a pair of tokens: the lane's lower neuron, both; the upper one, both
  uint32_t lows, highs;      // lanes whose lower, whose upper neuron is active for any token
  uint32_t loud;             // tokens with an active neuron, a bit each

  __device__ __forceinline__ int count() const { return __popc(lows) + __popc(highs); }
  __device__ static __forceinline__ int low_of(int lane) { return lane / 8 * 16 + neuron_of_row(lane % 8); }
};

template <typename Weight, int kTokens>
__device__ __forceinline__ Active<kTokens> find_active(const FusedParams& p, const Control& c,
                                                       const Sums<kTokens>& sums, int count) {
  constexpr int kPairs = Sums<kTokens>::kPairs;
  const int lane = threadIdx.x % 32, low = Active<kTokens>::low_of(lane), high = low + 8;
  Active<kTokens> a{};
  if (lane / 8 < kTiles && low < count) {
#pragma unroll
    for (int q = 0; q < kPairs; ++q) {
      const int at = sums.place(lane, q);
      float4 v = sums.slots[0][q][at];
#pragma unroll
      for (int s = 1; s < kDecodeWarps; ++s) {
        const float4 other = sums.slots[s][q][at];
        v.x += other.x, v.y += other.y, v.z += other.z, v.w += other.w;
      }
      if constexpr (kScaled<Weight>) {
        const float of_low = c.s_gate[low], of_high = c.s_gate[min(high, count - 1)];
        v.x *= of_low, v.y *= of_low, v.z *= of_high, v.w *= of_high;
      }
      const bool first = q == 0 || 2 * q < p.tokens, second = 2 * q + 1 < p.tokens;
      v.x = activate(v.x, c.b_gate[low], first);
      v.y = activate(v.y, c.b_gate[low], second);
      v.z = activate(v.z, c.b_gate[min(high, count - 1)], high < count && first);
      v.w = activate(v.w, c.b_gate[min(high, count - 1)], high < count && second);
      a.gate[q] = v;
    }
  }
  bool low_active = false, high_active = false;
#pragma unroll
  for (int q = 0; q < kPairs; ++q) {
    const float4& v = a.gate[q];
    low_active |= v.x != 0.f || v.y != 0.f, high_active |= v.z != 0.f || v.w != 0.f;
    a.loud |= (v.x != 0.f || v.z != 0.f) << 2 * q | (v.y != 0.f || v.w != 0.f) << (2 * q + 1);
  }
  a.lows = __ballot_sync(0xffffffffu, low_active), a.highs = __ballot_sync(0xffffffffu, high_active);
  a.loud = kQuiet<kTokens> ? __reduce_or_sync(0xffffffffu, a.loud) : ~0u;
  return a;
}

#endif

}  // namespace twell::decoding::fused
