// From each block's two bit masks the list of its active neurons.

#include "sm90_call.h"
#include "sm90_launch.h"
#include "sm90_primitives.cuh"

namespace twell::sm90 {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;

struct Matrix {
  const void* data;
  int64_t bytes;  // a multiple of 16
};

// Bytes in L2; a multiple of 16 from a multiple of 16 on.
__device__ __forceinline__ void ask_for(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// Three counts of up to 2^16 in one word: a sum of it is three sums.
__device__ __forceinline__ uint64_t count_classes(uint32_t first, uint32_t second) {
  return static_cast<uint64_t>(__popc(first & ~second)) | static_cast<uint64_t>(__popc(first & second)) << 21 |
         static_cast<uint64_t>(__popc(second & ~first)) << 42;
}
__device__ __forceinline__ Counts counts_of(uint64_t sums) {
  constexpr uint64_t kMask = (1 << 21) - 1;
  return {static_cast<int>(sums & kMask), static_cast<int>(sums >> 21 & kMask), static_cast<int>(sums >> 42)};
}

// Each lane's sum of the lanes before it.
__device__ __forceinline__ uint64_t sum_before(uint64_t value, int lane) {
  uint64_t sum = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint64_t other = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += other;
  }
  return sum - value;
}

// A thread block for each block of tokens; each warp lists a run of words, 32 at a time, and in each word a lane the bit
// that is its own.
// With kAsk it first asks for all of the next kernel's matrix in L2: device memory is idle while the gate ends. With kOnce
// each lane keeps the first words that it counts.
template <bool kAsk, bool kOnce>
__global__ void __launch_bounds__(kThreads) list_kernel(const Chunk chunk, const Matrix next) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ uint64_t warp_sums[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Active& a = chunk.active;
  if constexpr (kAsk) {
    constexpr int64_t kPiece = 4096;
    for (int64_t at = (int64_t{blockIdx.x} * kWarps + warp) * kPiece; lane == 0 && at < next.bytes;
         at += int64_t{gridDim.x} * kWarps * kPiece) {
      const int64_t left = next.bytes - at;
      ask_for(static_cast<const char*>(next.data) + at, static_cast<uint32_t>(left < kPiece ? left : kPiece));
    }
  }
  launch_dependents();
  wait_for_previous();
  if (chunk.skipped()) return;
  const uint32_t* first_half = a.masks + static_cast<int64_t>(blockIdx.x) * 2 * a.words;
  const uint32_t* second_half = first_half + a.words;
  const int share = (a.words + kWarps - 1) / kWarps, begin = warp * share, end = min(a.words, begin + share);
  uint64_t count = 0;
  uint32_t kept_first = 0, kept_second = 0;
  if constexpr (kOnce) {
    if (begin + lane < end) kept_first = __ldcg(first_half + begin + lane), kept_second = __ldcg(second_half + begin + lane);
    count = count_classes(kept_first, kept_second);
  }
  for (int w = begin + lane + (kOnce ? 32 : 0); w < end; w += 32) {
    count += count_classes(__ldcg(first_half + w), __ldcg(second_half + w));
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) count += __shfl_xor_sync(~0u, count, d);
  if (lane == 0) warp_sums[warp] = count;
  __syncthreads();
  const uint64_t mine = lane < kWarps ? warp_sums[lane] : 0, before_warp = sum_before(mine, lane);
  const Counts counts = counts_of(__shfl_sync(~0u, before_warp + mine, 31));
  uint64_t rank = __shfl_sync(~0u, before_warp, warp);
  uint16_t* neurons = a.neurons + static_cast<int64_t>(blockIdx.x) * a.row;
  for (int start = begin; start < end; start += 32) {
    const int word = start + lane;
    uint32_t first = kept_first, second = kept_second;
    if (!kOnce || start > begin) {
      first = word < end ? __ldcg(first_half + word) : 0, second = word < end ? __ldcg(second_half + word) : 0;
    }
    const uint64_t words_count = count_classes(first, second);
    const uint64_t before = rank + sum_before(words_count, lane);
    rank = __shfl_sync(~0u, before + words_count, 31);
    for (int i = 0; i < min(32, end - start); ++i) {
      const uint32_t f = __shfl_sync(~0u, first, i), s = __shfl_sync(~0u, second, i), below = (1u << lane) - 1;
      const Counts at = counts_of(__shfl_sync(~0u, before, i) + count_classes(f & below, s & below));
      const bool in_first = f >> lane & 1, in_second = s >> lane & 1;
      if (in_first || in_second) {
        const int place = !in_second ? at.first_only
                          : in_first ? counts.first_only + at.both
                                     : counts.first_only + counts.both + at.second_only;
        neurons[place] = static_cast<uint16_t>((start + i) * 32 + lane);
      }
    }
  }
  if (threadIdx.x == 0) a.counts[blockIdx.x] = counts;
#endif
}

}  // namespace

cudaError_t launch_list(const Ffn&, const Chunk& chunk, const Device&, cudaStream_t stream) {
  return launch_kernel(list_kernel<false, false>, chunk.active.blocks, kThreads, 1, 0, stream, chunk, Matrix{});
}

cudaError_t launch_list_once(const Ffn& ffn, const Chunk& chunk, const Device&, cudaStream_t stream, bool ask) {
  const Matrix up{ffn.up, int64_t{ffn.width} * ffn.hidden * 2};
  return ask ? launch_kernel(list_kernel<true, true>, chunk.active.blocks, kThreads, 1, 0, stream, chunk, up)
             : launch_kernel(list_kernel<false, true>, chunk.active.blocks, kThreads, 1, 0, stream, chunk, up);
}

}  // namespace twell::sm90
