#pragma once

#include <cstdint>

namespace twell {

// `n` or the next larger multiple of `to`.
constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

}  // namespace twell
