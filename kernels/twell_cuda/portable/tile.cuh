// The matmul loop of `up` and `down`: a persistent thread block walks output tiles of 128 tokens x 256 columns (64
// where there are too few tiles to go round).
//
// Shared memory is a ring of stages; a stage holds kK of the summed dimension of both operands. The copies run ahead of
// the sums by all stages but one, and straight on into the next tile: only a thread block's first tile waits for
// memory. Each of eight warps owns 64 x 64 of the sums (32 x 32): 4 KiB read from shared memory feed 131,072
// operations.
#pragma once

#include "common/shared_memory.h"
#include "portable/chunk.h"
#include "portable/primitives.cuh"

namespace twell::portable {

// Columns are neurons in `up`, hidden units in `down`.
template <int kColumns_, int kWarpTokens_, int kK_, int kStages_>
struct Shape {
  static constexpr int kColumns = kColumns_;
  static constexpr int kK = kK_;  // 32 or 64
  static constexpr int kStages = kStages_;
  static constexpr int kWarpTokens = kWarpTokens_;
  static constexpr int kWarpsOverTokens = kBlockTokens / kWarpTokens;
  static constexpr int kWarpColumns = kColumns / (kThreads / 32 / kWarpsOverTokens);
  using Sums = float[kWarpTokens / 16][kWarpColumns / 8][4];

  static constexpr int kPieces = kK / 8;                  // 16-byte pieces of a row along the summed dimension
  static constexpr int kRowsAtOnce = kThreads / kPieces;  // such rows that the thread block copies together
  static constexpr int kRowBytes = kK * 2;
  static constexpr int kBytesA = kBlockTokens * kRowBytes;
  static constexpr int kStageBytes = kBytesA + kColumns * kRowBytes;
  static constexpr int kBytes = kStages * kStageBytes;
  static_assert(kWarpColumns % 32 == 0, "a lane stores 16 bytes out of 32 columns");

  // Rows of 64 or 128 bytes: pieces change places so that 8 neighbouring rows' equal pieces lie in different banks.
  static __device__ __forceinline__ uint32_t offset(int row, int piece) {
    const int swap = kK == 64 ? row % 8 : row / 2 % 4;
    return row * kRowBytes + (piece ^ swap) * 16;
  }

  // The same for rows of columns, the summed dimension from row to row.
  static __device__ __forceinline__ uint32_t column_offset(int row, int piece) {
    return row * (kColumns * 2) + (piece ^ (row % 8)) * 16;
  }
};
using DeepWide = Shape<256, 64, 64, 3>;     // 144 KiB of shared memory: sm_80, sm_87, sm_90, sm_10x
using ShallowWide = Shape<256, 64, 32, 4>;  // 96 KiB: sm_86, sm_89, sm_12x allow 99
using Narrow = Shape<64, 32, 64, 3>;        // 72 KiB: two thread blocks fit where DeepWide fits

// Of GPUs not known here the smaller allowance is taken for granted.
inline bool has_deep_shared_memory(const Device& device) {
  const int version = device.major * 10 + device.minor;
  return version == 80 || version == 87 || (version >= 90 && version < 120);
}

// The same in all lanes, and the compiler can tell: branches on it keep a warp together.
__device__ __forceinline__ int warp_index() { return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0); }

struct WarpPlace {
  int lane, tokens, columns;  // first token and column of this warp in the tile
};

template <class Shape>
__device__ __forceinline__ WarpPlace warp_place() {
  // Warps 0 to 3 share the first half of the columns: where only these are needed, each quarter of the multiprocessor
  // has one at work.
  const int warp = warp_index();
  return {static_cast<int>(threadIdx.x % 32), warp % Shape::kWarpsOverTokens * Shape::kWarpTokens,
          warp / Shape::kWarpsOverTokens * Shape::kWarpColumns};
}

// kSummedByRow: the second operand's rows are neurons that are summed over (down), not columns of the tile (up).
template <class Element, class Shape, bool kSummedByRow>
struct Fragments {
  static constexpr int kWarpTokens = Shape::kWarpTokens, kWarpColumns = Shape::kWarpColumns;
  uint32_t a[kWarpTokens / 16][4];
  uint32_t b[kWarpColumns / 16][4];  // of each 16 columns: 8 columns x both halves of k, then the other 8

  // Lane's offsets in a stage at k = 0; later k change single bits (rows along k) or add whole rows.
  struct Lane {
    uint32_t a, b;
  };

  static __device__ __forceinline__ Lane lane(const WarpPlace& warp) {
    const int low = warp.lane % 8, middle = warp.lane / 8 % 2, high = warp.lane / 16;
    Lane at;
    at.a = Shape::offset(warp.tokens + middle * 8 + low, high);
    if constexpr (kSummedByRow) {
      at.b = Shape::kBytesA + Shape::column_offset(middle * 8 + low, warp.columns / 8 + high);
    } else {
      at.b = Shape::kBytesA + Shape::offset(warp.columns + high * 8 + low, middle);
    }
    return at;
  }

  // 16 of the summed dimension, from k = 16 `step` of the stage on.
  __device__ __forceinline__ void load(uint32_t stage, const Lane& lane, int step) {
#pragma unroll
    for (int i = 0; i < kWarpTokens / 16; ++i) {
      load_matrices(a[i], stage + (lane.a ^ (step * 32)) + i * 16 * Shape::kRowBytes);
    }
#pragma unroll
    for (int j = 0; j < kWarpColumns / 16; ++j) {
      if constexpr (kSummedByRow) {
        load_matrices_transposed(b[j], stage + (lane.b ^ (j * 32)) + step * 16 * Shape::kColumns * 2);
      } else {
        load_matrices(b[j], stage + (lane.b ^ (step * 32)) + j * 16 * Shape::kRowBytes);
      }
    }
  }

  __device__ __forceinline__ void multiply_into(typename Shape::Sums& sums) const {
#pragma unroll
    for (int i = 0; i < kWarpTokens / 16; ++i) {
#pragma unroll
      for (int j = 0; j < kWarpColumns / 8; ++j) {
        multiply<Element>(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
};

// `work` knows the tiles of this thread block:
//   copy(stage, part, parts)  starts a share of the copies of the next kK into a stage; zeros after the last tile
//   next_copy()               moves on by kK, into the next tile where one ends
//   begin()                   -> how many kK the tile to compute now has (0: no tile is left)
//   idle(warp)                -> nothing of this tile is this warp's
//   finish(sums, warp)        writes the tile
template <class Element, class Shape, bool kSummedByRow, class Work>
__device__ __forceinline__ void walk_tiles(Work& work, uint32_t shared) {
  using Fragment = Fragments<Element, Shape, kSummedByRow>;
  constexpr int kSteps = Shape::kK / 16;
  static_assert(kSteps % 2 == 0, "fragments alternate, and each stage starts with the first");
  constexpr int kStages = Shape::kStages;
  const WarpPlace warp = warp_place<Shape>();
  const typename Fragment::Lane lane = Fragment::lane(warp);

#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    work.copy(shared + stage * Shape::kStageBytes, 0, 1);
    work.next_copy();
    commit_copies();
  }
  uint32_t reading = shared;                                       // stage that is multiplied
  uint32_t writing = shared + (kStages - 1) * Shape::kStageBytes;  // stage that is filled
  const uint32_t last = writing;
  const auto after = [&](uint32_t stage) { return stage == last ? shared : stage + Shape::kStageBytes; };
  // Behind this barrier the next stage is there, and the one read so far is free to be filled: all have read all of it.
  const auto next_stage = [&] {
    commit_copies();
    wait_copies<kStages - 2>();
    __syncthreads();
    reading = after(reading);
    writing = after(writing);
  };

  Fragment fragments[2];
  wait_copies<kStages - 2>();
  __syncthreads();
  fragments[0].load(reading, lane, 0);
  for (int depth = work.begin(); depth > 0; depth = work.begin()) {
    if (work.idle(warp)) {
      for (int k = 0; k < depth; ++k) {
        work.copy(writing, 0, 1);
        work.next_copy();
        next_stage();
      }
      fragments[0].load(reading, lane, 0);
      continue;
    }
    typename Shape::Sums sums;
#pragma unroll
    for (int i = 0; i < Shape::kWarpTokens / 16; ++i) {
#pragma unroll
      for (int j = 0; j < Shape::kWarpColumns / 8; ++j)
        sums[i][j][0] = sums[i][j][1] = sums[i][j][2] = sums[i][j][3] = 0.0f;
    }
#pragma unroll 1
    for (int k = 0; k < depth; ++k) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step == kSteps - 1) next_stage();
        fragments[(step + 1) % 2].load(reading, lane, (step + 1) % kSteps);
        if (step < kSteps - 1) work.copy(writing, step, kSteps - 1);
        fragments[step % 2].multiply_into(sums);
        if (step == kSteps - 2) work.next_copy();
      }
    }
    work.finish(sums, warp);
  }
  wait_copies<0>();
}

template <class Shape, class Kernel>
cudaError_t launch_persistent(Kernel kernel, int64_t most_tiles, int bytes, const Chunk& chunk, const Device& device,
                              cudaStream_t stream) {
  const cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), bytes);
  if (error != cudaSuccess) return error;
  const bool two = Shape::kColumns == Narrow::kColumns && has_deep_shared_memory(device);
  const int64_t resident = device.sm_count * (two ? 2 : 1);
  kernel<<<static_cast<unsigned>(most_tiles < resident ? most_tiles : resident), kThreads, bytes, stream>>>(chunk);
  return cudaGetLastError();
}

// Runs Launch<Element, Shape> with what suits the call and the GPU.
template <template <class, class> class Launch>
cudaError_t launch_fitting(const Chunk& chunk, const Device& device, cudaStream_t stream) {
  // Wide tiles multiply faster; narrow ones are better where wide ones of y would leave many multiprocessors without
  // work.
  const int64_t wide_tiles = int64_t{chunk.blocks} * ((chunk.hidden + DeepWide::kColumns - 1) / DeepWide::kColumns);
  const bool wide = 4 * wide_tiles >= 3 * device.sm_count;
  const auto launch = [&](auto element) {
    using Element = decltype(element);
    if (!wide) return Launch<Element, Narrow>::run(chunk, device, stream);
    return has_deep_shared_memory(device) ? Launch<Element, DeepWide>::run(chunk, device, stream)
                                          : Launch<Element, ShallowWide>::run(chunk, device, stream);
  };
  return chunk.dtype == DType::kBFloat16 ? launch(BFloat16{}) : launch(Float16{});
}

}  // namespace twell::portable
