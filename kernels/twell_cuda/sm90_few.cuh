// What Hopper's two decode kernels for 17 to 64 tokens share: a cluster's shared memory, narrow products, timestamps.
#pragma once

#include "decode_gate.cuh"
#include "sm90_call.h"
#include "sm90_primitives.cuh"
#include "sm90_wgmma.cuh"

namespace twell::decoding::few {

using sm90::smem_address;

constexpr int kRows = 64;       // of a product: tokens, those past the call's left as they are
constexpr int kStepBytes = 128;  // of a swizzled row: 64 elements

// With this macro each thread block notes when it reaches each phase, and at the last place its multiprocessor, call by
// call; decode_check.cu prints them.
#if defined(TWELL_FEW_TRACE)
constexpr int kPhases = 8, kTracedBlocks = 512;
inline uint64_t* trace = nullptr;  // (kernels launched so far, kTracedBlocks, kPhases), advanced by each launch
#endif

// Where a kernel's blocks note the time; nothing without TWELL_FEW_TRACE.
struct Trace {
#if defined(TWELL_FEW_TRACE)
  uint64_t* times = nullptr;
  static Trace next() {
    Trace t{trace};
    if (trace != nullptr) trace += kTracedBlocks * kPhases;
    return t;
  }
  __device__ __forceinline__ void mark(int phase) const {
    if (times == nullptr || blockIdx.x >= kTracedBlocks) return;
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    times[blockIdx.x * kPhases + phase] = now;
  }
  __device__ __forceinline__ void start() const {
    mark(0);
    if (times == nullptr || blockIdx.x >= kTracedBlocks) return;
    uint32_t multiprocessor;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
    times[blockIdx.x * kPhases + kPhases - 1] = multiprocessor + 1;
  }
#else
  static Trace next() { return {}; }
  __device__ __forceinline__ void start() const {}
  __device__ __forceinline__ void mark(int) const {}
#endif
};

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Four numbers into the shared memory of another thread block of the cluster, at the address they would have here.
__device__ __forceinline__ void store_at_rank(uint32_t shared, int rank, const float* v) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.v4.f32 [remote], {%2, %3, %4, %5};\n}\n" ::"r"(shared),
      "r"(rank), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
      : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t shared, const float* v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}

__device__ __forceinline__ void prefetch_row(const char* row, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(row), "r"(bytes) : "memory");
}

}  // namespace twell::decoding::few

namespace twell::sm90 {

#define TWELL_NARROW_WGMMA(TYPE, PTX)                                                                                 \
  template <int TransA, int TransB>                                                                                   \
  struct Wgmma<TYPE, 16, TransA, TransB> {                                                                            \
    static __device__ __forceinline__ void multiply(float* d, uint64_t a, uint64_t b, int accumulate) {               \
      asm volatile(                                                                                                   \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"                                                                \
          "wgmma.mma_async.sync.aligned.m64n16k16.f32." PTX "." PTX " {%0, %1, %2, %3, %4, %5, %6, %7}"               \
          ", %8, %9, p, 1, 1, %11, %12;\n}\n"                                                                         \
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])            \
          : "l"(a), "l"(b), "r"(accumulate), "n"(TransA), "n"(TransB));                                               \
    }                                                                                                                 \
  };                                                                                                                  \
  template <int TransA, int TransB>                                                                                   \
  struct Wgmma<TYPE, 32, TransA, TransB> {                                                                            \
    static __device__ __forceinline__ void multiply(float* d, uint64_t a, uint64_t b, int accumulate) {               \
      asm volatile(                                                                                                   \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"                                                                \
          "wgmma.mma_async.sync.aligned.m64n32k16.f32." PTX "." PTX " "                                               \
          "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"                                    \
          ", %16, %17, p, 1, 1, %19, %20;\n}\n"                                                                       \
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),           \
            "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])      \
          : "l"(a), "l"(b), "r"(accumulate), "n"(TransA), "n"(TransB));                                               \
    }                                                                                                                 \
  };                                                                                                                  \
  template <int TransA, int TransB>                                                                                   \
  struct Wgmma<TYPE, 48, TransA, TransB> {                                                                            \
    static __device__ __forceinline__ void multiply(float* d, uint64_t a, uint64_t b, int accumulate) {               \
      asm volatile(                                                                                                   \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %26, 0;\n"                                                                \
          "wgmma.mma_async.sync.aligned.m64n48k16.f32." PTX "." PTX " "                                               \
          "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
          "%23}, %24, %25, p, 1, 1, %27, %28;\n}\n"                                                                   \
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),           \
            "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),     \
            "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])    \
          : "l"(a), "l"(b), "r"(accumulate), "n"(TransA), "n"(TransB));                                               \
    }                                                                                                                 \
  };
TWELL_NARROW_WGMMA(__nv_bfloat16, "bf16")
TWELL_NARROW_WGMMA(__half, "f16")
#undef TWELL_NARROW_WGMMA

}  // namespace twell::sm90
