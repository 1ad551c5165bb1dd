// Rows of int8 weights, as they lie, against tokens in fixed point: integer products, whose sums are exact.
//
// Processors multiply unsigned digits by signed weights. So 128 of every high digit come off again: 128 times the row's
// sum.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "isa/kernels.h"
#include "simd/rows_ahead.h"

namespace {

// Sums of products, as a type of 32-bit lanes: with __m512i, of 64-bit ones, g++ 12 copies each before and after use.
using Int32Lanes = int32_t __attribute__((vector_size(64)));

// sum + four products of unsigned digits and weights in each lane.
inline Int32Lanes add_products(Int32Lanes sum, __m512i digits, __m512i weights) {
  return reinterpret_cast<Int32Lanes>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), digits, weights));
}

// The lane sums of vectors, in order: a transposition of 16 that adds on its way.
template <int kCount>
inline void lane_sums(const Int32Lanes* vectors, int32_t* out) {
  for (int first = 0; first < kCount; first += 16) {
    __m512i a[8], b[4];
    const auto in = [&](int i) {
      return reinterpret_cast<__m512i>(first + i < kCount ? vectors[first + i] : Int32Lanes{});
    };
    for (int i = 0; i < 8; ++i) {
      const __m512i x = in(2 * i), y = in(2 * i + 1);
      a[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(x, y), _mm512_unpackhi_epi32(x, y));
    }
    for (int i = 0; i < 4; ++i) {
      const __m512i x = a[2 * i], y = a[2 * i + 1];
      b[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(x, y), _mm512_unpackhi_epi64(x, y));
    }
    const auto quarters = [](__m512i x, __m512i y) {
      return _mm512_add_epi32(_mm512_shuffle_i32x4(x, y, 0x88), _mm512_shuffle_i32x4(x, y, 0xdd));
    };
    const int count = kCount - first < 16 ? kCount - first : 16;
    const __mmask16 lanes = static_cast<__mmask16>((1u << count) - 1);
    _mm512_mask_storeu_epi32(out + first, lanes, quarters(quarters(b[0], b[1]), quarters(b[2], b[3])));
  }
}

// What kF <= 16 rows add up to.
template <int kF>
inline void row_sums(const int8_t* w, int64_t ld_w, int64_t hidden, int32_t* out) {
  Int32Lanes sum[kF];
  for (int f = 0; f < kF; ++f) sum[f] = Int32Lanes{};
  const __m512i one = _mm512_set1_epi8(1);
  int64_t d = 0;
  for (; d + 64 <= hidden; d += 64) {
    for (int f = 0; f < kF; ++f) sum[f] = add_products(sum[f], one, _mm512_loadu_si512(w + f * ld_w + d));
  }
  const __mmask64 rest = (1ull << (hidden - d)) - 1;
  for (int f = 0; f < kF; ++f) sum[f] = add_products(sum[f], one, _mm512_maskz_loadu_epi8(rest, w + f * ld_w + d));
  lane_sums<kF>(sum, out);
}

// kF rows and kT tokens.
template <int kF, int kT>
inline void fixed_tile(const uint8_t* digits, int64_t ld, const float* steps, const int8_t* w, int64_t ld_w,
                       int64_t hidden, const int32_t* of_row, const RowsAhead ahead, float* out, int64_t ld_out) {
  Int32Lanes sum[kF * 2 * kT];  // of each token's high and low digits
  for (int i = 0; i < kF * 2 * kT; ++i) sum[i] = Int32Lanes{};
  const auto step = [&](int64_t d, auto load) {
    __m512i weight[kF];
    for (int f = 0; f < kF; ++f) weight[f] = load(w + f * ld_w + d);
    for (int t = 0; t < 2 * kT; ++t) {
      const __m512i digit = _mm512_loadu_si512(digits + t * ld + d);
      for (int f = 0; f < kF; ++f) sum[f * 2 * kT + t] = add_products(sum[f * 2 * kT + t], digit, weight[f]);
    }
  };
  int64_t d = 0;
  for (; d + 64 <= hidden; d += 64) {
    ahead.fetch(d);
    step(d, [](const int8_t* from) { return _mm512_loadu_si512(from); });
  }
  if (d < hidden) {
    const __mmask64 rest = (1ull << (hidden - d)) - 1;
    step(d, [&](const int8_t* from) { return _mm512_maskz_loadu_epi8(rest, from); });
  }
  int32_t total[kF * 2 * kT];
  lane_sums<kF * 2 * kT>(sum, total);
  for (int f = 0; f < kF; ++f) {
    for (int t = 0; t < kT; ++t) {
      const int32_t high = total[2 * (f * kT + t)] - 128 * of_row[f], low = total[2 * (f * kT + t) + 1];
      out[f * ld_out + t] = (256.0f * static_cast<float>(high) + static_cast<float>(low)) * steps[t];
    }
  }
}

template <int kF>
inline void fixed_rows(const uint8_t* digits, int64_t ld, const float* steps, int tokens, const int8_t* w, int64_t ld_w,
                       int64_t hidden, const RowsAhead ahead, float* out, int64_t ld_out) {
  int32_t of_row[kF];
  row_sums<kF>(w, ld_w, hidden, of_row);
  const int tiles = (tokens + 1) / 2;
  const auto tile = [&](int i, auto of) {
    constexpr int kT = decltype(of)::value;
    const int t = 2 * i;
    fixed_tile<kF, kT>(digits + 2 * t * ld, ld, steps + t, w, ld_w, hidden, of_row, ahead.part(i, tiles), out + t,
                       ld_out);
  };
  for (int i = 0; i < tokens / 2; ++i) tile(i, std::integral_constant<int, 2>{});
  if (tokens % 2 > 0) tile(tokens / 2, std::integral_constant<int, 1>{});
}

void gate_fixed(const twell::FixedRows& x, int tokens, const int8_t* w, int64_t ld_w, int neurons, int64_t hidden,
                const int8_t* next, float* out, int64_t ld_out) {
  int f = 0;
  for (; f + 4 <= neurons; f += 4) {
    fixed_rows<4>(x.digits, x.ld, x.step, tokens, w + f * ld_w, ld_w, hidden, rows_ahead(w, next, ld_w, f, 4, neurons),
                  out + f * ld_out, ld_out);
  }
  for (; f < neurons; ++f) {
    fixed_rows<1>(x.digits, x.ld, x.step, tokens, w + f * ld_w, ld_w, hidden, rows_ahead(w, next, ld_w, f, 1, neurons),
                  out + f * ld_out, ld_out);
  }
}

}  // namespace
