// Gathers the kernels of one instruction set and element type into a table.
#pragma once

#include "isa/kernels.h"
#include "simd/activation.h"
#include "simd/gate.h"
#include "simd/gather_dot.h"
#include "simd/gather_sum.h"
#include "simd/int8.h"
#include "simd/pack.h"
#include "simd/transpose.h"

namespace {

template <class Simd, class Dot>
constexpr twell::Kernels make_table() {
  using T = typename Dot::Element;
  return twell::Kernels{
      gate<Simd, Dot>,
      nullptr,
      nullptr,
      pack<Simd>,
      gather_dot<Simd, Dot>,
      gather_sum<Simd, T>,
      gather_sum2<Simd, T>,
      gate_int8<Simd, T>,
      gather_sum_int8<Simd>,
      widen_int8<Simd, T>,
      nullptr,
      nullptr,
      nullptr,
      round<Simd, T>,
      widen<Simd, T>,
      activation<Simd, T>,
      activation_backward<Simd, T>,
      transpose<T>,
      nullptr,
      0,
      0,
      false,
      0,
      0,
      0,
      sizeof(T),
      32,
      32,
      48,
      48,
      512 << 10,
  };
}

}  // namespace
