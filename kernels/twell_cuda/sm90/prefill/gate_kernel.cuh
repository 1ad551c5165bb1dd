// Gate projection, ReLU and packing: g = relu(x Wg^T + bg), of which only the columns of neurons that some token of a
// half block activates are written, with a bit for each neuron that says so.
//
// One persistent thread block of three warpgroups an SM: one thread fetches tiles of x and Wg with bulk tensor copies,
// two warpgroups multiply 64 tokens each by kNeurons neurons and pack the result while the next tiles arrive. In a
// cluster of two, both blocks work on the same neurons for neighbouring blocks of tokens, and each fetches half of Wg's
// tile for both: without that, the L2 cache could not keep the tensor cores busy.
//
// T is the type of g and bg. x and Wg are of type E: T, or e4m3 with a scale for each of their rows. A step takes 128
// bytes of a row, so in both forms it has the same copies and the same cycles, with e4m3 for twice as many products.
#pragma once

#include "sm90/common/chunk.h"
#include "sm90/common/primitives.cuh"
#include "sm90/common/wgmma.cuh"
#include "sm90/prefill/gate_scales.cuh"

namespace twell::sm90::gate {

constexpr int kThreads = 384, kConsumerWarps = 8, kRowBytes = 128, kSharedLimit = 227 * 1024;
constexpr float kFull = 0.8f;  // share of a tile's neurons

constexpr int kFetchRegisters = 40, kMultiplyRegisters = 232;
static_assert(check_registers(kFetchRegisters, kMultiplyRegisters));

template <int kNeurons>
struct Shape {
  static constexpr int kTokenBytes = kBlockTokens * kRowBytes;
  static constexpr int kStageBytes = kTokenBytes + kNeurons * kRowBytes;
  // A warp turns 16 tokens x 32 neurons around at a time; before, its tile's scales lie there.
  static constexpr int kTurnBytes = kConsumerWarps * 32 * 32;
  static constexpr int kStages = kNeurons >= 192 ? 4 : 6;
  static constexpr int kWords = kNeurons / 32;
  static constexpr int kMaskBytes = 2 * kConsumerWarps * kWords * 4;
  static constexpr int kShared = 1024 + kStages * kStageBytes + kTurnBytes + kMaskBytes + kStages * 16;
  static_assert(kShared <= kSharedLimit);
};

struct Arguments {
  const void* bias;
  Chunk chunk;
  int hidden, width, tiles;
  int groups;  // of as many blocks of tokens as a cluster has thread blocks
  // Items are tiles of `unit` neurons from the tile `begin` on, each in `parts`.
  int begin, items, unit, parts;
  bool beside;  // the launch before is of the same product: nothing to wait for, until the end
  RowScales scales;
};

struct Tile {
  int block, neuron, neurons;
};

// 16 blocks of tokens share the tiles of Wg that are in the L2 cache.
template <int kNeurons, int kCluster>
__device__ __forceinline__ Tile tile_at(int item, const Arguments& a) {
  constexpr int kSpan = 16 / kCluster;
  const int index = a.begin + item / a.parts, part = item % a.parts * kNeurons;
  const int first = index / (kSpan * a.tiles) * kSpan, rest = index - first * a.tiles;
  const int groups = min(kSpan, a.groups - first);
  const int block = (first + rest % groups) * kCluster + (kCluster == 1 ? 0 : cluster_rank());
  return {block, rest / groups * a.unit + part, min(kNeurons, a.unit - part)};
}

// kPromote: sums of 128 products are added up in fp32 outside the tensor cores (prefill_fp8.h).
template <typename T, typename E, int kNeurons, int kCluster, bool kPromote>
__global__ void __launch_bounds__(kThreads, 1)
    gate_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap gate_map,
                const Arguments a) {
#if defined(TWELL_SM90_DEVICE)
  using S = Shape<kNeurons>;
  constexpr int kDepth = kRowBytes / sizeof(E);
  constexpr bool kScaled = sizeof(E) == 1;
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  uint8_t* turn = shared + S::kStages * S::kStageBytes;
  uint32_t* warp_masks = reinterpret_cast<uint32_t*>(turn + S::kTurnBytes);
  uint64_t* barriers = reinterpret_cast<uint64_t*>(warp_masks + 2 * kConsumerWarps * S::kWords);
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  if (a.chunk.known_skipped()) {  // the same for all thread blocks: nothing of a cluster is under way
    launch_dependents();
    wait_for_previous();
    return;
  }
  if (threadIdx.x == 0) {
    prefetch_map(&x_map);
    prefetch_map(&gate_map);
    for (int s = 0; s < S::kStages; ++s) {
      barrier_init(barriers + s, 1);
      barrier_init(barriers + S::kStages + s, kConsumerWarps * kCluster);
    }
    fence_barrier_init();
  }
  if constexpr (kCluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  if (!a.beside) wait_for_previous();
  launch_dependents();  // not earlier: what runs beside this relies on what came before it
  if (a.chunk.skipped()) {
    if (a.beside) wait_for_previous();
    return;
  }
  Ring ring(barriers, barriers + S::kStages, S::kStages);
  const int steps = (a.hidden + kDepth - 1) / kDepth, items = a.items;
  const int first_item = blockIdx.x / kCluster, stride = gridDim.x / kCluster;

  if (group == 0) {
    give_registers<kFetchRegisters>();
    if (threadIdx.x == 0) {
      const int rank = kCluster == 1 ? 0 : cluster_rank();
      for (int item = first_item; item < items; item += stride) {
        const Tile tile = tile_at<kNeurons, kCluster>(item, a);
        for (int step = 0; step < steps; ++step, ring.advance()) {
          ring.wait_empty();
          uint8_t* stage = shared + ring.stage * S::kStageBytes;
          uint64_t* full = ring.full + ring.stage;
          barrier_arrive_expect(full, S::kStageBytes);
          load_box(stage, &x_map, step * kDepth, tile.block * kBlockTokens, full);
          if constexpr (kCluster == 1) {
            load_box(stage + S::kTokenBytes, &gate_map, step * kDepth, tile.neuron, full);
          } else {
            constexpr int kPart = kNeurons / kCluster;
            load_box_multicast(stage + S::kTokenBytes + rank * kPart * kRowBytes, &gate_map, step * kDepth,
                               tile.neuron + rank * kPart, full, (1 << kCluster) - 1);
          }
        }
      }
    }
    if constexpr (kCluster > 1) {
      __syncwarp();
      cluster_sync();  // the other block may still write here and arrive at these barriers
    }
    if (a.beside) wait_for_previous();  // whoever waits for this waits for that too
    return;
  }

  take_registers<kMultiplyRegisters>();
  const int warpgroup = group - 1, warp = threadIdx.x / 32 - 4;  // of the eight that multiply; 16 tokens each
  const uint32_t rows = smem_address(turn) + warp * 32 * 32;  // one of 32 bytes for each of 32 neurons
  const auto release = [&](int stage) {
    if (lane < kCluster) {
      if constexpr (kCluster == 1) {
        barrier_arrive(ring.empty + stage);
      } else {
        barrier_arrive_at(ring.empty + stage, lane);
      }
    }
  };
  const Active& active = a.chunk.active;
  const int tokens = static_cast<int>(a.chunk.tokens);
  int parity = 0;
  for (int item = first_item; item < items; item += stride, parity ^= 1) {
    const Tile tile = tile_at<kNeurons, kCluster>(item, a);
    [[maybe_unused]] TileScales<kNeurons> scales;
    if constexpr (kScaled) {
      const int first_token = tile.block * kBlockTokens + warp * 16;
      scales.load(a.scales, first_token, tokens, tile.neuron, a.width);  // there by the time that the sums are
    }
    float sum[kNeurons / 2];
    [[maybe_unused]] float part[kPromote ? kNeurons / 2 : 1];
    if constexpr (kPromote) {
#pragma unroll
      for (float& value : sum) value = 0.0f;
    }
    for (int step = 0; step < steps; ++step, ring.advance()) {
      ring.wait_full();
      const uint32_t stage = smem_address(shared) + ring.stage * S::kStageBytes;
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kRowBytes / 32; ++k) {
        Wgmma<E, kNeurons, 0, 0>::multiply(kPromote ? part : sum,
                                           matrix_descriptor(stage + warpgroup * 8192 + k * 32, 16),
                                           matrix_descriptor(stage + S::kTokenBytes + k * 32, 16),
                                           kPromote ? k : step + k);
      }
      wgmma_commit();
      if constexpr (kPromote) {
        wgmma_wait<0>();  // the other warpgroup keeps the tensor cores busy
        release(ring.stage);
        add_up(sum, part);
      } else {
        wgmma_wait<1>();
        if (step > 0) release(ring.previous());
      }
    }
    if constexpr (!kPromote) {
      wgmma_wait<0>();
      release(ring.previous());
    }
    if constexpr (kScaled) scales.apply(sum, reinterpret_cast<float*>(turn + warp * 32 * 32));

    // Thread's values: tokens row and row + 8, neurons 8 j + column and + 1.
    const int row = warp * 16 + lane / 4, column = lane % 4 * 2;
    uint32_t packed[kNeurons / 4];
    const bool keep_low = tile.block * kBlockTokens + row < tokens;
    const bool keep_high = tile.block * kBlockTokens + row + 8 < tokens;
#pragma unroll
    for (int j = 0; j < kNeurons / 8; ++j) {
      if (a.bias != nullptr) {  // past the end of x or Wg a bias must not wake anything
        const int neuron = tile.neuron + 8 * j + column;
        const float first = neuron < a.width ? widen(static_cast<const T*>(a.bias)[neuron]) : 0.0f;
        const float second = neuron + 1 < a.width ? widen(static_cast<const T*>(a.bias)[neuron + 1]) : 0.0f;
        sum[4 * j] = keep_low ? sum[4 * j] + first : 0.0f;
        sum[4 * j + 1] = keep_low ? sum[4 * j + 1] + second : 0.0f;
        sum[4 * j + 2] = keep_high ? sum[4 * j + 2] + first : 0.0f;
        sum[4 * j + 3] = keep_high ? sum[4 * j + 3] + second : 0.0f;
      }
      packed[2 * j] = pack<T>(relu(sum[4 * j]), relu(sum[4 * j + 1]));
      packed[2 * j + 1] = pack<T>(relu(sum[4 * j + 2]), relu(sum[4 * j + 3]));
    }
    uint32_t* masks = warp_masks + parity * kConsumerWarps * S::kWords;
#pragma unroll
    for (int w = 0; w < S::kWords; ++w) {
      uint32_t bits = 0;
#pragma unroll
      for (int j = 4 * w; j < 4 * w + 4; ++j) {
        const uint32_t either = packed[2 * j] | packed[2 * j + 1];
        bits |= ((either & 0xFFFFu) != 0 ? 1u : 0u) << (j % 4 * 8);
        bits |= (either >> 16 != 0 ? 2u : 0u) << (j % 4 * 8);
      }
      bits = __reduce_or_sync(~0u, bits << column);
      if (lane == 0) masks[warp * S::kWords + w] = bits;
    }
    named_barrier<256>(1);
    const int words = tile.neurons / 32, word = tile.neuron / 32 + lane;  // a lane for each word of the tile
    // Neurons past the width have sums too, and a token that holds NaN makes them NaN.
    const int in_tile = min(tile.neurons, a.width - tile.neuron), left = in_tile - 32 * lane;
    const uint32_t there = left >= 32 ? ~0u : left > 0 ? (1u << left) - 1 : 0;
    uint32_t mask = 0, other_mask = 0;
    if (lane < words && word < active.words) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        mask |= masks[(warpgroup * 4 + w) * S::kWords + lane] & there;
        other_mask |= masks[((1 - warpgroup) * 4 + w) * S::kWords + lane] & there;
      }
    }
    // Nearly full tiles are called full, so that later kernels find rows without gaps.
    if (__reduce_add_sync(~0u, __popc(mask | other_mask)) >= kFull * in_tile) mask = there;
    if (tile.block >= active.blocks) continue;
    if (warp % 4 == 0 && lane < words && word < active.words) {
      active.masks[(static_cast<int64_t>(tile.block) * 2 + warpgroup) * active.words + word] = mask;
    }
    T* columns =
        static_cast<T*>(active.columns) + static_cast<int64_t>(tile.block) * a.width * kBlockTokens + warp * 16;
#pragma unroll
    for (int pass = 0; pass < kNeurons / 32; ++pass) {
      const uint32_t bits = __shfl_sync(~0u, mask, pass);
      if (bits == 0) continue;
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const int n = 8 * j + lane / 16 * 8 + lane % 8, half = lane / 8 & 1;
        store_matrices_transposed(rows + n * 32 + ((half ^ (n >> 2 & 1)) << 4),
                                  {packed[2 * (4 * pass + j)], packed[2 * (4 * pass + j) + 1],
                                   packed[2 * (4 * pass + j + 1)], packed[2 * (4 * pass + j + 1) + 1]});
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int n = i * 16 + lane / 2, half = lane & 1;
        if (bits >> n & 1) {
          const uint4 values = load_shared_16(rows + n * 32 + ((half ^ (n >> 2 & 1)) << 4));
          const int64_t neuron = tile.neuron + pass * 32 + n;
          *reinterpret_cast<uint4*>(columns + neuron * kBlockTokens + half * 8) = values;
        }
      }
    }
  }
  if constexpr (kCluster > 1) cluster_sync();
  if (a.beside) wait_for_previous();
#endif
}

}  // namespace twell::sm90::gate
