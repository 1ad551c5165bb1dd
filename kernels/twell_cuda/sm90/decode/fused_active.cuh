// The second part of the fused decode kernel: which of a thread block's neurons are active, and their products with
// rows of Wu and Wd: each thread by itself where these neurons are few, else in stages.
#pragma once

#include "sm90/decode/fused.cuh"
#include "sm90/decode/fused_sum.cuh"

namespace twell::decoding::fused {

template <int kTokens>
struct Sums {
  static constexpr int kPairs = kTokens / 2;
  // Whether they lie where rows of the gate were, not in front of them: they take more than there is.
  static constexpr bool kOverGate = kTokens > 2;
  struct alignas(kPairs == 1 ? 8 : 16) Values {
    float2 pair[kPairs];
  };
  // What each warp leaves, of a pair of tokens: (tile, 8 rows) of four: row, both tokens; row + 8, the same. Each pair
  // has an order of rows of its own, so that neither who writes nor who reads meets a bank twice.
  float4 slots[kDecodeWarps][kPairs][kTiles * 8];
  Values values[kFusedMaxRows];  // relu(gate), then h; by multiply_staged()

  __device__ static __forceinline__ int place(int row, int pair) { return kPairs == 1 ? row : row ^ 2 * pair; }
};
static_assert(sizeof(Sums<2>) == kFusedSumsBytes && Sums<4>::kOverGate);

#if defined(TWELL_SM90_DEVICE)

// Where nobody reads or writes any more.
template <int kTokens>
__device__ __forceinline__ void leave_sums(Sums<kTokens>& sums, const float (&sum)[kTiles][4], int tiles,
                                           const Lane& l) {
  const int pair = l.lane % 4;  // of tokens: only the first ones are real
  if (pair < Sums<kTokens>::kPairs) {
    float4* const mine = sums.slots[l.warp][pair] + sums.place(l.row, pair);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (i < tiles) mine[i * 8] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    }
  }
  __syncthreads();
}

// What each warp finds for itself. Lane 8 m + r has row r of tile m, and the neuron eight after it.
template <int kTokens>
struct Active {
  float4 gate[kTokens / 2];  // relu of a pair of tokens: the lane's lower neuron, both; the upper one, both
  uint32_t lows, highs;      // lanes whose lower, whose upper neuron is active for any token
  uint32_t loud;             // tokens with an active neuron, a bit each

  __device__ __forceinline__ int count() const { return __popc(lows) + __popc(highs); }
  __device__ static __forceinline__ int low_of(int lane) { return lane / 8 * 16 + neuron_of_row(lane % 8); }
};

template <typename Weight, int kTokens>
__device__ __forceinline__ Active<kTokens> find_active(const FusedParams& p, const Control& c,
                                                       const Sums<kTokens>& sums, int count) {
  constexpr int kPairs = Sums<kTokens>::kPairs;
  const int lane = threadIdx.x % 32, low = Active<kTokens>::low_of(lane), high = low + 8;
  Active<kTokens> a{};
  if (lane / 8 < kTiles && low < count) {
#pragma unroll
    for (int q = 0; q < kPairs; ++q) {
      const int at = sums.place(lane, q);
      float4 v = sums.slots[0][q][at];
#pragma unroll
      for (int s = 1; s < kDecodeWarps; ++s) {
        const float4 other = sums.slots[s][q][at];
        v.x += other.x, v.y += other.y, v.z += other.z, v.w += other.w;
      }
      if constexpr (kScaled<Weight>) {
        const float of_low = c.s_gate[low], of_high = c.s_gate[min(high, count - 1)];
        v.x *= of_low, v.y *= of_low, v.z *= of_high, v.w *= of_high;
      }
      const bool first = q == 0 || 2 * q < p.tokens, second = 2 * q + 1 < p.tokens;
      v.x = activate(v.x, c.b_gate[low], first);
      v.y = activate(v.y, c.b_gate[low], second);
      v.z = activate(v.z, c.b_gate[min(high, count - 1)], high < count && first);
      v.w = activate(v.w, c.b_gate[min(high, count - 1)], high < count && second);
      a.gate[q] = v;
    }
  }
  bool low_active = false, high_active = false;
#pragma unroll
  for (int q = 0; q < kPairs; ++q) {
    const float4& v = a.gate[q];
    low_active |= v.x != 0.f || v.y != 0.f, high_active |= v.z != 0.f || v.w != 0.f;
    a.loud |= (v.x != 0.f || v.z != 0.f) << 2 * q | (v.y != 0.f || v.w != 0.f) << (2 * q + 1);
  }
  a.lows = __ballot_sync(0xffffffffu, low_active), a.highs = __ballot_sync(0xffffffffu, high_active);
  a.loud = kQuiet<kTokens> ? __reduce_or_sync(0xffffffffu, a.loud) : ~0u;
  return a;
}

#endif

// Up and down products of few active neurons: each thread brings what it
// multiplies itself, so that warps wait for each other but once.

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

// Up and down products of many active neurons: rows come by bulk copies,
// through a ring of stages that warp 0 keeps full.

// For one warp: relu(gate) of all tokens and the list of active neurons, for all warps.
template <int kTokens>
__device__ __forceinline__ void list_active(Control& c, Sums<kTokens>& sums, const Active<kTokens>& a, int count) {
  const int lane = threadIdx.x % 32, low = a.low_of(lane), high = low + 8;
#pragma unroll
  for (int q = 0; q < kTokens / 2; ++q) {
    if (low < count) sums.values[low].pair[q] = make_float2(a.gate[q].x, a.gate[q].y);
    if (high < count) sums.values[high].pair[q] = make_float2(a.gate[q].z, a.gate[q].w);
  }
  const uint32_t before = (1u << lane) - 1;
  if (a.lows >> lane & 1) c.list[__popc(a.lows & before)] = static_cast<uint16_t>(low);
  if (a.highs >> lane & 1) c.list[__popc(a.lows) + __popc(a.highs & before)] = static_cast<uint16_t>(high);
  __syncwarp();
}

// y += h Wd^T. Nobody reads `sums` or `rows` any more, but this warp's `a` is its own.
template <typename Half, typename Weight, int kTokens>
__device__ __forceinline__ void multiply_staged(float (&y)[kTokens][kThreadColumns], const FusedParams& p, Control& c,
                                                Sums<kTokens>& sums, char* rows, const Lane& l, const Neurons& own,
                                                const uint4 (&x)[kXPieces], const Active<kTokens>& a,
                                                uint64_t& silence) {
  const int thread = threadIdx.x;
  const ActiveRows active(a.count(), p.up != nullptr, p.row_places);
  sm90::Ring ring(c.full, c.empty, min(kMaxStages, p.row_places / active.per)), ring_out = ring;
  int supplied = 0;
  const auto supply_row = [&] {
    const int stage = supplied++, stage_rows = active.rows(stage);
    const int neuron = l.lane < stage_rows ? c.list[active.first_row(stage) + l.lane] : 0;
    ring_out.wait_empty();
    ask_for(ring_out.full + ring_out.stage, rows + ring_out.stage * active.per * p.row_stride,
            row_of(stage < active.up_stages ? p.up : p.down, own.first + neuron, p), stage_rows, p);
    ring_out.advance();
  };
  if (l.warp == 0) {
    list_active(c, sums, a, own.count);
    while (supplied < min(active.stages, ring.stages)) supply_row();
  }
  __syncthreads();

  if (active.tiles > 0) {
    float sum[kTiles][4] = {};
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      if (m >= active.tiles) break;
      multiply_stages<Half, Weight>(sum[m], x, l, ring, rows, active, m, p);
      for (int i = 0; i < 2; ++i) {
        if (l.warp == 0 && supplied < active.stages) supply_row();
      }
    }
    leave_sums(sums, sum, active.tiles, l);
    const auto multiply_value = [&](int i) {
      if (i >= active.active * kTokens) return;
      const int row = i / kTokens, token = i % kTokens, neuron = c.list[row];
      float* const value = reinterpret_cast<float*>(sums.values + neuron) + token;
      if (*value == 0.f) return;
      const int tile = row / (2 * active.per), in_tile = row % (2 * active.per);
      const int high = in_tile >= active.per, element = tile * 8 + sums.place(in_tile - high * active.per, token / 2);
      float u = 0.f;
#pragma unroll
      for (int s = 0; s < kDecodeWarps; ++s) {
        u += reinterpret_cast<const float*>(sums.slots[s][token / 2] + element)[2 * high + token % 2];
      }
      if constexpr (kScaled<Weight>) u *= c.s_up[neuron];
      *value *= u + c.b_up[neuron];
    };
#pragma unroll
    for (int first = 0; first < kFusedMaxRows * kTokens; first += kThreads) multiply_value(first + thread);
    __syncthreads();
  }

  if constexpr (kQuiet<kTokens>) silence = ask_early<kTokens>(p);
  for (int begin = 0; begin < active.active; begin += active.per) {
    ring.wait_full();
    const char* at = rows + ring.stage * active.per * p.row_stride + thread * kColumnBytes<Weight>;
    const auto multiply_row = [&](int r) {
      const auto h = sums.values[c.list[r]];
      add_row<Half, Weight>(y, at, [&](int t) { return t % 2 == 0 ? h.pair[t / 2].x : h.pair[t / 2].y; });
      at += p.row_stride;
    };
    const int end = thread < p.hidden / kThreadColumns ? min(active.active, begin + active.per) : begin;
    int r = begin;
    if constexpr (kTokens > 2) {
      constexpr int kTogether = 16 / kTokens;  // so that loads run ahead of products
      for (; r + kTogether <= end; r += kTogether) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) multiply_row(r + i);
      }
    }
#pragma unroll 1
    for (; r < end; ++r) multiply_row(r);
    release(ring.empty + ring.stage, l.lane);
    ring.advance();
    if (l.warp == 0 && supplied < active.stages) supply_row();
  }
}

#endif

}  // namespace twell::decoding::fused
