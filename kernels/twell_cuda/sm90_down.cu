// Down projection over active neurons, y = h Wd^T + bd, and the gradient of x, dx = dg Wg + du Wu. Wd is stored by
// columns: one row a neuron.

#include "sm90_slice_product.cuh"
#include "sm90_training.h"

namespace twell::sm90 {

using slices::Term;

cudaError_t launch_down(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  const Term terms[] = {{chunk.active.columns, ffn.down}};
  return slices::launch(ffn, chunk, terms, ffn.b_down, ffn.y, device, stream);
}

cudaError_t launch_dx(const Ffn& ffn, const Chunk& chunk, const Gradients& gradients, const Device& device,
                      cudaStream_t stream) {
  const Term gate{chunk.active.columns, ffn.gate};
  if (ffn.up == nullptr) {
    const Term terms[] = {gate};
    return slices::launch(ffn, chunk, terms, nullptr, gradients.x, device, stream);
  }
  const Term terms[] = {gate, {chunk.active.ups, ffn.up}};
  return slices::launch(ffn, chunk, terms, nullptr, gradients.x, device, stream);
}

}  // namespace twell::sm90
