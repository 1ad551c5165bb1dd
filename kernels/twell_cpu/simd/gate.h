// The gate matmul over a cache-sized block: rows of x against rows of w, so weights are read as they are stored.
//
// A register tile of kTileF neurons x up to kTileT tokens accumulates whole vectors and is summed across lanes once, at
// the end of the row. `Dot` says how one step of a row is loaded and accumulated.
#pragma once

#include <type_traits>

#include "simd/portable.h"
#include "simd/rows_ahead.h"

namespace {

constexpr int kTileF = 4, kTileT = 4;

// One fp32 vector a step; every element type is widened as it is loaded.
template <class Simd, class T>
struct WideningDot {
  using Element = T;
  using Vector = typename Simd::Vector;
  using Operand = typename Simd::Vector;
  static constexpr int kStep = Simd::kLanes;
  static inline Operand load(const T* from) { return Simd::load(from); }
  static inline Operand load(const T* from, int count) { return Simd::load(from, count); }
  static inline Vector accumulate(Vector sum, Operand a, Operand b) { return Simd::multiply_add(a, b, sum); }
};

template <class Simd, class Dot, int kF, int kT>
inline void gate_tile(const typename Dot::Element* x, int64_t ld_x, const typename Dot::Element* w, int64_t ld_w,
                      int64_t hidden, const float* bias, const RowsAhead ahead, float* out, int64_t ld_out) {
  constexpr int kElement = sizeof(typename Dot::Element), kLine = kCacheLine / kElement;
  typename Simd::Vector sum[kF * kT];
  for (int i = 0; i < kF * kT; ++i) sum[i] = Simd::zero();
  // `count` in place of a whole step at the end of the rows.
  const auto step = [&](int64_t d, auto... count) {
    typename Dot::Operand x_step[kT];
    for (int t = 0; t < kT; ++t) x_step[t] = Dot::load(x + t * ld_x + d, count...);
    for (int f = 0; f < kF; ++f) {
      const typename Dot::Operand w_step = Dot::load(w + f * ld_w + d, count...);
      for (int t = 0; t < kT; ++t) sum[f * kT + t] = Dot::accumulate(sum[f * kT + t], w_step, x_step[t]);
    }
  };
  int64_t d = 0;
  for (; d + kLine <= hidden; d += kLine) {
    ahead.fetch(d * kElement);
    for (int i = 0; i < kLine; i += Dot::kStep) step(d + i);
  }
  for (; d + Dot::kStep <= hidden; d += Dot::kStep) step(d);
  if (d < hidden) step(d, static_cast<int>(hidden - d));
  float total[kF * kT];
  Simd::template sums<kF * kT>(sum, total);
  for (int f = 0; f < kF; ++f) {
    const float add = bias ? bias[f] : 0.0f;
    for (int t = 0; t < kT; ++t) out[f * ld_out + t] = total[f * kT + t] + add;
  }
}

template <class Simd, class Dot, int kF>
inline void gate_rows(const typename Dot::Element* x, int64_t ld_x, int tokens, const typename Dot::Element* w,
                      int64_t ld_w, int64_t hidden, const float* bias, const RowsAhead ahead, float* out,
                      int64_t ld_out) {
  const int tiles = (tokens + kTileT - 1) / kTileT;
  const auto tile = [&](int i, auto of) {
    constexpr int kT = decltype(of)::value;
    const int t = i * kTileT;
    gate_tile<Simd, Dot, kF, kT>(x + t * ld_x, ld_x, w, ld_w, hidden, bias, ahead.part(i, tiles), out + t, ld_out);
  };
  for (int i = 0; i < tokens / kTileT; ++i) tile(i, std::integral_constant<int, kTileT>{});
  if (tokens % kTileT == 3) tile(tiles - 1, std::integral_constant<int, 3>{});
  if (tokens % kTileT == 2) tile(tiles - 1, std::integral_constant<int, 2>{});
  if (tokens % kTileT == 1) tile(tiles - 1, std::integral_constant<int, 1>{});
}

template <class Simd, class Dot>
void gate(const void* x, int64_t ld_x, int tokens, const void* w, int64_t ld_w, int neurons, int64_t hidden,
          const float* bias, const void* next, float* out, int64_t ld_out) {
  using T = typename Dot::Element;
  const int64_t row_bytes = ld_w * static_cast<int64_t>(sizeof(T));
  const auto rows = [&](int f, auto of) {
    constexpr int kF = decltype(of)::value;
    const T* from = static_cast<const T*>(w) + f * ld_w;
    gate_rows<Simd, Dot, kF>(static_cast<const T*>(x), ld_x, tokens, from, ld_w, hidden, bias ? bias + f : nullptr,
                             rows_ahead(w, next, row_bytes, f, kF, neurons), out + f * ld_out, ld_out);
  };
  int f = 0;
  for (; f + kTileF <= neurons; f += kTileF) rows(f, std::integral_constant<int, kTileF>{});
  for (; f < neurons; ++f) rows(f, std::integral_constant<int, 1>{});
}

}  // namespace
