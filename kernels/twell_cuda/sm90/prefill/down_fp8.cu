// The down projection of e4m3 weights with a scale for each column of y.

#include "sm90/common/slice_product.cuh"
#include "sm90/prefill/prefill_fp8.h"

namespace twell::sm90 {

cudaError_t launch_down_fp8(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  // A copy of 16 bytes of a row would take what lies past its end with it.
  if (ffn.hidden % kE4m3Border != 0 || ffn.down.row_stride != ffn.hidden) return cudaErrorInvalidValue;
  slices::Arguments<1, slices::ScaledOutput> a{};
  a.terms[0] = {chunk.active.columns, ffn.down.data};
  a.out = {slices::output_of(ffn, chunk, ffn.b_down, ffn.y), ffn.down.scales};
  a.chunk = chunk;
  a.width = ffn.width;
  return ffn.dtype == DType::kBFloat16 ? slices::launch_type<__nv_bfloat16, E4m3>(ffn.dtype, a, device, stream)
                                       : slices::launch_type<__half, E4m3>(ffn.dtype, a, device, stream);
}

}  // namespace twell::sm90
