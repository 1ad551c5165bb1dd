// The sparse FFN for a decode batch: 1 to 64 tokens, exact at every density. Two kernels from sm_80 up, or one, no host
// synchronisation, no allocation, no launch beside them; bit-reproducible.
#pragma once

#include "decode/plan.h"

namespace twell {

constexpr int kDecodeMaxTokens = 64;

// Bytes that `decode` needs at a 256-byte border; their content before the call does not matter.
int64_t decode_workspace_bytes(const Ffn& ffn);

// y = h Wd^T + bd on `stream`, by these kernels. cudaErrorInvalidValue for T outside 1..64, D not a multiple of 8 or
// above 16,384, or F outside 1..65,536.
cudaError_t decode(const Ffn& ffn, const decoding::Kernels& kernels, const Device& device, void* workspace,
                   cudaStream_t stream);

// The same for more tokens, in pieces of at most kDecodeMaxTokens. They share one workspace, as a piece's kernels write
// there only when those of the piece before have ended.
int64_t pieces_workspace_bytes(const Ffn& ffn);
cudaError_t decode_pieces(const Ffn& ffn, const decoding::Kernels& kernels, const Device& device, void* workspace,
                          cudaStream_t stream);

namespace decoding {

// The two halves of a call by plan.kernels; the first does all of it where that is the fused kernel.
cudaError_t launch_gate_up(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);
cudaError_t launch_down(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);

// h into the workspace (decode/gate_up.cu), then y from it (decode/down.cu): the portable kernels.
cudaError_t launch_portable_gate_up(const Ffn&, const DecodePlan&, void* workspace, cudaStream_t);
cudaError_t launch_portable_down(const Ffn&, const DecodePlan&, void* workspace, cudaStream_t);
// The same of 8-bit weights, D a multiple of 16 (decode/gate_up_int8.cu, down_int8.cu, gate_up_e4m3.cu, down_e4m3.cu).
cudaError_t launch_int8_gate_up(const Ffn&, const DecodePlan&, void* workspace, cudaStream_t);
cudaError_t launch_int8_down(const Ffn&, const DecodePlan&, void* workspace, cudaStream_t);
cudaError_t launch_e4m3_gate_up(const Ffn&, const DecodePlan&, void* workspace, cudaStream_t);
cudaError_t launch_e4m3_down(const Ffn&, const DecodePlan&, void* workspace, cudaStream_t);
// Hopper's first half for few tokens and large matrices (sm90/decode/bulk_gate_up.cu).
cudaError_t launch_bulk_gate_up(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);
// All of the call at once (sm90/decode/fused.cu); both halves (sm90/decode/few_gate_up.cu, few_down.cu).
cudaError_t launch_fused(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);
cudaError_t launch_few_gate_up(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);
cudaError_t launch_few_down(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);
// The same two of 8-bit weights (sm90/decode/few_gate_up_int8.cu, few_down_int8.cu and those of e4m3).
cudaError_t launch_int8_few_gate_up(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);
cudaError_t launch_int8_few_down(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);
cudaError_t launch_e4m3_few_gate_up(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);
cudaError_t launch_e4m3_few_down(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);

}  // namespace decoding
}  // namespace twell
