// What sm90/decode/bulk_gate_up.cu is made of: one warp brings rows of 16 neurons at a time through a ring of stages in shared
// memory with bulk copies, one for each row, and eight warps multiply them with a few tokens. Neurons are the rows of the
// product, tokens the columns.
//
// Within each 32 consecutive k, lane q of four takes 8 consecutive ones (16 bytes) of weights and activations alike:
// both operands see the same permutation of k, so no data moves between lanes.
#pragma once

#include "decode/gate.cuh"
#include "sm90/common/primitives.cuh"

namespace twell::decoding::bulk {

constexpr int kWorkers = kDecodeThreads + 32;  // eight warps that multiply, one that copies
constexpr int kMaxStages = 8;
constexpr uint32_t kPieceBytes = 64;                          // 32 consecutive k
constexpr uint32_t kStepBytes = kDecodeWarps * kPieceBytes;  // a piece for each warp

struct BulkParams : GateUpParams {
  int blocks_each;  // of a thread block; the first `larger` have one more
  int larger;
  int stages;
  uint32_t row_stride;  // of a stage: 64 modulo 128, so that 16-byte reads of two rows meet no bank twice
  uint32_t ring_bytes;
};

constexpr int kTokens = 8;                             // at most: their share of x is in a warp's registers
constexpr int kSteps = 8;                              // of a stage
constexpr uint32_t kChunkBytes = kSteps * kStepBytes;  // of each row in a stage

#if defined(TWELL_SM90_DEVICE)

// What a warp needs to find its operands.
struct Lane {
  int warp, lane;
  uint32_t offset;  // of its 16 bytes in a step
  const char* x;    // its token's row in group 0, at `offset`
};

__device__ __forceinline__ Lane this_lane(const GateUpParams& p) {
  Lane l;
  l.warp = threadIdx.x / 32, l.lane = threadIdx.x % 32;
  l.offset = l.warp * kPieceBytes + l.lane % 4 * 16;
  l.x = p.x + l.lane / 4 * p.row_bytes + l.offset;
  return l;
}

__device__ __forceinline__ void load_x(uint4& to, const Lane& l, const GateUpParams& p, int step) {
  const uint32_t k = step * kStepBytes;
  load_tokens_once(to, l.x + k, l.lane / 4 < p.tokens && k + l.offset < p.row_bytes);
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

// sum[block] = rows x^T over this warp's pieces of k, for `blocks` blocks of 16 rows as they come through the ring: chunk
// by chunk of k, all blocks of a chunk in a row. `x` keeps what it holds if all of k fits in one chunk and `has_x`.
template <typename Half, int kBlocks>
__device__ __forceinline__ void multiply(float (&sum)[kBlocks][4], int blocks, uint4 (&x)[kSteps], bool has_x,
                                         sm90::Ring& ring, const char* ring_bytes, const BulkParams& p) {
  const Lane l = this_lane(p);
  const int chunks = (p.row_bytes + kChunkBytes - 1) / kChunkBytes;
  const uint32_t stage_bytes = kBlockNeurons * p.row_stride;
  const char* const mine = ring_bytes + l.lane / 4 * p.row_stride + l.offset;
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) sum[m][0] = sum[m][1] = sum[m][2] = sum[m][3] = 0.f;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (chunks > 1 || !has_x) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) load_x(x[i], l, p, chunk * kSteps + i);
    }
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      if (m >= blocks) break;
      ring.wait_full();
      const char* const stage = mine + ring.stage * stage_bytes;
      // Products that follow each other in one sum wait for each other: two sums, joined at the end.
      float part[2][4] = {};
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const uint32_t k = chunk * kChunkBytes + i * kStepBytes;
        if (k + l.warp * kPieceBytes >= p.row_bytes) break;  // the same for the whole warp
        const Operand a = load_a(stage, p.row_stride, i, k + l.offset < p.row_bytes);
        mma<Half>(part[0], a.low.x, a.high.x, a.low.y, a.high.y, x[i].x, x[i].y);
        mma<Half>(part[1], a.low.z, a.high.z, a.low.w, a.high.w, x[i].z, x[i].w);
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
  __device__ __forceinline__ Share(const BulkParams& p, int most) {
    const int index = blockIdx.x;
    begin = p.blocks_each * index + min(index, p.larger);
    count = p.blocks_each + (index < p.larger ? 1 : 0);
    passes = (count + most - 1) / most;
    chunks = (p.row_bytes + kChunkBytes - 1) / kChunkBytes;
  }
  __device__ __forceinline__ int first_block(int pass) const {
    return begin + (passes == 1 ? count * pass : count * pass / passes);
  }
};

// The copying warp: gate rows of a pass, and once the others have listed the active neurons, those neurons' up rows.
__device__ __forceinline__ void bring_rows(const BulkParams& p, const Share& share, int lane, sm90::Ring& ring,
                                           char* ring_bytes, const uint32_t* masks, const uint8_t* active) {
  for (int pass = 0; pass < share.passes; ++pass) {
    const int first_block = share.first_block(pass), blocks = share.first_block(pass + 1) - first_block;
    const int first = first_block * kBlockNeurons;
    for (int chunk = 0; chunk < share.chunks; ++chunk) {
      const uint32_t start = chunk * kChunkBytes, bytes = min(kChunkBytes, p.row_bytes - start);
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
        const uint32_t start = chunk * kChunkBytes, bytes = min(kChunkBytes, p.row_bytes - start);
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
