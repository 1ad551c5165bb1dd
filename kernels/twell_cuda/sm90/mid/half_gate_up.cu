// The first of the two kernels where a thread block's neurons all fit one pass of 64 tokens: relu(x Wg^T + bg), and
// from it h = relu(gate) * (x Wu^T + bu) for the active neurons, into their columns.
//
// A thread block owns 64 tokens and kNeurons neurons; there are so many blocks that they fill the GPU once. A cluster
// has the same neurons and neighbouring tokens: its blocks take turns to fetch rows of Wg for both. Then each knows its
// active neurons, and their rows of Wu follow over the same x, in the same shared memory but with more stages, as there
// are few of them. Columns of relu(gate) stay in shared memory until they become h.

#include <type_traits>

#include "sm90/mid/tile.cuh"

namespace twell::sm90::mid_half {

// Shared memory, barriers, the list of active neurons.
//
// Four warps multiply, three gather rows of Wu, one fetches boxes: two warps for each quarter of the registers, so that
// a block of the second kernel fits beside.

using mid::activate, mid::Arguments, mid::find_active, mid::gather_rows, mid::kCluster, mid::launch_gate_up;

constexpr int kWarps = 4, kMultipliers = kWarps * 32, kGatherers = 96, kThreads = kMultipliers + kGatherers + 32;
constexpr int kDepth = 64, kRowBytes = kDepth * 2, kTokenBytes = kHalfTokens * kRowBytes;
constexpr int kMaxStages = 6, kMaxUpStages = 10;
constexpr int kMaxNeurons = 256;
constexpr int kGatherRows = kGatherers / 8;        // rows at a time, eight threads each
constexpr int kMaskBarrier = 1, kListBarrier = 2;  // named

struct Control {
  uint64_t full[kMaxStages], empty[kMaxStages];  // of the gate; a stage is free in all blocks of the cluster
  uint64_t up_full[kMaxUpStages], up_empty[kMaxUpStages];
  uint64_t gate_multiplied, listed;  // the gate's stages are free; the list is made
  uint32_t warp_masks[kWarps][kMaxNeurons / 32];
  uint16_t list[kMaxNeurons];  // places of the active neurons among the thread block's, ascending
  int count;                   // of the list
};

template <int kNeurons>
struct Shape {
  static constexpr int kStageBytes = kTokenBytes + kNeurons * kRowBytes;
  // 120 KiB leave room for a block of the second kernel.
  static constexpr int kStages = kNeurons == 256 ? 4 : 120 * 1024 / kStageBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kTurnBytes = kNeurons * kHalfTokens * 2;  // columns of relu(gate), then of h
  static constexpr int kWords = (kNeurons + 31) / 32, kPieces = kNeurons / 16;
  static constexpr int kShared = 1024 + kRingBytes + kTurnBytes + static_cast<int>(sizeof(Control));
  static_assert(kStages <= kMaxStages && kStageBytes % 1024 == 0 && kNeurons % 16 == 0);
  static_assert(kShared <= mid::kSharedLimit);
};

// How up uses the gate's ring: all stages of x, then all stages of kRows rows of Wu.
struct UpRing {
  int rows, stages;
  __device__ __forceinline__ int row_stage(int stage) const { return stages * kTokenBytes + stage * rows * kRowBytes; }
};

template <int kNeurons>
__device__ __forceinline__ UpRing up_ring(int count) {
  const int rows = count <= 32                      ? 32
                   : count <= 48                    ? 48
                   : count <= 64                    ? 64
                   : count <= 96 && kNeurons > 96   ? 96
                   : count <= 128 && kNeurons > 128 ? 128
                                                    : kNeurons;
  return {rows, min(kMaxUpStages, Shape<kNeurons>::kRingBytes / (kTokenBytes + rows * kRowBytes))};
}

// Where nothing is active only what was asked for ahead is taken from the ring.
__device__ __forceinline__ int up_steps(int count, int early, int steps) { return count > 0 ? steps : early; }

// By one warp, from what the multiplying warps have found: masks and list.
template <int kNeurons>
__device__ __forceinline__ void make_list(const Arguments& a, Control& c, int half, int first) {
  using S = Shape<kNeurons>;
  const int lane = threadIdx.x % 32;
  uint32_t mask = 0;  // a lane for each word
  if (lane < S::kWords) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) mask |= c.warp_masks[w][lane];
    const int left = a.width - first - 32 * lane;  // nothing is active past the last: x may hold NaN
    mask &= left >= 32 ? ~0u : left > 0 ? (1u << left) - 1 : 0;
    uint16_t* const masks =
        reinterpret_cast<uint16_t*>(a.active.masks) + static_cast<int64_t>(half) * 2 * a.active.words;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int piece = 2 * lane + i, at = first / 16 + piece;
      if (piece < S::kPieces && at < 2 * a.active.words) masks[at] = static_cast<uint16_t>(mask >> (16 * i));
    }
  }
  int count = 0;
#pragma unroll
  for (int w = 0; w < S::kWords; ++w) {
    const uint32_t bits = __shfl_sync(~0u, mask, w);
    if (bits >> lane & 1) c.list[count + __popc(bits & ((1u << lane) - 1))] = static_cast<uint16_t>(w * 32 + lane);
    count += __popc(bits);
  }
  if (lane == 0) c.count = count;
}

// Where 16 bytes, tokens 8 `eighth` and on, of the n-th column lie in shared memory.
__device__ __forceinline__ uint32_t turn_at(uint32_t turn, int n, int eighth) {
  return turn + n * kRowBytes + ((eighth ^ (n & 7)) << 4);
}

// Columns of listed neurons to global memory, 16 tokens a warp; `row_of` says where each lies.
template <typename T, int kNeurons, typename RowOf>
__device__ __forceinline__ void store_columns(const Arguments& a, const Control& c, uint32_t turn, int half, int first,
                                              RowOf row_of) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  T* const columns = static_cast<T*>(a.active.columns) +
                     (static_cast<int64_t>(half / 2) * a.width + first) * kBlockTokens + half % 2 * kHalfTokens +
                     warp * 16 + (lane & 1) * 8;
  __syncwarp();
  for (int n = lane / 2; n < c.count; n += 16) {
    *reinterpret_cast<uint4*>(columns + static_cast<int64_t>(c.list[n]) * kBlockTokens) =
        load_shared_16(turn_at(turn, row_of(n), 2 * warp + (lane & 1)));
  }
}

// Up: products of the listed neurons, and their columns of h.

// The three warps that gather rows of Wu.
template <int kNeurons>
__device__ __forceinline__ void gather(const Arguments& a, Control& c, uint32_t shared, int first, int early,
                                       int all_steps) {
  constexpr int kShare = (kNeurons + kGatherRows - 1) / kGatherRows;
  const int thread = threadIdx.x - kMultipliers, row = thread / 8, eighths = a.hidden / 8;
  const int rows = c.count, steps = up_steps(rows, early, all_steps);
  const UpRing use = up_ring<kNeurons>(rows);
  Ring ring(c.up_full, c.up_empty, use.stages);
  const uint4 *const up = static_cast<const uint4*>(a.up), *const down = static_cast<const uint4*>(a.down);
  uint32_t offsets[kShare];  // of their rows, in 16 bytes
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const int n = row + kGatherRows * i;
    offsets[i] = n < rows ? static_cast<uint32_t>(first + c.list[n]) * eighths : 0;
  }
  for (int step = 0; step < steps; ++step, ring.advance()) {
    ring.wait_empty();
    const uint32_t to = shared + use.row_stage(ring.stage);
    gather_rows(to, up, down, offsets, thread, step, eighths, rows);
    barrier_arrive_on_copies(ring.full + ring.stage);
  }
}

template <typename T, int kRows>
__device__ __forceinline__ void multiply_rows(float* sum, Ring& ring, const UpRing& use, uint32_t shared, int steps) {
  const bool releases = threadIdx.x % 32 == 0;
  for (int step = 0; step < steps; ++step, ring.advance()) {
    ring.wait_full();
    fence_async_proxy();  // cp.async wrote, tensor cores read
    const uint32_t tokens = shared + ring.stage * kTokenBytes, rows = shared + use.row_stage(ring.stage);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      Wgmma<T, kRows, 0, 0>::multiply(sum, matrix_descriptor(tokens + k * 32, 16), matrix_descriptor(rows + k * 32, 16),
                                      step + k);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0 && releases) barrier_arrive(ring.empty + ring.previous());
  }
  wgmma_wait<0>();
}

// h = relu(gate) * (u + bias): the n-th listed neuron's column takes the n-th place, from where it goes to global
// memory. Places are ascending, so what is overwritten has been read.
template <typename T, int kNeurons>
__device__ __forceinline__ void store_products(const float (&sum)[kNeurons / 2], const Arguments& a, const Control& c,
                                               uint32_t turn, int half, int first) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = c.count;
  const T* const bias = static_cast<const T*>(a.b_up);
#pragma unroll
  for (int j = 0; j < kNeurons / 8; j += 2) {  // 16 neurons
    if (8 * j < rows) {
      const int row = 8 * j + lane / 16 * 8 + lane % 8, eighth = 2 * warp + (lane / 8 & 1);
      uint32_t gate[4];
      load_matrices_transposed(gate, turn_at(turn, c.list[min(row, rows - 1)], eighth));
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int index = 4 * (j + m / 2) + m % 2 * 2, n = 8 * (j + m / 2) + lane % 4 * 2;
        const float2 g = unpack<T>(gate[m]);
        float2 b{};
        if (bias != nullptr) {
          b.x = widen(bias[first + c.list[min(n, rows - 1)]]);
          b.y = widen(bias[first + c.list[min(n + 1, rows - 1)]]);
        }
        gate[m] = pack<T>(g.x * (sum[index] + b.x), g.y * (sum[index + 1] + b.y));
      }
      store_matrices_transposed(turn_at(turn, row, eighth), gate);
    }
  }
  store_columns<T, kNeurons>(a, c, turn, half, first, [](int n) { return n; });
}

template <typename T, int kNeurons>
__device__ __forceinline__ void multiply_up(const Arguments& a, Control& c, uint32_t shared, uint32_t turn, int half,
                                            int first, int early, int all_steps) {
  const int steps = up_steps(c.count, early, all_steps);
  const UpRing use = up_ring<kNeurons>(c.count);
  Ring ring(c.up_full, c.up_empty, use.stages);
  float sum[kNeurons / 2];
  const auto multiply = [&](auto count) {
    constexpr int kRows = decltype(count)::value < kNeurons ? decltype(count)::value : kNeurons;
    multiply_rows<T, kRows>(sum, ring, use, shared, steps);
  };
  switch (use.rows) {
    case 32: multiply(std::integral_constant<int, 32>{}); break;
    case 48: multiply(std::integral_constant<int, 48>{}); break;
    case 64: multiply(std::integral_constant<int, 64>{}); break;
    case 96: multiply(std::integral_constant<int, 96>{}); break;
    case 128: multiply(std::integral_constant<int, 128>{}); break;
    default: multiply(std::integral_constant<int, kNeurons>{});
  }
  store_products<T, kNeurons>(sum, a, c, turn, half, first);
}

}  // namespace twell::sm90::mid_half

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
    named_barrier<kMultipliers + kGatherers>(kListBarrier);
    if (a.up != nullptr) {
      multiply_up<T, kNeurons>(a, c, shared, turn, half, first, early, steps);
    } else {
      store_columns<T, kNeurons>(a, c, turn, half, first, [&](int n) { return static_cast<int>(c.list[n]); });
    }
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
