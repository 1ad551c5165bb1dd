// sm90/decode/few_down.cuh for e4m3 weights with a scale for each column of y.

#include "sm90/decode/few_down.cuh"

namespace twell::decoding {

cudaError_t launch_e4m3_few_down(const Ffn& ffn, const DecodePlan& plan, const Device& device, void* workspace,
                                 cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch_few_down_of<__nv_bfloat16, E4m3>(ffn, plan, device, workspace, stream)
                                       : launch_few_down_of<__half, E4m3>(ffn, plan, device, workspace, stream);
}

}  // namespace twell::decoding
