// The up projection of 16-bit operands.

#include "sm90/prefill/up.cuh"

namespace twell::sm90 {
namespace {

template <typename T>
cudaError_t launch_type(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream, bool many) {
  CUtensorMap x_map, up_map;
  const T* x = static_cast<const T*>(ffn.x) + chunk.first * ffn.hidden;
  TWELL_RETURN_IF_ERROR(make_tensor_map(&x_map, ffn.dtype, x, chunk.tokens, ffn.hidden, kBlockTokens));
  TWELL_RETURN_IF_ERROR(make_tensor_map(&up_map, ffn.dtype, ffn.up.data, ffn.width, ffn.hidden, up::kBoxRows));
  const up::UpArguments arguments{ffn.up.data, ffn.b_up, chunk.active, ffn.hidden, ffn.width, many};
  return up::launch_type<T, T>(x_map, up_map, arguments, device, stream, many);
}

}  // namespace

cudaError_t launch_up(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  const bool many = chunk.active.blocks >= up::kManyBlocks;
  return ffn.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(ffn, chunk, device, stream, many)
                                       : launch_type<__half>(ffn, chunk, device, stream, many);
}

}  // namespace twell::sm90
