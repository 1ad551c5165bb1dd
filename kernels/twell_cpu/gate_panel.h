// The gate matmul for many tokens: tokens lie in vector lanes and each weight is broadcast as it is stored, so neither
// matrix is repacked and nothing is summed across lanes.
//
// A panel holds kPanel tokens as [unit][token], where a unit is 32 bits of a row: one fp32 or two 16-bit elements.
// `Unit` says how a unit is multiplied.
#pragma once

#include <immintrin.h>

#include "kernels.h"
#include "simd_portable.h"

namespace {

constexpr int kPanelVectors = twell::kPanel / 16;
constexpr int kPanelNeurons = 6;         // x kPanelVectors vectors = 24 accumulators
constexpr int64_t kUnitsAtOnce = 256;    // of the panel, so that they stay in the first-level cache

inline uint32_t load_unit(const char* from, int64_t bytes) {
  uint32_t unit = 0;
  std::memcpy(&unit, from, static_cast<size_t>(bytes < 4 ? bytes : 4));
  return unit;
}

template <class T>
void pack_panel(const void* x, int64_t ld_x, int tokens, int64_t hidden, void* panel) {
  const int64_t row_bytes = hidden * static_cast<int64_t>(sizeof(T)), units = (row_bytes + 3) / 4, whole = row_bytes / 4;
  uint32_t* out = static_cast<uint32_t*>(panel);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const char* rows = static_cast<const char*>(x);
  const int64_t stride = ld_x * static_cast<int64_t>(sizeof(T));
  if (tokens < twell::kPanel || row_bytes % 64 != 0) std::memset(panel, 0, static_cast<size_t>(twell::panel_bytes(row_bytes)));
  const __m512i step = _mm512_mullo_epi32(lane, _mm512_set1_epi32(twell::kPanel));
  for (int t = 0; t < tokens; ++t) {
    const char* row = rows + t * stride;
    int64_t u = 0;
    for (; u + 16 <= whole; u += 16) {
      _mm512_i32scatter_epi32(out + u * twell::kPanel + t, step, _mm512_loadu_si512(row + 4 * u), 4);
    }
    for (; u < units; ++u) out[u * twell::kPanel + t] = load_unit(row + 4 * u, row_bytes - 4 * u);
  }
}

template <class Unit, int kF, int kV>
inline void gate_panel_tile(const uint32_t* panel, const char* w, int64_t w_stride, int64_t units, int64_t last_bytes,
                            const float* bias, bool first, __mmask16 last_lanes, float* out, int64_t ld_out) {
  __m512 sum[kF][kV];
  for (int f = 0; f < kF; ++f) {
    for (int v = 0; v < kV; ++v) {
      sum[f][v] = first ? _mm512_set1_ps(bias ? bias[f] : 0.0f)
                        : _mm512_maskz_loadu_ps(v + 1 < kV ? 0xffff : last_lanes, out + f * ld_out + 16 * v);
    }
  }
  const int64_t whole = last_bytes == 4 ? units : units - 1;
  int64_t u = 0;
  for (; u < whole; ++u) {
    if (u % 16 == 0) {  // the next neurons' cache lines, which hardware starts on too late
      for (int f = 0; f < kF; ++f) __builtin_prefetch(w + (f + kF) * w_stride + 4 * u);
    }
    __m512i x[kV];
    for (int v = 0; v < kV; ++v) x[v] = _mm512_loadu_si512(panel + u * twell::kPanel + 16 * v);
    for (int f = 0; f < kF; ++f) {
      int32_t unit;
      std::memcpy(&unit, w + f * w_stride + 4 * u, 4);
      const __m512i weight = _mm512_set1_epi32(unit);
      for (int v = 0; v < kV; ++v) sum[f][v] = Unit::accumulate(sum[f][v], weight, x[v]);
    }
  }
  for (; u < units; ++u) {
    for (int f = 0; f < kF; ++f) {
      const __m512i weight = _mm512_set1_epi32(static_cast<int32_t>(load_unit(w + f * w_stride + 4 * u, last_bytes)));
      for (int v = 0; v < kV; ++v) {
        sum[f][v] = Unit::accumulate(sum[f][v], weight, _mm512_loadu_si512(panel + u * twell::kPanel + 16 * v));
      }
    }
  }
  for (int f = 0; f < kF; ++f) {
    for (int v = 0; v < kV; ++v) {
      _mm512_mask_storeu_ps(out + f * ld_out + 16 * v, v + 1 < kV ? 0xffff : last_lanes, sum[f][v]);
    }
  }
}

template <class Unit, int kV>
inline void gate_panel_rows(const uint32_t* panel, int tokens, const char* w, int64_t w_stride, int neurons,
                            int64_t row_bytes, const float* bias, float* out, int64_t ld_out) {
  const int64_t units = (row_bytes + 3) / 4;
  const __mmask16 last_lanes = static_cast<__mmask16>(0xffffu >> (16 * kV - tokens));
  for (int64_t u = 0; u < units; u += kUnitsAtOnce) {
    const int64_t count = units - u < kUnitsAtOnce ? units - u : kUnitsAtOnce;
    const int64_t last_bytes = u + count < units ? 4 : row_bytes - 4 * (units - 1);
    const uint32_t* part = panel + u * twell::kPanel;
    int f = 0;
    for (; f + kPanelNeurons <= neurons; f += kPanelNeurons) {
      gate_panel_tile<Unit, kPanelNeurons, kV>(part, w + f * w_stride + 4 * u, w_stride, count, last_bytes,
                                               bias ? bias + f : nullptr, u == 0, last_lanes, out + f * ld_out, ld_out);
    }
    for (; f < neurons; ++f) {
      gate_panel_tile<Unit, 1, kV>(part, w + f * w_stride + 4 * u, w_stride, count, last_bytes,
                                   bias ? bias + f : nullptr, u == 0, last_lanes, out + f * ld_out, ld_out);
    }
  }
}

template <class Unit>
inline void gate_panel(const void* panel, int tokens, const void* w, int64_t ld_w, int neurons, int64_t hidden,
                       const float* bias, float* out, int64_t ld_out) {
  using T = typename Unit::Element;
  const uint32_t* units = static_cast<const uint32_t*>(panel);
  const char* rows = static_cast<const char*>(w);
  const int64_t element = sizeof(T), stride = ld_w * element, row_bytes = hidden * element;
  switch ((tokens + 15) / 16) {
    case 1: return gate_panel_rows<Unit, 1>(units, tokens, rows, stride, neurons, row_bytes, bias, out, ld_out);
    case 2: return gate_panel_rows<Unit, 2>(units, tokens, rows, stride, neurons, row_bytes, bias, out, ld_out);
    case 3: return gate_panel_rows<Unit, 3>(units, tokens, rows, stride, neurons, row_bytes, bias, out, ld_out);
    default: return gate_panel_rows<Unit, 4>(units, tokens, rows, stride, neurons, row_bytes, bias, out, ld_out);
  }
}

template <class Unit>
void gate_panels(const void* panels, int tokens, const void* w, int64_t ld_w, int neurons, int64_t hidden,
                 const float* bias, float* out, int64_t ld_out) {
  const int64_t bytes = twell::panel_bytes(hidden * static_cast<int64_t>(sizeof(typename Unit::Element)));
  const char* panel = static_cast<const char*>(panels);
  for (int t = 0; t < tokens; t += twell::kPanel, panel += bytes) {
    gate_panel<Unit>(panel, tokens - t < twell::kPanel ? tokens - t : twell::kPanel, w, ld_w, neurons, hidden, bias,
                     out + t, ld_out);
  }
}

template <class Unit>
constexpr twell::Kernels with_panels(twell::Kernels table) {
  table.gate_panels = gate_panels<Unit>;
  table.pack_panel = pack_panel<typename Unit::Element>;
  return table;
}

}  // namespace
