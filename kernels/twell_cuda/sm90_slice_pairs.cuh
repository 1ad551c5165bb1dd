// Products over neurons whose columns exist only as pairs in a State: the warpgroup that fetches rows with cp.async,
// and meanwhile puts the columns together in shared memory.
#pragma once

#include <type_traits>

#include "sm90_slice_fetch.cuh"
#include "sm90_training.h"

namespace twell::sm90::slices {

constexpr int kValueBytes = 6016;  // of a step's pairs, in shared memory; a step with more reads them where they are
constexpr int kFew = 5;            // pairs of 32 tokens, up to which a column's own lane stores them

constexpr int kPairFetchRegisters = 104, kPairMultiplyRegisters = 200;
static_assert(check_registers(kPairFetchRegisters, kPairMultiplyRegisters));

// A kept block; its place in the pools counts from the chunk's first block.
struct KeptBlock {
  Counts counts;
  uint32_t pairs, first_entry, first_pair;
};

struct PairControl {
  uint64_t full[kMaxStages], empty[kMaxStages], arrived[2];
  alignas(16) uint8_t values[2][kValueBytes];
  KeptBlock blocks[kMaxBlocks];
};
constexpr int kPairShared = 1024 + kRingBytes + kConsumerWarps * kTurnBytes + sizeof(PairControl);
static_assert(kPairShared <= 227 * 1024);
constexpr int kPairArrivals = kFetchers + kFetchers / 32;  // at `full`: each thread's copies, each warp's stores

struct PairTerm {
  const void* values;  // of the state's pairs
  const void* rows;    // (F, D)
};

template <int kTerms>
struct PairArguments {
  PairTerm terms[kTerms];
  Output out;
  State state;
  int64_t first_block;
  int blocks;
};

// The chunk's kept blocks.
struct KeptBlocks {
  int count;
  int64_t first_entry, first_pair;  // of the first of them

  // Every thread of a thread block calls it; valid after the next barrier.
  template <int kTerms>
  __device__ __forceinline__ KeptBlocks(const PairArguments<kTerms>& a, PairControl& c)
      : count(static_cast<int>(min(max(a.state.totals[0] - a.first_block, int64_t{0}), int64_t{a.blocks}))),
        first_entry(count > 0 ? a.state.blocks[a.first_block].first_entry : 0),
        first_pair(count > 0 ? a.state.blocks[a.first_block].first_pair : 0) {
    for (int b = threadIdx.x; b < count; b += kThreads) {
      const BlockState s = a.state.blocks[a.first_block + b];
      c.blocks[b] = {s.counts, s.pairs, static_cast<uint32_t>(s.first_entry - first_entry),
                     static_cast<uint32_t>(s.first_pair - first_pair)};
    }
  }
};

// 64 entries of an item's block, from `start`; `item` is past the last when there are none.
struct Step {
  int item, block, start;
  int entries;  // of the block
};

// What a thread has to know of a step before it can work on it: a lane of its group's entries. Loaded a step ahead.
struct StepEntries {
  uint4 tokens;
  int neuron;           // of the rows its warp copies
  uint32_t group_pair;  // of the block: the first of the group
  uint32_t pair, end;   // of the block: the step's
};

// Where a step's values are, from 16 bytes' border on.
struct StepValues {
  int64_t from;     // pair
  uint32_t lead;    // pairs from there to the step's first
  uint32_t bytes;   // of one term, a multiple of 16
  __device__ __forceinline__ StepValues(int64_t block_pair, const StepEntries& e) {
    const int64_t pair = block_pair + e.pair;
    lead = static_cast<uint32_t>(pair) & 7;
    from = pair - lead;
    bytes = (lead + e.end - e.pair + 7) / 8 * 16;
  }
};

template <int kTerms>
struct PairSteps {
  const PairArguments<kTerms>& a;
  PairControl& c;
  const KeptBlocks& kept;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / 2, half = warp % 2;

  __device__ __forceinline__ Step first_from(int item) const {
    for (; item < kept.count * a.out.slices; item += gridDim.x) {
      const int block = item / a.out.slices;
      const int entries = c.blocks[block].counts.all();
      if (entries > 0) return {item, block, 0, entries};
    }
    return {item, 0, 0, 0};
  }
  __device__ __forceinline__ bool exists(const Step& s) const { return s.item < kept.count * a.out.slices; }
  __device__ __forceinline__ Step after(const Step& s) const {
    if (s.start + kDepth < s.entries) return {s.item, s.block, s.start + kDepth, s.entries};
    return first_from(s.item + gridDim.x);
  }
  __device__ __forceinline__ StepEntries load(const Step& s) const {
    StepEntries e{};
    if (!exists(s)) return e;
    const KeptBlock& block = c.blocks[s.block];
    const int left = s.entries - s.start, own = group * kGroup + lane;
    const int row = lane % 16 / 4 * 16 + warp * 4 + lane % 4;
    const int64_t first = kept.first_entry + block.first_entry + s.start;
    const uint32_t* pairs = a.state.first_pairs + static_cast<uint64_t>(first) / kGroup;
    e.pair = __ldcg(pairs);
    const uint32_t middle = left > kGroup ? __ldcg(pairs + 1) : block.pairs;
    e.end = left > kDepth ? __ldcg(pairs + 2) : block.pairs;
    if (own < left) e.tokens = __ldcg(a.state.tokens + first + own);
    if (row < left) e.neuron = __ldcg(a.state.neurons + first + row);
    e.group_pair = group == 0 ? e.pair : middle;
    return e;
  }
  __device__ __forceinline__ StepValues values_of(const Step& s, const StepEntries& e) const {
    return StepValues(kept.first_pair + c.blocks[s.block].first_pair, e);
  }
  static __device__ __forceinline__ bool fit(const StepValues& v) { return v.bytes <= kValueBytes / kTerms; }
  __device__ __forceinline__ const uint16_t* global(int term, const StepValues& v) const {
    return static_cast<const uint16_t*>(a.terms[term].values) + v.from;
  }
  __device__ __forceinline__ uint16_t* shared(int term, int buffer) const {
    return reinterpret_cast<uint16_t*>(c.values[buffer] + term * (kValueBytes / kTerms));
  }

  // One thread asks for a step's values.
  __device__ __forceinline__ void request(const Step& s, const StepEntries& e, int buffer) const {
    if (!exists(s)) return;
    const StepValues v = values_of(s, e);
    const uint32_t bytes = fit(v) ? v.bytes : 0;
    barrier_arrive_expect(c.arrived + buffer, kTerms * bytes);
    if (bytes == 0) return;
#pragma unroll
    for (int t = 0; t < kTerms; ++t) load_bytes(shared(t, buffer), global(t, v), bytes, c.arrived + buffer);
  }

  // This warp's half columns, zero where there is no pair. `columns`: of the first term's stage.
  template <int kStageBytes>
  __device__ __forceinline__ void build(const Step& s, const StepEntries& e, int buffer, uint8_t* columns) const {
    if (!HalfEntries(c.blocks[s.block].counts, half).in_step(s.start)) return;
    const uint32_t low = half == 0 ? e.tokens.x : e.tokens.z, high = half == 0 ? e.tokens.y : e.tokens.w;
    const uint32_t first_half = __popc(e.tokens.x) + __popc(e.tokens.y);
    const uint32_t count = first_half + __popc(e.tokens.z) + __popc(e.tokens.w);
    uint32_t before = count;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, before, d);
      if (lane >= d) before += other;
    }
    const StepValues v = values_of(s, e);
    const uint32_t index = v.lead + e.group_pair - e.pair + before - count + (half == 0 ? 0 : first_half);

    // A lane's own half column; the swizzle turns the chunks of 16 bytes around.
    const uint32_t turned = (lane & 7) << 4;
    uint8_t* group_columns = columns + half * kPartBytes + group * kGroup * 128;
    uint8_t* column = group_columns + lane * 128;
#pragma unroll
    for (int t = 0; t < kTerms; ++t) {
#pragma unroll
      for (uint32_t chunk = 0; chunk < 128; chunk += 16) {
        *reinterpret_cast<uint4*>(column + t * kStageBytes + (chunk ^ turned)) = uint4{};
      }
    }
    const int most = fit(v) ? kFew : 0;
    const bool many = __popc(low) > most || __popc(high) > most;
    const uint16_t* low_values = shared(0, buffer) + index;
    const uint16_t* high_values = low_values + __popc(low);
    for (uint32_t l = many ? 0 : low, h = many ? 0 : high; (l | h) != 0; l &= l - 1, h &= h - 1) {
      uint16_t low_value[kTerms], high_value[kTerms];  // all loads first
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
        if (l != 0) low_value[t] = low_values[t * (kValueBytes / kTerms / 2)];
        if (h != 0) high_value[t] = high_values[t * (kValueBytes / kTerms / 2)];
      }
      ++low_values, ++high_values;
      uint8_t* low_to = column + ((__ffs(l) - 1) * 2 ^ turned);
      uint8_t* high_to = column + ((__ffs(h) + 31) * 2 ^ turned);
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
        if (l != 0) *reinterpret_cast<uint16_t*>(low_to + t * kStageBytes) = low_value[t];
        if (h != 0) *reinterpret_cast<uint16_t*>(high_to + t * kStageBytes) = high_value[t];
      }
    }
    // The others by the whole warp, a lane two tokens; two at a time, the last alone twice.
    __syncwarp();
    const uint64_t tokens = low | static_cast<uint64_t>(high) << 32;
    const uint16_t* values[kTerms];
#pragma unroll
    for (int t = 0; t < kTerms; ++t) values[t] = fit(v) ? shared(t, buffer) : global(t, v);
    for (uint32_t rest = __ballot_sync(~0u, many); rest != 0;) {
      uint32_t words[2][kTerms];
      int entry[2];
      entry[0] = __ffs(rest) - 1;
      rest &= rest - 1;
      entry[1] = rest != 0 ? __ffs(rest) - 1 : entry[0];
      rest &= rest - 1;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint64_t all = __shfl_sync(~0u, tokens, entry[i]), own = all >> (2 * lane);
        const uint32_t at = __shfl_sync(~0u, index, entry[i]) + __popcll(all & ((uint64_t{1} << (2 * lane)) - 1));
#pragma unroll
        for (int t = 0; t < kTerms; ++t) {
          const uint32_t first = own & 1 ? values[t][at] : 0, second = own & 2 ? values[t][at + (own & 1)] : 0;
          words[i][t] = first | second << 16;
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int t = 0; t < kTerms; ++t) {
          const uint32_t to = entry[i] * 128 + (lane * 4 ^ (entry[i] & 7) << 4);
          *reinterpret_cast<uint32_t*>(group_columns + t * kStageBytes + to) = words[i][t];
        }
      }
    }
  }
};

template <typename T, int kTerms, int kHidden>
__device__ __forceinline__ void fetch_pairs(const PairArguments<kTerms>& a, PairControl& c, const KeptBlocks& kept,
                                            uint8_t* shared, Ring ring) {
  constexpr int kRows = kFetchers / 8, kBytes = Shape<kHidden>::kStageBytes;
  static_assert(kRows == 16 && Shape<kHidden>::kStages % kTerms == 0);  // a step's stages are neighbours
  // Eight threads copy 128 bytes; every kRows-th row is theirs.
  const int lane = threadIdx.x % 32, row = threadIdx.x / 8, chunk = threadIdx.x % 8;
  const uint32_t place = smem_address(shared) + 2 * kPartBytes + row * 128 + ((chunk ^ (row & 7)) << 4);
  const PairSteps<kTerms> steps{a, c, kept};
  Step step = steps.first_from(blockIdx.x);
  StepEntries entries = steps.load(step);
  if (threadIdx.x == 0) steps.request(step, entries, 0);
  for (uint32_t turn = 0; steps.exists(step); ++turn) {
    const Step next = steps.after(step);
    const StepEntries next_entries = steps.load(next);
    const int left = step.entries - step.start, buffer = turn & 1, stage = ring.stage;
    const int first_hidden = (step.item - step.block * a.out.slices) * kHidden;
    const int hidden_left = a.out.hidden - first_hidden;
    const bool whole = left >= kDepth && hidden_left >= kHidden;
    int64_t from[kDepth / kRows];
#pragma unroll
    for (int i = 0; i < kDepth / kRows; ++i) {
      const int64_t neuron = __shfl_sync(~0u, entries.neuron, i * 4 + lane / 8);
      from[i] = neuron * a.out.hidden + first_hidden + chunk * 8;
    }
#pragma unroll
    for (int t = 0; t < kTerms; ++t, ring.advance()) {
      ring.wait_empty();
      const T* rows = static_cast<const T*>(a.terms[t].rows);
      const auto copy = [&](auto all) {
#pragma unroll
        for (int i = 0; i < kDepth / kRows; ++i) {
#pragma unroll
          for (int part = 0; part < kHidden / 64; ++part) {  // where nothing is valid the address is not read
            copy_16(place + ring.stage * kBytes + part * kPartBytes + i * kRows * 128, rows + from[i] + part * 64,
                    all.value || (row + kRows * i < left && part * 64 + chunk * 8 < hidden_left));
          }
        }
      };
      whole ? copy(std::true_type()) : copy(std::false_type());  // most are whole: no tests
      barrier_arrive_on_copies(ring.full + ring.stage);
    }
    named_barrier<kFetchers>(1);  // everyone is done with the step before: its values may go
    if (threadIdx.x == 0) steps.request(next, next_entries, buffer ^ 1);
    barrier_wait(c.arrived + buffer, turn >> 1 & 1);
    steps.template build<kBytes>(step, entries, buffer, shared + stage * kBytes);
    __syncwarp();
    if (lane == 0) {  // the multiplying warps fence what they did not write
#pragma unroll
      for (int t = 0; t < kTerms; ++t) barrier_arrive(ring.full + stage + t);
    }
    step = next;
    entries = next_entries;
  }
}

}  // namespace twell::sm90::slices
