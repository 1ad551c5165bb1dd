// Second of the two kernels for up to kMidMaxTokens tokens: y = h Wd^T + bd over the neurons that a half block of 64
// tokens activates.
//
// A thread block owns 64 tokens and kHidden columns of y. All its threads list the active neurons; then one or two
// warpgroups gather their columns of h and rows of Wd, and as many multiply. Both operands lie in shared memory as they
// do in global memory, tokens and hidden units contiguous, and the tensor cores read them transposed.

#include "sm90/common/launch.h"
#include "sm90/common/primitives.cuh"
#include "sm90/common/wgmma.cuh"
#include "sm90/mid/down_fetch.cuh"
#include "sm90/mid/mid.h"

namespace twell::sm90 {
namespace {

using namespace mid_down;

// sum += h times listed rows; each warpgroup has its share of the columns.
template <typename T, int kHidden>
__device__ __forceinline__ void multiply(float (&sum)[Shape<kHidden>::kColumns / 2], Ring& ring, uint32_t stages,
                                         int listed) {
  using S = Shape<kHidden>;
  const int warpgroup = threadIdx.x / 128;
  const bool releases = threadIdx.x % 32 == 0;
  int held = -1;  // the stage that the products before these read
  for (int start = 0; start < listed; start += kDepth, ring.advance()) {
    ring.wait_full();
    fence_async_proxy();  // cp.async wrote, tensor cores read
    const uint32_t columns = stages + ring.stage * S::kStageBytes;
    const uint32_t rows = columns + (1 + warpgroup * (S::kColumns / 64)) * kPartBytes;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      Wgmma<T, S::kColumns, 1, 1>::multiply(sum, matrix_descriptor(columns + k * 2048, kPartBytes),
                                            matrix_descriptor(rows + k * 2048, kPartBytes), 1);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (held >= 0 && releases) barrier_arrive(ring.empty + held);
    held = ring.stage;
  }
  wgmma_wait<0>();
  if (held >= 0 && releases) barrier_arrive(ring.empty + held);
}

template <typename T, int kHidden>
__global__ void __launch_bounds__(Shape<kHidden>::kThreads, Shape<kHidden>::kBlocks)
    mid_down_kernel(const Arguments a) {
#if defined(TWELL_SM90_DEVICE)
  using S = Shape<kHidden>;
  extern __shared__ uint8_t raw_shared[];
  uint8_t* const shared = raw_shared + (-smem_address(raw_shared) & 1023);
  Control& c = *reinterpret_cast<Control*>(shared + S::kStages * S::kStageBytes + S::kMultipliers / 32 * kTurnBytes);
  const uint32_t stages = smem_address(shared);
  const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread / 32, 0);
  const int half_block = static_cast<int>(blockIdx.x) / a.slices;
  const int first_hidden = static_cast<int>(blockIdx.x) % a.slices * kHidden;
  launch_dependents();
  if (thread == 0) {
    a.trace.mark(0);
    for (int s = 0; s < S::kStages; ++s) {
      barrier_init(c.full + s, S::kFetchers);
      barrier_init(c.empty + s, S::kMultipliers / 32);
    }
    fence_barrier_init();
  }
  const bool guesses = a.guesses && a.active.words <= S::kThreads;  // a word a thread
  if (!guesses) wait_for_previous();
  Neurons<S::kThreads> neurons(a.active, a.width, c, half_block);  // its barrier shows the others too
  neurons.list(c, 0);
  Fetcher<T, kHidden> fetcher(a, c, stages, half_block, first_hidden);
  const bool fetches = warp >= S::kMultipliers / 32;
  if (guesses) {
    if (fetches) fetcher.ahead(min(neurons.total, kListed), false);
    wait_for_previous();
    if (fetches) fetcher.ahead(min(neurons.total, kListed), true);
  }
  if (thread == 0) a.trace.mark(1);
  int ready = guesses ? S::kStages * kDepth : 0;
  if (guesses && __syncthreads_or(neurons.changed())) {
    wait_for_copies();
    ready = 0;
    neurons = Neurons<S::kThreads>(a.active, a.width, c, half_block);
    neurons.list(c, 0);
  }
  Ring ring(c.full, c.empty, S::kStages);
  if (fetches) {
    for (int from = 0; from < neurons.total; from += kListed) {
      if (from > 0) neurons.list(c, from);
      fetcher.run(ring, min(kListed, neurons.total - from), from == 0 ? ready : 0);
    }
  } else {
    float sum[S::kColumns / 2];
#pragma unroll
    for (int i = 0; i < S::kColumns / 2; ++i) sum[i] = 0.0f;
    if (thread == 0) a.trace.mark(2);
    for (int from = 0; from < neurons.total; from += kListed) {
      if (from > 0) neurons.list(c, from);
#if defined(TWELL_MID_TRACE)
      ring.wait_full();
      if (thread == 0) a.trace.mark(3);
#endif
      multiply<T, kHidden>(sum, ring, stages, min(kListed, neurons.total - from));
    }
    if (thread == 0) a.trace.mark(5);
    const uint32_t turn = stages + S::kStages * S::kStageBytes + warp * kTurnBytes;
    store_sums<T, S::kColumns, true>(a, sum, turn, static_cast<int64_t>(half_block) * kHalfTokens + warp % 4 * 16,
                                     first_hidden + warp / 4 * S::kColumns);
    if (thread == 0) a.trace.mark(6);
  }
#endif
}

template <typename T, int kHidden>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const MidPlan& plan, cudaStream_t stream) {
  const int half_blocks = static_cast<int>((ffn.tokens + kHalfTokens - 1) / kHalfTokens);
  const int slices = (ffn.hidden + kHidden - 1) / kHidden;
  const Arguments arguments{chunk.active, ffn.down.data,  ffn.b_down, ffn.y,     ffn.tokens,
                            ffn.hidden,   ffn.width, slices,     plan.half, MidTrace::next()};
  return launch_with_carveout(kMidCarveout, mid_down_kernel<T, kHidden>, half_blocks * slices,
                              Shape<kHidden>::kThreads, 1, Shape<kHidden>::kShared, stream, arguments);
}

// Columns of y to a thread block, for the least time: rounds of what a step brings in.
int best_columns(const Ffn& ffn, const Device& device) {
  int best = 0;
  int64_t best_cost = INT64_MAX;
  for (const int columns : {256, 128, 64}) {
    const int64_t items = (ffn.tokens + kHalfTokens - 1) / kHalfTokens * ((ffn.hidden + columns - 1) / columns);
    const int64_t cost = (items + device.sm_count - 1) / device.sm_count * (kHalfTokens + columns);
    if (cost < best_cost) best = columns, best_cost = cost;
  }
  return best;
}

template <typename T>
cudaError_t launch_type(const Ffn& ffn, const Chunk& chunk, const Device& device, const MidPlan& plan,
                        cudaStream_t stream) {
  switch (best_columns(ffn, device)) {
    case 64: return launch<T, 64>(ffn, chunk, plan, stream);
    case 128: return launch<T, 128>(ffn, chunk, plan, stream);
    default: return launch<T, 256>(ffn, chunk, plan, stream);
  }
}

}  // namespace

cudaError_t launch_mid_down(const Ffn& ffn, const Chunk& chunk, const Device& device, const MidPlan& plan,
                            cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(ffn, chunk, device, plan, stream)
                                       : launch_type<__half>(ffn, chunk, device, plan, stream);
}

}  // namespace twell::sm90
