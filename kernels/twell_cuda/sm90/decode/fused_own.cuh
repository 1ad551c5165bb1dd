// Up and down products of a fused decode kernel's thread block with few active neurons: each thread brings what it
// multiplies itself, so that warps wait for each other but once.
#pragma once

#include "sm90/decode/fused_list.cuh"
#include "sm90/decode/fused_sum.cuh"

namespace twell::decoding::fused {

constexpr int kOwnRows = 8;  // active neurons, at most: rows of one product's operand

// y += a row of Wd times h, for the thread's eight columns.
template <typename Half, typename Weight, int kTokens, typename Values>
__device__ __forceinline__ void add_row(float (&y)[kTokens][kThreadColumns], const char* row, const Values& h) {
  uint4 words;
  if constexpr (kScaled<Weight>) {
    const uint2 bytes = *reinterpret_cast<const uint2*>(row);
    expand<Half, Weight>(bytes.x, words.x, words.y);
    expand<Half, Weight>(bytes.y, words.z, words.w);
  } else {
    words = *reinterpret_cast<const uint4*>(row);
  }
  const float2 column[4] = {sm90::unpack<Half>(words.x), sm90::unpack<Half>(words.y), sm90::unpack<Half>(words.z),
                            sm90::unpack<Half>(words.w)};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) y[t][2 * i] += h(t) * column[i].x, y[t][2 * i + 1] += h(t) * column[i].y;
  }
}

#if defined(TWELL_SM90_DEVICE)

// Active neuron number lane / 4, in each warp alike.
struct OwnNeuron {
  int neuron;  // of the thread block
  int lane;    // that has its values
  bool any, upper;
};

template <int kTokens>
__device__ __forceinline__ OwnNeuron own_neuron(const Active<kTokens>& a, const Lane& l, int active) {
  uint32_t lows = a.lows, highs = a.highs;
#pragma unroll 1
  for (int i = 1; i < active; ++i) {  // the first that is left goes, for lanes that want a later one
    if (l.row < i) continue;
    if (lows == 0) highs &= highs - 1;
    lows &= lows - 1;  // 0 stays 0
  }
  const uint32_t word = lows != 0 ? lows : highs;
  OwnNeuron own{0, 0, word != 0, lows == 0};
  if (own.any) own.lane = __ffs(word) - 1, own.neuron = a.low_of(own.lane) + (own.upper ? 8 : 0);
  return own;
}

// relu(gate) of it and token lane % kTokens; 0 where there is no such neuron.
template <int kTokens>
__device__ __forceinline__ float gate_of(const Active<kTokens>& a, const Lane& l, const OwnNeuron& own) {
  const int token = l.lane % kTokens;
  float value = 0.f;
#pragma unroll
  for (int q = 0; q < kTokens / 2; ++q) {
    const float4& g = a.gate[q];
    const float low_first = __shfl_sync(0xffffffffu, g.x, own.lane);
    const float low_second = __shfl_sync(0xffffffffu, g.y, own.lane);
    const float high_first = __shfl_sync(0xffffffffu, g.z, own.lane);
    const float high_second = __shfl_sync(0xffffffffu, g.w, own.lane);
    const float first = own.upper ? high_first : low_first, second = own.upper ? high_second : low_second;
    if (token / 2 == q && own.any) value = token % 2 == 0 ? first : second;
  }
  return value;
}

// y += h Wd^T of up to kOwnRows active neurons. `rows`: shared memory that nobody uses.
template <typename Half, typename Weight, int kTokens>
__device__ __forceinline__ void multiply_own(float (&y)[kTokens][kThreadColumns], const FusedParams& p,
                                             const Control& c, char* rows, const Lane& l, const Neurons& own,
                                             const uint4 (&x)[kXPieces], const Active<kTokens>& a, uint64_t& silence) {
  constexpr int kPairs = kTokens / 2;
  using UpSums = float2[kDecodeWarps][kPairs][kOwnRows];
  auto& up_sums = *reinterpret_cast<UpSums*>(rows);
  const int active = a.count();
  const bool has_columns = threadIdx.x < p.hidden / kThreadColumns;
  constexpr int kBytes = kColumnBytes<Weight>;
  char* const mine = rows + sizeof(UpSums) + threadIdx.x * kBytes;  // of each row of Wd: no other thread's
  const OwnNeuron v = own_neuron(a, l, active);

  uint4 up[kSteps<Weight>];
  if (p.up != nullptr) {
    const char* const row = row_of(p.up, own.first + v.neuron, p) + l.offset;
#pragma unroll
    for (int i = 0; i < kSteps<Weight>; ++i) {
      load_weights(up[i], row + i * kStepBytes, l.row < active && l.offset + i * kStepBytes < p.row_bytes);
    }
  }
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) {
    if (i >= active) break;
    const int neuron = __shfl_sync(0xffffffffu, v.neuron, 4 * i);
    if (has_columns) {
      sm90::copy<kBytes>(sm90::smem_address(mine + i * kMaxRowBytes<Weight>),
                         row_of(p.down, own.first + neuron, p) + threadIdx.x * kBytes);
    }
  }
  const float gate = gate_of(a, l, v);  // once all is asked for
  p.trace.mark(kListed);
  float h = gate;
  if (p.up != nullptr) {
    const uint4 none{};
    float even[2][4] = {}, odd[2][4] = {}, sum[4] = {};  // all operands come at once, so these products wait for sums
#pragma unroll
    for (int i = 0; i < kSteps<Weight>; i += 2) {
      multiply_step<Half, Weight>(even, up[i], none, x, i);
      multiply_step<Half, Weight>(odd, up[i + 1], none, x, i + 1);
    }
    join(sum, even);
    join(sum, odd);
    p.trace.mark(kRowsThere);
    if (l.lane % 4 < kPairs) up_sums[l.warp][l.lane % 4][l.row] = make_float2(sum[0], sum[1]);
    __syncthreads();
    const int token = l.lane % kTokens;
    float u = 0.f;
#pragma unroll
    for (int s = 0; s < kDecodeWarps; ++s) {
      u += reinterpret_cast<const float*>(&up_sums[s][token / 2][l.row])[token % 2];
    }
    if constexpr (kScaled<Weight>) u *= c.s_up[v.neuron];
    h = gate == 0.f ? 0.f : gate * (u + c.b_up[v.neuron]);
    p.trace.mark(kUpSums);
  }
  if constexpr (kQuiet<kTokens>) silence = ask_early<kTokens>(p);
  asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) {
    if (i >= active) break;
    float of_row[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) of_row[t] = __shfl_sync(0xffffffffu, h, 4 * i + t);
    if (has_columns) add_row<Half, Weight>(y, mine + i * kMaxRowBytes<Weight>, [&](int t) { return of_row[t]; });
  }
}

#endif

}  // namespace twell::decoding::fused
