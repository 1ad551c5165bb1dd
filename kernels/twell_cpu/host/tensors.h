// What the files that see tensors share.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "common/parallel.h"
#include "isa/kernels.h"
#include "twell_errors.h"
#include "twell_library.h"

#define TWELL_BOX(function) twell::boxed<&function, twell::HostMemory>

namespace twell {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

inline DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Half: return DType::kFloat16;
    default: throw std::runtime_error("hf_twell takes float32, bfloat16 or float16 tensors");
  }
}

// A new contiguous tensor, by the function that PyTorch's deterministic mode fills.
inline Tensor allocated(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                        std::optional<ScalarType> type = std::nullopt) {
  try {
    return torch::stable::new_empty(like, sizes, type);
  } catch (const std::runtime_error&) {
    int64_t elements = 1;
    for (const int64_t size : sizes) elements *= size;
    const ScalarType of = type ? *type : like.scalar_type();
    throw no_tensor<HostMemory>(elements, torch::stable::detail::to<int32_t>(torch::stable::detail::from(of)));
  }
}

inline Threads thread_pool() {
  return {static_cast<int>(torch::stable::get_num_threads()),
          [](int64_t count, void (*body)(int64_t, int64_t, void*), void* context) {
            torch::stable::parallel_for(0, count, 1, [=](int64_t begin, int64_t end) { body(begin, end, context); });
          }};
}

// The tensor itself where it lies so already: to ask takes nanoseconds, PyTorch's own function microseconds.
inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

inline const float* fp32_pointer(const MaybeTensor& tensor, MaybeTensor* keep) {
  if (!tensor) return nullptr;
  *keep = as_contiguous(*tensor);
  return static_cast<const float*>((*keep)->const_data_ptr());
}

// Of a float32 tensor of one element; 0 where there is none.
inline float number(const MaybeTensor& tensor) {
  return tensor ? *static_cast<const float*>(tensor->const_data_ptr()) : 0.0f;
}

}  // namespace twell
