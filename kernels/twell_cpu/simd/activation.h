// The elementwise middle of a dense block, each tensor read or written once.
#pragma once

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

template <class Simd, class T, bool kGated, bool kCounts>
inline float activation_gradients(const twell::ActivationRow& row, int64_t count) {
  const T *gate = static_cast<const T*>(row.gate), *up = static_cast<const T*>(row.up);
  const T* grad_h = static_cast<const T*>(row.grad_h);
  T *grad_gate = static_cast<T*>(row.grad_gate), *grad_up = static_cast<T*>(row.grad_up), *h = static_cast<T*>(row.h);
  const auto pull = Simd::broadcast(row.pull), weight = Simd::broadcast(row.weight);
  auto sum = Simd::zero();
  for_vectors<Simd>(count, [&](int64_t i, auto... rest) {
    const auto g = Simd::relu(Simd::load(gate + i, rest...));
    auto u = g, value = g;
    if constexpr (kGated) {
      u = Simd::load(up + i, rest...);
      value = stored_as<Simd, T>(Simd::multiply(g, u));
    }
    const auto dh = Simd::add(Simd::load(grad_h + i, rest...), Simd::l1_gradient(pull, value));
    if constexpr (kCounts) {
      sum = Simd::add(sum, Simd::absolute(value));
      const auto active = Simd::where_nonzero(value, weight);
      Simd::store(row.active + i, Simd::add(Simd::load(row.active + i, rest...), active), rest...);
    }
    if (h != nullptr) Simd::store(h + i, value, rest...);
    if constexpr (kGated) {
      Simd::store(grad_gate + i, Simd::where_nonzero(g, Simd::multiply(dh, u)), rest...);
      Simd::store(grad_up + i, Simd::multiply(dh, g), rest...);
    } else {
      Simd::store(grad_gate + i, Simd::where_nonzero(g, dh), rest...);
    }
  });
  return Simd::sum(sum);
}

template <class Simd, class T>
float activation_backward(const twell::ActivationRow& row, int64_t count) {
  if (row.up != nullptr) {
    return row.active != nullptr ? activation_gradients<Simd, T, true, true>(row, count)
                                 : activation_gradients<Simd, T, true, false>(row, count);
  }
  return row.active != nullptr ? activation_gradients<Simd, T, false, true>(row, count)
                               : activation_gradients<Simd, T, false, false>(row, count);
}

}  // namespace
