// Matrix transposition in blocks whose lines stay in the first-level cache.
#pragma once

#include "simd/past_caches.h"
#include "simd/portable.h"

#if defined(__AVX512BW__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

constexpr int kBlock = 32;

template <class From, class To, class Convert>
inline void transpose_blocks(const From* in, int64_t ld_in, int64_t rows, int64_t columns, To* out, int64_t ld_out,
                             Convert convert) {
  for (int64_t c0 = 0; c0 < columns; c0 += kBlock) {
    const int64_t c1 = columns - c0 < kBlock ? columns : c0 + kBlock;
    for (int64_t r0 = 0; r0 < rows; r0 += kBlock) {
      const int64_t r1 = rows - r0 < kBlock ? rows : r0 + kBlock;
      for (int64_t c = c0; c < c1; ++c) {
        for (int64_t r = r0; r < r1; ++r) convert(in[r * ld_in + c], out + c * ld_out + r);
      }
    }
  }
}

#if defined(__SSE2__)
// Eight columns of 32 rows of 16-bit elements: every output line is written whole.
inline void transpose_32x8(const uint16_t* in, int64_t ld_in, uint16_t* out, int64_t ld_out) {
  for (int r = 0; r < 32; r += 8) {
    __m128i a[8], b[8];
    for (int i = 0; i < 8; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + (r + i) * ld_in));
    for (int i = 0; i < 4; ++i) {
      b[2 * i] = _mm_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
      b[2 * i + 1] = _mm_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
      a[4 * i] = _mm_unpacklo_epi32(b[4 * i], b[4 * i + 2]);
      a[4 * i + 1] = _mm_unpackhi_epi32(b[4 * i], b[4 * i + 2]);
      a[4 * i + 2] = _mm_unpacklo_epi32(b[4 * i + 1], b[4 * i + 3]);
      a[4 * i + 3] = _mm_unpackhi_epi32(b[4 * i + 1], b[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i * ld_out + r), _mm_unpacklo_epi64(a[i], a[i + 4]));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + (2 * i + 1) * ld_out + r), _mm_unpackhi_epi64(a[i], a[i + 4]));
    }
  }
}

#if defined(__AVX512BW__)
// Up to 32 columns of 32 rows. Each line of either matrix is touched once: rows of 4,096 bytes meet in one cache set,
// which would lose them between two visits.
template <bool kPastCaches>
inline void transpose_32_rows(const uint16_t* in, int64_t ld_in, int64_t columns, uint16_t* out, int64_t ld_out) {
  if (columns < 32) {
    for (int64_t c = 0; c < columns; c += 8) transpose_32x8(in + c, ld_in, out + c * ld_out, ld_out);
    return;
  }
  // eight[g][j] holds, in each of its quarters q, rows 8 g.. of column 8 q + j.
  __m512i eight[4][8];
  for (int g = 0; g < 4; ++g) {
    __m512i a[8], b[8];
    for (int i = 0; i < 8; ++i) a[i] = _mm512_loadu_si512(in + (8 * g + i) * ld_in);
    for (int i = 0; i < 4; ++i) {
      b[2 * i] = _mm512_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
      b[2 * i + 1] = _mm512_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
      a[4 * i] = _mm512_unpacklo_epi32(b[4 * i], b[4 * i + 2]);
      a[4 * i + 1] = _mm512_unpackhi_epi32(b[4 * i], b[4 * i + 2]);
      a[4 * i + 2] = _mm512_unpacklo_epi32(b[4 * i + 1], b[4 * i + 3]);
      a[4 * i + 3] = _mm512_unpackhi_epi32(b[4 * i + 1], b[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
      eight[g][2 * i] = _mm512_unpacklo_epi64(a[i], a[i + 4]);
      eight[g][2 * i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 4]);
    }
  }
  const auto store = [&](int column, __m512i values) {
    if constexpr (kPastCaches) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out + column * ld_out), values);
    } else {
      _mm512_storeu_si512(out + column * ld_out, values);
    }
  };
  for (int j = 0; j < 8; ++j) {  // four by four quarters
    const __m512i low = _mm512_shuffle_i32x4(eight[0][j], eight[1][j], 0x44);
    const __m512i high = _mm512_shuffle_i32x4(eight[0][j], eight[1][j], 0xEE);
    const __m512i low2 = _mm512_shuffle_i32x4(eight[2][j], eight[3][j], 0x44);
    const __m512i high2 = _mm512_shuffle_i32x4(eight[2][j], eight[3][j], 0xEE);
    store(j, _mm512_shuffle_i32x4(low, low2, 0x88));
    store(8 + j, _mm512_shuffle_i32x4(low, low2, 0xDD));
    store(16 + j, _mm512_shuffle_i32x4(high, high2, 0x88));
    store(24 + j, _mm512_shuffle_i32x4(high, high2, 0xDD));
  }
}
#else
template <bool kPastCaches>
inline void transpose_32_rows(const uint16_t* in, int64_t ld_in, int64_t columns, uint16_t* out, int64_t ld_out) {
  for (int64_t c = 0; c < columns; c += 8) transpose_32x8(in + c, ld_in, out + c * ld_out, ld_out);
}
#endif

template <bool kPastCaches>
inline void transpose_16bit(const uint16_t* in, int64_t ld_in, int64_t rows, int64_t columns, uint16_t* out,
                            int64_t ld_out) {
  const int64_t whole_rows = rows / 32 * 32, whole_columns = columns / 8 * 8;
  const auto tile = [&](int64_t r, int64_t c) {
    const int64_t left = whole_columns - c < 32 ? whole_columns - c : 32;
    transpose_32_rows<kPastCaches>(in + r * ld_in + c, ld_in, left, out + c * ld_out + r, ld_out);
  };
  // The matrix with the longer rows is walked along them, so that each of its pages is met once.
  for (int64_t c = 0; ld_out > ld_in && c < whole_columns; c += 32) {
    for (int64_t r = 0; r < whole_rows; r += 32) tile(r, c);
  }
  for (int64_t r = 0; ld_out <= ld_in && r < whole_rows; r += 32) {
    for (int64_t c = 0; c < whole_columns; c += 32) {
      // The next rows start in other pages, where hardware does not look ahead.
      for (int64_t i = r + 32; i < r + 64 && i < whole_rows; ++i) __builtin_prefetch(in + i * ld_in + c);
      tile(r, c);
    }
  }
  const auto copy = [](uint16_t value, uint16_t* to) { *to = value; };
  transpose_blocks(in + whole_columns, ld_in, rows, columns - whole_columns, out + whole_columns * ld_out, ld_out,
                   copy);
  transpose_blocks(in + whole_rows * ld_in, ld_in, rows - whole_rows, whole_columns, out + whole_rows, ld_out, copy);
}
#endif

#if defined(__SSE2__)
inline void transpose_32bit(const float* in, int64_t ld_in, int64_t rows, int64_t columns, float* out, int64_t ld_out) {
  const int64_t whole_rows = rows / 16 * 16, whole_columns = columns / 4 * 4;
  for (int64_t r0 = 0; r0 < whole_rows; r0 += 16) {
    for (int64_t i = r0 + 16; i < r0 + 32 && i < whole_rows; ++i) __builtin_prefetch(in + i * ld_in);
    for (int64_t c = 0; c < whole_columns; c += 4) {
      for (int64_t r = r0; r < r0 + 16; r += 4) {
        __m128 a = _mm_loadu_ps(in + r * ld_in + c), b = _mm_loadu_ps(in + (r + 1) * ld_in + c);
        __m128 d = _mm_loadu_ps(in + (r + 2) * ld_in + c), e = _mm_loadu_ps(in + (r + 3) * ld_in + c);
        _MM_TRANSPOSE4_PS(a, b, d, e);
        _mm_storeu_ps(out + c * ld_out + r, a);
        _mm_storeu_ps(out + (c + 1) * ld_out + r, b);
        _mm_storeu_ps(out + (c + 2) * ld_out + r, d);
        _mm_storeu_ps(out + (c + 3) * ld_out + r, e);
      }
    }
  }
  const auto copy = [](float value, float* to) { *to = value; };
  transpose_blocks(in + whole_columns, ld_in, rows, columns - whole_columns, out + whole_columns * ld_out, ld_out,
                   copy);
  transpose_blocks(in + whole_rows * ld_in, ld_in, rows - whole_rows, whole_columns, out + whole_rows, ld_out, copy);
}
#endif

template <class T>
void transpose(const void* in, int64_t ld_in, int64_t rows, int64_t columns, void* out, int64_t ld_out, bool) {
  transpose_blocks(static_cast<const T*>(in), ld_in, rows, columns, static_cast<T*>(out), ld_out,
                   [](T value, T* to) { *to = value; });
}

#if defined(__SSE2__)
template <>
void transpose<float>(const void* in, int64_t ld_in, int64_t rows, int64_t columns, void* out, int64_t ld_out, bool) {
  transpose_32bit(static_cast<const float*>(in), ld_in, rows, columns, static_cast<float*>(out), ld_out);
}

inline void transpose_words(const void* in, int64_t ld_in, int64_t rows, int64_t columns, void* out, int64_t ld_out,
                            bool past_caches) {
  const bool past = past_caches && twell::whole_lines(out, 2 * ld_out);
  const auto run = past ? transpose_16bit<true> : transpose_16bit<false>;
  run(static_cast<const uint16_t*>(in), ld_in, rows, columns, static_cast<uint16_t*>(out), ld_out);
}

template <>
void transpose<BFloat16>(const void* in, int64_t ld_in, int64_t rows, int64_t columns, void* out, int64_t ld_out,
                         bool past_caches) {
  transpose_words(in, ld_in, rows, columns, out, ld_out, past_caches);
}

template <>
void transpose<Half>(const void* in, int64_t ld_in, int64_t rows, int64_t columns, void* out, int64_t ld_out,
                     bool past_caches) {
  transpose_words(in, ld_in, rows, columns, out, ld_out, past_caches);
}
#endif

}  // namespace
