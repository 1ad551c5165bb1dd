// What the kernels of the up projection by even tiles share: the warpgroup that fetches, and a tile's product.
#pragma once

#include "sm90/common/launch.h"
#include "sm90/prefill/up_tiles.cuh"

namespace twell::sm90::up {

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
