// What the kernels of the up projection by even tiles share: how tiles are cut, the warpgroup that fetches, and a
// tile's product.
#pragma once

#include <type_traits>

#include "sm90/common/chunk.h"
#include "sm90/common/launch.h"
#include "sm90/common/primitives.cuh"
#include "sm90/common/tiles.cuh"
#include "sm90/common/wgmma.cuh"

namespace twell::sm90::up {

// How tiles are cut: all of a block's are equally wide, so that no thread block gets the narrow ones alone.

using tiles::kBoxRows, tiles::kConsumerWarps, tiles::kDepth, tiles::kFetchers, tiles::kFetchRegisters, tiles::kLists,
    tiles::kMaxNeurons, tiles::kMaxStages, tiles::kMultiplyRegisters, tiles::kThreads, tiles::kTokenBytes,
    tiles::multiply_stage, tiles::stage_bytes;

constexpr int kRingBytes = 216 * 1024;
constexpr int kRowBytes = kDepth * 2;  // of a row in a step: kDepth 16-bit values, or twice as many of e4m3
constexpr int kUnit = 16;              // widths are multiples of it
constexpr int kTurnNeurons = 128;      // columns of relu(gate) in a stage: 256 bytes each
constexpr int kWarps = kThreads / 32;

struct Control {
  uint64_t full[kMaxStages], empty[kMaxStages], listed[kLists];
  uint16_t neurons[kLists][kMaxNeurons];
  Counts counts[kMaxBlocks];
  int first_tile[kMaxBlocks + 1];
  int costs[kWarps], widest[kWarps];
  int limit, tile;  // neurons; no tile is wider than `tile`
  bool turned;      // each block of tokens begins with another of its tiles
};
static_assert(offsetof(Control, neurons) % 16 == 0);
static_assert(sizeof(Control) >= 64 * kDepth * 2);  // products read up to 63 rows past the last stage

// Operands are of the type of activations, or e4m3 with scales (prefill_fp8.h).
template <typename E>
constexpr bool kScaled = sizeof(E) == 1;

// What the sums of a tile of e4m3 are multiplied by. One place is enough: the fetching warpgroup writes it with the
// tile's first stage of relu(gate), and in a ring of at most steps + 1 stages that one is free only once the tile
// before has given back its last.
struct ScaledControl : Control {
  alignas(16) float neuron_scales[kMaxNeurons];
  alignas(16) float token_scales[kBlockTokens];  // 0 past the last token
};
template <typename E>
using ControlOf = std::conditional_t<kScaled<E>, ScaledControl, Control>;
template <typename E>
constexpr int kShared = 1024 + kRingBytes + static_cast<int>(sizeof(ControlOf<E>));
static_assert(kShared<uint16_t> <= 227 * 1024 && kShared<uint8_t> <= 227 * 1024);

// A ring needs three stages, as two of relu(gate) may be held at once: so e4m3 has two steps at least, of which the
// second may be zeros.
template <typename E>
__device__ __forceinline__ int steps_of(int hidden) {
  constexpr int kValues = kRowBytes / static_cast<int>(sizeof(E));
  const int steps = (hidden + kValues - 1) / kValues;
  return kScaled<E> ? max(steps, 2) : steps;
}
template <typename E>
__device__ __forceinline__ int stages_of(const Control& c, int hidden) {
  const int stages = min(kMaxStages, kRingBytes / stage_bytes(c.tile));
  return kScaled<E> ? min(stages, steps_of<E>(hidden) + 1) : stages;
}

struct Item {
  int block, first, count, width;  // `count` of the block's active neurons, from its `first` on; at most its `width`
};

// A warp is done with a stage.
__device__ __forceinline__ void release(const Ring& ring, int stage) {
  if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + stage);
}

__device__ __forceinline__ int tiles_of(int neurons, int limit) { return (neurons + limit - 1) / limit; }
__device__ __forceinline__ int width_of(int neurons, int limit) {
  const int tiles = max(tiles_of(neurons, limit), 1);
  return (neurons + tiles * kUnit - 1) / (tiles * kUnit) * kUnit;
}

// The limit that takes the least time, a warp for each, and each block's first tile. Counts are there.
__device__ __forceinline__ void make_plan(Control& c, int blocks, bool turned) {
  static_assert(kMaxNeurons - kUnit * (kWarps - 1) >= 64);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own_limit = kMaxNeurons - kUnit * warp;
  const int thread_blocks = gridDim.x;
  int tiles = 0, widest = 0;
  for (int b = lane; b < blocks; b += 32) {
    const int neurons = c.counts[b].all();
    tiles += tiles_of(neurons, own_limit);
    widest = max(widest, width_of(neurons, own_limit));
  }
  tiles = __reduce_add_sync(~0u, tiles);
  widest = __reduce_max_sync(~0u, widest);
  if (lane == 0) {
    c.costs[warp] =
        (tiles + thread_blocks - 1) / thread_blocks * (widest + 96);  // x's share does not shrink with the tile
    c.widest[warp] = widest;
  }
  __syncthreads();
  int best = 0;
  for (int w = 1; w < kWarps; ++w) {
    if (c.costs[w] < c.costs[best]) best = w;
  }
  if (warp == 0) {
    const int limit = kMaxNeurons - kUnit * best;
    if (lane == 0) c.limit = limit, c.tile = c.widest[best], c.turned = turned;
    int total = 0;
    for (int start = 0; start < blocks; start += 32) {
      const int own = start + lane < blocks ? tiles_of(c.counts[start + lane].all(), limit) : 0;
      int sum = own;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += other;
      }
      if (start + lane < blocks) c.first_tile[start + lane] = total + sum - own;
      total += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) c.first_tile[blocks] = total;
  }
  __syncthreads();
}

// Tiles come in ascending order: `block` is where the one before was. Called by whole warps.
__device__ __forceinline__ Item item_at(int tile, int block, int blocks, const Control& c) {
  for (;; block += 32) {
    const bool ends_later = c.first_tile[min(block + 1 + static_cast<int>(threadIdx.x % 32), blocks)] > tile;
    const uint32_t later = __ballot_sync(~0u, ends_later);
    if (later == 0) continue;
    block += __ffs(static_cast<int>(later)) - 1;
    break;
  }
  const int all = c.counts[block].all(), width = width_of(all, c.limit);
  // Tiles that both halves activate take longest: without a turn, the same thread block could get them of every block.
  int index = tile - c.first_tile[block];
  if (c.turned) index = (index + block) % tiles_of(all, c.limit);
  const int first = index * width;
  return {block, first, max(min(width, all - first), 0), width};
}

// Whether the tile's list ascends without a gap; it ascends within each class of neurons.
__device__ __forceinline__ bool are_neighbours(const uint16_t* list, const Item& item, const Counts& counts) {
  const int borders[2] = {counts.first_only - item.first, counts.first_only + counts.both - item.first};
  for (const int border : borders) {
    if (border > 0 && border < item.count) return false;
  }
  return item.count > 0 && item.count % kBoxRows == 0 && list[item.count - 1] - list[0] == item.count - 1;
}

// From so many blocks of tokens on, each thread block has so many tiles that storing by lines and turning pay, and
// batches of copies do not (LOG.md).
constexpr int kManyBlocks = 64;

struct UpArguments {
  const void* up;
  const void* bias;
  Active active;
  int hidden, width;
  bool turned;
};

// Of e4m3 operands besides.
struct ScaledUpArguments : UpArguments {
  int row_bytes;               // from row to row of Wu, a multiple of 16
  int tokens;                  // of the chunk
  const float* neuron_scales;  // (F)
  const float* token_scales;   // (tokens)
};
template <typename E>
using ArgumentsOf = std::conditional_t<kScaled<E>, ScaledUpArguments, UpArguments>;

// From row to row of Wu, in its values.
__device__ __forceinline__ int row_stride(const UpArguments& a) { return a.hidden; }
__device__ __forceinline__ int row_stride(const ScaledUpArguments& a) { return a.row_bytes; }

// The scales of a tile's sums, by the fetching warpgroup; there with the next stage that its threads fill.
__device__ __forceinline__ void fetch_scales(const ScaledUpArguments& a, const Item& item, const uint16_t* list,
                                             ScaledControl& c) {
#pragma unroll
  for (int i = 0; i < kMaxNeurons / kFetchers; ++i) {
    const int n = threadIdx.x + i * kFetchers;
    if (n < item.count) copy_4(smem_address(c.neuron_scales + n), a.neuron_scales + list[n], true);
  }
  static_assert(kFetchers == kBlockTokens);
  const int token = item.block * kBlockTokens + threadIdx.x;
  const bool inside = token < a.tokens;
  copy_4(smem_address(c.token_scales + threadIdx.x), a.token_scales + (inside ? token : 0), inside);
}

// kMany: rows of Wu are copied one by one, else in batches whose addresses lie in registers before their first copy:
// one by one, each copy waits for branches and until the copy before has read its address.
//
// T is the type of relu(gate), E of x and Wu.
template <typename T, bool kMany, typename E = T>
__device__ __forceinline__ void fetch(const ArgumentsOf<E>& a, const CUtensorMap* x_map, const CUtensorMap* up_map,
                                      ControlOf<E>& c, uint8_t* shared, Ring ring) {
  constexpr int kDepth = kRowBytes / int{sizeof(E)}, kPiece = 16 / int{sizeof(E)};  // values of 128 and of 16 bytes
  constexpr int kRows = kFetchers / 8, kShare = kMaxNeurons / kRows, kBatch = 4;
  static_assert(kShare % kBatch == 0);
  const int thread = threadIdx.x, steps = steps_of<E>(a.hidden), blocks = a.active.blocks;
  const int all_tiles = c.first_tile[blocks], stride = gridDim.x;
  // Eight threads copy 128 bytes of a row of Wu; every kRows-th row is theirs.
  const int row = thread / 8, chunk = thread % 8, bytes = stage_bytes(c.tile);
  const uint32_t stages = smem_address(shared), place = kTokenBytes + row * 128 + ((chunk ^ (row & 7)) << 4);
  const auto request = [&](const Item& item, int list) {
    const uint32_t list_bytes = (item.count * 2 + 15) / 16 * 16;
    barrier_arrive_expect(c.listed + list, list_bytes);
    if (list_bytes == 0) return;
    load_bytes(c.neurons[list], a.active.neurons + static_cast<int64_t>(item.block) * a.active.row + item.first,
               list_bytes, c.listed + list);
  };
  int index = blockIdx.x, tiles = 0;
  if (index >= all_tiles) return;
  Item item = item_at(index, 0, blocks, c);
  if (thread == 0) request(item, 0);
  for (; index < all_tiles; index += stride, ++tiles) {
    const uint16_t* list = c.neurons[tiles % kLists];
    barrier_wait(c.listed + tiles % kLists, tiles / kLists & 1);
    const int lowest = list[0];
    const bool neighbours = are_neighbours(list, item, c.counts[item.block]);
    uint32_t rows[kShare];  // neurons, or where they begin in 16 bytes; rows past the last repeat it: they are not kept
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      rows[i] = list[max(min(row + kRows * i, item.count - 1), 0)];
      if constexpr (!kMany) rows[i] *= row_stride(a) / kPiece;
    }
    Item next = item;
    for (int step = 0; step < steps; ++step, ring.advance()) {
      ring.wait_empty();
      uint64_t* full = ring.full + ring.stage;
      if (thread == 0) {
        uint8_t* stage = shared + ring.stage * bytes;
        barrier_arrive_expect(full, kTokenBytes + (neighbours ? item.count * kRowBytes : 0));
        load_box(stage, x_map, step * kDepth, item.block * kBlockTokens, full);
        for (int n = 0; neighbours && n < item.count; n += kBoxRows) {
          load_box(stage + kTokenBytes + n * kRowBytes, up_map, step * kDepth, lowest + n, full);
        }
      }
      if (neighbours) {
        barrier_arrive(full);
      } else {
        const uint32_t to = stages + ring.stage * bytes + place;
        if constexpr (kMany) {
          const int column = step * kDepth + chunk * kPiece;
          const bool inside = column < a.hidden;
          const E* from = static_cast<const E*>(a.up) + (inside ? column : 0);
#pragma unroll
          for (int i = 0; i < kShare; ++i) {
            if (kRows * i < item.count) {
              copy_16(to + i * kRows * 128, from + static_cast<int64_t>(rows[i]) * row_stride(a), inside);
            }
          }
        } else {
          const uint32_t eighth = step * (kRowBytes / 16) + chunk, eighths = a.hidden / kPiece;
          const bool inside = eighth < eighths;
          const uint32_t added = inside ? eighth : 0;
#pragma unroll
          for (int first = 0; first < kShare; first += kBatch) {
            if (kRows * first >= item.count) break;
            const uint4* batch[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
              batch[i] = static_cast<const uint4*>(a.up) + (rows[first + i] + added);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
              const int at = kRows * (first + i);
              copy_16_if(at, item.count - row, to + at * 128, batch[i], inside);
            }
          }
        }
        barrier_arrive_on_copies(full);
      }
      if (step == min(2, steps - 1) && index + stride < all_tiles) {  // the next tile's list has the other steps' time
        next = item_at(index + stride, item.block, blocks, c);
        if (thread == 0) request(next, (tiles + 1) % kLists);
      }
    }
    // Columns of relu(gate), of which only the active halves exist.
    const T* columns =
        static_cast<const T*>(a.active.columns) + static_cast<int64_t>(item.block) * a.width * kBlockTokens + chunk * 8;
    const Counts counts = c.counts[item.block];
#pragma unroll
    for (int start = 0; start < kMaxNeurons; start += kTurnNeurons) {
      if (start >= item.width) break;
      ring.wait_empty();
      if constexpr (kScaled<E>) {
        if (start == 0) fetch_scales(a, item, list, c);
      }
      const uint32_t to = stages + ring.stage * bytes + row * 256 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
      for (int i = 0; i < kTurnNeurons / kRows; ++i) {
        const int n = start + row + kRows * i, at = item.first + n;
        const int neuron = kMany ? static_cast<int>(rows[start / kRows + i]) : list[max(min(n, item.count - 1), 0)];
        const T* column = columns + static_cast<int64_t>(neuron) * kBlockTokens;
        if (n < item.count && at < counts.first_only + counts.both) copy_16(to + i * kRows * 256, column);
        if (n < item.count && at >= counts.first_only) copy_16(to + i * kRows * 256 + 128, column + kHalfTokens);
      }
      if (thread == 0) barrier_arrive(ring.full + ring.stage);
      barrier_arrive_on_copies(ring.full + ring.stage);
      ring.advance();
    }
    item = next;
  }
}

// The warps of one half of a block's tokens meet.
__device__ __forceinline__ void wait_for_half(int warpgroup) {
  if (warpgroup == 0) {
    named_barrier<128>(1);
  } else {
    named_barrier<128>(2);
  }
}

// A whole product of operands of type E. Where the next stage is not there yet, this one's is waited for, so that it is
// free sooner.
template <typename E, int N>
__device__ __forceinline__ void multiply_tile(float* sum, Ring& ring, uint32_t stages, int bytes, int skipped,
                                              int steps, int warpgroup) {
  bool held = false;  // the stage before
  for (int step = 0; step < steps; ++step, ring.advance()) {
    ring.wait_full();
    if constexpr (N == 0) {
      __syncwarp();  // nobody's lanes may still wait for what is released
      release(ring, ring.stage);
    } else {
      multiply_stage<E, N>(sum, stages + ring.stage * bytes, skipped, step, warpgroup);
      wgmma_wait<1>();
      if (held) release(ring, ring.previous());
      held = true;
      if (!__any_sync(~0u, ring.next_is_full())) {
        wgmma_wait<0>();
        release(ring, ring.stage);
        held = false;
      }
    }
  }
  if constexpr (N > 0) {
    wgmma_wait<0>();
    if (held) release(ring, ring.previous());
  }
}

}  // namespace twell::sm90::up
