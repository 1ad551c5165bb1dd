#include "common/dequantize.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

namespace twell {
namespace {

constexpr int kThreads = 256, kVector = 8;  // values a thread writes at a time

template <typename To>
struct alignas(16) Values {
  To at[kVector];
};

template <typename To>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const __grid_constant__ Dequantization m, bool whole) {
  const int64_t pieces = (m.columns + kVector - 1) / kVector, total = m.lines * pieces;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total; i += stride) {
    const int64_t line = i / pieces, column = i % pieces * kVector;
    const int8_t* const from = m.from + line * m.columns + column;
    To* const to = static_cast<To*>(m.to) + line * m.columns + column;
    const auto value = [&](int j, int8_t v) {
      return static_cast<To>(m.scales[m.by_column ? column + j : line] * static_cast<float>(v));
    };
    if (whole) {
      alignas(8) int8_t values[kVector];
      *reinterpret_cast<uint2*>(values) = __ldcs(reinterpret_cast<const uint2*>(from));
      Values<To> out;
#pragma unroll
      for (int j = 0; j < kVector; ++j) out.at[j] = value(j, values[j]);
      *reinterpret_cast<Values<To>*>(to) = out;
    } else {
      for (int j = 0; j < kVector && column + j < m.columns; ++j) to[j] = value(j, from[j]);
    }
  }
}

template <typename To>
cudaError_t launch(const Dequantization& matrix, cudaStream_t stream) {
  const int64_t pieces = (matrix.columns + kVector - 1) / kVector * matrix.lines;
  if (pieces == 0) return cudaSuccess;
  const int64_t blocks = std::min<int64_t>((pieces + kThreads - 1) / kThreads, 1 << 16);
  const bool whole = matrix.columns % kVector == 0 && reinterpret_cast<uintptr_t>(matrix.from) % kVector == 0;
  dequantize_kernel<To><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(matrix, whole);
  return cudaGetLastError();
}

}  // namespace

cudaError_t dequantize(const Dequantization& matrix, DType to, cudaStream_t stream) {
  switch (to) {
    case DType::kBFloat16: return launch<__nv_bfloat16>(matrix, stream);
    case DType::kFloat16: return launch<__half>(matrix, stream);
    case DType::kFloat32: return launch<float>(matrix, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace twell
