// Up projection over active neurons in training: u = x Wu^T + bu beside relu(gate), which backward needs as it is.
// Where h = relu(gate) * u is wanted too it goes to columns of its own.

#include "sm90/training/tile_columns.cuh"
#include "sm90/training/training.h"

namespace twell::sm90 {
namespace {

struct UpGiven {
  const void* bias;  // (F), or null
};

template <typename T>
struct Up {
  using Element = T;
  using Given = UpGiven;
  static constexpr int kBuffers = 1, kRead = 0;
  const T* bias;
  tiles::Place place;

  __device__ __forceinline__ Up(const Given& given, const Chunk&, const tiles::Place& of)
      : bias(static_cast<const T*>(given.bias)), place(of) {}
  __device__ __forceinline__ uint32_t up(float2 u, int column) const {
    if (bias != nullptr) {
      u.x += widen(bias[place.neurons[min(column, place.last)]]);
      u.y += widen(bias[place.neurons[min(column + 1, place.last)]]);
    }
    return pack<T>(u.x, u.y);
  }
  __device__ __forceinline__ void apply(uint32_t (&words)[1], float2 u, int column, int) const {
    words[0] = up(u, column);
  }
};

template <typename T>
struct UpAndH : Up<T> {
  static constexpr int kBuffers = 2, kRead = 1;
  using Up<T>::Up;

  __device__ __forceinline__ void apply(uint32_t (&words)[2], float2 sum, int column, int) const {
    words[1] = this->up(sum, column);
    const float2 g = unpack<T>(words[0]), u = unpack<T>(words[1]);
    words[0] = pack<T>(g.x * u.x, g.y * u.y);
  }
};

template <typename T>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, void* h, const Device& device, cudaStream_t stream) {
  using Both = tiles::Columns<UpAndH<T>>;
  using Alone = tiles::Columns<Up<T>>;
  const tiles::Arguments arguments{ffn.up.data, chunk, ffn.hidden, ffn.width};
  const Active& active = chunk.active;
  const UpGiven bias{ffn.b_up};
  return h != nullptr
             ? tiles::launch<Both>(ffn, ffn.x, arguments, {{active.columns}, {h, active.ups}, bias}, device, stream)
             : tiles::launch<Alone>(ffn, ffn.x, arguments, {{}, {active.ups}, bias}, device, stream);
}

}  // namespace

cudaError_t launch_up_beside(const Ffn& ffn, const Chunk& chunk, void* h, const Device& device, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch<__nv_bfloat16>(ffn, chunk, h, device, stream)
                                       : launch<__half>(ffn, chunk, h, device, stream);
}

}  // namespace twell::sm90
