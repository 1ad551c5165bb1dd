// Sums of rows that many tokens share, as products in fp32 where there is no matrix unit: columns of the rows lie in
// vector lanes, and each token's factor is broadcast.
//
// Rows that were put in place lie as [strip of columns][row][column of the strip] in fp32, factors as kernels.h has
// them.
#pragma once

#include <algorithm>
#include <type_traits>

#include "isa/kernels.h"
#include "simd/portable.h"

namespace {

constexpr int kSumTokens = 6;             // x kSumVectors vectors: all registers but those of a row and of one factor
constexpr int64_t kRowsInCache = 128;     // of a strip, the first-level one
constexpr int64_t kFactorsTogether = 32;  // of a token, behind one another
template <class Simd>
constexpr int kSumVectors = Simd::kLanes == 16 ? 4 : 2;

template <class Simd, class T>
void pair_rows_wide(const void* rows, int64_t ld_rows, const uint32_t* index, int64_t count, int64_t width,
                    void* placed) {
  constexpr int kLanes = Simd::kLanes, kStripColumns = kSumVectors<Simd> * kLanes;
  constexpr int64_t kLine = 64 / sizeof(T), kAhead = 16;
  const int64_t padded = (count + kFactorsTogether - 1) / kFactorsTogether * kFactorsTogether;
  const auto row = [&](int64_t i) { return static_cast<const T*>(rows) + ld_rows * (index ? index[i] : i); };
  float* to = static_cast<float*>(placed);
  for (int64_t i = 0; i < padded; ++i) {
    if (i + kAhead < count) {
      for (int64_t d = 0; d < width; d += kLine) __builtin_prefetch(row(i + kAhead) + d);
    }
    for (int64_t d = 0; d < twell::kPairColumns; d += kLanes) {
      const int64_t rest = i < count ? width - d : 0;
      const auto some = rest >= kLanes ? Simd::load(row(i) + d)
                        : rest > 0     ? Simd::load(row(i) + d, static_cast<int>(rest))
                                       : Simd::zero();
      Simd::store(to + (d / kStripColumns * padded + i) * kStripColumns + d % kStripColumns, some);
    }
  }
}

// sums (kT, kSumVectors vectors) += factors of kT tokens, `step` from 32 of them to the next, times rows of a strip.
template <class Simd, int kT>
inline void sum_wide_tile(const float* strip, int64_t count, const float* factors, int64_t step, float* sums,
                          int64_t ld_sums) {
  constexpr int kV = kSumVectors<Simd>, kLanes = Simd::kLanes;
  typename Simd::Vector sum[kT][kV];
  for (int t = 0; t < kT; ++t) {
    for (int v = 0; v < kV; ++v) sum[t][v] = Simd::zero();
  }
  for (int64_t block = 0; block < count; block += kFactorsTogether, factors += step) {
    for (int64_t i = 0; i < kFactorsTogether; ++i, strip += kV * kLanes) {
      typename Simd::Vector row[kV];
      for (int v = 0; v < kV; ++v) row[v] = Simd::load(strip + v * kLanes);
      for (int t = 0; t < kT; ++t) {
        const auto factor = Simd::broadcast(factors[t * kFactorsTogether + i]);
        for (int v = 0; v < kV; ++v) sum[t][v] = Simd::multiply_add(factor, row[v], sum[t][v]);
      }
    }
  }
  for (int t = 0; t < kT; ++t) {
    for (int v = 0; v < kV; ++v) {
      float* to = sums + t * ld_sums + v * kLanes;
      Simd::store(to, Simd::add(Simd::load(to), sum[t][v]));
    }
  }
}

template <class Simd>
void matmul_pairs_wide(const void* placed, int64_t count, int64_t width, const void* factors, int outputs, float* sums,
                       int64_t ld_sums) {
  constexpr int kStripColumns = kSumVectors<Simd> * Simd::kLanes;
  const int64_t step = (outputs + 15) / 16 * 16 * kFactorsTogether;
  const int64_t padded = (count + kFactorsTogether - 1) / kFactorsTogether * kFactorsTogether;
  for (int64_t d = 0; d < width; d += kStripColumns) {
    for (int64_t i = 0; i < padded; i += kRowsInCache) {
      const int64_t some = std::min(kRowsInCache, padded - i);
      const float* strip = static_cast<const float*>(placed) + d * padded + i * kStripColumns;
      const float* from = static_cast<const float*>(factors) + i / kFactorsTogether * step;
      int t = 0;
      const auto tiles = [&](auto at_once) {
        constexpr int kT = decltype(at_once)::value;
        for (; t + kT <= outputs; t += kT) {
          sum_wide_tile<Simd, kT>(strip, some, from + t * kFactorsTogether, step, sums + t * ld_sums + d, ld_sums);
        }
      };
      tiles(std::integral_constant<int, kSumTokens>{});
      tiles(std::integral_constant<int, 2>{});
      tiles(std::integral_constant<int, 1>{});
    }
  }
}

template <class Simd, class T>
constexpr twell::Kernels with_wide_sums(twell::Kernels table) {
  table.pair_rows = pair_rows_wide<Simd, T>;
  table.matmul_pairs = matmul_pairs_wide<Simd>;
  table.sums_from = 32;
  table.scale_element = 4;
  table.pair_cells = 5;
  table.tile_neurons = 96;  // so that enough of them are shared
  return table;
}

}  // namespace
