// decode/gate_up.cuh for weights of the call's own 16-bit type.

#include "decode/gate_up.cuh"

namespace twell::decoding {

cudaError_t launch_portable_gate_up(const Ffn& ffn, const DecodePlan& plan, void* workspace, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch_gate_up_of<__nv_bfloat16, __nv_bfloat16>(ffn, plan, workspace, stream)
                                       : launch_gate_up_of<__half, __half>(ffn, plan, workspace, stream);
}

}  // namespace twell::decoding
