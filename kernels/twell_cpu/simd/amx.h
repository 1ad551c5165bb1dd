// Matrix products on AMX tiles: 16 rows of 64 bytes, bf16 pairs into fp32.
//
// Registers hold two tiles of each operand and their four products, so that each load is used twice. The configuration
// is loaded and released in each call: it is a thread's own, and other libraries change it too.
#pragma once

#include <immintrin.h>

#include "isa/kernels.h"
#include "simd/portable.h"

namespace {

constexpr int kTileRows = 16;
constexpr int64_t kTileBytes = 64;     // of a row: 32 bf16 or 16 fp32
constexpr int64_t kStepsInCache = 64;  // tiles of one row that are multiplied before the next rows come

class TileSetup {
 public:
  TileSetup() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = kTileBytes;
      config.rows[i] = kTileRows;
    }
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }
  ~TileSetup() { asm volatile("tilerelease" ::: "memory"); }
  TileSetup(const TileSetup&) = delete;
};

// The compiler's intrinsics do not tell it that a load reads memory.
template <int kTile>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kSum, int kA, int kB>
inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
}

// Rows behind one another that will be read next, fetched a few lines at a time.
struct Fetch {
  const char* next;
  int64_t lines, lines_a_step;
  inline void step() {
    for (int64_t i = 0; i < lines_a_step && lines > 0; ++i, --lines, next += 64) _mm_prefetch(next, _MM_HINT_T1);
  }
};

// Tiles 4 and 5 from up to 32 rows, where `bytes` of each are left; what lies outside counts as zero.
template <int kF>
inline void load_rows(const char* from, int64_t stride, int rows, int64_t bytes) {
  if (rows == kTileRows * kF && bytes >= kTileBytes) {
    load_tile<4>(from, stride);
    if constexpr (kF == 2) load_tile<5>(from + kTileRows * stride, stride);
    return;
  }
  alignas(64) char copy[kF * kTileRows * kTileBytes] = {};
  const size_t count = static_cast<size_t>(bytes < kTileBytes ? bytes : kTileBytes);
  for (int r = 0; r < rows; ++r) std::memcpy(copy + r * kTileBytes, from + r * stride, count);
  load_tile<4>(copy, kTileBytes);
  if constexpr (kF == 2) load_tile<5>(copy + kTileRows * kTileBytes, kTileBytes);
}

// Products 0 .. 3 = tiles 4, 5 times tiles 6, 7; out (16 kF rows, 16 kT columns).
template <int kF, int kT>
inline void load_sums(const float* out, int64_t ld_out) {
  load_tile<0>(out, 4 * ld_out);
  if constexpr (kT == 2) load_tile<1>(out + 16, 4 * ld_out);
  if constexpr (kF == 2) load_tile<2>(out + 16 * ld_out, 4 * ld_out);
  if constexpr (kF == 2 && kT == 2) load_tile<3>(out + 16 * ld_out + 16, 4 * ld_out);
}
template <int kF, int kT>
inline void store_sums(float* out, int64_t ld_out) {
  store_tile<0>(out, 4 * ld_out);
  if constexpr (kT == 2) store_tile<1>(out + 16, 4 * ld_out);
  if constexpr (kF == 2) store_tile<2>(out + 16 * ld_out, 4 * ld_out);
  if constexpr (kF == 2 && kT == 2) store_tile<3>(out + 16 * ld_out + 16, 4 * ld_out);
}
template <int kF, int kT>
inline void zero_sums() {
  zero_tile<0>();
  if constexpr (kT == 2) zero_tile<1>();
  if constexpr (kF == 2) zero_tile<2>();
  if constexpr (kF == 2 && kT == 2) zero_tile<3>();
}
template <int kF, int kT>
inline void multiply_all() {
  multiply_tiles<0, 4, 6>();
  if constexpr (kF == 2) multiply_tiles<2, 5, 6>();
  if constexpr (kT == 2) multiply_tiles<1, 4, 7>();
  if constexpr (kF == 2 && kT == 2) multiply_tiles<3, 5, 7>();
}

// out (rows, columns) from up to 16 kF rows of w and up to 16 kT tokens of a panel; `first`: out holds nothing yet.
template <int kF, int kT>
inline void gate_amx_tile(const char* w, int64_t stride, int rows, int64_t bytes, const char* panel, bool first,
                          const float* bias, float* out, int64_t ld_out, int columns, Fetch* fetch) {
  constexpr int kColumns = kTileRows * kT;
  const bool whole = rows == kTileRows * kF && columns == kColumns;
  alignas(64) float copy[kTileRows * kF * kColumns];
  if (first) {
    zero_sums<kF, kT>();
  } else if (whole) {
    load_sums<kF, kT>(out, ld_out);
  } else {
    std::memset(copy, 0, sizeof(copy));
    for (int r = 0; r < rows; ++r) std::memcpy(copy + r * kColumns, out + r * ld_out, sizeof(float) * columns);
    load_sums<kF, kT>(copy, kColumns);
  }
  for (int64_t at = 0; at < bytes; at += kTileBytes) {
    load_rows<kF>(w + at, stride, rows, bytes - at);
    const char* tokens = panel + at / 4 * twell::kPanel * 4;
    load_tile<6>(tokens, twell::kPanel * 4);
    if constexpr (kT == 2) load_tile<7>(tokens + 64, twell::kPanel * 4);
    fetch->step();
    multiply_all<kF, kT>();
  }
  if (whole) {
    store_sums<kF, kT>(out, ld_out);
  } else {
    store_sums<kF, kT>(copy, kColumns);
    for (int r = 0; r < rows; ++r) std::memcpy(out + r * ld_out, copy + r * kColumns, sizeof(float) * columns);
  }
  if (bias == nullptr) return;
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) out[r * ld_out + c] += bias[r];
  }
}

// A panel lies as tiles want their second operand, 16 units x 16 tokens of it; w as they want their first.
template <int kF>
inline void gate_amx_rows(const char* panels, int64_t panel_bytes, int tokens, const char* w, int64_t stride, int rows,
                          int64_t bytes, bool first, const float* bias, const char* next, float* out, int64_t ld_out) {
  const int64_t passes = (tokens + 31) / 32, lines = next ? rows * ((bytes + 63) / 64) : 0;
  Fetch fetch{next, lines, (rows + passes - 1) / passes};
  for (int t = 0; t < tokens; t += 32) {
    const char* panel = panels + t / twell::kPanel * panel_bytes + t % twell::kPanel * 4;
    const int columns = tokens - t < 32 ? tokens - t : 32;
    if (columns > 16) {
      gate_amx_tile<kF, 2>(w, stride, rows, bytes, panel, first, bias, out + t, ld_out, columns, &fetch);
    } else {
      gate_amx_tile<kF, 1>(w, stride, rows, bytes, panel, first, bias, out + t, ld_out, columns, &fetch);
    }
  }
}

void gate_amx(const void* panels, int tokens, const void* w, int64_t ld_w, int neurons, int64_t hidden,
              const float* bias, const void* next, float* out, int64_t ld_out) {
  const TileSetup setup;
  const int64_t row_bytes = 2 * hidden, stride = 2 * ld_w, panel_bytes = twell::panel_bytes(row_bytes);
  constexpr int64_t kChunk = kStepsInCache * kTileBytes;
  for (int64_t at = 0; at < row_bytes; at += kChunk) {
    const int64_t bytes = row_bytes - at < kChunk ? row_bytes - at : kChunk;
    const char* part = static_cast<const char*>(panels) + at * twell::kPanel;
    const char* column = static_cast<const char*>(w) + at;
    const bool last = at + bytes == row_bytes;
    for (int f = 0; f < neurons; f += 32) {
      const int rows = neurons - f < 32 ? neurons - f : 32;
      const char* from = column + f * stride;
      const float* add = bias && last ? bias + f : nullptr;
      const char* ahead = f + rows < neurons ? from + rows * stride
                          : last             ? static_cast<const char*>(next)
                                             : column + bytes;
      float* to = out + f * ld_out;
      if (rows > 16) {
        gate_amx_rows<2>(part, panel_bytes, tokens, from, stride, rows, bytes, at == 0, add, ahead, to, ld_out);
      } else {
        gate_amx_rows<1>(part, panel_bytes, tokens, from, stride, rows, bytes, at == 0, add, ahead, to, ld_out);
      }
    }
  }
}

// Pairs of rows interleaved to 32 bits, as tiles want their second operand: pairs[i / 2][d] = (row i, row i + 1).
void pair_rows_amx(const void* all_rows, int64_t ld_rows, const uint32_t* index, int64_t count, int64_t width,
                   void* pairs) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                       5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const char* rows = static_cast<const char*>(all_rows);
  const auto row = [&](int64_t i) { return rows + 2 * ld_rows * (index ? static_cast<int64_t>(index[i]) : i); };
  char* to = static_cast<char*>(pairs);
  for (int64_t i = 0; i < (count + 31) / 32 * 32; i += 2) {
    for (int64_t ahead = i + 16; ahead < i + 18 && ahead < count; ++ahead) {
      for (int64_t b = 0; b < 2 * width; b += 64) __builtin_prefetch(row(ahead) + b);
    }
    for (int64_t d = 0; d < twell::kPairColumns; d += 32, to += 128) {
      const int64_t rest = width - d;
      const __mmask32 lanes = rest >= 32 ? 0xffffffffu : rest > 0 ? (1u << rest) - 1u : 0u;
      const __m512i a = i < count ? _mm512_maskz_loadu_epi16(lanes, row(i) + 2 * d) : __m512i{};
      const __m512i b = i + 1 < count ? _mm512_maskz_loadu_epi16(lanes, row(i + 1) + 2 * d) : __m512i{};
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, low, b));
      _mm512_storeu_si512(to + 64, _mm512_permutex2var_epi16(a, high, b));
    }
  }
}

template <int kF>
inline void sum_amx_tile(const char* scale, int64_t step, int64_t steps, const char* pairs, float* sums,
                         int64_t ld_sums) {
  load_sums<kF, 2>(sums, ld_sums);
  for (int64_t s = 0; s < steps; ++s) {
    load_tile<4>(scale + s * step, kTileBytes);
    if constexpr (kF == 2) load_tile<5>(scale + s * step + kTileRows * kTileBytes, kTileBytes);
    const char* b = pairs + s * kTileRows * twell::kPairColumns * 4;
    load_tile<6>(b, twell::kPairColumns * 4);
    load_tile<7>(b + 64, twell::kPairColumns * 4);
    multiply_all<kF, 2>();
  }
  store_sums<kF, 2>(sums, ld_sums);
}

void matmul_pairs_amx(const void* pairs, int64_t count, int64_t width, const void* scale, int outputs, float* sums,
                      int64_t ld_sums) {
  const TileSetup setup;
  const int64_t step = (outputs + kTileRows - 1) / kTileRows * kTileRows * kTileBytes, steps = (count + 31) / 32;
  for (int t = 0; t < outputs; t += 32) {
    const char* from = static_cast<const char*>(scale) + t * kTileBytes;
    for (int64_t d = 0; d < width; d += 32) {
      const char* columns = static_cast<const char*>(pairs) + 4 * d;
      if (t + 16 < outputs) {
        sum_amx_tile<2>(from, step, steps, columns, sums + t * ld_sums + d, ld_sums);
      } else {
        sum_amx_tile<1>(from, step, steps, columns, sums + t * ld_sums + d, ld_sums);
      }
    }
  }
}

}  // namespace
