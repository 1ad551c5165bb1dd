// Hopper's matrix instruction (PTX ISA, wgmma.mma_async): D (64 x N, fp32) += A B, by a warpgroup, B in shared memory.
//
//   Wgmma<T, N, TransA, TransB>      A in shared memory, too
//   WgmmaOfRegisters<T, N, TransB>   A in registers, each warp's 16 rows as those of mma.m16n8k16
//
// Trans: 0 where K is contiguous, 1 where M (of A) or N (of B) is. e4m3 knows 0 alone. One call multiplies 16 of K, or
// 32 of e4m3. Inline assembly names each of a thread's N / 2 sums, and the other operands by the numbers that follow,
// so macros write the widths that some kernel uses.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace twell::sm90 {

template <typename T, int N, int TransA, int TransB>
struct Wgmma;

template <typename T, int N, int TransB>
struct WgmmaOfRegisters;

// clang-format off

// The first 8, 16, ... of the sums, as assembly names them and as operands.
#define TWELL_R8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TWELL_R16 TWELL_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TWELL_R24 TWELL_R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TWELL_R32 TWELL_R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TWELL_R40 TWELL_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TWELL_R48 TWELL_R40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TWELL_R56 TWELL_R48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define TWELL_R64 TWELL_R56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define TWELL_R72 TWELL_R64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define TWELL_R80 TWELL_R72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define TWELL_R88 TWELL_R80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define TWELL_R96 TWELL_R88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define TWELL_R104 TWELL_R96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define TWELL_R112 TWELL_R104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define TWELL_R120 TWELL_R112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define TWELL_R128 TWELL_R120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define TWELL_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TWELL_D(i) TWELL_D4(i), TWELL_D4(i + 4)
#define TWELL_D8 TWELL_D(0)
#define TWELL_D16 TWELL_D8, TWELL_D(8)
#define TWELL_D24 TWELL_D16, TWELL_D(16)
#define TWELL_D32 TWELL_D24, TWELL_D(24)
#define TWELL_D40 TWELL_D32, TWELL_D(32)
#define TWELL_D48 TWELL_D40, TWELL_D(40)
#define TWELL_D56 TWELL_D48, TWELL_D(48)
#define TWELL_D64 TWELL_D56, TWELL_D(56)
#define TWELL_D72 TWELL_D64, TWELL_D(64)
#define TWELL_D80 TWELL_D72, TWELL_D(72)
#define TWELL_D88 TWELL_D80, TWELL_D(80)
#define TWELL_D96 TWELL_D88, TWELL_D(88)
#define TWELL_D104 TWELL_D96, TWELL_D(96)
#define TWELL_D112 TWELL_D104, TWELL_D(104)
#define TWELL_D120 TWELL_D112, TWELL_D(112)
#define TWELL_D128 TWELL_D120, TWELL_D(120)

// `sums` is N / 2; p0, p1, ... are the numbers from there on.
#define TWELL_WGMMA(type, ptx, n, sums, p0, p1, p2, p3, p4)                                                          \
  template <int TransA, int TransB>                                                                                  \
  struct Wgmma<type, n, TransA, TransB> {                                                                            \
    static __device__ __forceinline__ void multiply(float* d, uint64_t a, uint64_t b, int accumulate) {              \
      asm volatile(                                                                                                  \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #p2 ", 0;\n"                                                          \
          "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." ptx "." ptx " {" TWELL_R##sums "}, %" #p0 ", %" #p1      \
          ", p, 1, 1, %" #p3 ", %" #p4 ";\n}\n"                                                                      \
          : TWELL_D##sums                                                                                            \
          : "l"(a), "l"(b), "r"(accumulate), "n"(TransA), "n"(TransB));                                              \
    }                                                                                                                \
  };
#define TWELL_WGMMA_16_BIT(...)                  \
  TWELL_WGMMA(__nv_bfloat16, "bf16", __VA_ARGS__) \
  TWELL_WGMMA(__half, "f16", __VA_ARGS__)

TWELL_WGMMA_16_BIT(16, 8, 8, 9, 10, 11, 12)
TWELL_WGMMA_16_BIT(32, 16, 16, 17, 18, 19, 20)
TWELL_WGMMA_16_BIT(48, 24, 24, 25, 26, 27, 28)
TWELL_WGMMA_16_BIT(64, 32, 32, 33, 34, 35, 36)
TWELL_WGMMA_16_BIT(96, 48, 48, 49, 50, 51, 52)
TWELL_WGMMA_16_BIT(112, 56, 56, 57, 58, 59, 60)
TWELL_WGMMA_16_BIT(128, 64, 64, 65, 66, 67, 68)
TWELL_WGMMA_16_BIT(160, 80, 80, 81, 82, 83, 84)
TWELL_WGMMA_16_BIT(176, 88, 88, 89, 90, 91, 92)
TWELL_WGMMA_16_BIT(192, 96, 96, 97, 98, 99, 100)
TWELL_WGMMA_16_BIT(208, 104, 104, 105, 106, 107, 108)
TWELL_WGMMA_16_BIT(224, 112, 112, 113, 114, 115, 116)
TWELL_WGMMA_16_BIT(256, 128, 128, 129, 130, 131, 132)

#define TWELL_WGMMA_E4M3(n, sums, p0, p1, p2)                                                                        \
  template <>                                                                                                        \
  struct Wgmma<__nv_fp8_e4m3, n, 0, 0> {                                                                             \
    static __device__ __forceinline__ void multiply(float* d, uint64_t a, uint64_t b, int accumulate) {              \
      asm volatile(                                                                                                  \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #p2 ", 0;\n"                                                          \
          "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" TWELL_R##sums "}, %" #p0 ", %" #p1            \
          ", p, 1, 1;\n}\n"                                                                                          \
          : TWELL_D##sums                                                                                            \
          : "l"(a), "l"(b), "r"(accumulate));                                                                        \
    }                                                                                                                \
  };

TWELL_WGMMA_E4M3(64, 32, 32, 33, 34)
TWELL_WGMMA_E4M3(96, 48, 48, 49, 50)
TWELL_WGMMA_E4M3(128, 64, 64, 65, 66)
TWELL_WGMMA_E4M3(192, 96, 96, 97, 98)
TWELL_WGMMA_E4M3(256, 128, 128, 129, 130)

#define TWELL_WGMMA_OF_REGISTERS(type, ptx, n, sums, p0, p1, p2, p3, p4, p5)                                         \
  template <int TransB>                                                                                              \
  struct WgmmaOfRegisters<type, n, TransB> {                                                                         \
    static __device__ __forceinline__ void multiply(float* d, const uint32_t (&a)[4], uint64_t b) {                  \
      asm volatile(                                                                                                  \
          "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." ptx "." ptx " {" TWELL_R##sums "}, {%" #p0 ", %" #p1     \
          ", %" #p2 ", %" #p3 "}, %" #p4 ", 1, 1, 1, %" #p5 ";\n"                                                    \
          : TWELL_D##sums                                                                                            \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TransB));                                        \
    }                                                                                                                \
  };

TWELL_WGMMA_OF_REGISTERS(__nv_bfloat16, "bf16", 64, 32, 32, 33, 34, 35, 36, 37)
TWELL_WGMMA_OF_REGISTERS(__half, "f16", 64, 32, 32, 33, 34, 35, 36, 37)

// clang-format on

}  // namespace twell::sm90
