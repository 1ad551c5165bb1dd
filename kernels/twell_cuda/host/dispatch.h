// The selection of kernels for a call, and their launch. Host code without PyTorch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <string>

#include "common/ffn.h"
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

// What an error of a launch says. It is taken from the runtime, too, which would else report it to whoever launches
// next.
inline std::string error_text(cudaError_t error) {
  cudaGetLastError();
  // As twell_errors.h says it. Kernels are loaded when they are first launched, which takes memory.
  return error == cudaErrorMemoryAllocation ? "CUDA out of memory." : cudaGetErrorString(error);
}

// The kernels that compute a call: a row of dispatch.cpp's table, and how that shares out the work.
struct Row;
struct Selection {
  const Row* row = nullptr;
  sm90::MidPlan plan{};
};

// The first row that takes a call of this type, these sizes and this type of weights. HF_TWELL_CUDA_PATH=
// decode|sm90|portable keeps to the rows of that name, for tests. No row: 8-bit weights have to be dequantized.
//
// Throws where x is to be quantized and no row does so for such a call, and where HF_TWELL_CUDA_PATH leaves no row for
// other weights.
Selection select_row(const Ffn& ffn, const Device& device);

// Computes y without gradients by the chosen row. Never waits for the device, so that it can be captured in a graph.
//
// Throws for weights in a form that no kernel reads, and for a CUDA error.
void forward(const Ffn& ffn, Selection selected, const Device& device, cudaStream_t stream, const Services& services);

// Throws where no kernels train: on other GPUs, in other types, or with room for no or too many pairs.
void check_training(const Device& device, DType dtype, int64_t tokens, int64_t width, int64_t capacity);

}  // namespace twell
