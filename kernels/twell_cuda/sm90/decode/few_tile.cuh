// What the thread blocks of sm90/decode/few_gate_up.cuh do with a tile: shared memory, copies, lists, the activation,
// and up of few pairs.
#pragma once

#include <cstddef>
#include <type_traits>

#include "sm90/decode/few_product.cuh"

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
  int groups;                                   // tokens in eights: 1, 2, 4 or 8
  int octets;                                   // ceil(F / 8)
  int octets_each;                              // of a thread block; the first `larger` have one more
  int larger;
  int steps;       // of a row
  int kept_steps;  // of x, the last ones, which lie in its ring as up begins; it takes those first, then the others
  Stages x_stages, box_stages[2];
  int first_boxes[2];      // that may be on their way before x is there
  uint8_t copy_stages[9];  // for gathered rows in eights
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
  static constexpr int kXRing = kXRingBytes<(kScaled<Weight> && !kSixteen)>;
  static constexpr int kWeightRing = kRings - kXRing;
  static constexpr int kBytes = kRings + kRest;
  static constexpr int kExchange =
      kScaled<Weight> ? kRowExchangeBytes<kNeurons, kSixteen> : kExchangeBytes<kNeurons, kSixteen>;
  static_assert(kExchange <= kWeightRing);
  static constexpr int kBoxBytes = kNeurons * kRowStep<Weight>;
  static_assert(stages_in(kWeightRing, kBoxBytes) >= kBoxesAhead);
  using Barriers = Control<kNeurons>;
  static_assert(offsetof(Barriers, x_empty) - offsetof(Barriers, x_full) == kEmptyApart);
  static_assert(offsetof(Barriers, box_empty) - offsetof(Barriers, box_full) == kEmptyApart);
  static_assert(offsetof(Barriers, copy_empty) - offsetof(Barriers, copy_full) == kEmptyApart);
};
// Gate rows that may be on their way to a thread block before x is there. Fewer make a chain of such calls up to 0.25
// us shorter at 16 tokens, and calls between other kernels 0.7 longer.
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

// Up of few pairs of a neuron and a token that activates it, for which a product would read all of x again.

// Hidden units of both rows of a pair that a warp asks for at a time, and how many such steps are on their way to it,
// of this pair or of its next one.
constexpr int kPairStep = 1024, kPairSteps = 2;
template <typename Weight>
constexpr uint32_t kPairStepBytes = kPairStep * (2 + sizeof(Weight));  // weights, then x

#if defined(TWELL_SM90_DEVICE)

// Whether there are few enough. Two rows a pair are then often more bytes than the active neurons' rows and x again,
// but they come in one round or few, where a product over those waits for lists, stages and sums that meet.
template <int kNeurons>
__device__ __forceinline__ bool takes_pairs(const FewParams& p, const Control<kNeurons>& c) {
  return p.up != nullptr && c.pair_count <= kMaxPairs;
}

// Eight weights of a row as 16-bit values.
template <typename Half, typename Weight>
__device__ __forceinline__ uint4 load_eight(uint32_t shared) {
  if constexpr (kScaled<Weight>) {
    const uint2 bytes = load_shared_8(shared);
    uint4 v;
    expand<Half, Weight>(bytes.x, v.x, v.y);
    expand<Half, Weight>(bytes.y, v.z, v.w);
    return v;
  } else {
    return sm90::load_shared_16(shared);
  }
}

// A warp's product of two rows. Tensor cores multiply each lane's numbers by those of eight groups of lanes, and only
// the diagonal is looked at: still far fewer instructions than ordinary cores take. Of a lane's eight numbers words 0
// and 2 lie in a product's first rows and 1 and 3 in its last, so each half is multiplied by its own weights.
template <typename Half, typename Weight>
struct PairSum {
  float even[4] = {}, odd[4] = {};

  // A step's numbers; a lane reads what others have copied.
  __device__ __forceinline__ void add(uint32_t step) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t row = step + lane * (8 * sizeof(Weight)), x = step + kPairStep * sizeof(Weight) + lane * 16;
#pragma unroll
    for (int k = 0; k < kPairStep / 256; ++k) {
      const uint4 a = sm90::load_shared_16(x + k * 512);
      const uint4 w = load_eight<Half, Weight>(row + k * 256 * sizeof(Weight));
      mma<Half>(even, a.x, a.y, a.z, a.w, w.x, w.z);
      mma<Half>(odd, a.x, a.y, a.z, a.w, w.y, w.w);
    }
  }
  __device__ __forceinline__ float total() const {
    const int lane = threadIdx.x % 32, group = lane / 4;  // whose numbers are row and column `group` (`mma`)
    float sum = group % 2 == 0 ? even[0] + odd[2] : even[1] + odd[3];
    if (lane % 4 != group / 2) sum = 0.f;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    return sum;
  }
};

// kBytes of a row from `from` on, of which the lane copies every 32nd piece of 16; past the row's end, where `left`
// bytes are, zeros.
template <int kBytes>
__device__ __forceinline__ void copy_step(uint32_t to, const char* from, int left) {
  const int own = threadIdx.x % 32 * 16;
  to += own, from += own, left -= own;
  asm volatile("" : "+r"(to), "+l"(from));  // one address, and copies at fixed distances from it
#pragma unroll
  for (int k = 0; k < kBytes; k += 512) sm90::copy_16(to + k, from + k, k < left);
}

// relu(gate) becomes h, a pair for each warp; while it is summed the next one's rows are on their way. They come where
// the rings were: a block that takes pairs has read all that it asked for there, and asks for nothing more.
template <typename Half, typename Weight, int kNeurons>
__device__ __forceinline__ void multiply_pairs(const FewParams& p, const ControlOf<Weight, kNeurons>& c, float* gate,
                                               int first, uint32_t shared) {
  constexpr int kBytes = sizeof(Weight);
  constexpr uint32_t kStep = kPairStepBytes<Weight>;
  const int warp = threadIdx.x / 32, count = c.pair_count, hidden = static_cast<int>(p.row_bytes / kBytes);
  const uint32_t steps = shared + warp * kPairSteps * kStep;
  int asked = warp, unit = 0;  // the pair and its hidden unit that are asked for next
  const auto ask = [&](uint32_t step) {
    if (asked < count) {
      const int token = c.pairs[asked] / 64, n = c.pairs[asked] % 64, left = hidden - unit;
      const char* const row = p.up + (static_cast<int64_t>(first + n) * hidden + unit) * kBytes;
      copy_step<kPairStep * kBytes>(step, row, left * kBytes);
      copy_step<kPairStep * 2>(step + kPairStep * kBytes, p.x + (token * hidden + unit) * 2, left * 2);
      unit += kPairStep;
      if (unit >= hidden) unit = 0, asked += kWarps;
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll 1
  for (int k = 0; k < kPairSteps; ++k) ask(steps + k * kStep);
  uint32_t step = steps;
#pragma unroll 1
  for (int i = warp; i < count; i += kWarps) {
    PairSum<Half, Weight> sums;
#pragma unroll 1
    for (int summed = 0; summed < hidden; summed += kPairStep) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kPairSteps - 1) : "memory");
      __syncwarp();
      sums.add(step);
      __syncwarp();
      ask(step);
      step = 2 * steps + kStep - step;  // the other one
    }
    const int token = c.pairs[i] / 64, n = c.pairs[i] % 64;
    float sum = sums.total();
    if constexpr (kScaled<Weight>) sum *= c.up_scale[n];
    if (threadIdx.x % 32 == 0) gate[token * kGateRow<kNeurons> + n] *= sum + c.up_bias[n];
  }
}

// Active neurons' h from shared memory: a thread takes 8 tokens of a neuron.
template <typename Half, int kNeurons>
__device__ __forceinline__ void store_pairs(const FewParams& p, const Active<kNeurons>& active, const float* gate,
                                            int first) {
  const int n = threadIdx.x / 8, chunk = threadIdx.x % 8;
  if (n >= kNeurons || chunk >= p.groups || !active.has(n)) return;
  const float* const from = gate + 8 * chunk * kGateRow<kNeurons> + n;
  uint32_t h[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    h[i] = sm90::pack<Half>(from[2 * i * kGateRow<kNeurons>], from[(2 * i + 1) * kGateRow<kNeurons>]);
  }
  *reinterpret_cast<uint4*>(reinterpret_cast<char*>(p.products) +
                            (static_cast<int64_t>(first + n) * p.groups + chunk) * 16) = {h[0], h[1], h[2], h[3]};
}

#endif

}  // namespace twell::decoding::few
