// The operators' definitions, shared by every backend. Each backend's library adds its implementation for its own
// dispatch key; hf_twell/ops/kernel_ops.py adds shape inference and autograd. Meaning of every argument:
// hf_twell/ops/api.py, which refuses with ValueError what it can. What is left the implementations throw as
// std::runtime_error: of std::invalid_argument PyTorch makes a ValueError up to 2.14, and a RuntimeError from 2.15 on
// (pytorch#193451).

#include <tuple>

#include "twell_library.h"
#include "twell_state.h"

namespace {

std::tuple<int64_t, int64_t> cpu_state_block(int64_t capacity, int64_t element_size, bool gated) {
  return {twell::CpuStateLayout::kBlockTokens, twell::cpu_state_layout(capacity, element_size, gated).bytes()};
}

std::tuple<int64_t, int64_t> cuda_state_block(int64_t width, int64_t capacity, bool gated) {
  return {twell::CudaStateLayout::kBlockTokens, twell::cuda_state_bytes(width, capacity, gated)};
}

}  // namespace

TWELL_OPERATORS(m) {
  // report: (1 + F) fp32, the token-weighted sum of |h| and then each neuron's token-weighted activity (their sum is
  // L0's); empty without `tally`. state: bytes that only this backend's ffn_backward reads; empty when capacity is 0.
  // Its size depends on T, F, the dtype and `capacity` (active neurons per token, on average) alone: see below.
  // run (T,) and run_size (R,), both int64, are for backward: the run of neighbours that each token is in, and how many
  // tokens each run has; the last is that of padding, of size 0, and adds nothing. The "gradient" of unions (1,) is the
  // sum over runs of their size times the neurons that one or more of their tokens activate.
  m.def(
      "ffn(Tensor x, Tensor w_up, Tensor w_down, Tensor? w_gate, Tensor? b_up, Tensor? b_down, Tensor? b_gate, "
      "Tensor? l1_scale, Tensor? token_weight, Tensor? tally, int capacity, Tensor? count_scale=None, "
      "Tensor? run=None, Tensor? run_size=None, Tensor? unions=None) -> (Tensor y, Tensor report, Tensor state)");
  // y alone, for calls without gradients: an operator that has none costs 10 us less a call. With scales, one fp32 for
  // each row of a weight, the weights are all int8 or all float8_e4m3fn and mean themselves times their scales. With
  // quantize_x, of float8_e4m3fn weights alone, calls of more than 64 tokens take x as e4m3 too, a scale a token, in
  // gate and up. A CPU counts a sample of the active neurons and, where these are more than max_density or than its own
  // limit for so many tokens, computes plain matmuls; a GPU, which would have to wait for a count, never does.
  m.def(
      "infer(Tensor x, Tensor w_up, Tensor w_down, Tensor? w_gate, Tensor? b_up, Tensor? b_down, Tensor? b_gate, "
      "Tensor? s_up=None, Tensor? s_down=None, Tensor? s_gate=None, bool quantize_x=False, float max_density=1.0) "
      "-> Tensor");
  // Tokens and bytes of one block of the state, which has whole blocks.
  m.def("cpu_state_block(int capacity, int element_size, bool gated) -> (int, int)");
  m.def("cuda_state_block(int width, int capacity, bool gated) -> (int, int)");
  // needs: bit i asks for the i-th gradient, in the order returned; the others come back empty. in_runs (1,), float32,
  // is that of unions; empty without `run`.
  m.def(
      "ffn_backward(Tensor grad_y, Tensor state, Tensor x, Tensor w_up, Tensor w_down, Tensor? w_gate, Tensor? b_up, "
      "Tensor? b_gate, Tensor? l1_scale, Tensor? token_weight, int capacity, int needs, Tensor? count_scale=None, "
      "Tensor? run=None, Tensor? run_size=None) -> (Tensor grad_x, Tensor grad_w_up, Tensor grad_w_down, "
      "Tensor grad_w_gate, Tensor grad_b_up, Tensor grad_b_down, Tensor grad_b_gate, Tensor in_runs)");
  // The elementwise middle of a dense block: relu(gate) * up, or relu(gate). The other arguments only matter to its
  // gradient, which adds that of L1 and of the count and reports what was active.
  m.def(
      "activation(Tensor gate, Tensor? up, Tensor? l1_scale, Tensor? token_weight, Tensor? tally, "
      "Tensor? count_scale=None) -> Tensor");
  m.def(
      "activation_backward(Tensor grad_h, Tensor gate, Tensor? up, Tensor? l1_scale, Tensor? token_weight, "
      "bool reports, Tensor? count_scale=None) -> (Tensor grad_gate, Tensor grad_up, Tensor report)");
  // sum = x + residual, and y = sum / sqrt(mean(sum^2) + epsilon) * weight: the norm ahead of a block, of CUDA alone.
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float epsilon) -> (Tensor y, Tensor sum)");
  // A layer of routed experts without gradients, of CUDA alone: x (T, D), each token through the experts in its row of
  // index (T, K) with the shares beside it; w_gate, w_up (E, F, D), views too, and w_down (E, D, F).
  m.def("experts(Tensor x, Tensor index, Tensor share, Tensor w_gate, Tensor w_up, Tensor w_down) -> Tensor");
}

TWELL_IMPLEMENTATIONS(CompositeExplicitAutograd, m) {
  m.impl("cpu_state_block", TORCH_BOX(&cpu_state_block));
  m.impl("cuda_state_block", TORCH_BOX(&cuda_state_block));
}

// kernel-builder's header makes the library a Python module, as it imports it.
#if defined(TORCH_EXTENSION_NAME) && __has_include("registration.h")
#include "registration.h"
REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
#endif
