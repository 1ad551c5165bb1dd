// Tiles of 64 x 64 through shared memory, 16 bytes a thread on either side.

#include "common/transpose.h"

#include "common/mma.cuh"

namespace twell {
namespace {

constexpr int kTile = 64, kThreads = 256, kVector = 8;
constexpr int kStride = kTile + 2;  // elements: columns of a tile then meet no bank more than twice

__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const uint4* from, int rows, int columns, uint4* to, bool beside) {
  __shared__ uint16_t tile[kTile * kStride];
  if (beside) {
    decoding::let_next_kernel_start();
  } else {
    decoding::wait_for_previous_kernel();
  }
  const int first_row = blockIdx.y * kTile, first_column = blockIdx.x * kTile;
  const int line = threadIdx.x / kVector, chunk = threadIdx.x % kVector;
#pragma unroll
  for (int i = line; i < kTile; i += kThreads / kVector) {
    const int row = first_row + i, column = first_column + chunk * kVector;
    if (row < rows && column < columns) {
      const uint4 v = __ldcg(from + (static_cast<int64_t>(row) * columns + column) / kVector);
      uint32_t* const words = reinterpret_cast<uint32_t*>(tile + i * kStride + chunk * kVector);
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = line; i < kTile; i += kThreads / kVector) {
    const int row = first_column + i, column = first_row + chunk * kVector;  // of `to`
    if (row < columns && column < rows) {
      const uint16_t* const values = tile + chunk * kVector * kStride + i;
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words[w] = values[2 * w * kStride] | static_cast<uint32_t>(values[(2 * w + 1) * kStride]) << 16;
      }
      to[(static_cast<int64_t>(row) * rows + column) / kVector] = {words[0], words[1], words[2], words[3]};
    }
  }
  // Whoever waits for this waits for that too. One thread block is enough, and the others make room.
  if (beside && blockIdx.x == 0 && blockIdx.y == 0) decoding::wait_for_previous_kernel();
}

}  // namespace

cudaError_t transpose(const Transposition& matrix, Start start, cudaStream_t stream) {
  const int64_t tile_rows = (matrix.rows + kTile - 1) / kTile, tile_columns = (matrix.columns + kTile - 1) / kTile;
  // Kernels that share a multiprocessor must agree on how it divides its memory: as those that multiply have it.
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  attributes[1].val.sharedMemCarveout = 100;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(tile_columns), static_cast<unsigned>(tile_rows));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = start == Start::kAlone ? 0 : 2;
  return cudaLaunchKernelEx(&config, transpose_kernel, static_cast<const uint4*>(matrix.from),
                            static_cast<int>(matrix.rows), static_cast<int>(matrix.columns),
                            static_cast<uint4*>(matrix.to), start == Start::kBeside);
}

}  // namespace twell
