// The elementwise part of the dense products, for tokens with so many active neurons that matmuls are faster.
#pragma once

#include "common/parallel.h"
#include "isa/kernels.h"

namespace twell {

// Shapes (T, F), rows behind one another; `gate` and `up` before relu, `up` null without a gate.
struct Activation {
  DType dtype;
  int64_t tokens, width;
  const void* gate;
  const void* up;
};

// The terms of sparse training, L1 and the count (common/terms.h): each pulls with its scale times the token's weight.
struct Terms {
  float l1_scale, count_scale;  // 0 where there is no such term
  const float* token_weight;    // (T), or null for ones
  float* report;  // (1 + F): sum of token_weight * |h|, then each neuron's active tokens by weight; or null
};

// h = relu(gate) * up, or relu(gate) without `up`. May write over `up` or `gate`.
void activation(const Kernels& kernels, const Threads& threads, const Activation& a, void* h);

// With dh = grad_h + L1's gradient: grad_gate = dh * up + the count's where the gate is active, grad_up (null without
// `up`) = dh * relu(gate), and `h`, where not null, the activation again. The outputs may be the inputs.
void activation_backward(const Kernels& kernels, const Threads& threads, const Activation& a, const void* grad_h,
                         const Terms& terms, void* grad_gate, void* grad_up, void* h);

// What the report counts, from h.
void dense_count(const Kernels& kernels, DType dtype, int64_t tokens, int64_t width, const void* h,
                 const float* token_weight, double* l1, double* active);

// sums += terms, rounded to the element type.
void add_in_place(const Kernels& kernels, const Threads& threads, DType dtype, int64_t count, const void* terms,
                  void* sums);

}  // namespace twell
