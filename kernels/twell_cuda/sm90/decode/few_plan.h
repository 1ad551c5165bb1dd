// How the two decode kernels for few tokens, few_gate_up.cu and few_down.cu, share out a call.
#pragma once

#include "common/ffn.h"

namespace twell::decoding {

// Thread blocks of a cluster of sm90/decode/few_down.cu, as measured (LOG.md). Beside a block of the first kernel, of
// up to kFewNeurons neurons, one of them fits, so as many as find a multiprocessor each: clusters of four find only 30
// places on 132. After larger blocks three fit everywhere, clusters of three lose, and two to a multiprocessor win.
// Eight blocks to a cluster are too many for up to 8 tokens.
constexpr int kFewColumns = 64;  // of y, for each cluster
constexpr int kFewNeurons = 48;
constexpr double kFewPlaces = 0.9;  // of the multiprocessors, for clusters of three and more
// Whether a block of the second kernel finds room on a multiprocessor beside one of the first.
inline bool fits_beside(const Ffn& ffn, const Device& device) { return ffn.width <= kFewNeurons * device.sm_count; }
inline int few_splits(const Ffn& ffn, const Device& device) {
  const int slices = (ffn.hidden + kFewColumns - 1) / kFewColumns;
  const bool beside = fits_beside(ffn, device);
  for (const int splits : {8, 4, 3}) {
    if (splits == 3 && !beside) continue;
    if (splits == 8 && ffn.tokens <= 8) continue;
    if (slices * splits <= (beside ? kFewPlaces : 2.) * device.sm_count) return splits;
  }
  return slices * 2 <= (beside ? 1 : 2) * device.sm_count ? 2 : 1;
}

}  // namespace twell::decoding
