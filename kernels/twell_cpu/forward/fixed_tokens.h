// The tokens of a call in fixed point, for the gate of int8 weights.
#pragma once

#include <vector>

#include "common/pairs.h"
#include "common/parallel.h"
#include "isa/kernels.h"

namespace twell {

// Some tokens, as FixedPointKernels takes them; or none, without `steps`.
struct FixedRows {
  const float* steps = nullptr;
  const uint8_t* digits = nullptr;
  int64_t ld = 0;
};

class FixedTokens {
 public:
  // False where a token has no digits that are as good as its elements.
  bool make(const FixedPointKernels& kernels, const Threads& threads, const char* x, int64_t row_bytes, int64_t tokens,
            int64_t hidden);
  FixedRows from(int64_t token) const {
    return {steps_.data() + token, digits_ + 2 * token * ld_, ld_};
  }

 private:
  int64_t ld_ = 0;
  std::vector<float> steps_;
  Bytes memory_;
  uint8_t* digits_ = nullptr;
};

}  // namespace twell
