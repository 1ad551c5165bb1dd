// The down projection over active pairs, for either memory order of its weight.
#pragma once

#include "forward.h"

namespace twell {

// Consecutive tokens with their pairs; h = gate * up.
struct Part {
  int64_t first;
  TokenPairs pairs;
  std::vector<float> h;

  int64_t tokens() const {
    return static_cast<int64_t>(pairs.begin.size()) - 1;
  }
};

// y[t] = b_down + sum over t's pairs of h * down[:, neuron], for the part's rows of y (T, D).
void down_product(const Block& block, const Kernels& kernels, const Threads& threads, const Part& part, void* y);

// With a matrix unit. Where down lies by columns: a product for each block of tokens over the neurons that any of them has
// active; false, and nothing written, where gathering each pair is faster.
bool down_of_shared(const Block& block, const Kernels& kernels, const Threads& threads, const Part& part, void* y);
// Where down lies by rows: h as dense panels, a few at a time, against them as they lie.
void down_by_panels(const Block& block, const Kernels& kernels, const Threads& threads, const Part& part, void* y);

}  // namespace twell
