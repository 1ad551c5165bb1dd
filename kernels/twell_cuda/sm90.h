// Prefill on compute capability 9.0: gate, list, up and down over blocks of 128 tokens; for fewer tokens, two kernels.
#pragma once

#include "ffn.h"

namespace twell {

// Bytes that sm90_forward needs; bounded by a chunk of tokens, whatever T is.
int64_t sm90_workspace_bytes(const Ffn& ffn, const Device& device);

cudaError_t sm90_forward(const Ffn& ffn, const Device& device, void* workspace, cudaStream_t stream);

}  // namespace twell
