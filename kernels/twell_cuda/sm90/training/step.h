// A training step on compute capability 9.0: forward that keeps what backward needs, and backward from it.
#pragma once

#include "common/training.h"
#include "common/transpose.h"

namespace twell {

// `capacity`: active neurons per token, on average, for whose pairs the state has room. Where tokens have more,
// backward computes some of them again from x. A capacity of F keeps whole columns instead (sm90/training/columns.h).
// The layouts are in twell_state.h.
int64_t sm90_state_bytes(const Ffn& ffn, int64_t capacity);

// Where `down` has a `from`, Ffn::down is its `to` and is written first: down_proj as it is stored in training, which
// is transposed beside kernels that leave room.
int64_t sm90_training_bytes(const Ffn& ffn, int64_t capacity);  // of the workspace of sm90_training_forward
cudaError_t sm90_training_forward(const Ffn& ffn, const Transposition& down, const Terms& terms, int64_t capacity,
                                  void* state, void* workspace, const Device& device, cudaStream_t stream);

// Terms::runs is for a capacity of F alone. Bytes of the workspace of sm90_backward.
int64_t sm90_backward_bytes(const Ffn& ffn, int64_t capacity, bool weights, const Runs& runs, const Device& device);
cudaError_t sm90_backward(const Ffn& ffn, const Transposition& down, const Terms& terms, int64_t capacity,
                          const void* state, const Gradients& gradients, void* workspace, const Device& device,
                          cudaStream_t stream);

}  // namespace twell
