// Tokens in fixed point, for products with int8 weights that processors compute in integers.
//
// x = step * (256 * (high - 128) + low), with a power of two as the token's step and bytes as its digits. So bfloat16
// is exact down to 2^-7 of the token's largest element, float16 to 2^-4; smaller ones are off by half a step at most.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "simd/avx512.h"

namespace {

// One token's digits, and whether they are as good as its elements. They are not where one is not finite, or where a
// few are so large that the others lose digits: these may be all that a neuron's weights see.
template <class T>
bool fixed_point(const void* x, int64_t hidden, uint8_t* high, uint8_t* low, float* step) {
  constexpr int kBits = 14;  // of the integer part's leading one
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
  __m512i largest = _mm512_setzero_si512();
  each([&](int64_t, __m512 value, __mmask16) {
    largest = _mm512_max_epu32(largest, _mm512_castps_si512(_mm512_abs_ps(value)));
  });
  const int exponent = static_cast<int>(_mm512_reduce_max_epu32(largest) >> 23) - 127;
  if (exponent == 128) return false;  // infinite or NaN
  const int shift = exponent < -100 ? kBits + 100 : kBits - exponent;
  const __m512 factor = _mm512_castsi512_ps(_mm512_set1_epi32((127 + shift) << 23));
  *step = _mm512_cvtss_f32(_mm512_castsi512_ps(_mm512_set1_epi32((127 - shift) << 23)));

  __m512 error = _mm512_setzero_ps(), size = error;
  each([&](int64_t d, __m512 value, __mmask16 lanes) {
    const __m512 wanted = _mm512_mul_ps(value, factor);
    const __m512i steps = _mm512_cvtps_epi32(wanted), digits = _mm512_add_epi32(steps, _mm512_set1_epi32(1 << 15));
    const __m512 off = _mm512_sub_ps(wanted, _mm512_cvtepi32_ps(steps));
    const __mmask16 counts = _mm512_cmp_ps_mask(_mm512_abs_ps(wanted), _mm512_set1_ps(outlier), _CMP_LT_OQ);
    error = _mm512_fmadd_ps(off, off, error);
    size = _mm512_mask3_fmadd_ps(wanted, wanted, size, counts);
    _mm512_mask_cvtepi32_storeu_epi8(high + d, lanes, _mm512_srli_epi32(digits, 8));
    _mm512_mask_cvtepi32_storeu_epi8(low + d, lanes, digits);
  });
  return _mm512_reduce_add_ps(error) <= kTolerance * kTolerance * _mm512_reduce_add_ps(size);
}

}  // namespace
