// The gate matmul for many tokens where no instruction multiplies the element type: simd/gate_panel.h in fp32. Tokens
// lie in vector lanes, and each weight is widened once for all of them and broadcast.
//
// A panel holds kPanel tokens as [strip][column][token of the strip] in fp32. A strip's tokens fill the registers.
#pragma once

#include <algorithm>
#include <type_traits>

#include "isa/kernels.h"
#include "simd/portable.h"

namespace {

constexpr int64_t kWideColumns = 256;    // at once: a strip of them stays in the first-level cache
constexpr int64_t kWidenedAtOnce = 128;  // columns of x, when panels are made

template <class Simd>
constexpr int kStripVectors = Simd::kLanes == 16 ? 4 : 2;
template <class Simd>
constexpr int kStrip = kStripVectors<Simd> * Simd::kLanes;  // tokens

// Columns of a strip of which `panel_bytes` leaves room for whole cache lines.
inline int64_t strip_columns(int64_t hidden) { return twell::panel_bytes(4 * hidden) / (4 * twell::kPanel); }

template <class Simd, class T>
void pack_wide(const void* x, int64_t ld_x, int tokens, int64_t hidden, void* panel) {
  constexpr int kTokens = kStrip<Simd>;
  const T* rows = static_cast<const T*>(x);
  float* strip = static_cast<float*>(panel);
  float widened[kTokens * kWidenedAtOnce];
  for (int t = 0; t < tokens; t += kTokens, strip += kTokens * strip_columns(hidden)) {
    const int count = std::min(kTokens, tokens - t);
    std::fill_n(widened, kTokens * kWidenedAtOnce, 0.0f);
    for (int64_t d = 0; d < hidden; d += kWidenedAtOnce) {
      const int64_t some = std::min(kWidenedAtOnce, hidden - d);
      for (int i = 0; i < count; ++i) {
        const T* from = rows + (t + i) * ld_x + d;
        float* to = widened + i * kWidenedAtOnce;
        int64_t c = 0;
        for (; c + Simd::kLanes <= some; c += Simd::kLanes) Simd::store(to + c, Simd::load(from + c));
        if (c < some) Simd::store(to + c, Simd::load(from + c, static_cast<int>(some - c)), static_cast<int>(some - c));
      }
      float* to = strip + d * kTokens;
      for (int64_t c = 0; c < some; ++c, to += kTokens) {
        for (int i = 0; i < kTokens; ++i) to[i] = widened[i * kWidenedAtOnce + c];
      }
    }
  }
}

template <class Simd, int kF, int kV>
inline void wide_tile(const float* strip, int tokens, const float* w, int64_t ld_w, int64_t columns, const float* bias,
                      bool first, float* out, int64_t ld_out) {
  constexpr int kLanes = Simd::kLanes;
  typename Simd::Vector sum[kF][kV];
  for (int f = 0; f < kF; ++f) {
    for (int v = 0; v < kV; ++v) sum[f][v] = first && bias ? Simd::broadcast(bias[f]) : Simd::zero();
  }
  for (int64_t d = 0; d < columns; ++d, strip += kStrip<Simd>) {
    typename Simd::Vector x[kV];
    for (int v = 0; v < kV; ++v) x[v] = Simd::load(strip + v * kLanes);
    for (int f = 0; f < kF; ++f) {
      const auto weight = Simd::broadcast(w[f * ld_w + d]);
      for (int v = 0; v < kV; ++v) sum[f][v] = Simd::multiply_add(weight, x[v], sum[f][v]);
    }
  }
  const int rest = tokens - (kV - 1) * kLanes;  // of the last vector
  for (int f = 0; f < kF; ++f) {
    for (int v = 0; v < kV; ++v) {
      float* to = out + f * ld_out + v * kLanes;
      // Parts of a row are summed on their own first: short chains of additions round less.
      if (v + 1 < kV || rest == kLanes) {
        Simd::store(to, first ? sum[f][v] : Simd::add(Simd::load(to), sum[f][v]));
      } else {
        Simd::store(to, first ? sum[f][v] : Simd::add(Simd::load(to, rest), sum[f][v]), rest);
      }
    }
  }
}

// Columns [d, d + columns) of kF neurons against all tokens; kV is how many vectors the first strip fills.
template <class Simd, class T, int kF, int kV>
inline void wide_rows(const float* panels, int tokens, const T* w, int64_t ld_w, int64_t hidden, int64_t d,
                      int64_t columns, const float* bias, float* out, int64_t ld_out) {
  constexpr int kTokens = kStrip<Simd>;
  constexpr bool kWidens = !std::is_same_v<T, float>;
  float widened[kWidens ? kF * kWideColumns : 1];
  for (int f = 0; kWidens && f < kF; ++f) {
    const T* from = w + f * ld_w + d;
    float* to = widened + f * kWideColumns;
    int64_t c = 0;
    for (; c + Simd::kLanes <= columns; c += Simd::kLanes) Simd::store(to + c, Simd::load(from + c));
    for (; c < columns; ++c) to[c] = to_float(from[c]);
  }
  const float* rows = widened;
  int64_t ld = kWideColumns;
  if constexpr (!kWidens) {
    rows = w + d;
    ld = ld_w;
  }
  const int64_t line = 64 / static_cast<int64_t>(sizeof(T)), lines = (columns + line - 1) / line;
  const int strips = (tokens + kTokens - 1) / kTokens;
  for (int s = 0; s < strips; ++s) {
    // The next neurons' cache lines, which hardware starts on too late.
    for (int64_t i = s * lines / strips; i < (s + 1) * lines / strips; ++i) {
      for (int f = 0; f < kF; ++f) __builtin_prefetch(w + (f + kF) * ld_w + d + i * line);
    }
    const int t = s * kTokens, count = std::min(kTokens, tokens - t);
    const float* strip = panels + strip_columns(hidden) * t + d * kTokens;
    const auto tile = [&](auto vectors) {
      wide_tile<Simd, kF, decltype(vectors)::value>(strip, count, rows, ld, columns, bias, d == 0, out + t, ld_out);
    };
    const int vectors = (count + Simd::kLanes - 1) / Simd::kLanes;
    if (vectors == kV) tile(std::integral_constant<int, kV>{});
    if constexpr (kV == kStripVectors<Simd>) {  // only then others follow the first
      if constexpr (kV > 3) {
        if (vectors == 3) tile(std::integral_constant<int, 3>{});
        if (vectors == 2) tile(std::integral_constant<int, 2>{});
      }
      if (vectors == 1) tile(std::integral_constant<int, 1>{});
    }
  }
}

template <class Simd, class T, int kF, int kV>
inline void wide_tokens(const void* panels, int tokens, const void* w, int64_t ld_w, int neurons, int64_t hidden,
                        const float* bias, float* out, int64_t ld_out) {
  for (int64_t d = 0; d < hidden; d += kWideColumns) {
    int f = 0;
    const auto all = [&](auto at_once) {
      constexpr int kSome = decltype(at_once)::value;
      for (; f + kSome <= neurons; f += kSome) {
        wide_rows<Simd, T, kSome, kV>(static_cast<const float*>(panels), tokens, static_cast<const T*>(w) + f * ld_w,
                                      ld_w, hidden, d, std::min(kWideColumns, hidden - d), bias ? bias + f : nullptr,
                                      out + f * ld_out, ld_out);
      }
    };
    all(std::integral_constant<int, kF>{});
    all(std::integral_constant<int, 4>{});
    all(std::integral_constant<int, 2>{});
    all(std::integral_constant<int, 1>{});
  }
}

// Each tile fills the registers: as many neurons as the tokens' vectors leave room for.
template <class Simd, class T>
void gate_wide(const void* panels, int tokens, const void* w, int64_t ld_w, int neurons, int64_t hidden,
               const float* bias, const void*, float* out, int64_t ld_out) {
  const int vectors = (tokens + Simd::kLanes - 1) / Simd::kLanes;
  const auto run = [&](auto kernel) { kernel(panels, tokens, w, ld_w, neurons, hidden, bias, out, ld_out); };
  if constexpr (kStripVectors<Simd> == 4) {
    if (vectors == 1) return run(wide_tokens<Simd, T, 16, 1>);
    if (vectors == 2) return run(wide_tokens<Simd, T, 12, 2>);
    if (vectors == 3) return run(wide_tokens<Simd, T, 8, 3>);
    run(wide_tokens<Simd, T, 6, 4>);
  } else {
    if (vectors == 1) return run(wide_tokens<Simd, T, 12, 1>);
    run(wide_tokens<Simd, T, 6, 2>);
  }
}

template <class Simd, class T>
constexpr twell::Kernels with_wide_panels(twell::Kernels table) {
  table.gate_panels = gate_wide<Simd, T>;
  table.pack_panel = pack_wide<Simd, T>;
  table.gate_panels_widened = nullptr;
  table.panel_element = 4;
  table.panels_from = 16;
  return table;
}

}  // namespace
