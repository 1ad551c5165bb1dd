// First of the two kernels for up to kMidMaxTokens tokens: relu(x Wg^T + bg), and from it
// h = relu(gate) * (x Wu^T + bu) for the active neurons, into their columns.
//
// A thread block owns 128 tokens and a range of neurons, a few passes of kNeurons; there are so many blocks that they
// fill the GPU once. After the gate it knows which of its neurons any of the tokens activates, and their rows of Wu
// follow over the same x. In a cluster of two, both blocks have the same tokens: each fetches half of x for both. Rows
// of Wg do not depend on the kernel before, so the ring has them before that has ended.

#include "sm90/mid/gate.cuh"
#include "sm90/mid/up.cuh"

namespace twell::sm90 {
namespace {

using namespace mid;

// The thread that fetches boxes: x and Wg, then x again for each pass over rows of Wu.
template <int kNeurons>
__device__ __forceinline__ void fetch(const Arguments& a, const CUtensorMap* x_map, const CUtensorMap* gate_map,
                                      Control& c, uint8_t* stages, Ring ring, int block, int first, int rank, int steps,
                                      int early) {
  using S = Shape<kNeurons>;
  constexpr int kBytes = S::kStageBytes;
  const auto load_x = [&](int step) {
    load_box_multicast(stages + ring.stage * kBytes + rank * kHalfBytes, x_map, step * kDepth,
                       block * kBlockTokens + rank * kHalfTokens, ring.full + ring.stage, (1 << kCluster) - 1);
  };
  for (int pass = 0; pass < a.passes; ++pass) {
    for (int step = 0; step < steps; ++step, ring.advance()) {
      if (pass > 0 || step >= early) {
        ring.wait_empty();
        barrier_arrive_expect(ring.full + ring.stage, S::kGateBytes);
        load_box(stages + ring.stage * kBytes + kTokenBytes, gate_map, step * kDepth, first + pass * kNeurons,
                 ring.full + ring.stage);
      }
      load_x(step);
    }
  }
  if (a.up == nullptr) return;
  for (int step = 0; step < steps; ++step, ring.advance()) {
    ring.wait_empty();
    barrier_arrive_expect(ring.full + ring.stage, kTokenBytes);
    load_x(step);
  }
  barrier_wait(&c.listed, 0);
  // More passes than one may be wanted here and not in the other block.
  for (int start = S::kUpRows; start < c.count; start += S::kUpRows) {
    for (int step = 0; step < steps; ++step, ring.advance()) {
      ring.wait_empty();
      barrier_arrive_expect(ring.full + ring.stage, kTokenBytes);
      for (int half = 0; half < 2; ++half) {
        load_box(stages + ring.stage * kBytes + half * kHalfBytes, x_map, step * kDepth,
                 block * kBlockTokens + half * kHalfTokens, ring.full + ring.stage);
      }
    }
  }
}

template <typename T, int kNeurons>
__global__ void __launch_bounds__(kThreads, 1)
    mid_gate_up_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap gate_map,
                       const Arguments a) {
#if defined(TWELL_SM90_DEVICE)
  using S = Shape<kNeurons>;
  extern __shared__ uint8_t raw_shared[];
  uint8_t* const stages = raw_shared + (-smem_address(raw_shared) & 1023);
  uint8_t* const turn = stages + S::kStages * S::kStageBytes;
  Control& c = *reinterpret_cast<Control*>(turn + S::kTurnBytes);
  const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread / 32, 0), rank = cluster_rank();
  const int block = static_cast<int>(blockIdx.x) / a.ranges;
  const int own = a.passes * kNeurons, first = static_cast<int>(blockIdx.x) % a.ranges * own;
  const int steps = (a.hidden + kDepth - 1) / kDepth, early = min(S::kStages, steps);
  const Ring ring(c.full, c.empty, S::kStages);
  const bool fetches = thread == kThreads - 32;
  launch_dependents();
  if (fetches) {
    a.trace.mark(0);
    prefetch_map(&x_map);
    prefetch_map(&gate_map);
    for (int s = 0; s < S::kStages; ++s) {
      barrier_init(c.full + s, 1);
      barrier_init(c.empty + s, kWarps * kCluster);
      barrier_init(c.copied + s, kGatherers);
    }
    barrier_init(&c.gates_stored, kWarps);
    barrier_init(&c.gates_full, kGatherers);
    barrier_init(&c.gates_empty, kWarps);
    barrier_init(&c.listed, 1);
    fence_barrier_init();
    for (int step = 0; step < early; ++step) {
      barrier_arrive_expect(c.full + step, S::kGateBytes);
      load_box(stages + step * S::kStageBytes + kTokenBytes, &gate_map, step * kDepth, first, c.full + step);
    }
  }
  __syncwarp();
  cluster_sync();
  wait_for_previous();
  if (fetches) a.trace.mark(1);

  const Ring up_ring = ring_at(ring, a.passes * steps);
  if (warp < kWarps) {
    multiply_gate<T, kNeurons>(a, c, smem_address(stages), smem_address(turn), ring, block, first, steps);
    if (thread == 0) a.trace.mark(3);
    if (a.up != nullptr) {
      named_barrier<kMultipliers + kGatherers>(kListBarrier);
      if (thread == 0) a.trace.mark(4);
      multiply_up<T, kNeurons>(a, c, smem_address(stages), smem_address(turn), up_ring, block, first, steps, rank);
      if (thread == 0) a.trace.mark(6);
    }
  } else if (warp < kWarps + kGatherers / 32) {
    if (a.up != nullptr) {
      named_barrier<kMultipliers + kGatherers>(kMaskBarrier);
      if (warp == kWarps) make_list(c, own);
      named_barrier<kMultipliers + kGatherers>(kListBarrier);
      if (thread == kMultipliers) barrier_arrive(&c.listed);
      gather<T, kNeurons>(a, c, smem_address(stages), smem_address(turn), up_ring, block, first, steps);
    }
  } else if (fetches) {
    fetch<kNeurons>(a, &x_map, &gate_map, c, stages, ring, block, first, rank, steps, early);
  }
  __syncwarp();
  cluster_sync();  // the other block may still write here and arrive at these barriers
#endif
}

template <typename T, int kNeurons>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const MidPlan& plan, cudaStream_t stream) {
  return launch_gate_up(mid_gate_up_kernel<T, kNeurons>, chunk.active.blocks * plan.ranges, kThreads, kNeurons,
                        Shape<kNeurons>::kShared, ffn, chunk, plan, stream);
}

template <typename T>
cudaError_t launch_type(const Ffn& ffn, const Chunk& chunk, const MidPlan& plan, cudaStream_t stream) {
  switch (plan.neurons) {
    case 96: return launch<T, 96>(ffn, chunk, plan, stream);
    case 128: return launch<T, 128>(ffn, chunk, plan, stream);
    case 176: return launch<T, 176>(ffn, chunk, plan, stream);
    default: return launch<T, 192>(ffn, chunk, plan, stream);
  }
}

}  // namespace

bool plan_mid(const Ffn& ffn, const Device& device, MidPlan* plan) {
  const int64_t blocks = (ffn.tokens + kBlockTokens - 1) / kBlockTokens;
  int64_t best_cost = INT64_MAX;
  for (const int neurons : {96, 128, 176, 192}) {
    for (int passes = 1; passes * neurons <= kMidMaxOwn; ++passes) {
      const int own = passes * neurons, ranges = ((ffn.width + own - 1) / own + kCluster - 1) / kCluster * kCluster;
      if (blocks * ranges > device.sm_count / kCluster * kCluster) continue;
      if (int64_t{own} * ffn.hidden > kMidMaxWork) continue;
      // What shared memory takes for a step, in 128 bytes: x once written and once read, rows once and twice. A quarter
      // of the neurons are taken to be active.
      const int64_t cost = passes * (256 + 3 * neurons) + 256 + 3 * own / 4;
      if (cost < best_cost) *plan = {neurons, passes, ranges}, best_cost = cost;
    }
  }
  return best_cost < INT64_MAX;
}

cudaError_t launch_mid_gate_up(const Ffn& ffn, const Chunk& chunk, const MidPlan& plan, cudaStream_t stream) {
  if (plan.half) return launch_mid_half_gate_up(ffn, chunk, plan, stream);
  return ffn.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(ffn, chunk, plan, stream)
                                       : launch_type<__half>(ffn, chunk, plan, stream);
}

}  // namespace twell::sm90
