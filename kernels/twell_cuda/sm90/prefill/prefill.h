// Prefill on compute capability 9.0 in four kernels: gate, list, up and down, chunk by chunk of blocks of 128 tokens.
#pragma once

#include "sm90/common/chunk.h"

namespace twell::sm90 {

// Bytes that forward needs, here and in sm90/mid; bounded by a chunk of tokens, whatever T is.
int64_t prefill_workspace_bytes(const Ffn& ffn, const Device& device);

// The first chunk of a call, its buffers in `workspace`; `*blocks` of tokens are the most that a chunk has.
Chunk first_chunk(const Ffn& ffn, const Device& device, void* workspace, int64_t* blocks);

cudaError_t prefill_forward(const Ffn& ffn, const Device& device, void* workspace, cudaStream_t stream);

}  // namespace twell::sm90
