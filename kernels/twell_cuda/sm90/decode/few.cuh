// What Hopper's two decode kernels for 3 to 64 tokens share: a cluster's shared memory, and 8-bit weights as operands.
#pragma once

#include "common/quantized.cuh"
#include "decode/gate.cuh"
#include "sm90/common/chunk.h"
#include "sm90/common/primitives.cuh"
#include "sm90/common/wgmma.cuh"
#include "sm90/decode/few_plan.h"

namespace twell::decoding::few {

using sm90::smem_address;

constexpr int kRows = 64;        // of a product: tokens, those past the call's left as they are
constexpr int kStepBytes = 128;  // of a swizzled row: 64 elements

// What the kernels may take of a multiprocessor's shared memory so that a thread block of each fits; the system takes
// 1 KiB for each. The second takes what it needs, for up to 16 tokens or for more, and the first, with up to
// kFewNeurons neurons, what that leaves.
constexpr int kBothShared = 226 * 1024;
// Each gets whole units: a block that lacks a byte of one does not fit beside the other.
constexpr int in_shared_units(int bytes) { return (bytes + 127) / 128 * 128; }
constexpr int kDownDepth = 48;  // neurons of a stage of the second
constexpr int kDownControl = 3984;
constexpr int down_stage_bytes(bool sixteen) { return kDownDepth * ((sixteen ? 32 : kStepBytes) + kStepBytes); }
constexpr int down_exchange_bytes(bool sixteen) { return kFewColumns * (sixteen ? 16 : kRows) * 4; }
// Where a multiprocessor has no place for a block of the first kernel too, three blocks of four stages fit, or of six
// of 8-bit weights (`narrow`), whose columns take half as many bytes.
constexpr int down_stages(bool sixteen, bool beside, bool narrow) { return sixteen ? 8 : narrow ? 6 : beside ? 5 : 4; }
constexpr int down_shared(bool sixteen, bool beside, bool narrow) {
  const int columns = narrow ? kStepBytes / 2 : 0;
  return down_stages(sixteen, beside, narrow) * (down_stage_bytes(sixteen) - kDownDepth * columns) +
         down_exchange_bytes(sixteen) + kDownControl + (narrow ? kFewColumns * 4 : 0);
}

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

// The same, counted by the barrier that lies there at that address here.
__device__ __forceinline__ void send_at_rank(uint32_t shared, int rank, const float* v, uint64_t* barrier) {
  asm volatile(
      "{\n.reg .b32 remote, counting;\nmapa.shared::cluster.u32 remote, %0, %2;\n"
      "mapa.shared::cluster.u32 counting, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [remote], {%3, %4, %5, %6}, [counting];\n}\n" ::"r"(
          shared),
      "r"(smem_address(barrier)), "r"(rank), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
      : "memory");
}

// All that the cluster's thread blocks send for the barrier's first phase is there.
__device__ __forceinline__ void wait_for_sent(uint64_t* barrier) {
  asm volatile(
      "{\n.reg .pred done;\nwait:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra wait;\n}\n" ::"r"(smem_address(barrier))
      : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t shared, const float* v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}

// Whether a barrier is in its second phase, or in any later even one.
__device__ __forceinline__ bool is_over(uint64_t* barrier) {
  uint32_t over;
  asm volatile(
      "{\n.reg .pred over;\nmbarrier.test_wait.parity.shared::cta.b64 over, [%1], 0;\nselp.b32 %0, 1, 0, over;\n}\n"
      : "=r"(over)
      : "r"(smem_address(barrier))
      : "memory");
  return over != 0;
}

// Four 8 x 8 matrices of 2-byte elements; lane 8 m + i gives matrix m's row i of 16 bytes.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void prefetch_row(const char* row, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(row), "r"(bytes) : "memory");
}

// 8-bit weights in shared memory: 64 bytes a row, as boxes with 64-byte swizzle leave them, and how they become
// operands.

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
