// Up projection in training, by the tiles of prefill's (sm90/prefill/up.cu): u = x Wu^T + bu stays in registers and shared
// memory. At each pair h = relu(gate) * u takes the place of relu(gate), (relu(gate), u) of kept blocks go to the state,
// and the report's sums are taken on the way. Where there is no pair a column is zero already.

#include "sm90/training/up_end.cuh"

namespace twell::sm90 {
namespace {

using namespace up;

template <typename T, bool kBias>
__device__ __forceinline__ void multiply_all(const SaveArguments& a, int64_t kept_blocks, SaveControl& control,
                                             uint8_t* shared, Ring ring) {
  Control& c = control.c;
  const int steps = (a.up.hidden + kDepth - 1) / kDepth, lane = threadIdx.x % 32, blocks = a.up.active.blocks;
  const int warpgroup = (threadIdx.x - kFetchers) / 128, bytes = stage_bytes(c.tile);
  const uint32_t stages = smem_address(shared);
  Ends& ends = *reinterpret_cast<Ends*>(shared + kSavingRingBytes);
  int block = 0, tiles = 0;
  for (int index = blockIdx.x; index < c.first_tile[blocks]; index += gridDim.x, ++tiles) {
    const Item item = item_at(index, block, blocks, c);
    block = item.block;
    // As in prefill's: neurons [begin, end) are active in this half; multiplied are `wide` times 64 from `low` on.
    const Counts counts = c.counts[block];
    const int begin = warpgroup == 0 ? 0 : max(counts.first_only - item.first, 0);
    const int end = min(item.count, warpgroup == 0 ? counts.first_only + counts.both - item.first : item.count);
    const int low = begin / 16 * 16, wide = max(end - low + 63, 0) / 64, skipped = low * kDepth * 2;
    End tile_end(a, ends, item, kept_blocks, control.first_groups[block], begin, end, low, wide);
    float sum[kMaxNeurons / 2];
    switch (wide) {
      case 0: multiply_tile<T, 0>(sum, ring, stages, bytes, skipped, steps, warpgroup); break;
      case 1: multiply_tile<T, 64>(sum, ring, stages, bytes, skipped, steps, warpgroup); break;
      case 2: multiply_tile<T, 128>(sum, ring, stages, bytes, skipped, steps, warpgroup); break;
      case 3: multiply_tile<T, 192>(sum, ring, stages, bytes, skipped, steps, warpgroup); break;
      default: multiply_tile<T, 256>(sum, ring, stages, bytes, skipped, steps, warpgroup); break;
    }
    barrier_wait(c.listed + tiles % kLists, tiles / kLists & 1);
    const uint16_t* neurons = c.neurons[tiles % kLists];
    // relu(gate) fills one stage or two.
    Ring second = ring;
    if (item.width > kTurnNeurons) second.advance();
    ring.wait_full();
    second.wait_full();
    bool both = item.width > kTurnNeurons;  // stages are held
    const auto give_back = [&](int stage) {
      __syncwarp();
      release(ring, stage);
    };
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      if (p >= wide) break;
      const int pass = low + p * kPassNeurons;
      __syncwarp();  // u of the pass before has been read
#pragma unroll
      for (int q = 0; q < kPassNeurons; q += 16) {
        if (pass + q >= end) break;
        uint32_t words[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int i = (p * kPassNeurons + q) / 2 + 4 * (m / 2) + m % 2 * 2;
          if constexpr (kBias) {
            const T* bias = static_cast<const T*>(a.up.bias);
            const int column = pass + q + m / 2 * 8 + lane % 4 * 2;
            words[m] = pack<T>(sum[i] + widen(bias[neurons[min(column, item.count - 1)]]),
                               sum[i + 1] + widen(bias[neurons[min(column + 1, item.count - 1)]]));
          } else {
            words[m] = pack<T>(sum[i], sum[i + 1]);
          }
        }
        const int at = End::up_at(q + lane / 16 * 8 + lane % 8, lane / 8 & 1);
        store_matrices_transposed(smem_address(tile_end.ups()) + at, words);
      }
      tile_end.template take<T>(p, shared + ring.stage * bytes, shared + second.stage * bytes, neurons);
      if (both && pass + kPassNeurons >= kTurnNeurons) {
        give_back(ring.stage);
        both = false;
      }
    }
    if (both) give_back(ring.stage);
    give_back(second.stage);
    ring = second;
    ring.advance();
    tile_end.finish(neurons);
  }
}

template <typename T, bool kMany, bool kBias>
__global__ void __launch_bounds__(kThreads, 1)
    up_save_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap up_map,
                   const __grid_constant__ SaveArguments a) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  SaveControl& control = *reinterpret_cast<SaveControl*>(shared + kRingBytes);
  Control& c = control.c;
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
  const int64_t kept_blocks = __ldcg(a.training.state.totals) - a.first_block;
  for (int b = threadIdx.x; b < a.up.active.blocks; b += kThreads) {
    c.counts[b] = a.up.active.counts[b];
    if (b < kept_blocks) {
      control.first_groups[b] = static_cast<uint32_t>(a.training.state.blocks[a.first_block + b].first_entry / kGroup);
    }
  }
  uint32_t* zeros = &reinterpret_cast<Ends*>(shared + kSavingRingBytes)->zeros[0][0];
  for (int i = threadIdx.x; i < kMaxNeurons * kBlockTokens / 32; i += kThreads) zeros[i] = 0;
  __syncthreads();
  make_plan(c, a.up.active.blocks, a.up.turned);
  const Ring ring(c.full, c.empty, min(kMaxStages, kSavingRingBytes / stage_bytes(c.tile)));
  if (threadIdx.x < kFetchers) {
    give_registers<kFetchRegisters>();
    fetch<T, kMany>(a.up, &x_map, &up_map, c, shared, ring);
  } else {
    take_registers<kMultiplyRegisters>();
    multiply_all<T, kBias>(a, kept_blocks, control, shared, ring);
  }
#endif
}

template <typename T, bool kMany, bool kBias>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const Saving& saving, const Training& training,
                   const Device& device, cudaStream_t stream) {
  CUtensorMap x_map, up_map;
  const T* x = static_cast<const T*>(ffn.x) + chunk.first * ffn.hidden;
  TWELL_RETURN_IF_ERROR(make_tensor_map(&x_map, ffn.dtype, x, chunk.tokens, ffn.hidden, kBlockTokens));
  TWELL_RETURN_IF_ERROR(make_tensor_map(&up_map, ffn.dtype, ffn.up.data, ffn.width, ffn.hidden, kBoxRows));
  const SaveArguments arguments{
      {ffn.up.data, ffn.b_up, chunk.active, ffn.hidden, ffn.width, kMany}, saving, training, chunk.first_block()};
  return launch_kernel(up_save_kernel<T, kMany, kBias>, device.sm_count, kThreads, 1, kSavingShared, stream, x_map, up_map,
                       arguments);
}

template <typename T>
cudaError_t launch_type(const Ffn& ffn, const Chunk& chunk, const Saving& saving, const Training& training,
                        const Device& device, cudaStream_t stream) {
  const bool many = chunk.active.blocks >= kManyBlocks, bias = ffn.b_up != nullptr;
  const auto run = bias ? (many ? launch<T, true, true> : launch<T, false, true>)
                        : (many ? launch<T, true, false> : launch<T, false, false>);
  return run(ffn, chunk, saving, training, device, stream);
}

}  // namespace

cudaError_t launch_up_save(const Ffn& ffn, const Chunk& chunk, const Saving& saving, const Training& training,
                           const Device& device, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(ffn, chunk, saving, training, device, stream)
                                       : launch_type<__half>(ffn, chunk, saving, training, device, stream);
}

}  // namespace twell::sm90
