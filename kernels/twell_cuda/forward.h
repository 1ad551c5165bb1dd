// The choice among the CUDA paths, and the launch of the chosen one. Host code without PyTorch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <string>

#include "ffn.h"

namespace twell {

// What a path needs from the launcher. Memory lives until the call's work on the stream is done.
struct Services {
  std::function<void*(int64_t bytes)> workspace;  // at a 256-byte border, as PyTorch's allocator gives
  // x Wg^T + bg of some tokens, (count, F) of the call's dtype, before relu; the last one may be overwritten by the next.
  std::function<const void*(int64_t first, int64_t count)> dense_gate;
};

// Computes y. Never waits for the device, so that it can be captured in a graph.
//
// The path depends on sizes and the GPU alone; HF_TWELL_CUDA_PATH=decode|sm90|portable insists on one, for tests.
//
// Throws for a path that cannot compute this call, and for a CUDA error.
void forward(const Ffn& ffn, const Device& device, cudaStream_t stream, const Services& services);

}  // namespace twell
