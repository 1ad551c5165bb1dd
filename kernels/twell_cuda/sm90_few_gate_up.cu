// First of Hopper's two decode kernels for 17 to 64 tokens: h = relu(x Wg^T + bg) * (x Wu^T + bu) for the active
// neurons, or relu(x Wu^T + bu) without a gate, into the workspace (masks as in decode_plan.cuh; h as (neuron, 8 *
// groups tokens)).
//
// A thread block owns kNeurons neurons and all of the hidden size. Rows of weights and x come through two rings of
// stages of 64 hidden units each; weights do not depend on the kernel ahead, so their ring fills before that has ended.
// Tokens are the 64 rows of the product, whose steps four warpgroups share out. Once it is known which neurons any
// token activates, their rows of Wu follow over the same x: gathered, or by boxes where most are active.

#include "sm90_few_tile.cuh"

namespace twell::decoding {
namespace {

using namespace few;

// 64 registers, so that blocks of the down kernel fit beside this one.
template <typename Half, int kNeurons>
__global__ void __launch_bounds__(1024, 1) few_gate_up_kernel(const __grid_constant__ FewParams p) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ uint8_t raw_shared[];
  uint8_t* const x_bytes = raw_shared + (-smem_address(raw_shared) & 1023);
  uint8_t* const weight_bytes = x_bytes + kXBytes;
  float* const gate = reinterpret_cast<float*>(weight_bytes + kWeightBytes);  // (64 tokens, kGateRow)
  Control<kNeurons>& c = *reinterpret_cast<Control<kNeurons>*>(gate + kRows * kGateRow<kNeurons>);
  const uint32_t x = smem_address(x_bytes), weights = smem_address(weight_bytes);
  const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread / 32, 0), lane = thread % 32;
  const int first = blockIdx.x * kNeurons, inside = min(kNeurons, p.width - first);
  const int steps = (p.row_bytes + kStepBytes - 1) / kStepBytes;
  const bool gated = p.up != nullptr;
  const uint32_t x_stage = p.groups * 8 * kStepBytes;
  constexpr uint32_t kBoxStage = kNeurons * kStepBytes;
  sm90::launch_dependents();
  if (thread == 0) p.trace.start();
  if (lane == 0) {  // one lane after the other would take turns
    for (int i = warp; i < 6 * kMaxStages; i += kThreads / 32) {
      const int kind = i / kMaxStages;
      sm90::barrier_init(c.x_full + i, kind == 4 ? 32 : kind % 2 == 1 ? 4 : 1);  // a warp's copies; a warpgroup's warps
    }
    sm90::fence_barrier_init();
  }
  if (thread < kNeurons) {
    c.gate_bias[thread] = bias_of<Half>(p.b_gate, first + thread, p.width);
    c.up_bias[thread] = bias_of<Half>(p.b_up, first + thread, p.width);
    c.active[thread / 32] = 0;
  }
  __syncthreads();
  Ring x_ring(c.x_full, c.x_empty, stages_in(kXBytes, x_stage));
  Ring box_ring(c.box_full, c.box_empty, stages_in(kWeightBytes, kBoxStage));

  if (warp == kThreads / 32 - 1) {
    const int ahead = gated ? min(steps, x_ring.stages) : 0;
    if (lane == 0) {
      sm90::prefetch_map(&p.x_map);
      sm90::prefetch_map(&p.up_map);
      sm90::wait_for_previous();
      load_boxes(x_ring, x_bytes, x_stage, &p.x_map, 0, 0, steps);
      // For up, as far as there is room; whether it is wanted shows later.
      load_boxes(x_ring, x_bytes, x_stage, &p.x_map, 0, 0, ahead);
    }
    __syncwarp();
    sm90::named_barrier<kThreads>(kTileBarrier);
    const Active<kNeurons> active(c, inside, gated);
    if (lane > 0 || !gated) return;
    if (active.count > 0) {
      load_boxes(x_ring, x_bytes, x_stage, &p.x_map, 0, ahead, steps);
    } else {  // a copy must not outlive its thread block
      Ring pending = ring_at(x_ring, steps);
#pragma unroll 1
      for (int step = 0; step < ahead; ++step, pending.advance()) pending.wait_full();
    }
    return;
  }

  // A stage for rows that are gathered has place for no more than those.
  const auto copy_stage = [](const Active<kNeurons>& a) {
    return static_cast<uint32_t>((a.rows + 7) / 8 * 8 * kStepBytes);
  };
  const auto copy_ring = [&](uint32_t stage) {
    return Ring(c.copy_full, c.copy_empty, stages_in(kWeightBytes, stage));
  };

  if (warp >= kMultipliers / 32) {
    const int index = thread - kMultipliers;
    if (index == 0) load_boxes(box_ring, weight_bytes, kBoxStage, &p.gate_map, first, 0, steps);
    __syncwarp();
    sm90::named_barrier<kThreads>(kTileBarrier);
    const Active<kNeurons> active(c, inside, gated);
    if (active.count == 0) return;
    if (active.boxes && index == 0) {
      load_boxes(box_ring, weight_bytes, kBoxStage, &p.up_map, first, 0, min(steps, box_ring.stages));
    }
    __syncwarp();
    if (index < kNeurons) c.list[active.place(index)] = static_cast<uint16_t>(index);
    sm90::named_barrier<kMultipliers + kFetchers>(kListBarrier);
    if (active.boxes && index == 0) {
      load_boxes(box_ring, weight_bytes, kBoxStage, &p.up_map, first, min(steps, box_ring.stages), steps);
    }
    if (gated && !active.boxes) {
      const uint32_t stage = copy_stage(active);
      copy_rows(copy_ring(stage), weights, stage, p, c, first, active.rows, steps);
    }
    if (active.count * kBlockNeurons <= p.prefetch_max_active * kNeurons) {
#pragma unroll 1
      for (int i = lane * (kFetchers / 32) + index / 32; i < active.rows; i += kFetchers) {  // a few for each warp
        prefetch_row(p.down + static_cast<int64_t>(first + c.list[i]) * p.row_bytes, p.row_bytes);
      }
    }
    return;
  }

  sm90::wait_for_previous();
  if (thread == 0) p.trace.mark(1);
#if defined(TWELL_FEW_TRACE)
  x_ring.wait_full();
  if (thread == 0) p.trace.mark(2);
#endif
  const auto sums = multiply<Half, kNeurons>({x_ring, x, x_stage, 0}, {box_ring, weights, kBoxStage, 0}, steps, false,
                                             p.tokens);
  if (thread == 0) p.trace.mark(3);
  activate_tile(sums, c, gate, p.tokens, inside);
  sm90::fence_async_proxy();  // boxes may follow where sums were exchanged
  sm90::named_barrier<kThreads>(kTileBarrier);
  const Active<kNeurons> active(c, inside, gated);
  const int first_block = first / kBlockNeurons;
  if (thread < kNeurons / kBlockNeurons && first_block + thread < p.blocks) {
    p.masks[first_block + thread] = static_cast<uint16_t>(active.word(thread / 2) >> thread % 2 * 16);
  }
  if (thread == 0 && blockIdx.x == gridDim.x - 1 && p.blocks % 2 == 1) p.masks[p.blocks] = 0;
  if (thread == 0) p.trace.mark(4);
  if (active.count == 0) return;
  sm90::named_barrier<kMultipliers + kFetchers>(kListBarrier);

  // Products stand where x was.
  if (gated) {
    const uint32_t stage = active.boxes ? kBoxStage : copy_stage(active);
    const Operand rows{active.boxes ? box_ring : copy_ring(stage), weights, stage, active.boxes ? steps : 0};
    const auto up = [&](auto columns) {
      const auto products = multiply<Half, decltype(columns)::value>({x_ring, x, x_stage, steps}, rows, steps,
                                                                     !active.boxes, p.tokens);
      if (thread == 0) p.trace.mark(5);
      leave_products<Half>(products, x_bytes, c, gate, p.tokens, true);
    };
    if (kNeurons > 16 && active.rows <= 16) {
      up(std::integral_constant<int, 16>{});
    } else {
      up(std::integral_constant<int, kNeurons>{});
    }
  } else {
    leave_products<Half>(sums, x_bytes, c, gate, p.tokens, false);
  }
  sm90::named_barrier<kMultipliers>(kSumBarrier);
  char* const products = reinterpret_cast<char*>(p.products);
  const int i = thread / 8, chunk = thread % 8;
  if (i < active.rows && chunk < p.groups) {
    *reinterpret_cast<uint4*>(products + (static_cast<int64_t>(first + c.list[i]) * p.groups + chunk) * 16) =
        sm90::load_shared_16(x + i * 128 + ((chunk ^ (i & 7)) << 4));
  }
  if (thread == 0) p.trace.mark(6);
#endif
}

template <typename Half, int kNeurons>
cudaError_t launch(const Ffn& ffn, const DecodePlan& plan, FewParams& p, cudaStream_t stream) {
  const auto map = [&](CUtensorMap* to, const void* base, int64_t rows, int box_rows) {
    return sm90::make_tensor_map(to, ffn.dtype, base, rows, ffn.hidden, box_rows);
  };
  cudaError_t error = map(&p.x_map, ffn.x, ffn.tokens, 8 * plan.groups);
  if (error == cudaSuccess) error = map(&p.gate_map, ffn.gate, ffn.width, kNeurons);
  if (error == cudaSuccess) error = map(&p.up_map, ffn.up != nullptr ? ffn.up : ffn.gate, ffn.width, kNeurons);
  if (error != cudaSuccess) return error;
  const int grid = (ffn.width + kNeurons - 1) / kNeurons;
  return launch_kernel(few_gate_up_kernel<Half, kNeurons>, {dim3(grid), kThreads, kShared<kNeurons>}, p, plan.kernels,
                       stream);
}

// The width of least time: rounds of thread blocks, each reading its rows and all of x.
int best_neurons(const Ffn& ffn, int groups, const Device& device) {
  int best = 0;
  int64_t best_cost = INT64_MAX;
  for (const int neurons : {64, 48, 32, 16}) {
    const int64_t tiles = (ffn.width + neurons - 1) / neurons, rounds = (tiles + device.sm_count - 1) / device.sm_count;
    const int64_t cost = rounds * (neurons + 8 * groups);
    if (cost < best_cost) best = neurons, best_cost = cost;
  }
  return best;
}

template <typename Half>
cudaError_t launch_for(const Ffn& ffn, const DecodePlan& plan, const Device& device, FewParams& p,
                       cudaStream_t stream) {
  switch (best_neurons(ffn, plan.groups, device)) {
    case 16: return launch<Half, 16>(ffn, plan, p, stream);
    case 32: return launch<Half, 32>(ffn, plan, p, stream);
    case 48: return launch<Half, 48>(ffn, plan, p, stream);
    default: return launch<Half, 64>(ffn, plan, p, stream);
  }
}

}  // namespace

cudaError_t launch_few_gate_up(const Ffn& ffn, const DecodePlan& plan, const Device& device, void* workspace,
                               cudaStream_t stream) {
  FewParams p{};
  static_cast<GateUpParams&>(p) = gate_up_params(ffn, plan, workspace);
  p.groups = plan.groups;
  p.trace = Trace::next();
  return ffn.dtype == DType::kBFloat16 ? launch_for<__nv_bfloat16>(ffn, plan, device, p, stream)
                                       : launch_for<__half>(ffn, plan, device, p, stream);
}

}  // namespace twell::decoding
