// Backward of the feed-forward block over the active pairs that forward saved.
#pragma once

#include "backward/runs.h"
#include "forward/forward.h"

namespace twell {

// Each null where it is not wanted. Without a gate, `gate` is the up projection's gradient and `up` null.
struct Gradients {
  void* x;     // (T, D)
  void* gate;  // (F, D)
  void* up;    // (F, D)
  void* down;  // (D, F) if block.down is stored by rows, else the same by columns
  float* b_gate;
  float* b_up;
  int64_t* in_runs;  // not null where there are runs: RunScratch::active() of all neurons
};

// What each token's terms of sparse training pull with (common/terms.h), (T); null where there is no such term.
struct Pulls {
  const float* l1;
  const float* count;
  Runs runs;
};

// Writes every wanted gradient whole, as the sum over all tokens but the dense ones; those are handed back as ranges,
// for the caller to add. With runs, in which any tokens may be neighbours, none is dense.
std::vector<std::pair<int64_t, int64_t>> backward(const Block& block, const Kernels& kernels, const Threads& threads,
                                                  const void* grad_y, const State& state, const Pulls& pulls,
                                                  const Gradients& gradients);

}  // namespace twell
