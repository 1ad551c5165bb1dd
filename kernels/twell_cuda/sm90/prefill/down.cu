// Down projection over active neurons, y = h Wd^T + bd. Wd is stored by columns: one row a neuron.

#include "sm90/common/slice_product.cuh"

namespace twell::sm90 {

using slices::Term;

cudaError_t launch_down(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  const Term terms[] = {{chunk.active.columns, ffn.down.data}};
  return slices::launch(ffn, chunk, terms, ffn.b_down, ffn.y, device, stream);
}

}  // namespace twell::sm90
