// 8-bit weights in the shared memory of the kernels for 3 to 64 tokens: 64 bytes a row, as boxes with 64-byte swizzle
// leave them, and how they become operands.
#pragma once

#include "common/quantized.cuh"
#include "sm90/decode/few.cuh"

namespace twell::decoding::few {

constexpr int kNarrowBytes = kStepBytes / 2;  // of a row: 64 elements

// Bytes of a row's 64 elements.
template <typename Weight>
constexpr int kRowStep = kScaled<Weight> ? kNarrowBytes : kStepBytes;

#if defined(TWELL_SM90_DEVICE)

// Where a row's 16 bytes `piece` lie: those of eight neighbouring rows meet no bank twice.
__device__ __forceinline__ uint32_t narrow_at(int row, int piece) {
  return row * kNarrowBytes + ((piece ^ (row >> 1 & 3)) << 4);
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t shared) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared) : "memory");
  return v;
}

// Two 8 x 8 matrices of 2-byte elements; lane 8 m + i, of the first 16, gives matrix m's row i.
__device__ __forceinline__ void load_two_matrices(uint32_t (&r)[2], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared)
               : "memory");
}

#endif

}  // namespace twell::decoding::few
