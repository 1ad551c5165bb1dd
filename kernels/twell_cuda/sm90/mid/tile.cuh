// What the thread blocks of sm90/mid/gate_up.cu share, and in part those of half_gate_up.cu: shared memory, barriers,
// the list of active neurons, and the gate.
//
// Eight warps multiply, three gather rows of Wu, one fetches boxes.
#pragma once

#include <cstddef>

#include "sm90/common/launch.h"
#include "sm90/common/prefix_sum.cuh"
#include "sm90/common/primitives.cuh"
#include "sm90/common/wgmma.cuh"
#include "sm90/mid/mid.h"

namespace twell::sm90::mid {

constexpr int kWarps = 8, kMultipliers = kWarps * 32, kGatherers = 96, kThreads = kMultipliers + kGatherers + 32;
constexpr int kCluster = 2, kDepth = 64;
constexpr int kHalfBytes = kHalfTokens * kDepth * 2, kTokenBytes = 2 * kHalfBytes;
constexpr int kMaxStages = 5;
constexpr int kSharedLimit = 227 * 1024;
constexpr int kGatherRows = kGatherers / 8;                          // rows at a time, eight threads each
constexpr int kTileBarrier = 1, kMaskBarrier = 2, kListBarrier = 3;  // named

// An entry of the list: which halves of the block activate a neuron, and its place among the thread block's.
constexpr uint32_t kFirstHalf = 1 << 14, kSecondHalf = 1 << 15, kPlace = kFirstHalf - 1;
static_assert(kMidMaxOwn <= kFirstHalf);

struct Control {
  // Boxes are there; a stage is free in both blocks of the cluster; gathered rows are there.
  uint64_t full[kMaxStages], empty[kMaxStages], copied[kMaxStages];
  // Columns of relu(gate) are all in global memory; in shared memory; not needed there any more. The list is made.
  uint64_t gates_stored, gates_full, gates_empty, listed;
  uint32_t warp_masks[2][kWarps][6];  // of the neurons of a pass
  uint16_t masks[2][kMidMaxOwn / 16];
  uint16_t list[kMidMaxOwn];
  int count;  // of the list
};

template <int kNeurons>
struct Shape {
  // Rows of Wu at a time. Where about half of 2 x 176 neurons are active, many blocks have a few more than 176, for
  // which they would go through x once more.
  static constexpr int kUpRows = kNeurons == 176 ? 208 : kNeurons;
  static constexpr int kGateBytes = kTokenBytes + kNeurons * kDepth * 2;  // of a stage
  static constexpr int kStageBytes = kTokenBytes + kUpRows * kDepth * 2;
  static constexpr int kStages = kNeurons == 128 ? 5 : 4;
  static constexpr int kTurnBytes = kUpRows * 2 * kBlockTokens;  // columns of relu(gate), then of h
  static constexpr int kWords = (kNeurons + 31) / 32, kPieces = kNeurons / 16;
  static constexpr int kShared = 1024 + kStages * kStageBytes + kTurnBytes + static_cast<int>(sizeof(Control));
  static_assert(kStageBytes % 1024 == 0 && kUpRows % 16 == 0 && kNeurons % 16 == 0 && kTurnBytes >= kWarps * 1024);
  static_assert(kShared <= kSharedLimit);
};

struct Arguments {
  const void *up, *down;  // (F, D); up is null where the block has no gate
  const void *b_gate, *b_up;
  Active active;
  int64_t tokens;
  int hidden, width;
  int passes, ranges;
};

// x comes by boxes of half blocks, the gate by boxes of `neurons` rows.
template <typename Kernel>
cudaError_t launch_gate_up(Kernel kernel, int thread_blocks, int threads, int neurons, int shared_bytes, const Ffn& ffn,
                           const Chunk& chunk, const MidPlan& plan, cudaStream_t stream) {
  CUtensorMap x_map, gate_map;
  TWELL_RETURN_IF_ERROR(make_tensor_map(&x_map, ffn.dtype, ffn.x, ffn.tokens, ffn.hidden, kHalfTokens));
  TWELL_RETURN_IF_ERROR(make_tensor_map(&gate_map, ffn.dtype, ffn.gate.data, ffn.width, ffn.hidden, neurons));
  const Arguments arguments{ffn.up.data, ffn.down.data, ffn.b_gate, ffn.b_up,    chunk.active,
                            ffn.tokens,  ffn.hidden,    ffn.width,  plan.passes, plan.ranges};
  return launch_with_carveout(kMidCarveout, kernel, thread_blocks, threads, kCluster, shared_bytes, stream, x_map,
                              gate_map, arguments);
}

// For n < rows, without a branch: 16 bytes asked for in L2.
__device__ __forceinline__ void ask_if(int n, int rows, const void* global) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.lt.s32 wanted, %1, %2;\n@wanted prefetch.global.L2 [%0];\n}\n" ::"l"(global), "r"(n),
      "r"(rows)
      : "memory");
}

// A step's 128 bytes of each of `rows` rows, eight threads a row; `offsets` of the thread's rows and `eighths`, a row's
// length, count 16 bytes. Addresses of a batch lie in registers before its first copy: one by one, each copy waits for
// branches and until the copy before has read its address. The same pieces of the matrix `next` are asked for in L2.
template <int kShare>
__device__ __forceinline__ void gather_rows(uint32_t to, const uint4* matrix, const uint4* next,
                                            const uint32_t (&offsets)[kShare], int thread, int step, int eighths,
                                            int rows) {
  constexpr int kBatch = 4;
  const int row = thread / 8, chunk = thread % 8, eighth = step * (kDepth / 8) + chunk;
  const bool inside = eighth < eighths;
  const uint32_t place = to + row * 128 + ((chunk ^ (row & 7)) << 4), from = inside ? eighth : 0;
  static_assert(kGatherRows % 8 == 4);  // so every second row's chunks change places
#pragma unroll
  for (int batch = 0; batch < kShare; batch += kBatch) {
    if (kGatherRows * batch >= rows) break;
#pragma unroll
    for (int i = batch; i < batch + kBatch && i < kShare; ++i) {
      copy_16_if(row + kGatherRows * i, rows, (place ^ (i & 1) << 6) + i * kGatherRows * 128,
                 matrix + (offsets[i] + from), inside);
    }
#pragma unroll
    for (int i = batch; i < batch + kBatch && i < kShare; ++i) {
      ask_if(row + kGatherRows * i, rows, next + (offsets[i] + from));
    }
  }
}

// The ring as it is after `position` stages.
__device__ __forceinline__ Ring ring_at(Ring ring, int position) {
  ring.stage = position % ring.stages;
  ring.phase = position / ring.stages & 1;
  return ring;
}

// Both blocks of a cluster fill each other's stages, so each tells both that it is done with one. Boxes that a block
// fetches for itself are its own business: then it arrives twice here.
__device__ __forceinline__ void release(const Ring& ring, int stage, int lane, bool shared, int rank) {
  if (lane < kCluster) barrier_arrive_at(ring.empty + stage, shared ? lane : rank);
}

// By one warp: the neurons that any half activates, in ascending order.
__device__ __forceinline__ void make_list(Control& c, int own) {
  static_assert(kMidMaxOwn / 16 <= 64);
  const int lane = threadIdx.x % 32, pieces = own / 16;
  int total = 0;
#pragma unroll
  for (int start = 0; start < 64; start += 32) {
    const int piece = start + lane;
    const uint32_t first = piece < pieces ? c.masks[0][piece] : 0, second = piece < pieces ? c.masks[1][piece] : 0;
    uint32_t bits = first | second;
    const int count = __popc(bits);
    const int sum = sum_until(count, lane);
    for (int at = total + sum - count; bits != 0; bits &= bits - 1, ++at) {
      const int n = __ffs(static_cast<int>(bits)) - 1;
      c.list[at] = static_cast<uint16_t>(piece * 16 + n) | (first >> n & 1 ? kFirstHalf : 0) |
                   (second >> n & 1 ? kSecondHalf : 0);
    }
    total += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) c.count = total;
}

// The gate: products of all neurons, and columns of those that are active.

// relu(sum + bias), two neurons to a word: tokens row and row + 8 of the warp's, neurons 8 j + column and + 1.
template <typename T, int kNeurons>
__device__ __forceinline__ void activate(uint32_t (&packed)[kNeurons / 4], float (&sum)[kNeurons / 2],
                                         const Arguments& a, int64_t token, int first) {
  const int column = threadIdx.x % 4 * 2;
  const bool keep_low = token < a.tokens, keep_high = token + 8 < a.tokens;
#pragma unroll
  for (int j = 0; j < kNeurons / 8; ++j) {
    if (a.b_gate != nullptr) {  // past the last token a bias must not wake anything
      const int neuron = first + 8 * j + column;
      const T* bias = static_cast<const T*>(a.b_gate);
      const float low = neuron < a.width ? widen(bias[neuron]) : 0.0f;
      const float high = neuron + 1 < a.width ? widen(bias[neuron + 1]) : 0.0f;
      sum[4 * j] = keep_low ? sum[4 * j] + low : 0.0f;
      sum[4 * j + 1] = keep_low ? sum[4 * j + 1] + high : 0.0f;
      sum[4 * j + 2] = keep_high ? sum[4 * j + 2] + low : 0.0f;
      sum[4 * j + 3] = keep_high ? sum[4 * j + 3] + high : 0.0f;
    }
    packed[2 * j] = pack<T>(relu(sum[4 * j]), relu(sum[4 * j + 1]));
    packed[2 * j + 1] = pack<T>(relu(sum[4 * j + 2]), relu(sum[4 * j + 3]));
  }
}

// A bit for each neuron that the warp's 16 tokens activate, 32 to a word.
template <int kNeurons>
__device__ __forceinline__ void find_active(const uint32_t (&packed)[kNeurons / 4], uint32_t* masks) {
  const int lane = threadIdx.x % 32, column = lane % 4 * 2;
#pragma unroll
  for (int w = 0; w < (kNeurons + 31) / 32; ++w) {
    uint32_t bits = 0;
#pragma unroll
    for (int j = 4 * w; j < 4 * w + 4 && j < kNeurons / 8; ++j) {
      const uint32_t either = packed[2 * j] | packed[2 * j + 1];
      bits |= ((either & 0xFFFFu) != 0 ? 1u : 0u) << (j % 4 * 8);
      bits |= (either >> 16 != 0 ? 2u : 0u) << (j % 4 * 8);
    }
    bits = __reduce_or_sync(~0u, bits << column);
    if (lane == 0) masks[w] = bits;
  }
}

// Columns of the active neurons, 16 tokens a warp, by way of 1 KiB of shared memory at `rows`: 32 bytes for each of 32
// neurons.
template <typename T, int kNeurons>
__device__ __forceinline__ void store_columns(const uint32_t (&packed)[kNeurons / 4], uint32_t mask, T* columns,
                                              uint32_t rows) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int w = 0; w < Shape<kNeurons>::kWords; ++w) {
    const uint32_t bits = __shfl_sync(~0u, mask, w);
    if (bits == 0) continue;
    __syncwarp();
#pragma unroll
    for (int j = 4 * w; j < 4 * w + 4 && j < kNeurons / 8; j += 2) {
      const int n = j % 4 * 8 + lane / 16 * 8 + lane % 8, half = lane / 8 & 1;
      store_matrices_transposed(rows + n * 32 + ((half ^ (n >> 2 & 1)) << 4),
                                {packed[2 * j], packed[2 * j + 1], packed[2 * j + 2], packed[2 * j + 3]});
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = i * 16 + lane / 2, half = lane & 1;
      if (bits >> n & 1) {
        *reinterpret_cast<uint4*>(columns + static_cast<int64_t>(w * 32 + n) * kBlockTokens + half * 8) =
            load_shared_16(rows + n * 32 + ((half ^ (n >> 2 & 1)) << 4));
      }
    }
  }
}

// 64 tokens a warpgroup.
template <typename T, int kNeurons>
__device__ __forceinline__ void multiply_gate(const Arguments& a, Control& c, uint32_t stages, uint32_t turn, Ring ring,
                                              int block, int first, int steps) {
  using S = Shape<kNeurons>;
  const int warp = threadIdx.x / 32, half = warp / 4, lane = threadIdx.x % 32;
  const Active& active = a.active;
  uint16_t* const all_masks = reinterpret_cast<uint16_t*>(active.masks) + (block * 2 + half) * 2 * active.words;
  for (int pass = 0; pass < a.passes; ++pass) {
    const int pass_first = first + pass * kNeurons;
    float sum[kNeurons / 2];
    for (int step = 0; step < steps; ++step, ring.advance()) {
      ring.wait_full();
      const uint32_t stage = stages + ring.stage * S::kStageBytes;
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
        Wgmma<T, kNeurons, 0, 0>::multiply(sum, matrix_descriptor(stage + half * kHalfBytes + k * 32, 16),
                                           matrix_descriptor(stage + kTokenBytes + k * 32, 16), step + k);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0) release(ring, ring.previous(), lane, true, 0);
    }
    wgmma_wait<0>();
    release(ring, ring.previous(), lane, true, 0);

    uint32_t packed[kNeurons / 4];
    const int64_t token = static_cast<int64_t>(block) * kBlockTokens + warp * 16 + lane / 4;
    activate<T, kNeurons>(packed, sum, a, token, pass_first);
    uint32_t (*const warp_masks)[6] = c.warp_masks[pass & 1];
    find_active<kNeurons>(packed, warp_masks[warp]);
    named_barrier<kMultipliers>(kTileBarrier);
    uint32_t mask = 0;  // a lane for each word
    if (lane < S::kWords) {
#pragma unroll
      for (int w = 0; w < 4; ++w) mask |= warp_masks[half * 4 + w][lane];
      const int left = a.width - pass_first - 32 * lane;  // nothing is active past the last: x may hold NaN
      mask &= left >= 32 ? ~0u : left > 0 ? (1u << left) - 1 : 0;
    }
    if (warp % 4 == 0 && lane < S::kWords) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int piece = 2 * lane + i, at = pass_first / 16 + piece;
        if (piece >= S::kPieces) continue;
        c.masks[half][pass * S::kPieces + piece] = static_cast<uint16_t>(mask >> (16 * i));
        if (at < 2 * active.words) all_masks[at] = static_cast<uint16_t>(mask >> (16 * i));
      }
    }
    // The list is made while columns are stored.
    if (a.up != nullptr && pass == a.passes - 1) named_arrive<kMultipliers + kGatherers>(kMaskBarrier);
    T* const columns = static_cast<T*>(active.columns) +
                       (static_cast<int64_t>(block) * a.width + pass_first) * kBlockTokens + warp * 16;
    store_columns<T, kNeurons>(packed, mask, columns, turn + warp * 1024);
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(&c.gates_stored);
}

}  // namespace twell::sm90::mid
