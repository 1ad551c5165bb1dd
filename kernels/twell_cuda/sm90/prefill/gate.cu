// The gate of operands of the call's own type.

#include "sm90/prefill/gate.cuh"

namespace twell::sm90 {
namespace {

template <typename T>
cudaError_t launch_type(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  const T* x = static_cast<const T*>(ffn.x) + chunk.first * ffn.hidden;
  const gate::Factors factors{x, ffn.gate.data, ffn.hidden, ffn.hidden, {}};
  return gate::launch_type<T, T>(ffn, factors, chunk, device, stream);
}

}  // namespace

cudaError_t launch_gate(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(ffn, chunk, device, stream)
                                       : launch_type<__half>(ffn, chunk, device, stream);
}

}  // namespace twell::sm90
