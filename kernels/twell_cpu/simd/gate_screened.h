// Rows of int8 weights against tokens in fixed point, whose low digits are read only where relu may keep something.
//
// A sum over a row w is base * high + low, of the high and the low digits. With any middle m and the row's sum s, low
// is m * s + (low digits - m) . w, and by Cauchy-Schwarz the last product is at most the norms of both multiplied.
// Where the sum is negative whatever it is, half of the products suffice: so it is for most elements of a sparse block.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "simd/gate_fixed.h"

namespace {

constexpr int kScreenRows = 4, kScreenTokens = 4;  // of a register tile

// step(d, load, set) for every 64 columns. The first step sets what others add to: g++ 12 clears arrays in memory.
template <class Step>
inline void each_step(int64_t hidden, const RowsAhead ahead, const Step& step) {
  const auto some = [&](int64_t d) {
    const __mmask64 lanes = hidden - d < 64 ? (1ull << (hidden - d)) - 1 : ~0ull;
    return [lanes](const int8_t* from) { return _mm512_maskz_loadu_epi8(lanes, from); };
  };
  ahead.fetch(0);
  step(0, some(0), std::true_type{});
  int64_t d = 64;
  for (; d + 64 <= hidden; d += 64) {
    ahead.fetch(d);
    step(d, [](const int8_t* from) { return _mm512_loadu_si512(from); }, std::false_type{});
  }
  if (d < hidden) step(d, some(d), std::false_type{});
}

// kScreenRows rows, of which some may be the same, and their sums and norms.
struct ScreenedRows {
  const int8_t* row[kScreenRows];
  int32_t sum[kScreenRows];
  float norm[kScreenRows];
};

// `count` <= kScreenRows rows; a row that is not there is the last one again. Squares are summed of 16-bit elements:
// 128 * 128 does not fit where one factor is an unsigned byte and the other a signed.
inline ScreenedRows screened_rows(const int8_t* w, int64_t ld_w, int count, int64_t hidden) {
  ScreenedRows rows;
  for (int f = 0; f < kScreenRows; ++f) rows.row[f] = w + std::min(f, count - 1) * ld_w;
  Int32Lanes sum[2 * kScreenRows];
  const __m512i one = _mm512_set1_epi8(1);
  each_step(hidden, RowsAhead{}, [&](int64_t d, auto load, auto set) {
    for (int f = 0; f < kScreenRows; ++f) {
      const __m512i weights = load(rows.row[f] + d);
      sum[f] = add_products(set ? Int32Lanes{} : sum[f], one, weights);
      const __m512i low = _mm512_cvtepi8_epi16(_mm512_castsi512_si256(weights));
      const __m512i high = _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(weights, 1));
      Int32Lanes& squares = sum[kScreenRows + f];
      const __m512i before = reinterpret_cast<__m512i>(set ? Int32Lanes{} : squares);
      squares = reinterpret_cast<Int32Lanes>(_mm512_dpwssd_epi32(_mm512_dpwssd_epi32(before, low, low), high, high));
    }
  });
  int32_t total[2 * kScreenRows];
  lane_sums<2 * kScreenRows>(sum, total);
  for (int f = 0; f < kScreenRows; ++f) {
    rows.sum[f] = total[f];
    rows.norm[f] = std::sqrt(static_cast<float>(total[kScreenRows + f]));
  }
  return rows;
}

// One row against one token's low digits.
inline int32_t low_product(const uint8_t* low, const int8_t* w, int64_t hidden) {
  Int32Lanes sum[2] = {};
  int64_t d = 0;
  for (; d + 128 <= hidden; d += 128) {
    for (int i = 0; i < 2; ++i) {
      sum[i] = add_products(sum[i], _mm512_loadu_si512(low + d + 64 * i), _mm512_loadu_si512(w + d + 64 * i));
    }
  }
  for (; d < hidden; d += 64) {
    const __mmask64 lanes = hidden - d < 64 ? (1ull << (hidden - d)) - 1 : ~0ull;
    sum[0] = add_products(sum[0], _mm512_maskz_loadu_epi8(lanes, low + d), _mm512_maskz_loadu_epi8(lanes, w + d));
  }
  return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(sum[0] + sum[1]));
}

// Rows against the high digits of the `count` <= kScreenTokens tokens from `first` on. The sums, as integers, go to
// `out`.
inline void high_tile(const twell::FixedRows& x, int first, int count, const ScreenedRows& w, int rows, int64_t hidden,
                      const RowsAhead ahead, float* out, int64_t ld_out) {
  const uint8_t* high[kScreenTokens];  // a token that is not there is the last one again
  for (int t = 0; t < kScreenTokens; ++t) high[t] = x.digits + 2 * (first + std::min(t, count - 1)) * x.ld;
  Int32Lanes sum[kScreenRows * kScreenTokens];
  const auto step = [&](int64_t d, auto load, auto set) {
    __m512i weight[kScreenRows];
    for (int f = 0; f < kScreenRows; ++f) weight[f] = load(w.row[f] + d);
    for (int t = 0; t < kScreenTokens; ++t) {
      const __m512i digit = _mm512_loadu_si512(high[t] + d);
      for (int f = 0; f < kScreenRows; ++f) {
        Int32Lanes& lanes = sum[f * kScreenTokens + t];
        lanes = add_products(set ? Int32Lanes{} : lanes, digit, weight[f]);
      }
    }
  };
  each_step(hidden, ahead, step);
  alignas(64) int32_t total[kScreenRows * kScreenTokens];
  lane_sums<kScreenRows * kScreenTokens>(sum, total);
  const __mmask8 lanes = static_cast<__mmask8>((1u << count) - 1);
  for (int f = 0; f < rows; ++f) {
    const __m128i of_row = _mm_load_si128(reinterpret_cast<const __m128i*>(total + f * kScreenTokens));
    _mm_mask_storeu_ps(out + f * ld_out, lanes, _mm_castsi128_ps(of_row));
  }
}

// row[columns[i]] for i < 16; behind `count` the last one again. By inserts: a vector load would wait for 16 stores.
inline __m512i weights_at(const int8_t* row, const int32_t* columns, int count) {
  const auto at = [&](int i) { return static_cast<int32_t>(row[columns[std::min(i, count - 1)]]); };
  const auto four = [&](int i) { return _mm_setr_epi32(at(i), at(i + 1), at(i + 2), at(i + 3)); };
  const __m256i low = _mm256_set_m128i(four(4), four(0)), high = _mm256_set_m128i(four(12), four(8));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// What a row's sums of high digits (less 128) and of low ones make of a token, rounded once before the step.
inline float whole_element(const twell::FixedRows& x, int t, int32_t high, int32_t low, const int8_t* row) {
  const int64_t beyond = static_cast<int64_t>(x.beyond[t]) * row[x.largest[t]];
  return static_cast<float>(static_cast<int64_t>(x.base[t]) * high + low + beyond) * x.step[t];
}

// Of one row: the sums of high digits in `out` become elements. Returns how many needed low digits.
inline int screen_row(const twell::FixedRows& x, int tokens, const int8_t* row, int64_t hidden, int32_t row_sum,
                      float row_norm, float* out) {
  int whole = 0;
  for (int t = 0; t < tokens; t += 16) {
    const __mmask16 lanes = static_cast<__mmask16>(tokens - t < 16 ? (1u << (tokens - t)) - 1 : 0xffffu);
    const __m512i at_largest = weights_at(row, x.largest + t, tokens - t);
    const __m512i apart = _mm512_mullo_epi32(_mm512_maskz_loadu_epi32(lanes, x.beyond + t), at_largest);
    alignas(64) int32_t high[16];
    const __m512i unsigned_sums = _mm512_castps_si512(_mm512_maskz_loadu_ps(lanes, out + t));
    const __m512i sums = _mm512_sub_epi32(unsigned_sums, _mm512_set1_epi32(128 * row_sum));
    _mm512_store_si512(high, sums);
    const __m512 base = _mm512_maskz_loadu_ps(lanes, x.base + t);
    const __m512 middle = _mm512_floor_ps(_mm512_mul_ps(base, _mm512_set1_ps(0.5f)));
    const __m512 of_low =
        _mm512_fmadd_ps(middle, _mm512_set1_ps(static_cast<float>(row_sum)), _mm512_cvtepi32_ps(apart));
    const __m512 sum = _mm512_fmadd_ps(base, _mm512_cvtepi32_ps(sums), of_low);
    const __m512 at_most = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(lanes, x.low_norm + t), _mm512_set1_ps(row_norm), sum);
    _mm512_mask_storeu_ps(out + t, lanes, _mm512_mul_ps(sum, _mm512_maskz_loadu_ps(lanes, x.step + t)));
    unsigned open = _mm512_mask_cmp_ps_mask(lanes, at_most, _mm512_setzero_ps(), _CMP_GT_OQ);
    whole += __builtin_popcount(open);
    for (; open; open &= open - 1) {
      const int i = __builtin_ctz(open);
      const int32_t low = low_product(x.digits + (2 * (t + i) + 1) * x.ld, row, hidden);
      out[t + i] = whole_element(x, t + i, high[i], low, row);
    }
  }
  return whole;
}

int64_t screened_gate(const twell::FixedRows& x, int tokens, const int8_t* w, int64_t ld_w, int neurons, int64_t hidden,
                      const int8_t* next, float* out, int64_t ld_out) {
  const int tiles = (tokens + kScreenTokens - 1) / kScreenTokens;
  int64_t whole = 0;
  for (int f = 0; f < neurons; f += kScreenRows) {
    const int count = std::min(kScreenRows, neurons - f);
    const ScreenedRows rows = screened_rows(w + f * ld_w, ld_w, count, hidden);
    const RowsAhead ahead = rows_ahead(w, next, ld_w, f, count, neurons);
    for (int i = 0; i < tiles; ++i) {
      const int t = i * kScreenTokens;
      high_tile(x, t, std::min(kScreenTokens, tokens - t), rows, count, hidden, ahead.part(i, tiles),
                out + f * ld_out + t, ld_out);
    }
    for (int i = 0; i < count; ++i) {
      whole += screen_row(x, tokens, rows.row[i], hidden, rows.sum[i], rows.norm[i], out + (f + i) * ld_out);
    }
  }
  return whole;
}

}  // namespace
