// What runs of neighbouring tokens add to the count term; `inject_count` of hf_twell/ops/reference.py says of what.
#pragma once

#include <cstdint>
#include <vector>

namespace twell {

// Tokens that count together, wherever they lie: a run's may have others' between them.
struct Runs {
  const int64_t* run;   // (T), each token's; null where there are no runs
  const int64_t* size;  // (count), how many tokens a run has; 0 of that of padding
  int64_t count;
  float scale;
};

// What one thread reuses from neuron to neuron, and what it has counted.
class RunScratch {
 public:
  // Adds to the gradients of one neuron's active gates, which are these tokens'.
  void add(const Runs& runs, const uint32_t* token, const float* gate, int64_t pairs, float* grad_gate);

  // The sum over runs and neurons of the sizes of runs in which the neuron is active.
  int64_t active() const { return active_; }

 private:
  std::vector<float> strongest_;  // of each run
  std::vector<int64_t> equals_;   // how many of its tokens are as strong
  int64_t active_ = 0;
};

}  // namespace twell
