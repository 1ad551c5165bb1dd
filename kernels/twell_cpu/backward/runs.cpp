#include "backward/runs.h"

#include "common/terms.h"

namespace twell {

void RunScratch::add(const Runs& runs, const uint32_t* token, const float* gate, int64_t pairs, float* grad_gate) {
  strongest_.resize(static_cast<size_t>(runs.count));
  equals_.resize(static_cast<size_t>(runs.count));
  // Below every active gate, which may be one that was rounded to 0.
  for (int64_t i = 0; i < pairs; ++i) strongest_[runs.run[token[i]]] = -1.0f;
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t run = runs.run[token[i]];
    float& most = strongest_[run];
    if (most < 0.0f) active_ += runs.size[run];  // its first
    if (gate[i] == most) {
      ++equals_[run];
    } else if (!(gate[i] < most) && most == most) {  // a NaN stays the strongest, and nothing equals it
      most = gate[i];
      equals_[run] = 1;
    }
  }
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t run = runs.run[token[i]];
    if (gate[i] != strongest_[run]) continue;
    const float pull = runs.scale * static_cast<float>(runs.size[run]) / static_cast<float>(equals_[run]);
    grad_gate[i] += count_gradient(pull, gate[i]);
  }
}

}  // namespace twell
