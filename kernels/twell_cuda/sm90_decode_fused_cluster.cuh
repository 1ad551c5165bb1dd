// The fused decode kernel (sm90_decode_fused.cu) for 3 to 8 tokens. A share of y from each thread block would be too
// much for L2: so clusters leave one. Their blocks tell each other which neurons are active, then h, through
// distributed shared memory; each computes some columns of y over all active neurons of the cluster, from pieces of
// their rows of Wd, asked for as soon as the neurons are known.
#pragma once

#include "sm90_decode_fused_gate.cuh"

namespace twell::decoding::fused {

constexpr int kCluster = kFusedCluster, kClusterTokens = 8, kClusterPairs = kClusterTokens / 2;
static_assert(kFusedMaxTokens == kClusterTokens && kCluster == kClusterPairs, "four lanes share a row of sums");
// In shared memory, once the gate's rows there are multiplied: slots, the block's own values and the cluster's h, each
// (active neurons, kClusterTokens), rows of up and pieces of down.
constexpr int kValueBytes = kClusterTokens * static_cast<int>(sizeof(float));
constexpr int kOwnValuesAt = kSlotBytes<kClusterPairs>;
constexpr int kClusterValuesAt = kOwnValuesAt + kFusedMaxRows * kValueBytes;
constexpr int kClusterRowsAt = kClusterValuesAt + kCluster * kFusedMaxRows * kValueBytes;
static_assert(kClusterRowsAt % 128 == 0);

struct ClusterControl : Control {
  uint16_t lists[kCluster][kFusedMaxRows];  // each block's active neurons: index in the block, ascending
  uint32_t counts[kCluster];
};
static_assert(sizeof(ClusterControl) <= kFusedControlBytes);

#if defined(TWELL_SM90_DEVICE)

__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Into another thread block's shared memory, at the place that `shared` has in this one's.
__device__ __forceinline__ void store_at(int rank, void* shared, uint32_t v) {
  asm volatile(
      "{\n\t.reg .b32 remote;\n\tmapa.shared::cluster.u32 remote, %0, %1;\n\t"
      "st.shared::cluster.u32 [remote], %2;\n\t}" ::"r"(sm90::smem_address(shared)),
      "r"(rank), "r"(v)
      : "memory");
}
__device__ __forceinline__ void store_at(int rank, uint16_t* shared, uint16_t v) {
  asm volatile(
      "{\n\t.reg .b32 remote;\n\tmapa.shared::cluster.u32 remote, %0, %1;\n\t"
      "st.shared::cluster.u16 [remote], %2;\n\t}" ::"r"(sm90::smem_address(shared)),
      "r"(rank), "h"(v)
      : "memory");
}

// For one warp: relu(gate) of the active neurons, which they are, and how many; the whole cluster hears of it.
__device__ __forceinline__ void list_for_cluster(const FusedParams& p, ClusterControl& c, const float4* slots,
                                                 float* values, const Neurons& own, int rank) {
  const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4, token = 2 * pair;
  int listed = 0;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    if (m >= own.tiles()) break;
    float4 v = slots[m * 32 + lane];
#pragma unroll
    for (int s = 1; s < kDecodeWarps; ++s) {
      const float4 other = slots[s * (kTiles * 32) + m * 32 + lane];
      v.x += other.x, v.y += other.y, v.z += other.z, v.w += other.w;
    }
    const int low = m * 16 + row, high = low + 8;
    const float low_bias = c.b_gate[min(low, own.count - 1)], high_bias = c.b_gate[min(high, own.count - 1)];
    v.x = activate(v.x, low_bias, low < own.count && token < p.tokens);
    v.y = activate(v.y, low_bias, low < own.count && token + 1 < p.tokens);
    v.z = activate(v.z, high_bias, high < own.count && token < p.tokens);
    v.w = activate(v.w, high_bias, high < own.count && token + 1 < p.tokens);
    const uint32_t lows = any_of_four(v.x != 0.f || v.y != 0.f), highs = any_of_four(v.z != 0.f || v.w != 0.f);
    const uint32_t before = (1u << row) - 1;
    const auto leave = [&](int place, int neuron, float a, float b) {
      *reinterpret_cast<float2*>(values + place * kClusterTokens + token) = make_float2(a, b);
      if (pair == 0) c.list[place] = static_cast<uint16_t>(neuron);
      store_at(pair, c.lists[rank] + place, static_cast<uint16_t>(neuron));
    };
    if (lows >> row & 1) leave(listed + __popc(lows & before), low, v.x, v.y);
    listed += __popc(lows);
    if (highs >> row & 1) leave(listed + __popc(highs & before), high, v.z, v.w);
    listed += __popc(highs);
  }
  if (lane < kCluster) store_at(lane, c.counts + rank, static_cast<uint32_t>(listed));
  if (lane == 0) c.active = listed;
  __syncwarp();
}

#endif

template <typename Half>
__global__ void __launch_bounds__(kThreads, 2) fused_cluster_kernel(const __grid_constant__ FusedParams p) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ __align__(128) char shared[];
  float4* const slots = reinterpret_cast<float4*>(shared);
  float* const own_values = reinterpret_cast<float*>(shared + kOwnValuesAt);
  float* const values = reinterpret_cast<float*>(shared + kClusterValuesAt);
  char* const rows = shared + kClusterRowsAt;
  __shared__ ClusterControl c;

  arrive_at_cluster();
  const int thread = threadIdx.x, rank = sm90::cluster_rank(), first_block = blockIdx.x - rank;
  const Lane l = this_lane();
  const Neurons own = neurons_of(p, blockIdx.x);
  float sum[kTiles][4] = {};
  uint4 x[kSteps];
  const unsigned long long meeting_before = multiply_gate<Half>(p, c, shared, l, own, sum, x);
  leave_sums<kClusterPairs>(slots, sum, own.tiles(), l);
  wait_for_cluster();  // all blocks are there
  p.trace.mark(kGateSums);

  // This block's columns, in pieces of 16 bytes.
  const int pieces = p.hidden / 8, first_piece = pieces * rank / kCluster;
  const int own_pieces = pieces * (rank + 1) / kCluster - first_piece;
  const uint32_t piece_stride = (pieces + kCluster - 1) / kCluster * 16;

  ActiveRows active(0, false, 0);
  sm90::Ring ring(c.full, c.empty, 1), ring_out = ring;
  int supplied = 0, all_active = 0, all_stages = 0;
  const auto plan_rows = [&] {
    active = ActiveRows(c.active, p.up != nullptr, p.row_places);
    ring.stages = ring_out.stages = min(kMaxStages, p.row_places / active.per);
  };
  const auto supply_row = [&] {
    const int stage = supplied++;
    ring_out.wait_empty();
    uint64_t* const full = ring_out.full + ring_out.stage;
    char* const to = rows + ring_out.stage * active.per * p.row_stride;
    if (stage < active.up_stages) {
      const int stage_rows = active.rows(stage);
      const int neuron = l.lane < stage_rows ? c.list[active.first_row(stage) + l.lane] : 0;
      ask_for(full, to, row_of(p.up, own.first + neuron, p), stage_rows, p);
    } else {  // pieces of kCluster times as many rows
      const int begin = (stage - active.up_stages) * kCluster * active.per;
      const int stage_rows = min(kCluster * active.per, all_active - begin);
      int block = 0, place = min(begin + l.lane, all_active - 1);
      for (; place >= static_cast<int>(c.counts[block]); ++block) place -= c.counts[block];
      const int neuron = neurons_of(p, first_block + block).first + c.lists[block][place];
      ask_for(full, to, row_of(p.down, neuron, p) + first_piece * 16, own_pieces > 0 ? stage_rows : 0, piece_stride,
              own_pieces * 16);
    }
    ring_out.advance();
  };
  if (l.warp == 0) {
    list_for_cluster(p, c, slots, own_values, own, rank);
    plan_rows();
    while (supplied < min(active.up_stages, ring.stages)) supply_row();
    p.trace.mark(kListed);
  }
  if (thread == kThreads - 1) number_call(p, c, meeting_before);
  __syncwarp();
  sm90::cluster_sync();  // all lists are there
  if (l.warp != 0) plan_rows();
  int before = 0;  // active neurons of blocks before this one
  for (int r = 0; r < kCluster; ++r) {
    all_active += c.counts[r];
    if (r < rank) before += c.counts[r];
  }
  all_stages = active.up_stages + (all_active + kCluster * active.per - 1) / (kCluster * active.per);
  if (l.warp == 0) {
    while (supplied < min(all_stages, ring.stages)) supply_row();
  }

#pragma unroll
  for (int m = 0; m < kTiles; ++m) sum[m][0] = sum[m][1] = sum[m][2] = sum[m][3] = 0.f;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    if (m >= active.tiles) break;
    multiply_stages<Half>(sum[m], x, l, ring, rows, active, m, p);
    for (int i = 0; i < 2; ++i) {
      if (l.warp == 0 && supplied < all_stages) supply_row();
    }
  }
  if (active.tiles > 0) {
    p.trace.mark(kRowsThere);
    leave_sums<kClusterPairs>(slots, sum, active.tiles, l);
  }
  for (int i = thread; i < active.active * kClusterTokens; i += kThreads) {
    const int row = i / kClusterTokens, token = i % kClusterTokens;
    float value = own_values[i];
    if (active.tiles > 0 && value != 0.f) {
      const int tile = row / (2 * active.per), in_tile = row % (2 * active.per);
      const int high = in_tile >= active.per, in_half = in_tile - high * active.per;
      const int element = (tile * 8 + in_half) * kClusterPairs + token / 2;
      float u = 0.f;
#pragma unroll
      for (int s = 0; s < kDecodeWarps; ++s) {
        u += reinterpret_cast<const float*>(slots + s * (kTiles * 32) + element)[2 * high + token % 2];
      }
      value *= u + c.b_up[c.list[row]];
    }
#pragma unroll
    for (int r = 0; r < kCluster; ++r) {
      store_at(r, values + before * kClusterTokens + i, __float_as_uint(value));
    }
  }
  __syncwarp();
  sm90::cluster_sync();  // h is there
  p.trace.mark(kUpSums);

  // A thread has four tokens and two pairs of columns, half of the most that a block can have apart.
  constexpr int kApart = kThreads / 2;
  static_assert(kFusedMaxHidden / 2 / kCluster == 2 * kApart);
  const int token = thread / kApart * 4, pair = thread % kApart, pairs = own_pieces * 4;
  float2 y[4][2] = {};
  for (int begin = 0; begin < all_active; begin += kCluster * active.per) {
    ring.wait_full();
    const char* at = rows + ring.stage * active.per * p.row_stride + pair * 4;
    const int end = min(all_active, begin + kCluster * active.per);
    for (int r = begin; token < p.tokens && pair < pairs && r < end; ++r, at += piece_stride) {
      const float4 h = *reinterpret_cast<const float4*>(values + r * kClusterTokens + token);
      const float of_token[4] = {h.x, h.y, h.z, h.w};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (j > 0 && pair + kApart >= pairs) break;
        const float2 column = sm90::unpack<Half>(*reinterpret_cast<const uint32_t*>(at + j * kApart * 4));
#pragma unroll
        for (int t = 0; t < 4; ++t) y[t][j].x += of_token[t] * column.x, y[t][j].y += of_token[t] * column.y;
      }
    }
    release(ring.empty + ring.stage, l.lane);
    ring.advance();
    if (l.warp == 0 && supplied < all_stages) supply_row();
  }
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    if (token + t >= p.tokens) break;
    uint4* const to = p.shares + (first_block / kCluster * p.tokens + token + t) * (p.hidden / 2) + first_piece * 4;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int own_pair = pair + j * kApart;
      if (own_pair < pairs) store_sealed(to + own_pair, y[t][j].x, y[t][j].y, c.seal);
    }
  }
  p.trace.mark(kGiven);
  add_up_all<Half, kCluster>(p, c, reinterpret_cast<float2*>(slots));
  p.trace.mark(kStored);
#endif
}

}  // namespace twell::decoding::fused
