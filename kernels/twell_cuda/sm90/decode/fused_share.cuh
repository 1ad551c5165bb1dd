// What a thread block of the fused decode kernel leaves for the others: its share of y in the workspace, 16 bytes at a
// time: two columns and the call's seal, 64 bits that no earlier call has used. Whoever reads waits for seals, so no
// fence and no counter stand between a share and its readers (sm90/decode/fused_sum.cuh). The next call's blocks may be
// there already, but write nothing before all of this one have ended: no share is overwritten while it is read. In a
// quiet kernel a block stores no share of zeros, but its seal in a word of its own, as soon as it knows.
//
// Where other kernels have pushed the shares' lines out of L2, a look at one not yet written fetches it from memory. So
// a block may write its lines ahead ("warm"): with no seal, once the kernels ahead have ended and so nobody reads them
// any more, and by the very threads that later store the share there. Two stores of one thread to one address take
// effect in order, and 16 bytes are written and read as one: what a reader finds is an older call's seal, none, or this
// call's with its columns. "None" is 0; of all 2^64 pairs of a word and a call one has that seal.
//
// A block that waits for others needs them to run. That is counted as they start; one that has waited for long while
// others have not even started gives up, and the last block to start does the work of all that gave up. So nothing
// hangs where other work holds multiprocessors.
#pragma once

#include "sm90/decode/fused.cuh"

namespace twell::decoding::fused {

// One word for each workspace, as two calls under way at once have two: calls so far (32 bits), blocks of this call
// that have started (16), blocks that gave up (16). Each call adds 65,536 to the blocks, so it leaves nothing to
// reset.
constexpr int kMeetings = 65536;
constexpr int kCallShift = 32;
constexpr unsigned long long kOneBlock = 1ull << 16, kGaveUp = 1;
static __device__ unsigned long long meetings[kMeetings];

#if defined(TWELL_SM90_DEVICE)

// By the word's address, not its index: a process may have loaded this code twice.
__device__ __forceinline__ uint64_t seal_of(const unsigned long long* word, uint32_t call) {
  uint64_t v = (reinterpret_cast<uint64_t>(word) / sizeof *word << 32 | call) + 0x9e3779b97f4a7c15ull;
  v = (v ^ v >> 30) * 0xbf58476d1ce4e5b9ull;
  v = (v ^ v >> 27) * 0x94d049bb133111ebull;
  return v ^ v >> 31;
}

// What a block that starts adds.
__device__ __forceinline__ unsigned long long started_as(unsigned block, unsigned blocks) {
  return block == 0 ? kOneBlock * (65536 - (blocks - 1)) : kOneBlock;
}

// This block has started; says what the word was before. The answer takes a while: number_call() reads it later.
__device__ __forceinline__ unsigned long long check_in(const FusedParams& p) {
  return atomicAdd(meetings + p.meeting, started_as(blockIdx.x, gridDim.x));
}

// The call's seal; and, for the last block to start, how many gave up before.
__device__ __forceinline__ void number_call(const FusedParams& p, Control& c, unsigned long long before) {
  const unsigned long long after = before + started_as(blockIdx.x, gridDim.x);
  const bool last = after >> kCallShift != before >> kCallShift;
  const int gave_up = last ? static_cast<int>(before & (kOneBlock - 1)) : 0;
  if (gave_up > 0) atomicAdd(meetings + p.meeting, -(kGaveUp * gave_up));
  c.left_over = gave_up;
  c.seal = seal_of(meetings + p.meeting, static_cast<uint32_t>(before >> kCallShift));
  c.all_in = static_cast<int>(before >> kCallShift);  // until may_wait_on(): the call's number
}

// Whether all blocks have started, so that waiting ends; if not, this one has given up.
__device__ __forceinline__ bool may_wait_on(const FusedParams& p, const Control& c) {
  const unsigned long long before = atomicAdd(meetings + p.meeting, kGaveUp);
  const bool all = static_cast<int>(before >> kCallShift) != c.all_in;
  if (all) atomicAdd(meetings + p.meeting, -kGaveUp);
  return all;
}

__device__ __forceinline__ void store_sealed(uint4* to, float a, float b, uint64_t seal) {
  asm volatile(
      "{\n\t.reg .b64 v;\n\t.reg .b128 w;\n\tmov.b64 v, {%1, %2};\n\tmov.b128 w, {v, %3};\n\t"
      "st.relaxed.gpu.global.b128 [%0], w;\n\t}" ::"l"(to),
      "f"(a), "f"(b), "l"(seal)
      : "memory");
}

__device__ __forceinline__ void store_silence(uint64_t* to, uint64_t seal) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(seal) : "memory");
}

__device__ __forceinline__ uint64_t load_silence(const uint64_t* from) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}

struct Sealed {
  uint64_t columns, seal;
};

// Where `wanted`; else `v` stays.
__device__ __forceinline__ void load_sealed(Sealed& v, const uint4* from, bool wanted) {
  asm volatile(
      "{\n\t.reg .pred p;\n\t.reg .b128 w;\n\tsetp.ne.b32 p, %3, 0;\n\tmov.b128 w, {%0, %1};\n\t"
      "@p ld.relaxed.gpu.global.b128 w, [%2];\n\tmov.b128 {%0, %1}, w;\n\t}"
      : "+l"(v.columns), "+l"(v.seal)
      : "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
}

// Where a thread's columns of token `token` lie in its block's share: four times two, `hidden / kThreadColumns` apart.
__device__ __forceinline__ uint4* share_of(const FusedParams& p, int token) {
  return p.shares + (blockIdx.x * p.tokens + token) * (p.hidden / 2) + threadIdx.x;
}

__device__ __forceinline__ void store_share(const FusedParams& p, int token, const float (&y)[kThreadColumns],
                                            uint64_t seal) {
  const int threads = p.hidden / kThreadColumns;
  if (threadIdx.x >= threads) return;
#pragma unroll
  for (int i = 0; i < kThreadColumns / 2; ++i) {
    store_sealed(share_of(p, token) + i * threads, y[2 * i], y[2 * i + 1], seal);
  }
}

__device__ __forceinline__ void warm_share(const FusedParams& p) {
  constexpr uint64_t kNoSeal = 0;
  const float none[kThreadColumns] = {};
#pragma unroll 1
  for (int t = 0; t < p.tokens; ++t) store_share(p, t, none, kNoSeal);
}

#endif

}  // namespace twell::decoding::fused
