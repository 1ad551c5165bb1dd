// The sparse FFN for a decode batch: 1 to 64 tokens, exact at every density. Two kernels from sm_80 up, or one, no host
// synchronisation, no allocation, no launch beside them; bit-reproducible.
#pragma once

#include "decode/plan.h"
#include "twell_limits.h"

namespace twell {
namespace decoding {

using Launcher = cudaError_t (*)(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);

// What computes a call: h into the workspace, then y from it. Without `down` the first does all.
struct Launchers {
  Launcher gate_up, down;
};

// From sm_80 up (decode/gate_up.cu, decode/down.cu), of 8-bit weights for D a multiple of 16 (*_int8.cu, *_e4m3.cu).
Launchers mma_launchers(DType weights);
// Hopper's: for few tokens and large matrices (sm90/decode/bulk_gate_up.cu, few_down.cu); for any number of tokens
// (few_gate_up.cu, few_down.cu), both with those of 8-bit weights; all at once (fused.cu). The last may give a call
// back with cudaErrorNotSupported, which it then has not begun.
Launchers bulk_launchers(DType weights);
Launchers few_launchers(DType weights);
Launchers fused_launchers();

}  // namespace decoding

// Bytes that `decode` needs at a 256-byte border; their content before the call does not matter.
int64_t decode_workspace_bytes(const Ffn& ffn);

// y = h Wd^T + bd on `stream`, by these kernels. cudaErrorInvalidValue for T outside 1..64, D not a multiple of 8 or
// above 16,384, or F outside 1..65,536.
cudaError_t decode(const Ffn& ffn, const decoding::Launchers& launchers, const decoding::Kernels& kernels,
                   const Device& device, void* workspace, cudaStream_t stream);

// The same for more tokens, in pieces of at most kDecodeMaxTokens. They share one workspace, as a piece's kernels write
// there only when those of the piece before have ended.
int64_t pieces_workspace_bytes(const Ffn& ffn);
cudaError_t decode_pieces(const Ffn& ffn, const decoding::Launchers& launchers, const decoding::Kernels& kernels,
                          const Device& device, void* workspace, cudaStream_t stream);

namespace decoding {

cudaError_t launch_portable_gate_up(const Ffn&, const DecodePlan&, void* workspace, cudaStream_t);
cudaError_t launch_portable_down(const Ffn&, const DecodePlan&, void* workspace, cudaStream_t);
cudaError_t launch_int8_gate_up(const Ffn&, const DecodePlan&, void* workspace, cudaStream_t);
cudaError_t launch_int8_down(const Ffn&, const DecodePlan&, void* workspace, cudaStream_t);
cudaError_t launch_e4m3_gate_up(const Ffn&, const DecodePlan&, void* workspace, cudaStream_t);
cudaError_t launch_e4m3_down(const Ffn&, const DecodePlan&, void* workspace, cudaStream_t);
cudaError_t launch_bulk_gate_up(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);
cudaError_t launch_int8_bulk_gate_up(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);
cudaError_t launch_e4m3_bulk_gate_up(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);
cudaError_t launch_fused(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);
cudaError_t launch_few_gate_up(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);
cudaError_t launch_few_down(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);
cudaError_t launch_int8_few_gate_up(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);
cudaError_t launch_int8_few_down(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);
cudaError_t launch_e4m3_few_gate_up(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);
cudaError_t launch_e4m3_few_down(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);

}  // namespace decoding
}  // namespace twell
