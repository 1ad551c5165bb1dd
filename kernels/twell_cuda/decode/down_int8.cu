// decode/down.cuh for int8 weights with a scale for each column of y.

#include "decode/down.cuh"

namespace twell::decoding {

cudaError_t launch_int8_down(const Ffn& ffn, const DecodePlan& plan, void* workspace, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch_down_of<__nv_bfloat16, int8_t>(ffn, plan, workspace, stream)
                                       : launch_down_of<__half, int8_t>(ffn, plan, workspace, stream);
}

}  // namespace twell::decoding
