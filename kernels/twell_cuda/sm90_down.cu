// Down projection over active neurons: y = h Wd^T + bd, for each block of 128 tokens a sum over the neurons that any of
// them activates.
//
// A persistent thread block of four warpgroups an SM. Two gather columns of h and rows of Wd (which is stored by columns:
// one row a neuron) with cp.async; the other two multiply 64 tokens each. Both operands lie in shared memory
// as they do in global memory, tokens and hidden units contiguous, and the tensor cores read them transposed.

#include "sm90_call.h"
#include "sm90_launch.h"
#include "sm90_primitives.cuh"
#include "sm90_wgmma.cuh"

namespace twell::sm90 {
namespace {

constexpr int kFetchers = 128, kThreads = kFetchers + 256, kConsumerWarps = 8, kDepth = 64, kStages = 4;
constexpr int kHalfBytes = 64 * kDepth * 2;  // 64 tokens or hidden units x 64 neurons

template <int kHidden>
struct Shape {
  static constexpr int kStageBytes = 2 * kHalfBytes + kHidden * kDepth * 2;
  static constexpr int kTurnBytes = 16 * 128;  // a warp's 16 tokens x 64 hidden units, on their way to y
};

struct Control {
  uint64_t full[kStages], empty[kStages];
  int counts[kMaxBlocks];
};

template <int kHidden>
constexpr int shared_bytes() {
  return 1024 + kStages * Shape<kHidden>::kStageBytes + kConsumerWarps * Shape<kHidden>::kTurnBytes + sizeof(Control);
}
static_assert(shared_bytes<256>() <= 227 * 1024);

struct Arguments {
  const void* down;
  const void* bias;
  Active active;
  void* y;
  int64_t tokens;
  int hidden, width, slices;
};

template <typename T, int kHidden>
__device__ __forceinline__ void fetch(const Arguments& a, const Control& c, uint8_t* shared, Ring<kStages> ring) {
  constexpr int kRows = kFetchers / 8, kShare = kDepth / kRows;
  const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;  // eight threads copy 128 bytes; every kRows-th row is theirs
  const uint32_t stages = smem_address(shared), place = row * 128 + ((chunk ^ (row & 7)) << 4);
  const int items = a.active.blocks * a.slices;
  // This thread's neurons of one step; 0 past the end, where zeros are copied.
  const auto list = [&](int index, int start, uint16_t* neurons) {
    const int block = index / a.slices, count = index < items ? c.counts[block] : 0;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int at = start + row + kRows * i;
      neurons[i] = at < count ? __ldcg(a.active.neurons + static_cast<int64_t>(block) * a.width + at) : 0;
    }
  };
  uint16_t neurons[kShare], next_neurons[kShare];
  list(blockIdx.x, 0, neurons);
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int block = item / a.slices, first_hidden = item % a.slices * kHidden, count = c.counts[block];
    const T* columns = static_cast<const T*>(a.active.columns) + static_cast<int64_t>(block) * a.width * kBlockTokens;
    const T* down = static_cast<const T*>(a.down) + first_hidden;
    for (int start = 0; start < max(count, 1); start += kDepth) {
      const bool last = start + kDepth >= count;
      list(last ? item + gridDim.x : item, last ? 0 : start + kDepth, next_neurons);  // arrives while we copy
      if (count > 0) {
        ring.wait_empty();
        const uint32_t to = stages + ring.stage * Shape<kHidden>::kStageBytes + place;
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
          const bool valid = start + row + kRows * i < count;
          const T* column = columns + static_cast<int64_t>(neurons[i]) * kBlockTokens + chunk * 8;
          const T* weights = down + static_cast<int64_t>(neurons[i]) * a.hidden + chunk * 8;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            copy_16(to + half * kHalfBytes + i * kRows * 128, column + half * 64, valid);
          }
#pragma unroll
          for (int part = 0; part < kHidden / 64; ++part) {
            const bool inside = valid && first_hidden + part * 64 + chunk * 8 < a.hidden;
            copy_16(to + (2 + part) * kHalfBytes + i * kRows * 128, inside ? weights + part * 64 : a.down, inside);
          }
        }
        barrier_arrive_on_copies(ring.full + ring.stage);
        ring.advance();
      }
#pragma unroll
      for (int i = 0; i < kShare; ++i) neurons[i] = next_neurons[i];
    }
  }
}

template <typename T, int kHidden>
__device__ __forceinline__ void multiply(const Arguments& a, const Control& c, uint8_t* shared, Ring<kStages> ring) {
  using S = Shape<kHidden>;
  const int lane = threadIdx.x % 32, warp = (threadIdx.x - kFetchers) / 32, warpgroup = warp / 4;
  const uint32_t turn = smem_address(shared) + kStages * S::kStageBytes + warp * S::kTurnBytes;
  for (int item = blockIdx.x; item < a.active.blocks * a.slices; item += gridDim.x) {
    const int block = item / a.slices, first_hidden = item % a.slices * kHidden, count = c.counts[block];
    float sum[kHidden / 2];
    if (count == 0) {
#pragma unroll
      for (int i = 0; i < kHidden / 2; ++i) sum[i] = 0.0f;
    }
    for (int start = 0; start < count; start += kDepth, ring.advance()) {
      ring.wait_full();
      fence_async_proxy();  // cp.async wrote, tensor cores read
      const uint32_t stage = smem_address(shared) + ring.stage * S::kStageBytes;
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
        Wgmma<T, kHidden, 1, 1>::multiply(sum, matrix_descriptor(stage + warpgroup * kHalfBytes + k * 2048, kHalfBytes),
                                          matrix_descriptor(stage + 2 * kHalfBytes + k * 2048, kHalfBytes), start + k);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (start > 0 && lane == 0) barrier_arrive(ring.empty + ring.previous());
    }
    wgmma_wait<0>();
    if (count > 0 && lane == 0) barrier_arrive(ring.empty + ring.previous());

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
__global__ void __launch_bounds__(kThreads, 1) down_kernel(const Arguments a) {
#if defined(TWELL_SM90_DEVICE)
  using S = Shape<kHidden>;
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  Control& c = *reinterpret_cast<Control*>(shared + kStages * S::kStageBytes + kConsumerWarps * S::kTurnBytes);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(c.full + s, kFetchers);
      barrier_init(c.empty + s, kConsumerWarps);
    }
    fence_barrier_init();
  }
  launch_dependents();
  wait_for_previous();
  for (int b = threadIdx.x; b < a.active.blocks; b += kThreads) c.counts[b] = __ldcg(a.active.counts + b);
  __syncthreads();
  const Ring<kStages> ring(c.full, c.empty);
  if (threadIdx.x < kFetchers) {
    give_registers<72>();
    fetch<T, kHidden>(a, c, shared, ring);
  } else {
    take_registers<216>();
    multiply<T, kHidden>(a, c, shared, ring);
  }
#endif
}

template <typename T, int kHidden>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  const int slices = (ffn.hidden + kHidden - 1) / kHidden;
  const Arguments arguments{ffn.down,
                            ffn.b_down,
                            chunk.active,
                            static_cast<T*>(ffn.y) + chunk.first * ffn.hidden,
                            chunk.tokens,
                            ffn.hidden,
                            ffn.width,
                            slices};
  const int grid = min(device.sm_count, chunk.active.blocks * slices);
  return launch_kernel(down_kernel<T, kHidden>, grid, kThreads, 1, shared_bytes<kHidden>(), stream, arguments);
}

template <typename T>
cudaError_t launch_slices(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream) {
  int best = 256;
  int64_t best_cost = INT64_MAX;
  for (const int hidden : {256, 128, 64}) {
    const int64_t items = static_cast<int64_t>(chunk.active.blocks) * ((ffn.hidden + hidden - 1) / hidden);
    // h's share of the traffic does not shrink with the slice.
    const int64_t cost = (items + device.sm_count - 1) / device.sm_count * (hidden + 64);
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
