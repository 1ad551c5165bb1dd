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
// A kernel after it that is launched programmatically may start once the kernel ahead of this one has ended; it must
// wait (griddepcontrol.wait) before it reads y or sum.
cudaError_t add_rms_norm(const AddRmsNorm&, void* y, void* sum, const Device&, cudaStream_t);

}  // namespace twell
