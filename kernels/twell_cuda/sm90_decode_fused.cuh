// What Hopper's fused decode kernel (sm90_decode_fused.cu) is made of: parameters, the order in which rows come,
// products over rows in shared memory, timestamps.
#pragma once

#include <type_traits>

#include "decode_gate.cuh"
#include "sm90_primitives.cuh"

namespace twell::decoding::fused {

constexpr int kThreads = kDecodeThreads;
constexpr int kTiles = 3;      // tiles of two stages' rows whose sums a warp holds at once
constexpr int kStageRows = 8;  // at most
constexpr int kMaxStages = 8;
constexpr int kMaxTiles = 64;  // of a thread block's neurons
constexpr int kSteps = 8;      // of a stage
constexpr uint32_t kPieceBytes = 64;                           // 32 consecutive k
constexpr uint32_t kStepBytes = kDecodeWarps * kPieceBytes;  // a piece for each warp
constexpr uint32_t kChunkBytes = kSteps * kStepBytes;        // of a row in a stage
constexpr int kChunkColumns = kChunkBytes / 2, kThreadColumns = kChunkColumns / kThreads;
static_assert(kThreadColumns == 8, "a thread reads 16 bytes of a row");

// With this macro each thread block notes when it reaches each phase; decode_check.cu prints them.
#if defined(TWELL_FUSED_TRACE)
constexpr int kPhases = 12, kTracedBlocks = 160;
inline uint64_t* trace = nullptr;  // (calls so far, kTracedBlocks, kPhases), advanced by each launch
#endif

enum Phase {
  kStarted, kWeights, kCallBefore, kTokensThere, kGateSums, kListed, kUpSums, kDown, kGiven, kTaken, kStored
};

struct Trace {
#if defined(TWELL_FUSED_TRACE)
  uint64_t* times = nullptr;
  static Trace next() {
    Trace t{trace};
    if (trace != nullptr) trace += kTracedBlocks * kPhases;
    return t;
  }
  __device__ __forceinline__ void mark(Phase phase) const {
    if (times == nullptr || threadIdx.x != 0 || blockIdx.x >= kTracedBlocks) return;
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    times[blockIdx.x * kPhases + phase] = now;
  }
#else
  static Trace next() { return {}; }
  __device__ __forceinline__ void mark(Phase) const {}
#endif
};

struct FusedParams {
  const char* x;
  const char* gate;
  const char* up;  // null: no gate
  const char* down;
  const void* b_gate;
  const void* b_up;
  const void* b_down;
  uint4* partials;  // (thread blocks, tokens, D / 2): two columns of a block's share of y, and the call's seal
  void* y;
  int tokens, hidden, width;
  uint32_t row_bytes;   // of x, gate, up and down
  uint32_t row_stride;  // in shared memory: 64 modulo 128, so that 16-byte reads of two rows meet no bank twice
  int stages;           // of gate rows
  int window;           // stages on their way before x is there: more would queue in front of the call before
  int ahead;            // stages asked for in L2 besides
  uint32_t slots_at, rows_at, values_at, masks_at, list_at;  // in shared memory; gate rows lie from 0 on
  int row_places;                                   // of rows of up and down, from rows_at on
  int units;                                        // pairs of columns that a thread block adds up: a power of two
  uint32_t meeting;
  int patience;
  Trace trace;
};

struct Control {
  uint64_t full[2][kMaxStages], empty[2][kMaxStages];  // gate; up and down
  uint64_t seal;
  int left_over;  // thread blocks that gave up waiting
  int all_in;
};

struct Place {
  int row, rows, chunk;
};

// The order in which rows come: in passes of kTiles tiles; in a pass chunk by chunk of k; in a chunk tile by tile, two
// stages of `per` rows each (the second may be empty).
struct Walk {
  int rows, per, chunks, tiles;
  __device__ __forceinline__ Walk(int row_count, int stage_rows, int chunk_count)
      : rows(row_count), per(stage_rows), chunks(chunk_count), tiles((row_count + 2 * per - 1) / (2 * per)) {}
  __device__ __forceinline__ int stages() const { return 2 * tiles * chunks; }
  __device__ __forceinline__ int tile_rows(int tile) const { return min(2 * per, rows - tile * 2 * per); }
  __device__ __forceinline__ Place at(int stage) const {
    if (chunks == 1) return {stage * per, max(0, min(per, rows - stage * per)), 0};
    const int pass = stage / (2 * kTiles * chunks);
    stage -= pass * 2 * kTiles * chunks;
    const int halves = 2 * min(kTiles, tiles - pass * kTiles);
    const int chunk = stage / halves;
    const int row = (pass * 2 * kTiles + stage - chunk * halves) * per;
    return {row, max(0, min(per, rows - row)), chunk};
  }
};

#if defined(TWELL_SM90_DEVICE)

// What a lane needs to find its operands: within each 32 consecutive k, lane q of four takes 8 consecutive ones.
struct Lane {
  int warp, lane, row;  // row: lane / 4, of eight; of x the token
  uint32_t offset;      // of its 16 bytes in a step
};

__device__ __forceinline__ Lane this_lane() {
  Lane l;
  l.warp = threadIdx.x / 32, l.lane = threadIdx.x % 32;
  l.row = l.lane / 4;
  l.offset = l.warp * kPieceBytes + l.lane % 4 * 16;
  return l;
}

__device__ __forceinline__ uint32_t chunk_bytes(const FusedParams& p, int chunk) {
  return min(kChunkBytes, p.row_bytes - chunk * kChunkBytes);
}

__device__ __forceinline__ void load_x(uint4 (&x)[kSteps], const Lane& l, const FusedParams& p, int chunk) {
  const uint32_t start = chunk * kChunkBytes + l.offset;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const uint32_t k = start + i * kStepBytes;
    load_tokens_once(x[i], p.x + l.row * p.row_bytes + k, l.row < p.tokens && k < p.row_bytes);
  }
}

// Weights, past L1. A strong load: the compiler moves weak ones behind the wait for the kernel ahead.
__device__ __forceinline__ void load_now(uint4& v, const char* p, bool valid) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t"
      "mov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t"
      "@p ld.relaxed.gpu.global.L1::no_allocate.v4.b32 {%0,%1,%2,%3}, [%4];\n\t}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(p), "r"(static_cast<int>(valid))
      : "memory");
}

// One step of k of a tile. Products that follow each other in one sum wait for each other: two sums, joined at the end.
template <typename Half>
__device__ __forceinline__ void multiply_step(float (&part)[2][4], const uint4& low, const uint4& high,
                                              const uint4& x) {
  mma<Half>(part[0], low.x, high.x, low.y, high.y, x.x, x.y);
  mma<Half>(part[1], low.z, high.z, low.w, high.w, x.z, x.w);
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

// sum += the next two stages' rows (`rows` of them, `per` in the first) x^T over this warp's pieces of k.
template <typename Half>
__device__ __forceinline__ void multiply_tile(float (&sum)[4], const uint4 (&x)[kSteps], const Lane& l,
                                              sm90::Ring& ring, const char* stages, int per, int rows, uint32_t bytes,
                                              uint32_t row_stride) {
  const char* at[2];
  uint64_t* empty[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    ring.wait_full();
    // Where a stage has no such row, a row that another lane reads anyway: the sums are then not used.
    const bool has_row = l.row < min(per, rows - i * per);
    at[i] = has_row || i == 0 ? stages + (ring.stage * per + (has_row ? l.row : 0)) * row_stride + l.offset : at[0];
    empty[i] = ring.empty + ring.stage;
    ring.advance();
  }
  float part[2][4] = {};
  const auto multiply = [&](auto whole) {  // without branches loads run ahead of products
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const uint32_t k = i * kStepBytes;
      if (!whole.value && k + l.warp * kPieceBytes >= bytes) break;  // the same for the whole warp
      const bool inside = whole.value || k + l.offset < bytes;
      uint4 low{}, high{};
      if (inside) low = *reinterpret_cast<const uint4*>(at[0] + k);
      if (inside) high = *reinterpret_cast<const uint4*>(at[1] + k);
      multiply_step<Half>(part, low, high, x[i]);
    }
  };
  if (bytes == kChunkBytes) {
    multiply(std::true_type{});
  } else {
    multiply(std::false_type{});
  }
  join(sum, part);
  release(empty[0], l.lane);
  release(empty[1], l.lane);
}

// Rows of a stage; `row` is the lane's, for lanes below `rows`. For a whole warp.
__device__ __forceinline__ void fill_stage(sm90::Ring& ring, char* stages, int per, const char* row, int rows,
                                           uint32_t bytes, uint32_t row_stride) {
  const int lane = threadIdx.x % 32;
  ring.wait_empty();
  uint64_t* const full = ring.full + ring.stage;
  if (lane == 0) sm90::barrier_arrive_expect(full, rows * bytes);
  __syncwarp();
  if (lane < rows) sm90::load_bytes(stages + (ring.stage * per + lane) * row_stride, row, bytes, full);
  ring.advance();
}

__device__ __forceinline__ void prefetch_row(const char* row, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(row), "r"(bytes) : "memory");
}

// Where the sums of `kPairs` pairs of tokens lie: (tile, 8 rows, kPairs) of four: row, token 0, 1; row + 8, the same.
template <int kPairs>
__device__ __forceinline__ int element(int tile, int row, int token) {
  return ((tile * 8 + row % 8) * kPairs + token / 2) * 4 + row / 8 * 2 + token % 2;
}

// Every warp leaves its sums in a slot of its own, once all of them are done with what lay there.
template <int kPairs>
__device__ __forceinline__ void leave_sums(float4* slots, const float (&sum)[kTiles][4], int tiles, const Lane& l) {
  const int pair = l.lane % 4;
  float4* const mine = slots + l.warp * (kTiles * 8 * kPairs) + l.row * kPairs + pair;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    if (i < tiles && pair < kPairs) mine[i * 8 * kPairs] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
  }
  __syncthreads();
}

#endif

}  // namespace twell::decoding::fused
