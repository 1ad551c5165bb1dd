// The gradient of x of kept blocks, dx = dg Wg + du Wu, from their pairs.

#include "sm90_slice_pairs.cuh"
#include "sm90_slice_product.cuh"

namespace twell::sm90 {
namespace {

template <typename T, int kTerms, int kHidden>
__global__ void __launch_bounds__(slices::kThreads, 1) pair_kernel(const slices::PairArguments<kTerms> a) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ uint8_t raw_shared[];
  constexpr int kStages = slices::Shape<kHidden>::kStages;
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  slices::PairControl& c = *reinterpret_cast<slices::PairControl*>(shared + slices::kRingBytes +
                                                                   slices::kConsumerWarps * slices::kTurnBytes);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(c.full + s, slices::kPairArrivals);
      barrier_init(c.empty + s, slices::kConsumerWarps);
    }
    barrier_init(c.arrived, 1);
    barrier_init(c.arrived + 1, 1);
    fence_barrier_init();
  }
  launch_dependents();
  wait_for_previous();
  const slices::KeptBlocks kept(a, c);
  __syncthreads();
  const Ring ring(c.full, c.empty, kStages);
  if (threadIdx.x < slices::kFetchers) {
    give_registers<slices::kPairFetchRegisters>();
    slices::fetch_pairs<T, kTerms, kHidden>(a, c, kept, shared, ring);
  } else {
    take_registers<slices::kPairMultiplyRegisters>();
    const auto counts_of = [&](int block) { return c.blocks[block].counts; };
    slices::multiply<T, kTerms, kHidden>(a.out, kept.count, counts_of, shared, ring);
  }
#endif
}

template <typename T, int kTerms, int kHidden>
cudaError_t launch_slice(slices::PairArguments<kTerms> a, const Device& device, cudaStream_t stream) {
  a.out.slices = (a.out.hidden + kHidden - 1) / kHidden;
  const int grid = min(device.sm_count, a.blocks * a.out.slices);
  return launch_kernel(pair_kernel<T, kTerms, kHidden>, grid, slices::kThreads, 1, slices::kPairShared, stream, a);
}

template <typename T, int kTerms>
cudaError_t launch_type(const slices::PairArguments<kTerms>& a, const Device& device, cudaStream_t stream) {
  switch (slices::best_slice(a.blocks, a.out.hidden, device)) {
    case 64: return launch_slice<T, kTerms, 64>(a, device, stream);
    case 128: return launch_slice<T, kTerms, 128>(a, device, stream);
    default: return launch_slice<T, kTerms, 256>(a, device, stream);
  }
}

template <int kTerms>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const State& state, const slices::PairTerm (&terms)[kTerms],
                   void* y, const Device& device, cudaStream_t stream) {
  slices::PairArguments<kTerms> a{};
  for (int t = 0; t < kTerms; ++t) a.terms[t] = terms[t];
  a.out = slices::output_of(ffn, chunk, nullptr, y);
  a.state = state;
  a.first_block = chunk.first_block();
  a.blocks = chunk.active.blocks;
  return ffn.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(a, device, stream)
                                       : launch_type<__half>(a, device, stream);
}

}  // namespace

cudaError_t launch_pair_dx(const Ffn& ffn, const Chunk& chunk, const State& state, const PairGradients& pairs,
                           const Gradients& gradients, const Device& device, cudaStream_t stream) {
  const slices::PairTerm gate{pairs.dg, ffn.gate};
  if (ffn.up == nullptr) {
    const slices::PairTerm terms[] = {gate};
    return launch(ffn, chunk, state, terms, gradients.x, device, stream);
  }
  const slices::PairTerm terms[] = {gate, {pairs.du, ffn.up}};
  return launch(ffn, chunk, state, terms, gradients.x, device, stream);
}

}  // namespace twell::sm90
