// Up projection over active neurons in training: x Wu^T + bu beside relu(gate), which backward needs as it is.

#include "sm90/training/tile_columns.cuh"
#include "sm90/training/training.h"

namespace twell::sm90 {
namespace {

template <typename T>
struct Up {
  using Element = T;
  struct Given {
    const void* bias;  // (F), or null
  };
  static constexpr int kBuffers = 1;
  static constexpr bool kReads = false;
  const T* bias;
  tiles::Place place;

  __device__ __forceinline__ Up(const Given& given, const Chunk&, const tiles::Place& of)
      : bias(static_cast<const T*>(given.bias)), place(of) {}
  __device__ __forceinline__ void apply(uint32_t (&words)[1], float2 u, int column, int) const {
    if (bias != nullptr) {
      u.x += widen(bias[place.neurons[min(column, place.last)]]);
      u.y += widen(bias[place.neurons[min(column + 1, place.last)]]);
    }
    words[0] = pack<T>(u.x, u.y);
  }
};

template <typename T>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  const tiles::Arguments arguments{ffn.up.data, chunk, ffn.hidden, ffn.width};
  return tiles::launch<tiles::Columns<Up<T>>>(ffn, ffn.x, arguments, {{chunk.active.ups, nullptr}, {ffn.b_up}}, device,
                                              stream);
}

}  // namespace

cudaError_t launch_up_beside(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch<__nv_bfloat16>(ffn, chunk, device, stream)
                                       : launch<__half>(ffn, chunk, device, stream);
}

}  // namespace twell::sm90
