// Up projection over active neurons: h = relu(gate) * (x Wu^T + bu), for each block of 128 tokens and the neurons that
// any of them activates; the others' columns of h would be zero. h takes the place of relu(gate).
//
// A persistent thread block of three warpgroups an SM. The first fetches: x by bulk tensor copies, gathered rows of Wu by
// cp.async (by bulk copies where they are neighbours), and at the end of a tile its columns of relu(gate), through the
// same ring of stages. The other two multiply half of the tokens each, by those of the tile's neurons that it activates.

#include "sm90_call.h"
#include "sm90_launch.h"
#include "sm90_tiles.cuh"

namespace twell::sm90 {
namespace {

using namespace tiles;

constexpr int kTurnNeurons = 128;  // columns of relu(gate) in a stage: 256 bytes each
constexpr int kShared = 1024 + kRingBytes + sizeof(Control);
static_assert(kShared <= 227 * 1024);

struct UpArguments {
  const void* up;
  const void* bias;
  Active active;
  int hidden, width;
};

template <typename T>
__device__ __forceinline__ void fetch(const UpArguments& a, const CUtensorMap* x_map, const CUtensorMap* up_map,
                                      Control& c, uint8_t* shared, Ring ring) {
  constexpr int kRows = kFetchers / 8, kShare = kMaxNeurons / kRows;
  const int thread = threadIdx.x, steps = (a.hidden + kDepth - 1) / kDepth, items = c.first_item[a.active.blocks];
  // Eight threads copy 128 bytes of a row of Wu; every kRows-th row is theirs.
  const int row = thread / 8, chunk = thread % 8, bytes = stage_bytes(c.tile);
  const uint32_t stages = smem_address(shared), place = kTokenBytes + row * 128 + ((chunk ^ (row & 7)) << 4);
  const T* up = static_cast<const T*>(a.up);
  // The list of the tile after this one is under way while this one is copied.
  const auto request = [&](const Item& item, int list) {
    const uint32_t list_bytes = (item.count * 2 + 15) / 16 * 16;
    barrier_arrive_expect(c.listed + list, list_bytes);
    load_bytes(c.neurons[list], a.active.neurons + static_cast<int64_t>(item.block) * a.active.row + item.first,
               list_bytes, c.listed + list);
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
    const bool neighbours = are_neighbours(list, item, c.counts[item.block]);
    int neurons[kShare];  // rows past the last repeat it: what they give is not kept
#pragma unroll
    for (int i = 0; i < kShare; ++i) neurons[i] = list[min(row + kRows * i, item.count - 1)];
    for (int step = 0; step < steps; ++step, ring.advance()) {
      ring.wait_empty();
      uint64_t* full = ring.full + ring.stage;
      if (thread == 0) {
        uint8_t* stage = shared + ring.stage * bytes;
        barrier_arrive_expect(full, kTokenBytes + (neighbours ? item.count * kDepth * 2 : 0));
        load_box(stage, x_map, step * kDepth, item.block * kBlockTokens, full);
        for (int n = 0; neighbours && n < item.count; n += kBoxRows) {
          load_box(stage + kTokenBytes + n * kDepth * 2, up_map, step * kDepth, lowest + n, full);
        }
      }
      if (neighbours) {
        barrier_arrive(full);
        continue;
      }
      const uint32_t to = stages + ring.stage * bytes + place;
      const int column = step * kDepth + chunk * 8;
      const bool inside = column < a.hidden;
      const T* from = up + (inside ? column : 0);
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
    // Columns of relu(gate), of which only the active halves exist.
    const T* columns =
        static_cast<const T*>(a.active.columns) + static_cast<int64_t>(item.block) * a.width * kBlockTokens + chunk * 8;
    const Counts counts = c.counts[item.block];
#pragma unroll
    for (int start = 0; start < kMaxNeurons; start += kTurnNeurons) {
      if (start >= item.count) break;
      ring.wait_empty();
      const uint32_t to = stages + ring.stage * bytes + row * 256 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
      for (int i = 0; i < kTurnNeurons / kRows; ++i) {
        const int n = start + row + kRows * i, at = item.first + n;
        const T* column = columns + static_cast<int64_t>(neurons[start / kRows + i]) * kBlockTokens;
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

struct NothingToPrepare {
  __device__ __forceinline__ void prepare() {}
};

template <typename T>
__device__ __forceinline__ void multiply(const UpArguments& a, Control& c, uint8_t* shared, Ring ring) {
  const int steps = (a.hidden + kDepth - 1) / kDepth, lane = threadIdx.x % 32, items = c.first_item[a.active.blocks];
  const int warp = (threadIdx.x - kFetchers) / 32, warpgroup = warp / 4, bytes = stage_bytes(c.tile);
  const uint32_t stages = smem_address(shared);
  int block = 0, tiles = 0;
  for (int index = blockIdx.x; index < items; index += gridDim.x, ++tiles) {
    const Item item = item_at(index, block, c);
    block = item.block;
    // Neurons [begin, end) of the tile are active in this half; multiplied are `groups` times 64 from `low` on.
    const Counts counts = c.counts[block];
    const int begin = warpgroup == 0 ? 0 : max(counts.first_only - item.first, 0);
    const int end = min(item.count, warpgroup == 0 ? counts.first_only + counts.both - item.first : item.count);
    const int groups = max(end - begin / 16 * 16 + 63, 0) / 64, low = min(begin / 16 * 16, c.tile - groups * 64);
    float sum[kMaxNeurons / 2];
    const int skipped = low * kDepth * 2;
    NothingToPrepare end_of_tile;
    switch (groups) {
      case 0: multiply_tile<T, 0>(sum, ring, stages, bytes, skipped, steps, warpgroup, lane, end_of_tile); break;
      case 1: multiply_tile<T, 64>(sum, ring, stages, bytes, skipped, steps, warpgroup, lane, end_of_tile); break;
      case 2: multiply_tile<T, 128>(sum, ring, stages, bytes, skipped, steps, warpgroup, lane, end_of_tile); break;
      case 3: multiply_tile<T, 192>(sum, ring, stages, bytes, skipped, steps, warpgroup, lane, end_of_tile); break;
      default: multiply_tile<T, 256>(sum, ring, stages, bytes, skipped, steps, warpgroup, lane, end_of_tile); break;
    }
    // relu(gate) fills one stage or two; h takes its place there, then in global memory.
    const int turns = (item.count + kTurnNeurons - 1) / kTurnNeurons;
    const uint32_t first_turn = stages + ring.stage * bytes;
    ring.wait_full();
    Ring turn = ring;
    turn.advance();
    const uint32_t second_turn = stages + turn.stage * bytes;
    if (turns == 2) turn.wait_full();
    const auto turn_at = [&](int n, int part) {
      return (n < kTurnNeurons ? first_turn : second_turn) + n % kTurnNeurons * 256 + ((part ^ (n & 7)) << 4);
    };
    barrier_wait(c.listed + tiles % kLists, tiles / kLists & 1);
    const uint16_t* neurons = c.neurons[tiles % kLists];
    T* columns = static_cast<T*>(a.active.columns) + static_cast<int64_t>(block) * a.width * kBlockTokens + warp * 16;
#pragma unroll
    for (int j = 0; j < kMaxNeurons / 8; j += 2) {  // 16 neurons
      if (low + 8 * j < end && 8 * j < groups * 64) {
        const uint32_t at = turn_at(low + 8 * j + lane / 16 * 8 + lane % 8, 2 * warp + (lane / 8 & 1));
        uint32_t gate[4];
        load_matrices_transposed(gate, at);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int index = 4 * (j + m / 2) + m % 2 * 2, column = low + 8 * (j + m / 2) + lane % 4 * 2;
          const float2 g = unpack<T>(gate[m]);
          float2 bias{};
          if (a.bias != nullptr) {
            bias.x = widen(static_cast<const T*>(a.bias)[neurons[min(column, item.count - 1)]]);
            bias.y = widen(static_cast<const T*>(a.bias)[neurons[min(column + 1, item.count - 1)]]);
          }
          gate[m] = pack<T>(g.x * (sum[index] + bias.x), g.y * (sum[index + 1] + bias.y));
        }
        store_matrices_transposed(at, gate);
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kMaxNeurons / 16; ++i) {
      const int n = begin + lane / 2 + 16 * i;
      if (n < end) {
        *reinterpret_cast<uint4*>(columns + static_cast<int64_t>(neurons[n]) * kBlockTokens + (lane & 1) * 8) =
            load_shared_16(turn_at(n, 2 * warp + (lane & 1)));
      }
    }
    fence_async_proxy();  // ordinary stores here, bulk copies next
    __syncwarp();
    for (int i = 0; i < turns; ++i, ring.advance()) {
      if (lane == 0) barrier_arrive(ring.empty + ring.stage);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    up_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap up_map, const UpArguments a) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  Control& c = *reinterpret_cast<Control*>(shared + kRingBytes);
  if (threadIdx.x == 0) {
    prefetch_map(&x_map);
    prefetch_map(&up_map);
    for (int s = 0; s < kMaxStages; ++s) {
      barrier_init(c.full + s, kFetchers + 1);
      barrier_init(c.empty + s, kConsumerWarps);
    }
    for (int i = 0; i < kLists; ++i) barrier_init(c.listed + i, 1);
    fence_barrier_init();
  }
  launch_dependents();
  wait_for_previous();
  for (int b = threadIdx.x; b < a.active.blocks; b += kThreads) c.counts[b] = a.active.counts[b];
  __syncthreads();
  plan(c, a.active.blocks);
  const Ring ring(c.full, c.empty, min(kMaxStages, kRingBytes / stage_bytes(c.tile)));
  if (threadIdx.x < kFetchers) {
    give_registers<kFetchRegisters>();
    fetch<T>(a, &x_map, &up_map, c, shared, ring);
  } else {
    take_registers<kMultiplyRegisters>();
    multiply<T>(a, c, shared, ring);
  }
#endif
}

template <typename T>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  CUtensorMap x_map, up_map;
  const T* x = static_cast<const T*>(ffn.x) + chunk.first * ffn.hidden;
  TWELL_RETURN_IF_ERROR(make_tensor_map(&x_map, ffn.dtype, x, chunk.tokens, ffn.hidden, kBlockTokens));
  TWELL_RETURN_IF_ERROR(make_tensor_map(&up_map, ffn.dtype, ffn.up, ffn.width, ffn.hidden, kBoxRows));
  const UpArguments arguments{ffn.up, ffn.b_up, chunk.active, ffn.hidden, ffn.width};
  return launch_kernel(up_kernel<T>, device.sm_count, kThreads, 1, kShared, stream, x_map, up_map, arguments);
}

}  // namespace

cudaError_t launch_up(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch<__nv_bfloat16>(ffn, chunk, device, stream)
                                       : launch<__half>(ffn, chunk, device, stream);
}

}  // namespace twell::sm90
