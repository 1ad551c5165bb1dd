// A weight matrix as it lies in memory. Launchers take weights in this form alone, so that a weight in another number
// format is another kind of operand and not another operator.
#pragma once

#include <cstdint>

namespace twell {

// kFloat32 has no kernels here: PyTorch's matmuls take it (host/dispatch.h).
enum class DType : int { kBFloat16, kFloat16, kFloat32 };

struct Operand {
  const void* data = nullptr;  // null: the call has no such weight
  DType dtype = DType::kBFloat16;
  int64_t row_stride = 0, column_stride = 1;  // in elements
  const void* scales = nullptr;  // null: elements are the weights themselves
};

}  // namespace twell
