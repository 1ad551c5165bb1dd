// y = h Wd^T + bd: a matmul of each block's h with gathered rows of down_proj's transpose.
#include "portable/tile.cuh"

namespace twell::portable {

namespace {

// Tiles of kColumns hidden columns of each block; blocks with the longest lists first, so that the short ones fill the
// gaps at the end.
template <int kColumns>
struct Tiles {
  int* counts;  // [blocks]
  int* order;   // [blocks]: block of each rank
  int blocks, each, total;

  static constexpr int kBytes = 2 * kMaxBlocks * static_cast<int>(sizeof(int));

  __device__ __forceinline__ Tiles(const Chunk& chunk, char* shared)
      : counts(reinterpret_cast<int*>(shared)),
        order(counts + kMaxBlocks),
        blocks(chunk.blocks),
        each((chunk.hidden + kColumns - 1) / kColumns),
        total(blocks * each) {
    const int thread = threadIdx.x;
    const int count = thread < blocks ? chunk.counts[thread] : 0;
    counts[thread] = count;
    __syncthreads();
    int rank = 0;
    for (int i = 0; i < blocks; ++i) rank += counts[i] > count || (counts[i] == count && i < thread);
    if (thread < blocks) order[rank] = thread;
    __syncthreads();
  }

  // Every other round runs backwards, so that no thread block gets the longest of each.
  __device__ __forceinline__ int item(int round) const {
    return round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  }
  __device__ __forceinline__ int block(int item) const { return order[item / each]; }
  __device__ __forceinline__ int first_column(int item) const { return item % each * kColumns; }
};

// Word i of lane t of each four lanes becomes word t of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4]) {
  const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
  uint32_t give0 = upper ? words[0] : words[2], give1 = upper ? words[1] : words[3];
  give0 = __shfl_xor_sync(0xffffffffu, give0, 2);
  give1 = __shfl_xor_sync(0xffffffffu, give1, 2);
  if (upper) {
    words[0] = give0;
    words[1] = give1;
  } else {
    words[2] = give0;
    words[3] = give1;
  }
  give0 = odd ? words[0] : words[1];
  give1 = odd ? words[2] : words[3];
  give0 = __shfl_xor_sync(0xffffffffu, give0, 1);
  give1 = __shfl_xor_sync(0xffffffffu, give1, 1);
  if (odd) {
    words[0] = give0;
    words[2] = give1;
  } else {
    words[1] = give0;
    words[3] = give1;
  }
}

template <class Element, class Shape>
struct DownWork {
  static constexpr int kPassesA = kBlockTokens / Shape::kRowsAtOnce;
  static constexpr int kPiecesB = Shape::kColumns / 8;      // 16-byte pieces of a row of down in the tile
  static constexpr int kWarpRows = 32 / kPiecesB;           // rows that a warp copies together
  static constexpr int kRowsB = kThreads / 32 * kWarpRows;  // rows that the thread block copies together
  static constexpr int kPassesB = Shape::kK / kRowsB;

  const Chunk& chunk;
  const Tiles<Shape::kColumns>& tiles;
  const uint32_t row_vectors;  // 16-byte vectors of a row of down
  const int warp, lane;
  const uint32_t target_h, target_down;
  // The copies.
  int copy_round, copy_k, copy_block, copy_count;
  uint32_t copy_column;  // this lane's, in 16-byte vectors
  int copy_neuron;       // lane i: of the i-th row of this warp in the next stage, -1 past the list's end
  // The sums.
  int round, block, column;

  __device__ __forceinline__ DownWork(const Chunk& chunk, const Tiles<Shape::kColumns>& tiles)
      : chunk(chunk),
        tiles(tiles),
        row_vectors(chunk.hidden / 8),
        warp(warp_index()),
        lane(threadIdx.x % 32),
        target_h(Shape::offset(threadIdx.x / Shape::kPieces, threadIdx.x % Shape::kPieces)),
        target_down(Shape::kBytesA + Shape::column_offset(threadIdx.x / kPiecesB, lane % kPiecesB)),
        copy_round(0),
        round(-1) {
    open_copy();
  }

  // An empty list takes one step of zeros.
  static __device__ __forceinline__ int steps(int count) {
    return count == 0 ? 1 : (count + Shape::kK - 1) / Shape::kK;
  }

  __device__ __forceinline__ void open_copy() {
    const int item = tiles.item(copy_round);
    copy_k = 0;
    copy_block = 0;
    copy_count = 0;
    copy_column = 0;
    if (item < tiles.total) {
      copy_block = tiles.block(item);
      copy_count = tiles.counts[copy_block];
      copy_column = tiles.first_column(item) / 8 + lane % kPiecesB;
    }
    fetch_neurons();
  }

  // One step ahead of their use: the copies would wait for them.
  __device__ __forceinline__ void fetch_neurons() {
    const int row = lane / kWarpRows * kRowsB + warp * kWarpRows + lane % kWarpRows;
    const int position = copy_k * Shape::kK + row;
    const bool valid = row < Shape::kK && position < copy_count;
    copy_neuron = valid ? chunk.lists[static_cast<int64_t>(copy_block) * chunk.listed + position] : -1;
  }

  __device__ __forceinline__ void copy(uint32_t stage, int part, int parts) const {
    const int position = copy_k * Shape::kK;
    const bool any = position < copy_count;
    const uint4* h = static_cast<const uint4*>(chunk.h) + h_offset(chunk, copy_block, any ? position : 0) / 8;
    const uint4* weight = static_cast<const uint4*>(chunk.down);
    const int row = threadIdx.x / Shape::kPieces, piece = threadIdx.x % Shape::kPieces;
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) {
      if (i * parts / (kPassesA + kPassesB) != part) continue;
      copy_async(stage + target_h + i * Shape::kRowsAtOnce * Shape::kRowBytes,
                 h + (row + i * Shape::kRowsAtOnce) * (kTileNeurons / 8) + piece, any);
    }
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) {
      if ((kPassesA + i) * parts / (kPassesA + kPassesB) != part) continue;
      const int neuron = __shfl_sync(0xffffffffu, copy_neuron, i * kWarpRows + lane / kPiecesB);
      const bool valid = neuron >= 0 && copy_column < row_vectors;
      copy_async(stage + target_down + i * kRowsB * Shape::kColumns * 2,
                 weight + (valid ? static_cast<uint32_t>(neuron) * row_vectors + copy_column : 0), valid);
    }
  }

  __device__ __forceinline__ void next_copy() {
    if (++copy_k < steps(copy_count)) {
      fetch_neurons();
    } else {
      ++copy_round;
      open_copy();
    }
  }

  __device__ __forceinline__ int begin() {
    const int item = tiles.item(++round);
    if (item >= tiles.total) return 0;
    block = tiles.block(item);
    column = tiles.first_column(item);
    return steps(tiles.counts[block]);
  }

  __device__ __forceinline__ bool idle(const WarpPlace& place) const {
    return column + place.columns >= chunk.hidden || block * kBlockTokens + place.tokens >= chunk.tokens;
  }

  __device__ __forceinline__ void finish(const typename Shape::Sums& sums, const WarpPlace& place) const {
    const int quad_lane = lane % 4;
#pragma unroll
    for (int half = 0; half < Shape::kWarpColumns / 32; ++half) {
      const int first = column + place.columns + half * 32;
      float2 bias[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = first + j * 8 + quad_lane * 2;
        bias[j] = make_float2(0.0f, 0.0f);
        if (chunk.b_down != nullptr && at < chunk.hidden) {
          bias[j] = make_float2(Element::widen_one(chunk.b_down, at), Element::widen_one(chunk.b_down, at + 1));
        }
      }
      const uint32_t own_column = first + quad_lane * 8;
#pragma unroll
      for (int i = 0; i < Shape::kWarpTokens / 8; ++i) {
        const int token = block * kBlockTokens + place.tokens + i * 8 + lane / 4;
        // Lane t of a quad has columns 2t and 2t + 1 of four 8-column matrices; transposed, it has all of matrix t: 16
        // bytes of y.
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* sum = sums[i / 2][half * 4 + j] + i % 2 * 2;
          words[j] = as_bits(Element::narrow(sum[0] + bias[j].x, sum[1] + bias[j].y));
        }
        transpose_quad(words);
        if (token < chunk.tokens && own_column < static_cast<uint32_t>(chunk.hidden)) {
          uint4* row = static_cast<uint4*>(chunk.y) + static_cast<int64_t>(token) * row_vectors;
          row[own_column / 8] = make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }
};

template <class Element, class Shape>
__global__ void __launch_bounds__(kThreads, Shape::kColumns == Narrow::kColumns ? 2 : 1)
    down_kernel(const __grid_constant__ Chunk chunk) {
  extern __shared__ __align__(128) char shared[];
  const Tiles<Shape::kColumns> tiles(chunk, shared + Shape::kBytes);
  DownWork<Element, Shape> work(chunk, tiles);
  walk_tiles<Element, Shape, true>(work, shared_address(shared));
}

template <class Element, class Shape>
struct Down {
  static cudaError_t run(const Chunk& chunk, const Device& device, cudaStream_t stream) {
    const int64_t tiles = int64_t{chunk.blocks} * ((chunk.hidden + Shape::kColumns - 1) / Shape::kColumns);
    return launch_persistent<Shape>(down_kernel<Element, Shape>, tiles, Shape::kBytes + Tiles<Shape::kColumns>::kBytes,
                                    chunk, device, stream);
  }
};

}  // namespace

cudaError_t down(const Chunk& chunk, const Device& device, cudaStream_t stream) {
  return launch_fitting<Down>(chunk, device, stream);
}

}  // namespace twell::portable
