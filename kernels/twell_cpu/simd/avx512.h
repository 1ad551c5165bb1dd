// Sixteen fp32 lanes of AVX-512 (F, BW, VL, DQ).
#pragma once

#include <immintrin.h>

#include "simd/portable.h"

namespace {

struct Avx512 {
  static constexpr int kLanes = 16;
  using Vector = __m512;

  static inline __mmask16 first(int count) { return static_cast<__mmask16>((1u << count) - 1u); }
  static inline Vector zero() { return _mm512_setzero_ps(); }
  static inline Vector broadcast(float value) { return _mm512_set1_ps(value); }
  static inline Vector widen_bf16(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static inline Vector load(const float* from) { return _mm512_loadu_ps(from); }
  static inline Vector load(const BFloat16* from) {
    return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static inline Vector load(const Half* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static inline Vector load(const int8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  static inline Vector load(const int8_t* from, int count) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(count), from)));
  }
  static inline Vector load(const float* from, int count) { return _mm512_maskz_loadu_ps(first(count), from); }
  static inline Vector load(const BFloat16* from, int count) {
    return widen_bf16(_mm256_maskz_loadu_epi16(first(count), from));
  }
  static inline Vector load(const Half* from, int count) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), from));
  }
  static inline __m256i round_bf16(Vector value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
  }
  static inline void store(float* to, Vector value) { _mm512_storeu_ps(to, value); }
  static inline void store(BFloat16* to, Vector value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), round_bf16(value));
  }
  static inline void store(Half* to, Vector value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }
  static inline void store(float* to, Vector value, int count) { _mm512_mask_storeu_ps(to, first(count), value); }
  static inline void store(BFloat16* to, Vector value, int count) {
    _mm256_mask_storeu_epi16(to, first(count), round_bf16(value));
  }
  static inline void store(Half* to, Vector value, int count) {
    _mm256_mask_storeu_epi16(to, first(count), _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }
  // Two vectors whose values bfloat16 holds exactly.
  static inline void store_exact(BFloat16* to, Vector first, Vector second) {
    constexpr uint64_t kOdd = 0x0007000500030001, kNext = 0x0008000800080008;  // the upper 16 bits of each lane
    const __m512i upper = _mm512_set_epi64(kOdd + 7 * kNext, kOdd + 6 * kNext, kOdd + 5 * kNext, kOdd + 4 * kNext,
                                           kOdd + 3 * kNext, kOdd + 2 * kNext, kOdd + kNext, kOdd);
    const __m512i packed = _mm512_permutex2var_epi16(_mm512_castps_si512(first), upper, _mm512_castps_si512(second));
    _mm512_storeu_si512(to, packed);
  }
  static inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  static inline Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  static inline Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  static inline Vector absolute(Vector a) { return _mm512_abs_ps(a); }
  static inline Vector relu(Vector a) {
    return _mm512_max_ps(_mm512_setzero_ps(), a);  // the second operand where one is a NaN
  }
  static inline Vector where_nonzero(Vector test, Vector value) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(test, _mm512_setzero_ps(), _CMP_NEQ_UQ), value);
  }
  static inline Vector l1_gradient(Vector pull, Vector h) {
    const __mmask16 known = _mm512_cmp_ps_mask(h, _mm512_setzero_ps(), _CMP_NEQ_OQ);
    return _mm512_maskz_xor_ps(known, pull, _mm512_and_ps(_mm512_set1_ps(-0.0f), h));
  }
  static inline float sum(Vector a) { return _mm512_reduce_add_ps(a); }
  // The lane sums of 16 vectors, in order: a transposition that adds on its way.
  static inline void sums_16(const __m512* in, float* out) {
    __m512 a[8], b[4];
    for (int i = 0; i < 8; ++i) {
      a[i] = _mm512_add_ps(_mm512_unpacklo_ps(in[2 * i], in[2 * i + 1]), _mm512_unpackhi_ps(in[2 * i], in[2 * i + 1]));
    }
    for (int i = 0; i < 4; ++i) {
      const __m512d even = _mm512_castps_pd(a[2 * i]), odd = _mm512_castps_pd(a[2 * i + 1]);
      b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(even, odd)),
                           _mm512_castpd_ps(_mm512_unpackhi_pd(even, odd)));
    }
    // b[i] now holds, in each 128-bit part, partial sums of vectors 4i .. 4i+3.
    const __m512 c0 = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
    const __m512 c1 = _mm512_add_ps(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
    _mm512_storeu_ps(out, _mm512_add_ps(_mm512_shuffle_f32x4(c0, c1, 0x88), _mm512_shuffle_f32x4(c0, c1, 0xdd)));
  }
  template <int kCount>
  static inline void sums(const Vector* vectors, float* out) {
    if constexpr (kCount == 16) {
      sums_16(vectors, out);
    } else {
      for (int i = 0; i < kCount; ++i) out[i] = sum(vectors[i]);
    }
  }
  static inline uint32_t kept(Vector a) { return _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NLE_UQ); }
};

}  // namespace
