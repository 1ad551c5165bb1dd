// simd/gate_panel.h for rows that were widened from int8. Two things differ. The rows that a thread widens next lie
// elsewhere, and are fetched meanwhile. And tiles have more neurons where few tokens leave registers for them.
#pragma once

#include <type_traits>

#include "simd/gate_panel.h"

namespace {

// int8 rows as gate_panel_tile walks over them: kUnit weights for each unit of the widened ones.
template <int kUnit>
struct NextRows {
  const char* rows;
  int64_t ld;
  NextRows from(int64_t f, int64_t u) const { return {rows + f * ld + kUnit * u, ld}; }
  template <int kF>
  inline void fetch(int64_t u) const {
    if (u % (64 / kUnit) != 0) return;
    for (int f = 0; f < kF; ++f) __builtin_prefetch(rows + f * ld + kUnit * u);
  }
};

// Units of a row that is `last_bytes` short of whole ones; adds to `out` unless this is the first part of the rows.
template <class Unit, int kF, int kV, class Next>
inline void widened_tile(const uint32_t* panel, const char* w, int64_t w_stride, int64_t units, int64_t last_bytes,
                         bool first, __mmask16 last_lanes, const Next next, float* out, int64_t ld_out) {
  __m512 sum[kF][kV];
  for (int f = 0; f < kF; ++f) {
    for (int v = 0; v < kV; ++v) sum[f][v] = _mm512_setzero_ps();
  }
  const auto step = [&](int64_t u, auto load) {
    __m512i x[kV];
    for (int v = 0; v < kV; ++v) x[v] = _mm512_loadu_si512(panel + u * twell::kPanel + 16 * v);
    for (int f = 0; f < kF; ++f) {
      const __m512i weight = _mm512_set1_epi32(load(w + f * w_stride + 4 * u));
      for (int v = 0; v < kV; ++v) sum[f][v] = Unit::accumulate(sum[f][v], weight, x[v]);
    }
  };
  const int64_t whole = last_bytes == 4 ? units : units - 1;
  for (int64_t u = 0; u < whole; ++u) {
    next.template fetch<kF>(u);
    step(u, [](const char* from) {
      int32_t unit;
      std::memcpy(&unit, from, 4);
      return unit;
    });
  }
  if (whole < units) step(whole, [&](const char* from) { return static_cast<int32_t>(load_unit(from, last_bytes)); });
  for (int f = 0; f < kF; ++f) {
    for (int v = 0; v < kV; ++v) {
      const __mmask16 lanes = v + 1 < kV ? 0xffff : last_lanes;
      float* to = out + f * ld_out + 16 * v;
      if (!first) sum[f][v] = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, to), sum[f][v]);
      _mm512_mask_storeu_ps(to, lanes, sum[f][v]);
    }
  }
}

template <class Unit, int kF, int kV, class Next>
inline void widened_rows(const uint32_t* panel, int tokens, const char* w, int64_t w_stride, int neurons,
                         int64_t row_bytes, const Next& next, float* out, int64_t ld_out) {
  const int64_t units = (row_bytes + 3) / 4;
  const __mmask16 last_lanes = static_cast<__mmask16>(0xffffu >> (16 * kV - tokens));
  for (int64_t u = 0; u < units; u += kUnitsAtOnce) {
    const int64_t count = units - u < kUnitsAtOnce ? units - u : kUnitsAtOnce;
    const int64_t last_bytes = u + count < units ? 4 : row_bytes - 4 * (units - 1);
    const auto tile = [&](int f, auto of) {
      widened_tile<Unit, decltype(of)::value, kV>(panel + u * twell::kPanel, w + f * w_stride + 4 * u, w_stride, count,
                                                  last_bytes, u == 0, last_lanes, next.from(f, u), out + f * ld_out,
                                                  ld_out);
    };
    int f = 0;
    for (; f + kF <= neurons; f += kF) tile(f, std::integral_constant<int, kF>{});
    for (; f < neurons; ++f) tile(f, std::integral_constant<int, 1>{});
  }
}

template <class Unit>
void gate_panels_widened(const void* panels, int tokens, const void* w, int64_t ld_w, int neurons, int64_t hidden,
                         const int8_t* next, int64_t ld_next, float* out, int64_t ld_out) {
  constexpr int64_t kElement = sizeof(typename Unit::Element);
  const int64_t stride = ld_w * kElement, row_bytes = hidden * kElement, bytes = twell::panel_bytes(row_bytes);
  const char *panel = static_cast<const char*>(panels), *rows = static_cast<const char*>(w);
  const NextRows<4 / kElement> ahead{reinterpret_cast<const char*>(next), ld_next};
  for (int t = 0; t < tokens; t += twell::kPanel, panel += bytes) {
    const uint32_t* units = reinterpret_cast<const uint32_t*>(panel);
    const int count = tokens - t < twell::kPanel ? tokens - t : twell::kPanel;
    switch ((count + 15) / 16) {
      case 1: widened_rows<Unit, 16, 1>(units, count, rows, stride, neurons, row_bytes, ahead, out + t, ld_out); break;
      case 2: widened_rows<Unit, 12, 2>(units, count, rows, stride, neurons, row_bytes, ahead, out + t, ld_out); break;
      case 3: widened_rows<Unit, 8, 3>(units, count, rows, stride, neurons, row_bytes, ahead, out + t, ld_out); break;
      default: widened_rows<Unit, 6, 4>(units, count, rows, stride, neurons, row_bytes, ahead, out + t, ld_out);
    }
  }
}

template <class Unit>
constexpr twell::Kernels with_widened_panels(twell::Kernels table) {
  table.gate_panels_widened = gate_panels_widened<Unit>;
  table.int8_panels_from = 16;
  return table;
}

}  // namespace
