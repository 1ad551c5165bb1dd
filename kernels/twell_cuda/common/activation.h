// The elementwise middle of a dense block, in one pass forward and one backward.
#pragma once

#include "common/ffn.h"
#include "common/training.h"

namespace twell {

// Shapes (T, F), row-major, 16-byte aligned, F a multiple of 8; `gate` and `up` before relu, `up` null without a gate.
// Forward, their rows may lie apart: `stride` elements, a multiple of 8, from one to the next; backward it is F.
struct Activation {
  DType dtype;
  int64_t tokens;
  int width;
  int64_t stride;
  const void* gate;
  const void* up;
};

// h = relu(gate) * up, or relu(gate).
cudaError_t activation(const Activation&, void* h, const Device&, cudaStream_t);

// With dh = grad_h + L1's gradient: grad_gate = dh * up + the count's where the gate is active, grad_up = dh *
// relu(gate); the outputs may be the inputs. `partials`, of activation_partial_bytes, is used where terms.report is not
// null.
cudaError_t activation_backward(const Activation&, const void* grad_h, const Terms&, void* grad_gate, void* grad_up,
                                void* partials, const Device&, cudaStream_t);
int64_t activation_partial_bytes(const Activation&);

}  // namespace twell
