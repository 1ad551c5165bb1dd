// Up projection over active neurons: h = relu(gate) * (x Wu^T + bu), for each block of 128 tokens and the neurons that
// any of them activates; the others' columns of h would be zero. h takes the place of relu(gate).
//
// A persistent thread block of four warpgroups an SM. Two fetch: x by bulk tensor copies, gathered rows of Wu by cp.async
// (four warps alone cannot keep enough of those in flight), and at the end of a tile its columns of relu(gate), through
// the same ring of stages. The other two multiply 64 tokens each.

#include "sm90_call.h"
#include "sm90_items.cuh"
#include "sm90_launch.h"
#include "sm90_primitives.cuh"
#include "sm90_wgmma.cuh"

namespace twell::sm90 {
namespace {

constexpr int kFetchers = 128, kThreads = kFetchers + 256, kConsumerWarps = 8, kDepth = 64, kStages = 4, kMaxNeurons = 256;
constexpr int kTokenBytes = kBlockTokens * kDepth * 2, kStageBytes = kTokenBytes + kMaxNeurons * kDepth * 2;
constexpr int kTurnNeurons = 128;  // columns of relu(gate) in a stage: 256 bytes each
static_assert(kTurnNeurons * kBlockTokens * 2 <= kStageBytes);

struct Control {
  uint64_t full[kStages], empty[kStages], listed[2], unlisted[2];
  int counts[kMaxBlocks];
  int first_item[kMaxBlocks + 1];
  int tile;  // neurons
  int scratch[kFetchers / 32];
  uint16_t neurons[2][kMaxNeurons];
  float bias[2][kMaxNeurons];
};
constexpr int kShared = 1024 + kStages * kStageBytes + sizeof(Control);
static_assert(kShared <= 227 * 1024);

struct Arguments {
  const void* up;
  const void* bias;
  const uint32_t* masks;
  void* columns;
  int hidden, width, words, blocks;
};

// Tiles of the width that takes the fewest rounds of all thread blocks, and each block's first tile.
__device__ void plan(Control& c, int blocks) {
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    int64_t best_cost = INT64_MAX;
    for (int tile = kMaxNeurons; tile >= 64; tile -= 64) {
      int items = 0;
      for (int b = lane; b < blocks; b += 32) items += (c.counts[b] + tile - 1) / tile;
      items = __reduce_add_sync(~0u, items);
      // x's share of the traffic does not shrink with the tile.
      const int64_t cost = static_cast<int64_t>((items + gridDim.x - 1) / gridDim.x) * (tile + 64);
      if (cost < best_cost) {
        best_cost = cost;
        if (lane == 0) c.tile = tile;
      }
    }
    __syncwarp();
    const int tile = c.tile;
    int total = 0;
    for (int start = 0; start < blocks; start += 32) {
      int items = start + lane < blocks ? (c.counts[start + lane] + tile - 1) / tile : 0;
      int sum = items;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += other;
      }
      if (start + lane < blocks) c.first_item[start + lane] = total + sum - items;
      total += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) c.first_item[blocks] = total;
  }
  __syncthreads();
}

template <typename T, int N>
__device__ __forceinline__ void multiply_tile(float* sum, Ring<kStages>& ring, uint32_t stages, int steps,
                                              int warpgroup, int lane) {
  for (int step = 0; step < steps; ++step, ring.advance()) {
    ring.wait_full();
    fence_async_proxy();  // cp.async wrote, tensor cores read
    const uint32_t stage = stages + ring.stage * kStageBytes;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      Wgmma<T, N, 0, 0>::multiply(sum, matrix_descriptor(stage + warpgroup * 8192 + k * 32, 16),
                                  matrix_descriptor(stage + kTokenBytes + k * 32, 16), step + k);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0 && lane == 0) barrier_arrive(ring.empty + ring.previous());
  }
  wgmma_wait<0>();
  if (lane == 0) barrier_arrive(ring.empty + ring.previous());
}

template <typename T>
__device__ __forceinline__ void fetch(const Arguments& a, const CUtensorMap* x_map, Control& c, uint8_t* shared) {
  Ring<kStages> ring(c.full, c.empty);
  const int thread = threadIdx.x, steps = (a.hidden + kDepth - 1) / kDepth;
  const uint32_t stages = smem_address(shared);
  const T* up = static_cast<const T*>(a.up);
  int block = 0, slot = 0;
  uint32_t phase = 0;
  for (int item = blockIdx.x; item < c.first_item[a.blocks]; item += gridDim.x) {
    while (item >= c.first_item[block + 1]) ++block;
    const int first = (item - c.first_item[block]) * c.tile, count = min(c.tile, c.counts[block] - first);
    const int groups = (count + 63) / 64;
    const uint16_t* neurons = c.neurons[slot];
    barrier_wait(c.unlisted + slot, phase ^ 1);
    list_active<kFetchers>(a.masks + static_cast<int64_t>(block) * a.words, a.words, first, count, c.neurons[slot], c.scratch, 2);
    for (int i = thread; i < count; i += kFetchers) {
      c.bias[slot][i] = a.bias == nullptr ? 0.0f : widen(static_cast<const T*>(a.bias)[neurons[i]]);
    }
    barrier_arrive(c.listed + slot);

    // Eight threads copy 128 bytes of a row; a thread serves every 32nd row.
    constexpr int kRows = kFetchers / 8;
    const int row = thread / 8, chunk = thread % 8;
    uint32_t offsets[kMaxNeurons / kRows];
#pragma unroll
    for (int i = 0; i < kMaxNeurons / kRows; ++i) {  // rows past the last repeat it: what they give is not kept
      offsets[i] = static_cast<uint32_t>(neurons[min(row + kRows * i, count - 1)]) * static_cast<uint32_t>(a.hidden);
    }
    const uint32_t place = kTokenBytes + row * 128 + ((chunk ^ (row & 7)) << 4);
    for (int step = 0; step < steps; ++step, ring.advance()) {
      ring.wait_empty();
      uint64_t* full = ring.full + ring.stage;
      if (thread == 0) {
        barrier_arrive_expect(full, kTokenBytes);
        load_box(shared + ring.stage * kStageBytes, x_map, step * kDepth, block * kBlockTokens, full);
      }
      const uint32_t to = stages + ring.stage * kStageBytes + place;
      const int column = step * kDepth + chunk * 8;
      const bool inside = column < a.hidden;
      const T* from = up + (inside ? column : 0);
#pragma unroll
      for (int g = 0; g < kMaxNeurons / 64; ++g) {
        if (g < groups) {
#pragma unroll
          for (int i = 64 / kRows * g; i < 64 / kRows * (g + 1); ++i) copy_16(to + i * kRows * 128, from + offsets[i], inside);
        }
      }
      barrier_arrive_on_copies(full);
    }
    // Columns of relu(gate): sixteen threads copy one.
    const T* columns = static_cast<const T*>(a.columns) + static_cast<int64_t>(block) * a.width * kBlockTokens;
    for (int start = 0; start < count; start += kTurnNeurons, ring.advance()) {
      ring.wait_empty();
      const uint32_t to = stages + ring.stage * kStageBytes;
      for (int n = thread / 16; n < min(kTurnNeurons, count - start); n += kFetchers / 16) {
        const int part = thread % 16;
        copy_16(to + n * 256 + ((part ^ (n & 7)) << 4),
                columns + static_cast<int64_t>(neurons[start + n]) * kBlockTokens + part * 8);
      }
      if (thread == 0) barrier_arrive(ring.full + ring.stage);
      barrier_arrive_on_copies(ring.full + ring.stage);
    }
    slot ^= 1;
    if (slot == 0) phase ^= 1;
  }
}

template <typename T>
__device__ __forceinline__ void multiply(const Arguments& a, Control& c, uint8_t* shared) {
  Ring<kStages> ring(c.full, c.empty);
  const int steps = (a.hidden + kDepth - 1) / kDepth, lane = threadIdx.x % 32;
  const int warp = (threadIdx.x - kFetchers) / 32, warpgroup = warp / 4;
  const uint32_t stages = smem_address(shared);
  int block = 0, slot = 0;
  uint32_t phase = 0;
  for (int item = blockIdx.x; item < c.first_item[a.blocks]; item += gridDim.x) {
    while (item >= c.first_item[block + 1]) ++block;
    const int first = (item - c.first_item[block]) * c.tile, count = min(c.tile, c.counts[block] - first);
    float sum[kMaxNeurons / 2];
    switch ((count + 63) / 64) {
      case 1: multiply_tile<T, 64>(sum, ring, stages, steps, warpgroup, lane); break;
      case 2: multiply_tile<T, 128>(sum, ring, stages, steps, warpgroup, lane); break;
      case 3: multiply_tile<T, 192>(sum, ring, stages, steps, warpgroup, lane); break;
      default: multiply_tile<T, 256>(sum, ring, stages, steps, warpgroup, lane); break;
    }
    barrier_wait(c.listed + slot, phase);
    const uint16_t* neurons = c.neurons[slot];
    T* columns = static_cast<T*>(a.columns) + static_cast<int64_t>(block) * a.width * kBlockTokens + warp * 16;
#pragma unroll
    for (int turn = 0; turn < kMaxNeurons / kTurnNeurons; ++turn) {
      const int start = turn * kTurnNeurons;
      if (start >= count) break;
      ring.wait_full();
      const uint32_t stage = stages + ring.stage * kStageBytes;
#pragma unroll
      for (int j = 0; j < kTurnNeurons / 8; j += 2) {  // 16 neurons
        if (start + 8 * j < count) {
          const int n = 8 * j + lane / 16 * 8 + lane % 8, part = 2 * warp + (lane / 8 & 1);
          const uint32_t at = stage + n * 256 + ((part ^ (n & 7)) << 4);
          uint32_t gate[4];
          load_matrices_transposed(gate, at);
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const int index = 4 * (start / 8 + j + m / 2) + m % 2 * 2, column = start + 8 * (j + m / 2) + lane % 4 * 2;
            const float2 g = unpack<T>(gate[m]);
            const float2 bias = *reinterpret_cast<const float2*>(&c.bias[slot][column]);
            gate[m] = pack<T>(g.x * (sum[index] + bias.x), g.y * (sum[index + 1] + bias.y));
          }
          store_matrices_transposed(at, gate);
        }
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kTurnNeurons / 16; ++i) {
        const int n = i * 16 + lane / 2, part = 2 * warp + (lane & 1);
        if (start + n < count) {
          const uint4 values = load_shared_16(stage + n * 256 + ((part ^ (n & 7)) << 4));
          const int64_t neuron = neurons[start + n];
          *reinterpret_cast<uint4*>(columns + neuron * kBlockTokens + (lane & 1) * 8) = values;
        }
      }
      fence_async_proxy();  // ordinary stores here, bulk copies next
      __syncwarp();
      if (lane == 0) barrier_arrive(ring.empty + ring.stage);
      ring.advance();
    }
    if (lane == 0) barrier_arrive(c.unlisted + slot);
    slot ^= 1;
    if (slot == 0) phase ^= 1;
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) up_kernel(const __grid_constant__ CUtensorMap x_map, const Arguments a) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  Control& c = *reinterpret_cast<Control*>(shared + kStages * kStageBytes);
  if (threadIdx.x == 0) {
    prefetch_map(&x_map);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(c.full + s, kFetchers + 1);
      barrier_init(c.empty + s, kConsumerWarps);
    }
    for (int s = 0; s < 2; ++s) {
      barrier_init(c.listed + s, kFetchers);
      barrier_init(c.unlisted + s, kConsumerWarps);
    }
    fence_barrier_init();
  }
  launch_dependents();
  wait_for_previous();
  count_active(a.masks, a.blocks, a.words, c.counts);
  plan(c, a.blocks);
  if (threadIdx.x < kFetchers) {
    give_registers<72>();
    fetch<T>(a, &x_map, c, shared);
  } else {
    take_registers<216>();
    multiply<T>(a, c, shared);
  }
#endif
}

template <typename T>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  CUtensorMap x_map;
  const T* x = static_cast<const T*>(ffn.x) + chunk.first * ffn.hidden;
  TWELL_RETURN_IF_ERROR(make_tensor_map(&x_map, ffn.dtype, x, chunk.tokens, ffn.hidden, kBlockTokens));
  const Arguments arguments{ffn.up, ffn.b_up, chunk.active.masks, chunk.active.columns, ffn.hidden, ffn.width,
                            chunk.active.words, chunk.active.blocks};
  return launch_kernel(up_kernel<T>, device.sm_count, kThreads, 1, kShared, stream, x_map, arguments);
}

}  // namespace

cudaError_t launch_up(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch<__nv_bfloat16>(ffn, chunk, device, stream)
                                       : launch<__half>(ffn, chunk, device, stream);
}

}  // namespace twell::sm90
