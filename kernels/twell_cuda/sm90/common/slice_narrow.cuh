// Products over neurons of 8-bit rows: the warpgroups that multiply.
//
// Here hidden units are the product's rows and tokens its columns, as wgmma takes the rows' operand from registers:
// bytes become 16-bit values there, and need no other place. Each warpgroup has half of a slice's hidden units, and all
// tokens. Scales belong to the hidden units, and meet the sums.
#pragma once

#include "sm90/common/slice_fetch.cuh"
#include "sm90/common/wgmma_registers.cuh"

namespace twell::sm90::slices {

// A warp's hidden units come in sixteens, kTiles of them. Of each a lane has two neighbours, 2 (lane / 4) and the next:
// rows lane / 4 and lane / 4 + 8 of the warp's 16.
template <typename T, int kTiles>
struct Scaling {
  float2 scales[kTiles], biases[kTiles];

  // `hidden`: the lane's first.
  __device__ __forceinline__ Scaling(const ScaledOutput& out, int hidden) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t, hidden += 16) {
      scales[t] = biases[t] = float2{};
      if (hidden >= out.hidden) continue;
      scales[t] = {out.scales[hidden], out.scales[hidden + 1]};
      if (out.bias != nullptr) {
        biases[t] = unpack<T>(*reinterpret_cast<const uint32_t*>(static_cast<const T*>(out.bias) + hidden));
      }
    }
  }
  __device__ __forceinline__ uint32_t pack_pair(int t, float low, float high) const {
    return pack<T>(low * scales[t].x + biases[t].x, high * scales[t].y + biases[t].y);
  }
};

// A lane's sums, [tile][half][eights of tokens, row, token], to y: a warp writes 32 bytes of each of four tokens.
template <typename T, int kTiles>
__device__ __forceinline__ void store_scaled(const ScaledOutput& out, const float (&sum)[kTiles][2][32],
                                             const Scaling<T, kTiles>& scaling, int64_t first_token, int hidden) {
  const int64_t token = first_token + threadIdx.x % 4 * 2;  // the lane's first
  const int tokens = static_cast<int>(min(out.tokens - token, int64_t{kBlockTokens}));
  const int row = out.hidden / 2;  // in words of two hidden units
  uint32_t* y = static_cast<uint32_t*>(out.y) + token * row + hidden / 2;
#pragma unroll
  for (int j = 0; j < kBlockTokens / 8; ++j, y += 8 * row) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const float* v = sum[t][j / 8] + j % 8 * 4;
      const bool valid = hidden + 16 * t < out.hidden;
      if (valid && 8 * j < tokens) y[8 * t] = scaling.pack_pair(t, v[0], v[2]);
      if (valid && 8 * j + 1 < tokens) y[row + 8 * t] = scaling.pack_pair(t, v[1], v[3]);
    }
  }
}

// A warp's hidden units of 16 neurons: bytes that lie with 128-byte swizzle, then operands. A transposed load of pairs
// of bytes gives a lane two neighbouring hidden units of two neighbouring neurons in one word.
template <int kTiles>
__device__ __forceinline__ void load_words(uint32_t (&words)[2 * kTiles], uint32_t rows) {
  if constexpr (kTiles == 2) {
    load_matrices_transposed(words, rows);
  } else {
    load_two_matrices_transposed(words, rows);
  }
}
template <typename T, typename Weight, int kTiles>
__device__ __forceinline__ void expand_words(uint32_t (&a)[kTiles][4], const uint32_t (&words)[2 * kTiles]) {
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {  // the first eight neurons and the second, tile by tile
    uint32_t* const of_eight = a[i / 2] + i % 2 * 2;
    expand<T, Weight>(__byte_perm(words[i], 0, 0x3120), of_eight[0], of_eight[1]);
  }
}

// One stage, for the halves of the tokens that activate any of its neurons. Operands of 16 neurons are made while those
// before are multiplied. So the last are not when this returns; the stage before is given back by then.
template <typename T, typename Weight, bool kFirst, bool kSecond, int kTiles>
__device__ __forceinline__ void multiply_stage(float (&sum)[kTiles][2][32], uint32_t stage, uint32_t rows) {
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    uint32_t words[2 * kTiles], a[kTiles][4];
    load_words<kTiles>(words, rows + k * 2048);
    wgmma_wait<1>();
    expand_words<T, Weight>(a, words);
    wgmma_fence();
#pragma unroll
    for (int half = kFirst ? 0 : 1; half < (kSecond ? 2 : 1); ++half) {
      const uint64_t columns = matrix_descriptor(stage + half * kPartBytes + k * 2048, kPartBytes);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) WgmmaOfRegisters<T, 64, 1>::multiply(sum[t][half], a[t], columns);
    }
    wgmma_commit();
  }
}

// `counts_of` gives a block's Counts.
template <typename T, typename Weight, int kHidden, typename CountsOf>
__device__ __forceinline__ void multiply_narrow(const ScaledOutput& out, int blocks, const CountsOf& counts_of,
                                                uint8_t* shared, Ring ring) {
  constexpr int kBytes = Shape<Weight, kHidden>::kStageBytes, kTiles = kHidden / 128;
  static_assert(kTiles == 1 || kTiles == 2);
  const int lane = threadIdx.x % 32, own = (threadIdx.x - kFetchers) / 32 * 16 * kTiles;  // of a slice's hidden units
  const int chunk = own % 128 / 16 + (kTiles == 2 ? lane / 16 : 0);  // whose rows the lane points to
  const uint32_t stages = smem_address(shared);
  const uint32_t rows = stages + (2 + own / 128) * kPartBytes + lane % 16 * 128 + ((chunk ^ (lane & 7)) << 4);
  for (int item = blockIdx.x; item < blocks * out.slices; item += gridDim.x) {
    const int block = item / out.slices, hidden = item % out.slices * kHidden + own + lane / 4 * 2;
    const Scaling<T, kTiles> scaling(out, hidden);
    const Counts counts = counts_of(block);
    const HalfEntries first(counts, 0), second(counts, 1);
    float sum[kTiles][2][32] = {};
    for (int start = 0; start < counts.all(); start += kDepth, ring.advance()) {
      const uint32_t stage = ring.stage * kBytes;
      ring.wait_full();
      fence_async_proxy();  // cp.async wrote, tensor cores read
      if (!second.in_step(start)) {
        multiply_stage<T, Weight, true, false>(sum, stages + stage, rows + stage);
      } else if (!first.in_step(start)) {
        multiply_stage<T, Weight, false, true>(sum, stages + stage, rows + stage);
      } else {
        multiply_stage<T, Weight, true, true>(sum, stages + stage, rows + stage);
      }
      if (start > 0 && lane == 0) barrier_arrive(ring.empty + ring.previous());
    }
    wgmma_wait<0>();
    if (counts.all() > 0 && lane == 0) barrier_arrive(ring.empty + ring.previous());
    store_scaled(out, sum, scaling, static_cast<int64_t>(block) * kBlockTokens, hidden);
  }
}

}  // namespace twell::sm90::slices
