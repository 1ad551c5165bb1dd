// Sums of scaled rows: the down projection, the gradient of x and every weight gradient are of this form.
//
// The sums stay in the first-level cache; up to 8 rows at a time share each of their loads and stores. Those rows are
// added up on their own first: a chain of n additions has an eighth of the links, and so a third of the error.
#pragma once

#include "simd/portable.h"

namespace {

template <class Simd, class T, int kSums, int kN>
inline void add_rows(const T* const* row, const float* const* scale, int64_t width, float* const* sums) {
  typename Simd::Vector factor[kSums][kN];
  for (int s = 0; s < kSums; ++s) {
    for (int i = 0; i < kN; ++i) factor[s][i] = Simd::broadcast(scale[s][i]);
  }
  int64_t d = 0;
  for (; d + Simd::kLanes <= width; d += Simd::kLanes) {
    typename Simd::Vector total[kSums];
    for (int s = 0; s < kSums; ++s) total[s] = Simd::zero();
    for (int i = 0; i < kN; ++i) {
      const auto step = Simd::load(row[i] + d);
      for (int s = 0; s < kSums; ++s) total[s] = Simd::multiply_add(step, factor[s][i], total[s]);
    }
    for (int s = 0; s < kSums; ++s) Simd::store(sums[s] + d, Simd::add(Simd::load(sums[s] + d), total[s]));
  }
  if (d < width) {
    const int rest = static_cast<int>(width - d);
    for (int s = 0; s < kSums; ++s) {
      auto total = Simd::zero();
      for (int i = 0; i < kN; ++i) total = Simd::multiply_add(Simd::load(row[i] + d, rest), factor[s][i], total);
      Simd::store(sums[s] + d, Simd::add(Simd::load(sums[s] + d, rest), total), rest);
    }
  }
}

template <class Simd, class T, int kSums, int kN>
inline int64_t add_groups(const T* rows, int64_t ld_rows, const uint32_t* index, const float* const* scale, int64_t i,
                          int64_t count, int64_t width, float* const* sums) {
  const T* row[kN];
  const float* at[kSums];
  for (; i + kN <= count; i += kN) {
    for (int r = 0; r < kN; ++r) row[r] = rows + static_cast<int64_t>(index[i + r]) * ld_rows;
    for (int s = 0; s < kSums; ++s) at[s] = scale[s] + i;
    add_rows<Simd, T, kSums, kN>(row, at, width, sums);
  }
  return i;
}

template <class Simd, class T, int kSums>
inline void add_all(const T* rows, int64_t ld_rows, const uint32_t* index, const float* const* scale, int64_t count,
                    int64_t width, float* const* sums) {
  int64_t i = add_groups<Simd, T, kSums, 8>(rows, ld_rows, index, scale, 0, count, width, sums);
  i = add_groups<Simd, T, kSums, 4>(rows, ld_rows, index, scale, i, count, width, sums);
  i = add_groups<Simd, T, kSums, 2>(rows, ld_rows, index, scale, i, count, width, sums);
  add_groups<Simd, T, kSums, 1>(rows, ld_rows, index, scale, i, count, width, sums);
}

template <class Simd, class T>
void gather_sum(const void* rows, int64_t ld_rows, const uint32_t* index, const float* scale, int64_t count,
                int64_t width, float* sums) {
  add_all<Simd, T, 1>(static_cast<const T*>(rows), ld_rows, index, &scale, count, width, &sums);
}

template <class Simd, class T>
void gather_sum2(const void* rows, int64_t ld_rows, const uint32_t* index, const float* scale_a, const float* scale_b,
                 int64_t count, int64_t width, float* sums_a, float* sums_b) {
  const float* scale[2] = {scale_a, scale_b};
  float* sums[2] = {sums_a, sums_b};
  add_all<Simd, T, 2>(static_cast<const T*>(rows), ld_rows, index, scale, count, width, sums);
}

template <class Simd, class T>
void round(const float* values, int64_t count, void* out) {
  T* to = static_cast<T*>(out);
  int64_t i = 0;
  for (; i + Simd::kLanes <= count; i += Simd::kLanes) Simd::store(to + i, Simd::load(values + i));
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    Simd::store(to + i, Simd::load(values + i, rest), rest);
  }
}

template <class Simd, class T>
void widen(const void* values, int64_t count, float* out) {
  const T* from = static_cast<const T*>(values);
  int64_t i = 0;
  for (; i + Simd::kLanes <= count; i += Simd::kLanes) Simd::store(out + i, Simd::load(from + i));
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    Simd::store(out + i, Simd::load(from + i, rest), rest);
  }
}

}  // namespace
