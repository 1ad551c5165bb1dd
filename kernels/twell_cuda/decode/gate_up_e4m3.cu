// decode/gate_up.cuh for e4m3 weights with a scale for each row.

#include "decode/gate_up.cuh"

namespace twell::decoding {

cudaError_t launch_e4m3_gate_up(const Ffn& ffn, const DecodePlan& plan, void* workspace, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch_gate_up_of<__nv_bfloat16, E4m3>(ffn, plan, workspace, stream)
                                       : launch_gate_up_of<__half, E4m3>(ffn, plan, workspace, stream);
}

}  // namespace twell::decoding
