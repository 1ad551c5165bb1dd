// Products over the hidden size: each block's 128 tokens by the rows of the neurons that any of them activates.
//
// A persistent thread block of three warpgroups an SM. The first fetches: tokens by bulk tensor copies, gathered rows
// by cp.async (by bulk copies where they are neighbours), and at the end of a tile its columns of the activations,
// through the same ring of stages. The other two multiply half of the tokens each, by those of the tile's neurons that
// it activates; what then becomes of the sums is the Epilogue's:
//
//   Element   bf16 or fp16
//   Given     what it needs to know, from the host
//   kBuffers  how many kinds of columns each neuron has here
//   kReads    whether the results need what they hold; else they are only written
//   Epilogue(Given, Chunk, Place), for each tile
//   apply(words, sum, column, row): each of `words` is two neurons' values in one kind of columns, to be replaced; they
//     are neurons `column` and column + 1 of the tile, and `row` is 0 for Place's token, 1 for the eighth after it
#pragma once

#include "sm90_launch.h"
#include "sm90_tile_fetch.cuh"
#include "sm90_wgmma.cuh"

namespace twell::sm90::tiles {

struct Place {
  const uint16_t* neurons;  // of the tile
  int last;                 // of these
  int token;                // of the chunk
};

// This warpgroup's tokens by N of the tile's neurons, from the one at `skipped` bytes on.
template <typename T, int N>
__device__ __forceinline__ void multiply_tile(float* sum, Ring& ring, uint32_t stages, int bytes, int skipped,
                                              int steps, int warpgroup, int lane) {
  for (int step = 0; step < steps; ++step, ring.advance()) {
    ring.wait_full();
    if constexpr (N > 0) {
      fence_async_proxy();  // cp.async wrote, tensor cores read
      const uint32_t stage = stages + ring.stage * bytes;
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
        Wgmma<T, N, 0, 0>::multiply(sum, matrix_descriptor(stage + warpgroup * kHalfTokens * 128 + k * 32, 16),
                                    matrix_descriptor(stage + kTokenBytes + skipped + k * 32, 16), step + k);
      }
      wgmma_commit();
      wgmma_wait<1>();
    }
    if (step > 0 && lane == 0) barrier_arrive(ring.empty + ring.previous());
  }
  wgmma_wait<0>();
  if (lane == 0) barrier_arrive(ring.empty + ring.previous());
}

template <typename Epilogue>
__device__ __forceinline__ void multiply(const Arguments& a, const typename Epilogue::Given& given, Control& c,
                                         uint8_t* shared, Ring ring) {
  using T = typename Epilogue::Element;
  constexpr int kBuffers = Epilogue::kBuffers;
  const int steps = (a.hidden + kDepth - 1) / kDepth, items = c.first_item[a.chunk.active.blocks];
  const int lane = threadIdx.x % 32;
  const int warp = (threadIdx.x - kFetchers) / 32, warpgroup = warp / 4, bytes = stage_bytes(c.tile);
  const uint32_t stages = smem_address(shared);
  int block = 0, tiles = 0;
  for (int index = blockIdx.x; index < items; index += gridDim.x, ++tiles) {
    const Item item = item_at(index, block, c);
    block = item.block;
    // Neurons [begin, end) of the tile are active in this half; multiplied are `groups` times 64 from `low` on.
    const Counts counts = c.counts[block];
    const int begin = warpgroup == 0 ? 0 : max(counts.first_only - item.first, 0);
    const int end = min(item.count, warpgroup == 0 ? counts.first_only + counts.both - item.first : item.count);
    const int groups = max(end - begin / 16 * 16 + 63, 0) / 64, low = min(begin / 16 * 16, c.tile - groups * 64);
    float sum[kMaxNeurons / 2];
    const int skipped = low * kDepth * 2;
    switch (groups) {
      case 0: multiply_tile<T, 0>(sum, ring, stages, bytes, skipped, steps, warpgroup, lane); break;
      case 1: multiply_tile<T, 64>(sum, ring, stages, bytes, skipped, steps, warpgroup, lane); break;
      case 2: multiply_tile<T, 128>(sum, ring, stages, bytes, skipped, steps, warpgroup, lane); break;
      case 3: multiply_tile<T, 192>(sum, ring, stages, bytes, skipped, steps, warpgroup, lane); break;
      default: multiply_tile<T, 256>(sum, ring, stages, bytes, skipped, steps, warpgroup, lane); break;
    }
    barrier_wait(c.listed + tiles % kLists, tiles / kLists & 1);
    const uint16_t* neurons = c.neurons[tiles % kLists];
    const Epilogue epilogue(given, a.chunk, {neurons, item.count - 1, block * kBlockTokens + warp * 16 + lane / 4});
    const int64_t first_column = static_cast<int64_t>(block) * a.width * kBlockTokens + warp * 16 + (lane & 1) * 8;
    // The results take their place in the stages that hold the columns, then in global memory.
    for (int first = 0; first < item.count; first += kTurnNeurons) {
      uint32_t turns[kBuffers];
      Ring filled = ring;
#pragma unroll
      for (int b = 0; b < kBuffers; ++b, filled.advance()) {
        filled.wait_full();
        turns[b] = stages + filled.stage * bytes;
      }
      const auto turn_at = [&](int n, int part) { return n * 256 + ((part ^ (n & 7)) << 4); };
      const int limit = min(kTurnNeurons, end - first);
#pragma unroll
      for (int j = 0; j < kMaxNeurons / 8; j += 2) {  // 16 neurons
        const int n = low + 8 * j - first;
        if (n >= 0 && n < limit) {
          const uint32_t at = turn_at(n + lane / 16 * 8 + lane % 8, 2 * warp + (lane / 8 & 1));
          uint32_t values[kBuffers][4]{};
          if constexpr (Epilogue::kReads) {
#pragma unroll
            for (int b = 0; b < kBuffers; ++b) load_matrices_transposed(values[b], turns[b] + at);
          }
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const int i = 4 * (j + m / 2) + m % 2 * 2;
            uint32_t words[kBuffers];
#pragma unroll
            for (int b = 0; b < kBuffers; ++b) words[b] = values[b][m];
            epilogue.apply(words, {sum[i], sum[i + 1]}, low + 8 * (j + m / 2) + lane % 4 * 2, m % 2);
#pragma unroll
            for (int b = 0; b < kBuffers; ++b) values[b][m] = words[b];
          }
#pragma unroll
          for (int b = 0; b < kBuffers; ++b) store_matrices_transposed(turns[b] + at, values[b]);
        }
      }
      __syncwarp();
      const int start = max(begin - first, 0) + lane / 2;
#pragma unroll
      for (int i = 0; i < kTurnNeurons / 16; ++i) {
        const int n = start + 16 * i;
        if (n < limit) {
          const int64_t column = first_column + static_cast<int64_t>(neurons[first + n]) * kBlockTokens;
#pragma unroll
          for (int b = 0; b < kBuffers; ++b) {
            *reinterpret_cast<uint4*>(static_cast<T*>(a.columns[b]) + column) =
                load_shared_16(turns[b] + turn_at(n, 2 * warp + (lane & 1)));
          }
        }
      }
      fence_async_proxy();  // ordinary stores here, bulk copies next
      __syncwarp();
#pragma unroll
      for (int b = 0; b < kBuffers; ++b, ring.advance()) {
        if (lane == 0) barrier_arrive(ring.empty + ring.stage);
      }
    }
  }
}

template <typename Epilogue>
__global__ void __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ CUtensorMap token_map, const __grid_constant__ CUtensorMap row_map,
                   const Arguments a, const typename Epilogue::Given given) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  Control& c = *reinterpret_cast<Control*>(shared + kRingBytes);
  const Active& active = a.chunk.active;
  if (threadIdx.x == 0) {
    prefetch_map(&token_map);
    prefetch_map(&row_map);
    for (int s = 0; s < kMaxStages; ++s) {
      barrier_init(c.full + s, kFetchers + 1);
      barrier_init(c.empty + s, kConsumerWarps);
    }
    for (int i = 0; i < kLists; ++i) barrier_init(c.listed + i, 1);
    fence_barrier_init();
  }
  launch_dependents();
  wait_for_previous();
  if (a.chunk.skipped()) return;
  for (int b = threadIdx.x; b < active.blocks; b += kThreads) c.counts[b] = active.counts[b];
  __syncthreads();
  plan(c, active.blocks);
  const Ring ring(c.full, c.empty, min(kMaxStages, kRingBytes / stage_bytes(c.tile)));
  if (threadIdx.x < kFetchers) {
    give_registers<kFetchRegisters>();
    fetch<Epilogue>(a, &token_map, &row_map, c, shared, ring);
  } else {
    take_registers<kMultiplyRegisters>();
    multiply<Epilogue>(a, given, c, shared, ring);
  }
#endif
}

// `tokens` is (T, D).
template <typename Epilogue>
cudaError_t launch(const Ffn& ffn, const void* tokens, const Arguments& a, const typename Epilogue::Given& given,
                   const Device& device, cudaStream_t stream) {
  CUtensorMap token_map, row_map;
  const auto* first = static_cast<const typename Epilogue::Element*>(tokens) + a.chunk.first * a.hidden;
  TWELL_RETURN_IF_ERROR(make_tensor_map(&token_map, ffn.dtype, first, a.chunk.tokens, a.hidden, kBlockTokens));
  TWELL_RETURN_IF_ERROR(make_tensor_map(&row_map, ffn.dtype, a.rows, a.width, a.hidden, kBoxRows));
  return launch_kernel(product_kernel<Epilogue>, device.sm_count, kThreads, 1, kShared, stream, token_map, row_map, a,
                       given);
}

}  // namespace twell::sm90::tiles
