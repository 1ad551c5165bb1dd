// The gate of e4m3 operands.

#include "sm90/prefill/gate_fp8_launch.cuh"

namespace twell::sm90 {

cudaError_t launch_gate_fp8(const Ffn& ffn, const QuantizedRows& x, const Chunk& chunk, const Device& device,
                            cudaStream_t stream) {
  return gate::launch_fp8<kPromoteSums>(ffn, x, chunk, device, stream);
}

}  // namespace twell::sm90
