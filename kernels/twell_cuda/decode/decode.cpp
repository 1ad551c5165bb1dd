// A decode call: its two halves, by the kernels it is given.

#include "decode/decode.h"

#include <algorithm>

#include "twell_limits.h"

namespace twell {
namespace decoding {

cudaError_t launch_gate_up(const Ffn& ffn, const DecodePlan& plan, const Device& device, void* workspace,
                           cudaStream_t stream) {
  if (plan.kernels.fused.use) return launch_fused(ffn, plan, device, workspace, stream);
  const bool few = plan.kernels.few;
  if (ffn.gate.dtype == DType::kInt8) {
    return few ? launch_int8_few_gate_up(ffn, plan, device, workspace, stream)
               : launch_int8_gate_up(ffn, plan, workspace, stream);
  }
  if (ffn.gate.dtype == DType::kE4m3) {
    return few ? launch_e4m3_few_gate_up(ffn, plan, device, workspace, stream)
               : launch_e4m3_gate_up(ffn, plan, workspace, stream);
  }
  if (few) return launch_few_gate_up(ffn, plan, device, workspace, stream);
  return plan.kernels.bulk_gate ? launch_bulk_gate_up(ffn, plan, device, workspace, stream)
                                : launch_portable_gate_up(ffn, plan, workspace, stream);
}

cudaError_t launch_down(const Ffn& ffn, const DecodePlan& plan, const Device& device, void* workspace,
                        cudaStream_t stream) {
  if (plan.kernels.fused.use) return cudaSuccess;
  const bool few = plan.kernels.few;
  if (ffn.gate.dtype == DType::kInt8) {
    return few ? launch_int8_few_down(ffn, plan, device, workspace, stream)
               : launch_int8_down(ffn, plan, workspace, stream);
  }
  if (ffn.gate.dtype == DType::kE4m3) {
    return few ? launch_e4m3_few_down(ffn, plan, device, workspace, stream)
               : launch_e4m3_down(ffn, plan, workspace, stream);
  }
  return few || plan.kernels.bulk_gate ? launch_few_down(ffn, plan, device, workspace, stream)
                                                    : launch_portable_down(ffn, plan, workspace, stream);
}

}  // namespace decoding

namespace {

// Calls `take` with each of a call's pieces, which have equally many tokens or one fewer.
template <typename Take>
cudaError_t for_each_piece(const Ffn& ffn, Take take) {
  const int64_t pieces = (ffn.tokens + kDecodeMaxTokens - 1) / kDecodeMaxTokens;
  int64_t first = 0;
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t offset = first * ffn.hidden * bytes_of(ffn.dtype);
    Ffn piece = ffn;
    piece.tokens = (ffn.tokens - first) / (pieces - i);
    piece.x = static_cast<const char*>(ffn.x) + offset;
    piece.y = static_cast<char*>(ffn.y) + offset;
    first += piece.tokens;
    const cudaError_t error = take(piece);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

int64_t decode_workspace_bytes(const Ffn& ffn) { return decoding::plan_decode(ffn).bytes; }

int64_t pieces_workspace_bytes(const Ffn& ffn) {
  int64_t bytes = 0;
  for_each_piece(ffn, [&](const Ffn& piece) {
    bytes = std::max(bytes, decode_workspace_bytes(piece));
    return cudaSuccess;
  });
  return bytes;
}

cudaError_t decode_pieces(const Ffn& ffn, const decoding::Kernels& kernels, const Device& device, void* workspace,
                          cudaStream_t stream) {
  return for_each_piece(ffn, [&](const Ffn& piece) { return decode(piece, kernels, device, workspace, stream); });
}

cudaError_t decode(const Ffn& ffn, const decoding::Kernels& kernels, const Device& device, void* workspace,
                   cudaStream_t stream) {
  if (ffn.tokens < 1 || ffn.tokens > kDecodeMaxTokens || ffn.hidden < 8 || ffn.hidden > kMaxHidden ||
      ffn.hidden % (ffn.scaled() ? 16 : 8) != 0 || ffn.width < 1 || ffn.width > kMaxWidth) {
    return cudaErrorInvalidValue;
  }
  decoding::DecodePlan plan = decoding::plan_decode(ffn);
  plan.kernels = kernels;
  const cudaError_t error = decoding::launch_gate_up(ffn, plan, device, workspace, stream);
  return error != cudaSuccess ? error : decoding::launch_down(ffn, plan, device, workspace, stream);
}

}  // namespace twell
