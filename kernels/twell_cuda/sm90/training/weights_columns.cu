// Weights' gradients from columns: (F, D) = values^T rows, of h and dy, dg and x, du and x.
//
// Of a run of tokens only the neurons that it activates are multiplied, side by side; where these are differ from run
// to run. So the sums of a run leave the tensor cores' registers, and are added to fp32 sums that a thread block keeps
// in L2: of 512 neurons by 128 hidden units, for all runs in turn. Adding costs as much as the run's products. So
// neurons that more than half of the runs activate, the steady ones, are multiplied with all tokens, and added once.
// Hidden units are the product's rows and neurons its columns, which may be any multiple of 32.
//
// Thread blocks take items in turn. The last range of steady neurons is cut into pieces of the tokens, so that all end
// at about the same time. A piece waits for the one before it only when it adds its products.
//
// A persistent thread block of three warpgroups an SM: the first fetches, the other two multiply 64 hidden units each.
// A warp alone adds to its part of the sums, or one after the other do: so their order is fixed, whichever thread block
// takes an item.

#include "sm90/common/launch.h"
#include "sm90/common/primitives.cuh"
#include "sm90/common/wgmma.cuh"
#include "sm90/training/weights_columns.h"

namespace twell::sm90 {
namespace {

constexpr int kFetchers = 128, kThreads = kFetchers + 256, kConsumerWarps = 8;
constexpr int kHidden = 128;                   // of a product
constexpr int kHalfBytes = kHalfTokens * 2;    // of a neuron's column of a half block: a row here
constexpr int kPartBytes = kHalfTokens * 128;  // a half block's tokens by 64 hidden units
constexpr int kStages = 4, kStageBytes = 2 * kPartBytes + kMostNeurons * kHalfBytes;
constexpr int kLists = 8;      // fetched ahead: the ring is at most three runs ahead
constexpr int kWarpSums = 16;  // hidden units of a warp: 64 bytes of each neuron
constexpr int kSumsOfBlock = kRangeNeurons * kHidden, kSumsOfPieces = kMostNeurons * kHidden;
constexpr int kPieceRuns = 8;  // of pieces of the tokens

constexpr int kFetchRegisters = 88, kMultiplyRegisters = 208;
static_assert(check_registers(kFetchRegisters, kMultiplyRegisters));

struct Control {
  uint64_t full[kStages], empty[kStages], listed[kLists];
  int items[kLists];  // of which the list is; negative where there are no more
  RunList lists[kLists];
};
static_assert(offsetof(Control, lists) % 16 == 0);
constexpr int kShared = 1024 + kStages * kStageBytes + sizeof(Control);
static_assert(kShared <= 227 * 1024);

struct Product {
  const void* columns;
  void* matrix;  // (F, D)
  bool of_dy;    // rows of dy, else of x
};

struct Arguments {
  Product products[3];
  WeightScratch scratch;  // its sums are (thread blocks, kSumsOfBlock)
  int count, slices, runs, pieces, blocks, hidden, width;
  bool adds;  // to what the matrices hold already
};

struct Tile {
  Product product;
  Range range;
  const RunList* lists;  // of its runs
  int hidden, first_run, runs;
  int piece;  // which of the item's pieces; negative where it is whole
};

// Thread blocks that run at once share ranges of neurons, and the rows of all tokens; those of x or of dy alone while
// their sums fill L2. Steady ranges come last, and the last of them once for each piece.
__device__ __forceinline__ int count_items(const Arguments& a, const Ranges& ranges) {
  return a.count * a.slices * (ranges.count + (ranges.count > ranges.others ? a.pieces - 1 : 0));
}
__device__ __forceinline__ Tile tile_at(const Arguments& a, const Ranges& ranges, int item) {
  const int tiles = item / a.slices, steady = tiles - a.count * ranges.others, last = ranges.count - 1;
  const int p = steady < 0 ? tiles / ranges.others : steady % a.count;
  const int turn = steady < 0 ? tiles % ranges.others : ranges.others + steady / a.count;
  const int range = min(turn, last), first_run = (turn - range) * kPieceRuns;
  const bool cut = steady >= 0 && range == last && a.pieces > 1;
  const Product product = p == 0 ? a.products[0] : p == 1 ? a.products[1] : a.products[2];
  return {product,
          ranges.at(range),
          a.scratch.lists + static_cast<int64_t>(range) * a.runs + first_run,
          item % a.slices * kHidden,
          first_run,
          cut ? min(kPieceRuns, a.runs - first_run) : a.runs,
          cut ? turn - range : -1};
}

// How a run's neurons are cut into products: equally wide ones. At least one, so that stages and lists keep in step.
struct Passes {
  int count, width;
  __device__ __forceinline__ explicit Passes(int neurons) {
    count = max((neurons + kMostNeurons - 1) / kMostNeurons, 1);
    width = max((neurons + count * 32 - 1) / (count * 32), 1) * 32;
  }
};

// Of `runs` runs from `first` on.
__device__ __forceinline__ int steps_of(const Arguments& a, int first, int runs) {
  return 2 * min(runs * kRunBlocks, a.blocks - first * kRunBlocks);
}

__device__ __forceinline__ void fetch(const Arguments& a, const Ranges& ranges, const CUtensorMap* x_map,
                                      const CUtensorMap* dy_map, Control& c, uint8_t* shared, Ring ring) {
  constexpr int kRows = kFetchers / 8, kShare = kMostNeurons / kRows;
  // Eight threads copy a half column; every kRows-th neuron is theirs.
  const int thread = threadIdx.x, row = thread / 8, chunk = thread % 8;
  const int items = count_items(a, ranges);
  const uint32_t stages = smem_address(shared), place = 2 * kPartBytes + row * kHalfBytes + ((chunk ^ (row & 7)) << 4);
  // The list that is the number-th here, of an item's run.
  const auto request = [&](int item, const RunList* list, int number) {
    uint64_t* const listed = c.listed + number % kLists;
    c.items[number % kLists] = item;
    barrier_arrive_expect(listed, sizeof(RunList));
    load_bytes(c.lists + number % kLists, list, sizeof(RunList), listed);
  };
  const auto take = [&] { return atomicAdd(&a.scratch.order->taken, 1); };
  const auto request_first = [&](int item, int number) {
    if (item < items) return request(item, tile_at(a, ranges, item).lists, number);
    c.items[number % kLists] = -1;
    barrier_arrive(c.listed + number % kLists);
  };
  if (thread == 0) request_first(take(), 0);
  for (int number = 0;;) {
    barrier_wait(c.listed + number % kLists, number / kLists & 1);
    const int item = c.items[number % kLists];
    if (item < 0) break;
    const Tile tile = tile_at(a, ranges, item);
    const CUtensorMap* const rows = tile.product.of_dy ? dy_map : x_map;
    const char* const columns = static_cast<const char*>(tile.product.columns);
    int next = 0;
    for (int run = 0; run < tile.runs; ++run, ++number) {
      if (thread == 0) {
        // Taken near the end, so that whoever is through first takes it, but a run before it is needed.
        if (run == max(tile.runs - 2, 0)) next = take();
        if (run + 1 < tile.runs) {
          request(item, tile.lists + run + 1, number + 1);
        } else {
          request_first(next, number + 1);
        }
      }
      const RunList& list = c.lists[number % kLists];
      barrier_wait(c.listed + number % kLists, number / kLists & 1);
      const int neurons = list.count, first_block = (tile.first_run + run) * kRunBlocks;
      const int steps = steps_of(a, tile.first_run + run, 1);
      const Passes passes(neurons);
      for (int pass = 0; pass < passes.count; ++pass) {
        const int first = pass * passes.width;
        uint32_t offsets[kShare], halves[kShare];  // of the neurons' columns; bits of half blocks that have them
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
          const int at = first + row + kRows * i;
          const bool listed = at < neurons && row + kRows * i < passes.width;
          offsets[i] = (listed ? list.neurons[at] : 0) * (2 * kHalfBytes) + chunk * 16;
          halves[i] = listed ? list.entries[at] >> 16 : 0;
        }
        for (int step = 0; step < steps; ++step, ring.advance()) {
          const int half_block = 2 * first_block + step;
          ring.wait_empty();
          uint64_t* const full = ring.full + ring.stage;
          if (thread == 0) {
            uint8_t* const stage = shared + ring.stage * kStageBytes;
            barrier_arrive_expect(full, 2 * kPartBytes);
            load_box(stage, rows, tile.hidden, half_block * kHalfTokens, full);
            load_box(stage + kPartBytes, rows, tile.hidden + 64, half_block * kHalfTokens, full);
          }
          const uint32_t to = stages + ring.stage * kStageBytes + place;
          const char* const from =
              columns + (static_cast<int64_t>(half_block / 2) * a.width * 2 + half_block % 2) * kHalfBytes;
#pragma unroll
          for (int i = 0; i < kShare; ++i) {
            if (kRows * i < passes.width) {
              copy_16(to + i * kRows * kHalfBytes, from + offsets[i], halves[i] >> step & 1);
            }
          }
          barrier_arrive_on_copies(full);
        }
      }
    }
  }
}

// Product of a run: 64 hidden units by N neurons.
template <typename T, int N>
__device__ __forceinline__ void multiply_run(float* sum, Ring& ring, uint32_t stages, int steps, int warpgroup,
                                             int lane) {
  for (int step = 0; step < steps; ++step, ring.advance()) {
    ring.wait_full();
    const uint32_t stage = stages + ring.stage * kStageBytes;
    fence_async_proxy();  // cp.async wrote, tensor cores read
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHalfTokens / 16; ++k) {
      Wgmma<T, N, 1, 0>::multiply(sum, matrix_descriptor(stage + warpgroup * kPartBytes + k * 2048, kPartBytes),
                                  matrix_descriptor(stage + 2 * kPartBytes + k * 32, 16), step + k);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0 && lane == 0) barrier_arrive(ring.empty + ring.previous());
  }
  wgmma_wait<0>();
  if (lane == 0) barrier_arrive(ring.empty + ring.previous());
}

// Adds to two neighbours in L2. One warp alone does so, lanes in turn: the order is that of its runs.
__device__ __forceinline__ void add_two(float* to, float first, float second) {
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(first), "f"(second) : "memory");
}

// Until so many pieces have been added. Whoever adds them has taken its item before this one was.
__device__ __forceinline__ void wait_for_pieces(const int* added, int count, int lane) {
  if (lane == 0) {
    int so_far;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(so_far) : "l"(added) : "memory");
    } while (so_far < count);
  }
  __syncwarp();
}

// A warp's sums: of each of the range's neurons 16 hidden units, as lanes have them in a product: 0, 8, 1, 9, ...
template <typename T>
struct WarpSums {
  float* const sums;
  const int lane;

  __device__ __forceinline__ float* of_neuron(int neuron) const { return sums + neuron * kHidden; }
  __device__ __forceinline__ void clear(int neurons) const {
    for (int n = lane / 4; n < neurons; n += 8) {
      reinterpret_cast<float4*>(of_neuron(n))[lane % 4] = float4{};
    }
  }
  // The product's columns are the neurons from `first` of the list on.
  __device__ __forceinline__ void add(const float* sum, const RunList& list, int first, int width) const {
#pragma unroll
    for (int j = 0; j < kMostNeurons / 8; ++j) {
      const int at = first + 8 * j + lane % 4 * 2;
      if (8 * j >= width) break;
      const uint2 entries = *reinterpret_cast<const uint2*>(list.entries + at);
      const int place = lane / 4 * 2;
      if (at < list.count) add_two(of_neuron(entries.x % kRangeNeurons) + place, sum[4 * j], sum[4 * j + 2]);
      if (at + 1 < list.count) add_two(of_neuron(entries.y % kRangeNeurons) + place, sum[4 * j + 1], sum[4 * j + 3]);
    }
  }
  // To the matrix's rows from `hidden` on, the warp's first hidden unit. The sums are zero then.
  __device__ __forceinline__ void finish(const Arguments& a, const Tile& tile, int hidden) const {
    constexpr int kBatch = 8;
    const uint16_t* const neurons = a.scratch.neurons + tile.range.first;
    const int low = hidden + lane % 4 * 2, high = low + 8;
    T* const matrix = static_cast<T*>(tile.product.matrix);
    for (int start = lane / 4; start < tile.range.size; start += 8 * kBatch) {
      float4 values[kBatch];
      int rows[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        rows[i] = start + 8 * i < tile.range.size ? __ldcg(neurons + start + 8 * i) : -1;
        values[i] = __ldcg(reinterpret_cast<const float4*>(of_neuron(start + 8 * i)) + lane % 4);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        reinterpret_cast<float4*>(of_neuron(start + 8 * i))[lane % 4] = float4{};
        if (rows[i] < 0) continue;
        T* const to = matrix + static_cast<int64_t>(rows[i]) * a.hidden;
        const auto store = [&](int column, float first, float second) {
          if (column >= a.hidden) return;
          uint32_t* const word = reinterpret_cast<uint32_t*>(to + column);
          const float2 old = a.adds ? unpack<T>(__ldcg(word)) : float2{};
          *word = pack<T>(first + old.x, second + old.y);
        };
        store(low, values[i].x, values[i].z);
        store(high, values[i].y, values[i].w);
      }
    }
  }
};

template <typename T>
__device__ __forceinline__ void multiply(const Arguments& a, const Ranges& ranges, Control& c, uint8_t* shared,
                                         Ring ring) {
  const int lane = threadIdx.x % 32, warp = (threadIdx.x - kFetchers) / 32, warpgroup = warp / 4;
  const uint32_t stages = smem_address(shared);
  float* const own = a.scratch.sums + static_cast<int64_t>(blockIdx.x) * kSumsOfBlock + warp * kWarpSums;
  WarpSums<T>{own, lane}.clear(kRangeNeurons);
  for (int number = 0;;) {
    barrier_wait(c.listed + number % kLists, number / kLists & 1);
    const int item = c.items[number % kLists];
    if (item < 0) break;
    const Tile tile = tile_at(a, ranges, item);
    const int part = item % (a.count * a.slices);  // of the last range's sums, in any order
    int* const added = a.scratch.pieces_added + part * kConsumerWarps + warp;
    const bool cut = tile.piece >= 0;
    const WarpSums<T> sums{
        cut ? a.scratch.piece_sums + static_cast<int64_t>(part) * kSumsOfPieces + warp * kWarpSums : own, lane};
    if (tile.piece == 0) sums.clear(kMostNeurons);
    const int together = tile.range.steady ? tile.runs : 1;  // runs
    for (int run = 0; run < tile.runs; run += together) {
      barrier_wait(c.listed + number % kLists, number / kLists & 1);
      const int steps = steps_of(a, tile.first_run + run, together);
      const Passes passes(c.lists[number % kLists].count);
      number += together;
      // The last of several lists, all of which have the same neurons: those before it may have been replaced.
      const int last = number - 1;
      const RunList& list = c.lists[last % kLists];
      for (int pass = 0; pass < passes.count; ++pass) {
        float sum[kMostNeurons / 2];
        switch (passes.width / 32) {
          case 1: multiply_run<T, 32>(sum, ring, stages, steps, warpgroup, lane); break;
          case 2: multiply_run<T, 64>(sum, ring, stages, steps, warpgroup, lane); break;
          case 3: multiply_run<T, 96>(sum, ring, stages, steps, warpgroup, lane); break;
          case 4: multiply_run<T, 128>(sum, ring, stages, steps, warpgroup, lane); break;
          case 5: multiply_run<T, 160>(sum, ring, stages, steps, warpgroup, lane); break;
          case 6: multiply_run<T, 192>(sum, ring, stages, steps, warpgroup, lane); break;
          case 7: multiply_run<T, 224>(sum, ring, stages, steps, warpgroup, lane); break;
          default: multiply_run<T, 256>(sum, ring, stages, steps, warpgroup, lane); break;
        }
        barrier_wait(c.listed + last % kLists, last / kLists & 1);
        __syncwarp();  // other lanes added to the same sums before
        if (cut) wait_for_pieces(added, tile.piece, lane);
        sums.add(sum, list, pass * passes.width, passes.width);
      }
    }
    __threadfence();
    __syncwarp();
    if (cut && tile.piece + 1 < a.pieces) {
      if (lane == 0) __stcg(added, tile.piece + 1);
      continue;
    }
    sums.finish(a, tile, tile.hidden + warp * kWarpSums);
    __threadfence();
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap dy_map,
                   const __grid_constant__ Arguments a) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  Control& c = *reinterpret_cast<Control*>(shared + kStages * kStageBytes);
  if (threadIdx.x == 0) {
    prefetch_map(&x_map);
    prefetch_map(&dy_map);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(c.full + s, kFetchers + 1);
      barrier_init(c.empty + s, kConsumerWarps);
    }
    for (int i = 0; i < kLists; ++i) barrier_init(c.listed + i, 1);
    fence_barrier_init();
  }
  launch_dependents();
  wait_for_previous();
  __syncthreads();
  const Ranges ranges(__ldcg(&a.scratch.order->others), a.width);
  const Ring ring(c.full, c.empty, kStages);
  if (threadIdx.x < kFetchers) {
    give_registers<kFetchRegisters>();
    fetch(a, ranges, &x_map, &dy_map, c, shared, ring);
  } else {
    take_registers<kMultiplyRegisters>();
    multiply<T>(a, ranges, c, shared, ring);
  }
#endif
}

template <typename T>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const ValueColumns& values, bool adds, const Gradients& out,
                   const WeightScratch& scratch, const Device& device, cudaStream_t stream) {
  Arguments a{};
  if (out.down != nullptr) a.products[a.count++] = {values.h, out.down, true};
  if (out.gate != nullptr) a.products[a.count++] = {values.gate, out.gate, false};
  if (ffn.gated() && out.up != nullptr) a.products[a.count++] = {values.up, out.up, false};
  if (a.count == 0) return cudaSuccess;
  a.scratch = scratch;
  a.slices = (ffn.hidden + kHidden - 1) / kHidden;
  a.runs = count_runs(chunk.active.blocks);
  a.pieces = (a.runs + kPieceRuns - 1) / kPieceRuns;
  a.blocks = chunk.active.blocks;
  a.hidden = ffn.hidden;
  a.width = ffn.width;
  a.adds = adds;
  CUtensorMap x_map, dy_map;
  const auto map = [&](CUtensorMap* of, const void* rows) {
    const T* from = static_cast<const T*>(rows) + chunk.first * ffn.hidden;
    return make_tensor_map(of, ffn.dtype, from, chunk.tokens, ffn.hidden, kHalfTokens);
  };
  TWELL_RETURN_IF_ERROR(map(&x_map, ffn.x));
  TWELL_RETURN_IF_ERROR(map(&dy_map, out.dy));
  const int grid = min(device.sm_count, a.count * a.slices * (most_ranges(ffn) + a.pieces - 1));
  return launch_kernel(product_kernel<T>, grid, kThreads, 1, kShared, stream, x_map, dy_map, a);
}

}  // namespace

void place_weights(const Ffn& ffn, int64_t blocks, const Device& device, Cutter& cutter, WeightScratch* scratch) {
  cutter.cut(scratch->order, sizeof(Order));
  cutter.cut(scratch->steady_words, int64_t{(ffn.width + 31) / 32} * 4);
  cutter.cut(scratch->neurons, int64_t{ffn.width} * 2);
  cutter.cut(scratch->lists, int64_t{count_runs(blocks)} * most_ranges(ffn) * static_cast<int64_t>(sizeof(RunList)));
  cutter.cut(scratch->sums, int64_t{device.sm_count} * kSumsOfBlock * 4);
  const int shared_items = count_runs(blocks) > kPieceRuns ? 3 * ((ffn.hidden + kHidden - 1) / kHidden) : 0;
  scratch->piece_parts = shared_items * kConsumerWarps;
  cutter.cut(scratch->piece_sums, int64_t{shared_items} * kSumsOfPieces * 4);
  cutter.cut(scratch->pieces_added, int64_t{scratch->piece_parts} * 4);
}

cudaError_t launch_weights_of_columns(const Ffn& ffn, const Chunk& chunk, const ValueColumns& values, bool adds,
                                      const Gradients& out, const WeightScratch& scratch, const Device& device,
                                      cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch<__nv_bfloat16>(ffn, chunk, values, adds, out, scratch, device, stream)
                                       : launch<__half>(ffn, chunk, values, adds, out, scratch, device, stream);
}

}  // namespace twell::sm90
