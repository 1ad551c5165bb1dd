// What the three kernels of a chunk share: one chunk of tokens as pointers, and how its buffers are laid out.
//
// Tokens are cut into blocks of 128. The union of a block is the ascending list of the neurons that are active in at
// least one of its tokens; U is its length. The gate's values, and h in their place later on, lie in tiles of 128
// tokens x 64 positions of that list; positions from U to the end of the last tile are zero.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/ffn.h"

namespace twell::portable {

constexpr int kBlockTokens = 128;
constexpr int kTileNeurons = 64;    // positions of one tile of h
constexpr int kSliceNeurons = 128;  // neurons that one thread block packs
constexpr int kMaxBlocks = 256;     // of a chunk: each thread of a matmul reads one block's U
constexpr int kThreads = 256;       // of each kernel

struct Chunk {
  DType dtype;
  int tokens;        // of this chunk
  int blocks;        // of 128 tokens
  int hidden;        // D
  int width;         // F
  int slices;        // of 128 neurons
  int tiles;         // of 64 neurons: room for each block's h
  int listed;        // room for each block's list
  const void* gate;  // (tokens, F), before relu
  const void* x;     // (tokens, D)
  const void* up;    // (F, D) or null
  const void* down;  // (F, D)
  const void* b_up;
  const void* b_down;
  void* y;  // (tokens, D)
  // Workspace.
  unsigned* progress;  // [1 + blocks * slices], zero before packing: the next slice to take; 1 + each slice's union
  int* counts;         // [blocks]: U
  int* lists;          // [blocks][listed]
  void* h;             // [blocks][tiles][128][64]
};

// Element offset of a position of a block's list, in the row of its first token.
__host__ __device__ constexpr int64_t h_offset(const Chunk& chunk, int block, int position) {
  return (static_cast<int64_t>(block) * chunk.tiles + position / kTileNeurons) * (kBlockTokens * kTileNeurons) +
         position % kTileNeurons;
}

// Tokens [first, first + count) of a call; `count` is at most portable_chunk_tokens.
Chunk make_chunk(const Ffn& ffn, int64_t first, int64_t count, const void* gate, void* workspace);

cudaError_t pack(const Chunk& chunk, cudaStream_t stream);
// h = gate * (x Wu^T + bu) over each block's union.
cudaError_t up(const Chunk& chunk, const Device& device, cudaStream_t stream);
// y = h Wd^T + bd.
cudaError_t down(const Chunk& chunk, const Device& device, cudaStream_t stream);

}  // namespace twell::portable
