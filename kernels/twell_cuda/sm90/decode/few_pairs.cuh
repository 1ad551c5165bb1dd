// Up of few pairs of a neuron and a token that activates it, for which sm90/decode/few_gate_up.cuh would read all of x
// again.
#pragma once

#include "sm90/decode/few_tile.cuh"

namespace twell::decoding::few {

// Pieces of eight numbers, of both rows of a pair, that a lane has on their way: in registers, or in shared memory.
constexpr int kHeld = 4, kStaged = 8;
constexpr int kPairBytes = 2 * kStaged * 32 * 16;  // for each warp

#if defined(TWELL_SM90_DEVICE)

// Whether there are few enough. Two rows a pair are then often more bytes than the active neurons' rows and x again, but
// they come in one round or few, where a product over those waits for lists, stages and sums that meet.
template <int kNeurons>
__device__ __forceinline__ bool takes_pairs(const FewParams& p, const Control<kNeurons>& c) {
  return p.up != nullptr && c.pair_count <= kMaxPairs;
}

// Eight weights of a row: 16 bytes, or 8 of 8-bit ones.
template <typename Weight>
using Eight = std::conditional_t<kScaled<Weight>, uint2, uint4>;

template <typename Half, typename Weight>
__device__ __forceinline__ uint4 as_halves(const Eight<Weight>& weights) {
  if constexpr (kScaled<Weight>) {
    uint4 v;
    expand<Half, Weight>(weights.x, v.x, v.y);
    expand<Half, Weight>(weights.y, v.z, v.w);
    return v;
  } else {
    return weights;
  }
}

template <typename Row>
__device__ __forceinline__ Row load_shared(uint32_t shared) {
  if constexpr (sizeof(Row) == 16) {
    return sm90::load_shared_16(shared);
  } else {
    return load_shared_8(shared);
  }
}

// The sum of the products of eight numbers each.
template <typename Half>
__device__ __forceinline__ float multiply_add(const uint4& a, const uint4& b, float sum) {
  const uint32_t x[4] = {a.x, a.y, a.z, a.w}, w[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = sm90::unpack<Half>(x[i]), u = sm90::unpack<Half>(w[i]);
    sum = fmaf(v.x, u.x, sum);
    sum = fmaf(v.y, u.y, sum);
  }
  return sum;
}

// A lane's part of the product of two rows of up to kHeld * 32 pieces, all of them on their way at once in registers.
template <typename Half, typename Weight>
__device__ __forceinline__ float multiply_held(const uint4* x, const Eight<Weight>* row, int pieces) {
  using Row = Eight<Weight>;
  const int lane = threadIdx.x % 32;
  uint4 a[kHeld];
  Row b[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const bool inside = lane + k * 32 < pieces;
    a[k] = inside ? __ldcg(x + lane + k * 32) : uint4{};
    b[k] = inside ? __ldg(row + lane + k * 32) : Row{};
  }
  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) sum = multiply_add<Half>(a[k], as_halves<Half, Weight>(b[k]), sum);
  return sum;
}

// The same of longer rows, through shared memory, which has place for more than registers: at `place` the lane's first
// piece. It reads but what it has copied itself.
template <typename Half, typename Weight>
__device__ __forceinline__ float multiply_staged(const uint4* x, const Eight<Weight>* row, int pieces, uint32_t place) {
  using Row = Eight<Weight>;
  constexpr uint32_t kApart = 32 * 16;
  float sum = 0.f;
#pragma unroll 1
  for (int at = threadIdx.x % 32; at < pieces; at += kStaged * 32) {
#pragma unroll
    for (int k = 0; k < kStaged; ++k) {
      const bool inside = at + k * 32 < pieces;
      if constexpr (sizeof(Row) == 16) {
        sm90::copy_16(place + 2 * k * kApart, row + (inside ? at + k * 32 : 0), inside);
      } else {  // those outside are the row's first ones again and meet zeros: no NaN that the sum has not without them
        sm90::copy<8>(place + 2 * k * kApart, row + (inside ? at + k * 32 : 0));
      }
      sm90::copy_16(place + (2 * k + 1) * kApart, x + (inside ? at + k * 32 : 0), inside);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
    for (int k = 0; k < kStaged; ++k) {
      sum = multiply_add<Half>(sm90::load_shared_16(place + (2 * k + 1) * kApart),
                               as_halves<Half, Weight>(load_shared<Row>(place + 2 * k * kApart)), sum);
    }
  }
  return sum;
}

// relu(gate) becomes h, a pair for each warp. Long rows come where the rings were: a block that takes pairs has read
// all that it asked for there, and asks for nothing more.
template <typename Half, typename Weight, int kNeurons>
__device__ __forceinline__ void multiply_pairs(const FewParams& p, const ControlOf<Weight, kNeurons>& c, float* gate,
                                               int first, uint32_t shared) {
  using Row = Eight<Weight>;
  constexpr int kBytes = sizeof(Weight);
  const int lane = threadIdx.x % 32, pieces = static_cast<int>(p.row_bytes / (8 * kBytes));
  const uint32_t place = shared + threadIdx.x / 32 * kPairBytes + lane * 16;
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < c.pair_count; i += kWarps) {
    const int token = c.pairs[i] / 64, n = c.pairs[i] % 64;
    const char* const x_row = p.x + static_cast<int64_t>(token) * (p.row_bytes * kRatio<Half, Weight>);
    const uint4* const x = reinterpret_cast<const uint4*>(x_row);
    const Row* const row = reinterpret_cast<const Row*>(p.up + static_cast<int64_t>(first + n) * p.row_bytes);
    float sum = pieces <= kHeld * 32 ? multiply_held<Half, Weight>(x, row, pieces)
                                     : multiply_staged<Half, Weight>(x, row, pieces, place);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if constexpr (kScaled<Weight>) sum *= c.up_scale[n];
    if (lane == 0) gate[token * kGateRow<kNeurons> + n] *= sum + c.up_bias[n];
  }
}

// Active neurons' h from shared memory: a thread takes 8 tokens of a neuron.
template <typename Half, int kNeurons>
__device__ __forceinline__ void store_pairs(const FewParams& p, const Active<kNeurons>& active, const float* gate,
                                            int first) {
  const int n = threadIdx.x / 8, chunk = threadIdx.x % 8;
  if (n >= kNeurons || chunk >= p.groups || !active.has(n)) return;
  const float* const from = gate + 8 * chunk * kGateRow<kNeurons> + n;
  uint32_t h[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    h[i] = sm90::pack<Half>(from[2 * i * kGateRow<kNeurons>], from[(2 * i + 1) * kGateRow<kNeurons>]);
  }
  *reinterpret_cast<uint4*>(reinterpret_cast<char*>(p.products) +
                            (static_cast<int64_t>(first + n) * p.groups + chunk) * 16) = {h[0], h[1], h[2], h[3]};
}

#endif

}  // namespace twell::decoding::few
