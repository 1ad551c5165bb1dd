// The neuron-major part of backward on a matrix unit, for neurons that many tokens share.
#pragma once

#include "backward/backward.h"

namespace twell {

class SharedNeuronGradients {
 public:
  // Puts x and grad_y (T, D) into the forms that the unit takes.
  SharedNeuronGradients(const Block& block, const Kernels& kernels, const Threads& threads, const void* grad_y,
                        const Pulls& pulls);

  struct Scratch {
    Bytes rows, x_scale, grad_scale;
    std::vector<float> values, pair_values, sums;
    std::vector<char> rounded;
    RunScratch runs;
  };

  // Gradients of the weights of `shared` neurons (ascending), whole rows of each; those of down go to rows of
  // `grad_down`, numbered from `first`. `down` holds rows of down's transpose, `down_stride` elements apart, numbered
  // likewise. Each pair's factors become its gradients.
  void add(const std::vector<int64_t>& shared, int64_t first, const NeuronPairs& neurons, const char* down,
           int64_t down_stride, TokenPairs* pairs, const Gradients& gradients, char* grad_down, int64_t grad_stride,
           Scratch* scratch) const;

 private:
  void add_some(const int64_t* shared, int64_t count, int64_t first, const NeuronPairs& neurons, const char* down,
                int64_t down_stride, TokenPairs* pairs, const Gradients& gradients, char* grad_down,
                int64_t grad_stride, Scratch* scratch) const;

  const Block& block_;
  const Kernels& kernels_;
  const Pulls pulls_;
  int64_t padded_;  // tokens, to a multiple of 32
  mutable Bytes grad_panels_, grad_pairs_, x_pairs_;
};

}  // namespace twell
