// Keeps what relu keeps: the positions and values of positive (or NaN) elements, in order.
#pragma once

#include "simd/portable.h"

namespace {

template <class Simd>
int pack(const float* values, int count, uint32_t first_position, uint32_t* positions, float* kept) {
  int used = 0;
  for (int i = 0; i < count; i += Simd::kLanes) {
    const int width = count - i < Simd::kLanes ? count - i : Simd::kLanes;
    // Lanes behind the end are zero, which is not kept.
    uint32_t bits = Simd::kept(width == Simd::kLanes ? Simd::load(values + i) : Simd::load(values + i, width));
    while (bits) {
      const int lane = __builtin_ctz(bits);
      bits &= bits - 1;
      positions[used] = first_position + static_cast<uint32_t>(i + lane);
      kept[used++] = values[i + lane];
    }
  }
  return used;
}

}  // namespace
