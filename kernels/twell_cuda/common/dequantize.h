// An int8 matrix with scales as one of another type.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/operand.h"

namespace twell {

// to[l, c] = scale * from[l, c], rounded once; lines lie one after another, in both.
struct Dequantization {
  const int8_t* from;
  int64_t lines, columns;
  const float* scales;
  bool by_column;  // a scale for each column, or one for each line
  void* to;        // at a 16-byte border
};

cudaError_t dequantize(const Dequantization& matrix, DType to, cudaStream_t stream);

}  // namespace twell
