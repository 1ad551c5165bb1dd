// The gradient of x of kept blocks, dx = dg Wg + du Wu, from their pairs.

#include <type_traits>

#include "sm90/common/slice_product.cuh"
#include "sm90/training/pairs.cuh"

namespace twell::sm90::dx {

// What a thread block's warpgroups share, and the order of its work.
//
// An item is a block of tokens and a slice of hidden units; a step of it is a group of the block's entries, with all
// terms (of the gate and of up) in one stage of the ring.

constexpr int kWarps = 4;                                                             // that gather, and that build
constexpr int kGatherers = kWarps * 32, kBuilders = kWarps * 32, kMultipliers = 256;  // threads
constexpr int kHelpers = kGatherers + kBuilders, kThreads = kHelpers + kMultipliers;
constexpr int kMultiplyWarps = kMultipliers / 32;
constexpr int kArrivals = kGatherers + 1;  // at `full`: each thread's copies, and the tile's warp
constexpr int kHelpRegisters = 72, kMultiplyRegisters = 184;
// Taking more registers than the block starts with would wait for ever.
static_assert(kHelpRegisters * (kHelpers / 128) + 2 * kMultiplyRegisters <=
              kThreads / 128 * (65536 / kThreads / 8 * 8));
constexpr int kProduct = 128;  // columns; 256 want more registers than a block of 512 threads starts with

constexpr int kPartBytes = 64 * kGroup * 2;  // 64 tokens or hidden units x a group of entries
constexpr int kRingBytes = 192 << 10, kMaxStages = 8;
constexpr int kLists = 16, kListLead = 4;  // steps' neurons in shared memory; how many steps ahead they are asked for
constexpr int kKnown = 256;                // pairs of a tile whose places are remembered
static_assert(kLists >= kMaxStages + kListLead);

template <int kTerms, int kHidden>
struct Shape {
  static constexpr int kTermBytes = 2 * kPartBytes + kHidden / 64 * kPartBytes;  // tokens of both halves, then rows
  static constexpr int kStageBytes = kTerms * kTermBytes;
  static constexpr int kStages = kRingBytes / kStageBytes < kMaxStages ? kRingBytes / kStageBytes : kMaxStages;
};

// A kept block; its place in the pools counts from the chunk's first block.
struct KeptBlock {
  Counts counts;
  uint32_t pairs, first_entry, first_pair;
};

// Where the tile in a stage is not zero: all places if `count` is at most kKnown.
struct Known {
  uint16_t places[kKnown];
  uint32_t count;
};

struct Control {
  uint64_t full[kMaxStages], empty[kMaxStages], listed[kLists];
  alignas(16) uint16_t neurons[kLists][kGroup];
  Known known[kMaxStages];
  KeptBlock blocks[kMaxBlocks];
};
constexpr int kShared = 1024 + kRingBytes + kMultiplyWarps * kTurnBytes + sizeof(Control);
static_assert(kShared <= 227 * 1024);

// Of the gate, and of up if there is one: terms' values lie in this order in PairGradients::values.
template <int kTerms>
struct Arguments {
  const void* rows[kTerms];  // (F, D)
  PairGradients pairs;
  slices::Output out;
  State state;
  int64_t first_block;
  int blocks;
};

struct Position {
  int item, block, slice, step, steps;
  int shift;  // of the step that comes first
  // The step's first entry. Those of the first half alone, of both and of the second alone lie one after the other:
  // with a third of each by turns, every few steps have as much to multiply. Each block begins elsewhere, so that not
  // all thread blocks want the same rows at once.
  __device__ __forceinline__ int start() const {
    const int third = steps / 3, turned = step + shift, s = turned < steps ? turned : turned - steps;
    return (s < 3 * third ? s % 3 * third + s / 3 : s) * kGroup;
  }
};

// A thread block's items, and the chunk's kept blocks. Thread blocks that work at the same time share a slice, so that
// the rows they read lie in L2.
struct Work {
  const Control& c;
  int blocks, items;
  int64_t first_entry, first_pair;  // of the first block

  // Every thread of a thread block calls it; the blocks are valid after the next barrier.
  template <int kTerms>
  __device__ __forceinline__ Work(const Arguments<kTerms>& a, Control& control)
      : c(control),
        blocks(static_cast<int>(min(max(a.state.totals[0] - a.first_block, int64_t{0}), int64_t{a.blocks}))),
        items(blocks * a.out.slices),
        first_entry(blocks > 0 ? a.state.blocks[a.first_block].first_entry : 0),
        first_pair(blocks > 0 ? a.state.blocks[a.first_block].first_pair : 0) {
    for (int b = threadIdx.x; b < blocks; b += kThreads) {
      const BlockState s = a.state.blocks[a.first_block + b];
      control.blocks[b] = {s.counts, s.pairs, static_cast<uint32_t>(s.first_entry - first_entry),
                           static_cast<uint32_t>(s.first_pair - first_pair)};
    }
  }

  __device__ __forceinline__ Position at(int item) const {
    const int block = item % blocks;
    const int steps = group_count(c.blocks[block].counts.all());
    return {item, block, item / blocks, 0, steps, steps > 0 ? block % steps : 0};
  }
  // The first step from `item` on.
  __device__ __forceinline__ Position first_from(int item) const {
    for (; item < items; item += gridDim.x) {
      const Position p = at(item);
      if (p.steps > 0) return p;
    }
    return {item, 0, 0, 0, 0, 0};
  }
  __device__ __forceinline__ bool exists(const Position& p) const { return p.item < items; }
  __device__ __forceinline__ void advance(Position& p) const {
    if (++p.step == p.steps) p = first_from(p.item + gridDim.x);
  }
  __device__ __forceinline__ void advance(Position& p, int count) const {
    for (int i = 0; i < count && exists(p); ++i) advance(p);
  }
  __device__ __forceinline__ int left(const Position& p) const { return c.blocks[p.block].counts.all() - p.start(); }
  // Whether the step from entry `start` on has any that the half block's tokens activate.
  static __device__ __forceinline__ bool has(const Counts& counts, int half, int start) {
    const int both_end = counts.first_only + counts.both;
    return half == 0 ? start < both_end : start + kGroup > counts.first_only && start < counts.all();
  }
};

// The warps that put entries' columns of 128 tokens together in shared memory, for each
// term, from the pairs. Each builds whole tiles, which are dealt out in turn.

template <int kTerms, int kHidden>
struct Builder {
  using Stage = Shape<kTerms, kHidden>;
  static constexpr int kRounds = kKnown / 32;

  const Arguments<kTerms>& a;
  Control& c;
  const Work& work;
  const int lane = threadIdx.x % 32;
  Position p;           // of the tile after the next
  uint32_t begin, end;  // its pairs, in its block
  int64_t pair;         // the next tile's first,
  uint32_t count;       // how many, and some of them: each lane one of every 32
  uint32_t values[kRounds], places[kRounds];

  __device__ __forceinline__ Builder(const Arguments<kTerms>& arguments, Control& control, const Work& w, int warp)
      : a(arguments), c(control), work(w), p(w.first_from(blockIdx.x)) {
    work.advance(p, warp);
    find();
    next();
  }

  __device__ __forceinline__ void find() {
    if (!work.exists(p)) return;
    const KeptBlock& block = c.blocks[p.block];
    const int start = p.start();
    const uint32_t* pairs = a.state.first_pairs + (work.first_entry + block.first_entry + start) / kGroup;
    begin = __ldcg(pairs);
    end = start + kGroup < block.counts.all() ? __ldcg(pairs + 1) : block.pairs;
  }

  // Asks for the next tile's pairs, long before they are needed.
  __device__ __forceinline__ void next() {
    if (!work.exists(p)) return;
    pair = work.first_pair + c.blocks[p.block].first_pair + begin;
    count = end - begin;
    load(0);
    work.advance(p, kWarps);
    find();
  }

  __device__ __forceinline__ void load(uint32_t from) {
    const uint32_t* value = a.pairs.values + pair + from + lane;
    const uint16_t* place = a.pairs.places + pair + from + lane;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (from + r * 32 + lane < count) {
        values[r] = __ldcg(value + r * 32);
        places[r] = __ldcg(place + r * 32);
      }
    }
  }

  static __device__ __forceinline__ void put(uint8_t* tile, uint32_t place, uint32_t value) {
#pragma unroll
    for (int t = 0; t < kTerms; ++t) {
      *reinterpret_cast<uint16_t*>(tile + t * Stage::kTermBytes + place) = static_cast<uint16_t>(value >> 16 * t);
    }
  }

  // Of the tile that was here only what it had set, if that is known.
  __device__ __forceinline__ void clear(uint8_t* tile, const Known& known) const {
    const uint32_t old = known.count;
    if (old <= kKnown) {
      for (uint32_t i = lane; i < old; i += 32) put(tile, known.places[i], 0);
    } else {
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
#pragma unroll 8
        for (int i = 0; i < 2 * kPartBytes / 16; i += 32) {
          reinterpret_cast<uint4*>(tile + t * Stage::kTermBytes)[i + lane] = uint4{};
        }
      }
    }
    __syncwarp();
  }

  // The next tile, in a stage that is free.
  __device__ __forceinline__ void build(uint8_t* tile, Known& known) {
    clear(tile, known);
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (r * 32 + lane < count) {
        put(tile, places[r], values[r]);
        known.places[r * 32 + lane] = static_cast<uint16_t>(places[r]);
      }
    }
#pragma unroll 1
    for (uint32_t from = kKnown; from < count; from += kKnown) {
      load(from);
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        if (from + r * 32 + lane < count) put(tile, places[r], values[r]);
      }
    }
    if (lane == 0) known.count = count;
    __syncwarp();
  }
};

// The tiles that are the warp's.
template <int kTerms, int kHidden>
__device__ __forceinline__ void build_all(const Arguments<kTerms>& a, Control& c, const Work& work, uint8_t* shared,
                                          Ring ring) {
  const int warp = threadIdx.x / 32 % kWarps;
  Builder<kTerms, kHidden> builder(a, c, work, warp);
  Position p = work.first_from(blockIdx.x);
  for (uint32_t turn = 0; work.exists(p); ++turn, ring.advance(), work.advance(p)) {
    if (turn % kWarps != warp) continue;
    ring.wait_empty();
    builder.build(shared + ring.stage * Shape<kTerms, kHidden>::kStageBytes, c.known[ring.stage]);
    if (builder.lane == 0) barrier_arrive(ring.full + ring.stage);  // the multiplying warps fence
    builder.next();
  }
}

// The kernel, for one slice width: a persistent thread block of four warpgroups an SM: the first
// gathers rows with cp.async, the second builds tiles, the other two multiply half of the tokens each.

template <typename T, int kTerms, int kHidden>
__device__ __forceinline__ void gather(const Arguments<kTerms>& a, Control& c, const Work& work, uint8_t* shared,
                                       Ring ring) {
  using Stage = Shape<kTerms, kHidden>;
  constexpr int kRows = kGatherers / 8, kTurns = kGroup / kRows;
  // Eight threads copy 128 bytes; every kRows-th row is theirs.
  const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
  const uint32_t place = smem_address(shared) + 2 * kPartBytes + row * 128 + ((chunk ^ (row & 7)) << 4);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Position p = work.first_from(blockIdx.x), ahead = p;
  work.advance(ahead, warp);
  const auto ask = [&](uint32_t turn) {  // each warp for its share of the lists
    if (lane != 0 || turn % kWarps != warp || !work.exists(ahead)) return;
    uint64_t* listed = c.listed + turn % kLists;
    barrier_arrive_expect(listed, kGroup * 2);
    load_bytes(c.neurons[turn % kLists],
               a.state.neurons + work.first_entry + c.blocks[ahead.block].first_entry + ahead.start(), kGroup * 2,
               listed);
    work.advance(ahead, kWarps);
  };
#pragma unroll 1
  for (int i = 0; i < kListLead; ++i) ask(i);
  for (uint32_t turn = 0; work.exists(p); ++turn, ring.advance(), work.advance(p)) {
    const int first_hidden = p.slice * kHidden, hidden_left = a.out.hidden - first_hidden;
    const int left = work.left(p);
    barrier_wait(c.listed + turn % kLists, turn / kLists & 1);
    int64_t from[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      from[i] = int64_t{c.neurons[turn % kLists][row + i * kRows]} * a.out.hidden + first_hidden + chunk * 8;
    }
    ring.wait_empty();  // so everyone has read the list of kStages steps ago
    const auto copy = [&](auto all) {
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
        const uint32_t to = place + ring.stage * Stage::kStageBytes + t * Stage::kTermBytes;
        const T* rows = static_cast<const T*>(a.rows[t]);
#pragma unroll
        for (int i = 0; i < kTurns; ++i) {
#pragma unroll
          for (int part = 0; part < kHidden / 64; ++part) {  // where nothing is valid the address is not read
            copy_16(to + part * kPartBytes + i * kRows * 128, rows + from[i] + part * 64,
                    all.value || (row + i * kRows < left && part * 64 + chunk * 8 < hidden_left));
          }
        }
      }
    };
    const bool whole = left >= kGroup && hidden_left >= kHidden;  // most are
    whole ? copy(std::true_type()) : copy(std::false_type());
    barrier_arrive_on_copies(ring.full + ring.stage);
    ask(turn + kListLead);
  }
}

template <typename T, int kTerms, int kHidden>
__device__ __forceinline__ void multiply(const Arguments<kTerms>& a, const Work& work, uint8_t* shared, Ring ring) {
  using Stage = Shape<kTerms, kHidden>;
  constexpr int kWide = kHidden < kProduct ? kHidden : kProduct;
  const int lane = threadIdx.x % 32, warp = (threadIdx.x - kHelpers) / 32, half = warp / 4;
  const uint32_t stages = smem_address(shared), turn = stages + kRingBytes + warp * kTurnBytes;
  for (int item = blockIdx.x; item < work.items; item += gridDim.x) {
    Position p = work.at(item);
    const Counts counts = work.c.blocks[p.block].counts;
    float sum[kHidden / 2];
    bool started = false;
    for (; p.step < p.steps; ++p.step, ring.advance()) {
      ring.wait_full();
      if (Work::has(counts, half, p.start())) {
        fence_async_proxy();  // ordinary stores and cp.async wrote, tensor cores read
        const uint32_t stage = stages + ring.stage * Stage::kStageBytes;
        wgmma_fence();
#pragma unroll
        for (int t = 0; t < kTerms; ++t) {
#pragma unroll
          for (int k = 0; k < kGroup / 16; ++k) {
            const uint32_t term = stage + t * Stage::kTermBytes + k * 2048;
#pragma unroll
            for (int n = 0; n < kHidden / kWide; ++n) {
              Wgmma<T, kWide, 1, 1>::multiply(
                  sum + n * kWide / 2, matrix_descriptor(term + half * kPartBytes, kPartBytes),
                  matrix_descriptor(term + (2 + n * kWide / 64) * kPartBytes, kPartBytes), started || t || k);
            }
          }
        }
        wgmma_commit();
        started = true;
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      if (p.step > 0 && lane == 0) barrier_arrive(ring.empty + ring.previous());
    }
    wgmma_wait<0>();
    if (p.steps > 0 && lane == 0) barrier_arrive(ring.empty + ring.previous());
    if (!started) {
#pragma unroll
      for (int i = 0; i < kHidden / 2; ++i) sum[i] = 0.0f;
    }
    store_sums<T, kHidden, false>(a.out, sum, turn, int64_t{p.block} * kBlockTokens + warp * 16, p.slice * kHidden);
  }
}

template <typename T, int kTerms, int kHidden>
__global__ void __launch_bounds__(kThreads, 1) kernel(const Arguments<kTerms> a) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ uint8_t raw_shared[];
  constexpr int kStages = Shape<kTerms, kHidden>::kStages;
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  Control& c = *reinterpret_cast<Control*>(shared + kRingBytes + kMultiplyWarps * kTurnBytes);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(c.full + s, kArrivals);
      barrier_init(c.empty + s, kMultiplyWarps);
      c.known[s].count = kKnown + 1;
    }
    for (int i = 0; i < kLists; ++i) barrier_init(c.listed + i, 1);
    fence_barrier_init();
  }
  wait_for_previous();
  launch_dependents();  // not earlier: what runs beside this relies on what came before it
  const Work work(a, c);
  __syncthreads();
  const Ring ring(c.full, c.empty, kStages);
  if (threadIdx.x < kHelpers) {
    give_registers<kHelpRegisters>();
    if (threadIdx.x < kGatherers) {
      gather<T, kTerms, kHidden>(a, c, work, shared, ring);
    } else {
      build_all<kTerms, kHidden>(a, c, work, shared, ring);
    }
  } else {
    take_registers<kMultiplyRegisters>();
    multiply<T, kTerms, kHidden>(a, work, shared, ring);
  }
#endif
}

template <typename T, int kTerms, int kHidden>
cudaError_t launch_slice(Arguments<kTerms> a, const Device& device, cudaStream_t stream) {
  a.out.slices = (a.out.hidden + kHidden - 1) / kHidden;
  const int grid = min(device.sm_count, a.blocks * a.out.slices);
  return launch_kernel(kernel<T, kTerms, kHidden>, grid, kThreads, 1, kShared, stream, a);
}

template <int kTerms>
Arguments<kTerms> arguments_of(const Ffn& ffn, const Chunk& chunk, const State& state, const PairGradients& pairs,
                               void* y) {
  Arguments<kTerms> a{};
  a.rows[0] = ffn.gate.data;
  if constexpr (kTerms > 1) a.rows[1] = ffn.up.data;
  a.pairs = pairs;
  a.out = slices::output_of(ffn, chunk, nullptr, y);
  a.state = state;
  a.first_block = chunk.first_block();
  a.blocks = chunk.active.blocks;
  return a;
}

}  // namespace twell::sm90::dx

namespace twell::sm90 {
namespace {

template <typename T, int kTerms>
cudaError_t launch_type(const dx::Arguments<kTerms>& a, const Device& device, cudaStream_t stream) {
  switch (slices::best_slice(a.blocks, a.out.hidden, device)) {
    case 64: return dx::launch_slice<T, kTerms, 64>(a, device, stream);
    case 128: return dx::launch_slice<T, kTerms, 128>(a, device, stream);
    default: return dx::launch_slice<T, kTerms, 256>(a, device, stream);
  }
}

template <int kTerms>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const State& state, const PairGradients& pairs, void* y,
                   const Device& device, cudaStream_t stream) {
  const dx::Arguments<kTerms> a = dx::arguments_of<kTerms>(ffn, chunk, state, pairs, y);
  return ffn.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(a, device, stream)
                                       : launch_type<__half>(a, device, stream);
}

}  // namespace

cudaError_t launch_pair_dx(const Ffn& ffn, const Chunk& chunk, const State& state, const PairGradients& pairs,
                           const Gradients& gradients, const Device& device, cudaStream_t stream) {
  return ffn.gated() ? launch<2>(ffn, chunk, state, pairs, gradients.x, device, stream)
                     : launch<1>(ffn, chunk, state, pairs, gradients.x, device, stream);
}

}  // namespace twell::sm90
