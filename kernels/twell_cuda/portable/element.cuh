// The two 16-bit element types behind one set of names.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace twell::portable {

struct BFloat16 {
  using Pair = __nv_bfloat162;
  static __device__ __forceinline__ float2 widen(Pair pair) { return __bfloat1622float2(pair); }
  static __device__ __forceinline__ Pair narrow(float low, float high) { return __floats2bfloat162_rn(low, high); }
  static __device__ __forceinline__ float widen_one(const void* values, int64_t i) {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(values)[i]);
  }
};

struct Float16 {
  using Pair = __half2;
  static __device__ __forceinline__ float2 widen(Pair pair) { return __half22float2(pair); }
  static __device__ __forceinline__ Pair narrow(float low, float high) { return __floats2half2_rn(low, high); }
  static __device__ __forceinline__ float widen_one(const void* values, int64_t i) {
    return __half2float(static_cast<const __half*>(values)[i]);
  }
};

template <class Pair>
__device__ __forceinline__ Pair as_pair(uint32_t bits) {
  return *reinterpret_cast<Pair*>(&bits);
}

template <class Pair>
__device__ __forceinline__ uint32_t as_bits(Pair pair) {
  return *reinterpret_cast<uint32_t*>(&pair);
}

}  // namespace twell::portable
