// The gate of e4m3 operands.

#include "sm90/prefill/gate.cuh"
#include "sm90/prefill/prefill_fp8.h"

namespace twell::sm90 {

cudaError_t launch_gate_fp8(const Ffn& ffn, const QuantizedRows& x, const Chunk& chunk, const Device& device,
                            cudaStream_t stream) {
  const gate::Factors factors{x.values, ffn.gate.data, x.stride, ffn.gate.row_stride, {x.scales, ffn.gate.scales}};
  return ffn.dtype == DType::kBFloat16
             ? gate::launch_type<__nv_bfloat16, __nv_fp8_e4m3>(ffn, factors, chunk, device, stream)
             : gate::launch_type<__half, __nv_fp8_e4m3>(ffn, factors, chunk, device, stream);
}

}  // namespace twell::sm90
