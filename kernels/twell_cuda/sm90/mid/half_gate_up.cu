// The first of the two kernels where a thread block's neurons all fit one pass of 64 tokens: relu(x Wg^T + bg), and
// from it h = relu(gate) * (x Wu^T + bu) for the active neurons, into their columns.
//
// A thread block owns 64 tokens and kNeurons neurons; there are so many blocks that they fill the GPU once. A cluster
// has the same neurons and neighbouring tokens: its blocks take turns to fetch rows of Wg for both. Then each knows its
// active neurons, and their rows of Wu follow over the same x, in the same shared memory but with more stages, as there
// are few of them. Columns of relu(gate) stay in shared memory until they become h.

#include "sm90/mid/half.cuh"
#include "sm90/mid/half_up.cuh"

namespace twell::sm90 {
namespace {

using namespace mid_half;

// The thread that fetches boxes: x and Wg, then x again for rows of Wu.
template <int kNeurons>
struct Fetcher {
  using S = Shape<kNeurons>;
  const Arguments& a;
  const CUtensorMap *x_map, *gate_map;
  Control& c;
  uint8_t* stages;
  int half, first, rank, steps, early;

  __device__ __forceinline__ void load_gate(int step, int stage) const {
    if (step % kCluster != rank) return;
    load_box_multicast(stages + stage * S::kStageBytes + kTokenBytes, gate_map, step * kDepth, first, c.full + stage,
                       (1 << kCluster) - 1);
  }
  __device__ __forceinline__ void load_x(int step, uint8_t* to, uint64_t* full) const {
    load_box(to, x_map, step * kDepth, half * kHalfTokens, full);
  }

  __device__ __forceinline__ void gate() const {
    Ring ring(c.full, c.empty, S::kStages);
    for (int step = 0; step < steps; ++step, ring.advance()) {
      if (step >= early) {
        ring.wait_empty();
        barrier_arrive_expect(ring.full + ring.stage, S::kStageBytes);
        load_gate(step, ring.stage);
      }
      load_x(step, stages + ring.stage * S::kStageBytes, ring.full + ring.stage);
    }
  }

  __device__ __forceinline__ void up() const {
    barrier_wait(&c.gate_multiplied, 0);
    for (int step = 0; step < early; ++step) {
      barrier_arrive_expect(c.up_full + step, kTokenBytes);
      load_x(step, stages + step * kTokenBytes, c.up_full + step);
    }
    barrier_wait(&c.listed, 0);
    Ring ring(c.up_full, c.up_empty, up_ring<kNeurons>(c.count).stages);
    const int up_end = up_steps(c.count, early, steps);
    for (int step = 0; step < up_end; ++step, ring.advance()) {
      if (step < early) continue;
      ring.wait_empty();
      barrier_arrive_expect(ring.full + ring.stage, kTokenBytes);
      load_x(step, stages + ring.stage * kTokenBytes, ring.full + ring.stage);
    }
  }
};

// By the four multiplying warps: columns of relu(gate) in shared memory, and which neurons each warp's tokens activate.
template <typename T, int kNeurons>
__device__ __forceinline__ void multiply_gate(const Arguments& a, Control& c, uint32_t stages, uint32_t turn, int half,
                                              int first, int steps) {
  using S = Shape<kNeurons>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Ring ring(c.full, c.empty, S::kStages);
  float sum[kNeurons / 2];
  for (int step = 0; step < steps; ++step, ring.advance()) {
    ring.wait_full();
    if (threadIdx.x == 0 && step == 0) a.trace.mark(2);
    const uint32_t stage = stages + ring.stage * S::kStageBytes;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      Wgmma<T, kNeurons, 0, 0>::multiply(sum, matrix_descriptor(stage + k * 32, 16),
                                         matrix_descriptor(stage + kTokenBytes + k * 32, 16), step + k);
    }
    wgmma_commit();
    wgmma_wait<1>();
    // Nobody waits for the last stages.
    if (step > 0 && step - 1 + S::kStages < steps && lane < kCluster) {
      barrier_arrive_at(ring.empty + ring.previous(), lane);
    }
  }
  wgmma_wait<0>();
  if (lane == 0) barrier_arrive(&c.gate_multiplied);

  uint32_t packed[kNeurons / 4];
  const int64_t token = static_cast<int64_t>(half) * kHalfTokens + warp * 16 + lane / 4;
  activate<T, kNeurons>(packed, sum, a, token, first);
  find_active<kNeurons>(packed, c.warp_masks[warp]);
  __syncwarp();
  named_arrive<kMultipliers + kGatherers>(kMaskBarrier);  // the list is made meanwhile
#pragma unroll
  for (int j = 0; j < kNeurons / 8; j += 2) {
    const uint32_t words[4]{packed[2 * j], packed[2 * j + 1], packed[2 * j + 2], packed[2 * j + 3]};
    store_matrices_transposed(turn_at(turn, 8 * j + lane / 16 * 8 + lane % 8, 2 * warp + (lane / 8 & 1)), words);
  }
}

template <typename T, int kNeurons>
__global__ void __launch_bounds__(kThreads, 1)
    mid_half_gate_up_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap gate_map,
                            const Arguments a) {
#if defined(TWELL_SM90_DEVICE)
  using S = Shape<kNeurons>;
  extern __shared__ uint8_t raw_shared[];
  uint8_t* const stages = raw_shared + (-smem_address(raw_shared) & 1023);
  const uint32_t shared = smem_address(stages), turn = shared + S::kRingBytes;
  Control& c = *reinterpret_cast<Control*>(stages + S::kRingBytes + S::kTurnBytes);
  const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread / 32, 0), rank = cluster_rank();
  const int group = static_cast<int>(blockIdx.x) / kCluster;
  const int half = group / a.ranges * kCluster + rank, first = group % a.ranges * kNeurons;
  const int steps = (a.hidden + kDepth - 1) / kDepth, early = min(S::kStages, steps);
  const bool fetches = thread == kThreads - 32;
  const Fetcher<kNeurons> fetcher{a, &x_map, &gate_map, c, stages, half, first, rank, steps, early};
  if (fetches) {
    a.trace.mark(0);
    prefetch_map(&x_map);
    prefetch_map(&gate_map);
    for (int s = 0; s < S::kStages; ++s) {
      barrier_init(c.full + s, 1);
      barrier_init(c.empty + s, kWarps * kCluster);
    }
    for (int s = 0; s < kMaxUpStages; ++s) {
      barrier_init(c.up_full + s, 1 + kGatherers);
      barrier_init(c.up_empty + s, kWarps);
    }
    barrier_init(&c.gate_multiplied, kWarps);
    barrier_init(&c.listed, 1);
    fence_barrier_init();
    for (int step = 0; step < early; ++step) barrier_arrive_expect(c.full + step, S::kStageBytes);
  }
  __syncwarp();
  cluster_sync();
  for (int step = 0; fetches && step < early; ++step) fetcher.load_gate(step, step);
  wait_for_previous();

  if (warp < kWarps) {
    multiply_gate<T, kNeurons>(a, c, shared, turn, half, first, steps);
    if (thread == 0) a.trace.mark(3);
    named_barrier<kMultipliers + kGatherers>(kListBarrier);
    if (thread == 0) a.trace.mark(4);
    if (a.up != nullptr) {
      multiply_up<T, kNeurons>(a, c, shared, turn, half, first, early, steps);
    } else {
      store_columns<T, kNeurons>(a, c, turn, half, first, [&](int n) { return static_cast<int>(c.list[n]); });
    }
    if (thread == 0) a.trace.mark(6);
  } else if (!fetches && warp < kWarps + kGatherers / 32) {
    named_barrier<kMultipliers + kGatherers>(kMaskBarrier);
    if (warp == kWarps) make_list<kNeurons>(a, c, half, first);
    named_barrier<kMultipliers + kGatherers>(kListBarrier);
    if (thread == kMultipliers) barrier_arrive(&c.listed);
    if (warp == kWarps) {
      __threadfence();  // the second kernel's blocks guess by what they see of the masks
      __syncwarp();
      launch_dependents();
    }
    if (a.up != nullptr) gather<kNeurons>(a, c, shared, first, early, steps);
  } else if (fetches) {
    a.trace.mark(1);
    fetcher.gate();
    if (a.up != nullptr) fetcher.up();
  }
  __syncwarp();
  cluster_sync();  // the other blocks may still arrive at these barriers
#endif
}

template <typename T, int kNeurons>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const MidPlan& plan, cudaStream_t stream) {
  return launch_gate_up(mid_half_gate_up_kernel<T, kNeurons>, chunk.active.blocks * 2 * plan.ranges, kThreads, kNeurons,
                        Shape<kNeurons>::kShared, ffn, chunk, plan, stream);
}

template <typename T>
cudaError_t launch_type(const Ffn& ffn, const Chunk& chunk, const MidPlan& plan, cudaStream_t stream) {
  switch (plan.neurons) {
    case 96: return launch<T, 96>(ffn, chunk, plan, stream);
    case 128: return launch<T, 128>(ffn, chunk, plan, stream);
    case 176: return launch<T, 176>(ffn, chunk, plan, stream);
    default: return launch<T, 256>(ffn, chunk, plan, stream);
  }
}

}  // namespace

bool plan_mid_half(const Ffn& ffn, const Device& device, MidPlan* plan) {
  const int64_t halves = (ffn.tokens + kBlockTokens - 1) / kBlockTokens * 2;
  for (const int neurons : {96, 128, 176, 256}) {
    const int ranges = ((ffn.width + 31) / 32 * 32 + neurons - 1) / neurons;  // masks are written to their last word
    if (halves * ranges > device.sm_count / kCluster * kCluster) continue;
    if (int64_t{neurons} * ffn.hidden > kMidMaxWork) return false;
    *plan = {neurons, 1, ranges, true};
    return true;
  }
  return false;
}

cudaError_t launch_mid_half_gate_up(const Ffn& ffn, const Chunk& chunk, const MidPlan& plan, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(ffn, chunk, plan, stream)
                                       : launch_type<__half>(ffn, chunk, plan, stream);
}

}  // namespace twell::sm90
