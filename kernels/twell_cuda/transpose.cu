// Tiles of 64 x 64 through shared memory, 16 bytes a thread on either side.

#include "transpose.h"

namespace twell {
namespace {

constexpr int kTile = 64, kThreads = 256, kVector = 8;
constexpr int kStride = kTile + 2;  // elements: columns of a tile then meet no bank more than twice

__global__ void __launch_bounds__(kThreads) transpose_kernel(const uint4* from, int rows, int columns, uint4* to) {
  __shared__ uint16_t tile[kTile * kStride];
  const int first_row = blockIdx.y * kTile, first_column = blockIdx.x * kTile;
  const int line = threadIdx.x / kVector, chunk = threadIdx.x % kVector;
#pragma unroll
  for (int i = line; i < kTile; i += kThreads / kVector) {
    const int row = first_row + i, column = first_column + chunk * kVector;
    if (row < rows && column < columns) {
      const uint4 v = __ldg(from + (static_cast<int64_t>(row) * columns + column) / kVector);
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
}

}  // namespace

cudaError_t transpose(const void* from, int64_t rows, int64_t columns, void* to, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((columns + kTile - 1) / kTile), static_cast<unsigned>((rows + kTile - 1) / kTile));
  transpose_kernel<<<grid, kThreads, 0, stream>>>(static_cast<const uint4*>(from), static_cast<int>(rows),
                                                  static_cast<int>(columns), static_cast<uint4*>(to));
  return cudaGetLastError();
}

}  // namespace twell
