// Products over the hidden size: the warpgroup that fetches.
#pragma once

#include "sm90/common/tiles.cuh"

namespace twell::sm90::tiles {

template <typename Job>
__device__ __forceinline__ void fetch(const Arguments& a, const Job& job, const CUtensorMap* token_map,
                                      const CUtensorMap* row_map, Control& c, uint8_t* shared, Ring ring) {
  const int thread = threadIdx.x, steps = (a.hidden + kDepth - 1) / kDepth, items = c.first_item[a.chunk.active.blocks];
  // Eight threads copy 128 bytes of a row; every kFetchRows-th row is theirs.
  const int row = thread / 8, chunk = thread % 8, bytes = stage_bytes(c.tile);
  const uint32_t stages = smem_address(shared), place = kTokenBytes + row * 128 + ((chunk ^ (row & 7)) << 4);
  const uint4* rows = static_cast<const uint4*>(a.rows);
  // The list of the tile after this one is under way while this one is copied.
  const auto request = [&](const Item& item, int list) {
    const uint32_t list_bytes = (item.count * 2 + 15) / 16 * 16;
    barrier_arrive_expect(c.listed + list, list_bytes);
    load_bytes(c.neurons[list], job.list(item.block) + item.first, list_bytes, c.listed + list);
  };
  if (static_cast<int>(blockIdx.x) >= items) return;
  Item item = item_at(blockIdx.x, 0, c);
  if (thread == 0) request(item, 0);
  int tiles = 0;
  for (int index = blockIdx.x; index < items; index += gridDim.x, ++tiles) {
    const int next_index = index + gridDim.x, groups = (item.count + 63) / 64;
    if (thread == 0 && next_index < items) request(item_at(next_index, item.block, c), (tiles + 1) % kLists);
    const uint16_t* list = c.neurons[tiles % kLists];
    barrier_wait(c.listed + tiles % kLists, tiles / kLists & 1);
    const int lowest = list[0];
    const bool neighbours = are_neighbours(list, item, c.counts[item.block]);
    int neurons[kFetchShare];  // rows past the last repeat it: what they give is not kept
    uint32_t offsets[kFetchShare];  // of their rows, in 16 bytes
#pragma unroll
    for (int i = 0; i < kFetchShare; ++i) {
      neurons[i] = list[min(row + kFetchRows * i, item.count - 1)];
      offsets[i] = static_cast<uint32_t>(neurons[i]) * (a.hidden / 8);
    }
    for (int step = 0; step < steps; ++step, ring.advance()) {
      ring.wait_empty();
      uint64_t* full = ring.full + ring.stage;
      if constexpr (Job::kAside) {
        if (step == aside_step(steps)) job.fetch_aside(item, list, tiles);
      }
      if (thread == 0) {
        uint8_t* stage = shared + ring.stage * bytes;
        barrier_arrive_expect(full, kTokenBytes + (neighbours ? item.count * kDepth * 2 : 0));
        load_box(stage, token_map, step * kDepth, item.block * kBlockTokens, full);
        for (int n = 0; neighbours && n < item.count; n += kBoxRows) {
          load_box(stage + kTokenBytes + n * kDepth * 2, row_map, step * kDepth, lowest + n, full);
        }
      }
      if (neighbours) {
        barrier_arrive_on_copies(full);  // those aside
        continue;
      }
      const uint32_t to = stages + ring.stage * bytes + place;
      const int eighth = step * (kDepth / 8) + chunk;
      const bool inside = eighth < a.hidden / 8;
      const uint4* from = rows + (inside ? eighth : 0);
#pragma unroll
      for (int g = 0; g < kMaxNeurons / 64; ++g) {
        if (g < groups) {
#pragma unroll
          for (int i = 64 / kFetchRows * g; i < 64 / kFetchRows * (g + 1); ++i) {
            copy_16(to + i * kFetchRows * 128, from + offsets[i], inside);
          }
        }
      }
      barrier_arrive_on_copies(full);
    }
    job.fetch_end(item, c, neurons, stages, ring);
    if (next_index < items) item = item_at(next_index, item.block, c);
  }
}

}  // namespace twell::sm90::tiles
