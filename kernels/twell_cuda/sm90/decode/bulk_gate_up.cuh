// Hopper's form of the first of a decode call's two kernels (the portable one: decode/gate_up.cu; layout:
// decode/plan.h, but h as (neuron, 8 tokens)): h = relu(x Wg^T + bg) * (x Wu^T + bu) for the active neurons.
//
// A thread block owns neighbouring blocks of 16 neurons. One warp brings rows into a ring of stages in shared memory:
// gate rows before the kernel ahead has ended, for they do not depend on it, and as much as shared memory holds; later
// the up rows of active neurons. Eight warps share out k and add up through shared memory. sm90/decode/few_down.cuh
// follows. `Weight` is the call's own type, or an 8-bit one.
#pragma once

#include "decode/decode.h"
#include "decode/gate.cuh"
#include "decode/launch.h"
#include "sm90/common/primitives.cuh"

namespace twell::decoding::bulk {

// The ring and the products: one warp brings rows of 16 neurons at a time through a ring of stages in shared
// memory with bulk copies, one for each row, and eight warps multiply them with a few tokens. Neurons are the rows of
// the product, tokens the columns.
//
// Within each piece of 64 bytes of weights, lane q of four takes 16 consecutive bytes, and the activations that meet
// them: both operands see the same permutation of k, so no data moves between lanes. 8-bit weights meet twice as many
// bytes of activations.

constexpr int kWorkers = kDecodeThreads + 32;  // eight warps that multiply, one that copies
constexpr int kMaxStages = 8;
constexpr uint32_t kPieceBytes = 64;                         // of a row of weights
constexpr uint32_t kStepBytes = kDecodeWarps * kPieceBytes;  // a piece for each warp

struct BulkParams : GateUpParams {
  int blocks_each;  // of a thread block; the first `larger` have one more
  int larger;
  int stages;
  uint32_t row_stride;  // of a stage: 64 modulo 128, so that 16-byte reads of two rows meet no bank twice
  uint32_t ring_bytes;
};

constexpr int kTokens = 8;  // at most: their share of x is in a warp's registers
template <int kPerByte>
constexpr int kSteps = 8 / kPerByte;  // of a stage
template <int kPerByte>
constexpr uint32_t kChunkBytes = kSteps<kPerByte> * kStepBytes;  // of each row in a stage

#if defined(TWELL_SM90_DEVICE)

// What a warp needs to find its operands.
struct Lane {
  int warp, lane;
  uint32_t offset;  // of its 16 bytes in a step
  const char* x;    // its token's row, at what meets `offset`
};

template <int kPerByte>
__device__ __forceinline__ Lane this_lane(const GateUpParams& p) {
  Lane l;
  l.warp = threadIdx.x / 32, l.lane = threadIdx.x % 32;
  l.offset = l.warp * kPieceBytes + l.lane % 4 * 16;
  l.x = p.x + (l.lane / 4 * p.row_bytes + l.offset) * kPerByte;
  return l;
}

template <int kPerByte>
__device__ __forceinline__ void load_x(uint4 (&to)[kPerByte], const Lane& l, const GateUpParams& p, int step) {
  const uint32_t k = step * kStepBytes;
#pragma unroll
  for (int i = 0; i < kPerByte; ++i) {
    load_tokens_once(to[i], l.x + k * kPerByte + 16 * i, l.lane / 4 < p.tokens && k + l.offset < p.row_bytes);
  }
}

struct Operand {
  uint4 low, high;  // rows lane / 4 and lane / 4 + 8
};

// `stage` points at the lane's 16 bytes of step 0. Past a row's end lies anything: zeros instead.
__device__ __forceinline__ Operand load_a(const char* stage, uint32_t row_stride, int step, bool inside) {
  Operand a{};
  if (inside) {
    a.low = *reinterpret_cast<const uint4*>(stage + step * kStepBytes);
    a.high = *reinterpret_cast<const uint4*>(stage + step * kStepBytes + 8 * row_stride);
  }
  return a;
}

// The warp has read all that it wants of a stage.
__device__ __forceinline__ void release(uint64_t* empty, int lane) {
  __syncwarp();
  if (lane == 0) sm90::barrier_arrive(empty);
}

// sum[block] = rows x^T over this warp's pieces of k, for `blocks` blocks of 16 rows as they come through the ring:
// chunk by chunk of k, all blocks of a chunk in a row. `x` keeps what it holds if all of k fits in one chunk and
// `has_x`.
template <typename Half, typename Weight, int kBlocks, int kPerByte = kRatio<Half, Weight>>
__device__ __forceinline__ void multiply(float (&sum)[kBlocks][4], int blocks, uint4 (&x)[kSteps<kPerByte>][kPerByte],
                                         bool has_x, sm90::Ring& ring, const char* ring_bytes, const BulkParams& p) {
  const Lane l = this_lane<kPerByte>(p);
  const int chunks = (p.row_bytes + kChunkBytes<kPerByte> - 1) / kChunkBytes<kPerByte>;
  const uint32_t stage_bytes = kBlockNeurons * p.row_stride;
  const char* const mine = ring_bytes + l.lane / 4 * p.row_stride + l.offset;
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) sum[m][0] = sum[m][1] = sum[m][2] = sum[m][3] = 0.f;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (chunks > 1 || !has_x) {
#pragma unroll
      for (int i = 0; i < kSteps<kPerByte>; ++i) load_x<kPerByte>(x[i], l, p, chunk * kSteps<kPerByte> + i);
    }
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      if (m >= blocks) break;
      ring.wait_full();
      const char* const stage = mine + ring.stage * stage_bytes;
      // Products that follow each other in one sum wait for each other: two sums, joined at the end.
      float part[2][4] = {};
#pragma unroll
      for (int i = 0; i < kSteps<kPerByte>; ++i) {
        const uint32_t k = chunk * kChunkBytes<kPerByte> + i * kStepBytes;
        if (k + l.warp * kPieceBytes >= p.row_bytes) break;  // the same for the whole warp
        const Operand a = load_a(stage, p.row_stride, i, k + l.offset < p.row_bytes);
#pragma unroll
        for (int j = 0; j < kPerByte; ++j) {
          uint32_t low[4], high[4];
          unpack<Half, Weight>(low, a.low, j), unpack<Half, Weight>(high, a.high, j);
          mma<Half>(part[0], low[0], high[0], low[1], high[1], x[i][j].x, x[i][j].y);
          mma<Half>(part[1], low[2], high[2], low[3], high[3], x[i][j].z, x[i][j].w);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[m][j] += part[0][j] + part[1][j];
      release(ring.empty + ring.stage, l.lane);
      ring.advance();
    }
  }
}

// Every warp leaves its sums in a slot of its own, once all of them are done with what lay there.
template <int kTiles>
__device__ __forceinline__ void leave_sums(float4* slots, const float (&sum)[kTiles][4], int tiles) {
  float4* const mine = slots + threadIdx.x / 32 * (kTiles * 32) + threadIdx.x % 32;
  sm90::named_barrier<kDecodeThreads>(1);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    if (i < tiles) mine[i * 32] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
  }
  sm90::named_barrier<kDecodeThreads>(1);
}

// Bytes `start`.. of up to 16 rows into the ring's next stage; `row` is the lane's, for lanes below `rows`.
__device__ __forceinline__ void fill_stage(sm90::Ring& ring, char* ring_bytes, const BulkParams& p, const char* row,
                                           int rows, uint32_t start, uint32_t bytes) {
  const int lane = threadIdx.x % 32;
  ring.wait_empty();
  uint64_t* const full = ring.full + ring.stage;
  if (lane == 0) sm90::barrier_arrive_expect(full, rows * bytes);
  __syncwarp();
  if (lane < rows) {
    sm90::load_bytes(ring_bytes + (ring.stage * kBlockNeurons + lane) * p.row_stride, row + start, bytes, full);
  }
  ring.advance();
}

__device__ __forceinline__ void prefetch_row(const char* row, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(row), "r"(bytes) : "memory");
}

constexpr int kListed = 2, kRingFree = 3, kReady = 4;  // named barriers of all threads

// A thread block's blocks of neurons, in passes of about equally many; each row comes in `chunks` pieces.
struct Share {
  int begin, count, passes, chunks;
  __device__ __forceinline__ Share(const BulkParams& p, int most, uint32_t chunk_bytes) {
    const int index = blockIdx.x;
    begin = p.blocks_each * index + min(index, p.larger);
    count = p.blocks_each + (index < p.larger ? 1 : 0);
    passes = (count + most - 1) / most;
    chunks = (p.row_bytes + chunk_bytes - 1) / chunk_bytes;
  }
  __device__ __forceinline__ int first_block(int pass) const {
    return begin + (passes == 1 ? count * pass : count * pass / passes);
  }
};

// The copying warp: gate rows of a pass, and once the others have listed the active neurons, those neurons' up rows.
template <uint32_t kChunk>
__device__ __forceinline__ void bring_rows(const BulkParams& p, const Share& share, int lane, sm90::Ring& ring,
                                           char* ring_bytes, const uint32_t* masks, const uint8_t* active) {
  for (int pass = 0; pass < share.passes; ++pass) {
    const int first_block = share.first_block(pass), blocks = share.first_block(pass + 1) - first_block;
    const int first = first_block * kBlockNeurons;
    for (int chunk = 0; chunk < share.chunks; ++chunk) {
      const uint32_t start = chunk * kChunk, bytes = min(kChunk, p.row_bytes - start);
      for (int m = 0; m < blocks; ++m) {
        const int neuron = first + m * kBlockNeurons;
        const char* const row = p.gate + static_cast<int64_t>(neuron + lane) * p.row_bytes;
        fill_stage(ring, ring_bytes, p, row, min(kBlockNeurons, p.width - neuron), start, bytes);
      }
    }
    sm90::named_barrier<kWorkers>(kListed);
    int active_count = 0;
    for (int m = 0; m < blocks; ++m) active_count += __popc(masks[m]);
    if (p.up != nullptr) {
      for (int chunk = 0; chunk < share.chunks; ++chunk) {
        const uint32_t start = chunk * kChunk, bytes = min(kChunk, p.row_bytes - start);
        for (int u = 0; u < active_count; u += kBlockNeurons) {
          const int neuron = first + active[min(u + lane, active_count - 1)];
          const char* const row = p.up + static_cast<int64_t>(neuron) * p.row_bytes;
          fill_stage(ring, ring_bytes, p, row, min(kBlockNeurons, active_count - u), start, bytes);
        }
      }
    }
    if (active_count <= p.prefetch_max_active * blocks) {
      for (int i = lane; i < active_count; i += 32) {
        prefetch_row(p.down + static_cast<int64_t>(first + active[i]) * p.row_bytes, p.row_bytes);
      }
    }
    if (pass + 1 < share.passes) sm90::named_barrier<kWorkers>(kRingFree);
  }
}

#endif

}  // namespace twell::decoding::bulk

namespace twell::decoding {
namespace {

using namespace bulk;

constexpr int kSharedBytes = 224 * 1024;

template <typename Half, typename Weight, int kBlocks>
__global__ void __launch_bounds__(kWorkers, kBlocks <= 3 ? 2 : 1)
    bulk_gate_up_kernel(const __grid_constant__ BulkParams p) {
#if defined(TWELL_SM90_DEVICE)
  constexpr int kElements = kBlocks * 32, kPerByte = kRatio<Half, Weight>;
  extern __shared__ __align__(128) char shared[];
  char* const ring_bytes = shared;
  float4* const slots = reinterpret_cast<float4*>(shared);                // in the ring, when no copies are under way
  float4* const gate = reinterpret_cast<float4*>(shared + p.ring_bytes);  // after the activation
  __shared__ uint64_t barriers[2 * kMaxStages];
  __shared__ uint32_t masks[kBlocks];
  __shared__ uint8_t active[kBlocks * kBlockNeurons];  // in ascending order

  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const Share share(p, kBlocks, kChunkBytes<kPerByte>);
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
    bring_rows<kChunkBytes<kPerByte>>(p, share, lane, ring, ring_bytes, masks, active);
    return;
  }

  sm90::named_barrier<kWorkers>(kReady);
  wait_for_previous_kernel();
  if (thread == 0 && blockIdx.x == 0 && p.blocks % 2 == 1) p.masks[p.blocks] = 0;
  uint4 x[kSteps<kPerByte>][kPerByte];
  for (int pass = 0; pass < share.passes; ++pass) {
    const int first_block = share.first_block(pass), blocks = share.first_block(pass + 1) - first_block;
    const int first = first_block * kBlockNeurons;
    if (thread < kBlocks) masks[thread] = 0;
    {
      float sum[kBlocks][4];
      multiply<Half, Weight, kBlocks>(sum, blocks, x, pass > 0, ring, ring_bytes, p);
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
      activate<Half, Weight>(v, p, neuron, token);
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
      multiply<Half, Weight, kBlocks>(sum, tiles, x, true, ring, ring_bytes, p);
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
        if constexpr (kScaled<Weight>) up *= scale_of(p.s_up, first + neuron, p.width);
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

template <typename Half, typename Weight, int kBlocks>
cudaError_t launch(BulkParams params, const DecodePlan& plan, int grid, cudaStream_t stream) {
  constexpr int kSlotBytes = kDecodeWarps * kBlocks * 512, kGateBytes = kBlocks * 512;
  constexpr uint32_t kChunk = kChunkBytes<kRatio<Half, Weight>>;
  const uint32_t chunk = params.row_bytes < kChunk ? params.row_bytes : kChunk;
  params.row_stride = static_cast<uint32_t>(round_up(chunk, 128)) + 64;
  const int stage_bytes = kBlockNeurons * static_cast<int>(params.row_stride);
  const int chunks = static_cast<int>((params.row_bytes + kChunk - 1) / kChunk);
  const int needed = (params.blocks + grid - 1) / grid * chunks;
  const int room = (kSharedBytes - kGateBytes - 1024) / stage_bytes;
  params.stages = needed < room ? needed : room;
  if (params.stages > kMaxStages) params.stages = kMaxStages;
  const int ring = params.stages * stage_bytes;
  params.ring_bytes = static_cast<uint32_t>(ring > kSlotBytes ? ring : kSlotBytes);
  const int shared = static_cast<int>(params.ring_bytes) + kGateBytes;
  return launch_decode_kernel(bulk_gate_up_kernel<Half, Weight, kBlocks>,
                              {dim3(static_cast<unsigned>(grid)), kWorkers, shared}, params, plan.kernels, stream);
}

template <typename Half, typename Weight>
cudaError_t launch_bulk_gate_up_of(const Ffn& ffn, const DecodePlan& plan, const Device& device, void* workspace,
                                   cudaStream_t stream) {
  if (ffn.tokens > kTokens) return cudaErrorInvalidValue;
  BulkParams params{};
  static_cast<GateUpParams&>(params) = gate_up_params(ffn, plan, workspace);
  const int grid = params.blocks < device.sm_count ? params.blocks : device.sm_count;
  params.blocks_each = params.blocks / grid, params.larger = params.blocks % grid;
  return params.blocks <= 3 * grid ? launch<Half, Weight, 3>(params, plan, grid, stream)
                                   : launch<Half, Weight, 8>(params, plan, grid, stream);
}

}  // namespace
}  // namespace twell::decoding
