// Weights' gradients as products over tokens: a tile of 128 neurons by 256 columns, two warpgroups of 64 neurons each,
// both operands in the stages of a ring.
#pragma once

#include "sm90/common/chunk.h"
#include "sm90/common/primitives.cuh"
#include "sm90/common/wgmma.cuh"

namespace twell::sm90 {

constexpr int kNeurons = 128, kHidden = 256;  // of a tile
constexpr int kDepth = kHalfTokens;           // tokens of a step
// A stage: columns of the neurons' values, then rows of the other operand, 64 columns a part.
constexpr int kColumnBytes = kNeurons * kDepth * 2, kPartBytes = kDepth * 128, kParts = kHidden / 64;
constexpr int kStageBytes = kColumnBytes + kParts * kPartBytes;

// sum (64, kHidden) of this warpgroup, 0 or 1. Each warp gives every stage back: release(stage).
template <typename T, typename Release>
__device__ __forceinline__ void multiply_neurons(float (&sum)[kHidden / 2], int steps, uint32_t stages, Ring& ring,
                                                 int warpgroup, const Release& release) {
  for (int step = 0; step < steps; ++step, ring.advance()) {
    ring.wait_full();
    const uint32_t stage = stages + ring.stage * kStageBytes;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      Wgmma<T, kHidden, 0, 1>::multiply(sum, matrix_descriptor(stage + warpgroup * (kColumnBytes / 2) + k * 32, 16),
                                        matrix_descriptor(stage + kColumnBytes + k * 2048, kPartBytes), step + k);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) release(ring.previous());
  }
  wgmma_wait<0>();
  release(ring.previous());
}

}  // namespace twell::sm90
