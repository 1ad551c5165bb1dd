// Hopper's building blocks: barriers in shared memory, bulk tensor copies, matrix descriptors. PTX ISA 8.x.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

// Device code of these files is for sm_90a alone; for other architectures the kernels compile to nothing.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TWELL_SM90_DEVICE 1
#else
#pragma nv_diag_suppress 177  // an empty kernel leaves its functions unused
#endif

namespace twell::sm90 {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals));
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
               : "memory");
}

// Arrives once this thread's cp.async copies so far have landed.
__device__ __forceinline__ void barrier_arrive_on_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nwait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n}\n" ::"r"(smem_address(barrier)),
      "r"(parity)
      : "memory");
}

// Whether a wait would end at once; it may say no although it would.
__device__ __forceinline__ bool barrier_passed(uint64_t* barrier, uint32_t parity) {
  uint32_t passed;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}\n"
      : "=r"(passed)
      : "r"(smem_address(barrier)), "r"(parity)
      : "memory");
  return passed != 0;
}

// Shared memory written by ordinary stores or cp.async, before tensor cores or bulk copies touch it.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

template <int Threads>
__device__ __forceinline__ void named_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}

// Counts as `Threads` of a named barrier without waiting there.
template <int Threads>
__device__ __forceinline__ void named_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}

template <int Registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// Of one fetching and two multiplying warpgroups: a block starts with what 384 threads of 168 registers have, and
// taking more than that would wait for ever.
constexpr bool check_registers(int fetch, int multiply) { return fetch + 2 * multiply <= 3 * 168; }

// Programmatic dependent launch: the next kernel's blocks may start; and: the previous kernels' writes are visible.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies a box whose corner is (row, column) and adds its bytes to the barrier.
__device__ __forceinline__ void load_box(void* shared, const CUtensorMap* map, int column, int row, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          smem_address(shared)),
      "l"(map), "r"(column), "r"(row), "r"(smem_address(barrier))
      : "memory");
}

// A run of bytes, a multiple of 16 from and to multiples of 16.
__device__ __forceinline__ void load_bytes(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   smem_address(shared)),
               "l"(global), "r"(bytes), "r"(smem_address(barrier))
               : "memory");
}

// A box into the same place of every thread block of the cluster that `mask` names, and onto its barrier.
__device__ __forceinline__ void load_box_multicast(void* shared, const CUtensorMap* map, int column, int row,
                                                   uint64_t* barrier, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(smem_address(shared)),
      "l"(map), "r"(column), "r"(row), "r"(smem_address(barrier)), "h"(mask)
      : "memory");
}

// Arrives at the same barrier of another thread block of the cluster.
__device__ __forceinline__ void barrier_arrive_at(uint64_t* barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(smem_address(barrier)),
      "r"(rank)
      : "memory");
}
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// 16 bytes by cp.async; zeros where `valid` is false.
__device__ __forceinline__ void copy_16(uint32_t shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// 4 bytes by cp.async, through L1; zeros where `valid` is false.
__device__ __forceinline__ void copy_4(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(valid ? 4 : 0)
               : "memory");
}

// 16 bytes, or 8, which go through L1.
template <int kBytes>
__device__ __forceinline__ void copy(uint32_t shared, const void* global) {
  static_assert(kBytes == 16 || kBytes == 8);
  if constexpr (kBytes == 16) {
    copy_16(shared, global);
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared), "l"(global) : "memory");
  }
}

// This thread's copies have landed.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// For n < rows, without a branch: 16 bytes by cp.async, zeros where they are not valid.
__device__ __forceinline__ void copy_16_if(int n, int rows, uint32_t shared, const void* global, bool valid) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.lt.s32 wanted, %3, %4;\n"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16, %2;\n}\n" ::"r"(shared),
      "l"(global), "r"(valid ? 16 : 0), "r"(n), "r"(rows)
      : "memory");
}

// A shared-memory operand with 128-byte swizzle: rows of 128 bytes, 8 rows to a group of 1,024 bytes.
// `chunk_bytes` is the distance between chunks of 64 along M or N, where M or N is contiguous; unused where K is.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t shared, int chunk_bytes) {
  constexpr uint64_t kSwizzle128 = 1, kGroupBytes = 1024;
  return static_cast<uint64_t>((shared & 0x3FFFF) >> 4) | static_cast<uint64_t>(chunk_bytes >> 4) << 16 |
         (kGroupBytes >> 4) << 32 | kSwizzle128 << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Four 8 x 8 matrices of 2-byte elements between registers and shared rows of 16 bytes; lane 8 m + i gives matrix m's
// row i. Transposed: a register pair's matrix column is a shared row.
__device__ __forceinline__ void store_matrices_transposed(uint32_t shared, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
__device__ __forceinline__ void store_matrices(uint32_t shared, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}
// Two of them; lane 8 m + i, of the first 16, gives matrix m's row i.
__device__ __forceinline__ void load_two_matrices_transposed(uint32_t (&r)[2], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t shared) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared)
               : "memory");
  return v;
}

// Two values rounded to T in one word, the first in its low half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// max(value, 0) that keeps NaN, as relu does, and never gives -0.
__device__ __forceinline__ float relu(float value) {
  float result;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(value));
  return result;
}

template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t word);
template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t word) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u)};
}
template <>
__device__ __forceinline__ float2 unpack<__half>(uint32_t word) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }

// A ring of shared-memory stages between one producer and its consumers.
struct Ring {
  uint64_t* full;
  uint64_t* empty;
  int stages;
  int stage = 0;
  uint32_t phase = 0;

  __device__ Ring(uint64_t* full_barriers, uint64_t* empty_barriers, int count)
      : full(full_barriers), empty(empty_barriers), stages(count) {}
  __device__ __forceinline__ void wait_full() const { barrier_wait(full + stage, phase); }
  __device__ __forceinline__ void wait_empty() const { barrier_wait(empty + stage, phase ^ 1); }
  __device__ __forceinline__ bool next_is_full() const {
    return stage + 1 == stages ? barrier_passed(full, phase ^ 1) : barrier_passed(full + stage + 1, phase);
  }
  __device__ __forceinline__ int previous() const { return stage == 0 ? stages - 1 : stage - 1; }
  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace twell::sm90
