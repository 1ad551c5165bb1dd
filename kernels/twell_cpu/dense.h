// The elementwise part of the dense products, for tokens with so many active neurons that matmuls are faster.
#pragma once

#include "kernels.h"
#include "parallel.h"

namespace twell {

// h = relu(gate) * up, or relu(gate) without `up`; (T, F) rows behind one another. May write over `up` or `gate`.
void dense_activation(const Kernels& kernels, const Threads& threads, DType dtype, int64_t tokens, int64_t width,
                      const void* gate, const void* up, void* h);

// grad_h (T, F) becomes the gradient of up (of gate where there is no up), `gate` that of gate, with the L1 term's
// token_scale[t] * sign(h) added first (null for none); `h` receives the activation again.
void dense_activation_backward(const Kernels& kernels, const Threads& threads, DType dtype, int64_t tokens,
                               int64_t width, void* gate, const void* up, const float* token_scale, void* grad_h,
                               void* h);

// What the report counts, from h.
void dense_count(const Kernels& kernels, DType dtype, int64_t tokens, int64_t width, const void* h,
                 const float* token_weight, double* l1, double* active);

// sums += terms, rounded to the element type.
void add_in_place(const Kernels& kernels, const Threads& threads, DType dtype, int64_t count, const void* terms,
                  void* sums);

}  // namespace twell
