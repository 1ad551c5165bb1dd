// The tokens of a call in fixed point, for the gate of int8 weights.
#pragma once

#include <vector>

#include "common/pairs.h"
#include "common/parallel.h"
#include "isa/kernels.h"

namespace twell {

class FixedTokens {
 public:
  // False where a token has no digits that are as good as its elements. `small_low` as of FixedPointKernels::digits.
  bool make(const FixedPointKernels& kernels, const Threads& threads, const char* x, int64_t row_bytes, int64_t tokens,
            int64_t hidden, bool small_low);
  FixedRows rows() const {
    return {digits_, ld_, step_.data(), base_.data(), low_norm_.data(), largest_.data(), beyond_.data()};
  }

 private:
  int64_t ld_ = 0;
  std::vector<float> step_, base_, low_norm_;
  std::vector<int32_t> largest_, beyond_;
  Bytes memory_;
  uint8_t* digits_ = nullptr;
};

}  // namespace twell
