// Up and down products of a fused decode kernel's thread block with many active neurons: rows come by bulk copies,
// through a ring of stages that warp 0 keeps full.
#pragma once

#include "sm90/decode/fused_own.cuh"

namespace twell::decoding::fused {

#if defined(TWELL_SM90_DEVICE)

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
                                                const uint4 (&x)[kXPieces], const Active<kTokens>& a, uint64_t& silence) {
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
    p.trace.mark(kListed);
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
    p.trace.mark(kRowsThere);
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
    p.trace.mark(kUpSums);
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
