// Up projection over active neurons: h = relu(gate) * (x Wu^T + bu), for each block of 128 tokens and the neurons that
// any of them activates; the others' columns of h would be zero. h takes the place of relu(gate).
//
// A persistent thread block of three warpgroups an SM. The first fetches: x by bulk tensor copies, gathered rows of Wu
// by cp.async (by bulk copies where they are neighbours), and at the end of a tile its columns of relu(gate), through
// the same ring of stages. The other two multiply half of the tokens each, by those of the tile's neurons that it
// activates.
//
// T is the type of relu(gate), h and bu. x and Wu are of type E: T, or e4m3 with a scale for each of their rows.
#pragma once

#include "sm90/common/launch.h"
#include "sm90/prefill/up_product.cuh"

namespace twell::sm90::up {

// kMany: h is stored by lines of 128 bytes, and stages of relu(gate) are given back one by one.
template <typename T, typename E, bool kMany, bool kBias>
__device__ __forceinline__ void multiply(const ArgumentsOf<E>& a, ControlOf<E>& c, uint8_t* shared, Ring ring) {
  constexpr int kAtOnce = kMany ? 1 : 2;  // stages of relu(gate) that are worked on before any is released
  const int steps = steps_of<E>(a.hidden), lane = threadIdx.x % 32, blocks = a.active.blocks;
  const int warp = (threadIdx.x - kFetchers) / 32, warpgroup = warp / 4, bytes = stage_bytes(c.tile);
  const uint32_t stages = smem_address(shared);
  int block = 0, tiles = 0;
  for (int index = blockIdx.x; index < c.first_tile[blocks]; index += gridDim.x, ++tiles) {
    const Item item = item_at(index, block, blocks, c);
    block = item.block;
    // Neurons [begin, end) of the tile are active in this half; multiplied are `wide` times 64 from `low` on. What that
    // takes past the tile is not kept.
    const Counts counts = c.counts[block];
    const int begin = warpgroup == 0 ? 0 : max(counts.first_only - item.first, 0);
    const int end = min(item.count, warpgroup == 0 ? counts.first_only + counts.both - item.first : item.count);
    const int low = begin / 16 * 16, wide = max(end - low + 63, 0) / 64;
    float sum[kMaxNeurons / 2];
    const int skipped = low * kRowBytes;
    switch (wide) {
      case 0: multiply_tile<E, 0>(sum, ring, stages, bytes, skipped, steps, warpgroup); break;
      case 1: multiply_tile<E, 64>(sum, ring, stages, bytes, skipped, steps, warpgroup); break;
      case 2: multiply_tile<E, 128>(sum, ring, stages, bytes, skipped, steps, warpgroup); break;
      case 3: multiply_tile<E, 192>(sum, ring, stages, bytes, skipped, steps, warpgroup); break;
      default: multiply_tile<E, 256>(sum, ring, stages, bytes, skipped, steps, warpgroup); break;
    }
    // relu(gate) fills one stage or two; h takes its place there, then in global memory.
    barrier_wait(c.listed + tiles % kLists, tiles / kLists & 1);
    const uint16_t* neurons = c.neurons[tiles % kLists];
    T* columns = static_cast<T*>(a.active.columns) + static_cast<int64_t>(block) * a.width * kBlockTokens;
#pragma unroll
    for (int first = 0; first < kMaxNeurons; first += kAtOnce * kTurnNeurons) {
      if (first >= item.width) break;
      uint32_t turns[kAtOnce]{};
      Ring filled = ring;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i * kTurnNeurons >= item.width) break;
        filled.wait_full();
        turns[i] = stages + filled.stage * bytes;
        filled.advance();
      }
      [[maybe_unused]] int pair = 0;           // of eight neurons the first of the lane's two
      [[maybe_unused]] float token_scales[2];  // of its tokens; they have come with relu(gate)
      if constexpr (kScaled<E>) {
        pair = lane % 4 * 2;
        asm volatile("" : "+r"(pair));  // else addresses of both stages' neurons are kept at once, and spill
        token_scales[0] = c.token_scales[warp * 16 + lane / 4];
        token_scales[1] = c.token_scales[warp * 16 + lane / 4 + 8];
      }
      const auto turn_at = [&](int n, int eighth) {
        return (n < first + kTurnNeurons ? turns[0] : turns[kAtOnce - 1]) + n % kTurnNeurons * 256 +
               ((eighth ^ (n & 7)) << 4);
      };
      const int limit = min(end, first + kAtOnce * kTurnNeurons);
#pragma unroll
      for (int j = 0; j < kMaxNeurons / 8; j += 2) {  // 16 neurons
        if (low + 8 * j >= first && low + 8 * j < limit) {
          const uint32_t at = turn_at(low + 8 * j + lane / 16 * 8 + lane % 8, 2 * warp + (lane / 8 & 1));
          uint32_t gate[4];
          load_matrices_transposed(gate, at);
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const int i = 4 * (j + m / 2) + m % 2 * 2;
            const int column = low + 8 * (j + m / 2) + (kScaled<E> ? pair : lane % 4 * 2);
            const float2 g = unpack<T>(gate[m]);
            float2 u{sum[i], sum[i + 1]}, bias{};
            if constexpr (kScaled<E>) {
              const float2 of_neurons = *reinterpret_cast<const float2*>(c.neuron_scales + column);
              u.x = u.x * of_neurons.x * token_scales[m % 2];
              u.y = u.y * of_neurons.y * token_scales[m % 2];
            }
            if constexpr (kBias) {
              bias.x = widen(static_cast<const T*>(a.bias)[neurons[min(column, item.count - 1)]]);
              bias.y = widen(static_cast<const T*>(a.bias)[neurons[min(column + 1, item.count - 1)]]);
            }
            gate[m] = pack<T>(g.x * (u.x + bias.x), g.y * (u.y + bias.y));
          }
          store_matrices_transposed(at, gate);
        }
      }
      if constexpr (kMany) {
        wait_for_half(warpgroup);
        const int start = max(begin, first) + warp % 4 * 4 + lane / 8, eighth = warpgroup * 8 + lane % 8;
#pragma unroll
        for (int i = 0; i < kAtOnce * kTurnNeurons / 16; ++i) {
          const int n = start + 16 * i;
          if (n < limit) {
            *reinterpret_cast<uint4*>(columns + static_cast<int64_t>(neurons[n]) * kBlockTokens + eighth * 8) =
                load_shared_16(turn_at(n, eighth));
          }
        }
      } else {
        __syncwarp();
        const int start = max(begin, first) + lane / 2, eighth = warp * 2 + (lane & 1);
#pragma unroll
        for (int i = 0; i < kAtOnce * kTurnNeurons / 16; ++i) {
          const int n = start + 16 * i;
          if (n < limit) {
            *reinterpret_cast<uint4*>(columns + static_cast<int64_t>(neurons[n]) * kBlockTokens + eighth * 8) =
                load_shared_16(turn_at(n, eighth));
          }
        }
      }
      fence_async_proxy();  // ordinary stores here, bulk copies next
      __syncwarp();
      for (; ring.stage != filled.stage; ring.advance()) release(ring, ring.stage);
    }
  }
}

template <typename T, typename E, bool kMany, bool kBias>
__global__ void __launch_bounds__(kThreads, 1)
    up_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap up_map,
              const ArgumentsOf<E> a) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  auto& c = *reinterpret_cast<ControlOf<E>*>(shared + kRingBytes);
  if (threadIdx.x == 0) {
    prefetch_map(&x_map);
    prefetch_map(&up_map);
    for (int s = 0; s < kMaxStages; ++s) {
      barrier_init(c.full + s, kFetchers + 1);
      barrier_init(c.empty + s, kConsumerWarps);
    }
    for (int i = 0; i < kLists; ++i) barrier_init(c.listed + i, 1);
    fence_barrier_init();
  }
  launch_dependents();
  wait_for_previous();
  for (int b = threadIdx.x; b < a.active.blocks; b += kThreads) c.counts[b] = a.active.counts[b];
  __syncthreads();
  make_plan(c, a.active.blocks, a.turned);
  const Ring ring(c.full, c.empty, stages_of<E>(c, a.hidden));
  if (threadIdx.x < kFetchers) {
    give_registers<kFetchRegisters>();
    fetch<T, kMany, E>(a, &x_map, &up_map, c, shared, ring);
  } else {
    take_registers<kMultiplyRegisters>();
    multiply<T, E, kMany, kBias>(a, c, shared, ring);
  }
#endif
}

template <typename T, typename E, bool kMany, bool kBias>
cudaError_t launch(const CUtensorMap& x_map, const CUtensorMap& up_map, const ArgumentsOf<E>& arguments,
                   const Device& device, cudaStream_t stream) {
  return launch_kernel(up_kernel<T, E, kMany, kBias>, device.sm_count, kThreads, 1, kShared<E>, stream, x_map, up_map,
                       arguments);
}

template <typename T, typename E>
cudaError_t launch_type(const CUtensorMap& x_map, const CUtensorMap& up_map, const ArgumentsOf<E>& arguments,
                        const Device& device, cudaStream_t stream, bool many) {
  const auto run = arguments.bias != nullptr ? (many ? launch<T, E, true, true> : launch<T, E, false, true>)
                                             : (many ? launch<T, E, true, false> : launch<T, E, false, false>);
  return run(x_map, up_map, arguments, device, stream);
}

}  // namespace twell::sm90::up
