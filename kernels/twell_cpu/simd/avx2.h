// Eight fp32 lanes of AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include "simd/portable.h"

namespace {

struct Avx2 {
  static constexpr int kLanes = 8;
  using Vector = __m256;

  static inline Vector zero() { return _mm256_setzero_ps(); }
  static inline Vector broadcast(float value) { return _mm256_set1_ps(value); }
  static inline Vector load(const float* from) { return _mm256_loadu_ps(from); }
  static inline Vector load(const BFloat16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static inline Vector load(const Half* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static inline Vector load(const int8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
  template <class T>
  static inline Vector load(const T* from, int count) {
    T padded[kLanes] = {};
    std::memcpy(padded, from, sizeof(T) * static_cast<size_t>(count));
    return load(padded);
  }
  static inline void store(float* to, Vector value) { _mm256_storeu_ps(to, value); }
  static inline void store(BFloat16* to, Vector value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
  }
  static inline void store(Half* to, Vector value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }
  template <class T>
  static inline void store(T* to, Vector value, int count) {
    T padded[kLanes];
    store(padded, value);
    std::memcpy(to, padded, sizeof(T) * static_cast<size_t>(count));
  }
  // Two vectors whose values bfloat16 holds exactly.
  static inline void store_exact(BFloat16* to, Vector first, Vector second) {
    const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(first), 16);
    const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(second), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), packed);
  }
  static inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  static inline Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static inline Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  static inline Vector absolute(Vector a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static inline Vector relu(Vector a) {
    return _mm256_max_ps(_mm256_setzero_ps(), a);  // the second operand where one is a NaN
  }
  static inline Vector where_nonzero(Vector test, Vector value) {
    return _mm256_and_ps(_mm256_cmp_ps(test, _mm256_setzero_ps(), _CMP_NEQ_UQ), value);
  }
  static inline Vector l1_gradient(Vector pull, Vector h) {
    const Vector flipped = _mm256_xor_ps(pull, _mm256_and_ps(_mm256_set1_ps(-0.0f), h));
    return _mm256_and_ps(_mm256_cmp_ps(h, _mm256_setzero_ps(), _CMP_NEQ_OQ), flipped);
  }
  static inline float sum(Vector a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
  }
  template <int kCount>
  static inline void sums(const Vector* vectors, float* out) {
    for (int i = 0; i < kCount; ++i) out[i] = sum(vectors[i]);
  }
  static inline uint32_t kept(Vector a) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NLE_UQ)));
  }
};

}  // namespace
