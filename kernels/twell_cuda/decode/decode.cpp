// A decode call by the kernels it is given, and which kernels there are for each type of weights.

#include "decode/decode.h"

#include <algorithm>

namespace twell {
namespace decoding {
namespace {

// Launchers that look at no device.
template <auto kLaunch>
cudaError_t on_any(const Ffn& ffn, const DecodePlan& plan, const Device&, void* workspace, cudaStream_t stream) {
  return kLaunch(ffn, plan, workspace, stream);
}

}  // namespace

Launchers mma_launchers(DType weights) {
  switch (weights) {
    case DType::kInt8: return {on_any<launch_int8_gate_up>, on_any<launch_int8_down>};
    case DType::kE4m3: return {on_any<launch_e4m3_gate_up>, on_any<launch_e4m3_down>};
    default: return {on_any<launch_portable_gate_up>, on_any<launch_portable_down>};
  }
}

Launchers few_launchers(DType weights) {
  switch (weights) {
    case DType::kInt8: return {launch_int8_few_gate_up, launch_int8_few_down};
    case DType::kE4m3: return {launch_e4m3_few_gate_up, launch_e4m3_few_down};
    default: return {launch_few_gate_up, launch_few_down};
  }
}

Launchers bulk_launchers(DType weights) {
  switch (weights) {
    case DType::kInt8: return {launch_int8_bulk_gate_up, launch_int8_few_down};
    case DType::kE4m3: return {launch_e4m3_bulk_gate_up, launch_e4m3_few_down};
    default: return {launch_bulk_gate_up, launch_few_down};
  }
}

Launchers fused_launchers() { return {launch_fused, nullptr}; }

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

cudaError_t decode_pieces(const Ffn& ffn, const decoding::Launchers& launchers, const decoding::Kernels& kernels,
                          const Device& device, void* workspace, cudaStream_t stream) {
  return for_each_piece(ffn,
                        [&](const Ffn& piece) { return decode(piece, launchers, kernels, device, workspace, stream); });
}

cudaError_t decode(const Ffn& ffn, const decoding::Launchers& launchers, const decoding::Kernels& kernels,
                   const Device& device, void* workspace, cudaStream_t stream) {
  if (ffn.tokens < 1 || ffn.tokens > kDecodeMaxTokens || ffn.hidden < 8 || ffn.hidden > kMaxHidden ||
      ffn.hidden % (ffn.scaled() ? 16 : 8) != 0 || ffn.width < 1 || ffn.width > kMaxWidth) {
    return cudaErrorInvalidValue;
  }
  decoding::DecodePlan plan = decoding::plan_decode(ffn);
  plan.kernels = kernels;
  const cudaError_t error = launchers.gate_up(ffn, plan, device, workspace, stream);
  if (error != cudaSuccess || launchers.down == nullptr) return error;
  return launchers.down(ffn, plan, device, workspace, stream);
}

}  // namespace twell
