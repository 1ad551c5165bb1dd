// Weights' gradients from columns that lie as Active has them.
#pragma once

#include "sm90/common/workspace.h"
#include "sm90/training/training.h"

namespace twell::sm90 {

constexpr int kRunBlocks = 4;       // blocks of tokens whose neurons are multiplied together
constexpr int kRangeNeurons = 512;  // whose sums a thread block keeps

// Neurons of a range that a run of tokens activates.
struct alignas(16) RunList {
  int count, unused[3];
  uint32_t entries[kRangeNeurons];  // the neuron's place in its range; from bit 16 on a bit for each half block
};
static_assert(2 * kRunBlocks <= 16);

// (blocks, F, 2 halves, 64) of h, dg and du, the last null without a gate.
struct ValueColumns {
  const void* h;
  const void* gate;
  const void* up;
};

struct WeightScratch {
  RunList* lists;  // (ranges, runs)
  float* sums;     // of each thread block
};

// Of chunks of so many blocks.
void place_weights(const Ffn&, int64_t blocks, const Device&, Cutter&, WeightScratch*);
// dWd, dWg and dWu, of those that are wanted. `adds`: to what the gradients hold already; else that is not read.
cudaError_t launch_weights_of_columns(const Ffn&, const Chunk&, const ValueColumns&, bool adds, const Gradients&,
                                      const WeightScratch&, const Device&, cudaStream_t);

}  // namespace twell::sm90
