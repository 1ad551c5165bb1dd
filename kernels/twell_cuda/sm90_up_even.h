// Ways to compute up with tiles of even width; launch_up() stays beside them until they have been timed.
#pragma once

#include "sm90_call.h"
#include "sm90_mid.h"

namespace twell::sm90 {

enum class UpVariant {
  kEven,        // even tiles
  kEvenLines,   // and h stored by whole lines, stages released one by one
  kPairs,       // even tiles, x shared by clusters of two
  kPairsLines,  // all of it
};

cudaError_t launch_up_even(const Ffn&, const Chunk&, const Device&, cudaStream_t, UpVariant);

}  // namespace twell::sm90
