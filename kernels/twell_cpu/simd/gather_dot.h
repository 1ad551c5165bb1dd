// One weight row against the tokens that use it: the row comes from memory once, the tokens from cache.
#pragma once

#include "simd/gate.h"

namespace {

template <class Simd, class Dot, int kT>
inline void gather_dot_tile(const typename Dot::Element* row, const typename Dot::Element* x, int64_t ld_x,
                            const uint32_t* tokens, int64_t hidden, float* out) {
  const typename Dot::Element* token[kT];
  typename Simd::Vector sum[kT];
  for (int t = 0; t < kT; ++t) {
    token[t] = x + static_cast<int64_t>(tokens[t]) * ld_x;
    sum[t] = Simd::zero();
  }
  // Two accumulators a token hide the latency when few tokens share the row.
  typename Simd::Vector odd[kT];
  for (int t = 0; t < kT; ++t) odd[t] = Simd::zero();
  int64_t d = 0;
  for (; d + 2 * Dot::kStep <= hidden; d += 2 * Dot::kStep) {
    const auto step = Dot::load(row + d);
    const auto next = Dot::load(row + d + Dot::kStep);
    for (int t = 0; t < kT; ++t) {
      sum[t] = Dot::accumulate(sum[t], step, Dot::load(token[t] + d));
      odd[t] = Dot::accumulate(odd[t], next, Dot::load(token[t] + d + Dot::kStep));
    }
  }
  for (; d < hidden; d += Dot::kStep) {
    const int rest = hidden - d < Dot::kStep ? static_cast<int>(hidden - d) : Dot::kStep;
    const auto step = Dot::load(row + d, rest);
    for (int t = 0; t < kT; ++t) sum[t] = Dot::accumulate(sum[t], step, Dot::load(token[t] + d, rest));
  }
  for (int t = 0; t < kT; ++t) out[t] = Simd::sum(sum[t]) + Simd::sum(odd[t]);
}

template <class Simd, class Dot>
void gather_dot(const void* row, const void* x, int64_t ld_x, const uint32_t* tokens, int64_t count, int64_t hidden,
                float* out) {
  using T = typename Dot::Element;
  const T* w = static_cast<const T*>(row);
  const T* all = static_cast<const T*>(x);
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) gather_dot_tile<Simd, Dot, 4>(w, all, ld_x, tokens + i, hidden, out + i);
  for (; i + 2 <= count; i += 2) gather_dot_tile<Simd, Dot, 2>(w, all, ld_x, tokens + i, hidden, out + i);
  for (; i < count; ++i) gather_dot_tile<Simd, Dot, 1>(w, all, ld_x, tokens + i, hidden, out + i);
}

}  // namespace
