// The sparse FFN for a decode batch: 1 to 64 tokens, exact at every density. Two kernels from sm_80 up, or one, no host
// synchronisation, no allocation, no launch beside them; bit-reproducible.
#pragma once

#include "ffn.h"

namespace twell {

constexpr int kDecodeMaxTokens = 64;

// Bytes that `decode` needs at a 256-byte border; their content before the call does not matter.
int64_t decode_workspace_bytes(const Ffn& ffn);

// y = h Wd^T + bd on `stream`. cudaErrorInvalidValue for T outside 1..64, D not a multiple of 8 or above 16,384, or F
// outside 1..65,536.
cudaError_t decode(const Ffn& ffn, const Device& device, void* workspace, cudaStream_t stream);

}  // namespace twell
