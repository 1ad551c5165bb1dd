// Tensors brought into the form that the kernels read; only the bind_*.cpp files include this.
#pragma once

#ifndef USE_CUDA
#define USE_CUDA  // declares aoti_torch_get_current_cuda_stream
#endif

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/dequantize.h"
#include "common/ffn.h"
#include "common/training.h"
#include "common/transpose.h"
#include "host/dispatch.h"
#include "sm90/training/step.h"
#include "twell_errors.h"
#include "twell_library.h"
#include "twell_limits.h"

// torch 2.11's name for it.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

#define TWELL_BOX(function) twell::boxed<&function, twell::CudaMemory>

namespace twell {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

struct CudaMemory {
  static constexpr const char* kFull = "CUDA out of memory.";
  // An earlier illegal access, say, makes allocations and products fail, and no smaller batch helps.
  static std::string other_error() {
    size_t free = 0, total = 0;
    cudaError_t error = cudaPeekAtLastError();
    // PyTorch may have taken it from there. An error that has broken the context comes back from every call; PyTorch's
    // allocator makes this one, too, where memory is full.
    if (error == cudaSuccess) error = cudaMemGetInfo(&free, &total);
    if (error == cudaSuccess || error == cudaErrorMemoryAllocation) return "";
    return std::string("CUDA error: ") + cudaGetErrorString(error);
  }
};

constexpr int64_t kRow = 8;  // D is padded to a multiple of it, so that rows start at 16-byte borders

template <typename... Args>
Tensor aten(const char* name, const char* overload, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// A new contiguous tensor where `like` is. torch::stable::new_empty looks its operator up by name and boxes its
// arguments in each call, which takes the host as long as a launch.
inline Tensor allocated(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                        std::optional<ScalarType> type = std::nullopt) {
  int32_t device_type = 0, dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  if (type) dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(*type));
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= std::max<int64_t>(sizes[i], 1)) strides[i] = stride;
  AtenTensorHandle out = nullptr;
  const AOTITorchError error =
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype, device_type,
                               like.get_device_index(), &out);
  if (error != AOTI_TORCH_SUCCESS) throw no_tensor<CudaMemory>(stride, dtype);
  return Tensor(out);
}

inline Tensor linear(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  return aten("aten::linear", "", x, weight, bias);
}

inline const Device& device_of(int index) {
  static const std::vector<Device> devices = [] {
    const auto check = [](cudaError_t error) {
      if (error != cudaSuccess) {
        throw std::runtime_error(std::string("hf_twell cannot read the GPUs' properties: ") +
                                 cudaGetErrorString(error));
      }
    };
    int count = 0;
    check(cudaGetDeviceCount(&count));
    std::vector<Device> all(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) {
      check(cudaDeviceGetAttribute(&all[i].sm_count, cudaDevAttrMultiProcessorCount, i));
      check(cudaDeviceGetAttribute(&all[i].major, cudaDevAttrComputeCapabilityMajor, i));
      check(cudaDeviceGetAttribute(&all[i].minor, cudaDevAttrComputeCapabilityMinor, i));
    }
    return all;
  }();
  return devices.at(static_cast<size_t>(index));
}

inline cudaStream_t current_stream(int index) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream));
  return static_cast<cudaStream_t>(stream);
}

inline DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::Char: return DType::kInt8;
    case ScalarType::Float8_e4m3fn: return DType::kE4m3;
    default: throw std::runtime_error("hf_twell takes float32, bfloat16 or float16 tensors");
  }
}

inline bool aligned(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0; }

// Each call of PyTorch's dispatcher takes the host as long as a launch, so what is contiguous is not asked to become
// it.
inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// Contiguous, with `columns` in its last dimension (the new ones zero) and a base at a 16-byte border.
inline Tensor prepared(const Tensor& tensor, int64_t columns) {
  const int64_t missing = columns - tensor.size(tensor.dim() - 1);
  Tensor out = as_contiguous(missing > 0 ? torch::stable::pad(tensor, {0, missing}) : tensor);
  return aligned(out) ? out : torch::stable::clone(out);
}

inline MaybeTensor prepared(const MaybeTensor& tensor, int64_t columns) {
  return tensor ? MaybeTensor(prepared(*tensor, columns)) : std::nullopt;
}

inline const void* pointer(const MaybeTensor& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }

inline void check_launch(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("hf_twell's CUDA ") + what + " failed: " + error_text(error));
  }
}

// Whether our kernel transposes it: a matrix of 2-byte elements.
inline bool transposable(const Tensor& matrix) {
  const int64_t rows = matrix.size(0), columns = matrix.size(1);
  return bytes_of(dtype_of(matrix)) == 2 && matrix.stride(1) == 1 && matrix.stride(0) == columns && rows % 8 == 0 &&
         columns % 8 == 0 && aligned(matrix);
}

inline Transposition transposition(const Tensor& matrix, Tensor& out) {
  return {matrix.const_data_ptr(), matrix.size(0), matrix.size(1), out.mutable_data_ptr()};
}

// As a contiguous one; of 2-byte elements, for which PyTorch's copy takes five times as long, by our kernel.
inline Tensor transposed(const Tensor& matrix, Start start) {
  if (!transposable(matrix)) return as_contiguous(torch::stable::transpose(matrix, 0, 1));
  Tensor out = allocated(matrix, {matrix.size(1), matrix.size(0)});
  check_launch(transpose(transposition(matrix, out), start, current_stream(matrix.get_device_index())), "transpose");
  return out;
}

// down_proj, w_down (D, F), as (F, D) in memory, D padded.
struct Down {
  Tensor rows;
  Transposition later{};  // what writes them, if that is left to training's launches

  Down(const Tensor& w_down, int64_t padded, bool training) : rows(w_down) {
    // As it is stored by columns, as hf_twell/blocks/layout.py sees to in evaluation?
    const bool padless = w_down.size(0) == padded;
    if (padless && w_down.stride(0) == 1 && w_down.stride(1) == padded && aligned(w_down)) return;
    if (training && padless && transposable(w_down)) {
      rows = allocated(w_down, {w_down.size(1), padded});
      later = transposition(w_down, rows);
    } else {
      rows = prepared(transposed(w_down, Start::kAlone), padded);
    }
  }
};

inline MaybeTensor as_contiguous(const MaybeTensor& tensor) {
  return tensor ? MaybeTensor(as_contiguous(*tensor)) : std::nullopt;
}
// Of a contiguous float32 tensor, to which hf_twell/ops/api.py has cast it.
inline const float* fp32_pointer(const MaybeTensor& tensor) { return static_cast<const float*>(pointer(tensor)); }

inline Tensor bytes_like(const Tensor& tensor, int64_t bytes) { return allocated(tensor, {bytes}, ScalarType::Byte); }

// Of 8-bit weights: float32, one for each row. None where weights are of the call's own type.
struct Scales {
  MaybeTensor up, down, gate;
};

// An 8-bit matrix (N, K), with factors for its rows and its columns, as one of another type in the same memory order.
inline Tensor dequantized(const Tensor& matrix, Factors of_rows, Factors of_columns, ScalarType type) {
  const bool by_column = matrix.stride(0) == 1 && matrix.stride(1) == matrix.size(0);
  const Tensor rows = by_column ? torch::stable::transpose(matrix, 0, 1) : as_contiguous(matrix);
  if (by_column) std::swap(of_rows, of_columns);
  Tensor out = allocated(rows, {rows.size(0), rows.size(1)}, type);
  const Dequantization work{rows.const_data_ptr(), dtype_of(rows), rows.size(0), rows.size(1), of_rows, of_columns,
                            out.mutable_data_ptr()};
  check_launch(dequantize(work, dtype_of(out), current_stream(matrix.get_device_index())), "dequantize");
  return by_column ? torch::stable::transpose(out, 0, 1) : out;
}

// A bias (N) over the mantissas of scales.
inline MaybeTensor divided(const MaybeTensor& bias, const Tensor& scales) {
  if (!bias) return std::nullopt;
  const Tensor from = as_contiguous(*bias);
  Tensor out = allocated(from, from.sizes());
  check_launch(
      divide_by_mantissas(from.const_data_ptr(), static_cast<const float*>(scales.const_data_ptr()), from.numel(),
                          out.mutable_data_ptr(), dtype_of(from), current_stream(from.get_device_index())),
      "bias");
  return out;
}

// The operands of one call, padded and contiguous (x of any leading sizes), and what kernels see of them.
struct Operands {
  int64_t hidden, width, tokens, padded;
  Tensor x, first;
  Down down;
  MaybeTensor up, b_first, b_up, b_down, s_first, s_up, s_down;

  Operands(const Tensor& input, const Tensor& w_up, const Tensor& w_down, const MaybeTensor& w_gate,
           const MaybeTensor& bias_up, const MaybeTensor& bias_down, const MaybeTensor& bias_gate,
           bool training = false, const Scales& scales = {})
      : hidden(w_up.size(1)),
        width(w_up.size(0)),
        tokens(input.numel() / hidden),
        padded((hidden + kRow - 1) / kRow * kRow),
        x(prepared(input, padded)),
        first(prepared(w_gate ? *w_gate : w_up, padded)),
        down(w_down, padded, training),
        up(prepared(w_gate ? MaybeTensor(w_up) : std::nullopt, padded)),
        b_first(prepared(w_gate ? bias_gate : bias_up, width)),
        b_up(prepared(w_gate ? bias_up : std::nullopt, width)),
        b_down(prepared(bias_down, padded)),
        s_first(as_contiguous(w_gate ? scales.gate : scales.up)),
        s_up(as_contiguous(w_gate ? scales.up : std::nullopt)),
        s_down(as_contiguous(scales.down)) {}

  // Of a matrix that `prepared` has made.
  Operand operand(const Tensor& matrix, const MaybeTensor& scales) const {
    return {matrix.const_data_ptr(), dtype_of(matrix), padded, 1, fp32_pointer(scales)};
  }

  Ffn ffn() const {
    Ffn ffn{};
    ffn.dtype = dtype_of(x);
    ffn.tokens = tokens;
    ffn.hidden = static_cast<int>(padded);
    ffn.width = static_cast<int>(width);
    ffn.x = x.const_data_ptr();
    ffn.gate = operand(first, s_first);
    if (up) ffn.up = operand(*up, s_up);
    ffn.down = operand(down.rows, s_down);
    ffn.b_gate = pointer(b_first);
    ffn.b_up = pointer(b_up);
    ffn.b_down = pointer(b_down);
    return ffn;
  }
};

inline void check_sizes(const Tensor& x, const Tensor& w_up) {
  const int64_t hidden = w_up.size(1), width = w_up.size(0);
  if (hidden < 1 || hidden > kMaxHidden || width < 1 || width > kMaxWidth) {
    throw std::runtime_error("hf_twell's CUDA kernels take D of 1.." + std::to_string(kMaxHidden) + " and F of 1.." +
                             std::to_string(kMaxWidth) + ", not D = " + std::to_string(hidden) +
                             ", F = " + std::to_string(width));
  }
  if (x.numel() / hidden > std::numeric_limits<int32_t>::max()) {
    throw std::runtime_error("hf_twell's CUDA kernels take up to 2,147,483,647 tokens a call, not " +
                             std::to_string(x.numel() / hidden) + "; split the batch");
  }
}

// Throws where no kernels train such a call.
inline void check_training(const Tensor& x, const Tensor& w_up, int64_t capacity) {
  check_training(device_of(x.get_device_index()), dtype_of(x), x.numel() / w_up.size(1), w_up.size(0), capacity);
}

}  // namespace twell
