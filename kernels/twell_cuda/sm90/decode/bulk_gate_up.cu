// Hopper's form of the first of a decode call's two kernels (the portable one: decode/gate_up.cu; layout:
// decode/plan.h, but h as (neuron, 8 tokens)): h = relu(x Wg^T + bg) * (x Wu^T + bu) for the active neurons.
//
// A thread block owns neighbouring blocks of 16 neurons. One warp brings rows into a ring of stages in shared memory:
// gate rows before the kernel ahead has ended, for they do not depend on it, and as much as shared memory holds; later
// the up rows of active neurons. Eight warps share out k and add up through shared memory. sm90/decode/few_down.cu follows.

#include "decode/decode.h"
#include "decode/launch.h"
#include "sm90/decode/bulk_ring.cuh"

namespace twell::decoding {
namespace {

using namespace bulk;

constexpr int kSharedBytes = 224 * 1024;

template <typename Half, int kBlocks>
__global__ void __launch_bounds__(kWorkers, kBlocks <= 3 ? 2 : 1) bulk_gate_up_kernel(
    const __grid_constant__ BulkParams p) {
#if defined(TWELL_SM90_DEVICE)
  constexpr int kElements = kBlocks * 32;
  extern __shared__ __align__(128) char shared[];
  char* const ring_bytes = shared;
  float4* const slots = reinterpret_cast<float4*>(shared);  // in the ring, when no copies are under way
  float4* const gate = reinterpret_cast<float4*>(shared + p.ring_bytes);  // after the activation
  __shared__ uint64_t barriers[2 * kMaxStages];
  __shared__ uint32_t masks[kBlocks];
  __shared__ uint8_t active[kBlocks * kBlockNeurons];  // in ascending order

  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const Share share(p, kBlocks);
  sm90::Ring ring(barriers, barriers + kMaxStages, p.stages);

  if (warp == kDecodeWarps) {
    if (lane == 0) {
#pragma unroll
      for (int s = 0; s < kMaxStages; ++s) {
        sm90::barrier_init(barriers + s, 1);
        sm90::barrier_init(barriers + kMaxStages + s, kDecodeWarps);
      }
      sm90::fence_barrier_init();
    }
    __syncwarp();
    sm90::named_arrive<kWorkers>(kReady);  // and asks for rows at once
    bring_rows(p, share, lane, ring, ring_bytes, masks, active);
    return;
  }

  sm90::named_barrier<kWorkers>(kReady);
  wait_for_previous_kernel();
  if (thread == 0 && blockIdx.x == 0 && p.blocks % 2 == 1) p.masks[p.blocks] = 0;
  uint4 x[kSteps];
  for (int pass = 0; pass < share.passes; ++pass) {
    const int first_block = share.first_block(pass), blocks = share.first_block(pass + 1) - first_block;
    const int first = first_block * kBlockNeurons;
    if (thread < kBlocks) masks[thread] = 0;
    {
      float sum[kBlocks][4];
      multiply<Half, kBlocks>(sum, blocks, x, pass > 0, ring, ring_bytes, p);
      leave_sums(slots, sum, blocks);
    }
    for (int e = thread; e < blocks * 32; e += kDecodeThreads) {  // whole warps
      float4 v = slots[e];
#pragma unroll
      for (int s = 1; s < kDecodeWarps; ++s) {
        const float4 other = slots[s * kElements + e];
        v.x += other.x, v.y += other.y, v.z += other.z, v.w += other.w;
      }
      const int block = e / 32;
      const int neuron = first + block * kBlockNeurons + lane / 4;
      const int token = lane % 4 * 2;
      const float low_bias = bias_of<Half>(p.b_gate, neuron, p.width);
      const float high_bias = bias_of<Half>(p.b_gate, neuron + 8, p.width);
      v.x = activate(v.x, low_bias, neuron < p.width && token < p.tokens);
      v.y = activate(v.y, low_bias, neuron < p.width && token + 1 < p.tokens);
      v.z = activate(v.z, high_bias, neuron + 8 < p.width && token < p.tokens);
      v.w = activate(v.w, high_bias, neuron + 8 < p.width && token + 1 < p.tokens);
      gate[e] = v;
      const uint32_t low = any_of_four(v.x != 0.f || v.y != 0.f);
      const uint32_t high = any_of_four(v.z != 0.f || v.w != 0.f);
      if (lane == 0) atomicOr(&masks[block], low | high << 8);
    }
    sm90::named_barrier<kDecodeThreads>(1);
    if (thread < blocks) p.masks[first_block + thread] = static_cast<uint16_t>(masks[thread]);
    int active_count = 0;
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) active_count += __popc(masks[m]);  // 0 past `blocks`
    if (thread < kBlocks * kBlockNeurons) {
      const int block = thread / kBlockNeurons;
      const uint32_t mask = masks[block], bit = 1u << thread % kBlockNeurons;
      if (mask & bit) {
        int rank = __popc(mask & (bit - 1));
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) rank += m < block ? __popc(masks[m]) : 0;
        active[rank] = static_cast<uint8_t>(thread);
      }
    }
    sm90::fence_async_proxy();  // the sums' place is the copies' again
    sm90::named_barrier<kWorkers>(kListed);
    let_next_kernel_start();

    const bool multiplies = active_count > 0 && p.up != nullptr;
    if (multiplies) {
      float sum[kBlocks][4];
      const int tiles = (active_count + kBlockNeurons - 1) / kBlockNeurons;
      multiply<Half, kBlocks>(sum, tiles, x, true, ring, ring_bytes, p);
      leave_sums(slots, sum, tiles);
    }
    Half* const products = reinterpret_cast<Half*>(p.products) + static_cast<int64_t>(first) * kTokens;
    for (int i = thread; i < active_count * kTokens; i += kDecodeThreads) {
      const int rank = i / kTokens, token = i % kTokens, neuron = active[rank];
      float h = sum_at<1>(gate, neuron, token);
      if (multiplies && h != 0.f) {
        float up = 0.f;
#pragma unroll
        for (int s = 0; s < kDecodeWarps; ++s) up += sum_at<1>(slots + s * kElements, rank, token);
        h *= up + bias_of<Half>(p.b_up, first + neuron, p.width);
      }
      products[neuron * kTokens + token] = Half(h);
    }
    if (pass + 1 < share.passes) {
      sm90::fence_async_proxy();
      sm90::named_barrier<kWorkers>(kRingFree);
    }
  }
#endif
}

template <typename Half, int kBlocks>
cudaError_t launch(BulkParams params, const DecodePlan& plan, int grid, cudaStream_t stream) {
  constexpr int kSlotBytes = kDecodeWarps * kBlocks * 512, kGateBytes = kBlocks * 512;
  const uint32_t chunk = params.row_bytes < kChunkBytes ? params.row_bytes : kChunkBytes;
  params.row_stride = static_cast<uint32_t>(round_up(chunk, 128)) + 64;
  const int stage_bytes = kBlockNeurons * static_cast<int>(params.row_stride);
  const int chunks = static_cast<int>((params.row_bytes + kChunkBytes - 1) / kChunkBytes);
  const int needed = (params.blocks + grid - 1) / grid * chunks;
  const int room = (kSharedBytes - kGateBytes - 1024) / stage_bytes;
  params.stages = needed < room ? needed : room;
  if (params.stages > kMaxStages) params.stages = kMaxStages;
  const int ring = params.stages * stage_bytes;
  params.ring_bytes = static_cast<uint32_t>(ring > kSlotBytes ? ring : kSlotBytes);
  const int shared = static_cast<int>(params.ring_bytes) + kGateBytes;
  return launch_decode_kernel(bulk_gate_up_kernel<Half, kBlocks>, {dim3(static_cast<unsigned>(grid)), kWorkers, shared}, params,
                       plan.kernels, stream);
}

template <typename Half>
cudaError_t launch_for(const DecodePlan& plan, BulkParams params, const Device& device, cudaStream_t stream) {
  const int grid = params.blocks < device.sm_count ? params.blocks : device.sm_count;
  params.blocks_each = params.blocks / grid, params.larger = params.blocks % grid;
  return params.blocks <= 3 * grid ? launch<Half, 3>(params, plan, grid, stream)
                                   : launch<Half, 8>(params, plan, grid, stream);
}

}  // namespace

cudaError_t launch_bulk_gate_up(const Ffn& ffn, const DecodePlan& plan, const Device& device, void* workspace,
                                cudaStream_t stream) {
  if (ffn.tokens > kTokens) return cudaErrorInvalidValue;
  BulkParams params{};
  static_cast<GateUpParams&>(params) = gate_up_params(ffn, plan, workspace);
  return ffn.dtype == DType::kBFloat16 ? launch_for<__nv_bfloat16>(plan, params, device, stream)
                                       : launch_for<__half>(plan, params, device, stream);
}

}  // namespace twell::decoding
