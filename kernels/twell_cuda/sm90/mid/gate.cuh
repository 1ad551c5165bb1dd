// The gate of sm90/mid/gate_up.cu: products of all neurons, and columns of those that are active.
#pragma once

#include "sm90/mid/tile.cuh"

namespace twell::sm90::mid {

// relu(sum + bias), two neurons to a word: tokens row and row + 8 of the warp's, neurons 8 j + column and + 1.
template <typename T, int kNeurons>
__device__ __forceinline__ void activate(uint32_t (&packed)[kNeurons / 4], float (&sum)[kNeurons / 2],
                                         const Arguments& a, int64_t token, int first) {
  const int column = threadIdx.x % 4 * 2;
  const bool keep_low = token < a.tokens, keep_high = token + 8 < a.tokens;
#pragma unroll
  for (int j = 0; j < kNeurons / 8; ++j) {
    if (a.b_gate != nullptr) {  // past the last token a bias must not wake anything
      const int neuron = first + 8 * j + column;
      const T* bias = static_cast<const T*>(a.b_gate);
      const float low = neuron < a.width ? widen(bias[neuron]) : 0.0f;
      const float high = neuron + 1 < a.width ? widen(bias[neuron + 1]) : 0.0f;
      sum[4 * j] = keep_low ? sum[4 * j] + low : 0.0f;
      sum[4 * j + 1] = keep_low ? sum[4 * j + 1] + high : 0.0f;
      sum[4 * j + 2] = keep_high ? sum[4 * j + 2] + low : 0.0f;
      sum[4 * j + 3] = keep_high ? sum[4 * j + 3] + high : 0.0f;
    }
    packed[2 * j] = pack<T>(relu(sum[4 * j]), relu(sum[4 * j + 1]));
    packed[2 * j + 1] = pack<T>(relu(sum[4 * j + 2]), relu(sum[4 * j + 3]));
  }
}

// A bit for each neuron that the warp's 16 tokens activate, 32 to a word.
template <int kNeurons>
__device__ __forceinline__ void find_active(const uint32_t (&packed)[kNeurons / 4], uint32_t* masks) {
  const int lane = threadIdx.x % 32, column = lane % 4 * 2;
#pragma unroll
  for (int w = 0; w < (kNeurons + 31) / 32; ++w) {
    uint32_t bits = 0;
#pragma unroll
    for (int j = 4 * w; j < 4 * w + 4 && j < kNeurons / 8; ++j) {
      const uint32_t either = packed[2 * j] | packed[2 * j + 1];
      bits |= ((either & 0xFFFFu) != 0 ? 1u : 0u) << (j % 4 * 8);
      bits |= (either >> 16 != 0 ? 2u : 0u) << (j % 4 * 8);
    }
    bits = __reduce_or_sync(~0u, bits << column);
    if (lane == 0) masks[w] = bits;
  }
}

// Columns of the active neurons, 16 tokens a warp, by way of 1 KiB of shared memory at `rows`: 32 bytes for each of 32
// neurons.
template <typename T, int kNeurons>
__device__ __forceinline__ void store_columns(const uint32_t (&packed)[kNeurons / 4], uint32_t mask, T* columns,
                                              uint32_t rows) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int w = 0; w < Shape<kNeurons>::kWords; ++w) {
    const uint32_t bits = __shfl_sync(~0u, mask, w);
    if (bits == 0) continue;
    __syncwarp();
#pragma unroll
    for (int j = 4 * w; j < 4 * w + 4 && j < kNeurons / 8; j += 2) {
      const int n = j % 4 * 8 + lane / 16 * 8 + lane % 8, half = lane / 8 & 1;
      store_matrices_transposed(rows + n * 32 + ((half ^ (n >> 2 & 1)) << 4),
                                {packed[2 * j], packed[2 * j + 1], packed[2 * j + 2], packed[2 * j + 3]});
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = i * 16 + lane / 2, half = lane & 1;
      if (bits >> n & 1) {
        *reinterpret_cast<uint4*>(columns + static_cast<int64_t>(w * 32 + n) * kBlockTokens + half * 8) =
            load_shared_16(rows + n * 32 + ((half ^ (n >> 2 & 1)) << 4));
      }
    }
  }
}

// 64 tokens a warpgroup.
template <typename T, int kNeurons>
__device__ __forceinline__ void multiply_gate(const Arguments& a, Control& c, uint32_t stages, uint32_t turn, Ring ring,
                                              int block, int first, int steps) {
  using S = Shape<kNeurons>;
  const int warp = threadIdx.x / 32, half = warp / 4, lane = threadIdx.x % 32;
  const Active& active = a.active;
  uint16_t* const all_masks = reinterpret_cast<uint16_t*>(active.masks) + (block * 2 + half) * 2 * active.words;
  for (int pass = 0; pass < a.passes; ++pass) {
    const int pass_first = first + pass * kNeurons;
    float sum[kNeurons / 2];
    for (int step = 0; step < steps; ++step, ring.advance()) {
      ring.wait_full();
      if (threadIdx.x == 0 && pass == 0 && step == 0) a.trace.mark(2);
      const uint32_t stage = stages + ring.stage * S::kStageBytes;
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
        Wgmma<T, kNeurons, 0, 0>::multiply(sum, matrix_descriptor(stage + half * kHalfBytes + k * 32, 16),
                                           matrix_descriptor(stage + kTokenBytes + k * 32, 16), step + k);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0) release(ring, ring.previous(), lane, true, 0);
    }
    wgmma_wait<0>();
    release(ring, ring.previous(), lane, true, 0);

    uint32_t packed[kNeurons / 4];
    const int64_t token = static_cast<int64_t>(block) * kBlockTokens + warp * 16 + lane / 4;
    activate<T, kNeurons>(packed, sum, a, token, pass_first);
    uint32_t(*const warp_masks)[6] = c.warp_masks[pass & 1];
    find_active<kNeurons>(packed, warp_masks[warp]);
    named_barrier<kMultipliers>(kTileBarrier);
    uint32_t mask = 0;  // a lane for each word
    if (lane < S::kWords) {
#pragma unroll
      for (int w = 0; w < 4; ++w) mask |= warp_masks[half * 4 + w][lane];
      const int left = a.width - pass_first - 32 * lane;  // nothing is active past the last: x may hold NaN
      mask &= left >= 32 ? ~0u : left > 0 ? (1u << left) - 1 : 0;
    }
    if (warp % 4 == 0 && lane < S::kWords) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int piece = 2 * lane + i, at = pass_first / 16 + piece;
        if (piece >= S::kPieces) continue;
        c.masks[half][pass * S::kPieces + piece] = static_cast<uint16_t>(mask >> (16 * i));
        if (at < 2 * active.words) all_masks[at] = static_cast<uint16_t>(mask >> (16 * i));
      }
    }
    // The list is made while columns are stored.
    if (a.up != nullptr && pass == a.passes - 1) named_arrive<kMultipliers + kGatherers>(kMaskBarrier);
    T* const columns = static_cast<T*>(active.columns) +
                       (static_cast<int64_t>(block) * a.width + pass_first) * kBlockTokens + warp * 16;
    store_columns<T, kNeurons>(packed, mask, columns, turn + warp * 1024);
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(&c.gates_stored);
}

}  // namespace twell::sm90::mid
