// Products over the hidden size: each block's 128 tokens by the rows of the neurons that any of them activates.
//
// A persistent thread block of three warpgroups an SM. The first fetches: tokens by bulk tensor copies, gathered rows
// by cp.async (by bulk copies where they are neighbours). The other two multiply half of the tokens each, by those of
// the tile's neurons that it activates. Where the lists come from and what becomes of the sums is the Job's, made of
// (Given, Arguments, Own&) in each thread:
//
//   Element     bf16 or fp16
//   Given, Own  what it needs to know, from the host; its part of shared memory
//   kLow        the neurons that a half multiplies start at a multiple of it
//   init(Own&)  by one thread, before anything else
//   idle()      whether there is nothing to do; called after wait_for_previous(), as all below
//   count(c), list(block)           the blocks' counts, to c.counts; where a block's neurons are
//   kAside, fetch_aside(item, ...)  whether and what else the fetching threads copy by cp.async, late in a tile
//   fetch_end(item, ...)            their part in the end of a tile
//   End(job, ...)  the multiplying warps' end of a tile: prepare() runs beside the products of its last steps, and at
//     any rate after fetch_aside's copies have landed; apply(sum, ring) follows
#pragma once

#include "sm90/common/launch.h"
#include "sm90/common/tiles.cuh"

namespace twell::sm90::tiles {

// The warpgroup that fetches.

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
    int neurons[kFetchShare];       // rows past the last repeat it: what they give is not kept
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

template <typename Job>
__device__ __forceinline__ void multiply(const Arguments& a, const Job& job, Control& c, uint8_t* shared, Ring ring) {
  using T = typename Job::Element;
  constexpr int kLow = Job::kLow;
  const int steps = (a.hidden + kDepth - 1) / kDepth, items = c.first_item[a.chunk.active.blocks];
  const int lane = threadIdx.x % 32;
  const int warp = (threadIdx.x - kFetchers) / 32, warpgroup = warp / 4, bytes = stage_bytes(c.tile);
  const uint32_t stages = smem_address(shared);
  int block = 0, tiles = 0;
  for (int index = blockIdx.x; index < items; index += gridDim.x, ++tiles) {
    const Item item = item_at(index, block, c);
    block = item.block;
    const Counts counts = c.counts[block];
    const int begin = warpgroup == 0 ? 0 : max(counts.first_only - item.first, 0);
    const int end = min(item.count, warpgroup == 0 ? counts.first_only + counts.both - item.first : item.count);
    const int wanted = begin / kLow * kLow, groups = max(end - wanted + 63, 0) / 64;
    const int low = min(wanted, c.tile - groups * 64);
    float sum[kMaxNeurons / 2];
    typename Job::End tile_end(job, item, {warp, lane, begin, end, groups, low}, c, tiles, stages);
    const int skipped = low * kDepth * 2;
    switch (groups) {
      case 0: multiply_tile<T, 0>(sum, ring, stages, bytes, skipped, steps, warpgroup, lane, tile_end); break;
      case 1: multiply_tile<T, 64>(sum, ring, stages, bytes, skipped, steps, warpgroup, lane, tile_end); break;
      case 2: multiply_tile<T, 128>(sum, ring, stages, bytes, skipped, steps, warpgroup, lane, tile_end); break;
      case 3: multiply_tile<T, 192>(sum, ring, stages, bytes, skipped, steps, warpgroup, lane, tile_end); break;
      default: multiply_tile<T, 256>(sum, ring, stages, bytes, skipped, steps, warpgroup, lane, tile_end); break;
    }
    tile_end.apply(sum, ring);
  }
}

template <typename Job>
__global__ void __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ CUtensorMap token_map, const __grid_constant__ CUtensorMap row_map,
                   const Arguments a, const typename Job::Given given) {
#if defined(TWELL_SM90_DEVICE)
  if (a.chunk.known_skipped()) {
    launch_dependents();
    wait_for_previous();
    return;
  }
  extern __shared__ uint8_t raw_shared[];
  uint8_t* stages = raw_shared + (-smem_address(raw_shared) & 1023);
  Shared<Job>& shared = *reinterpret_cast<Shared<Job>*>(stages + kRingBytes);
  Control& c = shared.control;
  if (threadIdx.x == 0) {
    prefetch_map(&token_map);
    prefetch_map(&row_map);
    for (int s = 0; s < kMaxStages; ++s) {
      barrier_init(c.full + s, kFetchers + 1);
      barrier_init(c.empty + s, kConsumerWarps);
    }
    for (int i = 0; i < kLists; ++i) barrier_init(c.listed + i, 1);
    Job::init(shared.own);
    fence_barrier_init();
  }
  launch_dependents();
  wait_for_previous();
  const Job job(given, a, shared.own);
  if (job.idle()) return;
  job.count(c);
  __syncthreads();
  plan(c, a.chunk.active.blocks);
  const Ring ring(c.full, c.empty, min(kMaxStages, kRingBytes / stage_bytes(c.tile)));
  if (threadIdx.x < kFetchers) {
    give_registers<kFetchRegisters>();
    fetch(a, job, &token_map, &row_map, c, stages, ring);
  } else {
    take_registers<kMultiplyRegisters>();
    multiply(a, job, c, stages, ring);
  }
#endif
}

// `tokens` is (T, D).
template <typename Job>
cudaError_t launch(const Ffn& ffn, const void* tokens, const Arguments& a, const typename Job::Given& given,
                   const Device& device, cudaStream_t stream) {
  static_assert(kSharedBytes<Job> <= 227 * 1024);
  CUtensorMap token_map, row_map;
  const auto* first = static_cast<const typename Job::Element*>(tokens) + a.chunk.first * a.hidden;
  TWELL_RETURN_IF_ERROR(make_tensor_map(&token_map, ffn.dtype, first, a.chunk.tokens, a.hidden, kBlockTokens));
  TWELL_RETURN_IF_ERROR(make_tensor_map(&row_map, ffn.dtype, a.rows, a.width, a.hidden, kBoxRows));
  return launch_kernel(product_kernel<Job>, device.sm_count, kThreads, 1, kSharedBytes<Job>, stream, token_map, row_map,
                       a, given);
}

}  // namespace twell::sm90::tiles
