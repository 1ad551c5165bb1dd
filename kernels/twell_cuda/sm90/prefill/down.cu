// Down projection over active neurons, y = h Wd^T + bd. Wd is stored by columns: one row a neuron.
//
// An item is a block of 128 tokens and a slice of the hidden units. A block that activates more neurons has narrower
// slices, so that all items of a call take about the same time: the first tokens of a sequence activate most.
//
// A persistent thread block of three warpgroups an SM. The first gathers columns of h and rows of Wd with cp.async, or
// with bulk copies where they are neighbours; the other two multiply half of the tokens each. Both operands lie in
// shared memory as they do in global memory, tokens and hidden units contiguous, and the tensor cores read them
// transposed.

#include <cstddef>

#include "sm90/common/chunk.h"
#include "sm90/common/launch.h"
#include "sm90/common/primitives.cuh"
#include "sm90/common/store.cuh"
#include "sm90/common/wgmma.cuh"

namespace twell::sm90 {
namespace {

#ifndef DEPTH
#define DEPTH 64
#endif
#ifndef UNIT
#define UNIT 64
#endif
constexpr int kFetchers = 128, kThreads = kFetchers + 256, kWarps = kThreads / 32, kConsumerWarps = 8, kDepth = DEPTH;
constexpr int kPartBytes = 64 * kDepth * 2;  // 64 tokens or hidden units x kDepth neurons
constexpr int kRingBytes = 192 * 1024, kMaxStages = 16;
constexpr int kListed = 2048;                  // neurons in shared memory at a time
constexpr int kMaxHiddenUnits = 256, kUnit = UNIT;  // of a slice; its width is a multiple

constexpr int kFetchRegisters = 72, kMultiplyRegisters = 216;
static_assert(check_registers(kFetchRegisters, kMultiplyRegisters));

struct Arguments {
  const void* rows;  // (F, D)
  const void* bias;  // (D), or null
  void* y;           // (tokens, D)
  int64_t tokens;    // of the chunk
  int hidden, width;
  Active active;
};

struct Control {
  uint64_t full[kMaxStages], empty[kMaxStages], listed[2];
  uint16_t neurons[2][kListed];
  Counts counts[kMaxBlocks];
  int first_item[kMaxBlocks + 1];
  int costs[kWarps], widest[kWarps], limits[kWarps];
  int limit, parts;  // of no item are there more than `parts` times 64 hidden units
};
constexpr int kShared = 1024 + kRingBytes + kConsumerWarps * kTurnBytes + sizeof(Control);
static_assert(kShared <= 227 * 1024);
static_assert(offsetof(Control, neurons) % 16 == 0);

// ---- Which items there are

constexpr int kColumnsShare = 96;  // hidden units that take as long as a step's columns of h

__device__ __forceinline__ int steps_of(const Counts& counts) { return max((counts.all() + 63) / 64, 1); }

// The slices of a block of so many steps, if none may cost more than `limit`; and their width.
struct Slices {
  int count, width;
  __device__ __forceinline__ Slices(int steps, int limit, int hidden) {
    const int most = min(max((limit / steps - kColumnsShare) / kUnit, 1) * kUnit, kMaxHiddenUnits);
    count = (hidden + most - 1) / most;
    width = (hidden + count * kUnit - 1) / (count * kUnit) * kUnit;
  }
};

// The limit that takes the least time, a warp for each, and each block's first item. Counts are there.
__device__ __forceinline__ void make_plan(Control& c, int blocks, int hidden) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int most_steps = 1;
  for (int b = lane; b < blocks; b += 32) most_steps = max(most_steps, steps_of(c.counts[b]));
  most_steps = __reduce_max_sync(~0u, most_steps);
  // Of the widths that the slices of the block with most neurons may have.
  const int widest_slice = warp + 1 < kWarps ? kMaxHiddenUnits - 16 * warp : 64;
  const int own_limit = most_steps * (widest_slice + kColumnsShare);
  int items = 0, cost = 0, widest = 0;
  int64_t total_cost = 0;
  for (int b = lane; b < blocks; b += 32) {
    const int steps = steps_of(c.counts[b]);
    const Slices slices(steps, own_limit, hidden);
    const int own_cost = steps * (slices.width + kColumnsShare);
    items += slices.count, total_cost += int64_t{slices.count} * own_cost;
    cost = max(cost, own_cost);
    widest = max(widest, slices.width);
  }
  items = __reduce_add_sync(~0u, items);
#pragma unroll
  for (int d = 16; d > 0; d /= 2) total_cost += __shfl_xor_sync(~0u, total_cost, d);
  cost = __reduce_max_sync(~0u, cost);
  widest = __reduce_max_sync(~0u, widest);
  const int thread_blocks = gridDim.x;
  if (lane == 0) {
    // A thread block is taken to get two of the dearest items, and else what there is on average.
    const int rounds = (items + thread_blocks - 1) / thread_blocks, mean = static_cast<int>(total_cost / items);
    c.costs[warp] = rounds * mean + min(rounds, 2) * (cost - mean);
    c.widest[warp] = widest, c.limits[warp] = own_limit;
  }
  __syncthreads();
  int best = 0;
  for (int w = 1; w < kWarps; ++w) {
    if (c.costs[w] < c.costs[best]) best = w;
  }
  if (warp == 0) {
    const int limit = c.limits[best];
    if (lane == 0) c.limit = limit, c.parts = (c.widest[best] + 63) / 64;
    int total = 0;
    for (int start = 0; start < blocks; start += 32) {
      const int own = start + lane < blocks ? Slices(steps_of(c.counts[start + lane]), limit, hidden).count : 0;
      int sum = own;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += other;
      }
      if (start + lane < blocks) c.first_item[start + lane] = total + sum - own;
      total += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) c.first_item[blocks] = total;
  }
  __syncthreads();
}

struct Item {
  int block, first, width;  // hidden units
};

// Items come in ascending order: `block` is where the one before was. Called by whole warps.
__device__ __forceinline__ Item item_at(int index, int block, int blocks, int hidden, const Control& c) {
  for (;; block += 32) {
    const bool ends_later = c.first_item[min(block + 1 + static_cast<int>(threadIdx.x % 32), blocks)] > index;
    const uint32_t later = __ballot_sync(~0u, ends_later);
    if (later == 0) continue;
    block += __ffs(static_cast<int>(later)) - 1;
    break;
  }
  const Slices slices(steps_of(c.counts[block]), c.limit, hidden);
  return {block, (index - c.first_item[block]) * slices.width, slices.width};
}

__device__ __forceinline__ int stages_of(const Control& c) {
  return min(kMaxStages, kRingBytes / ((2 + c.parts) * kPartBytes));
}

// A half block's entries are [begin, end) of the list; steps without any of them are passed over.
struct HalfEntries {
  int begin, end;
  __device__ __forceinline__ HalfEntries(const Counts& counts, int half)
      : begin(half == 0 ? 0 : counts.first_only), end(half == 0 ? counts.first_only + counts.both : counts.all()) {}
  __device__ __forceinline__ bool in_step(int start) const { return start + kDepth > begin && start < end; }
};

// ---- The warpgroup that fetches

template <typename T>
__device__ __forceinline__ void fetch(const Arguments& a, const CUtensorMap* columns_map, const CUtensorMap* rows_map,
                                      Control& c, uint8_t* shared, Ring ring) {
  constexpr int kRows = kFetchers / 8;
  // Eight threads copy 128 bytes; every kRows-th row is theirs.
  const int row = threadIdx.x / 8, chunk = threadIdx.x % 8, bytes = (2 + c.parts) * kPartBytes;
  const int blocks = a.active.blocks, items = c.first_item[blocks];
  const uint32_t stages = smem_address(shared), place = row * 128 + ((chunk ^ (row & 7)) << 4);
  const auto request = [&](int block, int start, int buffer) {
    const int count = min(kListed, c.counts[block].all() - start);
    const uint32_t list_bytes = (count * 2 + 15) / 16 * 16;
    barrier_arrive_expect(c.listed + buffer, list_bytes);
    if (list_bytes == 0) return;
    load_bytes(c.neurons[buffer], a.active.neurons + static_cast<int64_t>(block) * a.active.row + start, list_bytes,
               c.listed + buffer);
  };
  int index = blockIdx.x, start_at = 0, window = 0;
  if (index >= items) return;
  Item item = item_at(index, 0, blocks, a.hidden, c);
  if (threadIdx.x == 0) request(item.block, 0, 0);
  while (index < items) {
    const Counts counts = c.counts[item.block];
    // The list of this window is under way; the next one's is asked for.
    Item next = item;
    int next_index = index, next_start = start_at + kListed;
    if (next_start >= counts.all()) {
      next_index += gridDim.x, next_start = 0;
      if (next_index < items) next = item_at(next_index, item.block, blocks, a.hidden, c);
    }
    named_barrier<kFetchers>(1);  // everyone is done with the other buffer
    const int buffer = window & 1;
    if (threadIdx.x == 0 && next_index < items) request(next.block, next_start, buffer ^ 1);
    barrier_wait(c.listed + buffer, window / 2 & 1);
    ++window;
    const uint16_t* neurons = c.neurons[buffer];
    const int first_end = counts.first_only + counts.both, listed = min(kListed, counts.all() - start_at);
    const int width = min(item.width, a.hidden - item.first), parts = (width + 63) / 64;
    const T* const columns_of_block = static_cast<const T*>(a.active.columns) +
                                      static_cast<int64_t>(item.block) * a.width * kBlockTokens + chunk * 8;
    const T* const rows = static_cast<const T*>(a.rows) + item.first + chunk * 8;
    for (int start = 0; start < listed; start += kDepth, ring.advance()) {
      // Neighbours that both halves activate.
      const int lowest = neurons[start], at = start_at + start;
      const bool neighbours = at >= counts.first_only && at + kDepth <= first_end && start + kDepth <= listed &&
                              neurons[start + kDepth - 1] - lowest == kDepth - 1;
      ring.wait_empty();
      uint64_t* full = ring.full + ring.stage;
      if (neighbours) {
        if (threadIdx.x == 0) {
          barrier_arrive_expect(full, (2 + parts) * kPartBytes);
          uint8_t* stage = shared + ring.stage * bytes;
          for (int half = 0; half < 2; ++half) {
            load_box(stage + half * kPartBytes, columns_map, half * 64, item.block * a.width + lowest, full);
          }
          for (int part = 0; part < parts; ++part) {
            load_box(stage + (2 + part) * kPartBytes, rows_map, item.first + part * 64, lowest, full);
          }
        } else {
          barrier_arrive(full);
        }
        continue;
      }
      const uint32_t to = stages + ring.stage * bytes + place;
#pragma unroll
      for (int i = 0; i < kDepth / kRows; ++i) {
        const int n = start + row + kRows * i;
        const bool valid = n < listed;
        const int neuron = valid ? neurons[n] : 0;
        const T* column = columns_of_block + static_cast<int64_t>(neuron) * kBlockTokens;
        const T* from = rows + static_cast<int64_t>(neuron) * a.hidden;
        copy_16(to + i * kRows * 128, column, valid && start_at + n < first_end);
        copy_16(to + kPartBytes + i * kRows * 128, column + 64, valid && start_at + n >= counts.first_only);
#pragma unroll
        for (int part = 0; part < kMaxHiddenUnits / 64; ++part) {  // where nothing is valid the address is not read
          if (part >= parts) break;
          copy_16(to + (2 + part) * kPartBytes + i * kRows * 128, from + part * 64,
                  valid && part * 64 + chunk * 8 < width);
        }
      }
      barrier_arrive_on_copies(full);
    }
    index = next_index, start_at = next_start, item = next;
  }
}

// ---- The warpgroups that multiply

// The products of N hidden units.
template <typename T, int N>
__device__ __forceinline__ void multiply_item(float* sum, const HalfEntries& entries, int all, int bytes,
                                              uint32_t stages, int warpgroup, Ring& ring) {
  const int lane = threadIdx.x % 32;
  bool started = false, held = false;  // held: the stage before
  for (int start = 0; start < all; start += kDepth, ring.advance()) {
    ring.wait_full();
    if (entries.in_step(start)) {
      fence_async_proxy();  // cp.async wrote, tensor cores read
      const uint32_t stage = stages + ring.stage * bytes;
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
        Wgmma<T, N, 1, 1>::multiply(sum, matrix_descriptor(stage + warpgroup * kPartBytes + k * 2048, kPartBytes),
                                    matrix_descriptor(stage + 2 * kPartBytes + k * 2048, kPartBytes), started || k);
      }
      wgmma_commit();
      started = true;
      wgmma_wait<1>();
      if (held && lane == 0) barrier_arrive(ring.empty + ring.previous());
      held = true;
#ifdef EARLY
      if (!__any_sync(~0u, ring.next_is_full())) {
        wgmma_wait<0>();
        if (lane == 0) barrier_arrive(ring.empty + ring.stage);
        held = false;
      }
#endif
    } else {
      wgmma_wait<0>();
      if (held && lane == 0) barrier_arrive(ring.empty + ring.previous());
      __syncwarp();  // nobody's lanes may still wait for what is released
      if (lane == 0) barrier_arrive(ring.empty + ring.stage);
      held = false;
    }
  }
  wgmma_wait<0>();
  if (held && lane == 0) barrier_arrive(ring.empty + ring.previous());
  if (!started) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sum[i] = 0.0f;
  }
}

// By the narrowest product that has `width` hidden units.
template <typename T, int N = kMaxHiddenUnits>
__device__ __forceinline__ void multiply_width(int width, float* sum, const HalfEntries& entries, int all, int bytes,
                                               uint32_t stages, int warpgroup, Ring& ring) {
  if constexpr (N > kUnit) {
    if (width < N) return multiply_width<T, N - kUnit>(width, sum, entries, all, bytes, stages, warpgroup, ring);
  }
  return multiply_item<T, N>(sum, entries, all, bytes, stages, warpgroup, ring);
}

template <typename T>
__device__ __forceinline__ void multiply(const Arguments& a, const Control& c, uint8_t* shared, Ring ring) {
  const int blocks = a.active.blocks, bytes = (2 + c.parts) * kPartBytes;
  const int warp = (threadIdx.x - kFetchers) / 32, warpgroup = warp / 4;
  const uint32_t stages = smem_address(shared), turn = stages + kRingBytes + warp * kTurnBytes;
  int block = 0;
  for (int index = blockIdx.x; index < c.first_item[blocks]; index += gridDim.x) {
    const Item item = item_at(index, block, blocks, a.hidden, c);
    block = item.block;
    const Counts counts = c.counts[block];
    float sum[kMaxHiddenUnits / 2];
    multiply_width<T>(item.width, sum, HalfEntries(counts, warpgroup), counts.all(), bytes, stages, warpgroup, ring);
    store_sums<T, kMaxHiddenUnits, true>(a, sum, turn, static_cast<int64_t>(item.block) * kBlockTokens + warp * 16,
                                         item.first, min(item.first + item.width, a.hidden));
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    down_kernel(const __grid_constant__ CUtensorMap columns_map, const __grid_constant__ CUtensorMap rows_map,
                const Arguments a) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  Control& c = *reinterpret_cast<Control*>(shared + kRingBytes + kConsumerWarps * kTurnBytes);
  if (threadIdx.x == 0) {
    prefetch_map(&columns_map);
    prefetch_map(&rows_map);
    for (int s = 0; s < kMaxStages; ++s) {
      barrier_init(c.full + s, kFetchers);
      barrier_init(c.empty + s, kConsumerWarps);
    }
    barrier_init(c.listed, 1);
    barrier_init(c.listed + 1, 1);
    fence_barrier_init();
  }
  launch_dependents();
  wait_for_previous();
  for (int b = threadIdx.x; b < a.active.blocks; b += kThreads) c.counts[b] = a.active.counts[b];
  __syncthreads();
  make_plan(c, a.active.blocks, a.hidden);
  const Ring ring(c.full, c.empty, stages_of(c));
  if (threadIdx.x < kFetchers) {
    give_registers<kFetchRegisters>();
    fetch<T>(a, &columns_map, &rows_map, c, shared, ring);
  } else {
    take_registers<kMultiplyRegisters>();
    multiply<T>(a, c, shared, ring);
  }
#endif
}

template <typename T>
cudaError_t launch_type(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  CUtensorMap columns_map, rows_map;
  TWELL_RETURN_IF_ERROR(make_tensor_map(&columns_map, ffn.dtype, chunk.active.columns,
                                        int64_t{chunk.active.blocks} * ffn.width, kBlockTokens, kDepth));
  TWELL_RETURN_IF_ERROR(make_tensor_map(&rows_map, ffn.dtype, ffn.down.data, ffn.width, ffn.hidden, kDepth));
  const Arguments arguments{ffn.down.data, ffn.b_down, static_cast<T*>(ffn.y) + chunk.first * ffn.hidden,
                            chunk.tokens,  ffn.hidden, ffn.width,
                            chunk.active};
  return launch_kernel(down_kernel<T>, device.sm_count, kThreads, 1, kShared, stream, columns_map, rows_map, arguments);
}

}  // namespace

cudaError_t launch_down(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(ffn, chunk, device, stream)
                                       : launch_type<__half>(ffn, chunk, device, stream);
}

}  // namespace twell::sm90
