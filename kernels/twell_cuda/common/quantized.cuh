// 8-bit weights: as numbers, and as tensor-core operands, where four bytes become two registers of two 16-bit values
// each. All of it exact.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace twell {

// torch.float8_e4m3fn: a sign, four bits of exponent (less 7), three of mantissa. It has no infinity; NaN is 0x7f and
// 0xff, and 448 the largest number.
struct E4m3 {
  uint8_t bits;
};

// Whether sums of such weights have to be multiplied by scales: of int8_t and E4m3.
template <typename Weight>
constexpr bool kScaled = sizeof(Weight) == 1;

__device__ __forceinline__ float value_of(int8_t v) { return static_cast<float>(v); }
__device__ __forceinline__ float value_of(E4m3 v) {
  const uint32_t number = v.bits & 0x7fu;
  // The exponent's bits where fp32 has its lowest ones: 2^120 too small, also what has no first bit of its own.
  const float size = number == 0x7fu ? __uint_as_float(0x7fffffffu) : __uint_as_float(number << 20) * 0x1p120f;
  return v.bits & 0x80u ? -size : size;
}

// Bytes 0, 1 of `word` in `low` and 2, 3 in `high`, each byte as a value of type Half.
template <typename Half, typename Weight>
__device__ __forceinline__ void expand(uint32_t word, uint32_t& low, uint32_t& high);

// b + 128 as a bfloat16's lowest byte is as many times 2^-133: up to 127 without a first bit, from 128 on with one.
template <>
__device__ __forceinline__ void expand<__nv_bfloat16, int8_t>(uint32_t word, uint32_t& low, uint32_t& high) {
  word ^= 0x80808080u;
  const auto values = [](uint32_t pair) {                                         // two bytes, 0 above each
    const uint32_t factor = 0x7f007f00u, base = 0xc000c000u, unit = 0x42804280u;  // 2^127, -128 / 64, 64
    const auto of = [](const uint32_t& v) { return reinterpret_cast<const __nv_bfloat162&>(v); };
    const __nv_bfloat162 v = __hmul2(__hfma2(of(pair), of(factor), of(base)), of(unit));
    return reinterpret_cast<const uint32_t&>(v);
  };
  low = values(__byte_perm(word, 0, 0x4140));
  high = values(__byte_perm(word, 0, 0x4342));
}

// 1024 + (b + 128) less 1152: fp16 has 10 bits behind its first one.
template <>
__device__ __forceinline__ void expand<__half, int8_t>(uint32_t word, uint32_t& low, uint32_t& high) {
  word ^= 0x80808080u;
  const auto values = [](uint32_t pair) {  // two bytes, 0x64 above each
    const uint32_t base = 0x64806480u;     // 1152
    const __half2 difference = __hsub2(reinterpret_cast<const __half2&>(pair), reinterpret_cast<const __half2&>(base));
    return reinterpret_cast<const uint32_t&>(difference);
  };
  low = values(__byte_perm(word, 0x64646464u, 0x4140));
  high = values(__byte_perm(word, 0x64646464u, 0x4342));
}

// TWELL_E4M3_BY_BITS keeps to bits, to time one against the other.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890 && !defined(TWELL_E4M3_BY_BITS)

// By an instruction of Ada and later.
template <>
__device__ __forceinline__ void expand<__half, E4m3>(uint32_t word, uint32_t& low, uint32_t& high) {
  asm("{\n\t.reg .b16 first, second;\n\tmov.b32 {first, second}, %2;\n\t"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n\tcvt.rn.f16x2.e4m3x2 %1, second;\n\t}"
      : "=r"(low), "=r"(high)
      : "r"(word));
}

// bfloat16 has none, so through fp16 and fp32, both of which hold every e4m3: four instructions for two values, which
// share two pipes, where bits by hand (below) take seven.
template <>
__device__ __forceinline__ void expand<__nv_bfloat16, E4m3>(uint32_t word, uint32_t& low, uint32_t& high) {
  expand<__half, E4m3>(word, low, high);
  const auto values = [](uint32_t pair) {
    const float2 wide = __half22float2(reinterpret_cast<const __half2&>(pair));
    const __nv_bfloat162 rounded = __floats2bfloat162_rn(wide.x, wide.y);
    return reinterpret_cast<const uint32_t&>(rounded);
  };
  low = values(low), high = values(high);
}

#else

// Exponent and mantissa of bytes as the lower bits of a wider exponent and the upper ones of its mantissa: numbers that
// are too small by a power of two, subnormal ones too. Over a NaN's byte comes one of ones, and so does the sign.
template <int kShift, typename Multiply>
__device__ __forceinline__ void expand_by_bits(uint32_t word, uint32_t& low, uint32_t& high, const Multiply& multiply) {
  const uint32_t numbers = word & 0x7f7f7f7fu, carries = numbers + 0x01010101u;  // a first bit: it was 0x7f
  uint32_t tops;
  asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(tops) : "r"(carries));  // each byte's first bit, eight times
  tops |= word & 0x80808080u;
  const auto values = [&](uint32_t places) {
    return multiply(__byte_perm(numbers, 0, places) >> kShift | __byte_perm(tops, 0, places));
  };
  low = values(0x1404), high = values(0x3424);
}

template <>
__device__ __forceinline__ void expand<__half, E4m3>(uint32_t word, uint32_t& low, uint32_t& high) {
  expand_by_bits<1>(word, low, high, [](uint32_t pair) {
    const uint32_t factor = 0x5c005c00u;  // 2^8
    const __half2 v = __hmul2(reinterpret_cast<const __half2&>(pair), reinterpret_cast<const __half2&>(factor));
    return reinterpret_cast<const uint32_t&>(v);
  });
}

template <>
__device__ __forceinline__ void expand<__nv_bfloat16, E4m3>(uint32_t word, uint32_t& low, uint32_t& high) {
  expand_by_bits<4>(word, low, high, [](uint32_t pair) {
    const uint32_t factor = 0x7b807b80u;  // 2^120
    const __nv_bfloat162 v =
        __hmul2(reinterpret_cast<const __nv_bfloat162&>(pair), reinterpret_cast<const __nv_bfloat162&>(factor));
    return reinterpret_cast<const uint32_t&>(v);
  });
}

#endif

}  // namespace twell
