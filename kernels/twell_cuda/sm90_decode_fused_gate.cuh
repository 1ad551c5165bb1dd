// The first part of the fused decode kernel: a thread block's gate rows, as they come, times x.
#pragma once

#include "sm90_decode_fused_sum.cuh"

namespace twell::decoding::fused {

#if defined(TWELL_SM90_DEVICE)

// A thread block's threads meet, each once it has `words`. Loads from shared memory may else still be under way when a
// barrier opens: other threads' stores queue behind them, bulk copies do not.
__device__ __forceinline__ void meet_with(uint32_t words) {
  asm volatile("{\n\t.reg .pred p, q;\n\tsetp.ne.b32 p, %0, 0;\n\tbar.red.or.pred q, 0, p;\n\t}" ::"r"(words)
               : "memory");
}

// Starts the kernel: barriers, rows, biases; waits for the kernel ahead; leaves x and each warp's part of the sums. The
// last thread has checked in: the answer is what the meeting's word was before.
template <typename Half>
__device__ __forceinline__ unsigned long long multiply_gate(const FusedParams& p, Control& c, char* shared,
                                                            const Lane& l, const Neurons& own,
                                                            float (&sum)[kTiles][4], uint4 (&x)[kSteps]) {
  sm90::launch_dependents();
  p.trace.mark(kStarted);
  const int thread = threadIdx.x;
  if (thread < kPortions) sm90::barrier_init(c.gate + thread, 1);
  if (thread < kMaxStages) {
    sm90::barrier_init(c.full + thread, 1);
    sm90::barrier_init(c.empty + thread, kDecodeWarps);
  }
  sm90::fence_barrier_init();
  __syncthreads();
  const int held_rows = min(own.count, kHeldRows), rest = own.count - held_rows;

  // Before x: what is constant.
  const int held_portions = (held_rows + kPortionRows - 1) / kPortionRows;
  const int portions = held_portions + (rest + kPortionRows - 1) / kPortionRows;
  int asked = 0;
  const auto ask_for_gate = [&](int until) {
    for (; asked < until; ++asked) {
      if (asked >= p.window) sm90::barrier_wait(c.gate + asked - p.window, 0);
      const bool to_hold = asked < held_portions;
      const int row = (to_hold ? asked : asked - held_portions) * kPortionRows;
      const int place = row + (to_hold ? p.held_at : 0), neuron = own.first + row + (to_hold ? 0 : kHeldRows);
      ask_for(c.gate + asked, shared + place * p.row_stride, row_of(p.gate, neuron + l.lane, p),
              min(kPortionRows, (to_hold ? held_rows : rest) - row), p);
    }
  };
  // Those first whose places are free from the start.
  if (l.warp == 0) ask_for_gate(min(portions, held_portions + p.held_at / kPortionRows));
  if (thread >= 32 && thread < 32 + own.count) {
    c.b_gate[thread - 32] = bias_of<Half>(p.b_gate, own.first + thread - 32, p.width);
    c.b_up[thread - 32] = bias_of<Half>(p.b_up, own.first + thread - 32, p.width);
  }
  unsigned long long meeting_before = 0;
  {
    uint4 held[kSteps][2];
    uint32_t words = 0;
    for (int i = 0; i < held_portions; ++i) sm90::barrier_wait(c.gate + i, 0);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const uint32_t k = l.offset + i * kStepBytes;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = l.row + 8 * j;
        held[i][j] = uint4{};
        if (row < own.count && k < p.row_bytes) {
          held[i][j] = *reinterpret_cast<const uint4*>(shared + (p.held_at + row) * p.row_stride + k);
        }
        words |= held[i][j].x;
      }
    }
    meet_with(words);
    p.trace.mark(kHeld);
    if (l.warp == 0) ask_for_gate(portions);
    p.trace.mark(kWeights);
    sm90::wait_for_previous();
    p.trace.mark(kCallBefore);
    load_x(x, l, p);
    if (thread == kThreads - 1) meeting_before = check_in(p);
    for (int i = held_portions; i < portions; ++i) sm90::barrier_wait(c.gate + i, 0);
    float part[2][4] = {};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) multiply_step<Half>(part, held[i][0], held[i][1], x[i]);
    join(sum[0], part);
  }
  p.trace.mark(kTokensThere);

#pragma unroll
  for (int m = 1; m < kTiles; ++m) {
    if (m >= own.tiles()) break;
    // Where there is no such row, another: the sums are then not used.
    const int low = m * 16 - kHeldRows + l.row, high = low + 8;
    multiply_rows<Half>(sum[m], x, l, shared + min(low, rest - 1) * p.row_stride,
                        shared + min(high, rest - 1) * p.row_stride, p.row_bytes);
  }
  return meeting_before;
}

#endif

}  // namespace twell::decoding::fused
