// The down projection over active pairs, for either memory order of its weight.
#pragma once

#include "forward/forward.h"

namespace twell {

// Consecutive tokens with their pairs; h = gate * up.
struct Part {
  int64_t first;
  TokenPairs pairs;
  Values<float> h;

  int64_t tokens() const { return static_cast<int64_t>(pairs.begin.size()) - 1; }
};

// y[t] = b_down + sum over t's pairs of h * down[:, neuron], for the part's rows of y (T, D).
void down_product(const Block& block, const Kernels& kernels, const Threads& threads, const Part& part, void* y);

// The same with a matrix unit where down lies by rows: h as dense panels, a few at a time, against them as they lie.
void down_by_panels(const Block& block, const Kernels& kernels, const Threads& threads, const Part& part, void* y);

}  // namespace twell
