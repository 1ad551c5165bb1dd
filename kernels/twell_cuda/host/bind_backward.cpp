// Backward for tensors: allocates the gradients, and hands raw pointers to the kernels.

#include "host/tensors.h"
#include "twell_state.h"

namespace twell {
namespace {

enum Need { kX, kUp, kDown, kGate, kBiasUp, kBiasDown, kBiasGate };

using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// A gradient with padded rows, while kernels write it; empty where it is not wanted.
struct Output {
  bool wanted;
  Tensor rows;

  Output(const Tensor& like, bool want, int64_t count, int64_t columns)
      : wanted(want), rows(allocated(like, want ? std::vector<int64_t>{count, columns} : std::vector<int64_t>{0})) {}
  Output(const Tensor& like, bool want, int64_t count) : wanted(want), rows(allocated(like, {want ? count : 0})) {}
  void* pointer() { return wanted ? rows.mutable_data_ptr() : nullptr; }
  void zero() { torch::stable::zero_(rows); }
  // Without the padding.
  Tensor cut(int64_t columns) {
    if (!wanted || rows.size(1) == columns) return rows;
    return as_contiguous(torch::stable::narrow(rows, 1, 0, columns));
  }
};

// Throws where these are not runs of x's tokens, or no kernels take them. What they hold would have to be waited for.
void check_runs(const MaybeTensor& run, const MaybeTensor& run_size, const Tensor& x, const Tensor& w_up,
                int64_t capacity) {
  const auto check = [](bool right, const char* what) {
    if (!right) throw std::runtime_error(std::string("hf_twell's CUDA kernels take ") + what);
  };
  check(run && run_size, "run and run_size together");
  for (const Tensor& each : {*run, *run_size}) {
    check(each.is_cuda() && each.get_device_index() == x.get_device_index(), "run and run_size on x's device");
    check(each.scalar_type() == ScalarType::Long && each.dim() == 1, "one-dimensional run and run_size in int64");
  }
  check(run->numel() == x.numel() / w_up.size(1), "run with an element for each token");
  check(run_size->numel() >= 1, "run_size with an element for padding, at least");
  check(keeps_columns(w_up.size(0), capacity), "runs of tokens with a capacity of F alone, where columns are kept");
}

Results ffn_backward(Tensor grad_y, Tensor state, Tensor x, Tensor w_up, Tensor w_down, MaybeTensor w_gate,
                     MaybeTensor b_up, MaybeTensor b_gate, MaybeTensor l1_scale, MaybeTensor token_weight,
                     int64_t capacity, int64_t needs, MaybeTensor count_scale, MaybeTensor run, MaybeTensor run_size) {
  check_sizes(x, w_up);
  check_training(x, w_up, capacity);
  if (run || run_size) check_runs(run, run_size, x, w_up, capacity);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const bool gated = w_gate.has_value();
  const auto wants = [&](Need need) { return (needs >> need & 1) != 0; };
  const int64_t hidden = w_up.size(1), width = w_up.size(0), padded = (hidden + kRow - 1) / kRow * kRow;
  const int64_t tokens = x.numel() / hidden;
  Output grad_x(x, wants(kX), tokens, padded), grad_up(w_up, wants(kUp), width, padded);
  Output grad_down(w_down, wants(kDown), width, padded), grad_gate(w_up, gated && wants(kGate), width, padded);
  Output grad_b_up(x, wants(kBiasUp), width), grad_b_gate(x, wants(kBiasGate), width);
  Tensor in_runs = allocated(x, {run ? 1 : 0}, ScalarType::Float);
  if (!gated) grad_b_gate.zero();
  if (tokens == 0) {
    for (Output* each : {&grad_up, &grad_down, &grad_gate, &grad_b_up, &grad_b_gate}) each->zero();
    torch::stable::zero_(in_runs);
  } else {
    const Operands operands(x, w_up, w_down, w_gate, b_up, std::nullopt, b_gate, true);
    const Tensor dy = prepared(grad_y, padded), saved = as_contiguous(state);
    const MaybeTensor weight = as_contiguous(token_weight);
    const MaybeTensor runs = as_contiguous(run), sizes = as_contiguous(run_size);
    Terms terms{fp32_pointer(l1_scale), fp32_pointer(count_scale), fp32_pointer(weight), nullptr, {}};
    if (runs) {
      terms.runs = {static_cast<const int64_t*>(runs->const_data_ptr()),
                    static_cast<const int64_t*>(sizes->const_data_ptr()), sizes->numel(),
                    static_cast<float*>(in_runs.mutable_data_ptr())};
    }
    Output &first = gated ? grad_gate : grad_up, &b_first = gated ? grad_b_gate : grad_b_up;
    const Gradients gradients{dy.const_data_ptr(),
                              grad_x.pointer(),
                              first.pointer(),
                              gated ? grad_up.pointer() : nullptr,
                              grad_down.pointer(),
                              b_first.pointer(),
                              gated ? grad_b_up.pointer() : nullptr};
    const Ffn ffn = operands.ffn();
    const int device = x.get_device_index();
    Tensor workspace =
        bytes_like(x, sm90_backward_bytes(ffn, capacity, gradients.weights(), terms.runs, device_of(device)));
    check_launch(sm90_backward(ffn, operands.down.later, terms, capacity, saved.const_data_ptr(), gradients,
                               workspace.mutable_data_ptr(), device_of(device), current_stream(device)),
                 "backward");
  }
  Tensor down = grad_down.rows;
  if (grad_down.wanted) {
    // As down_proj is stored, so that autograd takes the gradient over without a copy.
    const Tensor rows = grad_down.cut(hidden);
    down = w_down.stride(0) == 1 ? torch::stable::transpose(rows, 0, 1) : transposed(rows, Start::kAfter);
  }
  Tensor b_down = allocated(x, {0});
  if (wants(kBiasDown)) {
    const std::vector<int64_t> sizes{tokens, hidden}, over{0};
    b_down = torch::stable::sum(torch::stable::reshape(as_contiguous(grad_y), sizes), over);
  }
  Tensor dx = wants(kX) ? torch::stable::reshape(grad_x.cut(hidden), x.sizes()) : grad_x.rows;
  return {dx, grad_up.cut(hidden), down, grad_gate.cut(hidden), grad_b_up.rows, b_down, grad_b_gate.rows, in_runs};
}

}  // namespace
}  // namespace twell

TWELL_IMPLEMENTATIONS(CUDA, m) { m.impl("ffn_backward", TWELL_BOX(twell::ffn_backward)); }
