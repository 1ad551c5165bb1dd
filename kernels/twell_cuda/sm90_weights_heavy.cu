// Gradients of the weights of heavy neurons: so many tokens activate them that products with the rows of all tokens
// cost less than a row for each pair. Rows of x and dy by rows of the neurons' values that launch_spread() has made.
// Like plain matmuls these multiply zeros too: an Inf or NaN in a token's x or dy reaches all heavy neurons, where sums
// over pairs keep it from those that the token does not activate.
//
// A persistent thread block of three warpgroups an SM: one thread fetches, two warpgroups multiply 64 neurons each.

#include "sm90_launch.h"
#include "sm90_neuron_product.cuh"
#include "sm90_primitives.cuh"
#include "sm90_weights.h"
#include "sm90_wgmma.cuh"
#include "sm90_workspace.h"

namespace twell::sm90 {
namespace {

constexpr int kThreads = 384, kConsumerWarps = 8;
constexpr int kStages = 4;
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

struct Arguments {
  Product products[3];
  int count, slices;  // of products; of the hidden size
  const Plan* plan;
  const int* neurons;
  const int64_t* kept;
  int hidden;
};

struct Tile {
  Product product;
  int row, hidden;  // the first
};

__device__ __forceinline__ Tile tile_at(const Arguments& a, int item) {
  const int index = item / a.slices, which = index % a.count;
  const Product product = which == 0 ? a.products[0] : which == 1 ? a.products[1] : a.products[2];
  return {product, index / a.count * kHeavyNeurons, item % a.slices * kHidden};
}

__device__ __forceinline__ void fetch(const Arguments& a, const Maps& maps, int items, int steps,
                                      uint8_t* shared, Ring ring) {
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const Tile tile = tile_at(a, item);
    const int m = tile.product.factors;
    const CUtensorMap* factors = m == 0 ? maps.factors : m == 1 ? maps.factors + 1 : maps.factors + 2;
    const CUtensorMap* rows = m == 0 ? &maps.dy : &maps.x;
    for (int step = 0; step < steps; ++step, ring.advance()) {
      ring.wait_empty();
      uint8_t* stage = shared + ring.stage * kStageBytes;
      uint64_t* full = ring.full + ring.stage;
      barrier_arrive_expect(full, kStageBytes);
      load_box(stage, factors, step * kDepth, tile.row, full);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        load_box(stage + kColumnBytes + part * kPartBytes, rows, tile.hidden + part * 64, step * kDepth, full);
      }
    }
  }
}

template <typename T>
__device__ __forceinline__ void multiply(const Arguments& a, int items, int steps, int count, uint8_t* shared,
                                         Ring ring) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, warpgroup = warp / 4;
  const uint32_t stages = smem_address(shared);
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    float sum[kHidden / 2];
    multiply_neurons<T>(sum, steps, stages, ring, lane, warpgroup);

    const Tile tile = tile_at(a, item);
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
      barrier_init(full + kStages + s, kConsumerWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous();
  launch_dependents();  // not earlier: what runs beside this relies on what came before it
  const int count = __ldcg(&a.plan->heavy), steps = static_cast<int>(__ldcg(a.kept)) * (kBlockTokens / kDepth);
  if (count == 0 || steps == 0) return;
  const int items = (count + kHeavyNeurons - 1) / kHeavyNeurons * a.count * a.slices;
  const Ring ring(full, full + kStages, kStages);
  if (threadIdx.x < 128) {
    give_registers<kFetchRegisters>();
    if (threadIdx.x == 0) fetch(a, maps, items, steps, shared, ring);
  } else {
    take_registers<kMultiplyRegisters>();
    multiply<T>(a, items, steps, count, shared, ring);
  }
#endif
}

template <typename T>
cudaError_t launch(const Ffn& ffn, const State& state, const Gradients& out, const Scratch& scratch,
                   const Device& device, cudaStream_t stream) {
  const Heavy& heavy = scratch.heavy;
  Arguments arguments{};
  void* const matrices[3] = {out.down, out.gate, ffn.up != nullptr ? out.up : nullptr};
  for (int m = 0; m < 3; ++m) {
    if (matrices[m] != nullptr) arguments.products[arguments.count++] = {m, matrices[m]};
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
    TWELL_RETURN_IF_ERROR(
        make_tensor_map(maps.factors + m, ffn.dtype, factors, heavy.rows(), stride, kHeavyNeurons));
  }
  const void* dy = out.down != nullptr ? out.dy : ffn.x;
  TWELL_RETURN_IF_ERROR(make_tensor_map(&maps.x, ffn.dtype, ffn.x, ffn.tokens, ffn.hidden, kDepth));
  TWELL_RETURN_IF_ERROR(make_tensor_map(&maps.dy, ffn.dtype, dy, ffn.tokens, ffn.hidden, kDepth));
  const int items = heavy.tiles * arguments.count * arguments.slices;
  return launch_kernel(product_kernel<T>, min(items, device.sm_count), kThreads, 1, kShared, stream, maps, arguments);
}

}  // namespace

cudaError_t launch_heavy(const Ffn& ffn, const State& state, const Gradients& gradients, const Scratch& scratch,
                         const Device& device, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch<__nv_bfloat16>(ffn, state, gradients, scratch, device, stream)
                                       : launch<__half>(ffn, state, gradients, scratch, device, stream);
}

}  // namespace twell::sm90
