// Finds the union of each block of 128 tokens and gathers the block's gate values, relu'd, in the order of the union.
//
// One thread block reads 128 tokens x 128 neurons of the dense gate once, publishes how many of these neurons are in
// the union, and adds up what the slices before it have published: that is where its part of the list starts. Slices
// are taken in order from a counter, so those before it are already running and the wait ends on any GPU.
#include "portable/chunk.h"
#include "portable/element.cuh"

namespace twell::portable {

namespace {

constexpr int kVector = 8;                         // elements of a 16-byte load
constexpr int kVectors = kSliceNeurons / kVector;  // of one token's row of the slice
constexpr int kRowsAtOnce = kThreads / kVectors;   // token rows that the thread block loads together
constexpr int kPasses = kBlockTokens / kRowsAtOnce;
constexpr int kPitch = kSliceNeurons + kVector;  // of the slice in shared memory, in elements
constexpr int kMaskWords = kSliceNeurons / 32;

// relu of two elements; NaN stays NaN, and is so active.
template <class Element>
__device__ __forceinline__ uint32_t relu(uint32_t bits) {
  using Pair = typename Element::Pair;
  return as_bits(__hmax2_nan(as_pair<Pair>(bits), as_pair<Pair>(0u)));
}

// Eight neurons of one token, zero beyond the chunk's tokens and the width.
template <class Element, bool kWholeVectors>
__device__ __forceinline__ uint4 load_gate(const Chunk& chunk, int token, int neuron) {
  uint4 bits = make_uint4(0, 0, 0, 0);
  if (token >= chunk.tokens) return bits;
  const uint16_t* row = static_cast<const uint16_t*>(chunk.gate) + static_cast<int64_t>(token) * chunk.width;
  if constexpr (kWholeVectors) {
    if (neuron < chunk.width) bits = __ldcs(reinterpret_cast<const uint4*>(row + neuron));
  } else {
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (neuron + i < chunk.width) words[i / 2] |= static_cast<uint32_t>(row[neuron + i]) << (i % 2 * 16);
    }
    bits = make_uint4(words[0], words[1], words[2], words[3]);
  }
  return make_uint4(relu<Element>(bits.x), relu<Element>(bits.y), relu<Element>(bits.z), relu<Element>(bits.w));
}

// Bit i: neuron i of the vector is not zero. The sign is left out, so that -0 is zero.
__device__ __forceinline__ uint32_t active_bits(const uint4& bits) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
  uint32_t active = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (words[i] & 0x00007fffu) active |= 1u << (2 * i);
    if (words[i] & 0x7fff0000u) active |= 2u << (2 * i);
  }
  return active;
}

// Sum of what the slices before `slice` of this block have published; called by one warp.
__device__ __forceinline__ int slices_before(const unsigned* published, int slice) {
  int sum = 0;
  for (int i = threadIdx.x; i < slice; i += 32) {
    unsigned count;
    do {
      count = *static_cast<const volatile unsigned*>(published + i);
    } while (count == 0);
    sum += static_cast<int>(count) - 1;
  }
  return __reduce_add_sync(0xffffffffu, sum);
}

template <class Element, bool kWholeVectors>
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ Chunk chunk) {
  __shared__ __align__(16) uint16_t values[kBlockTokens * kPitch];
  __shared__ uint8_t picked[kSliceNeurons];  // the slice's part of the union
  __shared__ unsigned mask[kMaskWords];
  __shared__ unsigned ticket;
  __shared__ int list_start;

  const int thread = threadIdx.x;
  if (thread == 0) ticket = atomicAdd(chunk.progress, 1u);
  if (thread < kMaskWords) mask[thread] = 0;
  __syncthreads();
  const int block = static_cast<int>(ticket) / chunk.slices;
  const int slice = static_cast<int>(ticket) % chunk.slices;
  const int vector = thread % kVectors;
  const int first_row = thread / kVectors;

  uint4 any = make_uint4(0, 0, 0, 0);
  uint4 rows[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    rows[i] = load_gate<Element, kWholeVectors>(chunk, block * kBlockTokens + first_row + i * kRowsAtOnce,
                                                slice * kSliceNeurons + vector * kVector);
  }
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    any = make_uint4(any.x | rows[i].x, any.y | rows[i].y, any.z | rows[i].z, any.w | rows[i].w);
    *reinterpret_cast<uint4*>(values + (first_row + i * kRowsAtOnce) * kPitch + vector * kVector) = rows[i];
  }
  const uint32_t active = active_bits(any);
  if (active) atomicOr(&mask[vector / 4], active << (vector % 4 * kVector));
  __syncthreads();

  int count = 0;
#pragma unroll
  for (int i = 0; i < kMaskWords; ++i) count += __popc(mask[i]);
  unsigned* published = chunk.progress + 1 + static_cast<int64_t>(block) * chunk.slices;
  if (thread == 0) atomicExch(published + slice, static_cast<unsigned>(count) + 1);
  if (thread < kSliceNeurons) {
    const unsigned word = mask[thread / 32];
    if (word >> (thread % 32) & 1) {
      int position = __popc(word & ((1u << (thread % 32)) - 1));
      for (int i = 0; i < thread / 32; ++i) position += __popc(mask[i]);
      picked[position] = static_cast<uint8_t>(thread);
    }
  }
  if (thread < 32) {
    const int before = slices_before(published, slice);
    if (thread == 0) list_start = before;
  }
  __syncthreads();

  const int start = list_start;
  const int warp = thread / 32;
  uint16_t* h = static_cast<uint16_t*>(chunk.h);
  int* list = chunk.lists + static_cast<int64_t>(block) * chunk.listed;
  for (int i = thread; i < count; i += kThreads) list[start + i] = slice * kSliceNeurons + picked[i];
  for (int i = thread % 32; i < count; i += 32) {
    const uint16_t* from = values + picked[i];
    uint16_t* to = h + h_offset(chunk, block, start + i);
#pragma unroll 8
    for (int row = warp; row < kBlockTokens; row += kThreads / 32) to[row * kTileNeurons] = from[row * kPitch];
  }
  if (slice + 1 < chunk.slices) return;
  const int total = start + count;
  if (thread == 0) chunk.counts[block] = total;
  const int end = (total + kTileNeurons - 1) / kTileNeurons * kTileNeurons;
  for (int i = total + thread % 32; i < end; i += 32) {
    uint16_t* to = h + h_offset(chunk, block, i);
    for (int row = warp; row < kBlockTokens; row += kThreads / 32) to[row * kTileNeurons] = 0;
  }
}

template <class Element>
cudaError_t launch(const Chunk& chunk, cudaStream_t stream) {
  const int grid = chunk.blocks * chunk.slices;
  if (chunk.width % kVector == 0) {
    pack_kernel<Element, true><<<grid, kThreads, 0, stream>>>(chunk);
  } else {
    pack_kernel<Element, false><<<grid, kThreads, 0, stream>>>(chunk);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t pack(const Chunk& chunk, cudaStream_t stream) {
  const size_t bytes = (1 + static_cast<size_t>(chunk.blocks) * chunk.slices) * sizeof(unsigned);
  const cudaError_t error = cudaMemsetAsync(chunk.progress, 0, bytes, stream);
  if (error != cudaSuccess) return error;
  return chunk.dtype == DType::kBFloat16 ? launch<BFloat16>(chunk, stream) : launch<Float16>(chunk, stream);
}

}  // namespace twell::portable
