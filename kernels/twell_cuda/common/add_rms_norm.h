// The norm ahead of a block, with the addition before it.
#pragma once

#include "common/ffn.h"

namespace twell {

// Shapes (T, D), row-major, 16-byte aligned, D a multiple of 8 up to kMaxHidden; weight (D).
struct AddRmsNorm {
  DType dtype;  // 16 bits
  int64_t tokens;
  int columns;
  const void* x;
  const void* residual;
  const void* weight;
  float epsilon;
};

// sum = x + residual, and y = sum / sqrt(mean(sum^2) + epsilon) * weight, of the sum in fp32, both rounded once.
// The kernel after it may start as this one does, where it waits for it as decode/ does.
cudaError_t add_rms_norm(const AddRmsNorm&, void* y, void* sum, const Device&, cudaStream_t);

}  // namespace twell
