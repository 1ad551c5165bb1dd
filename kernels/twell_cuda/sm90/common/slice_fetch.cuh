// Products over neurons: what their fetching and multiplying warpgroups share, and the warpgroup that fetches.
#pragma once

#include <cstddef>
#include <type_traits>

#include "common/quantized.cuh"
#include "sm90/common/chunk.h"
#include "sm90/common/primitives.cuh"
#include "sm90/common/store.cuh"

namespace twell::sm90::slices {

constexpr int kFetchers = 128, kThreads = kFetchers + 256, kConsumerWarps = 8, kDepth = 64;
constexpr int kPartBytes = 64 * kDepth * 2;  // 64 tokens or hidden units x 64 neurons; of bytes 128 hidden units
constexpr int kRingBytes = 4 * 6 * kPartBytes, kMaxStages = 8;
constexpr int kListed = 2048;           // neurons in shared memory at a time

constexpr int kFetchRegisters = 72, kMultiplyRegisters = 216;
static_assert(check_registers(kFetchRegisters, kMultiplyRegisters));

template <typename Weight, int kHidden>
struct Shape {
  static constexpr int kPartHidden = 128 / sizeof(Weight), kParts = kHidden / kPartHidden;
  static constexpr int kStageBytes = (2 + kParts) * kPartBytes;
  static constexpr int kStages = kRingBytes / kStageBytes < kMaxStages ? kRingBytes / kStageBytes : kMaxStages;
};

struct Control {
  uint64_t full[kMaxStages], empty[kMaxStages], listed[2];
  uint16_t neurons[2][kListed];
  Counts counts[kMaxBlocks];
};
constexpr int kShared = 1024 + kRingBytes + kConsumerWarps * kTurnBytes + sizeof(Control);
static_assert(kShared <= 227 * 1024);
static_assert(offsetof(Control, neurons) % 16 == 0);

// A half block's entries are [begin, end) of the list; steps without any of them are passed over.
struct HalfEntries {
  int begin, end;
  __device__ __forceinline__ HalfEntries(const Counts& counts, int half)
      : begin(half == 0 ? 0 : counts.first_only), end(half == 0 ? counts.first_only + counts.both : counts.all()) {}
  __device__ __forceinline__ bool in_step(int start) const { return start + kDepth > begin && start < end; }
};

struct Term {
  const void* columns;  // (block, F, 2 halves, 64)
  const void* rows;     // (F, D)
};

// What becomes of a chunk's sums.
struct Output {
  const void* bias;  // (D), or null
  void* y;           // (tokens, D)
  int64_t tokens;    // of the chunk
  int hidden, slices;
};

// The same of 8-bit rows.
struct ScaledOutput : Output {
  const float* scales;  // (D)
};
template <typename Weight>
using OutputOf = std::conditional_t<kScaled<Weight>, ScaledOutput, Output>;

// y = bias + the sum of all terms.
template <int kTerms, typename Out = Output>
struct Arguments {
  Term terms[kTerms];
  Out out;
  Chunk chunk;
  int width;
};

template <int kTerms>
struct Maps {
  CUtensorMap columns[kTerms], rows[kTerms];
};

// Part of a tile's list of neurons; `item` is past the last when there is none.
struct Window {
  int item, start;
};

// Where lists are fetched ahead of the copies that need them.
struct Lists {
  const Active& active;
  Control& c;
  int slices, items, window = 0;
  uint32_t phases = 0;  // a bit for each of the two buffers

  __device__ __forceinline__ Lists(const Active& of, int slices_of_block, Control& control)
      : active(of), c(control), slices(slices_of_block), items(of.blocks * slices_of_block) {}

  __device__ __forceinline__ Window first_from(int item) const {
    while (item < items && c.counts[item / slices].all() == 0) item += gridDim.x;
    return {item, 0};
  }
  __device__ __forceinline__ Window after(Window w) const {
    if (w.start + kListed < c.counts[w.item / slices].all()) return {w.item, w.start + kListed};
    return first_from(w.item + gridDim.x);
  }
  __device__ __forceinline__ void request(Window w, int buffer) {
    if (w.item >= items) return;
    const int block = w.item / slices, count = min(kListed, c.counts[block].all() - w.start);
    const uint32_t bytes = (count * 2 + 15) / 16 * 16;
    barrier_arrive_expect(c.listed + buffer, bytes);
    load_bytes(c.neurons[buffer], active.neurons + static_cast<int64_t>(block) * active.row + w.start, bytes,
               c.listed + buffer);
  }
  // The list of `w`, whose request is under way; asks for the next.
  __device__ __forceinline__ const uint16_t* open(Window w) {
    named_barrier<kFetchers>(1);  // everyone is done with the other buffer
    const int buffer = window++ & 1;
    if (threadIdx.x == 0) request(after(w), buffer ^ 1);
    barrier_wait(c.listed + buffer, phases >> buffer & 1);
    phases ^= 1u << buffer;
    return c.neurons[buffer];
  }
};

// Columns are of type T, rows of Weight.
template <typename T, typename Weight, int kTerms, int kHidden, typename Out>
__device__ __forceinline__ void fetch(const Arguments<kTerms, Out>& a, const Maps<kTerms>& maps, Control& c,
                                      uint8_t* shared, Ring ring) {
  using S = Shape<Weight, kHidden>;
  constexpr int kRows = kFetchers / 8, kBytes = S::kStageBytes, kCopied = 16 / sizeof(Weight);
  // Eight threads copy 128 bytes; every kRows-th row is theirs.
  const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
  const uint32_t stages = smem_address(shared), place = row * 128 + ((chunk ^ (row & 7)) << 4);
  Lists lists(a.chunk.active, a.out.slices, c);
  Window w = lists.first_from(blockIdx.x);
  if (threadIdx.x == 0) lists.request(w, 0);
  for (; w.item < lists.items; w = lists.after(w)) {
    const uint16_t* neurons = lists.open(w);
    const int block = w.item / a.out.slices, first_hidden = w.item % a.out.slices * kHidden;
    const Counts counts = c.counts[block];
    const int first_end = counts.first_only + counts.both, listed = min(kListed, counts.all() - w.start);
    const int hidden_left = a.out.hidden - first_hidden;
    const int64_t first_column = static_cast<int64_t>(block) * a.width * kBlockTokens + chunk * 8;
    for (int start = 0; start < listed; start += kDepth) {
      // 64 neighbours that both halves activate.
      const int lowest = neurons[start], at = w.start + start;
      const bool neighbours = at >= counts.first_only && at + kDepth <= first_end && start + kDepth <= listed &&
                              neurons[start + kDepth - 1] - lowest == kDepth - 1;
#pragma unroll
      for (int t = 0; t < kTerms; ++t, ring.advance()) {
        ring.wait_empty();
        uint64_t* full = ring.full + ring.stage;
        if (neighbours) {
          if (threadIdx.x == 0) {
            barrier_arrive_expect(full, kBytes);
            uint8_t* stage = shared + ring.stage * kBytes;
            for (int half = 0; half < 2; ++half) {
              load_box(stage + half * kPartBytes, maps.columns + t, half * 64, block * a.width + lowest, full);
            }
            for (int part = 0; part < S::kParts; ++part) {
              load_box(stage + (2 + part) * kPartBytes, maps.rows + t, first_hidden + part * S::kPartHidden, lowest,
                       full);
            }
          } else {
            barrier_arrive(full);
          }
          continue;
        }
        const uint32_t to = stages + ring.stage * kBytes + place;
        const T* columns = static_cast<const T*>(a.terms[t].columns) + first_column;
        const Weight* rows = static_cast<const Weight*>(a.terms[t].rows) + first_hidden + chunk * kCopied;
#pragma unroll
        for (int i = 0; i < kDepth / kRows; ++i) {
          const int n = start + row + kRows * i;
          const bool valid = n < listed;
          const int neuron = valid ? neurons[n] : 0;
          const T* column = columns + static_cast<int64_t>(neuron) * kBlockTokens;
          const Weight* from = rows + static_cast<int64_t>(neuron) * a.out.hidden;
          copy_16(to + i * kRows * 128, column, valid && w.start + n < first_end);
          copy_16(to + kPartBytes + i * kRows * 128, column + 64, valid && w.start + n >= counts.first_only);
#pragma unroll
          for (int part = 0; part < S::kParts; ++part) {  // where nothing is valid the address is not read
            copy_16(to + (2 + part) * kPartBytes + i * kRows * 128, from + part * S::kPartHidden,
                    valid && part * S::kPartHidden + chunk * kCopied < hidden_left);
          }
        }
        barrier_arrive_on_copies(full);
      }
    }
  }
}

}  // namespace twell::sm90::slices
