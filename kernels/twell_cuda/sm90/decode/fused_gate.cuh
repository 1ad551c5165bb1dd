// The first part of the fused decode kernel: a thread block's gate rows, as they come, times x.
//
// Rows come in runs of four neighbours, one bulk copy each, all by one thread. The first four runs go on into
// registers, in two steps; what comes after them lands where they lay.
#pragma once

#include "sm90/decode/fused.cuh"

namespace twell::decoding::fused {

#if defined(TWELL_SM90_DEVICE)

// A thread block's threads meet, each once it has `words`. Loads from shared memory may else still be under way when a
// barrier opens: other threads' stores queue behind them, bulk copies do not.
__device__ __forceinline__ void meet_with(uint32_t words) {
  asm volatile("{\n\t.reg .pred p, q;\n\tsetp.ne.b32 p, %0, 0;\n\tbar.red.or.pred q, 0, p;\n\t}" ::"r"(words)
               : "memory");
}

// How a thread block's gate rows lie in runs, and which have been asked for: those to be held first.
struct Runs {
  const FusedParams& p;
  Control& c;
  char* const places;
  const Neurons own;
  const int held, all;
  int asked = 0;

  __device__ __forceinline__ Runs(const FusedParams& params, Control& control, char* rows, const Neurons& neurons)
      : p(params),
        c(control),
        places(rows),
        own(neurons),
        held((min(neurons.count, kHeldRows) + kRunRows - 1) / kRunRows),
        all((neurons.count + kRunRows - 1) / kRunRows) {}

  __device__ __forceinline__ char* place(int run) const {
    return places + (run < held ? p.held_at + run : run - held) * p.run_stride;
  }
  // Until kCount runs have come, but for those from `end` on, which do not exist.
  template <int kCount>
  __device__ __forceinline__ void wait(int first, int end) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (first + i < end) sm90::barrier_wait(c.gate + first + i, 0);
    }
  }

  // For one thread, before the kernels ahead have ended or after: asks for the runs below `until`.
  __device__ __forceinline__ void ask(int until) {
    for (until = min(until, all); asked < until; ++asked) {
      if (asked >= p.window) {
        while (!sm90::barrier_passed(c.gate + asked - p.window, 0)) {
          if (*static_cast<volatile int*>(&c.kernels_ahead_ended) != 0) break;
        }
      }
      const int row = asked * kRunRows;
      const uint32_t bytes = min(kRunRows, own.count - row) * p.row_bytes;
      sm90::barrier_arrive_expect(c.gate + asked, bytes);
      sm90::load_bytes(place(asked), row_of(p.gate, own.first + row, p), bytes, c.gate + asked);
    }
  }
};

// For warp 0, in one thread: asks for the runs below `until`.
__device__ __forceinline__ void ask(Runs& runs, const Lane& l, int until) {
  if (l.warp != 0) return;
  if (l.lane == 0) runs.ask(until);
  __syncwarp();
}

// Starts the kernel, before x: barriers, rows, and what is constant.
template <typename Half, typename Weight>
__device__ __forceinline__ void start(const FusedParams& p, Control& c, const Lane& l, const Neurons& own, Runs& runs) {
  const int thread = threadIdx.x;
  // One thread readies what it needs and asks for rows at once. Threads with a barrier each would take turns, as the
  // barrier's address is the same for a whole warp in these instructions.
  if (thread == 0) {
#pragma unroll
    for (int i = 0; i < kRuns; ++i) sm90::barrier_init(c.gate + i, 1);
    sm90::fence_barrier_init();
    sm90::fence_async_proxy();
    runs.ask(min(p.window, runs.held + p.held_at));  // as many as wait for nothing
  } else if (thread == 32) {
    c.kernels_ahead_ended = 0;
#pragma unroll
    for (int i = 0; i < kMaxStages; ++i) {
      sm90::barrier_init(c.full + i, 1);
      sm90::barrier_init(c.empty + i, kDecodeWarps);
    }
    sm90::fence_barrier_init();
  }
  __syncthreads();
  ask(runs, l, runs.held + p.held_at);  // whose places are free from the start
  if (thread >= 32 && thread < 32 + own.count) {
    c.b_gate[thread - 32] = bias_of<Half>(p.b_gate, own.first + thread - 32, p.width);
    c.b_up[thread - 32] = bias_of<Half>(p.b_up, own.first + thread - 32, p.width);
    if constexpr (kScaled<Weight>) {
      c.s_gate[thread - 32] = p.s_gate[own.first + thread - 32];
      if (p.up != nullptr) c.s_up[thread - 32] = p.s_up[own.first + thread - 32];
    }
  }
}

// Starts the kernel, waits for the kernel ahead; leaves x and each warp's part of the sums. The last thread checks in
// and numbers the call. With kHalves half of a tile is loaded while the other half comes.
template <typename Half, typename Weight, bool kHalves>
__device__ __forceinline__ void multiply_gate(const FusedParams& p, Control& c, char* places, const Lane& l,
                                              const Neurons& own, float (&sum)[kTiles][4], uint4 (&x)[kXPieces]) {
  sm90::launch_dependents();
  const int thread = threadIdx.x;
  Runs runs(p, c, places, own);
  start<Half, Weight>(p, c, l, own, runs);
  // The lane's rows: of an even or an odd run.
  const int lane_neuron = neuron_of_row(l.row), odd = l.row % 2;
  const uint32_t lane_at = odd * p.run_stride + l.row / 2 * p.row_bytes;
  unsigned long long meeting_before = 0;
  {
    uint4 held[kSteps<Weight>][2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      runs.wait<2>(2 * j, runs.held);
      const char* const from = places + (p.held_at + 2 * j) * p.run_stride + lane_at;
      uint32_t words = 0;
#pragma unroll
      for (int i = 0; i < kSteps<Weight>; ++i) {
        const uint32_t k = l.offset + i * kStepBytes;
        held[i][j] = uint4{};
        if (8 * j + lane_neuron < own.count && k < p.row_bytes) held[i][j] = *reinterpret_cast<const uint4*>(from + k);
        words |= held[i][j].x;
      }
      meet_with(words);
      ask(runs, l, j == 0 ? runs.held + p.held_at + 2 : runs.all);
    }
    sm90::wait_for_previous();
    if (thread == 32) *static_cast<volatile int*>(&c.kernels_ahead_ended) = 1;
    load_x<Half, Weight>(x, l, p);
    if (thread == kThreads - 1) meeting_before = check_in(p);
    if (p.warm) warm_share(p);
    float part[2][4] = {};
#pragma unroll
    for (int i = 0; i < kSteps<Weight>; ++i) multiply_step<Half, Weight>(part, held[i][0], held[i][1], x, i);
    join(sum[0], part);
  }

#pragma unroll
  for (int m = 1; m < kTiles; ++m) {
    const int first_run = m * 16 / kRunRows;
    if (first_run >= runs.all) break;
    if (m == kTiles - 1 && thread == kThreads - 1) number_call(p, c, meeting_before);  // while it waits anyway
    // Where there is no such row, another: the sums are then not used.
    const char* const tile = places + (first_run - kHeldRuns) * p.run_stride;
    const char* const low = m * 16 + lane_neuron < own.count ? tile + lane_at : tile;
    const char* const high = m * 16 + 8 + lane_neuron < own.count ? tile + 2 * p.run_stride + lane_at : tile;
    if (kHalves && p.row_bytes == kMaxRowBytes<Weight>) {
      multiply_halves<Half, Weight>(sum[m], x, l, low, high, [&](int half) {
        runs.wait<8 / kRunRows>(first_run + half * 8 / kRunRows, runs.all);
      });
    } else {
      runs.wait<16 / kRunRows>(first_run, runs.all);
      multiply_rows<Half, Weight, !kHalves>(sum[m], x, l, low, high, p.row_bytes);
    }
  }
  if (own.tiles() < kTiles && thread == kThreads - 1) number_call(p, c, meeting_before);
}

// The same of 8-bit weights: a thread block's gate rows take half of the room, so each run has a place of its own, and
// all are asked for before x is there.
//
// To make 16-bit operands takes longer than to multiply them, and a chain's calls have their rows long before x. So
// those of the first 16 rows are made at once.

static_assert(kRuns * (kRunRows * kFusedMaxHidden + 64) <= kFusedGateBytes, "a place for each run");

// What multiply_gate() does, of up to two tokens. Where a thread block has no such row, lanes multiply what lies at its
// place, and the sums are not used.
template <typename Half, typename Weight>
__device__ __forceinline__ void multiply_narrow_gate(const FusedParams& p, Control& c, char* places, const Lane& l,
                                                     const Neurons& own, float (&sum)[kTiles][4],
                                                     uint4 (&x)[kXPieces]) {
  static_assert(kTiles == 3 && kRatio<Half, Weight> == 2);
  sm90::launch_dependents();
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
    sm90::wait_for_previous();
    if (thread == 32) *static_cast<volatile int*>(&c.kernels_ahead_ended) = 1;
    load_x<Half, Weight>(x, l, p);
    if (thread == kThreads - 1) meeting_before = check_in(p);
    if (p.warm) warm_share(p);
    float part[2][4] = {};
#pragma unroll
    for (int i = 0; i < kXPieces; ++i) multiply_step<Half, Half>(part, held[i][0], held[i][1], x, i);
    join(sum[0], part);
  }
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
