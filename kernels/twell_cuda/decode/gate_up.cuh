// First of a decode call's two kernels: h = relu(x Wg^T + bg) * (x Wu^T + bu) for the active neurons, or
// relu(x Wu^T + bu) without a gate, into the workspace (layout: decode/plan.h).
//
// A thread block owns 16 or 48 neurons and reads their gate rows once, straight from global memory into tensor-core
// operands; its warps share out k and add up through shared memory. Then it does the same with the up rows of its
// active neurons alone, gathered. Neurons are the rows of the product, tokens the columns.
//
// Within each 64 consecutive bytes of a weight's row, lane q of four takes 16 consecutive ones, and the activations of
// the same k: both operands see the same permutation of k, so no data moves between lanes. `Weight` is the call's own
// type, or an 8-bit one, of which each 16 bytes meet 32 of activations.
#pragma once

#include "decode/decode.h"
#include "decode/gate.cuh"
#include "decode/launch.h"
#include "decode/reduce.cuh"

namespace twell::decoding {
namespace {

// Gate rows fetched into L2 while an earlier kernel still runs: this many times 256 bytes for each row and warp.
constexpr int kPrefetchGate = 2;

constexpr uint32_t kPieceBytes = 64;  // of a weight's row: 32 consecutive k, or 64 of 8-bit ones

// First byte of a row that is the warp's: rows are shared out by whole pieces. At warp = kDecodeWarps, the row's end
// rounded up to a piece.
__device__ __forceinline__ uint32_t share_of_k(uint32_t row_bytes, int warp) {
  return (row_bytes + kPieceBytes - 1) / kPieceBytes * warp / kDecodeWarps * kPieceBytes;
}

// threadIdx.x, read anew: what follows from it is then not held in registers through the products before.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// Pieces of k in flight for weights and for activations, within the registers that the tile leaves.
template <int kTiles, int kGroups, int kPerByte>
struct Depth {
  static constexpr int weights = kTiles > 1 && kGroups == 8 ? (kPerByte == 2 ? 2 : 3) : 4;
  static constexpr int tokens = kGroups == 8 ? 1 : kGroups == 1 ? 4 / kPerByte : 2 / kPerByte;
  static_assert(weights % tokens == 0);
};

// The two rows of each tile that a lane reads: lane / 4 and lane / 4 + 8. Where a tile has no such row, a row that
// another lane reads anyway: the sums are then not used, and the requests of a warp fall together.
template <int kTiles>
struct Rows {
  const char* at[2 * kTiles];
};

// sum[tile * kGroups + group] = rows x^T over this warp's share of k. `before_x` runs once the first weights are on
// their way; x is not read earlier.
template <typename Half, typename Weight, int kTiles, int kGroups, typename BeforeX>
__device__ __forceinline__ void multiply(float (&sum)[kTiles * kGroups][4], Rows<kTiles> rows, const GateUpParams& p,
                                         BeforeX before_x) {
  constexpr int kPerByte = kRatio<Half, Weight>;
  constexpr int kWeights = Depth<kTiles, kGroups, kPerByte>::weights;
  constexpr int kTokens = Depth<kTiles, kGroups, kPerByte>::tokens;
  const int warp = thread_index() / 32;
  const int lane = thread_index() % 32;
  // k counts bytes of weights from here on
  const uint32_t end = min(share_of_k(p.row_bytes, warp + 1), p.row_bytes);
  uint32_t k = share_of_k(p.row_bytes, warp);  // the warp's next piece, of which the lane takes 16 bytes
  const uint32_t lane_end = end > lane % 4 * 16 ? end - lane % 4 * 16 : 0;
  const uint32_t start = k + lane % 4 * 16;
  const char* x = p.x + (lane / 4 * p.row_bytes + start) * kPerByte;
  const uint32_t group_bytes = 8 * p.row_bytes * kPerByte;
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) rows.at[i] += start;

  uint4 a[kWeights][kTiles][2];
  uint4 b[kTokens][kGroups][kPerByte];
  // Piece `ahead` after k.
  const auto load_a = [&](uint4(&to)[kTiles][2], int ahead) {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      load_weights(to[i / 2][i % 2], rows.at[i] + ahead * kPieceBytes, k + ahead * kPieceBytes < lane_end);
    }
  };
  const auto load_b = [&](uint4(&to)[kPerByte], int group, int ahead) {
    // With fewer than half of the groups in use, a smaller kGroups would have been taken.
    const bool is_token = group < kGroups / 2 || group * 8 + lane / 4 < p.tokens;
    const char* const from = x + group * group_bytes + ahead * kPieceBytes * kPerByte;
#pragma unroll
    for (int i = 0; i < kPerByte; ++i) {
      load_tokens(to[i], from + 16 * i, k + ahead * kPieceBytes < lane_end && is_token);
    }
  };

#pragma unroll
  for (int i = 0; i < kTiles * kGroups; ++i) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0.f;
#pragma unroll
  for (int u = 0; u < kWeights; ++u) load_a(a[u], u);
  before_x();
#pragma unroll
  for (int i = 0; i < kTokens * kGroups; ++i) load_b(b[i / kGroups][i % kGroups], i % kGroups, i / kGroups);

  while (k < end) {
#pragma unroll
    for (int u = 0; u < kWeights; ++u) {
      if (k + u * kPieceBytes >= end) break;  // the same for the whole warp
#pragma unroll
      for (int part = 0; part < kPerByte; ++part) {
        uint32_t w[kTiles][2][4];
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i) unpack<Half, Weight>(w[i / 2][i % 2], a[u][i / 2][i % 2], part);
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
          auto& t = b[u % kTokens][n];
#pragma unroll
          for (int m = 0; m < kTiles; ++m) {
            const auto &low = w[m][0], &high = w[m][1];
            mma<Half>(sum[m * kGroups + n], low[0], high[0], low[1], high[1], t[part].x, t[part].y);
            mma<Half>(sum[m * kGroups + n], low[2], high[2], low[3], high[3], t[part].z, t[part].w);
          }
          if (part == kPerByte - 1) load_b(t, n, u + kTokens);
        }
      }
      load_a(a[u], u + kWeights);
    }
    k += kWeights * kPieceBytes;
    x += kWeights * kPieceBytes * kPerByte;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) rows.at[i] += kWeights * kPieceBytes;
  }
}

template <int kValue>
struct Count {
  static constexpr int value = kValue;
};

// Thread blocks that a multiprocessor must have room for. Three of 16 neurons: an H200 then holds all of F = 5632 at
// once. Two groups of tokens fit in the registers that this leaves on Hopper, but not with bytes; elsewhere, too, the
// compiler would spill.
__host__ __device__ constexpr int resident_blocks(int tiles, int groups, int per_byte) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  return tiles > 1 || groups > 2 ? 1 : groups == 2 && per_byte == 2 ? 2 : 3;
#else
  return tiles > 1 || groups > 2 ? 1 : groups == 2 ? 2 : 3;
#endif
}

template <typename Half, typename Weight, int kTiles, int kGroups>
__global__ void __launch_bounds__(kDecodeThreads, resident_blocks(kTiles, kGroups, kRatio<Half, Weight>))
    gate_up_kernel(const __grid_constant__ GateUpParams p) {
  constexpr int kSlots = kTiles == 1 ? kDecodeWarps : kDecodeWarps / 2;
  constexpr int kElements = kTiles * kGroups * 32;  // of four sums
  constexpr int kNeurons = kTiles * kBlockNeurons;
  constexpr int kTokens = 8 * kGroups;
  static_assert(kNeurons <= kDecodeThreads);
  extern __shared__ float4 shared[];
  float4* const gate = shared;  // after the activation
  float4* const slots = shared + kElements;
  __shared__ uint32_t masks[kTiles];
  __shared__ uint8_t active[kNeurons];  // in ascending order

  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int first_block = blockIdx.x * kTiles;
  const int first = first_block * kBlockNeurons;

  float sum[kTiles * kGroups][4];
  {
    Rows<kTiles> rows;
    const char* const gate_rows = p.gate + static_cast<int64_t>(first) * p.row_bytes;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      rows.at[i] = gate_rows + min(i * 8 + lane / 4, p.width - 1 - first) * p.row_bytes;
    }
    multiply<Half, Weight, kTiles, kGroups>(sum, rows, p, [&] {
      // What comes before the wait overlaps the kernels before this one: it touches nothing but weights.
      const uint32_t end = min(share_of_k(p.row_bytes, warp + 1), p.row_bytes);
      const uint32_t start = share_of_k(p.row_bytes, warp) +
                             Depth<kTiles, kGroups, kRatio<Half, Weight>>::weights * kPieceBytes + lane % 2 * 128;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        const int row = m * kBlockNeurons + lane / 2;
#pragma unroll
        for (int i = 0; i < kPrefetchGate; ++i) {
          const uint32_t k = start + i * 256;
          if (kOverlaps && k < end && first + row < p.width) prefetch_l2(gate_rows + (row * p.row_bytes + k));
        }
      }
      wait_for_previous_kernel();
      // Not before the wait: so no L1 of a multiprocessor holds lines that a kernel still to finish will change.
      let_next_kernel_start();
    });
  }
  if (thread < kTiles) masks[thread] = 0;
  for (int i = blockIdx.x * kDecodeThreads + thread; i < p.slices; i += gridDim.x * kDecodeThreads) p.arrivals[i] = 0;
  leave_partials<kSlots>(slots, sum, warp, lane);

  for (int e = thread; e < kElements; e += kDecodeThreads) {  // whole warps: kElements is a multiple of 32
    float4 v = sum_of_partials<kSlots>(slots, kElements, e);
    const int tile = e / 32 / kGroups;
    const int neuron = first + tile * kBlockNeurons + lane / 4;
    const int token = e / 32 % kGroups * 8 + lane % 4 * 2;
    activate<Half, Weight>(v, p, neuron, token);
    gate[e] = v;
    const uint32_t low = any_of_four(v.x != 0.f || v.y != 0.f);
    const uint32_t high = any_of_four(v.z != 0.f || v.w != 0.f);
    if (lane == 0) atomicOr(&masks[tile], low | high << 8);
  }
  __syncthreads();

  if (thread < kTiles && first_block + thread < p.blocks) p.masks[first_block + thread] = masks[thread];
  if (thread == 0 && blockIdx.x == gridDim.x - 1 && p.blocks % 2 == 1) p.masks[p.blocks] = 0;
  int active_count = 0;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) active_count += __popc(masks[m]);
  if (active_count == 0) return;
  if (thread < kNeurons) {
    const int tile = thread / kBlockNeurons;
    const uint32_t mask = masks[tile], bit = 1u << thread % kBlockNeurons;
    if (mask & bit) {
      int rank = __popc(mask & (bit - 1));
#pragma unroll
      for (int m = 0; m < kTiles; ++m) rank += m < tile ? __popc(masks[m]) : 0;
      active[rank] = static_cast<uint8_t>(thread);
    }
  }
  __syncthreads();

  if (active_count <= p.prefetch_max_active * kTiles) {
    for (int i = warp; i < active_count; i += kDecodeWarps) {
      const char* row = p.down + static_cast<int64_t>(first + active[i]) * p.row_bytes;
      for (uint32_t byte = lane * 128; byte < p.row_bytes + 127; byte += 32 * 128) {
        prefetch_l2(row + min(byte, p.row_bytes - 16));
      }
    }
  }

  if (p.up != nullptr) {
    const auto multiply_up = [&](auto tiles) {
      constexpr int kUpTiles = decltype(tiles)::value;
      Rows<kUpTiles> rows;
#pragma unroll
      for (int i = 0; i < 2 * kUpTiles; ++i) {
        const int neuron = first + active[min(i * 8 + lane / 4, active_count - 1)];
        rows.at[i] = p.up + static_cast<int64_t>(neuron) * p.row_bytes;
      }
      float up_sum[kUpTiles * kGroups][4];
      multiply<Half, Weight, kUpTiles, kGroups>(up_sum, rows, p, [] {});
      leave_partials<kSlots>(slots, up_sum, warp, lane);
    };
    if constexpr (kTiles == 1) {
      multiply_up(Count<1>{});
    } else {
      if (active_count <= kBlockNeurons) {
        multiply_up(Count<1>{});
      } else if (active_count <= 2 * kBlockNeurons) {
        multiply_up(Count<2>{});
      } else {
        multiply_up(Count<3>{});
      }
    }
  }

  const int up_elements = (active_count + kBlockNeurons - 1) / kBlockNeurons * kGroups * 32;
  for (int i = thread_index(); i < kTiles * kQuadsPerBlock * kTokens; i += kDecodeThreads) {
    const int tile = i / kTokens / kQuadsPerBlock, quad = i / kTokens % kQuadsPerBlock, token = i % kTokens;
    const int rest = __popc(masks[tile]) - 4 * quad;  // neurons from this quad on
    if (rest <= 0) continue;
    int rank = 4 * quad;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) rank += m < tile ? __popc(masks[m]) : 0;
    float h[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j >= rest) break;
      const int neuron = active[rank + j];
      h[j] = sum_at<kGroups>(gate, neuron, token);
      if (p.up != nullptr && h[j] != 0.f) {
        float up = sum_at<kGroups>(slots, rank + j, token);
#pragma unroll
        for (int s = 1; s < kSlots; ++s) up += sum_at<kGroups>(slots + s * up_elements, rank + j, token);
        if constexpr (kScaled<Weight>) up *= scale_of(p.s_up, first + neuron, p.width);
        h[j] *= up + bias_of<Half>(p.b_up, first + neuron, p.width);
      }
    }
    p.products[((first_block + tile) * kQuadsPerBlock + quad) * kTokens + token] =
        make_uint2(pack<Half>(h[0], h[1]), pack<Half>(h[2], h[3]));
  }
}

template <typename Half, typename Weight, int kTiles, int kGroups>
cudaError_t launch(const DecodePlan& plan, const GateUpParams& params, cudaStream_t stream) {
  constexpr int kSlots = kTiles == 1 ? kDecodeWarps : kDecodeWarps / 2;
  constexpr int kShared = (kSlots + 1) * kTiles * kGroups * 32 * static_cast<int>(sizeof(float4));
  const int grid = (params.blocks + kTiles - 1) / kTiles;
  return launch_decode_kernel(gate_up_kernel<Half, Weight, kTiles, kGroups>, {dim3(grid), kDecodeThreads, kShared},
                              params, plan.kernels, stream);
}

template <typename Half, typename Weight>
cudaError_t launch_gate_up_of(const Ffn& ffn, const DecodePlan& plan, void* workspace, cudaStream_t stream) {
  const GateUpParams params = gate_up_params(ffn, plan, workspace);
  if (plan.gate_tiles == 3) {
    return plan.groups == 4 ? launch<Half, Weight, 3, 4>(plan, params, stream)
                            : launch<Half, Weight, 3, 8>(plan, params, stream);
  }
  switch (plan.groups) {
    case 1: return launch<Half, Weight, 1, 1>(plan, params, stream);
    case 2: return launch<Half, Weight, 1, 2>(plan, params, stream);
    case 4: return launch<Half, Weight, 1, 4>(plan, params, stream);
    default: return launch<Half, Weight, 1, 8>(plan, params, stream);
  }
}

}  // namespace
}  // namespace twell::decoding
