// What runs of neighbouring tokens add to the count term's gradient, in the form that keeps columns.
#pragma once

#include "sm90/common/workspace.h"
#include "sm90/training/training.h"

namespace twell::sm90 {

struct RunScratch {
  uint64_t* in_runs;    // the sum that Runs::in_runs gets
  uint64_t* strongest;  // (runs, F): bits of the largest relu(gate), then, in the low half, how many tokens have it
  // (blocks, 2 halves, row): of each entry a bit for each of the half's tokens that no neighbour of its run in the half
  // surpasses.
  uint64_t* candidates;
};

// Of `count` runs.
void place_runs(const Ffn&, int64_t count, Cutter&, RunScratch*);
// From relu(gate) of all tokens, ahead of the first chunk: fills the scratch.
cudaError_t launch_find_strongest(const Ffn&, const Chunk& all, const Runs&, const RunScratch&, const Device&,
                                  cudaStream_t);
// After launch_dh: adds to its columns of dg. Of the first chunk also Runs::in_runs.
cudaError_t launch_add_strongest(const Ffn&, const Chunk&, const Terms&, const RunScratch&, void* gradients,
                                 const Device&, cudaStream_t);

}  // namespace twell::sm90
