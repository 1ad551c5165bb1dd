// Second of the two kernels for up to kMidMaxTokens tokens: y = h Wd^T + bd over the neurons that a half block of 64
// tokens activates.
//
// A thread block owns 64 tokens and kHidden columns of y. All its threads list the active neurons; then one or two
// warpgroups gather their columns of h and rows of Wd, and as many multiply. Both operands lie in shared memory as they
// do in global memory, tokens and hidden units contiguous, and the tensor cores read them transposed.

#include "sm90/common/launch.h"
#include "sm90/common/prefix_sum.cuh"
#include "sm90/common/primitives.cuh"
#include "sm90/common/store.cuh"
#include "sm90/common/wgmma.cuh"
#include "sm90/mid/mid.h"

namespace twell::sm90::mid_down {

// What a thread block lists and brings in: its active neurons, their columns of h, their rows of Wd.
//
// Masks are there long before columns of h. So where the first kernel's blocks have 64 tokens, this one's list them
// before it has ended, and ask for rows of Wd; that is a guess, since only the end of that kernel makes its writes
// visible. Then they look again, while columns are on their way, and start anew where a mask has changed.

constexpr int kDepth = 64, kMaxStages = 6;
constexpr int kPartBytes = 64 * kDepth * 2;  // 64 tokens or hidden units x 64 neurons
constexpr int kListed = 2048;                // neurons in shared memory at a time
constexpr int kAll = 1;                      // named barrier

struct Control {
  uint64_t full[kMaxStages], empty[kMaxStages];
  int warp_counts[16];
  uint16_t list[kListed];
};

template <int kHidden>
struct Shape {
  static constexpr int kWarpgroups = kHidden / 128 + (kHidden < 128), kColumns = kHidden / kWarpgroups;
  static constexpr int kMultipliers = 128 * kWarpgroups, kFetchers = kHidden == 64 ? 128 : 256;
  static constexpr int kThreads = kMultipliers + kFetchers;
  static constexpr int kStageBytes = kPartBytes + kHidden * kDepth * 2;
  static constexpr int kStages = kHidden == 256 ? 5 : kHidden == 128 ? 6 : 4;
  static constexpr int kShared =
      1024 + kStages * kStageBytes + kMultipliers / 32 * kTurnBytes + static_cast<int>(sizeof(Control));
  // For 64 columns, registers and shared memory that the first kernel leaves.
  static constexpr int kBlocks = kHidden == 64 ? 4 : 1;
  static_assert(kShared <= 227 * 1024);
};

struct Arguments {
  Active active;
  const void *rows, *bias;  // (F, D); (D), or null
  void* y;                  // (T, D)
  int64_t tokens;
  int hidden, width, slices;
  bool guesses;
};

// What another kernel may be writing.
__device__ __forceinline__ uint32_t load_mask(const uint32_t* mask) {
  uint32_t word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(mask) : "memory");
  return word;
}

// The half block's active neurons, found by all threads: each looks at neighbouring words of the mask.
template <int kThreads>
struct Neurons {
  const uint32_t* masks;
  int first_word, last_word;
  uint32_t first_mask;
  int before;  // active neurons of earlier threads
  int total;

  __device__ __forceinline__ Neurons(const Active& active, int width, Control& c, int half_block)
      : masks(active.masks + static_cast<int64_t>(half_block) * active.words) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int each = (active.words + kThreads - 1) / kThreads;
    first_word = min(thread * each, active.words);
    last_word = min(first_word + each, active.words);
    first_mask = first_word < last_word ? load_mask(masks + first_word) : 0;
    const int left = width - 32 * first_word;  // a guess must not name neurons past the last
    if (left < 32) first_mask &= left > 0 ? (1u << left) - 1 : 0;
    int sum = __popc(first_mask);
#pragma unroll 1
    for (int w = first_word + 1; w < last_word; ++w) sum += __popc(__ldcg(masks + w));
    const ThreadSums sums = sum_threads<kThreads>(sum, warp, lane, c.warp_counts, kAll);
    before = sums.before;
    total = sums.all;
  }

  __device__ __forceinline__ bool changed() const {
    return first_word < last_word && load_mask(masks + first_word) != first_mask;
  }

  // Neurons `from` to `from` + kListed of the active ones, in ascending order.
  __device__ __forceinline__ void list(Control& c, int from) const {
    if (from > 0) named_barrier<kThreads>(kAll);  // those before are not needed any more
    const int last = min(from + kListed, total);
    int at = before;
    uint32_t mask = first_mask;
#pragma unroll 1
    for (int w = first_word; w < last_word && at < last;) {
#pragma unroll 1
      for (; mask != 0; mask &= mask - 1, ++at) {
        const int neuron = w * 32 + __ffs(static_cast<int>(mask)) - 1;
        if (at >= from && at < last) c.list[at - from] = static_cast<uint16_t>(neuron);
      }
      if (++w < last_word) mask = __ldcg(masks + w);
    }
    named_barrier<kThreads>(kAll);
  }
};

// By the warps that gather: eight threads copy 128 bytes; past the last of the `listed` neurons, zeros. Neurons are
// looked up a step ahead, and a full step asks of no neuron whether it is one: that is a quarter of the loop's
// instructions.
template <typename T, int kHidden>
struct Fetcher {
  using S = Shape<kHidden>;
  static constexpr int kRows = S::kFetchers / 8;
  const Control& c;
  const char *columns, *rows;
  uint32_t stages, place, row_bytes;
  int row, chunk, hidden_left;
  uint32_t neurons[kDepth / kRows];  // of a step; past the last, any

  __device__ __forceinline__ Fetcher(const Arguments& a, const Control& control, uint32_t first_stage, int half_block,
                                     int first_hidden)
      : c(control) {
    const int thread = threadIdx.x - S::kMultipliers;
    row = thread / 8, chunk = thread % 8;
    stages = first_stage, place = row * 128 + ((chunk ^ (row & 7)) << 4), row_bytes = 2 * a.hidden;
    columns = reinterpret_cast<const char*>(static_cast<const T*>(a.active.columns) +
                                            static_cast<int64_t>(half_block / 2) * a.width * kBlockTokens +
                                            half_block % 2 * kHalfTokens + chunk * 8);
    rows = reinterpret_cast<const char*>(static_cast<const T*>(a.rows) + first_hidden + chunk * 8);
    hidden_left = a.hidden - first_hidden;
  }
  __device__ __forceinline__ void look_up(int start, int listed) {
#pragma unroll
    for (int i = 0; i < kDepth / kRows; ++i) {
      const int n = start + row + kRows * i;
      neurons[i] = n < listed ? c.list[n] : 0;
    }
  }
  // Of the neurons looked up, the first `left`; kFull where that is all of them.
  template <bool kFull>
  __device__ __forceinline__ void copy_columns(int stage, int left) const {
    const uint32_t to = stages + stage * S::kStageBytes + place;
#pragma unroll
    for (int i = 0; i < kDepth / kRows; ++i) {
      copy_16(to + i * kRows * 128, columns + uint64_t{neurons[i]} * (2 * kBlockTokens),
              kFull || row + kRows * i < left);
    }
  }
  template <bool kFull>
  __device__ __forceinline__ void copy_rows(int stage, int left) const {
    const uint32_t to = stages + stage * S::kStageBytes + place;
#pragma unroll
    for (int i = 0; i < kDepth / kRows; ++i) {
      const char* const from = rows + uint64_t{neurons[i]} * row_bytes;
#pragma unroll
      for (int part = 0; part < kHidden / 64; ++part) {  // where nothing is valid the address is not read
        copy_16(to + (1 + part) * kPartBytes + i * kRows * 128, from + part * 128,
                (kFull || row + kRows * i < left) && part * 64 + chunk * 8 < hidden_left);
      }
    }
  }

  // The first steps' rows, then their columns.
  __device__ __forceinline__ void ahead(int listed, bool of_columns) {
    for (int start = 0, s = 0; start < listed && s < S::kStages; start += kDepth, ++s) {
      look_up(start, listed);
      of_columns ? copy_columns<false>(s, listed - start) : copy_rows<false>(s, listed - start);
    }
  }
  // All of them; copies of the first `ready` neurons are on their way.
  __device__ __forceinline__ void run(Ring& ring, int listed, int ready) {
    look_up(ready, listed);
#pragma unroll 1
    for (int start = 0; start < listed; start += kDepth, ring.advance()) {
      ring.wait_empty();
      if (start >= ready && start + kDepth <= listed) {
        copy_columns<true>(ring.stage, kDepth);
        copy_rows<true>(ring.stage, kDepth);
      } else if (start >= ready) {
        copy_columns<false>(ring.stage, listed - start);
        copy_rows<false>(ring.stage, listed - start);
      }
      barrier_arrive_on_copies(ring.full + ring.stage);
      if (start >= ready) look_up(start + kDepth, listed);
    }
  }
};

}  // namespace twell::sm90::mid_down

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
    for (int from = 0; from < neurons.total; from += kListed) {
      if (from > 0) neurons.list(c, from);
      multiply<T, kHidden>(sum, ring, stages, min(kListed, neurons.total - from));
    }
    const uint32_t turn = stages + S::kStages * S::kStageBytes + warp * kTurnBytes;
    store_sums<T, S::kColumns, true>(a, sum, turn, static_cast<int64_t>(half_block) * kHalfTokens + warp % 4 * 16,
                                     first_hidden + warp / 4 * S::kColumns);
  }
#endif
}

template <typename T, int kHidden>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const MidPlan& plan, cudaStream_t stream) {
  const int half_blocks = static_cast<int>((ffn.tokens + kHalfTokens - 1) / kHalfTokens);
  const int slices = (ffn.hidden + kHidden - 1) / kHidden;
  const Arguments arguments{chunk.active, ffn.down.data, ffn.b_down, ffn.y,    ffn.tokens,
                            ffn.hidden,   ffn.width,     slices,     plan.half};
  return launch_with_carveout(kMidCarveout, mid_down_kernel<T, kHidden>, half_blocks * slices, Shape<kHidden>::kThreads,
                              1, Shape<kHidden>::kShared, stream, arguments);
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
