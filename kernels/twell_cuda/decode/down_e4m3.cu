// decode/down.cuh for e4m3 weights with a scale for each column of y.

#include "decode/down.cuh"

namespace twell::decoding {

cudaError_t launch_e4m3_down(const Ffn& ffn, const DecodePlan& plan, void* workspace, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch_down_of<__nv_bfloat16, E4m3>(ffn, plan, workspace, stream)
                                       : launch_down_of<__half, E4m3>(ffn, plan, workspace, stream);
}

}  // namespace twell::decoding
