// What all parts of Hopper's fused decode kernel (sm90/decode/fused.cu) use: parameters, products over rows in shared
// memory, and the shares of y that thread blocks leave for each other.
#pragma once

#include <type_traits>

#include "decode/gate.cuh"
#include "sm90/common/primitives.cuh"

namespace twell::decoding::fused {

constexpr int kThreads = kDecodeThreads;
constexpr int kHeldRows = kFusedHeldRows;  // of the gate, as tensor-core operands in registers
constexpr int kTiles = kFusedMaxRows / 16;
constexpr int kRunRows = kFusedRunRows, kRuns = kFusedMaxRows / kRunRows, kHeldRuns = kHeldRows / kRunRows;
constexpr int kStageRows = 8;  // of up and down, at most
constexpr int kMaxStages = 8;
constexpr uint32_t kPieceBytes = 64;                         // of weights: 32 consecutive k, or 64 of 8-bit ones
constexpr uint32_t kStepBytes = kDecodeWarps * kPieceBytes;  // a piece for each warp
template <typename Weight>
constexpr uint32_t kMaxRowBytes = sizeof(Weight) * kFusedMaxHidden;
template <typename Weight>
constexpr int kSteps = kMaxRowBytes<Weight> / kStepBytes;   // of a row
constexpr int kXPieces = 2 * kFusedMaxHidden / kStepBytes;  // 16 bytes of x each: one for a step, or two
constexpr int kThreadColumns = kFusedMaxHidden / kThreads;
static_assert(kThreadColumns == 8, "a thread reads 16 bytes of a row, or 8");
template <typename Weight>
constexpr int kColumnBytes = kThreadColumns * static_cast<int>(sizeof(Weight));
template <int kTokens>
constexpr bool kQuiet = kTokens > 2;  // a share of zeros is announced, not stored

struct FusedParams {
  const char* x;
  const char* gate;
  const char* up;  // null: no gate
  const char* down;
  const void* b_gate;
  const void* b_up;
  const void* b_down;
  uint4* shares;       // (thread blocks, tokens, D / 2): two columns of a share of y, and the call's seal
  uint64_t* silences;  // (tokens, thread blocks), of quiet kernels: the call's seal where a share is zeros
  void* y;
  int tokens, hidden, width;
  uint32_t row_bytes;   // of gate, up and down
  uint32_t run_stride;  // of gate rows in shared memory: 64 modulo 128
  uint32_t row_stride;  // of rows of up and down there, 64 modulo 128: 16-byte reads of two rows meet no bank twice
  int block_rows, longer_blocks;  // neurons of a thread block; how many of the blocks, the first ones, have one more
  int window;      // runs on their way before the kernels ahead have ended: more would queue in front of them
  int held_at;     // where runs that go on into registers land, among the places of runs
  int row_places;  // of rows of up and down, behind Sums
  int units;       // pairs of columns that a thread block adds up: a power of two
  bool warm;       // shares' lines are written before there is anything to say
  uint32_t meeting;
  int patience;
  const float* s_gate;  // of 8-bit weights
  const float* s_up;
  const float* s_down;
};

struct Control {
  uint64_t gate[kRuns];                          // a barrier for each run, used once
  uint64_t full[kMaxStages], empty[kMaxStages];  // up and down
  uint64_t seal;
  float b_gate[kFusedMaxRows], b_up[kFusedMaxRows];
  uint16_t list[kFusedMaxRows];  // of active neurons
  int kernels_ahead_ended;       // from the start or since
  int left_over;                 // thread blocks that gave up waiting
  int all_in;
  float s_gate[kFusedMaxRows], s_up[kFusedMaxRows];  // of 8-bit weights
};
static_assert(sizeof(Control) <= kFusedControlBytes);

// Rows of Wu, then of Wd, of the active neurons: in tiles of two stages (the second may be empty), and stage by stage.
struct ActiveRows {
  int active, per, tiles, up_stages, stages;  // per: rows of a stage
  __device__ __forceinline__ ActiveRows(int neurons, bool has_up, int places) : active(neurons) {
    // All of them at once where few neurons are active.
    per = active <= 2 * kStageRows && 2 * active <= places ? max(1, (active + 1) / 2) : kStageRows;
    tiles = has_up ? (active + 2 * per - 1) / (2 * per) : 0;
    up_stages = 2 * tiles;
    stages = up_stages + down_stages();
  }
  __device__ __forceinline__ int down_stages() const { return (active + per - 1) / per; }
  __device__ __forceinline__ int first_row(int stage) const {
    return (stage < up_stages ? stage : stage - up_stages) * per;
  }
  __device__ __forceinline__ int rows(int stage) const { return max(0, min(per, active - first_row(stage))); }
};

#if defined(TWELL_SM90_DEVICE)

// What a lane needs to find its operands: within each 64 bytes of weights, lane q of four takes 16 consecutive ones.
struct Lane {
  int warp, lane, row;  // row: lane / 4, of eight of a product's operand; of x the token
  uint32_t offset;      // of its 16 bytes in a step
};

__device__ __forceinline__ Lane this_lane() {
  Lane l;
  l.warp = threadIdx.x / 32, l.lane = threadIdx.x % 32;
  l.row = l.lane / 4;
  l.offset = l.warp * kPieceBytes + l.lane % 4 * 16;
  return l;
}

// A thread block's.
struct Neurons {
  int first, count;
  __device__ __forceinline__ int tiles() const { return (count + 15) / 16; }
};

__device__ __forceinline__ Neurons neurons_of(const FusedParams& p, int block) {
  return {block * p.block_rows + min(block, p.longer_blocks), p.block_rows + (block < p.longer_blocks)};
}

// Which neuron of eight is row `row` of a product's operand. Neighbouring rows are of two runs, so of different banks.
__device__ __forceinline__ int neuron_of_row(int row) { return row % 2 * kRunRows + row / 2; }

__device__ __forceinline__ const char* row_of(const char* matrix, int neuron, const FusedParams& p) {
  return matrix + static_cast<int64_t>(neuron) * p.row_bytes;
}

template <typename Half, typename Weight>
__device__ __forceinline__ void load_x(uint4 (&x)[kXPieces], const Lane& l, const FusedParams& p) {
  constexpr int kPerByte = kRatio<Half, Weight>;
#pragma unroll
  for (int i = 0; i < kXPieces; ++i) {
    const uint32_t k = l.offset + i / kPerByte * kStepBytes;  // of weights
    const char* const row = p.x + l.row * p.row_bytes * kPerByte;
    load_tokens_once(x[i], row + k * kPerByte + i % kPerByte * 16, l.row < p.tokens && k < p.row_bytes);
  }
}

// Step `i` of k of a tile. Products that follow each other in one sum wait for each other: two sums, joined at the end.
template <typename Half, typename Weight>
__device__ __forceinline__ void multiply_step(float (&part)[2][4], const uint4& low, const uint4& high,
                                              const uint4 (&x)[kXPieces], int i) {
  constexpr int kPerByte = kRatio<Half, Weight>;
#pragma unroll
  for (int r = 0; r < kPerByte; ++r) {
    uint32_t a[4], b[4];
    unpack<Half, Weight>(a, low, r);
    unpack<Half, Weight>(b, high, r);
    const uint4& t = x[i * kPerByte + r];
    mma<Half>(part[0], a[0], b[0], a[1], b[1], t.x, t.y);
    mma<Half>(part[1], a[2], b[2], a[3], b[3], t.z, t.w);
  }
}

__device__ __forceinline__ void join(float (&sum)[4], const float (&part)[2][4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) sum[j] += part[0][j] + part[1][j];
}

// The warp has read all that it wants of a stage.
__device__ __forceinline__ void release(uint64_t* empty, int lane) {
  __syncwarp();
  if (lane == 0) sm90::barrier_arrive(empty);
}

// sum += 16 rows x^T over this warp's pieces of k; `low` and `high` are where the lane's two rows begin.
template <typename Half, typename Weight, bool kMayBeWhole = true>
__device__ __forceinline__ void multiply_rows(float (&sum)[4], const uint4 (&x)[kXPieces], const Lane& l,
                                              const char* low, const char* high, uint32_t row_bytes) {
  float part[2][4] = {};
  const auto multiply = [&](auto whole) {  // without branches loads run ahead of products
#pragma unroll
    for (int i = 0; i < kSteps<Weight>; ++i) {
      const uint32_t k = l.offset + i * kStepBytes;
      if (!whole.value && i * kStepBytes + l.warp * kPieceBytes >= row_bytes) break;  // the same for the whole warp
      const bool inside = whole.value || k < row_bytes;
      uint4 a{}, b{};
      if (inside) a = *reinterpret_cast<const uint4*>(low + k);
      if (inside) b = *reinterpret_cast<const uint4*>(high + k);
      multiply_step<Half, Weight>(part, a, b, x, i);
    }
  };
  if (kMayBeWhole && row_bytes == kMaxRowBytes<Weight>) {
    multiply(std::integral_constant<bool, kMayBeWhole>{});
  } else {
    multiply(std::false_type{});
  }
  join(sum, part);
}

// The same of whole rows, but the lower ones are loaded while the upper ones come: `wait` waits for either, 0 or 1.
template <typename Half, typename Weight, typename Wait>
__device__ __forceinline__ void multiply_halves(float (&sum)[4], const uint4 (&x)[kXPieces], const Lane& l,
                                                const char* low, const char* high, const Wait& wait) {
  float part[2][4] = {};
  uint4 rows[kSteps<Weight>];
  wait(0);
#pragma unroll
  for (int i = 0; i < kSteps<Weight>; ++i) rows[i] = *reinterpret_cast<const uint4*>(low + l.offset + i * kStepBytes);
  wait(1);
#pragma unroll
  for (int i = 0; i < kSteps<Weight>; ++i) {
    const uint4 upper = *reinterpret_cast<const uint4*>(high + l.offset + i * kStepBytes);
    multiply_step<Half, Weight>(part, rows[i], upper, x, i);
  }
  join(sum, part);
}

// sum += the next two stages' rows x^T.
template <typename Half, typename Weight>
__device__ __forceinline__ void multiply_stages(float (&sum)[4], const uint4 (&x)[kXPieces], const Lane& l,
                                                sm90::Ring& ring, const char* stages, const ActiveRows& active,
                                                int tile, const FusedParams& p) {
  const char* at[2];
  uint64_t* empty[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    ring.wait_full();
    // Where a stage has no such row, a row that another lane reads anyway: the sums are then not used.
    const bool has_row = l.row < active.rows(2 * tile + i);
    at[i] = has_row || i == 0 ? stages + (ring.stage * active.per + (has_row ? l.row : 0)) * p.row_stride : at[0];
    empty[i] = ring.empty + ring.stage;
    ring.advance();
  }
  multiply_rows<Half, Weight>(sum, x, l, at[0], at[1], p.row_bytes);
  release(empty[0], l.lane);
  release(empty[1], l.lane);
}

// For a whole warp: the lane's `row`, for lanes below `rows`.
__device__ __forceinline__ void ask_for(uint64_t* full, char* to, const char* row, int rows, const FusedParams& p) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) sm90::barrier_arrive_expect(full, rows * p.row_bytes);
  __syncwarp();
  if (lane < rows) sm90::load_bytes(to + lane * p.row_stride, row, p.row_bytes, full);
}

#endif

// What a thread block leaves for the others: its share of y in the workspace, 16 bytes at a time: two columns and the
// call's seal, 64 bits that no earlier call has used. Whoever reads waits for seals, so no fence and no counter stand
// between a share and its readers (sm90/decode/fused_sum.cuh). The next call's blocks may be there already, but write
// nothing before all of this one have ended: no share is overwritten while it is read. In a quiet kernel a block stores
// no share of zeros, but its seal in a word of its own, as soon as it knows.
//
// Where other kernels have pushed the shares' lines out of L2, a look at one not yet written fetches it from memory. So
// a block may write its lines ahead ("warm"): with no seal, once the kernels ahead have ended and so nobody reads them
// any more, and by the very threads that later store the share there. Two stores of one thread to one address take
// effect in order, and 16 bytes are written and read as one: what a reader finds is an older call's seal, none, or this
// call's with its columns. "None" is 0; of all 2^64 pairs of a word and a call one has that seal.
//
// A block that waits for others needs them to run. That is counted as they start; one that has waited for long while
// others have not even started gives up, and the last block to start does the work of all that gave up. So nothing
// hangs where other work holds multiprocessors.

// One word for each workspace, as two calls under way at once have two: calls so far (32 bits), blocks of this call
// that have started (16), blocks that gave up (16). Each call adds 65,536 to the blocks, so it leaves nothing to
// reset.
constexpr int kMeetings = 65536;
constexpr int kCallShift = 32;
constexpr unsigned long long kOneBlock = 1ull << 16, kGaveUp = 1;
static __device__ unsigned long long meetings[kMeetings];

#if defined(TWELL_SM90_DEVICE)

// By the word's address, not its index: a process may have loaded this code twice.
__device__ __forceinline__ uint64_t seal_of(const unsigned long long* word, uint32_t call) {
  uint64_t v = (reinterpret_cast<uint64_t>(word) / sizeof *word << 32 | call) + 0x9e3779b97f4a7c15ull;
  v = (v ^ v >> 30) * 0xbf58476d1ce4e5b9ull;
  v = (v ^ v >> 27) * 0x94d049bb133111ebull;
  return v ^ v >> 31;
}

// What a block that starts adds.
__device__ __forceinline__ unsigned long long started_as(unsigned block, unsigned blocks) {
  return block == 0 ? kOneBlock * (65536 - (blocks - 1)) : kOneBlock;
}

// This block has started; says what the word was before. The answer takes a while: number_call() reads it later.
__device__ __forceinline__ unsigned long long check_in(const FusedParams& p) {
  return atomicAdd(meetings + p.meeting, started_as(blockIdx.x, gridDim.x));
}

// The call's seal; and, for the last block to start, how many gave up before.
__device__ __forceinline__ void number_call(const FusedParams& p, Control& c, unsigned long long before) {
  const unsigned long long after = before + started_as(blockIdx.x, gridDim.x);
  const bool last = after >> kCallShift != before >> kCallShift;
  const int gave_up = last ? static_cast<int>(before & (kOneBlock - 1)) : 0;
  if (gave_up > 0) atomicAdd(meetings + p.meeting, -(kGaveUp * gave_up));
  c.left_over = gave_up;
  c.seal = seal_of(meetings + p.meeting, static_cast<uint32_t>(before >> kCallShift));
  c.all_in = static_cast<int>(before >> kCallShift);  // until may_wait_on(): the call's number
}

// Whether all blocks have started, so that waiting ends; if not, this one has given up.
__device__ __forceinline__ bool may_wait_on(const FusedParams& p, const Control& c) {
  const unsigned long long before = atomicAdd(meetings + p.meeting, kGaveUp);
  const bool all = static_cast<int>(before >> kCallShift) != c.all_in;
  if (all) atomicAdd(meetings + p.meeting, -kGaveUp);
  return all;
}

__device__ __forceinline__ void store_sealed(uint4* to, float a, float b, uint64_t seal) {
  asm volatile(
      "{\n\t.reg .b64 v;\n\t.reg .b128 w;\n\tmov.b64 v, {%1, %2};\n\tmov.b128 w, {v, %3};\n\t"
      "st.relaxed.gpu.global.b128 [%0], w;\n\t}" ::"l"(to),
      "f"(a), "f"(b), "l"(seal)
      : "memory");
}

__device__ __forceinline__ void store_silence(uint64_t* to, uint64_t seal) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(seal) : "memory");
}

__device__ __forceinline__ uint64_t load_silence(const uint64_t* from) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}

struct Sealed {
  uint64_t columns, seal;
};

// Where `wanted`; else `v` stays.
__device__ __forceinline__ void load_sealed(Sealed& v, const uint4* from, bool wanted) {
  asm volatile(
      "{\n\t.reg .pred p;\n\t.reg .b128 w;\n\tsetp.ne.b32 p, %3, 0;\n\tmov.b128 w, {%0, %1};\n\t"
      "@p ld.relaxed.gpu.global.b128 w, [%2];\n\tmov.b128 {%0, %1}, w;\n\t}"
      : "+l"(v.columns), "+l"(v.seal)
      : "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
}

// Where a thread's columns of token `token` lie in its block's share: four times two, `hidden / kThreadColumns` apart.
__device__ __forceinline__ uint4* share_of(const FusedParams& p, int token) {
  return p.shares + (blockIdx.x * p.tokens + token) * (p.hidden / 2) + threadIdx.x;
}

__device__ __forceinline__ void store_share(const FusedParams& p, int token, const float (&y)[kThreadColumns],
                                            uint64_t seal) {
  const int threads = p.hidden / kThreadColumns;
  if (threadIdx.x >= threads) return;
#pragma unroll
  for (int i = 0; i < kThreadColumns / 2; ++i) {
    store_sealed(share_of(p, token) + i * threads, y[2 * i], y[2 * i + 1], seal);
  }
}

__device__ __forceinline__ void warm_share(const FusedParams& p) {
  constexpr uint64_t kNoSeal = 0;
  const float none[kThreadColumns] = {};
#pragma unroll 1
  for (int t = 0; t < p.tokens; ++t) store_share(p, t, none, kNoSeal);
}

#endif

}  // namespace twell::decoding::fused
