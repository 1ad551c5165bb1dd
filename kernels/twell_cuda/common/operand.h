// A weight matrix as it lies in memory. Launchers take weights in this form alone, so that a weight in another number
// format is another kind of operand and not another operator.
#pragma once

#include <cstdint>

namespace twell {

// kFloat32 has no kernels here: PyTorch's matmuls take it (host/dispatch.h). kInt8 and kE4m3 are of
// weights alone.
enum class DType : int { kBFloat16, kFloat16, kFloat32, kInt8, kE4m3 };

// Whether such numbers mean themselves times scales.
constexpr bool is_scaled(DType dtype) { return dtype == DType::kInt8 || dtype == DType::kE4m3; }

constexpr int bytes_of(DType dtype) { return is_scaled(dtype) ? 1 : dtype == DType::kFloat32 ? 4 : 2; }

struct Operand {
  const void* data = nullptr;  // null: the call has no such weight
  DType dtype = DType::kBFloat16;
  int64_t row_stride = 0, column_stride = 1;  // in elements
  // Null: elements are the weights themselves. Else one for each row of the stock weight: of down, for each of D.
  const float* scales = nullptr;
};

}  // namespace twell
