// The gradient of h over active neurons, and what it makes of relu(gate) = g and x Wu^T + bu = u, in their places:
// dh = dy Wd + L1's, du = dh g, dg = dh u where g is active. Without a gate h is g: dg = dh.

#include "common/l1.cuh"
#include "sm90/training/tile_columns.cuh"
#include "sm90/training/training.h"

namespace twell::sm90 {
namespace {

// What pulls at a token's h.
struct L1Term {
  const float* scale;         // one, or null
  const float* token_weight;  // (T), or null

  __device__ __forceinline__ float at(const Chunk& chunk, int token) const {
    if (scale == nullptr || token >= chunk.tokens) return 0.0f;
    return token_weight == nullptr ? *scale : *scale * token_weight[chunk.first + token];
  }
};

template <typename T, bool kGated>
struct Gradient {
  using Element = T;
  using Given = L1Term;
  static constexpr int kBuffers = kGated ? 2 : 1;
  static constexpr bool kReads = true;
  float l1[2];

  __device__ __forceinline__ Gradient(const Given& given, const Chunk& chunk, const tiles::Place& place)
      : l1{given.at(chunk, place.token), given.at(chunk, place.token + 8)} {}

  __device__ __forceinline__ void apply(uint32_t (&words)[kBuffers], float2 dh, int, int row) const {
    const float2 g = unpack<T>(words[0]);
    if constexpr (kGated) {
      const float2 u = unpack<T>(words[1]), h = unpack<T>(pack<T>(g.x * u.x, g.y * u.y));
      dh.x += l1_gradient(l1[row], h.x);
      dh.y += l1_gradient(l1[row], h.y);
      words[0] = pack<T>(g.x != 0.0f ? dh.x * u.x : 0.0f, g.y != 0.0f ? dh.y * u.y : 0.0f);
      words[1] = pack<T>(dh.x * g.x, dh.y * g.y);
    } else {
      dh.x += l1_gradient(l1[row], g.x);
      dh.y += l1_gradient(l1[row], g.y);
      words[0] = pack<T>(g.x != 0.0f ? dh.x : 0.0f, g.y != 0.0f ? dh.y : 0.0f);
    }
  }
};

template <typename T>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const L1Term& l1, const void* dy, const Device& device,
                   cudaStream_t stream) {
  using Gated = tiles::Columns<Gradient<T, true>>;
  using Plain = tiles::Columns<Gradient<T, false>>;
  const tiles::Arguments arguments{ffn.down.data, chunk, ffn.hidden, ffn.width};
  const Active& active = chunk.active;
  return ffn.gated() ? tiles::launch<Gated>(ffn, dy, arguments, {{active.columns, active.ups}, l1}, device, stream)
                     : tiles::launch<Plain>(ffn, dy, arguments, {{active.columns, nullptr}, l1}, device, stream);
}

}  // namespace

cudaError_t launch_dh(const Ffn& ffn, const Chunk& chunk, const Training& training, const Gradients& gradients,
                      const Device& device, cudaStream_t stream) {
  const L1Term l1{training.l1_scale, training.token_weight};
  return ffn.dtype == DType::kBFloat16 ? launch<__nv_bfloat16>(ffn, chunk, l1, gradients.dy, device, stream)
                                       : launch<__half>(ffn, chunk, l1, gradients.dy, device, stream);
}

}  // namespace twell::sm90
