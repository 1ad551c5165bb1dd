// The gradient of x of kept blocks, dx = dg Wg + du Wu, from their pairs.

#include "sm90/training/pair_dx_kernel.cuh"

namespace twell::sm90 {
namespace {

template <typename T, int kTerms>
cudaError_t launch_type(const dx::Arguments<kTerms>& a, const Device& device, cudaStream_t stream) {
  switch (slices::best_slice(a.blocks, a.out.hidden, device)) {
    case 64: return dx::launch_slice<T, kTerms, 64, dx::kAll>(a, device, stream);
    case 128: return dx::launch_slice<T, kTerms, 128, dx::kAll>(a, device, stream);
    default: return dx::launch_slice<T, kTerms, 256, dx::kAll>(a, device, stream);
  }
}

template <int kTerms>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const State& state, const PairGradients& pairs, void* y,
                   const Device& device, cudaStream_t stream) {
  const dx::Arguments<kTerms> a = dx::arguments_of<kTerms>(ffn, chunk, state, pairs, y);
  return ffn.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(a, device, stream)
                                       : launch_type<__half>(a, device, stream);
}

}  // namespace

cudaError_t launch_pair_dx(const Ffn& ffn, const Chunk& chunk, const State& state, const PairGradients& pairs,
                           const Gradients& gradients, const Device& device, cudaStream_t stream) {
  return ffn.gated() ? launch<2>(ffn, chunk, state, pairs, gradients.x, device, stream)
                           : launch<1>(ffn, chunk, state, pairs, gradients.x, device, stream);
}

}  // namespace twell::sm90
