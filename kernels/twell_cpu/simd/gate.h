// The gate matmul over a cache-sized block: rows of x against rows of w, so weights are read as they are stored.
//
// A register tile of kTileF neurons x up to kTileT tokens accumulates whole vectors and is summed across lanes once, at
// the end of the row. `Dot` says how one step of a row is loaded and accumulated.
#pragma once

#include "simd/portable.h"

namespace {

constexpr int kTileF = 4;

// One fp32 vector a step; every element type is widened as it is loaded.
template <class Simd, class T>
struct WideningDot {
  using Element = T;
  using Vector = typename Simd::Vector;
  using Operand = typename Simd::Vector;
  static constexpr int kStep = Simd::kLanes;
  static inline Operand load(const T* from) {
    return Simd::load(from);
  }
  static inline Operand load(const T* from, int count) {
    return Simd::load(from, count);
  }
  static inline Vector accumulate(Vector sum, Operand a, Operand b) {
    return Simd::multiply_add(a, b, sum);
  }
};

// kAhead: fetch the next neurons' rows meanwhile, which hardware starts on too late at each row's end.
template <class Simd, class Dot, int kF, int kT, bool kAhead>
inline void gate_tile(const typename Dot::Element* x, int64_t ld_x, const typename Dot::Element* w, int64_t ld_w,
                      int64_t hidden, const float* bias, float* out, int64_t ld_out) {
  typename Simd::Vector sum[kF * kT];
  for (int i = 0; i < kF * kT; ++i) sum[i] = Simd::zero();
  int64_t d = 0;
  for (; d + Dot::kStep <= hidden; d += Dot::kStep) {
    typename Dot::Operand x_step[kT];
    for (int t = 0; t < kT; ++t) x_step[t] = Dot::load(x + t * ld_x + d);
    for (int f = 0; f < kF; ++f) {
      if (kAhead) __builtin_prefetch(w + (f + kF) * ld_w + d);
      const typename Dot::Operand w_step = Dot::load(w + f * ld_w + d);
      for (int t = 0; t < kT; ++t) sum[f * kT + t] = Dot::accumulate(sum[f * kT + t], w_step, x_step[t]);
    }
  }
  if (d < hidden) {
    const int rest = static_cast<int>(hidden - d);
    typename Dot::Operand x_step[kT];
    for (int t = 0; t < kT; ++t) x_step[t] = Dot::load(x + t * ld_x + d, rest);
    for (int f = 0; f < kF; ++f) {
      const typename Dot::Operand w_step = Dot::load(w + f * ld_w + d, rest);
      for (int t = 0; t < kT; ++t) sum[f * kT + t] = Dot::accumulate(sum[f * kT + t], w_step, x_step[t]);
    }
  }
  float total[kF * kT];
  Simd::template sums<kF * kT>(sum, total);
  for (int f = 0; f < kF; ++f) {
    const float add = bias ? bias[f] : 0.0f;
    for (int t = 0; t < kT; ++t) out[f * ld_out + t] = total[f * kT + t] + add;
  }
}

template <class Simd, class Dot, int kF, bool kAhead>
inline void gate_rows(const typename Dot::Element* x, int64_t ld_x, int tokens, const typename Dot::Element* w,
                      int64_t ld_w, int64_t hidden, const float* bias, float* out, int64_t ld_out) {
  int t = 0;
  if (tokens >= 4) {
    gate_tile<Simd, Dot, kF, 4, kAhead>(x, ld_x, w, ld_w, hidden, bias, out, ld_out);
    t = 4;
  }
  for (; t + 4 <= tokens; t += 4) {
    gate_tile<Simd, Dot, kF, 4, false>(x + t * ld_x, ld_x, w, ld_w, hidden, bias, out + t, ld_out);
  }
  const auto* rest = x + t * ld_x;
  if (tokens - t == 3) gate_tile<Simd, Dot, kF, 3, kAhead>(rest, ld_x, w, ld_w, hidden, bias, out + t, ld_out);
  if (tokens - t == 2) gate_tile<Simd, Dot, kF, 2, kAhead>(rest, ld_x, w, ld_w, hidden, bias, out + t, ld_out);
  // Rows of fp32 are twice as long, and against one token hardware alone keeps up.
  constexpr bool kOneAhead = kAhead && sizeof(typename Dot::Element) < 4;
  if (tokens - t == 1) gate_tile<Simd, Dot, kF, 1, kOneAhead>(rest, ld_x, w, ld_w, hidden, bias, out + t, ld_out);
}

template <class Simd, class Dot>
void gate(const void* x, int64_t ld_x, int tokens, const void* w, int64_t ld_w, int neurons, int64_t hidden,
          const float* bias, float* out, int64_t ld_out) {
  using T = typename Dot::Element;
  const T* rows = static_cast<const T*>(w);
  int f = 0;
  for (; f + kTileF <= neurons; f += kTileF) {
    gate_rows<Simd, Dot, kTileF, true>(static_cast<const T*>(x), ld_x, tokens, rows + f * ld_w, ld_w, hidden,
                                 bias ? bias + f : nullptr, out + f * ld_out, ld_out);
  }
  for (; f < neurons; ++f) {
    gate_rows<Simd, Dot, 1, false>(static_cast<const T*>(x), ld_x, tokens, rows + f * ld_w, ld_w, hidden,
                            bias ? bias + f : nullptr, out + f * ld_out, ld_out);
  }
}

}  // namespace
