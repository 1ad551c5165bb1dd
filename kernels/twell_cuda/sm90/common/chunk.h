// What the prefill kernels share: the activations between them, and each kernel's launcher.
#pragma once

#include <cuda.h>

#include "common/ffn.h"

namespace twell::sm90 {

constexpr int kBlockTokens = 128;  // tokens that share one list of active neurons
constexpr int kHalfTokens = 64;    // what one warpgroup multiplies
constexpr int kMaxBlocks = 256;    // of a chunk; their counts live in shared memory

// How many neurons only the first half of a block's tokens activates, both halves, and only the second.
struct Counts {
  int first_only, both, second_only;
  __host__ __device__ int all() const { return first_only + both + second_only; }
};

// The activations of one chunk of tokens, tile by tile (TwELL). A half block has a bit for each neuron, set if any of
// its 64 tokens activates it, and a column of 64 values for each neuron: only columns whose bit is set are ever written
// or read, so the buffer's size is the chunk's and its traffic the active neurons'.
struct Active {
  uint32_t* masks;    // (blocks, 2 halves, words): bit f % 32 of word f / 32
  Counts* counts;     // (blocks)
  uint16_t* neurons;  // (blocks, row): those of the first half only, of both, of the second only; ascending in each
  void* columns;      // (blocks, F, 2 halves, 64): relu(gate), and h once up_proj has been through
  void* ups;          // the same of x Wu^T + bu, in training where there is a gate; else null
  int blocks;
  int words;  // ceil(F / 32)
  int row;    // F rounded up to 8: bulk copies start at 16 bytes
};

struct Chunk {
  int64_t first;  // token
  int64_t tokens;
  Active active;
  // Gate, list and up do nothing if the first *kept blocks of the call include this chunk's; null: never.
  const int64_t* kept;
  // An earlier launch has let others start only after it had waited for whoever writes *kept.
  bool known;

  __host__ __device__ int64_t first_block() const { return first / kBlockTokens; }
#if defined(__CUDACC__)
  // Call it after wait_for_previous(), or where it is known.
  __device__ bool skipped() const { return kept != nullptr && __ldcg(kept) >= first_block() + active.blocks; }
  __device__ bool known_skipped() const { return known && skipped(); }
#endif
};

cudaError_t launch_gate(const Ffn&, const Chunk&, const Device&, cudaStream_t);
// Words that are to be zero for the launches after this one.
struct Zeroed {
  uint64_t* words;
  int count;
};
cudaError_t launch_list(const Ffn&, const Chunk&, const Device&, cudaStream_t, Zeroed = {}, Zeroed = {});
cudaError_t launch_up(const Ffn&, const Chunk&, const Device&, cudaStream_t);
cudaError_t launch_down(const Ffn&, const Chunk&, const Device&, cudaStream_t);

// A row-major (rows, columns) matrix of 2-byte elements or of bytes, read in boxes of `box_rows` x 64 with 128-byte or
// 64-byte swizzle; what lies outside the matrix reads as zero.
cudaError_t make_tensor_map(CUtensorMap*, DType, const void* base, int64_t rows, int columns, int box_rows);

// A (rows, columns) matrix of bytes whose rows lie `stride` apart, a multiple of 16, read in boxes of `box_rows` x 128
// with 128-byte swizzle; what lies outside the matrix reads as zero.
cudaError_t make_byte_map(CUtensorMap*, const void* base, int64_t rows, int columns, int64_t stride, int box_rows);

}  // namespace twell::sm90
