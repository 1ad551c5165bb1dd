// First of Hopper's two decode kernels for 3 to 64 tokens: h = relu(x Wg^T + bg) * (x Wu^T + bu) for the active
// neurons, or relu(x Wu^T + bu) without a gate, into the workspace (masks as in decode/plan.h; h as (neuron, 8 *
// groups tokens)).
//
// A thread block owns up to kNeurons neurons and all of the hidden size. Rows of weights and x come through two rings
// of stages of 64 hidden units each; weights do not depend on the kernel ahead, so their ring fills before that has
// ended. Tokens are the 64 rows of the product, whose steps four warpgroups share out. Once it is known which neurons
// any token activates, their rows of Wu follow over the same x, from the steps on that are still in its ring: gathered,
// or by boxes where most are active. Of few pairs of a neuron and a token each is multiplied by itself
// (multiply_pairs). `Weight` is the call's own type, or an 8-bit one, for which neurons are a product's rows
// and tokens its columns (sm90/decode/few_product.cuh).
#pragma once

#include <algorithm>
#include <type_traits>

#include "decode/decode.h"
#include "decode/launch.h"
#include "sm90/decode/few_tile.cuh"

namespace twell::decoding {
namespace {

using namespace few;

// 64 registers where blocks of the down kernel fit beside this one. kSixteen: up to 16 tokens.
template <typename Half, typename Weight, int kNeurons, bool kSixteen>
__global__ void __launch_bounds__(kNeurons <= kFewNeurons ? 1024 : kThreads, 1)
    few_gate_up_kernel(const __grid_constant__ FewParams p) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ __align__(1024) uint8_t x_bytes[];
  using S = Shared<Weight, kNeurons, kSixteen>;
  uint8_t* const weight_bytes = x_bytes + S::kXRing;
  float* const gate = reinterpret_cast<float*>(x_bytes + S::kRings);  // (16 or 64 tokens, kGateRow)
  auto& c = *reinterpret_cast<ControlOf<Weight, kNeurons>*>(x_bytes + S::kRings + S::kGateBytes);
  const uint32_t x = smem_address(x_bytes), weights = smem_address(weight_bytes);
  const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread / 32, 0), lane = thread % 32;
  const int block = blockIdx.x, kind = block < p.larger ? 0 : 1, octets = p.octets_each + 1 - kind;
  const int first_octet = p.octets_each * block + min(block, p.larger);
  const int first = 8 * first_octet, inside = min(8 * octets, p.width - first), steps = p.steps;
  const bool gated = p.up != nullptr;
  const uint32_t x_stage = p.groups * 8 * kStepBytes, box_stage = octets * 8 * kRowStep<Weight>;
  sm90::launch_dependents();
  Ring box_ring(c.box_full, c.box_empty, p.box_stages[kind].count);
  int asked = 0;  // boxes of the gate: the first ahead of all else
  if (thread == kMultipliers) {
    init_barriers<kBoxesAhead>(c.box_full, 1);
    init_barriers<kBoxesAhead>(c.box_empty, 4);  // a warpgroup's warps
    asked = min(min(steps, p.first_boxes[kind]), kBoxesAhead);
    Ring first_boxes = box_ring;
    load_boxes(first_boxes, weight_bytes, box_stage, p.gate_maps + kind, first, 0, asked);
    init_barriers<kMaxStages - kBoxesAhead>(c.box_full + kBoxesAhead, 1);
    init_barriers<kMaxStages - kBoxesAhead>(c.box_empty + kBoxesAhead, 4);
  } else if (thread == 0) {
    init_barriers<kMaxStages>(c.x_full, 1);
  } else if (thread == 32) {
    init_barriers<kMaxStages>(c.x_empty, 4);
  } else if (thread == 64) {
    init_barriers<kMaxStages>(c.copy_full, 32);  // a warp's copies
  } else if (thread == 96) {
    init_barriers<kMaxStages>(c.copy_empty, 4);
  }
  __syncthreads();
  Ring x_ring(c.x_full, c.x_empty, p.x_stages.count);

  if (warp == kThreads / 32 - 1) {
    if (lane == 0) {
      sm90::prefetch_map(&p.x_map);
      sm90::prefetch_map(p.up_maps + kind);
      sm90::wait_for_previous();
      load_boxes(x_ring, x_bytes, x_stage, &p.x_map, 0, 0, steps);
    }
    __syncwarp();
    sm90::named_barrier<kThreads>(kTileBarrier);
    const Active<kNeurons> active(c, inside, gated);
    if (lane == 0 && gated && active.count > 0 && !takes_pairs(p, c)) {
      load_boxes(x_ring, x_bytes, x_stage, &p.x_map, 0, 0, steps - p.kept_steps);
    }
    return;
  }

  const auto copy_ring = [&](int octets_copied) {
    return Ring(c.copy_full, c.copy_empty, p.copy_stages[octets_copied]);
  };

  if (warp >= kMultipliers / 32) {
    const int index = thread - kMultipliers;
    if (index == 0) {
      load_gate_boxes(box_ring, weight_bytes, box_stage, p.gate_maps + kind, first, steps, asked, p.first_boxes[kind],
                      c.x_full);
    }
    __syncwarp();
    sm90::named_barrier<kThreads>(kTileBarrier);
    const Active<kNeurons> active(c, inside, gated);
    if (active.count == 0) return;
    const int own = lane * (kFetchers / 32) + index / 32;  // a few for each warp
    const auto prefetch_own = [&](const char* rows) {
      if (own < kNeurons && active.has(own)) {
        prefetch_row(rows + static_cast<int64_t>(first + own) * p.row_bytes, p.row_bytes);
      }
    };
    // Rows of Wd wait for those of Wu, which come the same way: until pairs are multiplied, until rows are there, or
    // until boxes have all been asked for.
    const auto prefetch_down = [&] {
      if (active.count * kBlockNeurons <= p.prefetch_max_active * kNeurons) prefetch_own(p.down);
    };
    if (takes_pairs(p, c)) {
      prefetch_own(p.up);
      __syncwarp();
      sm90::named_barrier<kMultipliers + kFetchers>(kListBarrier);
      prefetch_down();
      return;
    }
    if (active.boxes && index == 0) {
      load_boxes(box_ring, weight_bytes, box_stage, p.up_maps + kind, first, 0, min(steps, box_ring.stages),
                 steps - p.kept_steps, steps);
    }
    __syncwarp();
    if (index < kNeurons) c.list[active.place(index)] = static_cast<uint16_t>(index);
    sm90::named_barrier<kMultipliers + kFetchers>(kListBarrier);
    if (active.boxes && index == 0) {
      load_boxes(box_ring, weight_bytes, box_stage, p.up_maps + kind, first, min(steps, box_ring.stages), steps,
                 steps - p.kept_steps, steps);
    }
    if (gated && !active.boxes) {
      const int octets_copied = active.copy_octets();
      copy_rows<Weight, kNeurons>(copy_ring(octets_copied), weights, octets_copied * 8 * kRowStep<Weight>, p, c, first,
                                  active.rows, steps);
      asm volatile("cp.async.wait_all;" ::: "memory");
    }
    if (active.boxes) {
      __syncwarp();
      sm90::named_barrier<kFetchers>(kAskedBarrier);
    }
    prefetch_down();
    return;
  }

  if (thread < kNeurons) {  // seen by all once the gate's sums meet
    c.gate_bias[thread] = bias_of<Half>(p.b_gate, first + thread, p.width);
    c.up_bias[thread] = bias_of<Half>(p.b_up, first + thread, p.width);
    if constexpr (kScaled<Weight>) {
      c.gate_scale[thread] = scale_of(p.s_gate, first + thread, p.width);
      c.up_scale[thread] = gated ? scale_of(p.s_up, first + thread, p.width) : 0.f;
    }
    c.active[thread / 32] = 0;
    c.pair_count = 0;
  }
  sm90::wait_for_previous();
  auto sums = multiply<Half, Weight, kNeurons, kSixteen>({x_ring, x, x_stage}, {box_ring, weights, box_stage}, weights,
                                                         steps, steps - p.kept_steps, false, p.tokens);
  if constexpr (kScaled<Weight>) sums.scale([&](int n) { return c.gate_scale[n]; });
  activate_tile(sums, c, gate, p.tokens, inside, gated);
  sm90::fence_async_proxy();  // boxes may follow where sums were exchanged
  sm90::named_barrier<kThreads>(kTileBarrier);
  const Active<kNeurons> active(c, inside, gated);
  uint8_t* const masks = reinterpret_cast<uint8_t*>(p.masks);
  if (thread < octets) {
    masks[first_octet + thread] = static_cast<uint8_t>(active.word(thread / 4) >> thread % 4 * 8);
  }
  if (blockIdx.x == gridDim.x - 1 && thread < (p.blocks + 1) / 2 * 4 - p.octets) masks[p.octets + thread] = 0;
  if (active.count == 0) return;
  if (takes_pairs(p, c)) {
    static_assert(kWarps * kPairSteps * kPairStepBytes<Weight> <= S::kRings);
    multiply_pairs<Half, Weight, kNeurons>(p, c, gate, first, x);
    __syncwarp();
    sm90::named_arrive<kMultipliers + kFetchers>(kListBarrier);
    sm90::named_barrier<kMultipliers>(kSumBarrier);
    store_pairs<Half>(p, active, gate, first);
    return;
  }
  sm90::named_barrier<kMultipliers + kFetchers>(kListBarrier);

  // Products stand where x was.
  if (gated) {
    const Ring boxes_again = ring_after(box_ring, p.box_stages[kind]);
    const int rows_octets = active.boxes ? octets : active.copy_octets();
    const Operand rows{active.boxes ? boxes_again : copy_ring(rows_octets), weights,
                       rows_octets * 8u * kRowStep<Weight>};
    const Operand x_again{ring_after(x_ring, p.x_stages), x, x_stage};
    const auto up = [&](auto columns) {
      auto products = multiply<Half, Weight, decltype(columns)::value, kSixteen>(x_again, rows, weights, steps, steps,
                                                                                 !active.boxes, p.tokens);
      if constexpr (kScaled<Weight>) products.scale([&](int row) { return c.up_scale[c.list[row]]; });
      leave_products<Half>(products, x_bytes, c, gate, p.tokens, true);
    };
    if (kNeurons > 16 && active.rows <= 16) {
      up(std::integral_constant<int, 16>{});
    } else if (kNeurons > 32 && active.rows <= 32) {
      up(std::integral_constant<int, 32>{});
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
#endif
}

template <typename Half, typename Weight, int kNeurons, bool kSixteen>
cudaError_t launch(const Ffn& ffn, const DecodePlan& plan, int grid, FewParams& p, cudaStream_t stream) {
  using S = Shared<Weight, kNeurons, kSixteen>;
  constexpr int kRowBytes = kRowStep<Weight>;
  const auto map = [&](CUtensorMap* to, const void* base, int box_rows) {
    return sm90::make_tensor_map(to, ffn.gate.dtype, base, ffn.width, ffn.hidden, box_rows);
  };
  cudaError_t error = sm90::make_tensor_map(&p.x_map, ffn.dtype, ffn.x, ffn.tokens, ffn.hidden, 8 * p.groups);
  p.steps = (static_cast<int>(p.row_bytes) + kRowBytes - 1) / kRowBytes;
  const int x_count = stages_in(S::kXRing, p.groups * 8 * kStepBytes), weight_bytes = S::kWeightRing;
  p.kept_steps = std::min(p.steps, x_count);
  p.x_stages = stages_of(x_count, p.steps - p.kept_steps);
  for (int i = 0; i < 2; ++i) {
    const int rows = 8 * (p.octets_each + 1 - i), stage = rows * kRowBytes;
    p.box_stages[i] = stages_of(stages_in(weight_bytes, stage), p.steps);
    p.first_boxes[i] = (kWindowBytes + stage - 1) / stage;
    if (i == 0 && p.larger == 0) continue;
    if (error == cudaSuccess) error = map(p.gate_maps + i, ffn.gate.data, rows);
    if (error == cudaSuccess) error = map(p.up_maps + i, ffn.gated() ? ffn.up.data : ffn.gate.data, rows);
  }
  for (int i = 1; i <= 8; ++i) p.copy_stages[i] = static_cast<uint8_t>(stages_in(weight_bytes, i * 8 * kRowBytes));
  if (error != cudaSuccess) return error;
  const Launch launch{dim3(grid), kThreads, S::kBytes};
  return launch_decode_kernel(few_gate_up_kernel<Half, Weight, kNeurons, kSixteen>, launch, p, plan.kernels, stream);
}

template <typename Half, typename Weight, bool kSixteen>
cudaError_t launch_for(const Ffn& ffn, const DecodePlan& plan, int grid, FewParams& p, cudaStream_t stream) {
  const int most = 8 * (p.octets_each + (p.larger > 0 ? 1 : 0));
  if (most <= 16) return launch<Half, Weight, 16, kSixteen>(ffn, plan, grid, p, stream);
  if (most <= 32) return launch<Half, Weight, 32, kSixteen>(ffn, plan, grid, p, stream);
  if (most <= 48) return launch<Half, Weight, 48, kSixteen>(ffn, plan, grid, p, stream);
  return launch<Half, Weight, 64, kSixteen>(ffn, plan, grid, p, stream);
}

template <typename Half, typename Weight>
cudaError_t launch_few_gate_up_of(const Ffn& ffn, const DecodePlan& plan, const Device& device, void* workspace,
                                  cudaStream_t stream) {
  FewParams p{};
  static_cast<GateUpParams&>(p) = gate_up_params(ffn, plan, workspace);
  p.groups = plan.groups;
  p.octets = (ffn.width + 7) / 8;
  // As few rounds of thread blocks as there can be, with tiles that differ by 8 neurons at most.
  const int rounds = (p.octets + 8 * device.sm_count - 1) / (8 * device.sm_count);
  const int grid = std::min(rounds * device.sm_count, p.octets);
  p.octets_each = p.octets / grid, p.larger = p.octets % grid;
  return p.groups <= 2 ? launch_for<Half, Weight, true>(ffn, plan, grid, p, stream)
                       : launch_for<Half, Weight, false>(ffn, plan, grid, p, stream);
}

}  // namespace
}  // namespace twell::decoding
