// Up projection over active neurons: h = relu(gate) * (x Wu^T + bu), for each block of 128 tokens and the neurons that
// any of them activates; the others' columns of h would be zero. h takes the place of relu(gate).
//
// A persistent thread block of three warpgroups an SM. The first fetches: x by bulk tensor copies, gathered rows of Wu
// by cp.async (by bulk copies where they are neighbours), and at the end of a tile its columns of relu(gate), through
// the same ring of stages. The other two multiply half of the tokens each; of a tile that one half alone activates,
// half of the neurons each.

#include "sm90_launch.h"
#include "sm90_mid.h"
#include "sm90_up_classes.cuh"

namespace twell::sm90 {
namespace {

using namespace up_classes;

struct UpArguments {
  const void* up;
  const void* bias;
  Active active;
  int hidden, width;
};

template <typename T>
__device__ __forceinline__ void fetch(const UpArguments& a, const CUtensorMap* x_map, const CUtensorMap* half_map,
                                      const CUtensorMap* up_map, Control& c, uint8_t* shared, Ring ring) {
  constexpr int kRows = kFetchers / 8, kShare = kMaxNeurons / kRows;
  const int thread = threadIdx.x, steps = (a.hidden + kDepth - 1) / kDepth, blocks = a.active.blocks;
  // Eight threads copy 128 bytes of a row of Wu; every kRows-th row is theirs.
  const int row = thread / 8, chunk = thread % 8, bytes = stage_bytes(c.tile);
  const uint32_t stages = smem_address(shared), place = kTokenBytes + row * 128 + ((chunk ^ (row & 7)) << 4);
  const uint32_t eighths = a.hidden / 8;
  const auto request = [&](const Item& item, int list) {
    const uint32_t list_bytes = item.count == 0 ? 0 : ((item.shift() + item.count) * 2 + 15) / 16 * 16;
    barrier_arrive_expect(c.listed + list, list_bytes);
    if (list_bytes == 0) return;
    load_bytes(c.neurons[list],
               a.active.neurons + static_cast<int64_t>(item.block) * a.active.row + item.first - item.shift(),
               list_bytes, c.listed + list);
  };
  Place at = place_of(0, blockIdx.x, c.deal);
  if (!c.deal.has(at)) return;
  Item item = item_at(at, at.kind, 0, blocks, c);
  if (thread == 0) request(item, 0);
  for (int tiles = 0; c.deal.has(at); ++tiles) {
    const uint16_t* list = c.neurons[tiles % kLists] + item.shift();
    barrier_wait(c.listed + tiles % kLists, tiles / kLists & 1);
    const int lowest = list[0];
    const bool neighbours = item.count > 0 && item.count % kBoxRows == 0 && list[item.count - 1] - lowest == item.count - 1;
    uint32_t offsets[kShare];  // of rows, in 16 bytes
#pragma unroll
    for (int i = 0; i < kShare; ++i) offsets[i] = list[max(min(row + kRows * i, item.count - 1), 0)] * eighths;
    const int token = item.block * kBlockTokens + (item.half == 1 ? kHalfTokens : 0);
    Item next = item;
    for (int step = 0; step < steps; ++step, ring.advance()) {
      ring.wait_empty();
      uint64_t* full = ring.full + ring.stage;
      if (thread == 0) {
        uint8_t* stage = shared + ring.stage * bytes;
        barrier_arrive_expect(full, (item.half == kBoth ? kTokenBytes : kHalfBytes) +
                                        (neighbours ? item.count * kDepth * 2 : 0));
        if (item.half == kBoth) {
          load_box(stage, x_map, step * kDepth, token, full);
        } else {
          load_box(stage + item.half * kHalfBytes, half_map, step * kDepth, token, full);
        }
        for (int n = 0; neighbours && n < item.count; n += kBoxRows) {
          load_box(stage + kTokenBytes + n * kDepth * 2, up_map, step * kDepth, lowest + n, full);
        }
      }
      if (neighbours) {
        barrier_arrive(full);
      } else {
        const uint32_t eighth = step * (kDepth / 8) + chunk;
        const bool inside = eighth < eighths;
        const uint32_t added = inside ? eighth : 0;
        gather<kShare, kRows, 128>(stages + ring.stage * bytes + place, static_cast<const uint4*>(a.up), item.count, item.count - row,
                                   inside, [&](int i) { return offsets[i] + added; });
        barrier_arrive_on_copies(full);
      }
      if (step == min(2, steps - 1)) {  // the next tile's list has the other steps' time
        const int kind = at.kind;
        at = place_of(tiles + 1, blockIdx.x, c.deal);
        if (c.deal.has(at)) {
          next = item_at(at, kind, item.block, blocks, c);
          if (thread == 0) request(next, (tiles + 1) % kLists);
        }
      }
    }
    // Columns of relu(gate), of which only the active halves exist.
    const uint4* columns =
        static_cast<const uint4*>(a.active.columns) + static_cast<int64_t>(item.block) * a.width * (kBlockTokens / 8) + chunk;
#pragma unroll
    for (int start = 0; start < kMaxNeurons; start += kTurnNeurons) {
      if (start >= item.width) break;
      ring.wait_empty();
      const uint32_t to = stages + ring.stage * bytes + row * 256 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (item.half == 1 - half) continue;
        gather<kTurnNeurons / kRows, kRows, 256>(
            to + half * 128, columns + half * 8, item.count - start, item.count - start - row, true, [&](int i) {
              return list[max(min(start + row + kRows * i, item.count - 1), 0)] * static_cast<uint32_t>(kBlockTokens / 8);
            });
      }
      if (thread == 0) barrier_arrive(ring.full + ring.stage);
      barrier_arrive_on_copies(ring.full + ring.stage);
      ring.advance();
    }
    item = next;
  }
}

// A whole product. Where the next stage is not there yet, this one's is waited for, so that it is free sooner.
template <typename T, int N>
__device__ __forceinline__ void multiply_tile(float* sum, Ring& ring, uint32_t stages, int bytes, int skipped,
                                              int steps, int half) {
  bool held = false;  // the stage before
  for (int step = 0; step < steps; ++step, ring.advance()) {
    ring.wait_full();
    if constexpr (N == 0) {
      __syncwarp();  // no lane may still wait for what is released
      release(ring, ring.stage);
    } else {
      multiply_stage<T, N>(sum, stages + ring.stage * bytes, skipped, step, half);
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

// kLines: h is stored by lines of 128 bytes, and stages of relu(gate) are given back one by one.
template <typename T, bool kLines, bool kSplit, bool kBias>
__device__ __forceinline__ void multiply(const UpArguments& a, Control& c, uint8_t* shared, Ring ring,
                                         const MidTrace& trace) {
  constexpr int kAtOnce = kLines ? 1 : 2;  // stages of relu(gate) that are worked on before any is released
  const int steps = (a.hidden + kDepth - 1) / kDepth, lane = threadIdx.x % 32, blocks = a.active.blocks;
  const int warp = (threadIdx.x - kFetchers) / 32, warpgroup = warp / 4, bytes = stage_bytes(c.tile);
  const uint32_t stages = smem_address(shared);
  const bool first_thread = threadIdx.x == kFetchers;
  int block = 0, kind = 0, tiles = 0;
  for (Place at = place_of(0, blockIdx.x, c.deal); c.deal.has(at); ++tiles, at = place_of(tiles, blockIdx.x, c.deal)) {
    const Item item = item_at(at, kind, block, blocks, c);
    block = item.block, kind = at.kind;
    // This warpgroup multiplies the tokens of `half` by the tile's neurons [begin, end); multiplied are `wide` times 64
    // from `begin` on. What that takes past the end is not kept.
    const bool is_both = item.half == kBoth;
    const int half = is_both ? warpgroup : item.half, middle = min((item.count + 31) / 32 * 16, item.count);
    const int begin = is_both || warpgroup == (kSplit ? 0 : half) ? 0 : kSplit ? middle : item.count;
    const int end = !kSplit || is_both || warpgroup == 1 ? item.count : middle;
    const int wide = (end - begin + 63) / 64, group = half * 4 + warp % 4;
    float sum[kMaxNeurons / 2];
    const int skipped = begin * kDepth * 2;
    if (first_thread && tiles == 1) trace.mark(2);
    switch (wide) {
      case 0: multiply_tile<T, 0>(sum, ring, stages, bytes, skipped, steps, half); break;
      case 1: multiply_tile<T, 64>(sum, ring, stages, bytes, skipped, steps, half); break;
      case 2: multiply_tile<T, 128>(sum, ring, stages, bytes, skipped, steps, half); break;
      case 3: multiply_tile<T, 192>(sum, ring, stages, bytes, skipped, steps, half); break;
      default: multiply_tile<T, 256>(sum, ring, stages, bytes, skipped, steps, half); break;
    }
    if (first_thread && tiles == 1) trace.mark(3);
    // relu(gate) fills one stage or two; h takes its place there, then in global memory.
    barrier_wait(c.listed + tiles % kLists, tiles / kLists & 1);
    const uint16_t* neurons = c.neurons[tiles % kLists] + item.shift();
    T* columns = static_cast<T*>(a.active.columns) + static_cast<int64_t>(block) * a.width * kBlockTokens;
#pragma unroll
    for (int first = 0; first < kMaxNeurons; first += kAtOnce * kTurnNeurons) {
      if (first >= item.width) break;
      uint32_t turns[kAtOnce]{};
      Ring filled = ring;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i * kTurnNeurons >= item.width) break;
        filled.wait_full();
        turns[i] = stages + filled.stage * bytes;
        filled.advance();
      }
      if (first_thread && tiles == 1 && first == 0) trace.mark(4);
      const auto turn_at = [&](int n, int eighth) {
        return (n < first + kTurnNeurons ? turns[0] : turns[kAtOnce - 1]) + n % kTurnNeurons * 256 + ((eighth ^ (n & 7)) << 4);
      };
      const int limit = min(end, first + kAtOnce * kTurnNeurons);
#pragma unroll
      for (int j = 0; j < kMaxNeurons / 8; j += 2) {  // 16 neurons
        if (begin + 8 * j >= first && begin + 8 * j < limit) {
          const uint32_t at = turn_at(begin + 8 * j + lane / 16 * 8 + lane % 8, 2 * group + (lane / 8 & 1));
          uint32_t gate[4];
          load_matrices_transposed(gate, at);
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const int i = 4 * (j + m / 2) + m % 2 * 2, column = begin + 8 * (j + m / 2) + lane % 4 * 2;
            const float2 g = unpack<T>(gate[m]);
            float2 bias{};
            if constexpr (kBias) {
              bias.x = widen(static_cast<const T*>(a.bias)[neurons[min(column, item.count - 1)]]);
              bias.y = widen(static_cast<const T*>(a.bias)[neurons[min(column + 1, item.count - 1)]]);
            }
            gate[m] = pack<T>(g.x * (sum[i] + bias.x), g.y * (sum[i + 1] + bias.y));
          }
          store_matrices_transposed(at, gate);
        }
      }
      if constexpr (kLines) {
        if (warpgroup == 0) {
          named_barrier<128>(1);
        } else {
          named_barrier<128>(2);
        }
        const int start = max(begin, first) + warp % 4 * 4 + lane / 8, eighth = half * 8 + lane % 8;
#pragma unroll
        for (int i = 0; i < kAtOnce * kTurnNeurons / 16; ++i) {
          const int n = start + 16 * i;
          if (n < limit) {
            *reinterpret_cast<uint4*>(columns + static_cast<int64_t>(neurons[n]) * kBlockTokens + eighth * 8) =
                load_shared_16(turn_at(n, eighth));
          }
        }
      } else {
        __syncwarp();
        const int start = max(begin, first) + lane / 2, eighth = group * 2 + (lane & 1);
#pragma unroll
        for (int i = 0; i < kAtOnce * kTurnNeurons / 16; ++i) {
          const int n = start + 16 * i;
          if (n < limit) {
            *reinterpret_cast<uint4*>(columns + static_cast<int64_t>(neurons[n]) * kBlockTokens + eighth * 8) =
                load_shared_16(turn_at(n, eighth));
          }
        }
      }
      fence_async_proxy();  // ordinary stores here, bulk copies next
      __syncwarp();
      for (; ring.stage != filled.stage; ring.advance()) release(ring, ring.stage);
    }
    if (first_thread && tiles == 1) trace.mark(5);
  }
  if (first_thread) trace.mark(6);
}

template <typename T, bool kLines, bool kSplit, bool kBias>
__global__ void __launch_bounds__(kThreads, 1)
    up_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap half_map,
              const __grid_constant__ CUtensorMap up_map, const UpArguments a, const MidTrace trace) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  Control& c = *reinterpret_cast<Control*>(shared + kRingBytes);
  if (threadIdx.x == 0) {
    prefetch_map(&x_map);
    prefetch_map(&half_map);
    prefetch_map(&up_map);
    for (int s = 0; s < kMaxStages; ++s) {
      barrier_init(c.full + s, kFetchers + 1);
      barrier_init(c.empty + s, kConsumerWarps);
    }
    for (int i = 0; i < kLists; ++i) barrier_init(c.listed + i, 1);
    fence_barrier_init();
  }
  wait_for_previous();
  launch_dependents();  // not earlier: down relies on the lists without waiting for this kernel
  if (threadIdx.x == 0) trace.mark(0);
  for (int b = threadIdx.x; b < a.active.blocks; b += kThreads) c.counts[b] = a.active.counts[b];
  __syncthreads();
  make_plan(c, a.active.blocks);
  if (threadIdx.x == 0) trace.mark(1);
  const Ring ring(c.full, c.empty, min(kMaxStages, kRingBytes / stage_bytes(c.tile)));
  if (threadIdx.x < kFetchers) {
    give_registers<kFetchRegisters>();
    fetch<T>(a, &x_map, &half_map, &up_map, c, shared, ring);
  } else {
    take_registers<kMultiplyRegisters>();
    multiply<T, kLines, kSplit, kBias>(a, c, shared, ring, trace);
  }
#endif
}

template <typename T, bool kLines, bool kSplit, bool kBias>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  CUtensorMap x_map, half_map, up_map;
  const T* x = static_cast<const T*>(ffn.x) + chunk.first * ffn.hidden;
  TWELL_RETURN_IF_ERROR(make_tensor_map(&x_map, ffn.dtype, x, chunk.tokens, ffn.hidden, kBlockTokens));
  TWELL_RETURN_IF_ERROR(make_tensor_map(&half_map, ffn.dtype, x, chunk.tokens, ffn.hidden, kHalfTokens));
  TWELL_RETURN_IF_ERROR(make_tensor_map(&up_map, ffn.dtype, ffn.up, ffn.width, ffn.hidden, kBoxRows));
  const UpArguments arguments{ffn.up, ffn.b_up, chunk.active, ffn.hidden, ffn.width};
  return launch_kernel(up_kernel<T, kLines, kSplit, kBias>, device.sm_count, kThreads, 1, kShared, stream, x_map,
                       half_map, up_map, arguments, MidTrace::next());
}

template <typename T, bool kLines, bool kSplit>
cudaError_t launch_bias(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  return ffn.b_up != nullptr ? launch<T, kLines, kSplit, true>(ffn, chunk, device, stream)
                             : launch<T, kLines, kSplit, false>(ffn, chunk, device, stream);
}

template <typename T>
cudaError_t launch_type(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream, bool by_lines,
                        bool split) {
  if (by_lines) {
    return split ? launch_bias<T, true, true>(ffn, chunk, device, stream)
                 : launch_bias<T, true, false>(ffn, chunk, device, stream);
  }
  return split ? launch_bias<T, false, true>(ffn, chunk, device, stream)
               : launch_bias<T, false, false>(ffn, chunk, device, stream);
}

}  // namespace

cudaError_t launch_up_classes(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream,
                              bool by_lines, bool split) {
  return ffn.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(ffn, chunk, device, stream, by_lines, split)
                                       : launch_type<__half>(ffn, chunk, device, stream, by_lines, split);
}

}  // namespace twell::sm90
