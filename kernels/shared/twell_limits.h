// Numbers that C++ and Python share. hf_twell reads these lines too, so each constant is one of the form
// `constexpr TYPE NAME = NUMBER;`.
#pragma once

#include <cstdint>

namespace twell {

constexpr int64_t kMaxHidden = 16384;  // D
constexpr int64_t kMaxWidth = 65536;   // F: a neuron's index takes 16 bits

// Above this density the CPU's sparse products are slower than dense ones.
constexpr double kCpuMaxDensity = 0.18;

}  // namespace twell
