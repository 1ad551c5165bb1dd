// What a training step has beyond Ffn: the terms that press on activity, and the gradients.
#pragma once

#include "common/ffn.h"

namespace twell {

// Which tokens are neighbours, whose union the count presses on too. Others may lie between the tokens of a run.
struct Runs {
  const int64_t* run;    // (T): each token's, below `count`; or null for no runs
  const int64_t* sizes;  // (count): how many tokens a run has; one of size 0, as padding's, adds nothing
  int64_t count;
  float* in_runs;  // (1): sum over runs of the size times the neurons that one or more of the run's tokens activate
};

// L1 and the count (terms.cuh): each pulls with its scale times the token's weight, or the run's size.
struct Terms {
  const float* l1_scale;      // one, or null
  const float* count_scale;   // the same
  const float* token_weight;  // (T), or null for ones
  float* report;              // (1 + F): sum of token_weight * |h|, then each neuron's active tokens by weight; or null
  Runs runs;                  // of backward, where columns are kept
};

// Null where not wanted. Matrices are (F, D), one row a neuron; `gate` and `b_gate` are those of Ffn::gate.
struct Gradients {
  const void* dy;  // (T, D)
  void* x;         // (T, D)
  void* gate;
  void* up;
  void* down;
  void* b_gate;  // (F)
  void* b_up;    // (F)
  bool weights() const { return gate || up || down || b_gate || b_up; }
};

}  // namespace twell
