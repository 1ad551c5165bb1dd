// Down projection over active neurons: y = h Wd^T + bd, for each half block of 64 tokens a sum over the neurons that any of
// them activates.
//
// A persistent thread block of three warpgroups an SM. The first gathers columns of h and rows of Wd (which is stored by
// columns: one row a neuron) with cp.async, or with bulk copies where they are neighbours; the other two multiply half of
// the tokens each. Both operands lie in shared memory as they do in global memory, tokens and hidden units contiguous, and
// the tensor cores read them transposed.

#include "sm90_call.h"
#include "sm90_launch.h"
#include "sm90_primitives.cuh"
#include "sm90_wgmma.cuh"

namespace twell::sm90 {
namespace {

constexpr int kFetchers = 128, kThreads = kFetchers + 256, kConsumerWarps = 8, kDepth = 64;
constexpr int kPartBytes = 64 * kDepth * 2;  // 64 tokens or hidden units x 64 neurons
constexpr int kRingBytes = 4 * 6 * kPartBytes, kMaxStages = 8;
constexpr int kListed = 2048;           // neurons in shared memory at a time
constexpr int kTurnBytes = 16 * 64 * 2;  // a warp's 16 tokens x 64 hidden units, on their way to y

constexpr int kFetchRegisters = 72, kMultiplyRegisters = 216;
static_assert(check_registers(kFetchRegisters, kMultiplyRegisters));

template <int kHidden>
struct Shape {
  static constexpr int kStageBytes = 2 * kPartBytes + kHidden * kDepth * 2;
  static constexpr int kStages = kRingBytes / kStageBytes < kMaxStages ? kRingBytes / kStageBytes : kMaxStages;
};

struct Control {
  uint64_t full[kMaxStages], empty[kMaxStages], listed[2];
  uint16_t neurons[2][kListed];
  Counts counts[kMaxBlocks];
};
constexpr int kShared = 1024 + kRingBytes + kConsumerWarps * kTurnBytes + sizeof(Control);
static_assert(kShared <= 227 * 1024);
static_assert(offsetof(Control, neurons) % 16 == 0);

struct Arguments {
  const void* down;
  const void* bias;
  Active active;
  void* y;
  int64_t tokens;
  int hidden, width, slices;
};

// Part of a tile's list of neurons; `item` is past the last when there is none.
struct Window {
  int item, start;
};

// Where lists are fetched ahead of the copies that need them.
struct Lists {
  const Arguments& a;
  Control& c;
  int items, window = 0;
  uint32_t phases = 0;  // a bit for each of the two buffers

  __device__ Lists(const Arguments& arguments, Control& control)
      : a(arguments), c(control), items(arguments.active.blocks * arguments.slices) {}

  __device__ Window first_from(int item) const {
    while (item < items && c.counts[item / a.slices].all() == 0) item += gridDim.x;
    return {item, 0};
  }
  __device__ Window after(Window w) const {
    if (w.start + kListed < c.counts[w.item / a.slices].all()) return {w.item, w.start + kListed};
    return first_from(w.item + gridDim.x);
  }
  __device__ void request(Window w, int buffer) {
    if (w.item >= items) return;
    const int block = w.item / a.slices, count = min(kListed, c.counts[block].all() - w.start);
    const uint32_t bytes = (count * 2 + 15) / 16 * 16;
    barrier_arrive_expect(c.listed + buffer, bytes);
    load_bytes(c.neurons[buffer], a.active.neurons + static_cast<int64_t>(block) * a.active.row + w.start, bytes,
               c.listed + buffer);
  }
  // The list of `w`, whose request is under way; asks for the next.
  __device__ const uint16_t* open(Window w) {
    named_barrier<kFetchers>(1);  // everyone is done with the other buffer
    const int buffer = window++ & 1;
    if (threadIdx.x == 0) request(after(w), buffer ^ 1);
    barrier_wait(c.listed + buffer, phases >> buffer & 1);
    phases ^= 1u << buffer;
    return c.neurons[buffer];
  }
};

template <typename T, int kHidden>
__device__ __forceinline__ void fetch(const Arguments& a, const CUtensorMap* column_map, const CUtensorMap* down_map,
                                      Control& c, uint8_t* shared, Ring ring) {
  constexpr int kRows = kFetchers / 8, kBytes = Shape<kHidden>::kStageBytes;
  const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;  // eight threads copy 128 bytes; every kRows-th row is theirs
  const uint32_t stages = smem_address(shared), place = row * 128 + ((chunk ^ (row & 7)) << 4);
  Lists lists(a, c);
  Window w = lists.first_from(blockIdx.x);
  if (threadIdx.x == 0) lists.request(w, 0);
  for (; w.item < lists.items; w = lists.after(w)) {
    const uint16_t* neurons = lists.open(w);
    const int block = w.item / a.slices, first_hidden = w.item % a.slices * kHidden;
    const Counts counts = c.counts[block];
    const int first_end = counts.first_only + counts.both, listed = min(kListed, counts.all() - w.start);
    const int hidden_left = a.hidden - first_hidden;
    const T* columns =
        static_cast<const T*>(a.active.columns) + static_cast<int64_t>(block) * a.width * kBlockTokens + chunk * 8;
    const T* down = static_cast<const T*>(a.down) + first_hidden + chunk * 8;
    for (int start = 0; start < listed; start += kDepth, ring.advance()) {
      // 64 neighbours that both halves activate.
      const int lowest = neurons[start], at = w.start + start;
      const bool neighbours = at >= counts.first_only && at + kDepth <= first_end && start + kDepth <= listed &&
                              neurons[start + kDepth - 1] - lowest == kDepth - 1;
      ring.wait_empty();
      uint64_t* full = ring.full + ring.stage;
      if (neighbours) {
        if (threadIdx.x == 0) {
          barrier_arrive_expect(full, kBytes);
          uint8_t* stage = shared + ring.stage * kBytes;
          for (int half = 0; half < 2; ++half) {
            load_box(stage + half * kPartBytes, column_map, half * 64, block * a.width + lowest, full);
          }
          for (int part = 0; part < kHidden / 64; ++part) {
            load_box(stage + (2 + part) * kPartBytes, down_map, first_hidden + part * 64, lowest, full);
          }
        } else {
          barrier_arrive(full);
        }
        continue;
      }
      const uint32_t to = stages + ring.stage * kBytes + place;
#pragma unroll
      for (int i = 0; i < kDepth / kRows; ++i) {
        const int n = start + row + kRows * i;
        const bool valid = n < listed;
        const int neuron = valid ? neurons[n] : 0;
        const T* column = columns + static_cast<int64_t>(neuron) * kBlockTokens;
        const T* weights = down + static_cast<int64_t>(neuron) * a.hidden;
        copy_16(to + i * kRows * 128, column, valid && w.start + n < first_end);
        copy_16(to + kPartBytes + i * kRows * 128, column + 64, valid && w.start + n >= counts.first_only);
#pragma unroll
        for (int part = 0; part < kHidden / 64; ++part) {  // where nothing is valid the address is not read
          copy_16(to + (2 + part) * kPartBytes + i * kRows * 128, weights + part * 64,
                  valid && part * 64 + chunk * 8 < hidden_left);
        }
      }
      barrier_arrive_on_copies(full);
    }
  }
}

template <typename T, int kHidden>
__device__ __forceinline__ void multiply(const Arguments& a, const Control& c, uint8_t* shared, Ring ring) {
  constexpr int kBytes = Shape<kHidden>::kStageBytes;
  const int lane = threadIdx.x % 32, warp = (threadIdx.x - kFetchers) / 32, warpgroup = warp / 4;
  const uint32_t stages = smem_address(shared), turn = stages + kRingBytes + warp * kTurnBytes;
  for (int item = blockIdx.x; item < a.active.blocks * a.slices; item += gridDim.x) {
    const int block = item / a.slices, first_hidden = item % a.slices * kHidden;
    const Counts counts = c.counts[block];
    // This half's neurons are [begin, end) of the list; steps without any of them are passed over.
    const int begin = warpgroup == 0 ? 0 : counts.first_only;
    const int end = warpgroup == 0 ? counts.first_only + counts.both : counts.all();
    float sum[kHidden / 2];
    bool started = false;
    for (int start = 0; start < counts.all(); start += kDepth, ring.advance()) {
      ring.wait_full();
      if (start + kDepth > begin && start < end) {
        fence_async_proxy();  // cp.async wrote, tensor cores read
        const uint32_t stage = stages + ring.stage * kBytes;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k) {
          Wgmma<T, kHidden, 1, 1>::multiply(sum, matrix_descriptor(stage + warpgroup * kPartBytes + k * 2048, kPartBytes),
                                            matrix_descriptor(stage + 2 * kPartBytes + k * 2048, kPartBytes), started || k);
        }
        wgmma_commit();
        started = true;
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      if (start > 0 && lane == 0) barrier_arrive(ring.empty + ring.previous());
    }
    wgmma_wait<0>();
    if (counts.all() > 0 && lane == 0) barrier_arrive(ring.empty + ring.previous());
    if (!started) {
#pragma unroll
      for (int i = 0; i < kHidden / 2; ++i) sum[i] = 0.0f;
    }

    const int64_t first_token = static_cast<int64_t>(block) * kBlockTokens + warp * 16;
#pragma unroll
    for (int pass = 0; pass < kHidden / 64; ++pass) {
      __syncwarp();
#pragma unroll
      for (int j = 8 * pass; j < 8 * pass + 8; j += 2) {
        uint32_t packed[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int index = 4 * (j + m / 2) + m % 2 * 2, hidden = first_hidden + 8 * (j + m / 2) + lane % 4 * 2;
          float2 bias{};
          if (a.bias != nullptr && hidden < a.hidden) {
            bias = unpack<T>(*reinterpret_cast<const uint32_t*>(static_cast<const T*>(a.bias) + hidden));
          }
          packed[m] = pack<T>(sum[index] + bias.x, sum[index + 1] + bias.y);
        }
        const int row = lane % 16, chunk = j % 8 + lane / 16;
        store_matrices(turn + row * 128 + ((chunk ^ (row & 7)) << 4), packed);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = i * 4 + lane / 8, chunk = lane % 8, hidden = first_hidden + pass * 64 + chunk * 8;
        const int64_t token = first_token + row;
        if (token < a.tokens && hidden < a.hidden) {
          *reinterpret_cast<uint4*>(static_cast<T*>(a.y) + token * a.hidden + hidden) =
              load_shared_16(turn + row * 128 + ((chunk ^ (row & 7)) << 4));
        }
      }
    }
  }
}

template <typename T, int kHidden>
__global__ void __launch_bounds__(kThreads, 1)
    down_kernel(const __grid_constant__ CUtensorMap column_map, const __grid_constant__ CUtensorMap down_map,
                const Arguments a) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  Control& c = *reinterpret_cast<Control*>(shared + kRingBytes + kConsumerWarps * kTurnBytes);
  if (threadIdx.x == 0) {
    prefetch_map(&column_map);
    prefetch_map(&down_map);
    for (int s = 0; s < Shape<kHidden>::kStages; ++s) {
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
  const Ring ring(c.full, c.empty, Shape<kHidden>::kStages);
  if (threadIdx.x < kFetchers) {
    give_registers<kFetchRegisters>();
    fetch<T, kHidden>(a, &column_map, &down_map, c, shared, ring);
  } else {
    take_registers<kMultiplyRegisters>();
    multiply<T, kHidden>(a, c, shared, ring);
  }
#endif
}

template <typename T, int kHidden>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  const int slices = (ffn.hidden + kHidden - 1) / kHidden;
  CUtensorMap column_map, down_map;
  TWELL_RETURN_IF_ERROR(make_tensor_map(&column_map, ffn.dtype, chunk.active.columns,
                                        int64_t{chunk.active.blocks} * ffn.width, kBlockTokens, kDepth));
  TWELL_RETURN_IF_ERROR(make_tensor_map(&down_map, ffn.dtype, ffn.down, ffn.width, ffn.hidden, kDepth));
  const Arguments arguments{ffn.down,
                            ffn.b_down,
                            chunk.active,
                            static_cast<T*>(ffn.y) + chunk.first * ffn.hidden,
                            chunk.tokens,
                            ffn.hidden,
                            ffn.width,
                            slices};
  const int grid = min(device.sm_count, chunk.active.blocks * slices);
  return launch_kernel(down_kernel<T, kHidden>, grid, kThreads, 1, kShared, stream, column_map, down_map, arguments);
}

template <typename T>
cudaError_t launch_slices(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  int best = 256;
  int64_t best_cost = INT64_MAX;
  for (const int hidden : {256, 128, 64}) {
    const int64_t items = static_cast<int64_t>(chunk.active.blocks) * ((ffn.hidden + hidden - 1) / hidden);
    // h's share of the traffic does not shrink with the slice.
    const int64_t cost = (items + device.sm_count - 1) / device.sm_count * (hidden + 96);
    if (cost < best_cost) best = hidden, best_cost = cost;
  }
  switch (best) {
    case 64: return launch<T, 64>(ffn, chunk, device, stream);
    case 128: return launch<T, 128>(ffn, chunk, device, stream);
    default: return launch<T, 256>(ffn, chunk, device, stream);
  }
}

}  // namespace

cudaError_t launch_down(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch_slices<__nv_bfloat16>(ffn, chunk, device, stream)
                                       : launch_slices<__half>(ffn, chunk, device, stream);
}

}  // namespace twell::sm90
