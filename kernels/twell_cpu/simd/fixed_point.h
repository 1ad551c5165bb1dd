// Tokens in fixed point, for products with int8 weights that processors compute in integers.
//
// An element is step * integer, with a power of two as the token's step and an integer of 16 bits. So bfloat16 is exact
// down to 2^-7 of the token's largest element, float16 to 2^-4; smaller ones are off by half a step at most. Bytes are
// the integer's digits: base * (high - 128) + low. The base is 256, or low digits are kept small
// (simd/gate_screened.h): then it is as small as high digits allow, and the largest element, which may be many times
// the next one, is partly kept apart.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "isa/kernels.h"
#include "simd/avx512.h"

namespace {

// One token's digits, and whether they are as good as its elements. They are not where one is not finite, or where a
// few are so large that the others lose digits: these may be all that a neuron's weights see.
template <class T>
bool fixed_point(const void* x, int64_t hidden, bool small_low, uint8_t* high, uint8_t* low, twell::FixedScale* scale) {
  constexpr int kBits = 14;                                                   // of the integer part's leading one
  constexpr float kTolerance = std::is_same_v<T, Half> ? 0x1p-12f : 0x1p-9f;  // as one more rounding of x at its worst
  // Larger elements are outliers and do not count. Eight just below it weigh as much as half a step off in all others.
  const float outlier = std::min(0x1p12f, std::sqrt(static_cast<float>(hidden) / 96) / kTolerance);
  const T* from = static_cast<const T*>(x);
  const auto each = [&](const auto& body) {
    int64_t d = 0;
    for (; d + 16 <= hidden; d += 16) body(d, Avx512::load(from + d), static_cast<__mmask16>(0xffff));
    const int rest = static_cast<int>(hidden - d);
    if (rest > 0) body(d, Avx512::load(from + d, rest), Avx512::first(rest));
  };
  const auto magnitude = [](__m512 value) { return _mm512_castps_si512(_mm512_abs_ps(value)); };
  __m512i largest = _mm512_setzero_si512();
  each([&](int64_t, __m512 value, __mmask16) { largest = _mm512_max_epu32(largest, magnitude(value)); });
  const uint32_t of_all = _mm512_reduce_max_epu32(largest);
  const int exponent = static_cast<int>(of_all >> 23) - 127;
  *scale = {};
  if (exponent == 128) return false;  // infinite or NaN
  const int shift = exponent < -100 ? kBits + 100 : kBits - exponent;
  const __m512 factor = _mm512_castsi512_ps(_mm512_set1_epi32((127 + shift) << 23));
  scale->step = _mm512_cvtss_f32(_mm512_castsi512_ps(_mm512_set1_epi32((127 - shift) << 23)));
  scale->base = 256.0f;
  int64_t column = -1;  // whose element is kept apart
  const auto apart = [&](int64_t d) {
    return static_cast<__mmask16>(column >= d && column < d + 16 ? 1u << (column - d) : 0u);
  };
  if (small_low) {
    each([&](int64_t d, __m512 value, __mmask16 lanes) {
      const __m512i wanted = _mm512_set1_epi32(static_cast<int32_t>(of_all));
      const __mmask16 found = _mm512_mask_cmpeq_epi32_mask(lanes, magnitude(value), wanted);
      if (found) column = d + __builtin_ctz(found);
    });
    __m512i others = _mm512_setzero_si512();
    each([&](int64_t d, __m512 value, __mmask16) {
      others = _mm512_mask_max_epu32(others, static_cast<__mmask16>(~apart(d)), others, magnitude(value));
    });
    const __m512 most = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_set1_epi32(_mm512_reduce_max_epu32(others))), factor);
    scale->base = static_cast<float>(std::min(256, static_cast<int>(_mm512_cvtss_f32(most) + 0.5f) / 127 + 1));
    scale->largest = static_cast<int32_t>(column);
  }
  const __m512 base = _mm512_set1_ps(scale->base);
  const __m512 middle = _mm512_set1_ps(std::floor(scale->base / 2));
  // Rounded, so a multiple of the base may get the digit below, with `base` as the low one: 256 is divided exactly.
  const __m512 share = _mm512_div_ps(_mm512_set1_ps(1.0f), base);

  __m512 error = _mm512_setzero_ps(), size = error, low_squares = error;
  each([&](int64_t d, __m512 value, __mmask16 lanes) {
    const __m512 wanted = _mm512_mul_ps(value, factor);
    const __m512 steps = _mm512_roundscale_ps(wanted, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 off = _mm512_sub_ps(wanted, steps);
    const __mmask16 counts = _mm512_cmp_ps_mask(_mm512_abs_ps(wanted), _mm512_set1_ps(outlier), _CMP_LT_OQ);
    error = _mm512_fmadd_ps(off, off, error);
    size = _mm512_mask3_fmadd_ps(wanted, wanted, size, counts);
    __m512 of_high = _mm512_floor_ps(_mm512_mul_ps(steps, share)), of_low = _mm512_fnmadd_ps(of_high, base, steps);
    if (const __mmask16 one = apart(d)) {
      of_high = _mm512_mask_blend_ps(one, of_high, _mm512_setzero_ps());
      of_low = _mm512_mask_blend_ps(one, of_low, middle);
      scale->beyond = _mm512_mask_reduce_add_epi32(one, _mm512_cvtps_epi32(_mm512_sub_ps(steps, middle)));
    }
    const __m512 rest = _mm512_sub_ps(of_low, middle);
    low_squares = _mm512_mask3_fmadd_ps(rest, rest, low_squares, lanes);
    _mm512_mask_cvtepi32_storeu_epi8(high + d, lanes,
                                     _mm512_add_epi32(_mm512_cvtps_epi32(of_high), _mm512_set1_epi32(128)));
    _mm512_mask_cvtepi32_storeu_epi8(low + d, lanes, _mm512_cvtps_epi32(of_low));
  });
  // No less than the norm by all roundings of it and of what it is compared with: 2^-12 of it, and 2^-8 a column.
  const float exact = std::sqrt(_mm512_reduce_add_ps(low_squares)), columns = std::sqrt(static_cast<float>(hidden));
  scale->low_norm = (1.0f + 0x1p-10f) * exact + 0x1p-6f * columns;
  return _mm512_reduce_add_ps(error) <= kTolerance * kTolerance * _mm512_reduce_add_ps(size);
}

}  // namespace
