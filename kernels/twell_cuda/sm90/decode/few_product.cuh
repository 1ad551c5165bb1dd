// The product of x and rows of weights that the thread blocks of sm90/decode/few_gate_up.cuh form.
//
// Four warpgroups share it out: each takes every fourth step of 64 hidden units, and then a share of the columns of
// their sums. Loops over steps stay rolled: these kernels are short, and instructions that are not in the cache cost
// more than they save.
#pragma once

#include <type_traits>

#include "sm90/common/wgmma.cuh"
#include "sm90/decode/few.cuh"

namespace twell::decoding::few {

constexpr int kWarpgroups = 4;                                    // multiplying warpgroups
constexpr int kMultipliers = kWarpgroups * 128, kFetchers = 128;  // threads; then a warp for boxes of x
constexpr int kThreads = kMultipliers + kFetchers + 32;
constexpr int kMaxStages = 32;
constexpr int kTileBarrier = 1, kListBarrier = 2, kSumBarrier = 3, kAskedBarrier = 4;  // named
// Of shared memory, for boxes of x. For more than 16 tokens they are most of what a multiprocessor takes in, and 8-bit
// weights leave room for twelve stages, so that x comes in three turns for D = 2048 and not four.
template <bool kWide>
constexpr int kXRingBytes = (kWide ? 96 : 64) * 1024;

// How many stages fit. A multiple of the warpgroups, so that each stage is always the same one's: another could be
// there a whole turn too early, and a barrier's parity would not tell.
constexpr int stages_in(int bytes, int stage) {
  const int stages = bytes / stage / kWarpgroups * kWarpgroups;
  return stages < kMaxStages ? stages : kMaxStages;
}

// What a warpgroup leaves for the others to add: eight columns' sums of its 128 threads, from each of three warpgroups.
constexpr uint32_t kBoundBytes = 128 * 16;
constexpr uint32_t kSlotsBytes = (kWarpgroups - 1) * kBoundBytes;
// The same of 16 tokens, from each warp.
constexpr int kWarps = kMultipliers / 32;
constexpr uint32_t kWarpBytes = 32 * 16;

// What is exchanged of a product, where its rows were.
template <int kColumns, bool kSixteen>
constexpr uint32_t kExchangeBytes = kColumns / 8 * (kSixteen ? kWarps * kWarpBytes : kSlotsBytes);

#if defined(TWELL_SM90_DEVICE)

using sm90::Ring;

// By no more than there are stages.
__device__ __forceinline__ void advance(Ring& ring, int count) {
  ring.stage += count;
  if (ring.stage >= ring.stages) {
    ring.stage -= ring.stages;
    ring.phase ^= 1;
  }
}

// What a thread has of a product in the end: tokens `token` and + 8, columns 8 j + `column` and + 1 for j = `group` and
// `group` + 4.
template <int kColumns>
struct Sums {
  static constexpr int kBounds = kColumns / 8, kOwn = (kBounds + kWarpgroups - 1) / kWarpgroups;
  int group = threadIdx.x / 128;
  int token = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  int column = threadIdx.x % 4 * 2;
  float values[kOwn][4];  // (token, column), (token, column + 1), (token + 8, column), (token + 8, column + 1)

  // Whether there is a bound of columns in place i, for this warp's tokens.
  __device__ __forceinline__ bool has(int i, int tokens) const {
    return bound(i) < kBounds && token / 16 * 16 < tokens;
  }
  __device__ __forceinline__ int bound(int i) const { return group + kWarpgroups * i; }
  __device__ __forceinline__ int first(int i) const { return 8 * bound(i) + column; }
  __device__ __forceinline__ int neuron(int i, int e) const { return first(i) + e % 2; }
  __device__ __forceinline__ int token_at(int, int e) const { return token + e / 2 * 8; }
};

// Adds what others left in shared memory, one after the other.
template <int kCount>
__device__ __forceinline__ void add_slots(float (&values)[4], uint32_t slots, uint32_t stride) {
#pragma unroll(kCount <= 4 ? kCount : 4)
  for (int s = 0; s < kCount; ++s) {
    const uint4 v = sm90::load_shared_16(slots + s * stride);
    values[0] += __uint_as_float(v.x), values[1] += __uint_as_float(v.y);
    values[2] += __uint_as_float(v.z), values[3] += __uint_as_float(v.w);
  }
}

// One operand of a product: stages of rows, from where their ring stands.
struct Operand {
  Ring ring;
  uint32_t base, stage_bytes;
};

// sum += x times rows over a stage's 64 hidden units, by a warpgroup's four warps together.
template <typename Half, int kColumns>
__device__ __forceinline__ void multiply_stage(float* sum, uint32_t x, uint32_t rows) {
  sm90::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kStepBytes / 32; ++k) {
    sm90::Wgmma<Half, kColumns, 0, 0>::multiply(sum, sm90::matrix_descriptor(x + k * 32, 16),
                                                sm90::matrix_descriptor(rows + k * 32, 16), 1);
  }
  sm90::wgmma_commit();
  sm90::wgmma_wait<0>();  // at once: what is held back is not fetched
}

// The same of 16 tokens, where wgmma would read four times as many from shared memory: each warp takes 16 hidden units.
template <typename Half, int kColumns>
__device__ __forceinline__ void multiply_stage_16(float* sum, uint32_t x, uint32_t rows) {
  const int lane = threadIdx.x % 32, first_piece = threadIdx.x / 32 % 4 * 2;
  const auto at = [](uint32_t base, int row, int piece) { return base + row * 128 + ((piece ^ (row & 7)) << 4); };
  uint32_t a[4];
  load_matrices(a, at(x, lane % 16, first_piece + lane / 16));
#pragma unroll
  for (int j = 0; j < kColumns / 16; ++j) {
    uint32_t b[4];
    load_matrices(b, at(rows, 16 * j + lane / 16 * 8 + lane % 8, first_piece + lane / 8 % 2));
    mma<Half>(reinterpret_cast<float (&)[4]>(sum[8 * j]), a[0], a[1], a[2], a[3], b[0], b[1]);
    mma<Half>(reinterpret_cast<float (&)[4]>(sum[8 * j + 4]), a[0], a[1], a[2], a[3], b[2], b[3]);
  }
}

// Sums over the warpgroups.
template <int kColumns>
__device__ __forceinline__ void add_warpgroups(Sums<kColumns>& own, const float* sum, uint32_t shared, int tokens) {
  const bool has_tokens = own.token / 16 * 16 < tokens;
  const uint32_t exchange = shared + threadIdx.x % 128 * 16;
  if (has_tokens) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int slot = own.group < j % kWarpgroups ? own.group : own.group - 1;
      if (own.group != j % kWarpgroups) store_shared_16(exchange + j * kSlotsBytes + slot * kBoundBytes, sum + 4 * j);
    }
  }
  sm90::named_barrier<kMultipliers>(kSumBarrier);
#pragma unroll
  for (int i = 0; i < own.kOwn; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      uint32_t v = 0;  // by masks: registers have no index
#pragma unroll
      for (int g = 0; g < kWarpgroups && kWarpgroups * i + g < own.kBounds; ++g) {
        v |= __float_as_uint(sum[4 * (kWarpgroups * i + g) + e]) & (own.group == g ? ~0u : 0u);
      }
      own.values[i][e] = __uint_as_float(v);
    }
    if (!own.has(i, tokens)) continue;
    add_slots<kWarpgroups - 1>(own.values[i], exchange + own.bound(i) * kSlotsBytes, kBoundBytes);
  }
}

// Sums of 16 tokens over all warps.
template <int kColumns>
__device__ __forceinline__ void add_warps(Sums<kColumns>& own, const float* sum, uint32_t shared, int tokens) {
  const uint32_t exchange = shared + threadIdx.x % 32 * 16;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    store_shared_16(exchange + (j * kWarps + threadIdx.x / 32) * kWarpBytes, sum + 4 * j);
  }
  sm90::named_barrier<kMultipliers>(kSumBarrier);
#pragma unroll
  for (int i = 0; i < own.kOwn; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) own.values[i][e] = 0.f;
    if (own.has(i, tokens)) add_slots<kWarps>(own.values[i], exchange + own.bound(i) * kWarps * kWarpBytes, kWarpBytes);
  }
}

// x times kColumns rows. The stages of x are kept from the step `kept` on; `exchange`: where those of `rows` lie, which
// are overwritten.
template <typename Half, typename Weight, int kColumns, bool kSixteen, std::enable_if_t<!kScaled<Weight>, int> = 0>
__device__ __forceinline__ Sums<kColumns> multiply(Operand x, Operand rows, uint32_t exchange, int steps, int kept,
                                                   bool copied, int tokens) {
  Sums<kColumns> own;
  const bool releases = threadIdx.x % 32 == 0;
  Ring x_ring = x.ring, ring = rows.ring;
  advance(x_ring, own.group);
  advance(ring, own.group);
  float sum[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) sum[i] = 0.f;
#pragma unroll 1
  for (int step = own.group; step < steps; step += kWarpgroups) {
    ring.wait_full();
    x_ring.wait_full();
    const uint32_t x_stage = x.base + x_ring.stage * x.stage_bytes, stage = rows.base + ring.stage * rows.stage_bytes;
    if constexpr (kSixteen) {
      multiply_stage_16<Half, kColumns>(sum, x_stage, stage);
    } else {
      if (copied) sm90::fence_async_proxy();  // cp.async wrote, tensor cores read
      multiply_stage<Half, kColumns>(sum, x_stage, stage);
    }
    if (releases) {
      if (step < kept) sm90::barrier_arrive(x_ring.empty + x_ring.stage);
      sm90::barrier_arrive(ring.empty + ring.stage);
    }
    advance(x_ring, kWarpgroups);
    advance(ring, kWarpgroups);
  }
  sm90::named_barrier<kMultipliers>(kSumBarrier);  // the rows are free
  if constexpr (kSixteen) {
    add_warps(own, sum, exchange, tokens);
  } else {
    add_warpgroups(own, sum, exchange, tokens);
  }
  return own;
}

#endif

// The same of 8-bit rows.
//
// Neurons are the product's rows here and tokens its columns, as a product takes its rows from registers: bytes become
// operands there and need no second place in shared memory, nor warps that meet for it. As with 16-bit rows each of
// four warpgroups takes every fourth step.

// From a ring's full barriers to its empty ones.
constexpr uint32_t kEmptyApart = kMaxStages * sizeof(uint64_t);

// What is left for others to add: sums of 16 neurons and 8 tokens of a warp's lanes, by three of the warpgroups or, of
// up to 16 tokens, by all warps.
constexpr uint32_t kTileBytes = 32 * 16;
template <int kRowCount, bool kSixteen>
constexpr uint32_t kRowExchangeBytes =
    kRowCount / 16 * kTileBytes * (kSixteen ? 2 * kWarps : kRows / 8 * (kWarpgroups - 1));

#if defined(TWELL_SM90_DEVICE)

// What a thread has of such a product in the end: rows `row` and + 8, tokens `token` + 32 i and the next.
template <int kRowCount, bool kSixteen>
struct RowSums {
  static constexpr int kTiles = kRowCount / 16, kOwn = kSixteen ? 1 : kRows / 8 / kWarpgroups;
  int warp, lane, tile, row, token;
  float values[kOwn][4];  // (row, token), (row, token + 1), (row + 8, token), (row + 8, token + 1)

  __device__ __forceinline__ RowSums() {
    int thread;  // anew: it is not to be kept while products are formed
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    warp = thread / 32, lane = thread % 32, tile = kSixteen ? warp / 2 : tile_of(warp);
    row = 16 * tile + lane / 4, token = 8 * (kSixteen ? warp % 2 : warp / 4) + lane % 4 * 2;
  }
  // A warpgroup's warps have a tile of 16 rows each. Of three tiles a warp is left over, another one in each warpgroup:
  // a scheduler of the multiprocessor has one warp of each.
  static __device__ __forceinline__ int tile_of(int warp) { return (warp + warp / 4) % 4; }
  __device__ __forceinline__ bool has(int i, int tokens) const {
    return tile < kTiles && (token + 32 * i) / 8 * 8 < tokens;
  }
  __device__ __forceinline__ int neuron(int, int e) const { return row + e / 2 * 8; }
  __device__ __forceinline__ int token_at(int i, int e) const { return token + 32 * i + e % 2; }
  // Times a number for each row.
  template <typename Scale>
  __device__ __forceinline__ void scale(const Scale& scale) {
    if (tile >= kTiles) return;
    const float low = scale(row), high = scale(row + 8);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      values[i][0] *= low, values[i][1] *= low, values[i][2] *= high, values[i][3] *= high;
    }
  }
};

// A warpgroup's stages of a ring, every fourth from its own on. Addresses are worked out once: instructions between
// products are what up to 16 tokens take longest for.
struct Turns {
  uint32_t barriers, base, stage_bytes, stages;
  uint32_t at;  // the stage it stands at; above, the ring's phase, which is lost in products with what is even

  // `offset`: of what the lane wants in each stage.
  __device__ __forceinline__ Turns(const Operand& operand, int group, uint32_t offset)
      : barriers(smem_address(operand.ring.full)), base(operand.base + offset), stage_bytes(operand.stage_bytes) {
    Ring ring = operand.ring;
    advance(ring, group);
    stages = ring.stages, at = ring.stage | ring.phase << 31;
  }
  // Addresses are to be kept, and not worked out in each turn.
  __device__ __forceinline__ void keep() { asm volatile("" : "+r"(barriers), "+r"(base)); }
  __device__ __forceinline__ uint32_t stage() const { return base + at * stage_bytes; }
  __device__ __forceinline__ void wait() const {
    asm volatile(
        "{\n.reg .pred done;\nwait:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra wait;\n}\n" ::"r"(barriers + at * 8),
        "r"(at >> 31)
        : "memory");
  }
  __device__ __forceinline__ void release() const {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barriers + at * 8 + kEmptyApart) : "memory");
  }
  __device__ __forceinline__ void next() {
    at += kWarpgroups;
    if ((at & 0x7fffffffu) >= stages) at = (at - stages) ^ 0x80000000u;
  }
};

// Two neighbouring bytes as two values of an operand.
template <typename Half, typename Weight>
__device__ __forceinline__ uint32_t load_pair(uint32_t shared) {
  uint16_t bytes;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bytes) : "r"(shared) : "memory");
  uint32_t pair, none;
  expand<Half, Weight>(bytes, pair, none);
  return pair;
}

// sum += rows times x over a stage's 64 hidden units, by a warpgroup. `rows`: the lane's bytes in the rows' first
// piece; those of piece k lie where k meets the swizzle's two bits. Beside the sums, registers have place for the
// operands of one piece, so each product is waited for while other warpgroups go on. Rows past the last are whatever
// lies there: no one reads their sums.
template <typename Half, typename Weight>
__device__ __forceinline__ void multiply_rows_stage(float (&sum)[32], uint32_t x, uint32_t rows) {
  constexpr uint32_t kBelow = 8 * kNarrowBytes;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t from = rows ^ k << 4;
    uint32_t a[4];
    a[0] = load_pair<Half, Weight>(from), a[1] = load_pair<Half, Weight>(from + kBelow);
    a[2] = load_pair<Half, Weight>(from + 8), a[3] = load_pair<Half, Weight>(from + kBelow + 8);
    sm90::wgmma_fence();
    sm90::WgmmaOfRegisters<Half, kRows, 0>::multiply(sum, a, sm90::matrix_descriptor(x + k * 32, 16));
    sm90::wgmma_commit();
    sm90::wgmma_wait<0>();
  }
}

// The same of 16 tokens: each warp takes 16 hidden units of all rows. Of those a lane takes four neighbouring ones of
// both operands, so that one word of a row is all that it wants of it. `x`: the lane's in row lane / 4; `rows`: of row
// lane % 16, for ldmatrix.
template <typename Half, typename Weight, int kTiles>
__device__ __forceinline__ void multiply_rows_stage(float (&sum)[8 * kTiles], uint32_t x, uint32_t rows) {
  const uint2 first = load_shared_8(x), second = load_shared_8(x + 8 * kStepBytes);
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    uint32_t words[2], a[4];
    load_two_matrices(words, rows + 16 * t * kNarrowBytes);
    expand<Half, Weight>(words[0], a[0], a[2]);
    expand<Half, Weight>(words[1], a[1], a[3]);
    mma<Half>(reinterpret_cast<float (&)[4]>(sum[8 * t]), a[0], a[1], a[2], a[3], first.x, first.y);
    mma<Half>(reinterpret_cast<float (&)[4]>(sum[8 * t + 4]), a[0], a[1], a[2], a[3], second.x, second.y);
  }
}

// Sums over the warpgroups, each of which finishes every fourth eight tokens.
template <int kRowCount>
__device__ __forceinline__ void add_tiles(RowSums<kRowCount, false>& own, const float (&sum)[32], uint32_t shared,
                                          int tokens) {
  using S = RowSums<kRowCount, false>;
  constexpr uint32_t kSlot = S::kTiles * kTileBytes;
  const int group = own.warp / 4;
  const uint32_t exchange = shared + own.tile * kTileBytes + own.lane * 16;
  if (own.tile < S::kTiles) {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const int owner = j % kWarpgroups, slot = group < owner ? group : group - 1;
      if (group != owner && 8 * j < tokens) store_shared_16(exchange + (j * 3 + slot) * kSlot, sum + 4 * j);
    }
  }
  sm90::named_barrier<kMultipliers>(kSumBarrier);
#pragma unroll
  for (int i = 0; i < S::kOwn; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      uint32_t v = 0;  // by masks: registers have no index
#pragma unroll
      for (int g = 0; g < kWarpgroups; ++g) {
        v |= __float_as_uint(sum[4 * (kWarpgroups * i + g) + e]) & (group == g ? ~0u : 0u);
      }
      own.values[i][e] = __uint_as_float(v);
    }
    if (!own.has(i, tokens)) continue;
    add_slots<kWarpgroups - 1>(own.values[i], exchange + (kWarpgroups * i + group) * 3 * kSlot, kSlot);
  }
}

// The same over all warps; each finishes a tile of eight tokens, if there are as many.
template <int kRowCount>
__device__ __forceinline__ void add_tiles(RowSums<kRowCount, true>& own, const float (&sum)[kRowCount / 2],
                                          uint32_t shared, int tokens) {
  constexpr uint32_t kSlots = kWarps * kTileBytes;
  const uint32_t exchange = shared + own.lane * 16;
#pragma unroll
  for (int j = 0; j < kRowCount / 8; ++j) {
    store_shared_16(exchange + j * kSlots + own.warp * kTileBytes, sum + 4 * j);
  }
  sm90::named_barrier<kMultipliers>(kSumBarrier);
#pragma unroll
  for (int e = 0; e < 4; ++e) own.values[0][e] = 0.f;
  if (own.has(0, tokens)) add_slots<kWarps>(own.values[0], exchange + own.warp * kSlots, kTileBytes);
}

// kRowCount rows times x, as of 16-bit rows.
template <typename Half, typename Weight, int kRowCount, bool kSixteen, std::enable_if_t<kScaled<Weight>, int> = 0>
__device__ __forceinline__ RowSums<kRowCount, kSixteen> multiply(Operand x, Operand rows, uint32_t exchange, int steps,
                                                                 int kept, bool /*copied*/, int tokens) {
  constexpr int kTiles = kRowCount / 16;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / 4, piece = warp % 4;
  const int tile = RowSums<kRowCount, kSixteen>::tile_of(warp);
  const uint32_t of_x = lane / 4 * kStepBytes + (((2 * piece + lane % 4 / 2) ^ lane / 4) << 4) + lane % 2 * 8;
  const uint32_t of_row = kSixteen ? narrow_at(lane % 16, piece) : narrow_at(16 * tile + lane / 4, 0) + lane % 4 * 2;
  Turns x_at(x, group, kSixteen ? of_x : 0), rows_at(rows, group, of_row);
  if constexpr (kSixteen) x_at.keep(), rows_at.keep();
  float sum[kSixteen ? kRowCount / 2 : 32] = {};
#pragma unroll 1
  for (int step = group; step < steps; step += kWarpgroups) {
    rows_at.wait();
    x_at.wait();
    if constexpr (kSixteen) {
      multiply_rows_stage<Half, Weight, kTiles>(sum, x_at.stage(), rows_at.stage());
    } else {
      multiply_rows_stage<Half, Weight>(sum, x_at.stage(), rows_at.stage());
    }
    if (threadIdx.x % 32 == 0) {
      if (step < kept) x_at.release();
      rows_at.release();
    }
    x_at.next();
    rows_at.next();
  }
  sm90::named_barrier<kMultipliers>(kSumBarrier);  // the rows are free
  RowSums<kRowCount, kSixteen> own;
  add_tiles<kRowCount>(own, sum, exchange, tokens);
  return own;
}

#endif

}  // namespace twell::decoding::few
