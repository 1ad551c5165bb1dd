// The only file that sees tensors: brings them into the form that the kernels read, and allocates.

#ifndef USE_CUDA
#define USE_CUDA  // declares aoti_torch_get_current_cuda_stream
#endif

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "forward.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// torch 2.11's name for it.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

constexpr int64_t kMaxHidden = 16384, kMaxWidth = 65536;  // as in hf_twell/ops.py
constexpr int64_t kRow = 8;  // D is padded to a multiple of it, so that rows start at 16-byte borders

template <typename... Args>
Tensor aten(const char* name, const char* overload, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor linear(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  return aten("aten::linear", "", x, weight, bias);
}

const twell::Device& device_of(int index) {
  static const std::vector<twell::Device> devices = [] {
    const auto check = [](cudaError_t error) {
      if (error != cudaSuccess) {
        throw std::runtime_error(std::string("hf_twell cannot read the GPUs' properties: ") + cudaGetErrorString(error));
      }
    };
    int count = 0;
    check(cudaGetDeviceCount(&count));
    std::vector<twell::Device> all(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) {
      check(cudaDeviceGetAttribute(&all[i].sm_count, cudaDevAttrMultiProcessorCount, i));
      check(cudaDeviceGetAttribute(&all[i].major, cudaDevAttrComputeCapabilityMajor, i));
      check(cudaDeviceGetAttribute(&all[i].minor, cudaDevAttrComputeCapabilityMinor, i));
    }
    return all;
  }();
  return devices.at(static_cast<size_t>(index));
}

cudaStream_t current_stream(int index) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream));
  return static_cast<cudaStream_t>(stream);
}

// Contiguous, with `columns` in its last dimension (the new ones zero) and a base at a 16-byte border.
Tensor prepared(const Tensor& tensor, int64_t columns) {
  const int64_t missing = columns - tensor.size(tensor.dim() - 1);
  Tensor out = torch::stable::contiguous(missing > 0 ? torch::stable::pad(tensor, {0, missing}) : tensor);
  return reinterpret_cast<uintptr_t>(out.const_data_ptr()) % 16 == 0 ? out : torch::stable::clone(out);
}

MaybeTensor prepared(const MaybeTensor& tensor, int64_t columns) {
  return tensor ? MaybeTensor(prepared(*tensor, columns)) : std::nullopt;
}

const void* pointer(const MaybeTensor& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }

// fp32 has no kernel of its own: PyTorch's are used.
Tensor dense(const Tensor& x, const Tensor& w_up, const Tensor& w_down, const MaybeTensor& w_gate,
             const MaybeTensor& b_up, const MaybeTensor& b_down, const MaybeTensor& b_gate) {
  Tensor h = w_gate ? aten("aten::mul", "Tensor", aten("aten::relu", "", linear(x, *w_gate, b_gate)), linear(x, w_up, b_up))
                    : aten("aten::relu", "", linear(x, w_up, b_up));
  return torch::stable::contiguous(linear(h, w_down, b_down));
}

Tensor sparse(const Tensor& x, const Tensor& w_up, const Tensor& w_down, const MaybeTensor& w_gate,
              const MaybeTensor& b_up, const MaybeTensor& b_down, const MaybeTensor& b_gate) {
  const int64_t hidden = w_up.size(1), width = w_up.size(0), tokens = x.numel() / hidden;
  const int64_t padded = (hidden + kRow - 1) / kRow * kRow;
  const Tensor x_TD =
      prepared(torch::stable::reshape(torch::stable::contiguous(x), std::vector<int64_t>{tokens, hidden}), padded);
  const Tensor first = prepared(w_gate ? *w_gate : w_up, padded);
  const MaybeTensor up = prepared(w_gate ? MaybeTensor(w_up) : std::nullopt, padded);
  // Free where the weight already lies by columns, as hf_twell/_layout.py sees to in evaluation.
  const Tensor down = prepared(torch::stable::transpose(w_down, 0, 1), padded);
  const MaybeTensor bias_first = prepared(w_gate ? b_gate : b_up, width);
  const MaybeTensor bias_up = prepared(w_gate ? b_up : std::nullopt, width);
  const MaybeTensor bias_down = prepared(b_down, padded);
  Tensor y = torch::stable::new_empty(x, x.sizes());
  Tensor y_TD = padded == hidden ? y : torch::stable::new_empty(x, {tokens, padded});

  twell::Ffn ffn{};
  ffn.dtype = x.scalar_type() == ScalarType::Half ? twell::DType::kFloat16 : twell::DType::kBFloat16;
  ffn.tokens = tokens;
  ffn.hidden = static_cast<int>(padded);
  ffn.width = static_cast<int>(width);
  ffn.x = x_TD.const_data_ptr();
  ffn.gate = first.const_data_ptr();
  ffn.up = pointer(up);
  ffn.down = down.const_data_ptr();
  ffn.b_gate = pointer(bias_first);
  ffn.b_up = pointer(bias_up);
  ffn.b_down = pointer(bias_down);
  ffn.y = y_TD.mutable_data_ptr();

  // The allocator gives freed memory to later work of the same stream only, so both may go when this function returns.
  MaybeTensor workspace, gate;
  twell::Services services;
  services.workspace = [&](int64_t bytes) {
    workspace = torch::stable::new_empty(x, {bytes}, ScalarType::Byte);
    return workspace->mutable_data_ptr();
  };
  services.dense_gate = [&](int64_t begin, int64_t count) {
    gate.reset();
    Tensor rows = x_TD;
    gate = linear(torch::stable::narrow(rows, 0, begin, count), first, bias_first);
    return gate->const_data_ptr();
  };
  const int device = x.get_device_index();
  twell::forward(ffn, device_of(device), current_stream(device), services);
  if (padded != hidden) {
    Tensor rows = torch::stable::view(y, std::vector<int64_t>{tokens, hidden});
    torch::stable::copy_(rows, torch::stable::narrow(y_TD, 1, 0, hidden));
  }
  return y;
}

void check(const Tensor& x, const Tensor& w_up, const MaybeTensor& tally, int64_t capacity) {
  const int64_t hidden = w_up.size(1), width = w_up.size(0);
  if (hidden < 1 || hidden > kMaxHidden || width < 1 || width > kMaxWidth) {
    throw std::invalid_argument("hf_twell's CUDA kernels take D of 1.." + std::to_string(kMaxHidden) + " and F of 1.." +
                                std::to_string(kMaxWidth) + ", not D = " + std::to_string(hidden) +
                                ", F = " + std::to_string(width));
  }
  if (x.numel() / hidden > std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("hf_twell's CUDA kernels take up to 2,147,483,647 tokens a call, not " +
                                std::to_string(x.numel() / hidden) + "; split the batch");
  }
  if (capacity != 0 || tally) {
    throw std::invalid_argument("hf_twell's CUDA kernels compute inference only: capacity must be 0, and tally None");
  }
}

std::tuple<Tensor, Tensor, Tensor> ffn(Tensor x, Tensor w_up, Tensor w_down, MaybeTensor w_gate, MaybeTensor b_up,
                                       MaybeTensor b_down, MaybeTensor b_gate, MaybeTensor /*l1_scale*/,
                                       MaybeTensor /*token_weight*/, MaybeTensor tally, int64_t capacity) {
  check(x, w_up, tally, capacity);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor report = torch::stable::new_empty(x, {0}, ScalarType::Float);
  const Tensor state = torch::stable::new_empty(x, {0}, ScalarType::Byte);
  if (x.numel() == 0) return {torch::stable::new_empty(x, x.sizes()), report, state};
  switch (x.scalar_type()) {
    case ScalarType::Float: return {dense(x, w_up, w_down, w_gate, b_up, b_down, b_gate), report, state};
    case ScalarType::BFloat16:
    case ScalarType::Half: return {sparse(x, w_up, w_down, w_gate, b_up, b_down, b_gate), report, state};
    default: throw std::invalid_argument("hf_twell takes float32, bfloat16 or float16 tensors");
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hf_twell, CUDA, m) {
  m.impl("ffn", TORCH_BOX(&ffn));
}
