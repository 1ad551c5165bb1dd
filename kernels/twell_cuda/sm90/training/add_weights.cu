// Adds to the weights' gradients what a chunk's blocks that were not kept give: dense products of columns and rows of x
// or dy, of which columns of half blocks that do not activate the neuron count as zero.
//
// A persistent thread block of three warpgroups an SM: the first fetches, the other two multiply 64 neurons each.

#include "sm90/common/launch.h"
#include "sm90/training/add_weights_fetch.cuh"

namespace twell::sm90 {
namespace {

using namespace add;

constexpr int kThreads = kFetchers + 256, kConsumerWarps = 8;
constexpr int kStages = 4;

constexpr int kFetchRegisters = 104, kMultiplyRegisters = 200;
static_assert(check_registers(kFetchRegisters, kMultiplyRegisters));

struct Control {
  uint64_t full[kStages], empty[kStages];
};
constexpr int kShared = 1024 + kStages * kStageBytes + sizeof(Control);
static_assert(kShared <= 227 * 1024);

template <typename T>
__device__ __forceinline__ void multiply(const Arguments& a, int first_block, uint8_t* shared, Ring ring) {
  const int lane = threadIdx.x % 32, warp = (threadIdx.x - kFetchers) / 32, warpgroup = warp / 4;
  const int items = count_items(a), steps = 2 * (a.blocks - first_block);
  const uint32_t stages = smem_address(shared);
  const auto release = [&](int stage) {
    if (lane == 0) barrier_arrive(ring.empty + stage);
  };
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    float sum[kHidden / 2];
    multiply_neurons<T>(sum, steps, stages, ring, warpgroup, release);

    const Tile tile = tile_at(a, item);
    if (tile.product.matrix == nullptr) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int neuron = tile.neuron + warp * 16 + half * 8 + lane / 4;
      if (neuron >= a.width) continue;
      T* const to = static_cast<T*>(tile.product.matrix) + int64_t{neuron} * a.hidden + tile.hidden + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kHidden / 8; ++j) {
        if (tile.hidden + j * 8 < a.hidden) {
          uint32_t* const word = reinterpret_cast<uint32_t*>(to + j * 8);
          const float2 old = unpack<T>(__ldcg(word));
          *word = pack<T>(sum[4 * j + 2 * half] + old.x, sum[4 * j + 2 * half + 1] + old.y);
        }
      }
    }
  }
}

template <typename T, bool kMultiplied>
__global__ void __launch_bounds__(kThreads, 1)
    add_kernel(const __grid_constant__ CUtensorMap row_map, const Arguments a) {
#if defined(TWELL_SM90_DEVICE)
  launch_dependents();
  int64_t kept = a.known ? __ldcg(a.kept) : 0;
  wait_for_previous();
  if (!a.known) kept = __ldcg(a.kept);
  if (kept >= a.first_block + a.blocks) return;
  const int first_block = kept > a.first_block ? static_cast<int>(kept - a.first_block) : 0;
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  Control& c = *reinterpret_cast<Control*>(shared + kStages * kStageBytes);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(c.full + s, kFetchers + 1);
      barrier_init(c.empty + s, kConsumerWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const Ring ring(c.full, c.empty, kStages);
  if (threadIdx.x < kFetchers) {
    give_registers<kFetchRegisters>();
    fetch<T, kMultiplied>(a, &row_map, first_block, shared, ring);
  } else {
    take_registers<kMultiplyRegisters>();
    multiply<T>(a, first_block, shared, ring);
  }
#endif
}

template <typename T, bool kMultiplied>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const State& state, const void* rows, const Product& first,
                   const Product& second, const Device& device, cudaStream_t stream) {
  const Active& active = chunk.active;
  const Arguments arguments{{first, second}, active.masks, state.totals, chunk.known, chunk.first_block(),
                            chunk.tokens,    active.blocks, active.words, ffn.hidden,  ffn.width};
  const int items = (ffn.width + kNeurons - 1) / kNeurons * (first.slices + second.slices);
  CUtensorMap row_map;
  const T* from = static_cast<const T*>(rows) + chunk.first * ffn.hidden;
  TWELL_RETURN_IF_ERROR(make_tensor_map(&row_map, ffn.dtype, from, chunk.tokens, ffn.hidden, kDepth));
  const int grid = items < device.sm_count ? items : device.sm_count;
  return launch_kernel(add_kernel<T, kMultiplied>, grid, kThreads, 1, kShared, stream, row_map, arguments);
}

Product make_product(const Ffn& ffn, const void* columns, const void* factors, void* matrix, void* bias) {
  const int slices = matrix != nullptr ? (ffn.hidden + kHidden - 1) / kHidden : bias != nullptr ? 1 : 0;
  return {columns, factors, matrix, bias, slices};
}

}  // namespace

cudaError_t launch_add_down(const Ffn& ffn, const Chunk& chunk, const State& state, const Gradients& gradients,
                            const Device& device, cudaStream_t stream) {
  if (gradients.down == nullptr) return cudaSuccess;
  const bool gated = ffn.gated(), bfloat = ffn.dtype == DType::kBFloat16;
  const void* ups = gated ? chunk.active.ups : nullptr;
  const Product h = make_product(ffn, chunk.active.columns, ups, gradients.down, nullptr);
  const auto run = bfloat ? gated ? launch<__nv_bfloat16, true> : launch<__nv_bfloat16, false>
                   : gated ? launch<__half, true>
                           : launch<__half, false>;
  return run(ffn, chunk, state, gradients.dy, h, {}, device, stream);
}

cudaError_t launch_add_gate_up(const Ffn& ffn, const Chunk& chunk, const State& state, const Gradients& gradients,
                               const Device& device, cudaStream_t stream) {
  const Product dg = make_product(ffn, chunk.active.columns, nullptr, gradients.gate, gradients.b_gate);
  Product du{};
  if (ffn.gated()) du = make_product(ffn, chunk.active.ups, nullptr, gradients.up, gradients.b_up);
  if (dg.slices + du.slices == 0) return cudaSuccess;
  const auto run = ffn.dtype == DType::kBFloat16 ? launch<__nv_bfloat16, false> : launch<__half, false>;
  return run(ffn, chunk, state, ffn.x, dg, du, device, stream);
}

}  // namespace twell::sm90
