// Weights' gradients from columns that lie as Active has them.
#pragma once

#include "sm90/common/workspace.h"
#include "sm90/training/training.h"

namespace twell::sm90 {

constexpr int kRunBlocks = 4, kRunSteps = 2 * kRunBlocks;  // blocks of tokens multiplied together, and half blocks
constexpr int kMostNeurons = 256;                          // of a product
constexpr int kRangeNeurons = 512;                         // whose sums a thread block keeps

// The order of neurons: last come the steady ones, which more than half of the runs activate; both parts ascend.
struct Order {
  int others;  // how many come first
  int taken;   // items that thread blocks of the product have taken
};

// Neurons are cut into ranges in that order, the steady ones into such as one product takes.
struct Range {
  int first, size;
  bool steady;
};
struct Ranges {
  int other_neurons, width, others, count;
  __device__ __forceinline__ Ranges(int others_of_all, int all)
      : other_neurons(others_of_all),
        width(all),
        others((others_of_all + kRangeNeurons - 1) / kRangeNeurons),
        count(others + (all - others_of_all + kMostNeurons - 1) / kMostNeurons) {}
  __device__ __forceinline__ Range at(int index) const {
    const bool steady = index >= others;
    const int first = steady ? other_neurons + (index - others) * kMostNeurons : index * kRangeNeurons;
    return {first, steady ? min(kMostNeurons, width - first) : min(kRangeNeurons, other_neurons - first), steady};
  }
};
inline int most_ranges(const Ffn& ffn) { return (ffn.width + kMostNeurons - 1) / kMostNeurons + 1; }
inline int count_runs(int64_t blocks) { return static_cast<int>((blocks + kRunBlocks - 1) / kRunBlocks); }

// Neurons of a range that a run of tokens activates; of a range of steady neurons all.
struct alignas(16) RunList {
  int count, unused[3];
  uint32_t entries[kRangeNeurons];  // the neuron's place in its range; from bit 16 on a bit for each half block
  uint16_t neurons[kRangeNeurons];
};
static_assert(kRunSteps <= 16 && sizeof(RunList) % 16 == 0);

// (blocks, F, 2 halves, 64) of h, dg and du, the last null without a gate.
struct ValueColumns {
  const void* h;
  const void* gate;
  const void* up;
};

struct WeightScratch {
  Order* order;
  uint32_t* steady_words;  // a bit for each neuron
  uint16_t* neurons;       // (F), in that order
  RunList* lists;          // (ranges, runs)
  float* sums;             // of each thread block
  float* piece_sums;       // of items that several pieces of the tokens add to
  int* pieces_added;       // to each warp's part of such an item
  int piece_parts;         // how many parts there are
};

// Of chunks of so many blocks.
void place_weights(const Ffn&, int64_t blocks, const Device&, Cutter&, WeightScratch*);
// Of a chunk, ahead of launch_weights_of_columns. Lets others start when it has waited for all before it.
cudaError_t launch_weights_lists(const Ffn&, const Chunk&, const WeightScratch&, cudaStream_t);
// dWd, dWg and dWu, of those that are wanted. `adds`: to what the gradients hold already; else that is not read.
cudaError_t launch_weights_of_columns(const Ffn&, const Chunk&, const ValueColumns&, bool adds, const Gradients&,
                                      const WeightScratch&, const Device&, cudaStream_t);

}  // namespace twell::sm90
