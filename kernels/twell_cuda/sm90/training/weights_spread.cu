// The pairs of heavy neurons as rows of all tokens' values, zero where there is none: what the dense products of
// sm90/training/weights_heavy.cu take.

#include "sm90/common/launch.h"
#include "sm90/common/primitives.cuh"
#include "sm90/common/workspace.h"
#include "sm90/training/weights.h"

namespace twell::sm90 {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kResident = 4;  // thread blocks that an SM's shared memory holds
constexpr int kSegmentBlocks = 64, kSegment = kSegmentBlocks * kBlockTokens;  // tokens of a row in shared memory

struct Arguments {
  Sorted sorted;
  Heavy heavy;
  Plan* plan;
  const int64_t* kept;
  void* b_gate;
  void* b_up;
  int64_t stride;  // of the rows
  int width;
  bool beside;
};

template <typename T>
__device__ __forceinline__ float value_of(uint16_t bits) {
  return unpack<T>(bits).x;
}

// Thread blocks take one heavy neuron after the other, and also sum the biases' gradients. dx ends on some SMs before
// others: as many thread blocks as these hold do most of the work there.
template <typename T, bool kGated>
__global__ void __launch_bounds__(kThreads, kResident) spread_kernel(const Arguments a) {
#if defined(TWELL_SM90_DEVICE)
  constexpr int kMatrices = kGated ? 3 : 2;
  extern __shared__ uint4 raw_rows[];
  __shared__ float2 warp_sums[kWarps];
  __shared__ int taken;
  uint16_t* const rows = reinterpret_cast<uint16_t*>(raw_rows);  // (kMatrices, kSegment)
  launch_dependents();
  if (!a.beside) wait_for_previous();
  const int count = __ldcg(&a.plan->heavy);
  const int64_t kept = __ldcg(a.kept);
  const uint16_t* const h = static_cast<const uint16_t*>(a.sorted.h);
  for (;;) {
    __syncthreads();  // everyone has the row before, and its sums
    if (threadIdx.x == 0) taken = atomicAdd(&a.plan->next_heavy, 1);
    __syncthreads();
    const int row = taken;
    if (row >= count) break;
    const int neuron = __ldcg(a.heavy.neurons + row);
    float bias_gate = 0.0f, bias_up = 0.0f;
    for (int64_t block = 0; block < kept; block += kSegmentBlocks) {
      const int64_t end_block = min(block + kSegmentBlocks, kept), first_token = block * kBlockTokens;
      const int tokens = static_cast<int>(end_block - block) * kBlockTokens;
      const uint32_t begin = __ldcg(a.sorted.places + block * a.width + neuron);
      const uint32_t end = end_block < kept ? __ldcg(a.sorted.places + end_block * a.width + neuron)
                                            : static_cast<uint32_t>(__ldcg(a.sorted.first + neuron + 1));
      __syncthreads();  // the segment before has left
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) {
        for (int i = threadIdx.x; i < tokens / 8; i += kThreads) raw_rows[m * (kSegment / 8) + i] = uint4{};
      }
      __syncthreads();
      for (uint32_t i = begin + threadIdx.x; i < end; i += kThreads) {
        const uint2 pair = __ldcg(a.sorted.pairs + i);
        const int64_t token = pair.x - first_token;
        const uint16_t values[3] = {__ldcg(h + i), static_cast<uint16_t>(pair.y), static_cast<uint16_t>(pair.y >> 16)};
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) rows[m * kSegment + token] = values[m];
        bias_gate += value_of<T>(values[1]);
        if constexpr (kGated) bias_up += value_of<T>(values[2]);
      }
      __syncthreads();
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) {
        uint4* to = reinterpret_cast<uint4*>(static_cast<uint16_t*>(a.heavy.factors[m]) + row * a.stride + first_token);
        for (int i = threadIdx.x; i < tokens / 8; i += kThreads) to[i] = raw_rows[m * (kSegment / 8) + i];
      }
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
      bias_gate += __shfl_xor_sync(~0u, bias_gate, d);
      bias_up += __shfl_xor_sync(~0u, bias_up, d);
    }
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = {bias_gate, bias_up};
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int w = 1; w < kWarps; ++w) bias_gate += warp_sums[w].x, bias_up += warp_sums[w].y;
      const auto store = [&](void* to, float sum) {
        if (to != nullptr) static_cast<uint16_t*>(to)[neuron] = static_cast<uint16_t>(pack<T>(sum, 0.0f));
      };
      store(a.b_gate, bias_gate);
      if constexpr (kGated) store(a.b_up, bias_up);
    }
  }
  if (a.beside) wait_for_previous();  // whoever waits for this waits for that too
#endif
}

template <typename T>
cudaError_t launch(const Arguments& a, bool gated, const Device& device, cudaStream_t stream) {
  const int bytes = (gated ? 3 : 2) * kSegment * 2, grid = std::min(a.heavy.rows(), kResident * device.sm_count);
  return gated ? launch_kernel(spread_kernel<T, true>, grid, kThreads, 1, bytes, stream, a)
               : launch_kernel(spread_kernel<T, false>, grid, kThreads, 1, bytes, stream, a);
}

}  // namespace

cudaError_t launch_spread(const Ffn& ffn, const State& state, const Sorted& sorted, const Gradients& out,
                          const Scratch& scratch, bool beside, const Device& device, cudaStream_t stream) {
  const Arguments arguments{
      sorted,    scratch.heavy, scratch.plan, state.totals, out.b_gate, out.b_up, count_blocks(ffn) * kBlockTokens,
      ffn.width, beside};
  const bool gated = ffn.gated();
  return ffn.dtype == DType::kBFloat16 ? launch<__nv_bfloat16>(arguments, gated, device, stream)
                                       : launch<__half>(arguments, gated, device, stream);
}

}  // namespace twell::sm90
