// h = gate * (x Wu^T + bu) over the union of each block of tokens: a matmul of 128 tokens with gathered rows of
// up_proj.
#include "portable/tile.cuh"

namespace twell::portable {

namespace {

// Tiles of kColumns positions of each block's list, block after block.
template <int kColumns>
struct Tiles {
  int* counts;  // [blocks]
  int* starts;  // [kMaxBlocks]: tiles up to and with each block

  static constexpr int kBytes = (2 * kMaxBlocks + kThreads / 32) * static_cast<int>(sizeof(int));
  static_assert(kMaxBlocks == kThreads, "each thread reads one block's count");

  __device__ __forceinline__ Tiles(const Chunk& chunk, char* shared)
      : counts(reinterpret_cast<int*>(shared)), starts(counts + kMaxBlocks) {
    int* sums = starts + kMaxBlocks;  // of each warp
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int count = thread < chunk.blocks ? chunk.counts[thread] : 0;
    int tiles = (count + kColumns - 1) / kColumns;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, tiles, distance);
      if (lane >= distance) tiles += before;
    }
    if (lane == 31) sums[warp] = tiles;
    __syncthreads();
    for (int i = 0; i < warp; ++i) tiles += sums[i];
    counts[thread] = count;
    starts[thread] = tiles;
    __syncthreads();
  }

  __device__ __forceinline__ int total() const { return starts[kMaxBlocks - 1]; }

  // Block of a tile: the first whose tiles reach past it.
  __device__ __forceinline__ int block(int tile) const {
    int block = 0;
#pragma unroll
    for (int width = kMaxBlocks / 2; width > 0; width /= 2) {
      if (starts[block + width - 1] <= tile) block += width;
    }
    return block;
  }

  __device__ __forceinline__ int first_position(int tile, int block) const {
    return (tile - (block == 0 ? 0 : starts[block - 1])) * kColumns;
  }
};

// Column of a warp's 32 that row `row` of the operand in shared memory holds. A lane's sums of four neighbouring
// 8-column matrices are then 8 neighbouring positions of h: one 16-byte access.
__device__ __forceinline__ int column_of_row(int row) {
  return row % 8 / 2 * 8 + row / 8 % 4 * 2 + row % 2 + row / 32 * 32;
}

template <class Element, class Shape>
struct UpWork {
  static constexpr int kPassesA = kBlockTokens / Shape::kRowsAtOnce;
  static constexpr int kPassesB = Shape::kColumns / Shape::kRowsAtOnce;
  static constexpr uint32_t kNoRow = 0xffffffffu;

  const Chunk& chunk;
  const Tiles<Shape::kColumns>& tiles;
  const int total, depth;
  const uint32_t row_vectors;  // 16-byte vectors of a row of x and up
  // The copies: this thread's piece of some rows.
  const int row, piece;
  const uint32_t target;
  int copy_tile, copy_k;
  int copy_tokens;  // rows of x from this thread's first one to the end of the chunk
  uint32_t copy_x;  // offsets in 16-byte vectors; a chunk of x is below 2^26 of them, a weight matrix up to 2^27
  uint32_t copy_up[kPassesB];
  // The sums.
  int tile, block, position;

  __device__ __forceinline__ UpWork(const Chunk& chunk, const Tiles<Shape::kColumns>& tiles)
      : chunk(chunk),
        tiles(tiles),
        total(tiles.total()),
        depth((chunk.hidden + Shape::kK - 1) / Shape::kK),
        row_vectors(chunk.hidden / 8),
        row(threadIdx.x / Shape::kPieces),
        piece(threadIdx.x % Shape::kPieces),
        target(Shape::offset(row, piece)),
        copy_tile(blockIdx.x),
        tile(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x)) {
    open_copy();
  }

  __device__ __forceinline__ void open_copy() {
    copy_k = 0;
    if (copy_tile >= total) {
      copy_tokens = 0;
#pragma unroll
      for (int i = 0; i < kPassesB; ++i) copy_up[i] = kNoRow;
      return;
    }
    const int copy_block = tiles.block(copy_tile);
    const int first = tiles.first_position(copy_tile, copy_block);
    const int count = tiles.counts[copy_block];
    const int* list = chunk.lists + static_cast<int64_t>(copy_block) * chunk.listed;
    copy_tokens = chunk.tokens - (copy_block * kBlockTokens + row);
    copy_x = static_cast<uint32_t>(copy_block * kBlockTokens + row) * row_vectors;
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) {
      const int at = first + column_of_row(row + i * Shape::kRowsAtOnce);
      copy_up[i] = at < count ? static_cast<uint32_t>(list[at]) * row_vectors : kNoRow;
    }
  }

  __device__ __forceinline__ void copy(uint32_t stage, int part, int parts) const {
    const uint32_t vector = copy_k * Shape::kPieces + piece;
    const bool inside = vector < row_vectors;
    const uint4* x = static_cast<const uint4*>(chunk.x);
    const uint4* weight = static_cast<const uint4*>(chunk.up);
    // kRowsAtOnce is a multiple of the swizzle's period, so passes differ by whole rows.
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) {
      if (i * parts / (kPassesA + kPassesB) != part) continue;
      const bool valid = inside && i * Shape::kRowsAtOnce < copy_tokens;
      const uint32_t from = copy_x + i * Shape::kRowsAtOnce * row_vectors + vector;
      copy_async(stage + target + i * Shape::kRowsAtOnce * Shape::kRowBytes, x + (valid ? from : 0), valid);
    }
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) {
      if ((kPassesA + i) * parts / (kPassesA + kPassesB) != part) continue;
      const bool valid = inside && copy_up[i] != kNoRow;
      copy_async(stage + Shape::kBytesA + target + i * Shape::kRowsAtOnce * Shape::kRowBytes,
                 weight + (valid ? copy_up[i] + vector : 0), valid);
    }
  }

  __device__ __forceinline__ void next_copy() {
    if (++copy_k < depth) return;
    copy_tile += gridDim.x;
    open_copy();
  }

  __device__ __forceinline__ int begin() {
    tile += gridDim.x;
    if (tile >= total) return 0;
    block = tiles.block(tile);
    position = tiles.first_position(tile, block);
    return depth;
  }

  // Such a warp's part of h is nobody's, or zero already.
  __device__ __forceinline__ bool idle(const WarpPlace& warp) const {
    return position + warp.columns >= tiles.counts[block] || block * kBlockTokens + warp.tokens >= chunk.tokens;
  }

  __device__ __forceinline__ void finish(const typename Shape::Sums& sums, const WarpPlace& warp) const {
    const int count = tiles.counts[block];
    const int* list = chunk.lists + static_cast<int64_t>(block) * chunk.listed;
#pragma unroll
    for (int half = 0; half < Shape::kWarpColumns / 32; ++half) {
      const int first = position + warp.columns + half * 32 + warp.lane % 4 * 8;
      float bias[8] = {};
      if (chunk.b_up != nullptr) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (first + i < count) bias[i] = Element::widen_one(chunk.b_up, list[first + i]);
        }
      }
      uint16_t* own = static_cast<uint16_t*>(chunk.h) + h_offset(chunk, block, first) +
                      (warp.tokens + warp.lane / 4) * kTileNeurons;
      const auto at = [&](int i) { return reinterpret_cast<uint4*>(own + i * 8 * kTileNeurons); };
      // All loads before the first store: the compiler cannot know that they do not overlap.
      uint4 gates[Shape::kWarpTokens / 8];
#pragma unroll
      for (int i = 0; i < Shape::kWarpTokens / 8; ++i) gates[i] = *at(i);
#pragma unroll
      for (int i = 0; i < Shape::kWarpTokens / 8; ++i) {
        const auto product = [&](uint32_t gate, int j) {
          const float* sum = sums[i / 2][half * 4 + j] + i % 2 * 2;
          return gated(gate, sum[0] + bias[2 * j], sum[1] + bias[2 * j + 1]);
        };
        *at(i) =
            make_uint4(product(gates[i].x, 0), product(gates[i].y, 1), product(gates[i].z, 2), product(gates[i].w, 3));
      }
    }
  }

  // A gate that is zero keeps h at zero whatever the other factor is.
  static __device__ __forceinline__ uint32_t gated(uint32_t gate_bits, float low, float high) {
    const float2 gate = Element::widen(as_pair<typename Element::Pair>(gate_bits));
    return as_bits(Element::narrow(gate.x == 0.0f ? 0.0f : gate.x * low, gate.y == 0.0f ? 0.0f : gate.y * high));
  }
};

template <class Element, class Shape>
__global__ void __launch_bounds__(kThreads, Shape::kColumns == Narrow::kColumns ? 2 : 1)
    up_kernel(const __grid_constant__ Chunk chunk) {
  extern __shared__ __align__(128) char shared[];
  const Tiles<Shape::kColumns> tiles(chunk, shared + Shape::kBytes);
  UpWork<Element, Shape> work(chunk, tiles);
  walk_tiles<Element, Shape, false>(work, shared_address(shared));
}

template <class Element, class Shape>
struct Up {
  static cudaError_t run(const Chunk& chunk, const Device& device, cudaStream_t stream) {
    const int64_t most_tiles = int64_t{chunk.blocks} * ((chunk.width + Shape::kColumns - 1) / Shape::kColumns);
    return launch_persistent<Shape>(up_kernel<Element, Shape>, most_tiles,
                                    Shape::kBytes + Tiles<Shape::kColumns>::kBytes, chunk, device, stream);
  }
};

}  // namespace

cudaError_t up(const Chunk& chunk, const Device& device, cudaStream_t stream) {
  return launch_fitting<Up>(chunk, device, stream);
}

}  // namespace twell::portable
