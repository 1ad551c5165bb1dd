// The choice of kernels for a call, and their launch. Host code without PyTorch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>

#include "common/ffn.h"
#include "decode/plan.h"
#include "sm90/mid/mid.h"

namespace twell {

// What kernels need from the launcher. Memory lives until the call's work on the stream is done.
struct Services {
  std::function<void*(int64_t bytes)> workspace;  // at a 256-byte border, as PyTorch's allocator gives
  // x Wg^T + bg of some tokens, (count, F) of the call's dtype, before relu; the last may be overwritten by the next.
  std::function<const void*(int64_t first, int64_t count)> dense_gate;
};

// Whether any kernel here takes this type; PyTorch's matmuls compute the others.
bool has_kernels(DType dtype);

// Computes y without gradients, by the first row of dispatch.cpp's table that takes the call. Never waits for the
// device, so that it can be captured in a graph. HF_TWELL_CUDA_PATH=decode|sm90|portable keeps to the rows of that name,
// for tests.
//
// Throws where no such row takes the call, for weights in a form that no kernel reads, and for a CUDA error.
void forward(const Ffn& ffn, const Device& device, cudaStream_t stream, const Services& services);

// Whether a row of the table takes a call of this type, these sizes and this type of weights. 8-bit weights have to be
// dequantized where none does; but for calls that quantize x.
bool has_row(const Ffn& ffn, const Device& device);

// Throws where x is to be quantized and no row of the table does so for such a call.
void check_quantize_x(const Ffn& ffn, const Device& device);

// Throws where no kernels train: on other GPUs, in other types, or with room for no or too many pairs.
void check_training(const Device& device, DType dtype, int64_t tokens, int64_t capacity);

// The table's choice among the rows of one path, for the check programs.
namespace decoding {
Kernels choose_kernels(const Ffn& ffn, const Device& device);
}
namespace sm90 {
bool choose_mid(const Ffn& ffn, const Device& device, MidPlan* plan);  // false: prefill's four kernels
cudaError_t forward(const Ffn& ffn, const Device& device, void* workspace, cudaStream_t stream);
}  // namespace sm90

}  // namespace twell
