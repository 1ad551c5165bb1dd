// Products over neurons: for each half block of 64 tokens, columns of its activations (or of their gradients) by the
// rows of the neurons that any of the tokens activates.
//
// A persistent thread block of three warpgroups an SM. The first gathers columns and rows with cp.async, or with bulk
// copies where they are neighbours; the other two multiply half of the tokens each. Both operands lie in shared memory
// as they do in global memory, tokens and hidden units contiguous, and the tensor cores read them transposed. Rows of
// bytes are multiplied otherwise: slice_narrow.cuh.
#pragma once

#include "sm90/common/launch.h"
#include "sm90/common/slice_fetch.cuh"
#include "sm90/common/slice_narrow.cuh"
#include "sm90/common/wgmma.cuh"

namespace twell::sm90::slices {

// `counts_of` gives a block's Counts.
template <typename T, int kTerms, int kHidden, typename CountsOf>
__device__ __forceinline__ void multiply(const Output& out, int blocks, const CountsOf& counts_of, uint8_t* shared,
                                         Ring ring) {
  constexpr int kBytes = Shape<T, kHidden>::kStageBytes;
  const int lane = threadIdx.x % 32, warp = (threadIdx.x - kFetchers) / 32, warpgroup = warp / 4;
  const uint32_t stages = smem_address(shared), turn = stages + kRingBytes + warp * kTurnBytes;
  for (int item = blockIdx.x; item < blocks * out.slices; item += gridDim.x) {
    const int block = item / out.slices, first_hidden = item % out.slices * kHidden;
    const Counts counts = counts_of(block);
    const HalfEntries entries(counts, warpgroup);
    const int steps = (counts.all() + kDepth - 1) / kDepth * kTerms;
    float sum[kHidden / 2];
    bool started = false;
    for (int step = 0; step < steps; ++step, ring.advance()) {
      ring.wait_full();
      if (entries.in_step(step / kTerms * kDepth)) {
        fence_async_proxy();  // cp.async wrote, tensor cores read
        const uint32_t stage = stages + ring.stage * kBytes;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k) {
          Wgmma<T, kHidden, 1, 1>::multiply(
              sum, matrix_descriptor(stage + warpgroup * kPartBytes + k * 2048, kPartBytes),
              matrix_descriptor(stage + 2 * kPartBytes + k * 2048, kPartBytes), started || k);
        }
        wgmma_commit();
        started = true;
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      if (step > 0 && lane == 0) barrier_arrive(ring.empty + ring.previous());
    }
    wgmma_wait<0>();
    if (steps > 0 && lane == 0) barrier_arrive(ring.empty + ring.previous());
    if (!started) {
#pragma unroll
      for (int i = 0; i < kHidden / 2; ++i) sum[i] = 0.0f;
    }

    store_sums<T, kHidden, true>(out, sum, turn, static_cast<int64_t>(block) * kBlockTokens + warp * 16, first_hidden);
  }
}

// `Weight` is T, or an 8-bit type.
template <typename T, typename Weight, int kTerms, int kHidden>
__global__ void __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ Maps<kTerms> maps, const Arguments<kTerms, OutputOf<Weight>> a) {
#if defined(TWELL_SM90_DEVICE)
  if (a.chunk.known_skipped()) {
    launch_dependents();
    wait_for_previous();
    return;
  }
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  Control& c = *reinterpret_cast<Control*>(shared + kRingBytes + kConsumerWarps * kTurnBytes);
  constexpr int kStages = Shape<Weight, kHidden>::kStages;
  if (threadIdx.x == 0) {
    for (int t = 0; t < kTerms; ++t) {
      prefetch_map(maps.columns + t);
      prefetch_map(maps.rows + t);
    }
    for (int s = 0; s < kStages; ++s) {
      barrier_init(c.full + s, kFetchers);
      barrier_init(c.empty + s, kConsumerWarps);
    }
    barrier_init(c.listed, 1);
    barrier_init(c.listed + 1, 1);
    fence_barrier_init();
  }
  launch_dependents();
  wait_for_previous();
  if (a.chunk.skipped()) return;
  const int blocks = a.chunk.active.blocks;
  for (int b = threadIdx.x; b < blocks; b += kThreads) c.counts[b] = a.chunk.active.counts[b];
  __syncthreads();
  const auto counts_of = [&](int block) { return c.counts[block]; };
  const Ring ring(c.full, c.empty, kStages);
  if (threadIdx.x < kFetchers) {
    give_registers<kFetchRegisters>();
    fetch<T, Weight, kTerms, kHidden>(a, maps, c, shared, ring);
  } else {
    take_registers<kMultiplyRegisters>();
    if constexpr (kScaled<Weight>) {
      static_assert(kTerms == 1);
      multiply_narrow<T, Weight, kHidden>(a.out, blocks, counts_of, shared, ring);
    } else {
      multiply<T, kTerms, kHidden>(a.out, blocks, counts_of, shared, ring);
    }
  }
#endif
}

// How many hidden units to a slice.
inline int best_slice(int blocks, int hidden, const Device& device) {
  int best = 256;
  int64_t best_cost = INT64_MAX;
  for (const int slice : {256, 128, 64}) {
    const int64_t items = static_cast<int64_t>(blocks) * ((hidden + slice - 1) / slice);
    // The columns' share of the traffic does not shrink with the slice.
    const int64_t cost = (items + device.sm_count - 1) / device.sm_count * (slice + 96);
    if (cost < best_cost) best = slice, best_cost = cost;
  }
  return best;
}

template <typename T, typename Weight, int kHidden, int kTerms, typename Out>
cudaError_t launch_slice(DType dtype, Arguments<kTerms, Out> a, const Device& device, cudaStream_t stream) {
  const int blocks = a.chunk.active.blocks;
  a.out.slices = (a.out.hidden + kHidden - 1) / kHidden;
  Maps<kTerms> maps;
  for (int t = 0; t < kTerms; ++t) {
    TWELL_RETURN_IF_ERROR(make_tensor_map(maps.columns + t, dtype, a.terms[t].columns, int64_t{blocks} * a.width,
                                          kBlockTokens, kDepth));
    const void* rows = a.terms[t].rows;
    const int hidden = a.out.hidden;
    TWELL_RETURN_IF_ERROR(kScaled<Weight> ? make_byte_map(maps.rows + t, rows, a.width, hidden, hidden, kDepth)
                                          : make_tensor_map(maps.rows + t, dtype, rows, a.width, hidden, kDepth));
  }
  const int grid = min(device.sm_count, blocks * a.out.slices);
  return launch_kernel(product_kernel<T, Weight, kTerms, kHidden>, grid, kThreads, 1, kShared, stream, maps, a);
}

template <typename T, typename Weight, int kTerms, typename Out>
cudaError_t launch_type(DType dtype, const Arguments<kTerms, Out>& a, const Device& device, cudaStream_t stream) {
  switch (best_slice(a.chunk.active.blocks, a.out.hidden, device)) {
    case 64: return launch_slice<T, Weight, kScaled<Weight> ? 128 : 64>(dtype, a, device, stream);
    case 128: return launch_slice<T, Weight, 128>(dtype, a, device, stream);
    default: return launch_slice<T, Weight, 256>(dtype, a, device, stream);
  }
}

// `y` is that of all tokens.
inline Output output_of(const Ffn& ffn, const Chunk& chunk, const void* bias, void* y) {
  return {bias, static_cast<uint16_t*>(y) + chunk.first * ffn.hidden, chunk.tokens, ffn.hidden, 0};
}

// Of down, whose rows are 8-bit.
inline Arguments<1, ScaledOutput> scaled_arguments(const Ffn& ffn, const Chunk& chunk) {
  return {{{chunk.active.columns, ffn.down.data}},
          {output_of(ffn, chunk, ffn.b_down, ffn.y), ffn.down.scales},
          chunk,
          ffn.width};
}

template <int kTerms>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const Term (&terms)[kTerms], const void* bias, void* y,
                   const Device& device, cudaStream_t stream) {
  Arguments<kTerms> a{};
  for (int t = 0; t < kTerms; ++t) a.terms[t] = terms[t];
  a.out = output_of(ffn, chunk, bias, y);
  a.chunk = chunk;
  a.width = ffn.width;
  return ffn.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16, __nv_bfloat16>(ffn.dtype, a, device, stream)
                                       : launch_type<__half, __half>(ffn.dtype, a, device, stream);
}

}  // namespace twell::sm90::slices
