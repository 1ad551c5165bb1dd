// Training on compute capability 9.0: forward that keeps what backward needs, and backward from it.
#pragma once

#include "ffn.h"
#include "transpose.h"

namespace twell {

// The L1 term: its gradient is scale * token_weight * sign(h).
struct L1 {
  const float* scale;         // one, or null
  const float* token_weight;  // (T), or null for ones
  float* report;              // (1 + F): sum of token_weight * |h|, then each neuron's active tokens by weight; or null
};

// Null where not wanted. Matrices are (F, D), one row a neuron; `gate` and `b_gate` are those of Ffn::gate.
struct Gradients {
  const void* dy;  // (T, D)
  void* x;         // (T, D)
  void* gate;
  void* up;
  void* down;
  void* b_gate;  // (F)
  void* b_up;    // (F)
  bool weights() const { return gate || up || down || b_gate || b_up; }
};

// `capacity`: active neurons per token, on average, for which the state has room. Where tokens have more, backward
// computes some of them again from x. The state's size follows from T, F and the capacity alone.
int64_t sm90_state_bytes(const Ffn& ffn, int64_t capacity);

// Where `down` has a `from`, Ffn::down is its `to` and is written first: down_proj as it is stored in training, which is
// transposed beside kernels that leave room.
int64_t sm90_training_bytes(const Ffn& ffn);  // of the workspace of sm90_training_forward
cudaError_t sm90_training_forward(const Ffn& ffn, const Transposition& down, const L1& l1, int64_t capacity, void* state,
                                  void* workspace, const Device& device, cudaStream_t stream);

int64_t sm90_backward_bytes(const Ffn& ffn, int64_t capacity, bool weights);  // of its workspace
cudaError_t sm90_backward(const Ffn& ffn, const Transposition& down, const L1& l1, int64_t capacity, const void* state,
                          const Gradients& gradients, void* workspace, const Device& device, cudaStream_t stream);

}  // namespace twell
