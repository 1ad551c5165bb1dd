// The first part of the fused decode kernel where weights have 8 bits: a thread block's gate rows take half of the
// room, so each run has a place of its own, and all are asked for before x is there.
//
// To make 16-bit operands takes longer than to multiply them, and a chain's calls have their rows long before x. So
// those of the first 16 rows are made at once.
#pragma once

#include "sm90/decode/fused_gate.cuh"

namespace twell::decoding::fused {

#if defined(TWELL_SM90_DEVICE)

static_assert(kRuns * (kRunRows * kFusedMaxHidden + 64) <= kFusedGateBytes, "a place for each run");

// What multiply_gate() does, of up to two tokens. Where a thread block has no such row, lanes multiply what lies at its
// place, and the sums are not used.
template <typename Half, typename Weight>
__device__ __forceinline__ void multiply_narrow_gate(const FusedParams& p, Control& c, char* places, const Lane& l,
                                                     const Neurons& own, float (&sum)[kTiles][4],
                                                     uint4 (&x)[kXPieces]) {
  static_assert(kTiles == 3 && kRatio<Half, Weight> == 2);
  sm90::launch_dependents();
  p.trace.mark(kStarted);
  const int thread = threadIdx.x;
  Runs runs(p, c, places, own);
  start<Half, Weight>(p, c, l, own, runs);
  // The lane's rows: of an even or an odd run. Where they have ended x is 0, and their first bytes stand in: should
  // there be a NaN, it is in the sum anyhow.
  const uint32_t lane_at = l.row % 2 * p.run_stride + l.row / 2 * p.row_bytes;
  const auto piece = [&](int place, int i) {
    const uint32_t k = l.offset + i * kStepBytes;
    return *reinterpret_cast<const uint4*>(places + place * p.run_stride + lane_at + (k < p.row_bytes ? k : 0));
  };
  unsigned long long meeting_before = 0;
  {
    uint4 held[kXPieces][2];  // as 16-bit values
    uint32_t words = 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      runs.wait<2>(2 * j, runs.held);
      uint4 bytes[kSteps<Weight>];
#pragma unroll
      for (int i = 0; i < kSteps<Weight>; ++i) bytes[i] = piece(p.held_at + 2 * j, i);
#pragma unroll
      for (int i = 0; i < kXPieces; ++i) {
        uint32_t v[4];
        unpack<Half, Weight>(v, bytes[i / 2], i % 2);
        held[i][j] = make_uint4(v[0], v[1], v[2], v[3]);
        words |= v[0] | v[1] | v[2] | v[3];
      }
    }
    meet_with(words);  // else they would be made where they are multiplied
    p.trace.mark(kWeights);
    sm90::wait_for_previous();
    p.trace.mark(kCallBefore);
    if (thread == 32) *static_cast<volatile int*>(&c.kernels_ahead_ended) = 1;
    load_x<Half, Weight>(x, l, p);
    if (thread == kThreads - 1) meeting_before = check_in(p);
    if (p.warm) warm_share(p);
    float part[2][4] = {};
#pragma unroll
    for (int i = 0; i < kXPieces; ++i) multiply_step<Half, Half>(part, held[i][0], held[i][1], x, i);
    join(sum[0], part);
  }
  p.trace.mark(kTokensThere);
#pragma unroll
  for (int m = 1; m < kTiles; ++m) {
    const int first_run = m * 16 / kRunRows;
    if (first_run >= runs.all) break;
    if (m == kTiles - 1 && thread == kThreads - 1) number_call(p, c, meeting_before);  // while it waits anyway
    runs.wait<16 / kRunRows>(first_run, runs.all);
    float part[2][4] = {};
#pragma unroll
    for (int i = 0; i < kSteps<Weight>; ++i) {
      if (i == kSteps<Weight> / 2 && p.row_bytes <= i * kStepBytes) break;
      multiply_step<Half, Weight>(part, piece(first_run - kHeldRuns, i), piece(first_run - kHeldRuns + 2, i), x, i);
    }
    join(sum[m], part);
  }
  if (own.tiles() < kTiles && thread == kThreads - 1) number_call(p, c, meeting_before);
}

#endif

}  // namespace twell::decoding::fused
