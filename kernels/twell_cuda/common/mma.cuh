// What both 16-bit types share in device code: the m16n8k16 tensor-core product, conversions, 16-byte loads, and
// programmatic dependent launch (sm_90 and later; nothing before).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace twell::decoding {

// d[16, 8] += a[16, 16] b[16, 8] in fp32. With g = lane / 4 and q = lane % 4 a lane holds
// a: rows g (a0, a2) and g + 8 (a1, a3), k = 2q, 2q + 1 (a0, a1) and 2q + 8, 2q + 9 (a2, a3);
// b: column g, the same k (b0, b1);  d: rows g (d0, d1) and g + 8 (d2, d3), columns 2q and 2q + 1.
template <typename Half>
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1);

template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                   uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma<__half>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                            uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }

// Two values rounded to nearest, the first in the low half.
template <typename Half>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}

template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  const __half2 v = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}

// Weights are read once: past L1, and by whole 128-byte lines. Zeros where `valid` is false; the address is then not
// touched. Volatile, so that loads stay where they were written: ahead of the products that they hide behind.
__device__ __forceinline__ void load_weights(uint4& v, const char* p, bool valid) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t"
      "mov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t"
      "@p ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0,%1,%2,%3}, [%4];\n\t}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(p), "r"(static_cast<int>(valid)));
}

// Columns of down_proj's rows, kRegs registers of two columns each.
template <int kRegs>
__device__ __forceinline__ void load_columns(uint32_t (&v)[kRegs], const char* p, bool valid) {
  static_assert(kRegs == 1 || kRegs == 2 || kRegs == 4, "4, 8 or 16 bytes");
  if constexpr (kRegs == 1) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\tmov.b32 %0, 0;\n\t"
        "@p ld.global.nc.L1::no_allocate.b32 %0, [%1];\n\t}"
        : "=&r"(v[0])
        : "l"(p), "r"(static_cast<int>(valid)));
  } else if constexpr (kRegs == 2) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %3, 0;\n\tmov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\t"
        "@p ld.global.nc.L1::no_allocate.v2.b32 {%0,%1}, [%2];\n\t}"
        : "=&r"(v[0]), "=&r"(v[1])
        : "l"(p), "r"(static_cast<int>(valid)));
  } else {
    uint4 w;
    load_weights(w, p, valid);
    v[0] = w.x, v[1] = w.y, v[2] = w.z, v[3] = w.w;
  }
}

// Activations: through L1, which the blocks of a multiprocessor share. Not the non-coherent path: with programmatic
// dependent launch the kernel before, which wrote them, may still run when this one starts.
__device__ __forceinline__ void load_tokens(uint4& v, const char* p, bool valid) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t"
      "mov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t"
      "@p ld.global.v4.b32 {%0,%1,%2,%3}, [%4];\n\t}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(p), "r"(static_cast<int>(valid))
      : "memory");
}

// Activations that a block reads once: from L2, whatever L1 holds.
__device__ __forceinline__ void load_tokens_once(uint4& v, const char* p, bool valid) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t"
      "mov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t"
      "@p ld.global.cg.v4.b32 {%0,%1,%2,%3}, [%4];\n\t}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(p), "r"(static_cast<int>(valid))
      : "memory");
}

// What the kernel before wrote and this block reads once: from L2.
__device__ __forceinline__ void load_products(uint2& v, const char* p, bool valid) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %3, 0;\n\tmov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\t"
      "@p ld.global.cg.v2.b32 {%0,%1}, [%2];\n\t}"
      : "=&r"(v.x), "=&r"(v.y)
      : "l"(p), "r"(static_cast<int>(valid))
      : "memory");
}

__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Whether kernels can overlap as the two functions below say; without, both do nothing.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kOverlaps = true;
#else
constexpr bool kOverlaps = false;
#endif

// Until this returns, nothing that an earlier kernel writes may be read, and nothing that it reads may be written.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start once every block has said so (or ended); it sees our results after its own wait only.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace twell::decoding
