// What the prefill kernels share: the activations between them, and each kernel's launcher.
#pragma once

#include <cuda.h>

#include "ffn.h"

namespace twell::sm90 {

constexpr int kBlockTokens = 128;  // tokens that share one list of active neurons
constexpr int kMaxBlocks = 512;    // of a chunk; their counts live in shared memory

// The activations of one chunk of tokens, tile by tile (TwELL). A block of 128 tokens has a bit for each neuron, set if
// any of its tokens activates it, and a column of 128 values for each neuron: only columns whose bit is set are ever
// written or read, so the buffer's size is the chunk's and its traffic the active neurons'.
struct Active {
  uint32_t* masks;    // (blocks, words): bit f % 32 of word f / 32
  int* counts;        // (blocks): active neurons
  uint16_t* neurons;  // (blocks, F): which, in ascending order
  void* columns;      // (blocks, F, 128): relu(gate), and h once up_proj has been through
  int blocks;
  int words;  // ceil(F / 32)
};

struct Chunk {
  int64_t first;  // token
  int64_t tokens;
  Active active;
};

cudaError_t launch_gate(const Ffn&, const Chunk&, const Device&, cudaStream_t);
cudaError_t launch_list(const Ffn&, const Chunk&, const Device&, cudaStream_t);
cudaError_t launch_up(const Ffn&, const Chunk&, const Device&, cudaStream_t);
cudaError_t launch_down(const Ffn&, const Chunk&, const Device&, cudaStream_t);

// A row-major (rows, columns) matrix of 2-byte elements, read in boxes of `box_rows` x 64 with 128-byte swizzle; what
// lies outside the matrix reads as zero.
cudaError_t make_tensor_map(CUtensorMap*, DType, const void* base, int64_t rows, int columns, int box_rows);

}  // namespace twell::sm90
