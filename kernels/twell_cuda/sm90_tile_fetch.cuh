// Products over the hidden size: the warpgroup that fetches.
#pragma once

#include "sm90_tiles.cuh"

namespace twell::sm90::tiles {

template <typename Epilogue>
__device__ __forceinline__ void fetch(const Arguments& a, const CUtensorMap* token_map, const CUtensorMap* row_map,
                                      Control& c, uint8_t* shared, Ring ring) {
  using T = typename Epilogue::Element;
  constexpr int kRows = kFetchers / 8, kShare = kMaxNeurons / kRows;
  const Active& active = a.chunk.active;
  const int thread = threadIdx.x, steps = (a.hidden + kDepth - 1) / kDepth, items = c.first_item[active.blocks];
  // Eight threads copy 128 bytes of a row; every kRows-th row is theirs.
  const int row = thread / 8, chunk = thread % 8, bytes = stage_bytes(c.tile);
  const uint32_t stages = smem_address(shared), place = kTokenBytes + row * 128 + ((chunk ^ (row & 7)) << 4);
  const T* rows = static_cast<const T*>(a.rows);
  // The list of the tile after this one is under way while this one is copied.
  const auto request = [&](const Item& item, int list) {
    const uint32_t list_bytes = (item.count * 2 + 15) / 16 * 16;
    barrier_arrive_expect(c.listed + list, list_bytes);
    load_bytes(c.neurons[list], active.neurons + static_cast<int64_t>(item.block) * active.row + item.first, list_bytes,
               c.listed + list);
  };
  if (static_cast<int>(blockIdx.x) >= items) return;
  Item item = item_at(blockIdx.x, 0, c);
  if (thread == 0) request(item, 0);
  int tiles = 0;
  for (int index = blockIdx.x; index < items; index += gridDim.x, ++tiles) {
    const int next_index = index + gridDim.x, groups = (item.count + 63) / 64;
    const Item next = next_index < items ? item_at(next_index, item.block, c) : item;
    if (thread == 0 && next_index < items) request(next, (tiles + 1) % kLists);
    const uint16_t* list = c.neurons[tiles % kLists];
    barrier_wait(c.listed + tiles % kLists, tiles / kLists & 1);
    const int lowest = list[0];
    const bool neighbours = item.count % kBoxRows == 0 && list[item.count - 1] - lowest == item.count - 1;
    int neurons[kShare];  // rows past the last repeat it: what they give is not kept
#pragma unroll
    for (int i = 0; i < kShare; ++i) neurons[i] = list[min(row + kRows * i, item.count - 1)];
    for (int step = 0; step < steps; ++step, ring.advance()) {
      ring.wait_empty();
      uint64_t* full = ring.full + ring.stage;
      if (thread == 0) {
        uint8_t* stage = shared + ring.stage * bytes;
        barrier_arrive_expect(full, kTokenBytes + (neighbours ? item.count * kDepth * 2 : 0));
        load_box(stage, token_map, step * kDepth, item.block * kBlockTokens, full);
        for (int n = 0; neighbours && n < item.count; n += kBoxRows) {
          load_box(stage + kTokenBytes + n * kDepth * 2, row_map, step * kDepth, lowest + n, full);
        }
      }
      if (neighbours) {
        barrier_arrive(full);
        continue;
      }
      const uint32_t to = stages + ring.stage * bytes + place;
      const int column = step * kDepth + chunk * 8;
      const bool inside = column < a.hidden;
      const T* from = rows + (inside ? column : 0);
#pragma unroll
      for (int g = 0; g < kMaxNeurons / 64; ++g) {
        if (g < groups) {
#pragma unroll
          for (int i = 64 / kRows * g; i < 64 / kRows * (g + 1); ++i) {
            copy_16(to + i * kRows * 128, from + static_cast<int64_t>(neurons[i]) * a.hidden, inside);
          }
        }
      }
      barrier_arrive_on_copies(full);
    }
    // Columns that the tile's end needs, of which only the active halves exist.
    const int64_t first_column = static_cast<int64_t>(item.block) * a.width * kBlockTokens + chunk * 8;
    const Counts counts = c.counts[item.block];
    const int first_end = min(item.count, counts.first_only + counts.both - item.first);
    const int second_begin = counts.first_only - item.first;
#pragma unroll
    for (int start = 0; start < kMaxNeurons; start += kTurnNeurons) {
      if (start >= item.count) break;
#pragma unroll
      for (int b = 0; b < Epilogue::kBuffers; ++b, ring.advance()) {
        const T* columns = static_cast<const T*>(a.columns[b]) + first_column;
        ring.wait_empty();
        const uint32_t to = stages + ring.stage * bytes + row * 256 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
        for (int i = 0; Epilogue::kReads && i < kTurnNeurons / kRows; ++i) {
          const int n = start + row + kRows * i;
          const T* column = columns + static_cast<int64_t>(neurons[start / kRows + i]) * kBlockTokens;
          if (n < first_end) copy_16(to + i * kRows * 256, column);
          if (n >= second_begin && n < item.count) copy_16(to + i * kRows * 256 + 128, column + kHalfTokens);
        }
        if (thread == 0) barrier_arrive(ring.full + ring.stage);
        barrier_arrive_on_copies(ring.full + ring.stage);
      }
    }
    item = next;
  }
}

}  // namespace twell::sm90::tiles
