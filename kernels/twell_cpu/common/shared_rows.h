// Sums of rows that neighbouring tokens share, on a matrix unit: the down projection and the gradient of x.
#pragma once

#include "forward/forward.h"

namespace twell {

// rows (F, D) with `ld` elements from one to the next; scale: one factor for each pair.
struct ScaledRows {
  const void* rows;
  int64_t ld;
  const float* scale;
};

// out[t] = bias + sum over t's pairs, and over `terms`, of scale[pair] * rows[neuron]; out (tokens, D), bias (D,) or
// null. For each block of tokens a matrix product over the neurons that enough of them share; the other pairs one by
// one. Returns false, and has written nothing, where no such product pays.
bool sum_shared_rows(const Block& block, const Kernels& kernels, const Threads& threads, const TokenPairs& pairs,
                     const std::vector<ScaledRows>& terms, const float* bias, void* out);

}  // namespace twell
