// The scratch of the weights' gradients, and the plan that lies in it: which warp sums what.
#pragma once

#include "sm90/training/training.h"

namespace twell::sm90 {

// What one warp sums for one slice of the hidden size: pairs of one neuron.
struct alignas(16) Unit {
  uint32_t begin, pairs;
  int neuron;
  int slot;  // of Scratch::sums; negative where these are all the neuron's pairs
};

// A neuron of many pairs: the sums of its units are added by another kernel.
struct Split {
  int neuron, slot, units;
};

struct Plan {
  int next;        // item, unit by unit in each slice
  int next_heavy;  // of the heavy neurons, to be spread out
  int units, splits;
  int heavy;  // neurons with so many pairs that products with all tokens' rows are cheaper
};

constexpr int kHeavyNeurons = 128;  // of a tile

// Room for heavy neurons.
struct Heavy {
  int* neurons;        // (rows)
  void* factors[3];    // (rows, blocks * kBlockTokens) of h, dg, du: zero where a token does not activate the neuron
  int tiles;           // 0: no neuron is heavy
  int64_t tile_pairs;  // that cost as much as a tile's product
  __host__ __device__ int rows() const { return tiles * kHeavyNeurons; }
};

struct Scratch {
  Plan* plan;
  Unit* units;    // those with slots first, then by falling size: long ones start early
  Split* splits;  // (slots)
  float* biases;  // (slots, 2): of b_gate and b_up
  float* sums;    // (slots, matrices, D): of down, gate, up
  int slots, matrices;
  Heavy heavy;
};

constexpr int kShortest = 128;  // a unit of a split neuron has at least half of it

// Cuts the parts out of `partials`, if there is one; returns the bytes they take.
int64_t place_scratch(const Ffn&, int64_t pairs, void* partials, Scratch*);

cudaError_t launch_plan(const Ffn&, const int64_t* first, const Scratch&, cudaStream_t);

// Heavy neurons' pairs become rows of all tokens; their biases' gradients. `beside`: the launch before is that of dx,
// on whose result nothing here depends, and which lets others start when what came before it is done.
cudaError_t launch_spread(const Ffn&, const State&, const Sorted&, const Gradients&, const Scratch&, bool beside,
                          const Device&, cudaStream_t);
// Heavy neurons' other gradients, of those that are wanted. It lets others start before it ends.
cudaError_t launch_heavy(const Ffn&, const State&, const Gradients&, const Scratch&, const Device&, cudaStream_t);

}  // namespace twell::sm90
