// The elementwise middle of a dense block, each tensor read or written once.
#pragma once

#include <type_traits>

#include "common/terms.h"
#include "isa/kernels.h"
#include "simd/portable.h"

namespace {

// What is left of `value` once it is stored as T.
template <class Simd, class T>
inline typename Simd::Vector stored_as(const typename Simd::Vector& value) {
  T stored[Simd::kLanes];
  Simd::store(stored, value);
  return Simd::load(stored);
}

// step(i) for each whole vector, step(i, rest) for what is left behind them.
template <class Simd, class Step>
inline void for_vectors(int64_t count, const Step& step) {
  int64_t i = 0;
  for (; i + Simd::kLanes <= count; i += Simd::kLanes) step(i);
  if (i < count) step(i, static_cast<int>(count - i));
}

template <class Simd, class T>
void activation(const void* gate, const void* up, int64_t count, void* h) {
  const T *g = static_cast<const T*>(gate), *u = static_cast<const T*>(up);
  T* out = static_cast<T*>(h);
  if (u == nullptr) {
    for_vectors<Simd>(
        count, [&](int64_t i, auto... rest) { Simd::store(out + i, Simd::relu(Simd::load(g + i, rest...)), rest...); });
    return;
  }
  for_vectors<Simd>(count, [&](int64_t i, auto... rest) {
    Simd::store(out + i, Simd::multiply(Simd::relu(Simd::load(g + i, rest...)), Simd::load(u + i, rest...)), rest...);
  });
}

template <class Simd>
inline typename Simd::Vector count_gradients(float pull, const typename Simd::Vector& gate) {
  float lanes[Simd::kLanes];
  Simd::store(lanes, gate);
  for (float& lane : lanes) lane = count_gradient(pull, lane);
  return Simd::load(lanes);
}

template <class Simd, class T, bool kGated, bool kReports, bool kCount>
inline float activation_gradients(const twell::ActivationRow& row, int64_t count) {
  const T *gate = static_cast<const T*>(row.gate), *up = static_cast<const T*>(row.up);
  const T* grad_h = static_cast<const T*>(row.grad_h);
  T *grad_gate = static_cast<T*>(row.grad_gate), *grad_up = static_cast<T*>(row.grad_up), *h = static_cast<T*>(row.h);
  const auto pull = Simd::broadcast(row.l1_pull), weight = Simd::broadcast(row.weight);
  auto sum = Simd::zero();
  for_vectors<Simd>(count, [&](int64_t i, auto... rest) {
    const auto g = Simd::relu(Simd::load(gate + i, rest...));
    auto u = g, value = g;
    if constexpr (kGated) {
      u = Simd::load(up + i, rest...);
      value = stored_as<Simd, T>(Simd::multiply(g, u));
    }
    const auto dh = Simd::add(Simd::load(grad_h + i, rest...), Simd::l1_gradient(pull, value));
    if constexpr (kReports) {
      sum = Simd::add(sum, Simd::absolute(value));
      const auto active = Simd::where_nonzero(value, weight);
      Simd::store(row.active + i, Simd::add(Simd::load(row.active + i, rest...), active), rest...);
    }
    if (h != nullptr) Simd::store(h + i, value, rest...);
    auto dg = dh;
    if constexpr (kGated) {
      dg = Simd::multiply(dh, u);
      Simd::store(grad_up + i, Simd::multiply(dh, g), rest...);
    }
    if constexpr (kCount) dg = Simd::add(dg, count_gradients<Simd>(row.count_pull, g));
    Simd::store(grad_gate + i, Simd::where_nonzero(g, dg), rest...);
  });
  return Simd::sum(sum);
}

template <class Simd, class T>
float activation_backward(const twell::ActivationRow& row, int64_t count) {
  const auto choose = [&](auto gated, auto reports) {
    constexpr bool kGated = decltype(gated)::value, kReports = decltype(reports)::value;
    return row.count_pull != 0.0f ? activation_gradients<Simd, T, kGated, kReports, true>(row, count)
                                  : activation_gradients<Simd, T, kGated, kReports, false>(row, count);
  };
  using Yes = std::true_type;
  using No = std::false_type;
  if (row.up != nullptr) return row.active != nullptr ? choose(Yes{}, Yes{}) : choose(Yes{}, No{});
  return row.active != nullptr ? choose(No{}, Yes{}) : choose(No{}, No{});
}

}  // namespace
