// Gradients of the weights of heavy neurons: so many tokens activate them that products with the rows of all tokens
// cost less than a row for each pair. Rows of x and dy by rows of the neurons' values that launch_spread() has made.
// Like plain matmuls these multiply zeros too: an Inf or NaN in a token's x or dy reaches all heavy neurons, where sums
// over pairs keep it from those that the token does not activate.
//
// A persistent thread block of three warpgroups an SM: one thread fetches, two warpgroups multiply 64 neurons each. Two
// thread blocks, a cluster, need the same rows, or the same neurons' values, and each fetches half of these for both:
// without that, the L2 cache could not keep the tensor cores busy.

#include "sm90/common/launch.h"
#include "sm90/common/primitives.cuh"
#include "sm90/common/wgmma.cuh"
#include "sm90/common/workspace.h"
#include "sm90/training/neuron_product.cuh"
#include "sm90/training/weights.h"

namespace twell::sm90 {
namespace {

constexpr int kThreads = 384, kConsumerWarps = 8;
constexpr int kStages = 4, kCluster = 2, kBoxNeurons = kHeavyNeurons / kCluster;
static_assert(kHeavyNeurons == kNeurons);
constexpr int kShared = 1024 + kStages * (kStageBytes + 16);
static_assert(kShared <= 227 * 1024);

constexpr int kFetchRegisters = 40, kMultiplyRegisters = 232;
static_assert(check_registers(kFetchRegisters, kMultiplyRegisters));

// matrix (F, D) = factors^T rows, of the heavy neurons.
struct Product {
  int factors;  // which of Heavy's
  void* matrix;
};

struct Maps {
  CUtensorMap factors[3], x, dy;
};

// Products with the same rows.
struct Group {
  Product products[2];
  int count;
};

struct Arguments {
  Group groups[2];  // with rows of dy, of x
  int slices;       // of the hidden size
  const Plan* plan;
  const int* neurons;
  const int64_t* kept;
  int hidden;
};

// A cluster's item is a slice of two tiles of neurons; of the last one, where their number is odd, two slices.
__host__ __device__ constexpr int count_items(int neuron_tiles, int slices) {
  return neuron_tiles / 2 * slices + neuron_tiles % 2 * ((slices + 1) / 2);
}
__host__ __device__ inline int count_items(const Arguments& a, int tiles) {
  return count_items(a.groups[0].count * tiles, a.slices) + count_items(a.groups[1].count * tiles, a.slices);
}

// What one of a cluster's thread blocks works on.
struct Tile {
  Product product;
  int row, hidden;    // the first
  bool same_neurons;  // in both thread blocks; else the same rows
};

__device__ __forceinline__ Tile tile_at(const Arguments& a, int tiles, int item, int rank) {
  const int first_items = count_items(a.groups[0].count * tiles, a.slices);
  const Group& group = item < first_items ? a.groups[0] : a.groups[1];
  const int at = item < first_items ? item : item - first_items;
  const int neuron_tiles = group.count * tiles, pairs = neuron_tiles / 2 * a.slices;
  const bool last = at >= pairs;
  const int tile = last ? neuron_tiles - 1 : at / a.slices * 2 + rank;
  const int slice = last ? (at - pairs) * 2 + rank : at % a.slices;
  const Product product = tile % group.count == 0 ? group.products[0] : group.products[1];
  return {product, tile / group.count * kHeavyNeurons, slice * kHidden, last};
}

__device__ __forceinline__ void fetch(const Arguments& a, const Maps& maps, int tiles, int steps, int rank,
                                      uint8_t* shared, Ring ring) {
  constexpr uint16_t kAll = (1 << kCluster) - 1;
  const int items = count_items(a, tiles);
  for (int item = blockIdx.x / kCluster; item < items; item += gridDim.x / kCluster) {
    const Tile tile = tile_at(a, tiles, item, rank);
    const int m = tile.product.factors;
    const CUtensorMap* factors = m == 0 ? maps.factors : m == 1 ? maps.factors + 1 : maps.factors + 2;
    const CUtensorMap* rows = m == 0 ? &maps.dy : &maps.x;
    for (int step = 0; step < steps; ++step, ring.advance()) {
      ring.wait_empty();
      uint8_t* stage = shared + ring.stage * kStageBytes;
      uint64_t* full = ring.full + ring.stage;
      barrier_arrive_expect(full, kStageBytes);
      const auto values = [&](int half) { return stage + half * (kColumnBytes / kCluster); };
      const auto columns = [&](int part) { return stage + kColumnBytes + part * kPartBytes; };
      if (tile.same_neurons) {
        load_box_multicast(values(rank), factors, step * kDepth, tile.row + rank * kBoxNeurons, full, kAll);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          load_box(columns(part), rows, tile.hidden + part * 64, step * kDepth, full);
        }
      } else {
#pragma unroll
        for (int half = 0; half < kCluster; ++half) {
          load_box(values(half), factors, step * kDepth, tile.row + half * kBoxNeurons, full);
        }
#pragma unroll
        for (int i = 0; i < kParts / kCluster; ++i) {
          const int part = rank * (kParts / kCluster) + i;
          load_box_multicast(columns(part), rows, tile.hidden + part * 64, step * kDepth, full, kAll);
        }
      }
    }
  }
}

template <typename T>
__device__ __forceinline__ void multiply(const Arguments& a, int tiles, int steps, int rank, int count, uint8_t* shared,
                                         Ring ring) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, warpgroup = warp / 4;
  const uint32_t stages = smem_address(shared);
  const int items = count_items(a, tiles);
  const auto release = [&](int stage) {
    if (lane < kCluster) barrier_arrive_at(ring.empty + stage, lane);
  };
  for (int item = blockIdx.x / kCluster; item < items; item += gridDim.x / kCluster) {
    float sum[kHidden / 2];
    multiply_neurons<T>(sum, steps, stages, ring, warpgroup, release);

    const Tile tile = tile_at(a, tiles, item, rank);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.row + warp * 16 + half * 8 + lane / 4;
      if (row >= count) continue;
      const int64_t neuron = __ldcg(a.neurons + row);
      T* const to = static_cast<T*>(tile.product.matrix) + neuron * a.hidden + tile.hidden + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kHidden / 8; ++j) {
        if (tile.hidden + j * 8 < a.hidden) {
          *reinterpret_cast<uint32_t*>(to + j * 8) = pack<T>(sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]);
        }
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments a) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  uint64_t* full = reinterpret_cast<uint64_t*>(shared + kStages * kStageBytes);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full + s, 1);
      barrier_init(full + kStages + s, kConsumerWarps * kCluster);
    }
    fence_barrier_init();
  }
  cluster_sync();
  wait_for_previous();
  launch_dependents();  // not earlier: what runs beside this relies on what came before it
  const int count = __ldcg(&a.plan->heavy), steps = static_cast<int>(__ldcg(a.kept)) * (kBlockTokens / kDepth);
  if (count == 0 || steps == 0) return;  // the same for all thread blocks
  const int tiles = (count + kHeavyNeurons - 1) / kHeavyNeurons, rank = cluster_rank();
  const Ring ring(full, full + kStages, kStages);
  if (threadIdx.x < 128) {
    give_registers<kFetchRegisters>();
    if (threadIdx.x == 0) fetch(a, maps, tiles, steps, rank, shared, ring);
    __syncwarp();
  } else {
    take_registers<kMultiplyRegisters>();
    multiply<T>(a, tiles, steps, rank, count, shared, ring);
  }
  cluster_sync();  // the other thread block may still write here and arrive at these barriers
#endif
}

template <typename T>
cudaError_t launch(const Ffn& ffn, const State& state, const Gradients& out, const Scratch& scratch,
                   const Device& device, cudaStream_t stream) {
  const Heavy& heavy = scratch.heavy;
  Arguments arguments{};
  void* const matrices[3] = {out.down, out.gate, ffn.gated() ? out.up : nullptr};
  for (int m = 0; m < 3; ++m) {
    Group& group = arguments.groups[m == 0 ? 0 : 1];
    if (matrices[m] != nullptr) group.products[group.count++] = {m, matrices[m]};
  }
  arguments.slices = (ffn.hidden + kHidden - 1) / kHidden;
  arguments.plan = scratch.plan;
  arguments.neurons = heavy.neurons;
  arguments.kept = state.totals;
  arguments.hidden = ffn.hidden;
  Maps maps;
  const int stride = static_cast<int>(count_blocks(ffn) * kBlockTokens);
  for (int m = 0; m < 3; ++m) {
    const void* factors = heavy.factors[m] != nullptr ? heavy.factors[m] : heavy.factors[0];
    TWELL_RETURN_IF_ERROR(make_tensor_map(maps.factors + m, ffn.dtype, factors, heavy.rows(), stride, kBoxNeurons));
  }
  const void* dy = out.down != nullptr ? out.dy : ffn.x;
  TWELL_RETURN_IF_ERROR(make_tensor_map(&maps.x, ffn.dtype, ffn.x, ffn.tokens, ffn.hidden, kDepth));
  TWELL_RETURN_IF_ERROR(make_tensor_map(&maps.dy, ffn.dtype, dy, ffn.tokens, ffn.hidden, kDepth));
  const int clusters = min(count_items(arguments, heavy.tiles), device.sm_count / kCluster);
  return launch_kernel(product_kernel<T>, clusters * kCluster, kThreads, kCluster, kShared, stream, maps, arguments);
}

}  // namespace

cudaError_t launch_heavy(const Ffn& ffn, const State& state, const Gradients& gradients, const Scratch& scratch,
                         const Device& device, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch<__nv_bfloat16>(ffn, state, gradients, scratch, device, stream)
                                       : launch<__half>(ffn, state, gradients, scratch, device, stream);
}

}  // namespace twell::sm90
