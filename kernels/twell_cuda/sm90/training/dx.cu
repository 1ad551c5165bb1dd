// The gradient of x of blocks that were not kept: dx = dg Wg + du Wu over their active neurons.

#include "sm90/common/slice_product.cuh"
#include "sm90/training/training.h"

namespace twell::sm90 {

using slices::Term;

cudaError_t launch_dx(const Ffn& ffn, const Chunk& chunk, const Gradients& gradients, const Device& device,
                      cudaStream_t stream) {
  const Term gate{chunk.active.columns, ffn.gate.data};
  if (!ffn.gated()) {
    const Term terms[] = {gate};
    return slices::launch(ffn, chunk, terms, nullptr, gradients.x, device, stream);
  }
  const Term terms[] = {gate, {chunk.active.ups, ffn.up.data}};
  return slices::launch(ffn, chunk, terms, nullptr, gradients.x, device, stream);
}

}  // namespace twell::sm90
