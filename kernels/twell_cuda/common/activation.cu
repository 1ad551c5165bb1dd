// The elementwise middle of a dense block: bound by memory, so each tensor is read or written once, 16 bytes a thread.

#include "common/activation.h"

#include "common/terms.cuh"
#include "common/vector.cuh"

namespace twell {
namespace {

constexpr int kThreads = 128;

// Keeps NaN, as relu does.
__device__ __forceinline__ float relu(float v) { return v <= 0.f ? 0.f : v; }

__device__ __forceinline__ uint4 load(const void* base, int64_t index) {
  return __ldg(static_cast<const uint4*>(base) + index);
}

template <typename Half, bool kApart>
__global__ void __launch_bounds__(kThreads) forward_kernel(const Activation a, uint4* h, int64_t vectors) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < vectors;
       i += int64_t{gridDim.x} * kThreads) {
    float gate[kVector], up[kVector];
    const int64_t of_row = a.width / kVector, from = kApart ? i / of_row * (a.stride / kVector) + i % of_row : i;
    widen<Half>(load(a.gate, from), gate);
    if (a.up != nullptr) widen<Half>(load(a.up, from), up);
#pragma unroll
    for (int k = 0; k < kVector; ++k) gate[k] = a.up == nullptr ? relu(gate[k]) : relu(gate[k]) * up[k];
    h[i] = narrow<Half>(gate);
  }
}

// Tokens of a thread block: a thread walks them one by one, so few tokens must spread over many blocks.
constexpr int rows_of(int64_t tokens) { return tokens <= 1024 ? 8 : tokens <= 4096 ? 16 : tokens <= 16384 ? 32 : 64; }

// Sums of one thread block, over its tokens: of token weight * |h|, and by neuron of token weight where h is not zero.
struct Partials {
  float* l1;        // (row blocks, column blocks)
  float* activity;  // (row blocks, F)
};

template <typename Half, bool kCount>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const Activation a, int rows, const void* grad_h, const Terms terms, uint4* grad_gate,
                    uint4* grad_up, const Partials partials) {
  __shared__ float warp_sums[kThreads / 32];
  const int column = (blockIdx.x * kThreads + threadIdx.x) * kVector;
  const int64_t first = int64_t{blockIdx.y} * rows, last = min(first + rows, a.tokens);
  const float l1_scale = terms.l1_scale == nullptr ? 0.f : *terms.l1_scale;
  const float count_scale = kCount ? *terms.count_scale : 0.f;
  const bool reports = partials.activity != nullptr;
  float active[kVector] = {}, sum = 0.f;
  if (column < a.width) {
#pragma unroll 4
    for (int64_t token = first; token < last; ++token) {
      const int64_t i = (token * a.width + column) / kVector;
      const float weight = terms.token_weight == nullptr ? 1.f : __ldg(terms.token_weight + token);
      const float l1_pull = l1_scale * weight, count_pull = kCount ? count_scale * weight : 0.f;
      float gate[kVector], up[kVector], dh[kVector];
      widen<Half>(load(a.gate, i), gate);
      if (a.up != nullptr) widen<Half>(load(a.up, i), up);
      widen<Half>(load(grad_h, i), dh);
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const float g = relu(gate[k]), u = a.up == nullptr ? 1.f : up[k];
        const float h = decoding::to_float(Half(g * u));
        dh[k] += l1_gradient(l1_pull, h);
        // Padding may hold NaN, and 0 * NaN would count it.
        if (reports && weight > 0.f && h != 0.f) active[k] += weight, sum += weight * fabsf(h);
        gate[k] = g != 0.f ? dh[k] * u + count_gradient(count_pull, g) : 0.f;
        up[k] = dh[k] * g;
      }
      if (grad_gate != nullptr) grad_gate[i] = narrow<Half>(gate);
      if (grad_up != nullptr) grad_up[i] = narrow<Half>(up);
    }
    if (reports) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) partials.activity[int64_t{blockIdx.y} * a.width + column + k] = active[k];
    }
  }
  if (!reports) return;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    partials.l1[int64_t{blockIdx.y} * gridDim.x + blockIdx.x] =
        warp_sums[0] + warp_sums[1] + warp_sums[2] + warp_sums[3];
  }
}

// In a fixed order. The first thread block adds up |h|, the others a neuron a thread.
__global__ void __launch_bounds__(kThreads)
    report_kernel(const Partials partials, int64_t row_blocks, int column_blocks, int width, float* report) {
  if (blockIdx.x == 0) {
    __shared__ double sums[kThreads];
    double sum = 0;
    for (int64_t i = threadIdx.x; i < row_blocks * column_blocks; i += kThreads) sum += partials.l1[i];
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int half = kThreads / 2; half > 0; half /= 2) {
      if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
      __syncthreads();
    }
    if (threadIdx.x == 0) report[0] = static_cast<float>(sums[0]);
    return;
  }
  const int neuron = (blockIdx.x - 1) * kThreads + threadIdx.x;
  if (neuron >= width) return;
  double sum = 0;
  for (int64_t b = 0; b < row_blocks; ++b) sum += partials.activity[b * width + neuron];
  report[1 + neuron] = static_cast<float>(sum);
}

int64_t row_blocks(const Activation& a) { return (a.tokens + rows_of(a.tokens) - 1) / rows_of(a.tokens); }
int column_blocks(const Activation& a) { return (a.width + kThreads * kVector - 1) / (kThreads * kVector); }

template <typename Half>
cudaError_t backward(const Activation& a, const void* grad_h, const Terms& terms, void* grad_gate, void* grad_up,
                     const Partials& partials, cudaStream_t stream) {
  // The number of rows of blocks may pass the grid's limit: then in parts.
  constexpr int64_t kMost = 65535;
  const int rows = rows_of(a.tokens);
  for (int64_t begin = 0; begin < row_blocks(a); begin += kMost) {
    const int64_t skipped = begin * rows, offset = skipped * a.width * 2, left = row_blocks(a) - begin;
    const int64_t count = left < kMost ? left : kMost;
    const auto at = [&](const void* p) { return p == nullptr ? nullptr : static_cast<const char*>(p) + offset; };
    Activation part = a;
    part.tokens -= skipped, part.gate = at(a.gate), part.up = at(a.up);
    Terms part_terms = terms;
    if (terms.token_weight != nullptr) part_terms.token_weight += skipped;
    Partials part_partials = partials;
    if (partials.l1 != nullptr) {
      part_partials.l1 += begin * column_blocks(a);
      part_partials.activity += begin * a.width;
    }
    const auto kernel = terms.count_scale == nullptr ? backward_kernel<Half, false> : backward_kernel<Half, true>;
    kernel<<<dim3(column_blocks(a), static_cast<unsigned>(count)), kThreads, 0, stream>>>(
        part, rows, at(grad_h), part_terms, reinterpret_cast<uint4*>(const_cast<char*>(at(grad_gate))),
        reinterpret_cast<uint4*>(const_cast<char*>(at(grad_up))), part_partials);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t activation(const Activation& a, void* h, const Device& device, cudaStream_t stream) {
  const int64_t vectors = a.tokens * a.width / kVector, blocks = (vectors + kThreads - 1) / kThreads;
  const int64_t most = int64_t{device.sm_count} * 16;
  const unsigned grid = static_cast<unsigned>(blocks < most ? blocks : most);
  const bool bf16 = a.dtype == DType::kBFloat16, apart = a.stride != a.width;
  const auto kernel = bf16    ? apart ? forward_kernel<__nv_bfloat16, true> : forward_kernel<__nv_bfloat16, false>
                      : apart ? forward_kernel<__half, true>
                              : forward_kernel<__half, false>;
  kernel<<<grid, kThreads, 0, stream>>>(a, static_cast<uint4*>(h), vectors);
  return cudaGetLastError();
}

int64_t activation_partial_bytes(const Activation& a) {
  return row_blocks(a) * (column_blocks(a) + int64_t{a.width}) * 4;
}

cudaError_t activation_backward(const Activation& a, const void* grad_h, const Terms& terms, void* grad_gate,
                                void* grad_up, void* scratch, const Device&, cudaStream_t stream) {
  Partials partials{};
  if (terms.report != nullptr) {
    partials.activity = static_cast<float*>(scratch);
    partials.l1 = partials.activity + row_blocks(a) * a.width;
  }
  const cudaError_t error = a.dtype == DType::kBFloat16
                                ? backward<__nv_bfloat16>(a, grad_h, terms, grad_gate, grad_up, partials, stream)
                                : backward<__half>(a, grad_h, terms, grad_gate, grad_up, partials, stream);
  if (error != cudaSuccess || terms.report == nullptr) return error;
  report_kernel<<<1 + (a.width + kThreads - 1) / kThreads, kThreads, 0, stream>>>(
      partials, row_blocks(a), column_blocks(a), a.width, terms.report);
  return cudaGetLastError();
}

}  // namespace twell
