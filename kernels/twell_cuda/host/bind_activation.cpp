// The elementwise middle of a dense block for tensors.

#include "common/activation.h"
#include "host/tensors.h"

namespace twell {
namespace {

constexpr int64_t kColumns = 8;  // F is padded to a multiple of it

// Whether the kernel that goes forward reads its rows where they lie: a matrix whose rows lie apart.
bool apart(const Tensor& tensor) {
  return tensor.dim() == 2 && tensor.stride(1) == 1 && tensor.stride(0) > tensor.size(1) &&
         tensor.stride(0) % kColumns == 0 && tensor.size(1) % kColumns == 0 && aligned(tensor);
}

struct Inputs {
  int64_t width, tokens, padded;
  bool halves;  // of one matrix, as merged projections give them
  Tensor gate;
  MaybeTensor up;

  Inputs(const Tensor& first, const MaybeTensor& second, bool forward)
      : width(first.size(first.dim() - 1)),
        tokens(first.numel() / width),
        padded((width + kColumns - 1) / kColumns * kColumns),
        halves(forward && second && apart(first) && apart(*second) && first.stride(0) == second->stride(0)),
        gate(halves ? first : prepared(first, padded)),
        up(halves || !second ? second : MaybeTensor(prepared(*second, padded))) {
    if (first.scalar_type() != ScalarType::BFloat16 && first.scalar_type() != ScalarType::Half) {
      throw std::runtime_error("hf_twell::activation takes bfloat16 and float16 tensors");
    }
  }
  Activation activation() const {
    const int64_t stride = halves ? gate.stride(0) : padded;
    return {dtype_of(gate), tokens, static_cast<int>(padded), stride, gate.const_data_ptr(), pointer(up)};
  }
  Tensor rows() const { return allocated(gate, {tokens, padded}); }
  Tensor cut(const Tensor& rows, const Tensor& like) const {
    Tensor whole = rows;
    if (padded != width) whole = as_contiguous(torch::stable::narrow(whole, 1, 0, width));
    return torch::stable::reshape(whole, like.sizes());
  }
};

Tensor activate(Tensor gate, MaybeTensor up, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor) {
  const torch::stable::accelerator::DeviceGuard guard(gate.get_device_index());
  if (gate.numel() == 0) return allocated(gate, gate.sizes());
  const Inputs inputs(gate, up, true);
  Tensor h = inputs.rows();
  const int device = gate.get_device_index();
  check_launch(activation(inputs.activation(), h.mutable_data_ptr(), device_of(device), current_stream(device)),
               "activation");
  return inputs.cut(h, gate);
}

std::tuple<Tensor, Tensor, Tensor> activate_backward(Tensor grad_h, Tensor gate, MaybeTensor up, MaybeTensor l1_scale,
                                                     MaybeTensor token_weight, bool reports, MaybeTensor count_scale) {
  const torch::stable::accelerator::DeviceGuard guard(gate.get_device_index());
  const int64_t width = gate.size(gate.dim() - 1);
  const auto empty = [&] { return allocated(gate, {0}); };
  if (gate.numel() == 0) {
    return {allocated(gate, gate.sizes()), up ? allocated(gate, gate.sizes()) : empty(),
            torch::stable::new_zeros(gate, {reports ? 1 + width : 0}, ScalarType::Float)};
  }
  const Inputs inputs(gate, up, false);
  const Activation a = inputs.activation();
  const Tensor dh = prepared(grad_h, inputs.padded);
  Tensor grad_gate = inputs.rows(), grad_up = up ? inputs.rows() : empty();
  // The report has room for padded neurons, which are never active.
  Tensor report = allocated(gate, {reports ? 1 + inputs.padded : 0}, ScalarType::Float);
  Tensor partials = bytes_like(gate, reports ? activation_partial_bytes(a) : 0);
  const MaybeTensor weight = as_contiguous(token_weight);
  const Terms terms{fp32_pointer(l1_scale), fp32_pointer(count_scale), fp32_pointer(weight),
                    reports ? static_cast<float*>(report.mutable_data_ptr()) : nullptr};
  const int device = gate.get_device_index();
  check_launch(activation_backward(a, dh.const_data_ptr(), terms, grad_gate.mutable_data_ptr(),
                                   up ? grad_up.mutable_data_ptr() : nullptr, partials.mutable_data_ptr(),
                                   device_of(device), current_stream(device)),
               "activation backward");
  if (reports && inputs.padded != width) {
    report = as_contiguous(torch::stable::narrow(report, 0, 0, 1 + width));
  }
  return {inputs.cut(grad_gate, gate), up ? inputs.cut(grad_up, gate) : grad_up, report};
}

}  // namespace
}  // namespace twell

TWELL_IMPLEMENTATIONS(CUDA, m) {
  m.impl("activation", TWELL_BOX(twell::activate));
  m.impl("activation_backward", TWELL_BOX(twell::activate_backward));
}
