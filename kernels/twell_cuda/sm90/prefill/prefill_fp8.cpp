// The launches of a prefill by e4m3 products.

#include "sm90/common/launch.h"
#include "sm90/common/workspace.h"
#include "sm90/prefill/prefill_fp8.h"
#include "sm90/prefill/prefill.h"

namespace twell::sm90 {
namespace {

QuantizedRows place_rows(const Ffn& ffn, int64_t blocks, Cutter& cutter) {
  QuantizedRows rows{nullptr, nullptr, quantized_stride(ffn.hidden)};
  cutter.cut(rows.values, blocks * kBlockTokens * rows.stride);
  cutter.cut(rows.scales, blocks * kBlockTokens * static_cast<int64_t>(sizeof(float)));
  return rows;
}

}  // namespace

// What a 16-bit prefill needs, then the quantized tokens of one chunk.
int64_t prefill_fp8_workspace_bytes(const Ffn& ffn, const Device& device) {
  int64_t blocks = 0;
  first_chunk(ffn, device, nullptr, &blocks);
  Cutter cutter(nullptr);
  place_rows(ffn, blocks, cutter);
  return prefill_workspace_bytes(ffn, device) + cutter.used();
}

cudaError_t prefill_fp8_forward(const Ffn& ffn, const Device& device, void* workspace, cudaStream_t stream) {
  int64_t blocks = 0;
  Chunk chunk = first_chunk(ffn, device, workspace, &blocks);
  Cutter cutter(static_cast<char*>(workspace) + prefill_workspace_bytes(ffn, device));
  const QuantizedRows rows = place_rows(ffn, blocks, cutter);
  for (; chunk.first < ffn.tokens; chunk.first += chunk.tokens) {
    fit(ffn, blocks, &chunk);
    const auto* x = static_cast<const char*>(ffn.x) + chunk.first * ffn.hidden * bytes_of(ffn.dtype);
    TWELL_RETURN_IF_ERROR(launch_quantize_rows(ffn.dtype, x, chunk.tokens, ffn.hidden, rows, stream));
    TWELL_RETURN_IF_ERROR(launch_gate_fp8(ffn, rows, chunk, device, stream));
    TWELL_RETURN_IF_ERROR(launch_list(ffn, chunk, device, stream));
    if (ffn.gated()) TWELL_RETURN_IF_ERROR(launch_up_fp8(ffn, rows, chunk, device, stream));
    TWELL_RETURN_IF_ERROR(launch_down_fp8(ffn, chunk, device, stream));
  }
  return cudaSuccess;
}

}  // namespace twell::sm90
