// e4m3 in plain steps, and Buffers with guards, for the check programs of fp8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>
#include <cstring>
#include <type_traits>

#include "common/ffn.h"
#include "tests/check.cuh"

namespace checks {

// Sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, and NaN where all bits but the sign are set.
__host__ __device__ inline float e4m3_value(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  float magnitude = exponent == 0 ? mantissa / 512.f : (8 + mantissa) / 1024.f * static_cast<float>(1 << exponent);
  if ((code & 0x7f) == 0x7f) magnitude = NAN;
  return code & 0x80 ? -magnitude : magnitude;
}

// The nearest code, of two the even one; at most 448.
inline uint8_t e4m3_code(float value) {
  static const std::array<float, 127> values = [] {
    std::array<float, 127> all{};
    for (int code = 0; code < 127; ++code) all[code] = e4m3_value(static_cast<uint8_t>(code));
    return all;
  }();
  if (std::isnan(value)) return 0x7f;
  const float magnitude = std::fabs(value);
  int code = static_cast<int>(std::upper_bound(values.begin(), values.end(), magnitude) - values.begin()) - 1;
  if (code < 126) {
    const double middle = (double{values[code]} + values[code + 1]) / 2;
    if (magnitude > middle || (magnitude == middle && code % 2 == 1)) ++code;
  }
  return static_cast<uint8_t>(code | (std::signbit(value) ? 0x80 : 0));
}

template <typename Half>
twell::DType dtype_of() {
  return std::is_same<Half, __half>::value ? twell::DType::kFloat16 : twell::DType::kBFloat16;
}

template <typename Half>
const char* name_of() {
  return std::is_same<Half, __half>::value ? "fp16" : "bf16";
}

inline float uniform(uint64_t seed) { return (static_cast<uint32_t>(hash(seed)) + 0.5f) * 2.3283064e-10f; }
inline float normal(uint64_t seed) {
  return std::sqrt(-2.f * std::log(uniform(2 * seed))) * std::cos(6.2831853f * uniform(2 * seed + 1));
}

// Device memory of `count` values, and behind it a guard that must stay as poisoned.
template <typename T>
struct Guarded {
  static constexpr size_t kGuard = 4096;
  Buffer<char> bytes;
  size_t count;
  int poison_byte = 0xff;

  explicit Guarded(size_t values) : bytes(values * sizeof(T) + kGuard), count(values) {}
  T* data() const { return reinterpret_cast<T*>(bytes.data); }
  void poison(int byte) {
    poison_byte = byte;
    CHECK(cudaMemset(bytes.data, byte, bytes.bytes));
  }
  std::vector<T> get() const {
    std::vector<T> values(count);
    CHECK(cudaMemcpy(values.data(), bytes.data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }
  bool intact() const {
    std::vector<unsigned char> guard(kGuard);
    CHECK(cudaMemcpy(guard.data(), bytes.data + count * sizeof(T), kGuard, cudaMemcpyDeviceToHost));
    return std::all_of(guard.begin(), guard.end(), [&](unsigned char c) { return c == poison_byte; });
  }
};

}  // namespace checks
