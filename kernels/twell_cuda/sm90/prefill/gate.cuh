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

#include <type_traits>

#include "sm90/common/chunk.h"
#include "sm90/common/launch.h"
#include "sm90/common/primitives.cuh"
#include "sm90/common/wgmma.cuh"

namespace twell::sm90::gate {

// What makes a tile's sums of e4m3 products those of the numbers they stand for.

// Of e4m3 operands; the gate's sums are multiplied by both. Null where the operands are the numbers themselves.
struct RowScales {
  const float* tokens;   // (tokens of the chunk)
  const float* neurons;  // (F)
};

// Scales of a warp's 16 tokens x kNeurons neurons: a lane's two tokens, and every 32nd neuron.
template <int kNeurons>
struct TileScales {
  float low, high;  // of tokens lane / 4 and lane / 4 + 8
  float neurons[kNeurons / 32];

  // Past the end of either scales may be anything: 0.
  __device__ __forceinline__ void load(const RowScales& scales, int first_token, int tokens, int first_neuron,
                                       int width) {
    const int lane = threadIdx.x % 32, token = first_token + lane / 4;
    low = token < tokens ? __ldcg(scales.tokens + token) : 0.0f;  // from L2: L1 may hold an earlier chunk's
    high = token + 8 < tokens ? __ldcg(scales.tokens + token + 8) : 0.0f;
#pragma unroll
    for (int i = 0; i < kNeurons / 32; ++i) {
      const int neuron = first_neuron + i * 32 + lane;
      neurons[i] = neuron < width ? scales.neurons[neuron] : 0.0f;
    }
  }

  // A lane's sums are of two tokens and neurons 8 j + lane % 4 * 2 and + 1, so it reads other lanes' scales from the
  // warp's `turn` (kNeurons).
  __device__ __forceinline__ void apply(float (&sum)[kNeurons / 2], float* turn) const {
    const int lane = threadIdx.x % 32;
    __syncwarp();  // the tile before has been read from there
#pragma unroll
    for (int i = 0; i < kNeurons / 32; ++i) turn[i * 32 + lane] = neurons[i];
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kNeurons / 8; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(turn + 8 * j + lane % 4 * 2);
      sum[4 * j] *= pair.x, sum[4 * j + 1] *= pair.y, sum[4 * j + 2] *= pair.x, sum[4 * j + 3] *= pair.y;
      sum[4 * j] *= low, sum[4 * j + 1] *= low, sum[4 * j + 2] *= high, sum[4 * j + 3] *= high;
    }
  }
};

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

template <typename T, typename E, int kNeurons, int kCluster>
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
  const uint32_t rows = smem_address(turn) + warp * 32 * 32;     // one of 32 bytes for each of 32 neurons
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
    for (int step = 0; step < steps; ++step, ring.advance()) {
      ring.wait_full();
      const uint32_t stage = smem_address(shared) + ring.stage * S::kStageBytes;
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kRowBytes / 32; ++k) {
        Wgmma<E, kNeurons, 0, 0>::multiply(sum, matrix_descriptor(stage + warpgroup * 8192 + k * 32, 16),
                                           matrix_descriptor(stage + S::kTokenBytes + k * 32, 16), step + k);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0) release(ring.previous());
    }
    wgmma_wait<0>();
    release(ring.previous());
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

// How the gate's tiles are cut, and its launches.

constexpr int64_t kLaunchCost = 160;  // of a second launch, in units of tile_cost, where a step is 64 of D

// What the gate multiplies: x (chunk's tokens, D) and Wg (F, D), rows so many elements apart.
struct Factors {
  const void* x;
  const void* gate;
  int64_t x_stride, gate_stride;
  RowScales scales;
};

// What shared memory takes for a step: 32 KiB of x, written once and read once, and 3 x 128 bytes a neuron.
constexpr int64_t tile_cost(int neurons) { return 256 + 3 * neurons; }

// The tile width of least time. Tiles of 256 that would make a poorly filled last round are cut into parts of `last`,
// but for launches that mostly end at once.
struct Cut {
  int neurons, last;  // last == neurons: nothing is cut
};

inline Cut best_cut(const Ffn& ffn, int groups, int clusters, bool whole, int64_t launch_cost) {
  const auto rounds = [&](int64_t items) { return (items + clusters - 1) / clusters; };
  Cut best{};
  int64_t best_cost = INT64_MAX;
  const auto consider = [&](Cut cut, int64_t cost) {
    if (cost < best_cost) best = cut, best_cost = cost;
  };
  for (const int neurons : {256, 192, 128, 96, 64}) {
    const int64_t items = int64_t{groups} * ((ffn.width + neurons - 1) / neurons);
    consider({neurons, neurons}, rounds(items) * tile_cost(neurons));
    if (whole || neurons != 256 || items < clusters) continue;
    for (const int last : {128, 96, 64}) {
      const int64_t parts = items % clusters * ((256 + last - 1) / last);
      consider({256, last}, items / clusters * tile_cost(256) + rounds(parts) * tile_cost(last) + launch_cost);
    }
  }
  return best;
}

// Of the tiles of `unit` neurons those from `begin` to `end`, each in parts of kNeurons.
template <typename T, typename E, int kNeurons, int kCluster>
cudaError_t launch(const Ffn& ffn, const Factors& f, const Chunk& chunk, const Device& device, cudaStream_t stream,
                   int unit, int begin, int end) {
  CUtensorMap x_map, gate_map;
  constexpr int kPart = kNeurons / kCluster;
  if constexpr (sizeof(E) == 1) {
    TWELL_RETURN_IF_ERROR(make_byte_map(&x_map, f.x, chunk.tokens, ffn.hidden, f.x_stride, kBlockTokens));
    TWELL_RETURN_IF_ERROR(make_byte_map(&gate_map, f.gate, ffn.width, ffn.hidden, f.gate_stride, kPart));
  } else {
    TWELL_RETURN_IF_ERROR(make_tensor_map(&x_map, ffn.dtype, f.x, chunk.tokens, ffn.hidden, kBlockTokens));
    TWELL_RETURN_IF_ERROR(make_tensor_map(&gate_map, ffn.dtype, f.gate, ffn.width, ffn.hidden, kPart));
  }
  const int groups = (chunk.active.blocks + kCluster - 1) / kCluster, tiles = (ffn.width + unit - 1) / unit;
  const int parts = (unit + kNeurons - 1) / kNeurons, items = (end - begin) * parts;
  const Arguments arguments{ffn.b_gate, chunk, ffn.hidden, ffn.width, tiles,     groups,
                            begin,      items, unit,       parts,     begin > 0, f.scales};
  const int grid = min(device.sm_count / kCluster, items) * kCluster;
  return launch_kernel(gate_kernel<T, E, kNeurons, kCluster>, grid, kThreads, kCluster, Shape<kNeurons>::kShared,
                       stream, x_map, gate_map, arguments);
}

template <typename T, typename E, int kCluster>
cudaError_t launch_width(int neurons, const Ffn& ffn, const Factors& f, const Chunk& chunk, const Device& device,
                         cudaStream_t stream, int unit, int begin, int end) {
  const auto run = [&](auto width) {
    return launch<T, E, decltype(width)::value, kCluster>(ffn, f, chunk, device, stream, unit, begin, end);
  };
  switch (neurons) {
    case 64: return run(std::integral_constant<int, 64>());
    case 96: return run(std::integral_constant<int, 96>());
    case 128: return run(std::integral_constant<int, 128>());
    case 192: return run(std::integral_constant<int, 192>());
    default: return run(std::integral_constant<int, 256>());
  }
}

template <typename T, typename E, int kCluster>
cudaError_t launch_cluster(const Ffn& ffn, const Factors& f, const Chunk& chunk, const Device& device,
                           cudaStream_t stream) {
  const int groups = (chunk.active.blocks + kCluster - 1) / kCluster, clusters = device.sm_count / kCluster;
  // A step of fewer bytes an element is more of D, and a launch so many times as long beside it.
  const int64_t launch_cost = kLaunchCost * 2 / static_cast<int64_t>(sizeof(E));
  const Cut cut = best_cut(ffn, groups, clusters, chunk.kept != nullptr, launch_cost);
  const int tiles = groups * ((ffn.width + cut.neurons - 1) / cut.neurons);
  const int whole = cut.last == cut.neurons ? tiles : tiles / clusters * clusters;
  const auto run = [&](int neurons, int begin, int end) {
    return launch_width<T, E, kCluster>(neurons, ffn, f, chunk, device, stream, cut.neurons, begin, end);
  };
  TWELL_RETURN_IF_ERROR(run(cut.neurons, 0, whole));
  return whole == tiles ? cudaSuccess : run(cut.last, whole, tiles);
}

template <typename T, typename E>
cudaError_t launch_type(const Ffn& ffn, const Factors& f, const Chunk& chunk, const Device& device,
                        cudaStream_t stream) {
  return chunk.active.blocks > 1 ? launch_cluster<T, E, 2>(ffn, f, chunk, device, stream)
                                 : launch_cluster<T, E, 1>(ffn, f, chunk, device, stream);
}

}  // namespace twell::sm90::gate
