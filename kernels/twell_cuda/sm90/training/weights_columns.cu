// Weights' gradients from columns: (F, D) = values^T rows, of h and dy, dg and x, du and x.
//
// Of a run of tokens only the neurons that it activates are multiplied, side by side; where these are differ from run
// to run. So the sums of a run leave the tensor cores' registers, and are added to fp32 sums that a thread block keeps
// in L2: of 512 neurons by 128 hidden units, for all runs in turn. Hidden units are the product's rows and neurons its
// columns, which may be any multiple of 32.
//
// A persistent thread block of three warpgroups an SM: the first fetches, the other two multiply 64 hidden units each.
// A warp alone adds to its part of the sums, so that their order is fixed.

#include "sm90/common/launch.h"
#include "sm90/common/primitives.cuh"
#include "sm90/common/wgmma.cuh"
#include "sm90/training/weights_columns.h"

namespace twell::sm90 {
namespace {

constexpr int kFetchers = 128, kThreads = kFetchers + 256, kConsumerWarps = 8;
constexpr int kHidden = 128, kMostNeurons = 256;  // of a product
constexpr int kHalfBytes = kHalfTokens * 2;       // of a neuron's column of a half block: a row here
constexpr int kPartBytes = kHalfTokens * 128;     // a half block's tokens by 64 hidden units
constexpr int kStages = 4, kStageBytes = 2 * kPartBytes + kMostNeurons * kHalfBytes;
constexpr int kLists = 8;      // fetched ahead: the ring is at most two runs ahead
constexpr int kWarpSums = 16;  // hidden units of a warp: 64 bytes of each neuron
constexpr int kSumsOfBlock = kRangeNeurons * kHidden;

constexpr int kFetchRegisters = 88, kMultiplyRegisters = 208;
static_assert(check_registers(kFetchRegisters, kMultiplyRegisters));

struct Control {
  uint64_t full[kStages], empty[kStages], listed[kLists];
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
  const RunList* lists;
  float* sums;  // (thread blocks, kSumsOfBlock)
  int count, slices, ranges, runs, blocks, hidden, width;
  bool adds;  // to what the matrices hold already

  __device__ __forceinline__ int items() const { return count * slices * ranges; }
};

struct Tile {
  Product product;
  int range, hidden;
};

// Thread blocks that run at once share ranges of neurons, and the rows of all tokens.
__device__ __forceinline__ Tile tile_at(const Arguments& a, int item) {
  const int of_product = a.slices * a.ranges, p = item / of_product, at = item - p * of_product;
  const Product product = p == 0 ? a.products[0] : p == 1 ? a.products[1] : a.products[2];
  return {product, at / a.slices, at % a.slices * kHidden};
}

// How a run's neurons are cut into products: equally wide ones. At least one, so that stages and lists keep in step.
struct Passes {
  int count, width;
  __device__ __forceinline__ explicit Passes(int neurons) {
    count = max((neurons + kMostNeurons - 1) / kMostNeurons, 1);
    width = max((neurons + count * 32 - 1) / (count * 32), 1) * 32;
  }
};

__device__ __forceinline__ int steps_of(const Arguments& a, int run) {
  return 2 * min(kRunBlocks, a.blocks - run * kRunBlocks);
}

__device__ __forceinline__ void fetch(const Arguments& a, const CUtensorMap* x_map, const CUtensorMap* dy_map,
                                      Control& c, uint8_t* shared, Ring ring) {
  constexpr int kRows = kFetchers / 8, kShare = kMostNeurons / kRows;
  // Eight threads copy a half column; every kRows-th neuron is theirs.
  const int thread = threadIdx.x, row = thread / 8, chunk = thread % 8, items = a.items();
  const uint32_t stages = smem_address(shared), place = 2 * kPartBytes + row * kHalfBytes + ((chunk ^ (row & 7)) << 4);
  const auto request = [&](int range, int run, int number) {
    uint64_t* const listed = c.listed + number % kLists;
    barrier_arrive_expect(listed, sizeof(RunList));
    load_bytes(c.lists + number % kLists, a.lists + static_cast<int64_t>(range) * a.runs + run, sizeof(RunList),
               listed);
  };
  int number = 0;  // of the list
  if (thread == 0 && static_cast<int>(blockIdx.x) < items) request(tile_at(a, blockIdx.x).range, 0, 0);
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const Tile tile = tile_at(a, item);
    const CUtensorMap* const rows = tile.product.of_dy ? dy_map : x_map;
    const char* const columns =
        static_cast<const char*>(tile.product.columns) + (int64_t{tile.range} * kRangeNeurons * 2) * kHalfBytes;
    for (int run = 0; run < a.runs; ++run, ++number) {
      if (thread == 0) {
        const int next = item + gridDim.x;
        if (run + 1 < a.runs) {
          request(tile.range, run + 1, number + 1);
        } else if (next < items) {
          request(tile_at(a, next).range, 0, number + 1);
        }
      }
      const RunList& list = c.lists[number % kLists];
      barrier_wait(c.listed + number % kLists, number / kLists & 1);
      const int neurons = list.count, first_block = run * kRunBlocks, steps = steps_of(a, run);
      const Passes passes(neurons);
      for (int pass = 0; pass < passes.count; ++pass) {
        const int first = pass * passes.width;
        uint32_t offsets[kShare], halves[kShare];  // of the neurons' columns; bits of half blocks that have them
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
          const int at = first + row + kRows * i;
          const uint32_t entry = at < neurons && row + kRows * i < passes.width ? list.entries[at] : 0;
          offsets[i] = entry % kRangeNeurons * (2 * kHalfBytes) + chunk * 16;
          halves[i] = entry >> 16;
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

// A warp's sums: of each of the range's neurons 16 hidden units, as lanes have them in a product: 0, 8, 1, 9, ...
template <typename T>
struct WarpSums {
  float* const sums;
  const int lane;

  __device__ __forceinline__ float* of_neuron(int neuron) const { return sums + neuron * kHidden; }
  __device__ __forceinline__ void clear() const {
    for (int n = lane / 4; n < kRangeNeurons; n += 8) {
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
    const int first_neuron = tile.range * kRangeNeurons, low = hidden + lane % 4 * 2, high = low + 8;
    T* const matrix = static_cast<T*>(tile.product.matrix);
    for (int start = lane / 4; start < kRangeNeurons; start += 8 * kBatch) {
      float4 values[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        values[i] = __ldcg(reinterpret_cast<const float4*>(of_neuron(start + 8 * i)) + lane % 4);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int neuron = first_neuron + start + 8 * i;
        reinterpret_cast<float4*>(of_neuron(start + 8 * i))[lane % 4] = float4{};
        if (neuron >= a.width) continue;
        T* const to = matrix + static_cast<int64_t>(neuron) * a.hidden;
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
__device__ __forceinline__ void multiply(const Arguments& a, Control& c, uint8_t* shared, Ring ring) {
  const int lane = threadIdx.x % 32, warp = (threadIdx.x - kFetchers) / 32, warpgroup = warp / 4, items = a.items();
  const uint32_t stages = smem_address(shared);
  const WarpSums<T> sums{a.sums + static_cast<int64_t>(blockIdx.x) * kSumsOfBlock + warp * kWarpSums, lane};
  if (static_cast<int>(blockIdx.x) < items) sums.clear();
  int number = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    for (int run = 0; run < a.runs; ++run, ++number) {
      const RunList& list = c.lists[number % kLists];
      barrier_wait(c.listed + number % kLists, number / kLists & 1);
      const int steps = steps_of(a, run);
      const Passes passes(list.count);
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
        __syncwarp();  // other lanes added to the same sums before
        sums.add(sum, list, pass * passes.width, passes.width);
      }
    }
    __threadfence();
    __syncwarp();
    const Tile tile = tile_at(a, item);
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
  const Ring ring(c.full, c.empty, kStages);
  if (threadIdx.x < kFetchers) {
    give_registers<kFetchRegisters>();
    fetch(a, &x_map, &dy_map, c, shared, ring);
  } else {
    take_registers<kMultiplyRegisters>();
    multiply<T>(a, c, shared, ring);
  }
#endif
}

// A thread block for a run and a range, a thread for each neuron.
__global__ void __launch_bounds__(kRangeNeurons) list_kernel(const Active active, RunList* lists, int runs) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ int warp_counts[kRangeNeurons / 32];
  launch_dependents();
  wait_for_previous();
  const int run = static_cast<int>(blockIdx.x) % runs, range = static_cast<int>(blockIdx.x) / runs;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, word = range * (kRangeNeurons / 32) + warp;
  const int first = run * kRunBlocks, steps = 2 * min(kRunBlocks, active.blocks - first);
  uint32_t halves = 0;
#pragma unroll
  for (int step = 0; step < 2 * kRunBlocks; ++step) {
    if (step < steps && word < active.words) {
      const uint32_t bits = __ldcg(active.masks + static_cast<int64_t>(2 * first + step) * active.words + word);
      halves |= (bits >> lane & 1) << step;
    }
  }
  const uint32_t listed = __ballot_sync(~0u, halves != 0);
  if (lane == 0) warp_counts[warp] = __popc(listed);
  __syncthreads();
  int before = __popc(listed & ((1u << lane) - 1)), all = 0;
#pragma unroll
  for (int w = 0; w < kRangeNeurons / 32; ++w) {
    before += w < warp ? warp_counts[w] : 0;
    all += warp_counts[w];
  }
  RunList& list = lists[blockIdx.x];
  if (halves != 0) list.entries[before] = halves << 16 | threadIdx.x;
  if (threadIdx.x == 0) list.count = all;
#endif
}

int count_runs(int64_t blocks) { return static_cast<int>((blocks + kRunBlocks - 1) / kRunBlocks); }
int count_ranges(const Ffn& ffn) { return (ffn.width + kRangeNeurons - 1) / kRangeNeurons; }

template <typename T>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const ValueColumns& values, bool adds, const Gradients& out,
                   const WeightScratch& scratch, const Device& device, cudaStream_t stream) {
  Arguments a{};
  if (out.down != nullptr) a.products[a.count++] = {values.h, out.down, true};
  if (out.gate != nullptr) a.products[a.count++] = {values.gate, out.gate, false};
  if (ffn.gated() && out.up != nullptr) a.products[a.count++] = {values.up, out.up, false};
  if (a.count == 0) return cudaSuccess;
  a.lists = scratch.lists;
  a.sums = scratch.sums;
  a.slices = (ffn.hidden + kHidden - 1) / kHidden;
  a.ranges = count_ranges(ffn);
  a.runs = count_runs(chunk.active.blocks);
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
  TWELL_RETURN_IF_ERROR(
      launch_kernel(list_kernel, a.runs * a.ranges, kRangeNeurons, 1, 0, stream, chunk.active, scratch.lists, a.runs));
  const int grid = min(device.sm_count, a.count * a.slices * a.ranges);
  return launch_kernel(product_kernel<T>, grid, kThreads, 1, kShared, stream, x_map, dy_map, a);
}

}  // namespace

void place_weights(const Ffn& ffn, int64_t blocks, const Device& device, Cutter& cutter, WeightScratch* scratch) {
  cutter.cut(scratch->lists, int64_t{count_runs(blocks)} * count_ranges(ffn) * static_cast<int64_t>(sizeof(RunList)));
  cutter.cut(scratch->sums, int64_t{device.sm_count} * kSumsOfBlock * 4);
}

cudaError_t launch_weights_of_columns(const Ffn& ffn, const Chunk& chunk, const ValueColumns& values, bool adds,
                                      const Gradients& out, const WeightScratch& scratch, const Device& device,
                                      cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch<__nv_bfloat16>(ffn, chunk, values, adds, out, scratch, device, stream)
                                       : launch<__half>(ffn, chunk, values, adds, out, scratch, device, stream);
}

}  // namespace twell::sm90
