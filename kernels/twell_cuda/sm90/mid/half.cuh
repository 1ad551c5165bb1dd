// What the parts of sm90/mid/half_gate_up.cu share: shared memory, barriers, the list of active neurons.
//
// Four warps multiply, three gather rows of Wu, one fetches boxes: two warps for each quarter of the registers, so that
// a block of the second kernel fits beside.
#pragma once

#include "sm90/mid/gate.cuh"

namespace twell::sm90::mid_half {

using mid::activate, mid::Arguments, mid::find_active, mid::gather_rows, mid::kCluster, mid::launch_gate_up;

constexpr int kWarps = 4, kMultipliers = kWarps * 32, kGatherers = 96, kThreads = kMultipliers + kGatherers + 32;
constexpr int kDepth = 64, kRowBytes = kDepth * 2, kTokenBytes = kHalfTokens * kRowBytes;
constexpr int kMaxStages = 6, kMaxUpStages = 10;
constexpr int kMaxNeurons = 256;
constexpr int kGatherRows = kGatherers / 8;         // rows at a time, eight threads each
constexpr int kMaskBarrier = 1, kListBarrier = 2;  // named

struct Control {
  uint64_t full[kMaxStages], empty[kMaxStages];           // of the gate; a stage is free in all blocks of the cluster
  uint64_t up_full[kMaxUpStages], up_empty[kMaxUpStages];
  uint64_t gate_multiplied, listed;                       // the gate's stages are free; the list is made
  uint32_t warp_masks[kWarps][kMaxNeurons / 32];
  uint16_t list[kMaxNeurons];  // places of the active neurons among the thread block's, ascending
  int count;                   // of the list
};

template <int kNeurons>
struct Shape {
  static constexpr int kStageBytes = kTokenBytes + kNeurons * kRowBytes;
  // 120 KiB leave room for a block of the second kernel.
  static constexpr int kStages = kNeurons == 256 ? 4 : 120 * 1024 / kStageBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kTurnBytes = kNeurons * kHalfTokens * 2;  // columns of relu(gate), then of h
  static constexpr int kWords = (kNeurons + 31) / 32, kPieces = kNeurons / 16;
  static constexpr int kShared = 1024 + kRingBytes + kTurnBytes + static_cast<int>(sizeof(Control));
  static_assert(kStages <= kMaxStages && kStageBytes % 1024 == 0 && kNeurons % 16 == 0);
  static_assert(kShared <= mid::kSharedLimit);
};

// How up uses the gate's ring: all stages of x, then all stages of kRows rows of Wu.
struct UpRing {
  int rows, stages;
  __device__ __forceinline__ int row_stage(int stage) const { return stages * kTokenBytes + stage * rows * kRowBytes; }
};

template <int kNeurons>
__device__ __forceinline__ UpRing up_ring(int count) {
  const int rows = count <= 32                     ? 32
                   : count <= 48                   ? 48
                   : count <= 64                   ? 64
                   : count <= 96 && kNeurons > 96  ? 96
                   : count <= 128 && kNeurons > 128 ? 128
                                                   : kNeurons;
  return {rows, min(kMaxUpStages, Shape<kNeurons>::kRingBytes / (kTokenBytes + rows * kRowBytes))};
}

// Where nothing is active only what was asked for ahead is taken from the ring.
__device__ __forceinline__ int up_steps(int count, int early, int steps) { return count > 0 ? steps : early; }

// By one warp, from what the multiplying warps have found: masks and list.
template <int kNeurons>
__device__ __forceinline__ void make_list(const Arguments& a, Control& c, int half, int first) {
  using S = Shape<kNeurons>;
  const int lane = threadIdx.x % 32;
  uint32_t mask = 0;  // a lane for each word
  if (lane < S::kWords) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) mask |= c.warp_masks[w][lane];
    const int left = a.width - first - 32 * lane;  // nothing is active past the last: x may hold NaN
    mask &= left >= 32 ? ~0u : left > 0 ? (1u << left) - 1 : 0;
    uint16_t* const masks =
        reinterpret_cast<uint16_t*>(a.active.masks) + static_cast<int64_t>(half) * 2 * a.active.words;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int piece = 2 * lane + i, at = first / 16 + piece;
      if (piece < S::kPieces && at < 2 * a.active.words) masks[at] = static_cast<uint16_t>(mask >> (16 * i));
    }
  }
  int count = 0;
#pragma unroll
  for (int w = 0; w < S::kWords; ++w) {
    const uint32_t bits = __shfl_sync(~0u, mask, w);
    if (bits >> lane & 1) c.list[count + __popc(bits & ((1u << lane) - 1))] = static_cast<uint16_t>(w * 32 + lane);
    count += __popc(bits);
  }
  if (lane == 0) c.count = count;
}

// Where 16 bytes, tokens 8 `eighth` and on, of the n-th column lie in shared memory.
__device__ __forceinline__ uint32_t turn_at(uint32_t turn, int n, int eighth) {
  return turn + n * kRowBytes + ((eighth ^ (n & 7)) << 4);
}

// Columns of listed neurons to global memory, 16 tokens a warp; `row_of` says where each lies.
template <typename T, int kNeurons, typename RowOf>
__device__ __forceinline__ void store_columns(const Arguments& a, const Control& c, uint32_t turn, int half, int first,
                                              RowOf row_of) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  T* const columns = static_cast<T*>(a.active.columns) +
                     (static_cast<int64_t>(half / 2) * a.width + first) * kBlockTokens + half % 2 * kHalfTokens +
                     warp * 16 + (lane & 1) * 8;
  __syncwarp();
  for (int n = lane / 2; n < c.count; n += 16) {
    *reinterpret_cast<uint4*>(columns + static_cast<int64_t>(c.list[n]) * kBlockTokens) =
        load_shared_16(turn_at(turn, row_of(n), 2 * warp + (lane & 1)));
  }
}

}  // namespace twell::sm90::mid_half
