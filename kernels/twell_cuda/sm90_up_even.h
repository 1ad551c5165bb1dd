// Ways to compute up and down beside launch_up() and launch_down(), until they have been timed.
#pragma once

#include "sm90_call.h"
#include "sm90_mid.h"

namespace twell::sm90 {

enum class UpVariant {
  kEven,         // even tiles, stages given back sooner where copies are the limit
  kEvenLines,    // and h stored by whole lines, stages of relu(gate) released one by one
  kEvenTurned,   // and groups of tiles turned from block to block
  kPairs,        // as kEven, and x shared by clusters of two
  kPairsLines,   // as kEvenLines, and x shared
  kPairsTurned,  // as kEvenTurned, and x shared
};

cudaError_t launch_up_even(const Ffn&, const Chunk&, const Device&, cudaStream_t, UpVariant);

enum class DownVariant {
  kAhead,       // neurons are looked up a step ahead
  kEager,       // stages given back sooner where copies are the limit
  kAheadEager,  // both
};

cudaError_t launch_down_as(const Ffn&, const Chunk&, const Device&, cudaStream_t, DownVariant);

}  // namespace twell::sm90
