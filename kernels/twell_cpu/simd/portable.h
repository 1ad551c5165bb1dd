// Vectors in plain C++, which compilers turn into whatever the target has; the ground that other sets stand on.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/terms.h"

namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float to_float(float value) { return value; }

inline float to_float(int8_t value) { return static_cast<float>(value); }

inline float to_float(BFloat16 value) { return bits_to_float(static_cast<uint32_t>(value.bits) << 16); }

inline float to_float(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {
    return bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  // Subnormals fall out of the same product: 2^112 moves the exponent's bias.
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * bits_to_float(0x77800000u)));
}

inline void from_float(float value, float* out) { *out = value; }

inline void from_float(float value, BFloat16* out) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    out->bits = static_cast<uint16_t>((bits >> 16) | 0x40u);  // a NaN stays one
    return;
  }
  out->bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline void from_float(float value, Half* out) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    out->bits = static_cast<uint16_t>(sign | 0x7e00u);
  } else if (magnitude >= 0x477ff000u) {  // 65,520 and above round to infinity
    out->bits = static_cast<uint16_t>(sign | 0x7c00u);
  } else if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 lines the wanted bits up at the bottom
    out->bits = static_cast<uint16_t>(sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u));
  } else {
    out->bits = static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
  }
}

struct Portable {
  static constexpr int kLanes = 8;
  struct Vector {
    float lane[kLanes];
  };

  static inline Vector zero() { return Vector{}; }
  static inline Vector broadcast(float value) {
    Vector out;
    for (int i = 0; i < kLanes; ++i) out.lane[i] = value;
    return out;
  }
  template <class T>
  static inline Vector load(const T* from) {
    Vector out;
    for (int i = 0; i < kLanes; ++i) out.lane[i] = to_float(from[i]);
    return out;
  }
  // The first `count` elements, zeros behind them; touches no memory beyond.
  template <class T>
  static inline Vector load(const T* from, int count) {
    Vector out{};
    for (int i = 0; i < count; ++i) out.lane[i] = to_float(from[i]);
    return out;
  }
  template <class T>
  static inline void store(T* to, const Vector& value) {
    for (int i = 0; i < kLanes; ++i) from_float(value.lane[i], to + i);
  }
  template <class T>
  static inline void store(T* to, const Vector& value, int count) {
    for (int i = 0; i < count; ++i) from_float(value.lane[i], to + i);
  }
  // Two vectors whose values bfloat16 holds exactly.
  static inline void store_exact(BFloat16* to, const Vector& first, const Vector& second) {
    for (int i = 0; i < kLanes; ++i) {
      to[i].bits = static_cast<uint16_t>(float_to_bits(first.lane[i]) >> 16);
      to[kLanes + i].bits = static_cast<uint16_t>(float_to_bits(second.lane[i]) >> 16);
    }
  }
  static inline Vector multiply_add(const Vector& a, const Vector& b, const Vector& c) {
    Vector out;
    for (int i = 0; i < kLanes; ++i) out.lane[i] = a.lane[i] * b.lane[i] + c.lane[i];
    return out;
  }
  static inline Vector add(const Vector& a, const Vector& b) {
    Vector out;
    for (int i = 0; i < kLanes; ++i) out.lane[i] = a.lane[i] + b.lane[i];
    return out;
  }
  static inline Vector multiply(const Vector& a, const Vector& b) {
    Vector out;
    for (int i = 0; i < kLanes; ++i) out.lane[i] = a.lane[i] * b.lane[i];
    return out;
  }
  static inline Vector absolute(const Vector& a) {
    Vector out;
    for (int i = 0; i < kLanes; ++i) out.lane[i] = bits_to_float(float_to_bits(a.lane[i]) & 0x7fffffffu);
    return out;
  }
  // A NaN stays one.
  static inline Vector relu(const Vector& a) {
    Vector out;
    for (int i = 0; i < kLanes; ++i) out.lane[i] = a.lane[i] <= 0.0f ? 0.0f : a.lane[i];
    return out;
  }
  // `value` where `test` is not zero (a NaN is not), else zero.
  static inline Vector where_nonzero(const Vector& test, const Vector& value) {
    Vector out;
    for (int i = 0; i < kLanes; ++i) out.lane[i] = test.lane[i] != 0.0f ? value.lane[i] : 0.0f;
    return out;
  }
  static inline Vector l1_gradient(const Vector& pull, const Vector& h) {
    Vector out;
    for (int i = 0; i < kLanes; ++i) out.lane[i] = ::l1_gradient(pull.lane[i], h.lane[i]);
    return out;
  }
  static inline float sum(const Vector& a) {
    float total = 0;
    for (int i = 0; i < kLanes; ++i) total += a.lane[i];
    return total;
  }
  template <int kCount>
  static inline void sums(const Vector* vectors, float* out) {
    for (int i = 0; i < kCount; ++i) out[i] = sum(vectors[i]);
  }
  // Bit i is set where relu keeps lane i: positive or NaN.
  static inline uint32_t kept(const Vector& a) {
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(!(a.lane[i] <= 0.0f)) << i;
    return bits;
  }
};

}  // namespace
