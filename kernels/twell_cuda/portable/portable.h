// Prefill (more than 64 tokens) on any GPU from sm_80 on: mma.sync, ldmatrix and cp.async only.
//
// The caller cuts the tokens into chunks, computes the dense gate of each (x Wg^T + bg, before relu; without a gate
// x Wu^T + bu) and calls `portable_chunk`, which writes these tokens' rows of y.
// Exact at every density: the buffers of a chunk hold every neuron of every block of tokens, so nothing can overflow,
// and memory is bounded by the chunk, not by T.
#pragma once

#include "common/ffn.h"

namespace twell {

// Tokens in each chunk, a multiple of 128: the dense gate and the workspace of one chunk take about 176 MiB together.
// The chunks of a call are of nearly equal size.
int64_t portable_chunk_tokens(const Ffn& ffn);

// Bytes of workspace for one chunk. May hold anything; 256-byte aligned; chunks of one stream can share it.
int64_t portable_workspace_bytes(const Ffn& ffn);

// Rows [first, first + count) of y, from `gate` (count, F), 16-byte aligned and contiguous.
// No synchronisation, no allocation, no float atomics: capturable, and repeats bit for bit.
cudaError_t portable_chunk(const Ffn& ffn, int64_t first, int64_t count, const void* gate, void* workspace,
                           const Device& device, cudaStream_t stream);

}  // namespace twell
