// What both gate and up kernels share: parameters, the activation, and how sums lie in shared memory.
#pragma once

#include "common/mma.cuh"
#include "common/quantized.cuh"
#include "decode/plan.h"

namespace twell::decoding {

// Bytes of activations for each byte of weights.
template <typename Half, typename Weight>
constexpr int kRatio = static_cast<int>(sizeof(Half) / sizeof(Weight));

// Of a lane's 16 bytes of weights, what meets the `part`-th 16 bytes of activations, as tensor-core operands.
template <typename Half, typename Weight>
__device__ __forceinline__ void unpack(uint32_t (&to)[4], const uint4& from, int part) {
  if constexpr (kScaled<Weight>) {
    expand<Half, Weight>(part == 0 ? from.x : from.z, to[0], to[1]);
    expand<Half, Weight>(part == 0 ? from.y : from.w, to[2], to[3]);
  } else {
    to[0] = from.x, to[1] = from.y, to[2] = from.z, to[3] = from.w;
  }
}

struct GateUpParams {
  const char* x;
  const char* gate;
  const char* up;    // null: no gate
  const char* down;  // rows to bring into L2
  const void* b_gate;
  const void* b_up;
  uint16_t* masks;
  uint32_t* arrivals;
  uint2* products;
  int tokens, width, blocks, slices;
  uint32_t row_bytes;       // of gate, up and down, and of x where they have its type
  int prefetch_max_active;  // active neurons of a block up to which all of down's active rows can wait in L2 together
  const float* s_gate;      // of 8-bit weights, one a row
  const float* s_up;
};

// Down rows fetched ahead of the second kernel may take about half of the smallest L2 among GPUs for data centres.
constexpr int64_t kPrefetchBytes = 24 << 20;

inline GateUpParams gate_up_params(const Ffn& ffn, const DecodePlan& plan, void* workspace) {
  char* const base = static_cast<char*>(workspace);
  GateUpParams params{};
  params.x = static_cast<const char*>(ffn.x);
  params.gate = static_cast<const char*>(ffn.gate.data);
  params.up = static_cast<const char*>(ffn.up.data);
  params.down = static_cast<const char*>(ffn.down.data);
  params.b_gate = ffn.b_gate;
  params.b_up = ffn.b_up;
  params.s_gate = ffn.gate.scales;
  params.s_up = ffn.up.scales;
  params.masks = reinterpret_cast<uint16_t*>(base + plan.masks);
  params.arrivals = reinterpret_cast<uint32_t*>(base + plan.arrivals);
  params.products = reinterpret_cast<uint2*>(base + plan.products);
  params.tokens = static_cast<int>(ffn.tokens);
  params.width = ffn.width;
  params.blocks = plan.blocks;
  params.slices = plan.slices;
  params.row_bytes = static_cast<uint32_t>(bytes_of(ffn.gate.dtype) * ffn.hidden);
  const int64_t matrix_bytes = int64_t{params.row_bytes} * ffn.width;
  const int64_t most = kPrefetchBytes * kBlockNeurons / matrix_bytes;
  params.prefetch_max_active = static_cast<int>(most < kBlockNeurons ? most : kBlockNeurons);
  return params;
}

// Bit i of the result: whether any of lanes 4i..4i+3 says so.
__device__ __forceinline__ uint32_t any_of_four(bool predicate) {
  uint32_t m = __ballot_sync(0xffffffffu, predicate);
  m |= m >> 1;
  m = (m | m >> 2) & 0x11111111u;
  m = (m | m >> 3) & 0x03030303u;
  m = (m | m >> 6) & 0x000f000fu;
  return (m | m >> 12) & 0xffu;
}

// relu that keeps NaN, and 0 outside of the call's tokens and neurons.
__device__ __forceinline__ float activate(float v, float bias, bool inside) {
  v += bias;
  return inside && !(v <= 0.f) ? v : 0.f;
}

// Row `row`, column `token` of a sum as the products leave it: tiles of 16 rows and groups of 8 columns.
template <int kGroups>
__device__ __forceinline__ float sum_at(const float4* sums, int row, int token) {
  const int element = (row / 16 * kGroups + token / 8) * 32 + row % 8 * 4 + token % 8 / 2;
  return reinterpret_cast<const float*>(sums)[element * 4 + row % 16 / 8 * 2 + token % 2];
}

template <typename Half>
__device__ __forceinline__ float bias_of(const void* bias, int neuron, int width) {
  return bias != nullptr && neuron < width ? to_float(static_cast<const Half*>(bias)[neuron]) : 0.f;
}

__device__ __forceinline__ float scale_of(const float* scales, int neuron, int width) {
  return neuron < width ? scales[neuron] : 0.f;
}

// A lane's four sums of a product become gates, in order: of `neuron` and of the eighth behind it, `token` and the
// next.
template <typename Half, typename Weight>
__device__ __forceinline__ void activate(float4& v, const GateUpParams& p, int neuron, int token) {
  const float low_bias = bias_of<Half>(p.b_gate, neuron, p.width);
  const float high_bias = bias_of<Half>(p.b_gate, neuron + 8, p.width);
  if constexpr (kScaled<Weight>) {
    const float low = scale_of(p.s_gate, neuron, p.width), high = scale_of(p.s_gate, neuron + 8, p.width);
    v.x *= low, v.y *= low, v.z *= high, v.w *= high;
  }
  v.x = activate(v.x, low_bias, neuron < p.width && token < p.tokens);
  v.y = activate(v.y, low_bias, neuron < p.width && token + 1 < p.tokens);
  v.z = activate(v.z, high_bias, neuron + 8 < p.width && token < p.tokens);
  v.w = activate(v.w, high_bias, neuron + 8 < p.width && token + 1 < p.tokens);
}

}  // namespace twell::decoding
