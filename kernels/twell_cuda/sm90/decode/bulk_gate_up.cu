// sm90/decode/bulk_gate_up.cuh for weights of the call's own type.

#include "sm90/decode/bulk_gate_up.cuh"

namespace twell::decoding {

cudaError_t launch_bulk_gate_up(const Ffn& ffn, const DecodePlan& plan, const Device& device, void* workspace,
                                cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16
             ? launch_bulk_gate_up_of<__nv_bfloat16, __nv_bfloat16>(ffn, plan, device, workspace, stream)
             : launch_bulk_gate_up_of<__half, __half>(ffn, plan, device, workspace, stream);
}

}  // namespace twell::decoding
