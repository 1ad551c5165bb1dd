// Rows of int8 weights against tokens of another type. The scale of a row is the caller's to apply.
//
// int8 is exact in every element type: a row that many tokens share is widened once, and goes to the kernels of that
// type.
#pragma once

#include <type_traits>

#include "simd/gather_sum.h"
#include "simd/portable.h"

namespace {

constexpr int kInt8Rows = 4;   // x up to 3 tokens: the accumulators of a register tile
constexpr int kInt8Step = 64;  // weights in a cache line

// One step of kF rows and kT tokens; `count` in place of a whole vector at the end of the rows.
template <class Simd, class T, int kF, int kT, class... Count>
inline void int8_step(const T* x, int64_t ld_x, const int8_t* w, int64_t ld_w, typename Simd::Vector* sum,
                      Count... count) {
  typename Simd::Vector step[kT];
  for (int t = 0; t < kT; ++t) step[t] = Simd::load(x + t * ld_x, count...);
  for (int f = 0; f < kF; ++f) {
    const auto weight = Simd::load(w + f * ld_w, count...);
    for (int t = 0; t < kT; ++t) sum[f * kT + t] = Simd::multiply_add(weight, step[t], sum[f * kT + t]);
  }
}

template <class Simd, class T, int kF, int kT>
inline void gate_int8_tile(const T* x, int64_t ld_x, const int8_t* w, int64_t ld_w, int64_t hidden, float* out,
                           int64_t ld_out) {
  typename Simd::Vector sum[kF * kT];
  for (int i = 0; i < kF * kT; ++i) sum[i] = Simd::zero();
  int64_t d = 0;
  for (; d + kInt8Step <= hidden; d += kInt8Step) {
    // The next rows, which hardware starts on too late at each row's end.
    for (int f = 0; f < kF; ++f) __builtin_prefetch(w + (f + kF) * ld_w + d);
    for (int i = 0; i < kInt8Step; i += Simd::kLanes) int8_step<Simd, T, kF, kT>(x + d + i, ld_x, w + d + i, ld_w, sum);
  }
  for (; d + Simd::kLanes <= hidden; d += Simd::kLanes) int8_step<Simd, T, kF, kT>(x + d, ld_x, w + d, ld_w, sum);
  if (d < hidden) int8_step<Simd, T, kF, kT>(x + d, ld_x, w + d, ld_w, sum, static_cast<int>(hidden - d));
  float total[kF * kT];
  Simd::template sums<kF * kT>(sum, total);
  for (int f = 0; f < kF; ++f) {
    for (int t = 0; t < kT; ++t) out[f * ld_out + t] = total[f * kT + t];
  }
}

template <class Simd, class T, int kF>
inline void gate_int8_rows(const T* x, int64_t ld_x, int tokens, const int8_t* w, int64_t ld_w, int64_t hidden,
                           float* out, int64_t ld_out) {
  int t = 0;
  if (tokens % 2 == 1 && tokens > 1) {
    gate_int8_tile<Simd, T, kF, 3>(x, ld_x, w, ld_w, hidden, out, ld_out);
    t = 3;
  }
  for (; t + 2 <= tokens; t += 2) gate_int8_tile<Simd, T, kF, 2>(x + t * ld_x, ld_x, w, ld_w, hidden, out + t, ld_out);
  if (t < tokens) gate_int8_tile<Simd, T, kF, 1>(x + t * ld_x, ld_x, w, ld_w, hidden, out + t, ld_out);
}

template <class Simd, class T>
void gate_int8(const void* x, int64_t ld_x, int tokens, const int8_t* w, int64_t ld_w, int neurons, int64_t hidden,
               float* out, int64_t ld_out) {
  const T* from = static_cast<const T*>(x);
  int f = 0;
  for (; f + kInt8Rows <= neurons; f += kInt8Rows) {
    gate_int8_rows<Simd, T, kInt8Rows>(from, ld_x, tokens, w + f * ld_w, ld_w, hidden, out + f * ld_out, ld_out);
  }
  for (; f < neurons; ++f)
    gate_int8_rows<Simd, T, 1>(from, ld_x, tokens, w + f * ld_w, ld_w, hidden, out + f * ld_out, ld_out);
}

// `ahead`: also fetches what lies so many bytes behind each value; 0: nothing.
template <class Simd, class T>
void widen_int8(const int8_t* values, int64_t count, void* out, int64_t ahead) {
  T* to = static_cast<T*>(out);
  constexpr int kStep = 2 * Simd::kLanes;
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    if (ahead > 0 && i % kInt8Step == 0) __builtin_prefetch(values + ahead + i);
    const auto first = Simd::load(values + i), second = Simd::load(values + i + Simd::kLanes);
    if constexpr (std::is_same_v<T, BFloat16>) {
      Simd::store_exact(to + i, first, second);
    } else {
      Simd::store(to + i, first);
      Simd::store(to + i + Simd::kLanes, second);
    }
  }
  for (; i < count; i += Simd::kLanes) {
    const int rest = count - i < Simd::kLanes ? static_cast<int>(count - i) : Simd::kLanes;
    Simd::store(to + i, Simd::load(values + i, rest), rest);
  }
}

template <class Simd>
void gather_sum_int8(const int8_t* rows, int64_t ld_rows, const uint32_t* index, const float* scale, int64_t count,
                     int64_t width, float* sums) {
  add_all<Simd, int8_t, 1>(rows, ld_rows, index, &scale, count, width, &sums);
}

}  // namespace
