#include "common/dequantize.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "common/quantized.cuh"

namespace twell {
namespace {

constexpr int kThreads = 256, kLines = kThreads / 32;
constexpr int kVector = 8;    // values that a thread writes at a time
constexpr int kBatch = 4;     // lines that it reads at a time
constexpr int kBlocks = 512;  // as many run at once on a large GPU

template <typename To>
struct alignas(16) Values {
  To at[kVector];
};

__device__ __forceinline__ float part_of(float scale, Part part) {
  if (part == Part::kWhole) return scale;
  const float power = __uint_as_float(__float_as_uint(scale) & 0xff800000u);
  const bool splits = isfinite(scale) && power != 0.f;
  if (part == Part::kPower) return splits ? power : scale;
  return splits ? scale / power : 1.f;
}

__device__ __forceinline__ float factor(const Factors& factors, int64_t i) {
  return factors.scales == nullptr ? 1.f : part_of(factors.scales[i], factors.part);
}

// A warp takes 256 columns of one line after another, whose factors it reads once; kBatch lines are read before any is
// written.
template <typename To, typename From>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const __grid_constant__ Dequantization m, bool whole) {
  const int64_t column = (int64_t{blockIdx.x} * 32 + threadIdx.x % 32) * kVector;
  if (column >= m.columns) return;
  float of_column[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) of_column[j] = column + j < m.columns ? factor(m.column, column + j) : 0.f;
  const int64_t stride = int64_t{gridDim.y} * kLines;
  int64_t line = int64_t{blockIdx.y} * kLines + threadIdx.x / 32;
  for (; line < m.lines; line += kBatch * stride) {
    alignas(8) From values[kBatch][kVector];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t at = line + i * stride;
      if (at >= m.lines) break;
      const From* const from = static_cast<const From*>(m.from) + at * m.columns + column;
      if (whole) {
        *reinterpret_cast<uint2*>(values[i]) = __ldcs(reinterpret_cast<const uint2*>(from));
      } else {
#pragma unroll
        for (int j = 0; j < kVector; ++j) values[i][j] = column + j < m.columns ? from[j] : From{};
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t at = line + i * stride;
      if (at >= m.lines) break;
      To* const to = static_cast<To*>(m.to) + at * m.columns + column;
      const float of_line = factor(m.line, at);
      Values<To> out;
#pragma unroll
      for (int j = 0; j < kVector; ++j) out.at[j] = static_cast<To>(of_line * of_column[j] * value_of(values[i][j]));
      if (whole) {
        *reinterpret_cast<Values<To>*>(to) = out;
      } else {
        for (int j = 0; j < kVector && column + j < m.columns; ++j) to[j] = out.at[j];
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    divide_kernel(const T* __restrict__ values, const float* __restrict__ scales, int64_t count, T* __restrict__ to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) to[i] = static_cast<T>(static_cast<float>(values[i]) / part_of(scales[i], Part::kMantissa));
}

template <typename To>
cudaError_t launch(const Dequantization& matrix, cudaStream_t stream) {
  if (matrix.lines == 0 || matrix.columns == 0) return cudaSuccess;
  const int64_t across = (matrix.columns + 32 * kVector - 1) / (32 * kVector);
  const int64_t down = std::min((matrix.lines + kLines - 1) / kLines, std::max<int64_t>(kBlocks / across, 1));
  const bool whole = matrix.columns % kVector == 0 && reinterpret_cast<uintptr_t>(matrix.from) % kVector == 0;
  const auto kernel = matrix.type == DType::kInt8 ? dequantize_kernel<To, int8_t> : dequantize_kernel<To, E4m3>;
  const dim3 blocks(static_cast<unsigned>(across), static_cast<unsigned>(down));
  kernel<<<blocks, kThreads, 0, stream>>>(matrix, whole);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_divide(const void* values, const float* scales, int64_t count, void* to, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  divide_kernel<T><<<blocks, kThreads, 0, stream>>>(static_cast<const T*>(values), scales, count, static_cast<T*>(to));
  return cudaGetLastError();
}

}  // namespace

cudaError_t divide_by_mantissas(const void* values, const float* scales, int64_t count, void* to, DType dtype,
                                cudaStream_t stream) {
  switch (dtype) {
    case DType::kBFloat16: return launch_divide<__nv_bfloat16>(values, scales, count, to, stream);
    case DType::kFloat16: return launch_divide<__half>(values, scales, count, to, stream);
    case DType::kFloat32: return launch_divide<float>(values, scales, count, to, stream);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t dequantize(const Dequantization& matrix, DType to, cudaStream_t stream) {
  if (!is_scaled(matrix.type)) return cudaErrorInvalidValue;
  switch (to) {
    case DType::kBFloat16: return launch<__nv_bfloat16>(matrix, stream);
    case DType::kFloat16: return launch<__half>(matrix, stream);
    case DType::kFloat32: return launch<float>(matrix, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace twell
