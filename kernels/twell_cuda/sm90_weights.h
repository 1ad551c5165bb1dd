// The scratch of the weights' gradients, and the plan that lies in it: which warp sums what.
#pragma once

#include "sm90_training.h"

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
  int next;  // item, unit by unit in each slice
  int units, splits;
};

struct Scratch {
  Plan* plan;
  Unit* units;    // those with slots first, then by falling size: long ones start early
  Split* splits;  // (slots)
  float* biases;  // (slots, 2): of b_gate and b_up
  float* sums;    // (slots, matrices, D): of down, gate, up
  int slots, matrices;
};

constexpr int kShortest = 128;  // a unit of a split neuron has at least half of it

// Cuts the parts out of `partials`, if there is one; returns the bytes they take.
int64_t place_scratch(const Ffn&, int64_t pairs, void* partials, Scratch*);

cudaError_t launch_plan(const int64_t* first, const Scratch&, int width, cudaStream_t);

}  // namespace twell::sm90
