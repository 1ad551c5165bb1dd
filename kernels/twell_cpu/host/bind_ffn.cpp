// The block for tensors: checks, allocates, and hands raw pointers to the kernels.

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "backward/backward.h"
#include "common/dense.h"
#include "forward/forward.h"
#include "host/int8.h"
#include "host/tensors.h"

namespace {

using torch::headeronly::ScalarType;
using twell::MaybeTensor;
using twell::Tensor;

// torch 2.11's name for it.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

Tensor linear(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x), torch::stable::detail::from(weight),
                                    torch::stable::detail::from(bias)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor rows_of(Tensor tensor, int64_t first, int64_t last) {
  return torch::stable::narrow(tensor, 0, first, last - first);
}

Tensor transposed(const Tensor& tensor) { return torch::stable::transpose(tensor, 0, 1); }

// One call's tensors, made contiguous where the kernels need it, and the same as raw pointers.
struct Call {
  Tensor x, w_up, w_down;
  MaybeTensor w_gate, b_up, b_gate;
  twell::Scales scales;
  twell::Threads threads;
  const twell::Kernels& kernels;
  twell::Block block;
  std::vector<float> biases[3];

  Call(const Tensor& given_x, const Tensor& up, const Tensor& down, const MaybeTensor& gate, const MaybeTensor& bias_up,
       const MaybeTensor& bias_down, const MaybeTensor& bias_gate, const twell::Scales& of_int8 = {})
      : x(twell::as_contiguous(given_x)),
        w_up(twell::as_contiguous(up)),
        w_down(down.stride(0) == 1 || down.stride(1) == 1 ? down : twell::as_contiguous(down)),
        w_gate(gate ? MaybeTensor(twell::as_contiguous(*gate)) : std::nullopt),
        b_up(bias_up),
        b_gate(bias_gate),
        threads(twell::thread_pool()),
        kernels(twell::select_kernels(twell::dtype_of(x))) {
    block.dtype = twell::dtype_of(x);
    block.hidden = w_up.size(1);
    block.tokens = block.hidden == 0 ? 0 : x.numel() / block.hidden;
    block.width = w_up.size(0);
    block.x = x.const_data_ptr();
    block.gate = (w_gate ? *w_gate : w_up).const_data_ptr();
    block.up = w_gate ? w_up.const_data_ptr() : nullptr;
    block.down = w_down.const_data_ptr();
    block.down_row = w_down.stride(0);
    block.down_column = w_down.stride(1);
    block.b_gate = widened(w_gate ? bias_gate : bias_up, 0);
    block.b_up = w_gate ? widened(bias_up, 1) : nullptr;
    block.b_down = widened(bias_down, 2);
    twell::check_scales(up, down, gate, of_int8);
    const float* of_up = twell::fp32_pointer(of_int8.up, &scales.up);
    block.s_down = twell::fp32_pointer(of_int8.down, &scales.down);
    block.s_gate = gate ? twell::fp32_pointer(of_int8.gate, &scales.gate) : of_up;
    block.s_up = gate ? of_up : nullptr;
  }
  Call(const Call&) = delete;

  // (T, D) whatever the leading sizes, none of which may be known from a size of zero.
  Tensor flat(const Tensor& tensor) const {
    return torch::stable::view(twell::as_contiguous(tensor), std::vector<int64_t>{block.tokens, block.hidden});
  }

  // linear(x, weight, bias), where `of_rows` are the weight's scales or null.
  Tensor product(const Tensor& x, const Tensor& weight, const float* of_rows, const MaybeTensor& bias) const {
    if (of_rows == nullptr) return linear(x, weight, bias);
    return linear(x, twell::dequantized(kernels, threads, x, weight, of_rows, block.dtype), bias);
  }

  // Gate (up where there is none) and up projections of some tokens, dense.
  std::pair<Tensor, MaybeTensor> project(const Tensor& x) const {
    if (!w_gate) return {product(x, w_up, block.s_gate, b_up), std::nullopt};
    return {product(x, *w_gate, block.s_gate, b_gate), product(x, w_up, block.s_up, b_up)};
  }

  twell::Activation activation(int64_t tokens, const Tensor& gate_rows, const MaybeTensor& up_rows) const {
    const void* up = up_rows ? up_rows->const_data_ptr() : nullptr;
    return {block.dtype, tokens, block.width, gate_rows.const_data_ptr(), up};
  }

 private:
  const float* widened(const MaybeTensor& bias, int slot) {
    if (!bias) return nullptr;
    const Tensor values = twell::as_contiguous(*bias);
    biases[slot].resize(static_cast<size_t>(values.numel()) + 1);
    kernels.widen(values.const_data_ptr(), values.numel(), biases[slot].data());
    return biases[slot].data();
  }
};

// y, like `x`; nothing else is allocated for a call that needs nothing else.
Tensor forward(const Call& call, const MaybeTensor& b_down, twell::Report* report, const twell::State* state,
               double max_density = 1.0) {
  const twell::Block& block = call.block;
  Tensor y = twell::allocated(call.x, call.x.sizes());
  const auto dense = [&](int64_t first, int64_t last) {
    auto [gate, up] = call.project(rows_of(call.flat(call.x), first, last));
    twell::activation(call.kernels, call.threads, call.activation(last - first, gate, up), gate.mutable_data_ptr());
    if (report->active) {
      twell::dense_count(call.kernels, block.dtype, last - first, block.width, gate.const_data_ptr(),
                         report->token_weight ? report->token_weight + first : nullptr, &report->l1, report->active);
    }
    Tensor rows = rows_of(call.flat(y), first, last);
    torch::stable::copy_(rows, call.product(gate, call.w_down, block.s_down, b_down));
  };
  twell::forward(block, call.kernels, call.threads, y.mutable_data_ptr(), report, state, dense, max_density);
  return y;
}

std::tuple<Tensor, Tensor, Tensor> ffn(Tensor x, Tensor w_up, Tensor w_down, MaybeTensor w_gate, MaybeTensor b_up,
                                       MaybeTensor b_down, MaybeTensor b_gate, MaybeTensor /*l1_scale*/,
                                       MaybeTensor token_weight, MaybeTensor tally, int64_t capacity,
                                       MaybeTensor /*count_scale*/, MaybeTensor /*run*/, MaybeTensor /*run_size*/,
                                       MaybeTensor /*unions*/) {
  const Call call(x, w_up, w_down, w_gate, b_up, b_down, b_gate);
  const twell::Block& block = call.block;
  const int64_t element = twell::element_bytes(block.dtype);
  Tensor report_tensor = torch::stable::new_zeros(x, {tally ? 1 + block.width : 0}, ScalarType::Float);
  const int64_t bytes = capacity > 0 ? twell::State::bytes(block.tokens, capacity, element, block.up != nullptr) : 0;
  Tensor state_tensor = twell::allocated(x, {bytes}, ScalarType::Byte);

  MaybeTensor keep_weight;
  std::vector<double> active(tally ? static_cast<size_t>(block.width) : 0);
  twell::Report report{twell::fp32_pointer(token_weight, &keep_weight), 0, tally ? active.data() : nullptr};
  twell::State state;
  if (capacity > 0) {
    state = twell::State::at(state_tensor.mutable_data_ptr(), block.tokens, capacity, element, block.up != nullptr);
  }
  Tensor y = forward(call, b_down, &report, capacity > 0 ? &state : nullptr);
  if (tally) {
    float* counts = static_cast<float*>(report_tensor.mutable_data_ptr());
    counts[0] = static_cast<float>(report.l1);
    std::copy(active.begin(), active.end(), counts + 1);
  }
  return {y, report_tensor, state_tensor};
}

Tensor infer(Tensor x, Tensor w_up, Tensor w_down, MaybeTensor w_gate, MaybeTensor b_up, MaybeTensor b_down,
             MaybeTensor b_gate, MaybeTensor s_up, MaybeTensor s_down, MaybeTensor s_gate, bool quantize_x,
             double max_density) {
  if (quantize_x) throw std::runtime_error("hf_twell's CPU kernels do not quantize x: they read int8 weights, not fp8");
  const Call call(x, w_up, w_down, w_gate, b_up, b_down, b_gate, {s_up, s_down, s_gate});
  twell::Report report{nullptr, 0, nullptr};
  return forward(call, b_down, &report, nullptr, max_density);
}

const int64_t* int64_pointer(const MaybeTensor& tensor, MaybeTensor* keep) {
  if (!tensor) return nullptr;
  *keep = twell::as_contiguous(*tensor);
  return static_cast<const int64_t*>((*keep)->const_data_ptr());
}

enum Need { kX, kUp, kDown, kGate, kBiasUp, kBiasDown, kBiasGate };

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> ffn_backward(
    Tensor grad_y, Tensor state_tensor, Tensor x, Tensor w_up, Tensor w_down, MaybeTensor w_gate, MaybeTensor b_up,
    MaybeTensor b_gate, MaybeTensor l1_scale, MaybeTensor token_weight, int64_t capacity, int64_t needs,
    MaybeTensor count_scale, MaybeTensor run, MaybeTensor run_size) {
  const Call call(x, w_up, w_down, w_gate, b_up, std::nullopt, b_gate);
  const twell::Block& block = call.block;
  const bool gated = block.up != nullptr;
  const Tensor grad_TD = call.flat(grad_y), x_TD = call.flat(call.x);
  const Tensor state_bytes = torch::stable::contiguous(state_tensor);
  const twell::State state = twell::State::at(const_cast<void*>(state_bytes.const_data_ptr()), block.tokens, capacity,
                                              twell::element_bytes(block.dtype), gated);
  const auto wanted = [&](int need) { return (needs >> need & 1) != 0; };
  const auto grad_like = [&](const Tensor& tensor, int need) {
    return wanted(need) ? twell::allocated(tensor, tensor.sizes()) : twell::allocated(tensor, {0});
  };
  Tensor grad_x = grad_like(x, kX), grad_up = grad_like(w_up, kUp);
  Tensor grad_gate = gated ? grad_like(*w_gate, kGate) : twell::allocated(x, {0});
  // As down_proj is stored, so that autograd takes the gradient over without a copy.
  const bool down_by_column = call.w_down.stride(0) == 1;
  Tensor grad_down = twell::allocated(x, {0});
  if (wanted(kDown)) {
    grad_down = down_by_column ? transposed(twell::allocated(w_down, {block.width, block.hidden}))
                               : twell::allocated(w_down, {block.hidden, block.width});
  }
  MaybeTensor keep_weight;
  const float* weight = twell::fp32_pointer(token_weight, &keep_weight);
  const twell::Terms terms{twell::number(l1_scale), twell::number(count_scale), weight, nullptr};
  std::vector<float> l1_pulls, count_pulls;
  const auto pulls = [&](float scale, std::vector<float>& out) -> const float* {
    if (scale == 0.0f) return nullptr;
    out.assign(static_cast<size_t>(block.tokens), scale);
    for (int64_t t = 0; weight && t < block.tokens; ++t) out[t] *= weight[t];
    return out.data();
  };
  std::vector<float> bias_gate(static_cast<size_t>(block.width) + 1), bias_up(static_cast<size_t>(block.width) + 1);
  const auto pointer = [&](Tensor& tensor, int need) { return wanted(need) ? tensor.mutable_data_ptr() : nullptr; };
  twell::Gradients gradients{};
  gradients.x = pointer(grad_x, kX);
  gradients.gate = gated ? pointer(grad_gate, kGate) : pointer(grad_up, kUp);
  gradients.up = gated ? pointer(grad_up, kUp) : nullptr;
  gradients.down = pointer(grad_down, kDown);
  gradients.b_gate = bias_gate.data();
  gradients.b_up = bias_up.data();
  int64_t in_runs = 0;
  gradients.in_runs = &in_runs;
  MaybeTensor keep_run, keep_size;
  const twell::Runs runs{int64_pointer(run, &keep_run), int64_pointer(run_size, &keep_size),
                         run ? run_size->numel() : 0, terms.count_scale};

  const auto dense =
      twell::backward(block, call.kernels, call.threads, grad_TD.const_data_ptr(), state,
                      {pulls(terms.l1_scale, l1_pulls), pulls(terms.count_scale, count_pulls), runs}, gradients);

  bool whole = dense.size() == 1 && dense[0].first == 0 && dense[0].second == block.tokens;
  const auto add = [&](Tensor& sums, const Tensor& terms) {
    if (whole) {
      sums = terms;
    } else {
      twell::add_in_place(call.kernels, call.threads, block.dtype, sums.numel(), terms.const_data_ptr(),
                          sums.mutable_data_ptr());
    }
  };
  for (const auto& [first, last] : dense) {
    const int64_t tokens = last - first;
    const Tensor x_rows = rows_of(x_TD, first, last), grad_rows = rows_of(grad_TD, first, last);
    auto [gate, up] = call.project(x_rows);
    Tensor grad_h = torch::stable::matmul(grad_rows, call.w_down);
    Tensor h = twell::allocated(gate, gate.sizes());
    twell::Terms of_rows = terms;
    if (weight) of_rows.token_weight += first;
    // Gradients take the places of what they come from.
    twell::activation_backward(call.kernels, call.threads, call.activation(tokens, gate, up), grad_h.const_data_ptr(),
                               of_rows, gate.mutable_data_ptr(), gated ? grad_h.mutable_data_ptr() : nullptr,
                               h.mutable_data_ptr());
    const Tensor& grad_up_rows = gated ? grad_h : gate;
    if (wanted(kDown)) {
      if (down_by_column) {
        Tensor sums = transposed(grad_down);
        add(sums, torch::stable::matmul(transposed(h), grad_rows));
        grad_down = transposed(sums);
      } else {
        add(grad_down, torch::stable::matmul(transposed(grad_rows), h));
      }
    }
    if (wanted(kUp)) add(grad_up, torch::stable::matmul(transposed(grad_up_rows), x_rows));
    if (gated && wanted(kGate)) add(grad_gate, torch::stable::matmul(transposed(gate), x_rows));
    if (wanted(kX)) {
      Tensor grad = torch::stable::matmul(gate, gated ? *call.w_gate : call.w_up);
      if (gated) {
        const Tensor more = torch::stable::matmul(grad_h, call.w_up);
        twell::add_in_place(call.kernels, call.threads, block.dtype, grad.numel(), more.const_data_ptr(),
                            grad.mutable_data_ptr());
      }
      Tensor rows = rows_of(torch::stable::view(grad_x, std::vector<int64_t>{block.tokens, block.hidden}), first, last);
      torch::stable::copy_(rows, grad);
    }
    const auto add_rows = [&](const Tensor& terms, std::vector<float>& sums) {
      std::vector<float> row(static_cast<size_t>(block.width) + 1);
      const char* from = static_cast<const char*>(terms.const_data_ptr());
      for (int64_t t = 0; t < tokens; ++t) {
        call.kernels.widen(from + t * block.width * twell::element_bytes(block.dtype), block.width, row.data());
        for (int64_t f = 0; f < block.width; ++f) sums[f] += row[f];
      }
    };
    if (wanted(kBiasGate) || (!gated && wanted(kBiasUp))) add_rows(gate, bias_gate);
    if (gated && wanted(kBiasUp)) add_rows(grad_h, bias_up);
  }

  const auto bias_gradient = [&](int need, int64_t count, const std::vector<float>& sums) {
    Tensor out = twell::allocated(x, {wanted(need) ? count : 0});
    if (wanted(need)) call.kernels.round(sums.data(), count, out.mutable_data_ptr());
    return out;
  };
  std::vector<float> bias_down(static_cast<size_t>(block.hidden) + 1);
  if (wanted(kBiasDown)) {
    // In runs, so that the error does not grow with the number of tokens.
    constexpr int64_t kRun = 64;
    std::vector<uint32_t> index(kRun);
    std::iota(index.begin(), index.end(), 0u);
    const std::vector<float> ones(kRun, 1.0f);
    std::vector<float> part(bias_down.size());
    const char* rows = static_cast<const char*>(grad_TD.const_data_ptr());
    for (int64_t t = 0; t < block.tokens; t += kRun) {
      std::fill(part.begin(), part.end(), 0.0f);
      call.kernels.gather_sum(rows + t * block.hidden * twell::element_bytes(block.dtype), block.hidden, index.data(),
                              ones.data(), std::min(kRun, block.tokens - t), block.hidden, part.data());
      for (size_t d = 0; d < part.size(); ++d) bias_down[d] += part[d];
    }
  }
  Tensor of_runs = twell::allocated(x, {run ? 1 : 0}, ScalarType::Float);
  if (run) *static_cast<float*>(of_runs.mutable_data_ptr()) = static_cast<float>(in_runs);
  return {grad_x,
          grad_up,
          grad_down,
          grad_gate,
          bias_gradient(kBiasUp, block.width, gated ? bias_up : bias_gate),
          bias_gradient(kBiasDown, block.hidden, bias_down),
          bias_gradient(kBiasGate, block.width, bias_gate),
          of_runs};
}

bool cpu_matrix_unit() { return twell::select_kernels(twell::DType::kBFloat16).matrix_unit; }

}  // namespace

TWELL_MORE_OPERATORS(m) {
  // Whether bfloat16 calls run on a matrix unit, so that Python chooses by the limits that limit_of takes.
  m.def("cpu_matrix_unit() -> bool");
}

TWELL_IMPLEMENTATIONS(CompositeExplicitAutograd, m) { m.impl("cpu_matrix_unit", TWELL_BOX(cpu_matrix_unit)); }

TWELL_IMPLEMENTATIONS(CPU, m) {
  m.impl("ffn", TWELL_BOX(ffn));
  m.impl("infer", TWELL_BOX(infer));
  m.impl("ffn_backward", TWELL_BOX(ffn_backward));
}
