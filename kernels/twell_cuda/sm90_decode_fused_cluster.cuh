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

// A block's active neurons: index in the block, ascending. 16 bytes at a time.
struct alignas(16) Listed {
  uint16_t neurons[kFusedMaxRows];
  int count;
};
constexpr int kListedPieces = sizeof(Listed) / 16;
static_assert(kListedPieces * kCluster <= 32, "a lane sends one");

struct ClusterControl : Control {
  uint64_t lists_there, h_there;
  Listed own, lists[kCluster];
};
static_assert(sizeof(ClusterControl) <= kFusedControlBytes);

#if defined(TWELL_SM90_DEVICE)

// Barriers that this thread block has initialized are then there for the others.
__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// 16 bytes into another thread block's shared memory, at the place that `to` has in this one's, and onto its barrier. No
// fence: a release at cluster scope would be a full memory barrier.
__device__ __forceinline__ void send(int rank, void* to, uint64_t* barrier, const uint4& v) {
  asm volatile(
      "{\n\t.reg .b32 there, done;\n\tmapa.shared::cluster.u32 there, %0, %2;\n\t"
      "mapa.shared::cluster.u32 done, %1, %2;\n\t"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%3, %4, %5, %6}, [done];\n\t}" ::"r"(
          sm90::smem_address(to)),
      "r"(sm90::smem_address(barrier)), "r"(rank), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
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
      if (pair == 0) c.own.neurons[place] = static_cast<uint16_t>(neuron);
    };
    if (lows >> row & 1) leave(listed + __popc(lows & before), low, v.x, v.y);
    listed += __popc(lows);
    if (highs >> row & 1) leave(listed + __popc(highs & before), high, v.z, v.w);
    listed += __popc(highs);
  }
  if (lane == 0) c.own.count = listed;
  __syncwarp();
  if (lane < kCluster * kListedPieces) {
    const int piece = lane % kListedPieces;
    send(lane / kListedPieces, reinterpret_cast<uint4*>(c.lists + rank) + piece, &c.lists_there,
         reinterpret_cast<const uint4*>(&c.own)[piece]);
  }
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

  const int thread = threadIdx.x, rank = sm90::cluster_rank(), first_block = blockIdx.x - rank;
  const Lane l = this_lane();
  if (thread == 0) {
    sm90::barrier_init(&c.lists_there, 1);
    sm90::barrier_init(&c.h_there, 1);
    sm90::fence_barrier_init();
    sm90::barrier_arrive_expect(&c.lists_there, kCluster * sizeof(Listed));
  }
  __syncwarp();
  arrive_at_cluster();
  const Neurons own = neurons_of(p, blockIdx.x);
  float sum[kTiles][4] = {};
  uint4 x[kSteps];
  const unsigned long long meeting_before = multiply_gate<Half>(p, c, shared, l, own, sum, x);
  leave_sums<kClusterPairs>(slots, sum, own.tiles(), l);
  wait_for_cluster();  // all blocks are there, and their barriers
  p.trace.mark(kGateSums);

  // This block's columns, in pieces of 16 bytes.
  const int pieces = p.hidden / 8, first_piece = pieces * rank / kCluster;
  const int own_pieces = pieces * (rank + 1) / kCluster - first_piece;
  const uint32_t piece_stride = (pieces + kCluster - 1) / kCluster * 16;

  ActiveRows active(0, false, 0);
  sm90::Ring ring(c.full, c.empty, 1), ring_out = ring;
  int supplied = 0, all_active = 0, all_stages = 0;
  const auto plan_rows = [&] {
    active = ActiveRows(c.own.count, p.up != nullptr, p.row_places);
    ring.stages = ring_out.stages = min(kMaxStages, p.row_places / active.per);
  };
  const auto supply_row = [&] {
    const int stage = supplied++;
    ring_out.wait_empty();
    uint64_t* const full = ring_out.full + ring_out.stage;
    char* const to = rows + ring_out.stage * active.per * p.row_stride;
    if (stage < active.up_stages) {
      const int stage_rows = active.rows(stage);
      const int neuron = l.lane < stage_rows ? c.own.neurons[active.first_row(stage) + l.lane] : 0;
      ask_for(full, to, row_of(p.up, own.first + neuron, p), stage_rows, p);
    } else {  // pieces of kCluster times as many rows
      const int begin = (stage - active.up_stages) * kCluster * active.per;
      const int stage_rows = min(kCluster * active.per, all_active - begin);
      int block = 0, place = min(begin + l.lane, all_active - 1);
      for (; place >= c.lists[block].count; ++block) place -= c.lists[block].count;
      const int neuron = neurons_of(p, first_block + block).first + c.lists[block].neurons[place];
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
  __syncthreads();
  sm90::barrier_wait(&c.lists_there, 0);
  if (l.warp != 0) plan_rows();
  int before = 0;  // active neurons of blocks before this one
  for (int r = 0; r < kCluster; ++r) {
    all_active += c.lists[r].count;
    if (r < rank) before += c.lists[r].count;
  }
  if (thread == 0) sm90::barrier_arrive_expect(&c.h_there, all_active * kValueBytes);
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
  const int own_count = active.active * kClusterTokens;
  for (int begin = l.warp * 32; begin < own_count; begin += kThreads) {
    const int i = min(begin + l.lane, own_count - 1), row = i / kClusterTokens, token = i % kClusterTokens;
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
      value *= u + c.b_up[c.own.neurons[row]];
    }
    // Four lanes' values to four blocks.
    uint32_t of_lane[4];
    for (int q = 0; q < 4; ++q) of_lane[q] = __float_as_uint(__shfl_sync(0xffffffffu, value, l.lane / 4 * 4 + q));
    if (begin + l.lane < own_count) {
      send(l.lane % 4, values + before * kClusterTokens + i / 4 * 4, &c.h_there,
           make_uint4(of_lane[0], of_lane[1], of_lane[2], of_lane[3]));
    }
  }
  sm90::barrier_wait(&c.h_there, 0);
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
