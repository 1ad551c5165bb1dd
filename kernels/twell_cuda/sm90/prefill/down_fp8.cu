// The down projection of e4m3 weights with a scale for each column of y.

#include "sm90/common/slice_product.cuh"
#include "sm90/prefill/prefill_fp8.h"

namespace twell::sm90 {

cudaError_t launch_down_fp8(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  // A copy of 16 bytes of a row would take what lies past its end with it.
  if (ffn.hidden % kE4m3Border != 0 || ffn.down.row_stride != ffn.hidden) return cudaErrorInvalidValue;
  const auto a = slices::scaled_arguments(ffn, chunk);
  return ffn.dtype == DType::kBFloat16 ? slices::launch_type<__nv_bfloat16, E4m3>(ffn.dtype, a, device, stream)
                                       : slices::launch_type<__half, E4m3>(ffn.dtype, a, device, stream);
}

}  // namespace twell::sm90
