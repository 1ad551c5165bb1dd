// What makes a tile's sums of e4m3 products those of the numbers they stand for, and keeps them accurate.
#pragma once

#include "sm90/common/primitives.cuh"

namespace twell::sm90::gate {

// Of e4m3 operands; the gate's sums are multiplied by both. Null where the operands are the numbers themselves.
struct RowScales {
  const float* tokens;   // (tokens of the chunk)
  const float* neurons;  // (F)
};

// Scales of a warp's 16 tokens x kNeurons neurons: a lane's two tokens, and every 32nd neuron.
template <int kNeurons>
struct TileScales {
  float low, high;  // of tokens lane / 4 and lane / 4 + 8
  float neurons[kNeurons / 32];

  // Past the end of either scales may be anything: 0.
  __device__ __forceinline__ void load(const RowScales& scales, int first_token, int tokens, int first_neuron,
                                       int width) {
    const int lane = threadIdx.x % 32, token = first_token + lane / 4;
    low = token < tokens ? __ldcg(scales.tokens + token) : 0.0f;  // from L2: L1 may hold an earlier chunk's
    high = token + 8 < tokens ? __ldcg(scales.tokens + token + 8) : 0.0f;
#pragma unroll
    for (int i = 0; i < kNeurons / 32; ++i) {
      const int neuron = first_neuron + i * 32 + lane;
      neurons[i] = neuron < width ? scales.neurons[neuron] : 0.0f;
    }
  }

  // A lane's sums are of two tokens and neurons 8 j + lane % 4 * 2 and + 1, so it reads other lanes' scales from the
  // warp's `turn` (kNeurons).
  __device__ __forceinline__ void apply(float (&sum)[kNeurons / 2], float* turn) const {
    const int lane = threadIdx.x % 32;
    __syncwarp();  // the tile before has been read from there
#pragma unroll
    for (int i = 0; i < kNeurons / 32; ++i) turn[i * 32 + lane] = neurons[i];
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kNeurons / 8; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(turn + 8 * j + lane % 4 * 2);
      sum[4 * j] *= pair.x, sum[4 * j + 1] *= pair.y, sum[4 * j + 2] *= pair.x, sum[4 * j + 3] *= pair.y;
      sum[4 * j] *= low, sum[4 * j + 1] *= low, sum[4 * j + 2] *= high, sum[4 * j + 3] *= high;
    }
  }
};

// sum += part, once wgmma has written `part`: the empty statements keep the compiler from reading it before.
template <int kCount>
__device__ __forceinline__ void add_up(float (&sum)[kCount], float (&part)[kCount]) {
#pragma unroll
  for (float& value : part) asm volatile("" : "+f"(value)::"memory");
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] += part[i];
}

}  // namespace twell::sm90::gate
