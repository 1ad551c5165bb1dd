// What a thread block of sm90/mid/down.cu lists and brings in: its active neurons, their columns of h, their rows of Wd.
//
// Masks are there long before columns of h. So where the first kernel's blocks have 64 tokens, this one's list them
// before it has ended, and ask for rows of Wd; that is a guess, since only the end of that kernel makes its writes
// visible. Then they look again, while columns are on their way, and start anew where a mask has changed.
#pragma once

#include "sm90/common/prefix_sum.cuh"
#include "sm90/common/primitives.cuh"
#include "sm90/common/store.cuh"
#include "sm90/mid/mid.h"

namespace twell::sm90::mid_down {

constexpr int kDepth = 64, kMaxStages = 6;
constexpr int kPartBytes = 64 * kDepth * 2;  // 64 tokens or hidden units x 64 neurons
constexpr int kListed = 2048;                // neurons in shared memory at a time
constexpr int kAll = 1;                      // named barrier

struct Control {
  uint64_t full[kMaxStages], empty[kMaxStages];
  int warp_counts[16];
  uint16_t list[kListed];
};

template <int kHidden>
struct Shape {
  static constexpr int kWarpgroups = kHidden / 128 + (kHidden < 128), kColumns = kHidden / kWarpgroups;
  static constexpr int kMultipliers = 128 * kWarpgroups, kFetchers = kHidden == 64 ? 128 : 256;
  static constexpr int kThreads = kMultipliers + kFetchers;
  static constexpr int kStageBytes = kPartBytes + kHidden * kDepth * 2;
  static constexpr int kStages = kHidden == 256 ? 5 : kHidden == 128 ? 6 : 4;
  static constexpr int kShared =
      1024 + kStages * kStageBytes + kMultipliers / 32 * kTurnBytes + static_cast<int>(sizeof(Control));
  // For 64 columns, registers and shared memory that the first kernel leaves.
  static constexpr int kBlocks = kHidden == 64 ? 4 : 1;
  static_assert(kShared <= 227 * 1024);
};

struct Arguments {
  Active active;
  const void *rows, *bias;  // (F, D); (D), or null
  void* y;                  // (T, D)
  int64_t tokens;
  int hidden, width, slices;
  bool guesses;
  MidTrace trace;
};

// What another kernel may be writing.
__device__ __forceinline__ uint32_t load_mask(const uint32_t* mask) {
  uint32_t word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(mask) : "memory");
  return word;
}

// The half block's active neurons, found by all threads: each looks at neighbouring words of the mask.
template <int kThreads>
struct Neurons {
  const uint32_t* masks;
  int first_word, last_word;
  uint32_t first_mask;
  int before;  // active neurons of earlier threads
  int total;

  __device__ __forceinline__ Neurons(const Active& active, int width, Control& c, int half_block)
      : masks(active.masks + static_cast<int64_t>(half_block) * active.words) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int each = (active.words + kThreads - 1) / kThreads;
    first_word = min(thread * each, active.words);
    last_word = min(first_word + each, active.words);
    first_mask = first_word < last_word ? load_mask(masks + first_word) : 0;
    const int left = width - 32 * first_word;  // a guess must not name neurons past the last
    if (left < 32) first_mask &= left > 0 ? (1u << left) - 1 : 0;
    int sum = __popc(first_mask);
#pragma unroll 1
    for (int w = first_word + 1; w < last_word; ++w) sum += __popc(__ldcg(masks + w));
    const ThreadSums sums = sum_threads<kThreads>(sum, warp, lane, c.warp_counts, kAll);
    before = sums.before;
    total = sums.all;
  }

  __device__ __forceinline__ bool changed() const {
    return first_word < last_word && load_mask(masks + first_word) != first_mask;
  }

  // Neurons `from` to `from` + kListed of the active ones, in ascending order.
  __device__ __forceinline__ void list(Control& c, int from) const {
    if (from > 0) named_barrier<kThreads>(kAll);  // those before are not needed any more
    const int last = min(from + kListed, total);
    int at = before;
    uint32_t mask = first_mask;
#pragma unroll 1
    for (int w = first_word; w < last_word && at < last;) {
#pragma unroll 1
      for (; mask != 0; mask &= mask - 1, ++at) {
        const int neuron = w * 32 + __ffs(static_cast<int>(mask)) - 1;
        if (at >= from && at < last) c.list[at - from] = static_cast<uint16_t>(neuron);
      }
      if (++w < last_word) mask = __ldcg(masks + w);
    }
    named_barrier<kThreads>(kAll);
  }
};

// By the warps that gather: eight threads copy 128 bytes; past the last of the `listed` neurons, zeros. Neurons are looked
// up a step ahead, and a full step asks of no neuron whether it is one: that is a quarter of the loop's instructions.
template <typename T, int kHidden>
struct Fetcher {
  using S = Shape<kHidden>;
  static constexpr int kRows = S::kFetchers / 8;
  const Control& c;
  const char *columns, *rows;
  uint32_t stages, place, row_bytes;
  int row, chunk, hidden_left;
  uint32_t neurons[kDepth / kRows];  // of a step; past the last, any

  __device__ __forceinline__ Fetcher(const Arguments& a, const Control& control, uint32_t first_stage, int half_block,
                                     int first_hidden)
      : c(control) {
    const int thread = threadIdx.x - S::kMultipliers;
    row = thread / 8, chunk = thread % 8;
    stages = first_stage, place = row * 128 + ((chunk ^ (row & 7)) << 4), row_bytes = 2 * a.hidden;
    columns = reinterpret_cast<const char*>(static_cast<const T*>(a.active.columns) +
                                            static_cast<int64_t>(half_block / 2) * a.width * kBlockTokens +
                                            half_block % 2 * kHalfTokens + chunk * 8);
    rows = reinterpret_cast<const char*>(static_cast<const T*>(a.rows) + first_hidden + chunk * 8);
    hidden_left = a.hidden - first_hidden;
  }
  __device__ __forceinline__ void look_up(int start, int listed) {
#pragma unroll
    for (int i = 0; i < kDepth / kRows; ++i) {
      const int n = start + row + kRows * i;
      neurons[i] = n < listed ? c.list[n] : 0;
    }
  }
  // Of the neurons looked up, the first `left`; kFull where that is all of them.
  template <bool kFull>
  __device__ __forceinline__ void copy_columns(int stage, int left) const {
    const uint32_t to = stages + stage * S::kStageBytes + place;
#pragma unroll
    for (int i = 0; i < kDepth / kRows; ++i) {
      copy_16(to + i * kRows * 128, columns + uint64_t{neurons[i]} * (2 * kBlockTokens),
              kFull || row + kRows * i < left);
    }
  }
  template <bool kFull>
  __device__ __forceinline__ void copy_rows(int stage, int left) const {
    const uint32_t to = stages + stage * S::kStageBytes + place;
#pragma unroll
    for (int i = 0; i < kDepth / kRows; ++i) {
      const char* const from = rows + uint64_t{neurons[i]} * row_bytes;
#pragma unroll
      for (int part = 0; part < kHidden / 64; ++part) {  // where nothing is valid the address is not read
        copy_16(to + (1 + part) * kPartBytes + i * kRows * 128, from + part * 128,
                (kFull || row + kRows * i < left) && part * 64 + chunk * 8 < hidden_left);
      }
    }
  }

  // The first steps' rows, then their columns.
  __device__ __forceinline__ void ahead(int listed, bool of_columns) {
    for (int start = 0, s = 0; start < listed && s < S::kStages; start += kDepth, ++s) {
      look_up(start, listed);
      of_columns ? copy_columns<false>(s, listed - start) : copy_rows<false>(s, listed - start);
    }
  }
  // All of them; copies of the first `ready` neurons are on their way.
  __device__ __forceinline__ void run(Ring& ring, int listed, int ready) {
    look_up(ready, listed);
#pragma unroll 1
    for (int start = 0; start < listed; start += kDepth, ring.advance()) {
      ring.wait_empty();
      if (start >= ready && start + kDepth <= listed) {
        copy_columns<true>(ring.stage, kDepth);
        copy_rows<true>(ring.stage, kDepth);
      } else if (start >= ready) {
        copy_columns<false>(ring.stage, listed - start);
        copy_rows<false>(ring.stage, listed - start);
      }
      barrier_arrive_on_copies(ring.full + ring.stage);
      if (start >= ready) look_up(start + kDepth, listed);
    }
  }
};

}  // namespace twell::sm90::mid_down
