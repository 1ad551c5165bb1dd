// What the thread blocks of sm90_few_gate_up.cu do with a tile: shared memory, rings, products, the activation.
//
// Four warpgroups share out a product: each takes every fourth step of 64 hidden units, and then a share of the columns
// of their sums. Loops over steps stay rolled: these kernels are short, and instructions that are not in the cache cost
// more than they save.
#pragma once

#include <type_traits>

#include "sm90_few.cuh"

namespace twell::decoding::few {

constexpr int kWarpgroups = 4;  // multiplying warpgroups
constexpr int kMultipliers = kWarpgroups * 128, kFetchers = 128;  // threads; then a warp for boxes of x
constexpr int kThreads = kMultipliers + kFetchers + 32;
constexpr int kMaxStages = 32;
constexpr int kTileBarrier = 1, kListBarrier = 2, kSumBarrier = 3;  // named
// Of shared memory; with what the down kernel takes, both fit in a multiprocessor for kNeurons up to 48.
constexpr int kXBytes = 64 * 1024, kWeightBytes = 72 * 1024;

struct FewParams : GateUpParams {
  CUtensorMap x_map, gate_map, up_map;
  int groups;  // tokens in eights: 1, 2, 4 or 8
  Trace trace;
};

template <int kNeurons>
struct Control {
  uint64_t x_full[kMaxStages], x_empty[kMaxStages], box_full[kMaxStages], box_empty[kMaxStages];
  uint64_t copy_full[kMaxStages], copy_empty[kMaxStages];
  uint32_t active[(kNeurons + 31) / 32];
  float gate_bias[kNeurons], up_bias[kNeurons];
  uint16_t list[kNeurons];  // active neurons in ascending order, then the others
};

// Numbers of a row of relu(gate): 8 rows then fall into different banks.
template <int kNeurons>
constexpr int kGateRow = kNeurons + 4;

template <int kNeurons>
constexpr int kShared = 1024 + kXBytes + kWeightBytes + kRows * kGateRow<kNeurons> * 4 +
                        static_cast<int>(sizeof(Control<kNeurons>));

#if defined(TWELL_SM90_DEVICE)

using sm90::Ring;

__device__ __forceinline__ Ring ring_at(Ring ring, int position) {
  ring.stage = position % ring.stages;
  ring.phase = position / ring.stages & 1;
  return ring;
}

// How many stages fit. A multiple of the warpgroups, so that each stage is always the same one's: another could be there
// a whole turn too early, and a barrier's parity would not tell.
__device__ __forceinline__ int stages_in(int bytes, uint32_t stage) {
  return min(kMaxStages, bytes / static_cast<int>(stage) / kWarpgroups * kWarpgroups);
}

// By no more than there are stages.
__device__ __forceinline__ void advance(Ring& ring, int count) {
  ring.stage += count;
  if (ring.stage >= ring.stages) {
    ring.stage -= ring.stages;
    ring.phase ^= 1;
  }
}

// What a warpgroup leaves for the others to add: eight columns' sums of its 128 threads, from each of three warpgroups.
constexpr uint32_t kBoundBytes = 128 * 16;
constexpr uint32_t kSlotsBytes = (kWarpgroups - 1) * kBoundBytes;
static_assert(64 / 8 * kSlotsBytes <= kWeightBytes);

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
    return group + kWarpgroups * i < kBounds && token / 16 * 16 < tokens;
  }
  __device__ __forceinline__ int first(int i) const { return 8 * (group + kWarpgroups * i) + column; }
};

// One operand of a product: stages of rows, from position `begin` of their ring on.
struct Operand {
  Ring ring;
  uint32_t base, stage_bytes;
  int begin;
};

// x times kColumns rows. The stages of `rows` are overwritten.
template <typename Half, int kColumns>
__device__ __forceinline__ Sums<kColumns> multiply(Operand x, Operand rows, int steps, bool copied, int tokens) {
  Sums<kColumns> own;
  const int thread = threadIdx.x % 128;
  const bool releases = threadIdx.x % 32 == 0;
  Ring x_ring = ring_at(x.ring, x.begin + own.group), ring = ring_at(rows.ring, rows.begin + own.group);
  float sum[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) sum[i] = 0.f;
  const auto add = [&](auto count) {  // steps
    constexpr int kCount = decltype(count)::value;
    int x_stages[kCount], stages[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x_stages[i] = x_ring.stage, stages[i] = ring.stage;
      ring.wait_full();
      x_ring.wait_full();
      advance(x_ring, kWarpgroups);
      advance(ring, kWarpgroups);
    }
    if (copied) sm90::fence_async_proxy();  // cp.async wrote, tensor cores read
    sm90::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t a = x.base + x_stages[i] * x.stage_bytes, b = rows.base + stages[i] * rows.stage_bytes;
#pragma unroll
      for (int k = 0; k < kStepBytes / 32; ++k) {
        sm90::Wgmma<Half, kColumns, 0, 0>::multiply(sum, sm90::matrix_descriptor(a + k * 32, 16),
                                                    sm90::matrix_descriptor(b + k * 32, 16), 1);
      }
    }
    sm90::wgmma_commit();
    sm90::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!releases) continue;
      sm90::barrier_arrive(x_ring.empty + x_stages[i]);
      sm90::barrier_arrive(ring.empty + stages[i]);
    }
  };
  int step = own.group;
  if constexpr (kColumns <= 48) {  // with more sums the compiler would serialize the products
#pragma unroll 1
    for (; step + kWarpgroups < steps; step += 2 * kWarpgroups) add(std::integral_constant<int, 2>{});
  }
#pragma unroll 1
  for (; step < steps; step += kWarpgroups) add(std::integral_constant<int, 1>{});
  sm90::named_barrier<kMultipliers>(kSumBarrier);  // the rows are free
  const bool has_tokens = own.token / 16 * 16 < tokens;
  const uint32_t exchange = rows.base + thread * 16;
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
#pragma unroll
    for (int s = 0; s < kWarpgroups - 1; ++s) {
      const uint4 v =
          sm90::load_shared_16(exchange + (own.group + kWarpgroups * i) * kSlotsBytes + s * kBoundBytes);
      own.values[i][0] += __uint_as_float(v.x), own.values[i][1] += __uint_as_float(v.y);
      own.values[i][2] += __uint_as_float(v.z), own.values[i][3] += __uint_as_float(v.w);
    }
  }
  return own;
}

// Boxes of steps `begin` to `end`.
__device__ __forceinline__ void load_boxes(Ring& ring, uint8_t* stages, uint32_t stage, const CUtensorMap* map, int row,
                                           int begin, int end) {
#pragma unroll 1
  for (int step = begin; step < end; ++step, ring.advance()) {
    ring.wait_empty();
    sm90::barrier_arrive_expect(ring.full + ring.stage, stage);
    sm90::load_box(stages + ring.stage * stage, map, step * (kStepBytes / 2), row, ring.full + ring.stage);
  }
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
  __device__ __forceinline__ uint32_t word(int index) const { return index == 0 ? words[0] : words[kWords - 1]; }
  // Where neuron n stands in the list.
  __device__ __forceinline__ int place(int n) const {
    if (boxes) return n;
    const int before = (n >= 32 ? __popc(words[0]) : 0) + __popc(word(n / 32) & ((1u << n % 32) - 1));
    return word(n / 32) >> n % 32 & 1 ? before : count + n - before;
  }
};

// Rows of Wu that stand first in the list. Each warp takes every fourth step.
template <int kNeurons>
__device__ __forceinline__ void copy_rows(Ring ring, uint32_t stages, uint32_t stage, const FewParams& p,
                                          const Control<kNeurons>& c, int first, int rows, int steps) {
  constexpr int kRowsEach = (kNeurons * 3 / 4 + 3) / 4;
  const int warp = (threadIdx.x - kMultipliers) / 32, row = threadIdx.x % 32 / 8, piece = threadIdx.x % 8;
  ring = ring_at(ring, warp);
  const char* from[kRowsEach];
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const int neuron = first + (row + 4 * i < rows ? c.list[row + 4 * i] : 0);
    from[i] = p.up + static_cast<int64_t>(neuron) * p.row_bytes + piece * 16;
  }
#pragma unroll 1
  for (int step = warp; step < steps; step += kFetchers / 32) {
    ring.wait_empty();
    const uint32_t to = stages + ring.stage * stage, byte = step * kStepBytes;
    const bool inside = byte + piece * 16 < p.row_bytes;
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const int r = row + 4 * i;
      if (4 * i >= rows) break;
      if (r >= rows) continue;
      sm90::copy_16(to + r * kStepBytes + ((piece ^ (r & 7)) << 4), inside ? from[i] + byte : p.up, inside);
    }
    sm90::barrier_arrive_on_copies(ring.full + ring.stage);
    advance(ring, kFetchers / 32);
  }
}

// relu(sum + bias) into shared memory; which neurons are active.
template <int kNeurons>
__device__ __forceinline__ void activate_tile(const Sums<kNeurons>& sums, Control<kNeurons>& c, float* gate, int tokens,
                                              int inside) {
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
    }
    float* const to = gate + sums.token * kGateRow<kNeurons> + n;
    *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
    *reinterpret_cast<float2*>(to + 8 * kGateRow<kNeurons>) = make_float2(v[2], v[3]);
    bits = __reduce_or_sync(~0u, bits);
    if (threadIdx.x % 32 == 0 && bits != 0) atomicOr(c.active + i, bits);
  }
}

// h = relu(gate) * up, or relu(gate) itself, of the neurons that stand first in the list, into rows of 64 tokens.
template <typename Half, int kColumns, int kNeurons>
__device__ __forceinline__ void leave_products(const Sums<kColumns>& up, uint8_t* rows, const Control<kNeurons>& c,
                                               const float* gate, int tokens, bool gated) {
#pragma unroll
  for (int i = 0; i < up.kOwn; ++i) {
    if (!up.has(i, tokens)) continue;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = up.first(i) + e % 2, token = up.token + e / 2 * 8, n = c.list[row];
      const float g = gate[token * kGateRow<kNeurons> + n];
      const float h = gated && g != 0.f ? g * (up.values[i][e] + c.up_bias[n]) : g;
      *reinterpret_cast<Half*>(rows + row * 128 + ((token / 8 ^ (row & 7)) << 4) + token % 8 * 2) = Half(h);
    }
  }
}

#endif

}  // namespace twell::decoding::few
