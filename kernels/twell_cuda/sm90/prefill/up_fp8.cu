// The up projection of e4m3 operands.

#include "sm90/prefill/prefill_fp8.h"
#include "sm90/prefill/up.cuh"

namespace twell::sm90 {

cudaError_t launch_up_fp8(const Ffn& ffn, const QuantizedRows& x, const Chunk& chunk, const Device& device,
                          cudaStream_t stream) {
  const bool many = chunk.active.blocks >= up::kManyBlocks;
  const int64_t row_bytes = ffn.up.row_stride;
  // A copy of 16 bytes of a row would take what lies past its end with it.
  if (ffn.hidden % kE4m3Border != 0 || row_bytes % kE4m3Border != 0) return cudaErrorInvalidValue;
  CUtensorMap x_map, up_map;
  TWELL_RETURN_IF_ERROR(make_byte_map(&x_map, x.values, chunk.tokens, ffn.hidden, x.stride, kBlockTokens));
  TWELL_RETURN_IF_ERROR(make_byte_map(&up_map, ffn.up.data, ffn.width, ffn.hidden, row_bytes, up::kBoxRows));
  const up::ScaledUpArguments arguments{{ffn.up.data, ffn.b_up, chunk.active, ffn.hidden, ffn.width, many},
                                        static_cast<int>(row_bytes),
                                        static_cast<int>(chunk.tokens),
                                        ffn.up.scales,
                                        x.scales};
  return ffn.dtype == DType::kBFloat16
             ? up::launch_type<__nv_bfloat16, __nv_fp8_e4m3>(x_map, up_map, arguments, device, stream, many)
             : up::launch_type<__half, __nv_fp8_e4m3>(x_map, up_map, arguments, device, stream, many);
}

}  // namespace twell::sm90
