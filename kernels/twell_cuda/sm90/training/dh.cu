// The gradient of h over active neurons, and what it makes of relu(gate) = g and x Wu^T + bu = u: dh = dy Wd + L1's,
// du = dh g, dg = dh u + the count's where g is active. Without a gate h is g: dg = dh + the count's.

#include "common/terms.cuh"
#include "sm90/training/tile_columns.cuh"
#include "sm90/training/training.h"

namespace twell::sm90 {
namespace {

// What a term pulls with at a token of the chunk.
__device__ __forceinline__ float pull(const float* scale, const Terms& terms, const Chunk& chunk, int token) {
  if (scale == nullptr || token >= chunk.tokens) return 0.0f;
  return terms.token_weight == nullptr ? *scale : *scale * terms.token_weight[chunk.first + token];
}

template <typename T, bool kGated, bool kWithH>
struct Gradient {
  using Element = T;
  using Given = Terms;
  static constexpr int kRead = kGated ? 2 : 1, kBuffers = kRead + kWithH;
  float l1[2], count[2];

  __device__ __forceinline__ Gradient(const Given& terms, const Chunk& chunk, const tiles::Place& place) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      l1[row] = pull(terms.l1_scale, terms, chunk, place.token + 8 * row);
      count[row] = pull(terms.count_scale, terms, chunk, place.token + 8 * row);
    }
  }

  __device__ __forceinline__ void apply(uint32_t (&words)[kBuffers], float2 dh, int, int row) const {
    const float2 g = unpack<T>(words[0]);
    const float of_x = count_gradient(count[row], g.x), of_y = count_gradient(count[row], g.y);
    if constexpr (kGated) {
      const float2 u = unpack<T>(words[1]);
      const uint32_t rounded = pack<T>(g.x * u.x, g.y * u.y);
      const float2 h = unpack<T>(rounded);
      dh.x += l1_gradient(l1[row], h.x);
      dh.y += l1_gradient(l1[row], h.y);
      words[0] = pack<T>(g.x != 0.0f ? dh.x * u.x + of_x : 0.0f, g.y != 0.0f ? dh.y * u.y + of_y : 0.0f);
      words[1] = pack<T>(dh.x * g.x, dh.y * g.y);
      if constexpr (kWithH) words[2] = rounded;
    } else {
      dh.x += l1_gradient(l1[row], g.x);
      dh.y += l1_gradient(l1[row], g.y);
      words[0] = pack<T>(g.x != 0.0f ? dh.x + of_x : 0.0f, g.y != 0.0f ? dh.y + of_y : 0.0f);
    }
  }
};

template <typename Epilogue>
cudaError_t launch_gradient(const Ffn& ffn, const Chunk& chunk, const Terms& terms, const void* dy, const Columns& to,
                            const Device& device, cudaStream_t stream) {
  using Job = tiles::Columns<Epilogue>;
  const tiles::Arguments arguments{ffn.down.data, chunk, ffn.hidden, ffn.width};
  const typename Job::Given given{{chunk.active.columns, chunk.active.ups}, {to.gate, to.up, to.h}, terms};
  return tiles::launch<Job>(ffn, dy, arguments, given, device, stream);
}

template <typename T>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const Terms& terms, const void* dy, const Columns& to,
                   const Device& device, cudaStream_t stream) {
  const auto run = !ffn.gated()      ? launch_gradient<Gradient<T, false, false>>
                   : to.h == nullptr ? launch_gradient<Gradient<T, true, false>>
                                     : launch_gradient<Gradient<T, true, true>>;
  return run(ffn, chunk, terms, dy, to, device, stream);
}

}  // namespace

cudaError_t launch_dh(const Ffn& ffn, const Chunk& chunk, const Terms& terms, const void* dy, const Columns& to,
                      const Device& device, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch<__nv_bfloat16>(ffn, chunk, terms, dy, to, device, stream)
                                       : launch<__half>(ffn, chunk, terms, dy, to, device, stream);
}

}  // namespace twell::sm90
