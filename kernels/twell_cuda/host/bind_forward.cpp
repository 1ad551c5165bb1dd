// Forward for tensors: allocates, and hands raw pointers to the kernels.

#include "host/tensors.h"

namespace twell {
namespace {

// Float32 has no kernel of its own: PyTorch's are used.
Tensor dense(const Tensor& x, const Tensor& w_up, const Tensor& w_down, const MaybeTensor& w_gate,
             const MaybeTensor& b_up, const MaybeTensor& b_down, const MaybeTensor& b_gate) {
  Tensor h =
      w_gate ? aten("aten::mul", "Tensor", aten("aten::relu", "", linear(x, *w_gate, b_gate)), linear(x, w_up, b_up))
             : aten("aten::relu", "", linear(x, w_up, b_up));
  return as_contiguous(linear(h, w_down, b_down));
}

// Lets `compute` fill y (T, padded D); returns it in x's shape.
template <typename Compute>
Tensor computed(const Tensor& x, const Operands& operands, Compute compute) {
  Tensor y = allocated(x, x.sizes());
  if (operands.padded == operands.hidden) {
    compute(y.mutable_data_ptr());
    return y;
  }
  Tensor y_TD = allocated(x, {operands.tokens, operands.padded});
  compute(y_TD.mutable_data_ptr());
  Tensor rows = torch::stable::view(y, std::vector<int64_t>{operands.tokens, operands.hidden});
  torch::stable::copy_(rows, torch::stable::narrow(y_TD, 1, 0, operands.hidden));
  return y;
}

// `selected`: of a call with 8-bit weights; else made here.
Tensor sparse(const Tensor& x, const Operands& operands, bool quantize_x = false, Selection selected = {}) {
  return computed(x, operands, [&](void* y) {
    Ffn ffn = operands.ffn();
    ffn.y = y;
    ffn.quantize_x = quantize_x;
    // The allocator gives freed memory to later work of the same stream only, so both may go when this function
    // returns.
    MaybeTensor workspace, gate;
    Services services;
    services.workspace = [&](int64_t bytes) {
      workspace = bytes_like(x, bytes);
      return workspace->mutable_data_ptr();
    };
    services.dense_gate = [&](int64_t begin, int64_t count) {
      gate.reset();
      Tensor rows = torch::stable::reshape(operands.x, {operands.tokens, operands.padded});
      gate = linear(torch::stable::narrow(rows, 0, begin, count), operands.first, operands.b_first);
      return gate->const_data_ptr();
    };
    const int index = x.get_device_index();
    const Device& device = device_of(index);
    if (selected.row == nullptr) selected = select_row(ffn, device);
    forward(ffn, selected, device, current_stream(index), services);
  });
}

std::tuple<Tensor, Tensor, Tensor> train(const Tensor& x, const Operands& operands, const MaybeTensor& token_weight,
                                         bool tally, int64_t capacity) {
  Ffn ffn = operands.ffn();
  Tensor report = allocated(x, {tally ? 1 + operands.width : 0}, ScalarType::Float);
  Tensor state = bytes_like(x, sm90_state_bytes(ffn, capacity)),
         workspace = bytes_like(x, sm90_training_bytes(ffn, capacity));
  const MaybeTensor weight = as_contiguous(token_weight);
  const Terms terms{nullptr, nullptr, fp32_pointer(weight),
                    tally ? static_cast<float*>(report.mutable_data_ptr()) : nullptr};
  const int device = x.get_device_index();
  Tensor y = computed(x, operands, [&](void* rows) {
    ffn.y = rows;
    check_launch(sm90_training_forward(ffn, operands.down.later, terms, capacity, state.mutable_data_ptr(),
                                       workspace.mutable_data_ptr(), device_of(device), current_stream(device)),
                 "training forward");
  });
  return {y, report, state};
}

Tensor evaluate(const Tensor& x, const Tensor& w_up, const Tensor& w_down, const MaybeTensor& w_gate,
                const MaybeTensor& b_up, const MaybeTensor& b_down, const MaybeTensor& b_gate) {
  if (x.numel() == 0) return allocated(x, x.sizes());
  if (!has_kernels(dtype_of(x))) return dense(x, w_up, w_down, w_gate, b_up, b_down, b_gate);
  return sparse(x, Operands(x, w_up, w_down, w_gate, b_up, b_down, b_gate));
}

// The kernels that read 8-bit weights themselves for such a call, if any. Throws where they would have to quantize x
// and cannot.
Selection select_scaled(const Tensor& x, const Tensor& w_up, bool quantize_x) {
  Ffn ffn{};
  ffn.dtype = dtype_of(x);
  ffn.hidden = static_cast<int>(w_up.size(1));
  ffn.width = static_cast<int>(w_up.size(0));
  ffn.tokens = x.numel() / w_up.size(1);
  ffn.gate.dtype = dtype_of(w_up);
  ffn.quantize_x = quantize_x;
  return select_row(ffn, device_of(x.get_device_index()));
}

// By kernels that read weights of x's type. What decides which neurons are active is not rounded: of its scales it gets
// the powers of two alone, and the rows of down get the mantissas, which go through ReLU as they are positive. (Gates
// are often small differences of large terms, so that rounded weights would move them far.)
Tensor dequantized_first(const Tensor& x, const Tensor& w_up, const Tensor& w_down, const MaybeTensor& w_gate,
                         const MaybeTensor& b_up, const MaybeTensor& b_down, const MaybeTensor& b_gate,
                         const Tensor& s_up, const Tensor& s_down, const MaybeTensor& s_gate) {
  const ScalarType type = x.scalar_type();
  const Tensor ups = as_contiguous(s_up), downs = as_contiguous(s_down);
  const Tensor firsts = s_gate ? as_contiguous(*s_gate) : ups;
  const auto factors = [](const Tensor& scales, Part part) {
    return Factors{static_cast<const float*>(scales.const_data_ptr()), part};
  };
  const Tensor first = dequantized(w_gate ? *w_gate : w_up, factors(firsts, Part::kPower), {}, type);
  const MaybeTensor b_first = divided(w_gate ? b_gate : b_up, firsts);
  const Tensor down = dequantized(w_down, factors(downs, Part::kWhole), factors(firsts, Part::kMantissa), type);
  if (!w_gate) return evaluate(x, first, down, std::nullopt, b_first, b_down, std::nullopt);
  return evaluate(x, dequantized(w_up, factors(ups, Part::kWhole), {}, type), down, first, b_up, b_down, b_first);
}

std::tuple<Tensor, Tensor, Tensor> ffn(Tensor x, Tensor w_up, Tensor w_down, MaybeTensor w_gate, MaybeTensor b_up,
                                       MaybeTensor b_down, MaybeTensor b_gate, MaybeTensor /*l1_scale*/,
                                       MaybeTensor token_weight, MaybeTensor tally, int64_t capacity,
                                       MaybeTensor /*count_scale*/, MaybeTensor /*run*/, MaybeTensor /*run_size*/,
                                       MaybeTensor /*unions*/) {
  check_sizes(x, w_up);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const bool training = capacity != 0 || tally;
  if (training) check_training(x, w_up, capacity);
  if (training && x.numel() > 0) {
    const Operands operands(x, w_up, w_down, w_gate, b_up, b_down, b_gate, true);
    return train(x, operands, token_weight, tally.has_value(), capacity);
  }
  const int64_t reported = tally ? 1 + w_up.size(0) : 0;
  return {evaluate(x, w_up, w_down, w_gate, b_up, b_down, b_gate),
          torch::stable::new_zeros(x, {reported}, ScalarType::Float), bytes_like(x, 0)};
}

Tensor infer(Tensor x, Tensor w_up, Tensor w_down, MaybeTensor w_gate, MaybeTensor b_up, MaybeTensor b_down,
             MaybeTensor b_gate, MaybeTensor s_up, MaybeTensor s_down, MaybeTensor s_gate, bool quantize_x,
             double /*max_density*/) {
  check_sizes(x, w_up);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Selection selected = s_up || quantize_x ? select_scaled(x, w_up, quantize_x) : Selection{};
  if (!s_up || x.numel() == 0) return evaluate(x, w_up, w_down, w_gate, b_up, b_down, b_gate);
  if (selected.row != nullptr) {
    const Operands operands(x, w_up, w_down, w_gate, b_up, b_down, b_gate, false, {s_up, s_down, s_gate});
    return sparse(x, operands, quantize_x, selected);
  }
  return dequantized_first(x, w_up, w_down, w_gate, b_up, b_down, b_gate, *s_up, *s_down, s_gate);
}

}  // namespace
}  // namespace twell

TWELL_IMPLEMENTATIONS(CUDA, m) {
  m.impl("ffn", TWELL_BOX(twell::ffn));
  m.impl("infer", TWELL_BOX(twell::infer));
}
