// The last part of the fused decode kernel: thread blocks add up y, each some columns, always in the order of shares,
// looking at those that are missing until they are there.
#pragma once

#include "sm90/decode/fused.cuh"

namespace twell::decoding::fused {

#if defined(TWELL_SM90_DEVICE)

// Which column pair `pair` of a share's row begins with.
__device__ __forceinline__ int column_of(const FusedParams& p, int pair) {
  const int threads = p.hidden / kThreadColumns;
  const int i = (pair >= threads) + (pair >= 2 * threads) + (pair >= 3 * threads);
  return (pair - i * threads) * kThreadColumns + 2 * i;
}

// Of which token unit `unit` is: a pair of columns.
template <int kTokens>
__device__ __forceinline__ int token_of(const FusedParams& p, int unit) {
  int token = 0;
#pragma unroll
  for (int t = 1; t < kTokens; ++t) token += unit >= t * (p.hidden / 2);
  return token;
}

// How a thread block's threads share out its units: `together`, a power of two, of neighbouring units, in `parts` that
// take turns at the shares.
struct Places {
  int together, parts_log2, parts, unit, part;
  __device__ __forceinline__ explicit Places(const FusedParams& p) : together(min(p.units, kThreads)) {
    const int log2 = __ffs(together) - 1;
    parts_log2 = __ffs(kThreads) - 1 - log2, parts = 1 << parts_log2;
    unit = threadIdx.x & (together - 1), part = threadIdx.x >> log2;
  }
};

// Loads of a thread in flight; up to four tokens all that it wants.
template <int kTokens>
constexpr int kBatch = kTokens == 2 ? 10 : 18;

// Of a quiet kernel, whose warps have neighbouring pairs of one token and whose lanes all add up the same shares: each
// lane asks whether one of the next ones is zeros.
template <int kTokens>
__device__ __forceinline__ uint64_t ask_for_silence(const FusedParams& p, int token, int row, int parts) {
  const int lane = threadIdx.x % 32, shares = gridDim.x;
  row += lane * parts;
  return lane < kBatch<kTokens> && row < shares ? load_silence(p.silences + token * shares + row) : 0;
}

// The same ahead of add_up(), for this block's own columns.
template <int kTokens>
__device__ __forceinline__ uint64_t ask_early(const FusedParams& p) {
  const Places at(p);
  const int unit = blockIdx.x * p.units + at.unit;
  if (unit >= p.tokens * (p.hidden / 2)) return 0;
  return ask_for_silence<kTokens>(p, token_of<kTokens>(p, unit), at.part, at.parts);
}

// Adds up the columns of thread block `block` and stores them, if all shares arrive before `patience` looks at each;
// the same answer for all threads. `scratch` holds kThreads of two; `silence` is what ask_early() said.
template <typename Half, typename Weight, int kTokens>
__device__ __forceinline__ bool add_up(const FusedParams& p, const Control& c, float2* scratch, int block, int patience,
                                       uint64_t silence) {
  const int thread = threadIdx.x, shares = gridDim.x;
  const int pairs = p.hidden / 2, all_units = p.tokens * pairs;
  const Places at(p);
  const int together = at.together, parts = at.parts, part = at.part;
  const uint64_t seal = c.seal;
  for (int base = block * p.units; base < min((block + 1) * p.units, all_units); base += together) {
    const int unit = base + at.unit;
    const bool inside = unit < all_units;
    const int token = kQuiet<kTokens> ? token_of<kTokens>(p, unit) : 0;
    const uint4* const from = p.shares + unit;
    int at_y = 0;
    Half bias[2] = {Half(0.f), Half(0.f)};
    float2 scale = make_float2(1.f, 1.f);
    const auto find_place = [&] {
      const int t = token_of<kTokens>(p, unit), column = column_of(p, unit - t * pairs);
      at_y = (t * p.hidden + column) / 2;
      if constexpr (kScaled<Weight>) scale = make_float2(p.s_down[column], p.s_down[column + 1]);
      if (p.b_down == nullptr) return;
      bias[0] = static_cast<const Half*>(p.b_down)[column], bias[1] = static_cast<const Half*>(p.b_down)[column + 1];
    };
    if (kQuiet<kTokens> && inside) find_place();
    float2 sum = make_float2(0.f, 0.f);
    bool in_vain = false;
    for (int row = part; inside && !in_vain && row < shares; row += kBatch<kTokens> * parts) {
      Sealed v[kBatch<kTokens>] = {};
      uint32_t missing = (1u << min(kBatch<kTokens>, (shares - row + parts - 1) >> at.parts_log2)) - 1;
      uint32_t wanted = missing;
      for (int looks = 0;; ++looks) {
        if constexpr (kQuiet<kTokens>) {
          const uint32_t silent = __ballot_sync(0xffffffffu, silence == seal);
          missing &= ~silent, wanted &= ~silent;
          silence = 0;
        }
        if (kQuiet<kTokens> ? !__any_sync(0xffffffffu, missing != 0) : missing == 0) break;
        if (looks > patience) {
          in_vain = true;
          break;
        }
        if constexpr (kQuiet<kTokens>) silence = ask_for_silence<kTokens>(p, token, row, parts);
        const uint4* share = from + row * all_units;
#pragma unroll
        for (int i = 0; i < kBatch<kTokens>; ++i) {
          load_sealed(v[i], share, missing >> i & 1);
          share += parts * all_units;
          asm volatile("" : "+l"(share));  // not all addresses at a time: too many registers, and instructions ahead
        }
        if (!kQuiet<kTokens> && looks == 0) find_place();  // while the first look is on its way
#pragma unroll
        for (int i = 0; i < kBatch<kTokens>; ++i) {
          if (v[i].seal == seal) missing &= ~(1u << i);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch<kTokens>; ++i) {
        if (wanted >> i & 1) {
          sum.x += __uint_as_float(static_cast<uint32_t>(v[i].columns));
          sum.y += __uint_as_float(static_cast<uint32_t>(v[i].columns >> 32));
        }
      }
    }
    if (__syncthreads_or(in_vain)) return false;
    for (int d = together; d < 32; d *= 2) {
      sum.x += __shfl_xor_sync(0xffffffffu, sum.x, d);
      sum.y += __shfl_xor_sync(0xffffffffu, sum.y, d);
    }
    const int lanes = min(together, 32);  // of a warp that hold different sums
    if (thread % 32 < lanes) scratch[together < 32 ? thread / 32 * together + thread % 32 : thread] = sum;
    __syncthreads();
    if (thread < together && inside) {
      float2 v = scratch[thread];
      float2 others[kDecodeWarps];
      const int groups = min(parts, kDecodeWarps);
#pragma unroll
      for (int q = 1; q < kDecodeWarps; ++q) {
        others[q] = q < groups ? scratch[q * together + thread] : float2{};
      }
#pragma unroll
      for (int q = 1; q < kDecodeWarps; ++q) {
        if (q < groups) v.x += others[q].x, v.y += others[q].y;
      }
      if constexpr (kScaled<Weight>) v.x *= scale.x, v.y *= scale.y;
      static_cast<uint32_t*>(p.y)[at_y] = pack<Half>(v.x + to_float(bias[0]), v.y + to_float(bias[1]));
    }
    __syncthreads();  // `scratch` is free again
  }
  return true;
}

// y, once this block has left its share.
template <typename Half, typename Weight, int kTokens>
__device__ __forceinline__ void add_up_all(const FusedParams& p, Control& c, float2* scratch, uint64_t silence) {
  constexpr int kForEver = 0x7fffffff;
  const int units = p.tokens * (p.hidden / 2);
  // Its own columns; and all others' if it is the last block and some gave up.
  int block = blockIdx.x, next = 0, patience = p.patience;
#pragma unroll 1
  while (true) {
    if (static_cast<int64_t>(block) * p.units < units &&
        !add_up<Half, Weight, kTokens>(p, c, scratch, block, patience, silence)) {
      if (threadIdx.x == 0) c.all_in = may_wait_on(p, c);
      __syncthreads();
      if (!c.all_in) return;
    } else {
      if (c.left_over == 0 || next == static_cast<int>(gridDim.x)) return;
      block = next++;
    }
    patience = kForEver, silence = 0;
  }
}

#endif

}  // namespace twell::decoding::fused
