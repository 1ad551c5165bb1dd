// A warp's list of active neurons, and the product over them. Workspace layout:
// decode/plan.h.
//
// A tensor-core operand wants two neurons of one column in a register, rows hold two columns of one neuron: a lane
// loads the same columns of its quad's four rows and swaps halves. Which column stands in which row of the product is
// free, so the lane keeps neighbouring columns throughout and no data moves between lanes.
#pragma once

#include "common/mma.cuh"
#include "common/quantized.cuh"
#include "decode/plan.h"

namespace twell::decoding {

struct DownParams {
  const char* down;
  const void* b_down;
  const uint32_t* masks;  // of two blocks each
  const char* products;
  float4* partials;
  uint32_t* arrivals;
  void* y;
  int tokens, hidden, mask_pairs;
  const float* s_down;  // of 8-bit weights, one a column
};

inline DownParams down_params(const Ffn& ffn, const DecodePlan& plan, void* workspace) {
  char* const base = static_cast<char*>(workspace);
  DownParams params{};
  params.down = static_cast<const char*>(ffn.down.data);
  params.b_down = ffn.b_down;
  params.s_down = ffn.down.scales;
  params.masks = reinterpret_cast<const uint32_t*>(base + plan.masks);
  params.products = base + plan.products;
  params.partials = reinterpret_cast<float4*>(base + plan.partials);
  params.arrivals = reinterpret_cast<uint32_t*>(base + plan.arrivals);
  params.y = ffn.y;
  params.tokens = static_cast<int>(ffn.tokens);
  params.hidden = ffn.hidden;
  params.mask_pairs = (plan.blocks + 1) / 2;
  return params;
}

constexpr int kMaxQuads = 32 * 2 * kQuadsPerBlock;  // of the 32 mask pairs that a warp lists at a time

// A quad in 32 bits: its block (12), its number in the block (2), neurons in it less one (2), their places in the block
// (4 x 4, the first lowest).
__device__ __forceinline__ int list_quads(uint32_t* list, int at, uint32_t mask, uint32_t block) {
  for (uint32_t quad = 0; mask != 0; ++quad) {
    uint32_t places = 0, count = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (mask == 0) break;
      places |= static_cast<uint32_t>(__ffs(static_cast<int>(mask)) - 1) << (4 * j);
      mask &= mask - 1;
      ++count;
    }
    list[at++] = block << 20 | quad << 18 | (count - 1) << 16 | places;
  }
  return at;
}

template <typename Weight, int kColumns, int kGroups>
struct Piece {  // what a lane multiplies in one step: four rows' columns, and h
  uint32_t row[4][kColumns * sizeof(Weight) / 4];
  uint2 h[kGroups];
};

// Operands of columns 2i and 2i + 1 of a piece's rows: (rows 0 and 1 of the first, of the second, rows 2 and 3 alike).
template <typename Half, typename Weight, typename Rows>
__device__ __forceinline__ void operands(uint32_t (&a)[4], const Rows& row, int i) {
  if constexpr (kScaled<Weight>) {
    const uint32_t bytes = i % 2 == 0 ? 0x5140 : 0x7362;  // of two rows in turn: columns 0 and 1, or 2 and 3
    expand<Half, Weight>(__byte_perm(row[0][i / 2], row[1][i / 2], bytes), a[0], a[1]);
    expand<Half, Weight>(__byte_perm(row[2][i / 2], row[3][i / 2], bytes), a[2], a[3]);
  } else {
    a[0] = __byte_perm(row[0][i], row[1][i], 0x5410);
    a[1] = __byte_perm(row[0][i], row[1][i], 0x7632);
    a[2] = __byte_perm(row[2][i], row[3][i], 0x5410);
    a[3] = __byte_perm(row[2][i], row[3][i], 0x7632);
  }
}

// sum[columns / 2 * kGroups + group] += rows h over the neurons of mask pairs `first`, `first` + `stride`, ...; the
// lane's columns start at `column`. `list` is the warp's own, kMaxQuads long.
template <typename Half, typename Weight, int kColumns, int kGroups, int kDepth>
__device__ __forceinline__ void multiply_quads(float (&sum)[kColumns / 2 * kGroups][4], const DownParams& p,
                                               uint32_t* list, int first, int stride, int column) {
  using Step = Piece<Weight, kColumns, kGroups>;
  const int lane = threadIdx.x % 32;
  const bool inside = column < p.hidden;
  constexpr int kBytes = sizeof(Weight);
  const int64_t row_bytes = int64_t{kBytes} * p.hidden;
  const char* const rows = p.down + kBytes * column;
  for (int base = first; base < p.mask_pairs; base += 32 * stride) {
    const int pair = base + lane * stride;
    const uint32_t mask = pair < p.mask_pairs ? __ldcg(p.masks + pair) : 0;
    const int quads = (__popc(mask & 0xffffu) + 3) / 4 + (__popc(mask >> 16) + 3) / 4;
    int end = quads;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, end, d);
      if (lane >= d) end += before;
    }
    const int total = __shfl_sync(0xffffffffu, end, 31);
    int at = list_quads(list, end - quads, mask & 0xffffu, 2 * pair);
    list_quads(list, at, mask >> 16, 2 * pair + 1);
    __syncwarp();

    const auto load = [&](Step& to, int index) {
      const bool valid = index < total;
      const uint32_t quad = valid ? list[index] : 0;
      const uint32_t block = quad >> 20;
      const char* h = p.products + ((quad >> 18) * (8 * kGroups) + lane / 4) * 8;  // 4 * block + number
#pragma unroll
      for (int n = 0; n < kGroups; ++n) load_products(to.h[n], h + n * 64, valid);
      const char* block_rows = rows + static_cast<int64_t>(block) * kBlockNeurons * row_bytes;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t place = quad >> (4 * j) & 15;
        load_columns(to.row[j], block_rows + place * static_cast<uint32_t>(row_bytes),
                     valid && inside && j <= static_cast<int>(quad >> 16 & 3));
      }
    };

    Step steps[kDepth];
    const int mine = lane % 4;
#pragma unroll
    for (int u = 0; u < kDepth; ++u) load(steps[u], 4 * u + mine);
    for (int start = 0; start < total; start += 4 * kDepth) {
#pragma unroll
      for (int u = 0; u < kDepth; ++u) {
        if (start + 4 * u >= total) break;
        Step& s = steps[u];
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) {
          uint32_t a[4];
          operands<Half, Weight>(a, s.row, i);
#pragma unroll
          for (int n = 0; n < kGroups; ++n) mma<Half>(sum[i * kGroups + n], a[0], a[1], a[2], a[3], s.h[n].x, s.h[n].y);
        }
        load(s, start + 4 * (u + kDepth) + mine);
      }
    }
    __syncwarp();  // the list is free again
  }
}

// What is summed for columns d and d + 1, times their scales.
__device__ __forceinline__ void scale_outputs(float4& v, const DownParams& p, int d) {
  if (d >= p.hidden) return;
  const float low = p.s_down[d], high = p.s_down[d + 1];
  v.x *= low, v.y *= low, v.z *= high, v.w *= high;
}

// Columns d and d + 1 of y for tokens `token` and `token` + 1.
template <typename Half>
__device__ __forceinline__ void write_outputs(const float4& v, const DownParams& p, int d, int token) {
  if (d >= p.hidden) return;
  float low_bias = 0.f, high_bias = 0.f;
  if (p.b_down != nullptr) {
    low_bias = to_float(static_cast<const Half*>(p.b_down)[d]);
    high_bias = to_float(static_cast<const Half*>(p.b_down)[d + 1]);
  }
  uint32_t* const y = static_cast<uint32_t*>(p.y) + (static_cast<int64_t>(token) * p.hidden + d) / 2;
  if (token < p.tokens) y[0] = pack<Half>(v.x + low_bias, v.z + high_bias);
  if (token + 1 < p.tokens) y[p.hidden / 2] = pack<Half>(v.y + low_bias, v.w + high_bias);
}

}  // namespace twell::decoding
