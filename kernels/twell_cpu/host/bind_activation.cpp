// The elementwise middle of a dense block for tensors.

#include <tuple>

#include "common/dense.h"
#include "host/tensors.h"

namespace twell {
namespace {

struct Inputs {
  Tensor gate;
  MaybeTensor up;
  Activation activation;

  Inputs(const Tensor& first, const MaybeTensor& second)
      : gate(torch::stable::contiguous(first)),
        up(second ? MaybeTensor(torch::stable::contiguous(*second)) : std::nullopt) {
    const int64_t width = gate.size(gate.dim() - 1);
    activation = {dtype_of(gate), width == 0 ? 0 : gate.numel() / width, width, gate.const_data_ptr(),
                  up ? up->const_data_ptr() : nullptr};
  }
  // Throws unless `other` has the elements that kernels expect beside the gate's.
  void check(const Tensor& other) const {
    if (other.numel() != gate.numel() || other.scalar_type() != gate.scalar_type()) {
      throw std::runtime_error("hf_twell::activation takes tensors of one shape and dtype");
    }
  }
};

Tensor forward(Tensor gate, MaybeTensor up, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor) {
  const Inputs inputs(gate, up);
  if (up) inputs.check(*up);
  Tensor h = allocated(gate, gate.sizes());
  activation(select_kernels(inputs.activation.dtype), thread_pool(), inputs.activation, h.mutable_data_ptr());
  return h;
}

std::tuple<Tensor, Tensor, Tensor> backward(Tensor grad_h, Tensor gate, MaybeTensor up, MaybeTensor l1_scale,
                                            MaybeTensor token_weight, bool reports, MaybeTensor count_scale) {
  const Inputs inputs(gate, up);
  const Activation& a = inputs.activation;
  const Tensor dh = torch::stable::contiguous(grad_h);
  inputs.check(dh);
  const auto empty = [&] { return allocated(gate, {0}); };
  Tensor grad_gate = allocated(gate, gate.sizes());
  Tensor grad_up = up ? allocated(gate, gate.sizes()) : empty();
  Tensor report = allocated(gate, {reports ? 1 + a.width : 0}, ScalarType::Float);
  MaybeTensor keep_weight;
  const Terms terms{number(l1_scale), number(count_scale), fp32_pointer(token_weight, &keep_weight),
                    reports ? static_cast<float*>(report.mutable_data_ptr()) : nullptr};
  activation_backward(select_kernels(a.dtype), thread_pool(), a, dh.const_data_ptr(), terms,
                      grad_gate.mutable_data_ptr(), up ? grad_up.mutable_data_ptr() : nullptr, nullptr);
  return {grad_gate, grad_up, report};
}

}  // namespace
}  // namespace twell

TWELL_IMPLEMENTATIONS(CPU, m) {
  m.impl("activation", TWELL_BOX(twell::forward));
  m.impl("activation_backward", TWELL_BOX(twell::backward));
}
