// decode/gate_up.cuh for int8 weights with a scale for each row.

#include "decode/gate_up.cuh"

namespace twell::decoding {

cudaError_t launch_int8_gate_up(const Ffn& ffn, const DecodePlan& plan, void* workspace, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch_gate_up_of<__nv_bfloat16, int8_t>(ffn, plan, workspace, stream)
                                       : launch_gate_up_of<__half, int8_t>(ffn, plan, workspace, stream);
}

}  // namespace twell::decoding
