// Listed neurons' columns of Wd and h through a ring of stages, and their product: by wgmma, or by mma of up to 16
// tokens.
#pragma once

#include "sm90/common/wgmma.cuh"
#include "sm90/decode/few_down_list.cuh"

namespace twell::decoding::few::down {

#if defined(TWELL_SM90_DEVICE)

using sm90::Ring;

// Where a neuron's 16 bytes `piece` of columns lie in a stage, and of h for 16 tokens: ldmatrix meets no bank twice.
__device__ __forceinline__ uint32_t columns_at(int row, int piece) {
  return row * kStepBytes + ((piece ^ (row & 7)) << 4);
}
__device__ __forceinline__ uint32_t products_at(int row, int piece) {
  return row * 32 + ((piece ^ (row >> 2 & 1)) << 4);
}

// Listed neurons' columns and h, kDepth a stage; past the last, zeros. Little is left in the loop: a thread's rows lie
// alike in a stage, and each next stage's neurons are looked up ahead.
template <bool kSixteen>
__device__ __forceinline__ void fetch(const FewDownParams& p, const Control& c, Ring& ring, uint32_t stages, int slice,
                                      int listed) {
  constexpr int kApart = kFetchers / 8, kRows = kDepth / kApart;  // of a thread
  constexpr uint32_t kProductsApart = kApart * (kSixteen ? 32 : kStepBytes);
  static_assert(kApart % 8 == 0);  // so its rows are swizzled alike
  const int index = threadIdx.x - kMultipliers, piece = index % 8, row = index / 8;
  const int column = slice * kColumns + piece * 8;
  const bool has_columns = column < p.hidden, has_tokens = piece < p.groups;
  const char* const down = p.down + (has_columns ? 2 * column : 0);
  const char* const products = p.products + (has_tokens ? piece * 16 : 0);
  const uint32_t row_bytes = 2u * p.hidden, product_bytes = 16u * p.groups;
  const uint32_t products_to = stages + (kSixteen ? products_at(row, piece) : columns_at(row, piece));
  const uint32_t columns_to = stages + Form<kSixteen>::kProductBytes + columns_at(row, piece);
  uint32_t neurons[kRows];
  const auto look_up = [&](int start) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int at = start + row + i * kApart;
      neurons[i] = at < listed ? c.list[at] : 0;
    }
  };
  look_up(0);
#pragma unroll 1
  for (int start = 0; start < listed; start += kDepth, ring.advance()) {
    const uint32_t stage = ring.stage * Form<kSixteen>::kStageBytes;
    ring.wait_empty();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool valid = start + row + i * kApart < listed;
      if (has_tokens) {
        sm90::copy_16(products_to + stage + i * kProductsApart, products + uint64_t{neurons[i]} * product_bytes, valid);
      }
      sm90::copy_16(columns_to + stage + i * kApart * kStepBytes, down + uint64_t{neurons[i]} * row_bytes,
                    valid && has_columns);
    }
    sm90::barrier_arrive_on_copies(ring.full + ring.stage);
    look_up(start + kDepth);
  }
}

// sum += h (as tokens by neurons) times listed neurons' columns.
template <typename Half>
__device__ __forceinline__ void multiply(float (&sum)[kColumns / 2], Ring& ring, uint32_t stages, int listed) {
  const bool releases = threadIdx.x % 32 == 0;
  int held = -1;  // the stage that the products before these read
#pragma unroll 1
  for (int start = 0; start < listed; start += kDepth, ring.advance()) {
    ring.wait_full();
    sm90::fence_async_proxy();  // cp.async wrote, tensor cores read
    const uint32_t stage = stages + ring.stage * Form<false>::kStageBytes;
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      const uint32_t h = stage + k * 2048;
      sm90::Wgmma<Half, kColumns, 1, 1>::multiply(sum, sm90::matrix_descriptor(h, kPartBytes),
                                                  sm90::matrix_descriptor(h + kPartBytes, kPartBytes), 1);
    }
    sm90::wgmma_commit();
    sm90::wgmma_wait<1>();
    if (held >= 0 && releases) sm90::barrier_arrive(ring.empty + held);
    held = ring.stage;
  }
  sm90::wgmma_wait<0>();
  if (held >= 0 && releases) sm90::barrier_arrive(ring.empty + held);
}

// The same of 16 tokens: each warp takes 16 columns.
template <typename Half>
__device__ __forceinline__ void multiply(float (&sum)[8], Ring& ring, uint32_t stages, int listed) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int start = 0; start < listed; start += kDepth, ring.advance()) {
    ring.wait_full();
    const uint32_t h = stages + ring.stage * Form<true>::kStageBytes, columns = h + Form<true>::kProductBytes;
    uint32_t a[kDepth / 16][4], b[kDepth / 16][4];
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      sm90::load_matrices_transposed(a[k], h + products_at(16 * k + lane / 16 * 8 + lane % 8, lane / 8 % 2));
      sm90::load_matrices_transposed(
          b[k], columns + columns_at(16 * k + lane / 8 % 2 * 8 + lane % 8, 2 * warp + lane / 16));
    }
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        mma<Half>(reinterpret_cast<float(&)[4]>(sum[4 * j]), a[k][0], a[k][1], a[k][2], a[k][3], b[k][2 * j],
                  b[k][2 * j + 1]);
      }
    }
    if (lane == 0) sm90::barrier_arrive(ring.empty + ring.stage);
  }
}

#endif

}  // namespace twell::decoding::few::down
