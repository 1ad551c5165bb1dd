// int8 weights as tensor-core operands: four bytes become two registers of two 16-bit values each, exactly.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace twell {

// Bytes 0, 1 of `word` in `low` and 2, 3 in `high`, each byte as a value of type Half.
template <typename Half>
__device__ __forceinline__ void expand(uint32_t word, uint32_t& low, uint32_t& high);

// 128 + (b & 127) less 128 or, of a negative b, 256: bfloat16 has 7 bits behind its first one, so both are whole.
template <>
__device__ __forceinline__ void expand<__nv_bfloat16>(uint32_t word, uint32_t& low, uint32_t& high) {
  const auto values = [](uint32_t pair) {  // two bytes, 0x43 above each
    const uint32_t sum = pair & 0xff7fff7fu, base = pair & 0xff80ff80u;
    const __nv_bfloat162 difference = __hsub2(reinterpret_cast<const __nv_bfloat162&>(sum),
                                              reinterpret_cast<const __nv_bfloat162&>(base));
    return reinterpret_cast<const uint32_t&>(difference);
  };
  low = values(__byte_perm(word, 0x43434343u, 0x4140));
  high = values(__byte_perm(word, 0x43434343u, 0x4342));
}

// 1024 + (b + 128) less 1152: fp16 has 10 bits behind its first one.
template <>
__device__ __forceinline__ void expand<__half>(uint32_t word, uint32_t& low, uint32_t& high) {
  word ^= 0x80808080u;
  const auto values = [](uint32_t pair) {  // two bytes, 0x64 above each
    const uint32_t base = 0x64806480u;     // 1152
    const __half2 difference = __hsub2(reinterpret_cast<const __half2&>(pair), reinterpret_cast<const __half2&>(base));
    return reinterpret_cast<const uint32_t&>(difference);
  };
  low = values(__byte_perm(word, 0x64646464u, 0x4140));
  high = values(__byte_perm(word, 0x64646464u, 0x4342));
}

}  // namespace twell
