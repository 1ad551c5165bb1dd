#include "forward/fixed_tokens.h"

#include <algorithm>
#include <atomic>

namespace twell {

bool FixedTokens::make(const FixedPointKernels& kernels, const Threads& threads, const char* x, int64_t row_bytes,
                       int64_t tokens, int64_t hidden, bool small_low) {
  constexpr int64_t kTokens = 8;       // fewer take less time than waking a thread
  ld_ = (hidden + 63) / 64 * 64 + 64;  // rows in different cache sets
  memory_.reserve(2 * tokens * ld_);
  digits_ = reinterpret_cast<uint8_t*>(memory_.data());
  for (auto* values : {&step_, &base_, &low_norm_}) values->resize(static_cast<size_t>(tokens));
  for (auto* values : {&largest_, &beyond_}) values->resize(static_cast<size_t>(tokens));
  std::atomic<bool> as_good{true};
  for_items(threads, (tokens + kTokens - 1) / kTokens, [&](int, int64_t item) {
    const int64_t last = std::min((item + 1) * kTokens, tokens);
    for (int64_t t = item * kTokens; t < last && as_good.load(std::memory_order_relaxed); ++t) {
      uint8_t* high = digits_ + 2 * t * ld_;
      FixedScale scale;
      if (!kernels.digits(x + t * row_bytes, hidden, small_low, high, high + ld_, &scale)) as_good = false;
      step_[t] = scale.step;
      base_[t] = scale.base;
      low_norm_[t] = scale.low_norm;
      largest_[t] = scale.largest;
      beyond_[t] = scale.beyond;
    }
  });
  return as_good;
}

}  // namespace twell
