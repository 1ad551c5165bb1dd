// Up of sm90/mid/half_gate_up.cu: products of the listed neurons, and their columns of h.
#pragma once

#include <type_traits>

#include "sm90/mid/half.cuh"

namespace twell::sm90::mid_half {

// The three warps that gather rows of Wu.
template <int kNeurons>
__device__ __forceinline__ void gather(const Arguments& a, Control& c, uint32_t shared, int first, int early,
                                       int all_steps) {
  constexpr int kShare = (kNeurons + kGatherRows - 1) / kGatherRows;
  const int thread = threadIdx.x - kMultipliers, row = thread / 8, eighths = a.hidden / 8;
  const int rows = c.count, steps = up_steps(rows, early, all_steps);
  const UpRing use = up_ring<kNeurons>(rows);
  Ring ring(c.up_full, c.up_empty, use.stages);
  const uint4 *const up = static_cast<const uint4*>(a.up), *const down = static_cast<const uint4*>(a.down);
  uint32_t offsets[kShare];  // of their rows, in 16 bytes
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const int n = row + kGatherRows * i;
    offsets[i] = n < rows ? static_cast<uint32_t>(first + c.list[n]) * eighths : 0;
  }
  for (int step = 0; step < steps; ++step, ring.advance()) {
    ring.wait_empty();
    const uint32_t to = shared + use.row_stage(ring.stage);
    gather_rows(to, up, down, offsets, thread, step, eighths, rows);
    barrier_arrive_on_copies(ring.full + ring.stage);
  }
}

template <typename T, int kRows>
__device__ __forceinline__ void multiply_rows(float* sum, Ring& ring, const UpRing& use, uint32_t shared, int steps) {
  const bool releases = threadIdx.x % 32 == 0;
  for (int step = 0; step < steps; ++step, ring.advance()) {
    ring.wait_full();
    fence_async_proxy();  // cp.async wrote, tensor cores read
    const uint32_t tokens = shared + ring.stage * kTokenBytes, rows = shared + use.row_stage(ring.stage);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      Wgmma<T, kRows, 0, 0>::multiply(sum, matrix_descriptor(tokens + k * 32, 16), matrix_descriptor(rows + k * 32, 16),
                                      step + k);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0 && releases) barrier_arrive(ring.empty + ring.previous());
  }
  wgmma_wait<0>();
}

// h = relu(gate) * (u + bias): the n-th listed neuron's column takes the n-th place, from where it goes to global
// memory. Places are ascending, so what is overwritten has been read.
template <typename T, int kNeurons>
__device__ __forceinline__ void store_products(const float (&sum)[kNeurons / 2], const Arguments& a, const Control& c,
                                               uint32_t turn, int half, int first) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = c.count;
  const T* const bias = static_cast<const T*>(a.b_up);
#pragma unroll
  for (int j = 0; j < kNeurons / 8; j += 2) {  // 16 neurons
    if (8 * j < rows) {
      const int row = 8 * j + lane / 16 * 8 + lane % 8, eighth = 2 * warp + (lane / 8 & 1);
      uint32_t gate[4];
      load_matrices_transposed(gate, turn_at(turn, c.list[min(row, rows - 1)], eighth));
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int index = 4 * (j + m / 2) + m % 2 * 2, n = 8 * (j + m / 2) + lane % 4 * 2;
        const float2 g = unpack<T>(gate[m]);
        float2 b{};
        if (bias != nullptr) {
          b.x = widen(bias[first + c.list[min(n, rows - 1)]]);
          b.y = widen(bias[first + c.list[min(n + 1, rows - 1)]]);
        }
        gate[m] = pack<T>(g.x * (sum[index] + b.x), g.y * (sum[index + 1] + b.y));
      }
      store_matrices_transposed(turn_at(turn, row, eighth), gate);
    }
  }
  store_columns<T, kNeurons>(a, c, turn, half, first, [](int n) { return n; });
}

template <typename T, int kNeurons>
__device__ __forceinline__ void multiply_up(const Arguments& a, Control& c, uint32_t shared, uint32_t turn, int half,
                                            int first, int early, int all_steps) {
  const int steps = up_steps(c.count, early, all_steps);
  const UpRing use = up_ring<kNeurons>(c.count);
  Ring ring(c.up_full, c.up_empty, use.stages);
  float sum[kNeurons / 2];
  const auto multiply = [&](auto count) {
    constexpr int kRows = decltype(count)::value < kNeurons ? decltype(count)::value : kNeurons;
    multiply_rows<T, kRows>(sum, ring, use, shared, steps);
  };
  switch (use.rows) {
    case 32: multiply(std::integral_constant<int, 32>{}); break;
    case 48: multiply(std::integral_constant<int, 48>{}); break;
    case 64: multiply(std::integral_constant<int, 64>{}); break;
    case 96: multiply(std::integral_constant<int, 96>{}); break;
    case 128: multiply(std::integral_constant<int, 128>{}); break;
    default: multiply(std::integral_constant<int, kNeurons>{});
  }
  if (threadIdx.x == 0) a.trace.mark(5);
  store_products<T, kNeurons>(sum, a, c, turn, half, first);
}

}  // namespace twell::sm90::mid_half
