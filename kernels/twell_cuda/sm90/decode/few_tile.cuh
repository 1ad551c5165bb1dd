// What the thread blocks of sm90/decode/few_gate_up.cuh do with a tile: shared memory, copies, lists, the activation.
#pragma once

#include <cstddef>
#include <type_traits>

#include "sm90/decode/few_rows.cuh"

namespace twell::decoding::few {

// A ring's stages, and where it stands as up begins, after that many. Worked out by the host, like all that takes
// divisions: the device would begin with them.
struct Stages {
  int count, after;
  uint32_t phase_after;
};
inline Stages stages_of(int count, int position) {
  return {count, position % count, static_cast<uint32_t>(position / count & 1)};
}

struct FewParams : GateUpParams {
  CUtensorMap x_map, gate_maps[2], up_maps[2];  // boxes of all rows of a larger thread block, and of the others
  int groups;       // tokens in eights: 1, 2, 4 or 8
  int octets;       // ceil(F / 8)
  int octets_each;  // of a thread block; the first `larger` have one more
  int larger;
  int steps;        // of a row
  int kept_steps;   // of x, the last ones, which lie in its ring as up begins; it takes those first, then the others
  Stages x_stages, box_stages[2];
  int first_boxes[2];      // that may be on their way before x is there
  uint8_t copy_stages[9];  // for gathered rows in eights
  Trace trace;
};

constexpr int kMaxPairs = 64;
constexpr int kBoxesAhead = 4;  // at most, of the gate's that are asked for ahead of all else
static_assert(kMaxStages % kBoxesAhead == 0);

template <int kNeurons>
struct Control {
  uint64_t x_full[kMaxStages], x_empty[kMaxStages], box_full[kMaxStages], box_empty[kMaxStages];
  uint64_t copy_full[kMaxStages], copy_empty[kMaxStages];
  uint32_t active[(kNeurons + 31) / 32];
  int pair_count;             // of a token and a neuron that it activates
  uint16_t pairs[kMaxPairs];  // 64 * token + neuron, in any order; all of them if there is room
  float gate_bias[kNeurons], up_bias[kNeurons];
  uint16_t list[kNeurons];  // active neurons in ascending order, then the others
};

// Numbers of a row of relu(gate): 8 rows then fall into different banks.
template <int kNeurons>
constexpr int kGateRow = kNeurons + 4;

// The same with the scales of 8-bit rows.
template <int kNeurons>
struct ScaledControl : Control<kNeurons> {
  float gate_scale[kNeurons], up_scale[kNeurons];
};
template <typename Weight, int kNeurons>
using ControlOf = std::conditional_t<kScaled<Weight>, ScaledControl<kNeurons>, Control<kNeurons>>;

// A thread block's shared memory: the rings of x and of weights, relu(gate) of 16 or 64 tokens, Control.
template <typename Weight, int kNeurons, bool kSixteen>
struct Shared {
  static constexpr int kGateBytes = (kSixteen ? 16 : kRows) * kGateRow<kNeurons> * 4;
  static constexpr int kRest = kGateBytes + static_cast<int>(sizeof(ControlOf<Weight, kNeurons>));
  static constexpr int kDown = down_shared(kSixteen, true, kScaled<Weight>);
  static constexpr int kBeside = (kBothShared - in_shared_units(kDown) - in_shared_units(kRest)) / 1024 * 1024;
  static constexpr int kRings = kNeurons <= kFewNeurons ? kBeside : 144 * 1024;
  static constexpr int kXRing = kXRingBytes<kScaled<Weight> && !kSixteen>;
  static constexpr int kWeightRing = kRings - kXRing;
  static constexpr int kBytes = kRings + kRest;
  static constexpr int kExchange =
      kScaled<Weight> ? kRowExchangeBytes<kNeurons, kSixteen> : kExchangeBytes<kNeurons, kSixteen>;
  static_assert(kExchange <= kWeightRing);
  static_assert(stages_in(kWeightRing, kNeurons * kRowStep<Weight>) >= kBoxesAhead);
  using Barriers = Control<kNeurons>;
  static_assert(offsetof(Barriers, x_empty) - offsetof(Barriers, x_full) == kEmptyApart);
  static_assert(offsetof(Barriers, box_empty) - offsetof(Barriers, box_full) == kEmptyApart);
  static_assert(offsetof(Barriers, copy_empty) - offsetof(Barriers, copy_full) == kEmptyApart);
};
// Gate rows that may be on their way to a thread block before x is there. Fewer make a chain of such calls up to 0.25 us
// shorter at 16 tokens, and calls between other kernels 0.7 longer.
constexpr int kWindowBytes = 84 * 1024;

#if defined(TWELL_SM90_DEVICE)

// By one thread, in a straight line: in these instructions an address is a warp's, so threads with a barrier each would
// take turns.
template <int kCount>
__device__ __forceinline__ void init_barriers(uint64_t* barriers, int arrivals) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sm90::barrier_init(barriers + i, arrivals);
  sm90::fence_barrier_init();
}

// A ring after a row's steps.
__device__ __forceinline__ Ring ring_after(Ring ring, const Stages& stages) {
  ring.stage = stages.after;
  ring.phase = stages.phase_after;
  return ring;
}

// Boxes of rows of weights, or of x, for steps `begin` to `end`: from step `first` on, after the last the others.
__device__ __forceinline__ void load_boxes(Ring& ring, uint8_t* stages, uint32_t stage, const CUtensorMap* map, int row,
                                           int begin, int end, int first = 0, int steps = 1 << 30) {
#pragma unroll 1
  for (int step = begin; step < end; ++step, ring.advance()) {
    ring.wait_empty();
    sm90::barrier_arrive_expect(ring.full + ring.stage, stage);
    const int turned = first + step < steps ? first + step : first + step - steps;
    sm90::load_box(stages + ring.stage * stage, map, turned * (kStepBytes / 2), row, ring.full + ring.stage);
  }
}

// The gate's boxes after the first `asked`. Before x is there (`x_full`) the call ahead still wants rows of Wd, which
// would queue behind a ring that is asked for at once.
__device__ __forceinline__ void load_gate_boxes(Ring& ring, uint8_t* stages, uint32_t stage, const CUtensorMap* map,
                                                int row, int steps, int asked, int boxes, uint64_t* x_full) {
  const int at_once = min(steps, ring.stages);
  const Ring first = ring;
  advance(ring, asked);
#pragma unroll 1
  for (int i = asked; i < at_once; ++i) {
    while (i >= boxes && !is_over(first.full + i - boxes) && !is_over(x_full)) __nanosleep(32);
    load_boxes(ring, stages, stage, map, row, i, i + 1);
  }
  load_boxes(ring, stages, stage, map, row, at_once, steps);
}

// What is active of a thread block's neurons, once all warps have left their masks.
template <int kNeurons>
struct Active {
  static constexpr int kWords = (kNeurons + 31) / 32;
  uint32_t words[kWords];
  int count = 0;
  int rows;    // of Wu that are read: the first of the list
  bool boxes;  // those are all rows, by boxes

  __device__ __forceinline__ Active(const Control<kNeurons>& c, int inside, bool gated) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      words[w] = c.active[w];
      count += __popc(words[w]);
    }
    boxes = gated && 4 * count > 3 * inside;
    rows = boxes ? inside : count;
  }
  // A stage for rows that are gathered has place for no more than those.
  __device__ __forceinline__ int copy_octets() const { return (max(rows, 1) + 7) / 8; }
  __device__ __forceinline__ uint32_t word(int index) const { return index == 0 ? words[0] : words[kWords - 1]; }
  __device__ __forceinline__ bool has(int n) const { return word(n / 32) >> n % 32 & 1; }
  // Where neuron n stands in the list.
  __device__ __forceinline__ int place(int n) const {
    if (boxes) return n;
    const int before = (n >= 32 ? __popc(words[0]) : 0) + __popc(word(n / 32) & ((1u << n % 32) - 1));
    return has(n) ? before : count + n - before;
  }
};

// Rows of Wu that stand first in the list, in x's order. Each warp takes every fourth step.
template <typename Weight, int kNeurons>
__device__ __forceinline__ void copy_rows(Ring ring, uint32_t stages, uint32_t stage, const FewParams& p,
                                          const Control<kNeurons>& c, int first, int rows, int steps) {
  constexpr int kPieces = kRowStep<Weight> / 16, kApart = 32 / kPieces;
  constexpr int kRowsEach = (kNeurons * 3 / 4 + kApart - 1) / kApart;
  const int warp = (threadIdx.x - kMultipliers) / 32, row = threadIdx.x % 32 / kPieces, piece = threadIdx.x % kPieces;
  advance(ring, warp);
  const char* from[kRowsEach];
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const int neuron = first + (row + kApart * i < rows ? c.list[row + kApart * i] : 0);
    from[i] = p.up + static_cast<int64_t>(neuron) * p.row_bytes + piece * 16;
  }
#pragma unroll 1
  for (int step = warp; step < steps; step += kFetchers / 32) {
    ring.wait_empty();
    const int turned = step < p.kept_steps ? step + steps - p.kept_steps : step - p.kept_steps;
    const uint32_t to = stages + ring.stage * stage, byte = turned * kRowStep<Weight>;
    const bool inside = byte + piece * 16 < p.row_bytes;
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const int r = row + kApart * i;
      if (kApart * i >= rows) break;
      if (r >= rows) continue;
      const uint32_t place = kScaled<Weight> ? narrow_at(r, piece) : r * kStepBytes + ((piece ^ (r & 7)) << 4);
      sm90::copy_16(to + place, inside ? from[i] + byte : p.up, inside);
    }
    sm90::barrier_arrive_on_copies(ring.full + ring.stage);
    advance(ring, kFetchers / 32);
  }
}

// relu(sum + bias) into shared memory; which neurons are active, and the pairs.
template <int kNeurons>
__device__ __forceinline__ void activate_tile(const Sums<kNeurons>& sums, Control<kNeurons>& c, float* gate, int tokens,
                                              int inside, bool lists_pairs) {
  const int lane = threadIdx.x % 32;
  uint32_t lanes[sums.kOwn][4] = {};  // whose values are not zero
  int found = 0;
#pragma unroll
  for (int i = 0; i < sums.kOwn; ++i) {  // 32 columns each
    if (!sums.has(i, tokens)) continue;
    const int n = sums.first(i);
    uint32_t bits = 0;
    float v[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool is_inside = n + e % 2 < inside && sums.token + e / 2 * 8 < tokens;
      v[e] = activate(sums.values[i][e], c.gate_bias[n + e % 2], is_inside);
      bits |= (v[e] != 0.f ? 1u : 0u) << ((n + e % 2) % 32);
      lanes[i][e] = __ballot_sync(~0u, v[e] != 0.f);
      found += __popc(lanes[i][e]);
    }
    float* const to = gate + sums.token * kGateRow<kNeurons> + n;
    *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
    *reinterpret_cast<float2*>(to + 8 * kGateRow<kNeurons>) = make_float2(v[2], v[3]);
    bits = __reduce_or_sync(~0u, bits);
    if (lane == 0 && bits != 0) atomicOr(c.active + i, bits);
  }
  if (!lists_pairs || found == 0) return;
  int at = lane == 0 ? atomicAdd(&c.pair_count, found) : 0;
  at = __shfl_sync(~0u, at, 0);
  if (at + found > kMaxPairs) return;
#pragma unroll
  for (int i = 0; i < sums.kOwn; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t has = lanes[i][e];
      if (has >> lane & 1) {
        c.pairs[at + __popc(has & ((1u << lane) - 1))] =
            static_cast<uint16_t>((sums.token + e / 2 * 8) * 64 + sums.first(i) + e % 2);
      }
      at += __popc(has);
    }
  }
}

// The same of a product whose rows are neurons.
template <int kNeurons, bool kSixteen>
__device__ __forceinline__ void activate_tile(const RowSums<kNeurons, kSixteen>& sums, Control<kNeurons>& c,
                                              float* gate, int tokens, int inside, bool lists_pairs) {
  uint32_t lanes[sums.kOwn][4] = {}, bits = 0;
  int found = 0;
#pragma unroll
  for (int i = 0; i < sums.kOwn; ++i) {
    if (!sums.has(i, tokens)) continue;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int n = sums.neuron(i, e), token = sums.token_at(i, e);
      const float v = activate(sums.values[i][e], c.gate_bias[n], n < inside && token < tokens);
      gate[token * kGateRow<kNeurons> + n] = v;
      bits |= (v != 0.f ? 1u : 0u) << (n % 32);
      lanes[i][e] = __ballot_sync(~0u, v != 0.f);
      found += __popc(lanes[i][e]);
    }
  }
  if (found == 0) return;
  bits = __reduce_or_sync(~0u, bits);
  if (sums.lane == 0) atomicOr(c.active + sums.tile / 2, bits);
  if (!lists_pairs) return;
  int at = sums.lane == 0 ? atomicAdd(&c.pair_count, found) : 0;
  at = __shfl_sync(~0u, at, 0);
  if (at + found > kMaxPairs) return;
#pragma unroll
  for (int i = 0; i < sums.kOwn; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t has = lanes[i][e];
      if (has >> sums.lane & 1) {
        c.pairs[at + __popc(has & ((1u << sums.lane) - 1))] =
            static_cast<uint16_t>(sums.token_at(i, e) * 64 + sums.neuron(i, e));
      }
      at += __popc(has);
    }
  }
}

// h = relu(gate) * up, or relu(gate) itself, of the neurons that stand first in the list, into rows of 64 tokens.
template <typename Half, int kNeurons, typename Own>
__device__ __forceinline__ void leave_products(const Own& up, uint8_t* rows, const Control<kNeurons>& c,
                                               const float* gate, int tokens, bool gated) {
#pragma unroll
  for (int i = 0; i < Own::kOwn; ++i) {
    if (!up.has(i, tokens)) continue;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = up.neuron(i, e), token = up.token_at(i, e), n = c.list[row];
      const float g = gate[token * kGateRow<kNeurons> + n];
      const float h = gated && g != 0.f ? g * (up.values[i][e] + c.up_bias[n]) : g;
      *reinterpret_cast<Half*>(rows + row * 128 + ((token / 8 ^ (row & 7)) << 4) + token % 8 * 2) = Half(h);
    }
  }
}

#endif

}  // namespace twell::decoding::few
