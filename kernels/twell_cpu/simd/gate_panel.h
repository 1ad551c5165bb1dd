// The gate matmul for many tokens: tokens lie in vector lanes and each weight is broadcast as it is stored, so neither
// matrix is repacked and nothing is summed across lanes.
//
// A panel holds kPanel tokens as [unit][token], where a unit is 32 bits of a row: one fp32 or two 16-bit elements.
// `Unit` says how a unit is multiplied.
#pragma once

#include <immintrin.h>

#include "isa/kernels.h"
#include "simd/portable.h"

namespace {

constexpr int kPanelVectors = twell::kPanel / 16;
constexpr int kPanelNeurons = 6;       // x kPanelVectors vectors = 24 accumulators
constexpr int64_t kUnitsAtOnce = 256;  // of the panel, so that they stay in the first-level cache

inline uint32_t load_unit(const char* from, int64_t bytes) {
  uint32_t unit = 0;
  std::memcpy(&unit, from, static_cast<size_t>(bytes < 4 ? bytes : 4));
  return unit;
}

// Of 32-bit words, in place.
inline void transpose_16x16(__m512i (&w)[16]) {
  __m512i pairs[16], quads[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(w[i], w[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(w[i], w[i + 1]);
  }
  // quads[i + j] holds, in each of its quarters q, words 4 q + j of rows i to i + 3.
  for (int i = 0; i < 16; i += 4) {
    quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  for (int j = 0; j < 4; ++j) {  // four by four quarters
    const __m512i low = _mm512_shuffle_i32x4(quads[j], quads[4 + j], 0x44);
    const __m512i high = _mm512_shuffle_i32x4(quads[j], quads[4 + j], 0xEE);
    const __m512i low2 = _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], 0x44);
    const __m512i high2 = _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], 0xEE);
    w[j] = _mm512_shuffle_i32x4(low, low2, 0x88);
    w[4 + j] = _mm512_shuffle_i32x4(low, low2, 0xDD);
    w[8 + j] = _mm512_shuffle_i32x4(high, high2, 0x88);
    w[12 + j] = _mm512_shuffle_i32x4(high, high2, 0xDD);
  }
}

template <class T>
void pack_panel(const void* x, int64_t ld_x, int tokens, int64_t hidden, void* panel) {
  const int64_t row_bytes = hidden * static_cast<int64_t>(sizeof(T));
  const int64_t units = (row_bytes + 3) / 4, whole = row_bytes / 64 * 16;
  uint32_t* out = static_cast<uint32_t*>(panel);
  const char* rows = static_cast<const char*>(x);
  const int64_t stride = ld_x * static_cast<int64_t>(sizeof(T));
  if (tokens < twell::kPanel || row_bytes % 64 != 0)
    std::memset(panel, 0, static_cast<size_t>(twell::panel_bytes(row_bytes)));
  for (int t = 0; t < tokens; t += 16) {
    const int count = tokens - t < 16 ? tokens - t : 16;
    for (int64_t u = 0; u < whole; u += 16) {
      __m512i words[16] = {};
      for (int i = 0; i < count; ++i) words[i] = _mm512_loadu_si512(rows + (t + i) * stride + 4 * u);
      transpose_16x16(words);
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + (u + i) * twell::kPanel + t, words[i]);
    }
    for (int64_t u = whole; u < units; ++u) {
      for (int i = 0; i < count; ++i) {
        out[u * twell::kPanel + t + i] = load_unit(rows + (t + i) * stride + 4 * u, row_bytes - 4 * u);
      }
    }
  }
}

template <class Unit, int kF, int kV>
inline void gate_panel_tile(const uint32_t* panel, const char* w, int64_t w_stride, int64_t units, int64_t last_bytes,
                            const float* bias, bool first, __mmask16 last_lanes, float* out, int64_t ld_out) {
  __m512 sum[kF][kV];
  for (int f = 0; f < kF; ++f) {
    for (int v = 0; v < kV; ++v) {
      sum[f][v] = _mm512_set1_ps(first && bias ? bias[f] : 0.0f);
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
      const __mmask16 lanes = v + 1 < kV ? 0xffff : last_lanes;
      float* to = out + f * ld_out + 16 * v;
      // Parts of a row are summed on their own first, as in simd/gather_sum.h: short chains of additions round less.
      if (!first) sum[f][v] = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, to), sum[f][v]);
      _mm512_mask_storeu_ps(to, lanes, sum[f][v]);
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
    for (; f + 2 <= neurons; f += 2) {
      gate_panel_tile<Unit, 2, kV>(part, w + f * w_stride + 4 * u, w_stride, count, last_bytes,
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
                 const float* bias, const void*, float* out, int64_t ld_out) {
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
