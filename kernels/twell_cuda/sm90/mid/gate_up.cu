// First of the two kernels for up to kMidMaxTokens tokens: relu(x Wg^T + bg), and from it
// h = relu(gate) * (x Wu^T + bu) for the active neurons, into their columns.
//
// A thread block owns 128 tokens and a range of neurons, a few passes of kNeurons; there are so many blocks that they
// fill the GPU once. After the gate it knows which of its neurons any of the tokens activates, and their rows of Wu
// follow over the same x. In a cluster of two, both blocks have the same tokens: each fetches half of x for both. Rows
// of Wg do not depend on the kernel before, so the ring has them before that has ended.

#include <type_traits>

#include "sm90/mid/tile.cuh"

namespace twell::sm90::mid {

// Up: products of the listed neurons, kUpRows at a time, and their columns of h.

// Where 16 bytes, tokens 8 `eighth` and on, of the n-th column lie in shared memory.
__device__ __forceinline__ uint32_t turn_at(uint32_t turn, int n, int eighth) {
  return turn + n * 256 + ((eighth ^ (n & 7)) << 4);
}

// Columns of relu(gate), as far as they exist.
template <typename T>
__device__ __forceinline__ void gather_gates(const Arguments& a, const Control& c, uint32_t turn, int block, int first,
                                             int start, int rows) {
  const int thread = threadIdx.x - kMultipliers, eighth = thread % 16;
  const T* const columns = static_cast<const T*>(a.active.columns) +
                           (static_cast<int64_t>(block) * a.width + first) * kBlockTokens + eighth * 8;
  const uint32_t half = eighth < 8 ? kFirstHalf : kSecondHalf;
  for (int n = thread / 16; n < rows; n += kGatherers / 16) {
    const uint32_t entry = c.list[start + n];
    if (entry & half) copy_16(turn_at(turn, n, eighth), columns + static_cast<int64_t>(entry & kPlace) * kBlockTokens);
  }
}

// The three warps that gather rows of Wu.
template <typename T, int kNeurons>
__device__ __forceinline__ void gather(const Arguments& a, Control& c, uint32_t stages, uint32_t turn, Ring ring,
                                       int block, int first, int steps) {
  using S = Shape<kNeurons>;
  constexpr int kShare = (S::kUpRows + kGatherRows - 1) / kGatherRows;
  const int thread = threadIdx.x - kMultipliers, row = thread / 8, eighths = a.hidden / 8;
  const uint4 *const up = static_cast<const uint4*>(a.up), *const down = static_cast<const uint4*>(a.down);
  const int aside = min(steps - 1, 2);  // rows of the first steps are more urgent
  for (int start = 0, pass = 0; start < c.count; start += S::kUpRows, ++pass) {
    const int rows = min(S::kUpRows, c.count - start);
    uint32_t offsets[kShare];  // of their rows, in 16 bytes
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int n = min(row + kGatherRows * i, rows - 1);
      offsets[i] = static_cast<uint32_t>(first + (c.list[start + n] & kPlace)) * eighths;
    }
    for (int step = 0; step < steps; ++step, ring.advance()) {
      ring.wait_empty();
      const uint32_t to = stages + ring.stage * S::kStageBytes + kTokenBytes;
      gather_rows(to, up, down, offsets, thread, step, eighths, rows);
      barrier_arrive_on_copies(c.copied + ring.stage);
      if (step == aside) {
        barrier_wait(&c.gates_stored, 0);
        if (pass > 0) barrier_wait(&c.gates_empty, (pass - 1) & 1);
        gather_gates<T>(a, c, turn, block, first, start, rows);
        barrier_arrive_on_copies(&c.gates_full);
      }
    }
  }
}

// Products of kRows gathered rows; of none, only the steps of the ring.
template <typename T, int kNeurons, int kRows>
__device__ __forceinline__ void multiply_rows(float* sum, Control& c, uint32_t stages, Ring& ring, int& copies,
                                              int steps, bool shared, int rank) {
  const int lane = threadIdx.x % 32, half = threadIdx.x / 128;
  for (int step = 0; step < steps; ++step, ring.advance()) {
    ring.wait_full();
    if constexpr (kRows > 0) {
      barrier_wait(c.copied + ring.stage, copies++ / ring.stages & 1);
      fence_async_proxy();  // cp.async wrote, tensor cores read
      const uint32_t stage = stages + ring.stage * Shape<kNeurons>::kStageBytes;
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
        Wgmma<T, kRows, 0, 0>::multiply(sum, matrix_descriptor(stage + half * kHalfBytes + k * 32, 16),
                                        matrix_descriptor(stage + kTokenBytes + k * 32, 16), step + k);
      }
      wgmma_commit();
      wgmma_wait<1>();
    } else {
      __syncwarp();  // nobody's lanes may still wait for what is released
    }
    if (step > 0) release(ring, ring.previous(), lane, shared, rank);
  }
  if constexpr (kRows > 0) wgmma_wait<0>();
  release(ring, ring.previous(), lane, shared, rank);
}

// h = relu(gate) * (u + bias), in shared memory and from there to its columns; 16 tokens a warp.
template <typename T, int kRows>
__device__ __forceinline__ void store_products(const float (&sum)[kRows / 2], const Arguments& a, const Control& c,
                                               uint32_t turn, int block, int first, int start, int rows) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint16_t* const list = c.list + start;
  const T* const bias = static_cast<const T*>(a.b_up);
#pragma unroll
  for (int j = 0; j < kRows / 8; j += 2) {  // 16 neurons
    if (8 * j < rows) {
      const uint32_t at = turn_at(turn, 8 * j + lane / 16 * 8 + lane % 8, 2 * warp + (lane / 8 & 1));
      uint32_t gate[4];
      load_matrices_transposed(gate, at);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int index = 4 * (j + m / 2) + m % 2 * 2, n = 8 * (j + m / 2) + lane % 4 * 2;
        const float2 g = unpack<T>(gate[m]);
        float2 b{};
        if (bias != nullptr) {
          b.x = widen(bias[first + (list[min(n, rows - 1)] & kPlace)]);
          b.y = widen(bias[first + (list[min(n + 1, rows - 1)] & kPlace)]);
        }
        gate[m] = pack<T>(g.x * (sum[index] + b.x), g.y * (sum[index + 1] + b.y));
      }
      store_matrices_transposed(at, gate);
    }
  }
  __syncwarp();
  T* const columns = static_cast<T*>(a.active.columns) +
                     (static_cast<int64_t>(block) * a.width + first) * kBlockTokens + warp * 16 + (lane & 1) * 8;
  const uint32_t half = warp < kWarps / 2 ? kFirstHalf : kSecondHalf;
#pragma unroll
  for (int i = 0; i < kRows / 16; ++i) {
    const int n = lane / 2 + 16 * i;
    if (n < rows && list[n] & half) {
      *reinterpret_cast<uint4*>(columns + static_cast<int64_t>(list[n] & kPlace) * kBlockTokens) =
          load_shared_16(turn_at(turn, n, 2 * warp + (lane & 1)));
    }
  }
}

template <typename T, int kNeurons>
__device__ __forceinline__ void multiply_up(const Arguments& a, Control& c, uint32_t stages, uint32_t turn, Ring ring,
                                            int block, int first, int steps, int rank) {
  const int lane = threadIdx.x % 32;
  constexpr int kUpRows = Shape<kNeurons>::kUpRows;
  int copies = 0;
  for (int start = 0, pass = 0; pass == 0 || start < c.count; start += kUpRows, ++pass) {
    const int rows = min(kUpRows, c.count - start);
    float sum[kUpRows / 2];
    const auto multiply = [&](auto count) {
      constexpr int kRows = decltype(count)::value < kUpRows ? decltype(count)::value : kUpRows;
      multiply_rows<T, kNeurons, kRows>(sum, c, stages, ring, copies, steps, pass == 0, rank);
    };
    if (rows <= 0) {
      multiply(std::integral_constant<int, 0>{});
      return;
    }
    if (rows <= 32) {
      multiply(std::integral_constant<int, 32>{});
    } else if (rows <= 48) {
      multiply(std::integral_constant<int, 48>{});
    } else if (rows <= 64) {
      multiply(std::integral_constant<int, 64>{});
    } else if (rows <= 96) {
      multiply(std::integral_constant<int, 96>{});
    } else if (kNeurons > 128 && rows <= 112) {
      multiply(std::integral_constant<int, 112>{});
    } else if (kNeurons > 128 && rows <= 128) {
      multiply(std::integral_constant<int, 128>{});
    } else if (kUpRows == kNeurons || rows <= kNeurons) {
      multiply(std::integral_constant<int, kNeurons>{});
    } else {
      multiply(std::integral_constant<int, kUpRows>{});
    }
    barrier_wait(&c.gates_full, pass & 1);
    store_products<T, kUpRows>(sum, a, c, turn, block, first, start, rows);
    __syncwarp();
    if (lane == 0) barrier_arrive(&c.gates_empty);
  }
}

}  // namespace twell::sm90::mid

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

  const Ring up_ring = ring_at(ring, a.passes * steps);
  if (warp < kWarps) {
    multiply_gate<T, kNeurons>(a, c, smem_address(stages), smem_address(turn), ring, block, first, steps);
    if (a.up != nullptr) {
      named_barrier<kMultipliers + kGatherers>(kListBarrier);
      multiply_up<T, kNeurons>(a, c, smem_address(stages), smem_address(turn), up_ring, block, first, steps, rank);
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
