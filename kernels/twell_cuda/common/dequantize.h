// 8-bit matrices with scales as ones of another type.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/ffn.h"

namespace twell {

// A scale s is a power of two, with its sign, times a mantissa from 1 to 2. (Of 0, NaN and infinity: s times 1.)
enum class Part { kWhole, kPower, kMantissa };

struct Factors {
  const float* scales = nullptr;  // null: ones
  Part part = Part::kWhole;
};

// to[l, c] = line[l] * column[c] * from[l, c], rounded once; not at all where factors are powers. Lines lie one after
// another, in both.
struct Dequantization {
  const void* from;
  DType type;  // an 8-bit one
  int64_t lines, columns;
  Factors line, column;
  void* to;  // at a 16-byte border
};

cudaError_t dequantize(const Dequantization& matrix, DType to, cudaStream_t stream);

// to[i] = values[i] / mantissa of scales[i]
cudaError_t divide_by_mantissas(const void* values, const float* scales, int64_t count, void* to, DType dtype,
                                cudaStream_t stream);

}  // namespace twell
