// How a warpgroup's sums (tokens by hidden units, as wgmma leaves them) come to y.
#pragma once

#include "sm90/common/primitives.cuh"

namespace twell::sm90 {

constexpr int kTurnBytes = 16 * 64 * 2;  // a warp's 16 tokens x 64 hidden units

// A warp's sums, 16 tokens by kHidden columns, to y by way of its `turn` in shared memory. `out` has y (tokens,
// hidden), and with kBias a bias (hidden) or null.
template <typename T, int kHidden, bool kBias, typename Output>
__device__ __forceinline__ void store_sums(const Output& out, const float* sum, uint32_t turn, int64_t first_token,
                                           int first_hidden) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int pass = 0; pass < kHidden / 64; ++pass) {
    __syncwarp();
#pragma unroll
    for (int j = 8 * pass; j < 8 * pass + 8; j += 2) {
      uint32_t packed[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int index = 4 * (j + m / 2) + m % 2 * 2, hidden = first_hidden + 8 * (j + m / 2) + lane % 4 * 2;
        float2 bias{};
        if (kBias && out.bias != nullptr && hidden < out.hidden) {
          bias = unpack<T>(*reinterpret_cast<const uint32_t*>(static_cast<const T*>(out.bias) + hidden));
        }
        packed[m] = kBias ? pack<T>(sum[index] + bias.x, sum[index + 1] + bias.y) : pack<T>(sum[index], sum[index + 1]);
      }
      const int row = lane % 16, chunk = j % 8 + lane / 16;
      store_matrices(turn + row * 128 + ((chunk ^ (row & 7)) << 4), packed);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane / 8, chunk = lane % 8, hidden = first_hidden + pass * 64 + chunk * 8;
      const int64_t token = first_token + row;
      if (token < out.tokens && hidden < out.hidden) {
        *reinterpret_cast<uint4*>(static_cast<T*>(out.y) + token * out.hidden + hidden) =
            load_shared_16(turn + row * 128 + ((chunk ^ (row & 7)) << 4));
      }
    }
  }
}

}  // namespace twell::sm90
