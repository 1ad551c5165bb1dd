// Up projection over active neurons: x Wu^T + bu for each block of 128 tokens and the neurons that any of them
// activates, as the others' columns of h would be zero. In inference h = relu(gate) * (x Wu^T + bu) takes the place of
// relu(gate); in training x Wu^T + bu goes beside it.

#include "sm90_tile_columns.cuh"
#include "sm90_training.h"

namespace twell::sm90 {
namespace {

template <typename T, bool kBeside>
struct Up {
  using Element = T;
  struct Given {
    const void* bias;  // (F), or null
  };
  static constexpr int kBuffers = 1;
  static constexpr bool kReads = !kBeside;
  const T* bias;
  tiles::Place place;

  __device__ __forceinline__ Up(const Given& given, const Chunk&, const tiles::Place& of)
      : bias(static_cast<const T*>(given.bias)), place(of) {}
  __device__ __forceinline__ void apply(uint32_t (&words)[1], float2 u, int column, int) const {
    if (bias != nullptr) {
      u.x += widen(bias[place.neurons[min(column, place.last)]]);
      u.y += widen(bias[place.neurons[min(column + 1, place.last)]]);
    }
    if constexpr (!kBeside) {
      const float2 g = unpack<T>(words[0]);
      u = {g.x * u.x, g.y * u.y};
    }
    words[0] = pack<T>(u.x, u.y);
  }
};

template <bool kBeside>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, void* columns, const Device& device, cudaStream_t stream) {
  using BFloat16Up = tiles::Columns<Up<__nv_bfloat16, kBeside>>;
  using Float16Up = tiles::Columns<Up<__half, kBeside>>;
  const tiles::Arguments arguments{ffn.up, chunk, ffn.hidden, ffn.width};
  return ffn.dtype == DType::kBFloat16
             ? tiles::launch<BFloat16Up>(ffn, ffn.x, arguments, {{columns, nullptr}, {ffn.b_up}}, device, stream)
             : tiles::launch<Float16Up>(ffn, ffn.x, arguments, {{columns, nullptr}, {ffn.b_up}}, device, stream);
}

}  // namespace

cudaError_t launch_up(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  return launch<false>(ffn, chunk, chunk.active.columns, device, stream);
}

cudaError_t launch_up_beside(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  return launch<true>(ffn, chunk, chunk.active.ups, device, stream);
}

}  // namespace twell::sm90
