// A training step that keeps columns, not pairs: where neighbours share their neurons, so that a column has many pairs,
// products over columns take less time than sums over pairs. It keeps the columns of relu(gate) and of u = x Wu^T + bu
// that any token of a half block activates, at a fixed place for each neuron: so everything fits at any activity.
#pragma once

#include "sm90/training/step.h"

namespace twell::sm90 {

// As sm90_training_forward and sm90_backward, of a state of this form.
int64_t columns_forward_bytes(const Ffn& ffn);
cudaError_t columns_forward(const Ffn& ffn, const Transposition& down, const Terms& terms, void* state, void* workspace,
                            const Device& device, cudaStream_t stream);
int64_t columns_backward_bytes(const Ffn& ffn, bool weights, const Runs& runs, const Device& device);
cudaError_t columns_backward(const Ffn& ffn, const Transposition& down, const Terms& terms, const void* state,
                             const Gradients& gradients, void* workspace, const Device& device, cudaStream_t stream);

}  // namespace twell::sm90
