// What the training kernels share beyond sm90/common/chunk.h.
//
// An entry is a neuron that some token of a block activates; a pair is one token and one neuron that it activates. A
// block's entries come in the order of Active::neurons, an entry's pairs by token.
#pragma once

#include "common/training.h"
#include "sm90/common/chunk.h"

namespace twell::sm90 {

constexpr int kGroup = 32;  // entries of a block that one warp works on; pools give blocks whole groups

struct BlockState {
  Counts counts;
  uint32_t pairs;
  int64_t first_entry, first_pair;  // in the pools
};

// What forward keeps for backward (DESIGN.md, "Training's state"). The pools' sizes follow from T, F and the capacity
// alone; the first blocks that fit are kept, the others computed again from x.
struct State {
  int64_t* totals;     // (3): blocks kept, entries used, pairs used
  BlockState* blocks;  // (all blocks); valid for those kept
  uint4* tokens;       // (entries): bit t % 32 of word t / 32, x to w, of the block's tokens that activate the neuron
  uint32_t* first_pairs;  // (entries / kGroup): pairs of the block before each group
  uint16_t* neurons;      // (entries)
  // (pairs): relu(gate), 16 bits; where the block has a gate 32 bits, above it x Wu^T + bu.
  void* values;
  int64_t entries, pairs;  // room
};

constexpr int kSlots = 1024;  // thread blocks that save a chunk, at most

// No tile of up is narrower where a block has more than one.
constexpr int kUpTileNeurons = 80;

// Scratch of forward while pairs are saved, chunk by chunk; the report's sums wait until they are many.
struct Saving {
  // (blocks of a chunk, row): of each entry its tokens; then, of kept blocks with a gate (the state has their tokens),
  // x and y: the block's pairs before those of its first half and of its second.
  uint4* entries;
  uint64_t* slots;  // (kSlots): of each thread block its pairs, above them the last turn it took; zero before the first
  uint32_t turn;    // of the chunk: 1, 2, ...
  float* activity;  // (rows, parts, F): sum of token weights, of each block that the report lacks
  float* l1;        // (rows, groups): sum of token weight * |h|
  // Where up takes the sums, of pairs of a block with a gate, its halves; else it is taken whole.
  int parts;
  int groups;       // there of up's tiles, for each warp; else of a block's entries
  int64_t rows;     // room
  int64_t waiting;  // rows that earlier chunks have filled
  bool reported;    // the report holds rows before these
};

// Pairs of all kept blocks by neuron, then by token.
struct Sorted {
  int64_t* first;    // (F + 1): first pair of each neuron
  uint32_t* places;  // (blocks kept, F): of a block's first pair of that neuron; valid where the neuron has any
  uint2* pairs;      // (pairs): the token; dg, above it du where the block has a gate
  void* h;           // (pairs)
  uint64_t* slots;   // (sort_slots(F)): while they are sorted
};
__host__ __device__ constexpr int sort_slots(int width) { return (width + 31) / 32; }

struct Training {
  Terms terms;
  State state;
};

// Sums of a block's l1 that are taken one by one.
__host__ __device__ constexpr int sum_groups(int row, bool gated) {
  return gated ? (row + kUpTileNeurons - 1) / kUpTileNeurons * 8 : (row + kGroup - 1) / kGroup;
}

// Forward, between launch_list and launch_down. Which blocks are kept, and where: totals (zero before the first chunk),
// blocks; their entries. Without a gate also their pairs, and sums to Saving's rows from `waiting` on.
cudaError_t launch_save(const Ffn&, const Chunk&, const Saving&, const Training&, const Device&, cudaStream_t);
// Then, where there is a gate: h takes the place of relu(gate), pairs of kept blocks go to the state, sums to Saving.
cudaError_t launch_up_save(const Ffn&, const Chunk&, const Saving&, const Training&, const Device&, cudaStream_t);
// Adds the rows that wait to the report, in fixed order.
cudaError_t launch_report(const Ffn&, const Saving&, float* report, cudaStream_t);

// Of the kept blocks' pairs, in the order of the state's pairs: six bytes a pair, which dx reads once for each slice.
struct PairGradients {
  uint32_t* values;  // dg, above it du where the block has a gate
  uint16_t* places;  // tile_place()
};

// Where the tile that dx builds of a group's entries has a pair, in bytes: 64 tokens of each entry, then those of the
// second half; swizzled as tensor cores read it.
__host__ __device__ constexpr uint32_t tile_place(uint32_t entry_of_group, uint32_t token) {
  const uint32_t half = token / kHalfTokens, byte = token % kHalfTokens * 2;
  return (half * kGroup + entry_of_group) * (kHalfTokens * 2) + (byte ^ (entry_of_group & 7) << 4);
}

// Backward of the kept blocks, from the state. First where each one's pairs of each neuron go.
cudaError_t launch_sort(const Ffn&, const State&, const Sorted&, int64_t blocks, const Device&, cudaStream_t);
// dh = dy Wd + L1's; du = dh relu(gate), dg = dh u + the count's, for the chunk's kept blocks; also to their places in
// Sorted, with h and the token, if Sorted::pairs is not null.
cudaError_t launch_pair_dh(const Ffn&, const Chunk&, const Training&, const Gradients&, const PairGradients&,
                           const Sorted&, const Device&, cudaStream_t);
// dx = du Wu + dg Wg of the chunk's kept blocks.
cudaError_t launch_pair_dx(const Ffn&, const Chunk&, const State&, const PairGradients&, const Gradients&,
                           const Device&, cudaStream_t);
// All weights' gradients from the sorted pairs. First, when they have been counted and before launch_pair_dh, who sums
// what; then the sums. `beside_dx`: the launch before them is launch_pair_dx.
cudaError_t launch_weights_plan(const Ffn&, const State&, const Sorted&, const Gradients&, void* partials,
                                cudaStream_t);
cudaError_t launch_weights(const Ffn&, const State&, const Sorted&, const Gradients&, void* partials, bool beside_dx,
                           const Device&, cudaStream_t);
int64_t weights_partial_bytes(const Ffn&, int64_t pairs);  // of `partials`

// By columns: of a chunk whose blocks' columns were kept, or for which gate, list and up compute again what was not
// kept as pairs. Then, like those, each does nothing if all of the chunk's blocks were kept.

// (blocks, F, 2 halves, 64), as Active has them, of dg, du and h; what is not wanted is null, and so is `up` without a
// gate.
struct Columns {
  void* gate;
  void* up;
  void* h;
};

// After launch_list: leaves relu(gate) in Active::columns, writes u to Active::ups, and h to `h` if that is not null.
cudaError_t launch_up_beside(const Ffn&, const Chunk&, void* h, const Device&, cudaStream_t);
// The report's sums of h (without a gate that is relu(gate)), to Saving's rows from `waiting` on.
cudaError_t launch_sum_columns(const Ffn&, const Chunk&, const void* h, const Saving&, const Terms&, const Device&,
                               cudaStream_t);
// dh = dy Wd + L1's; from relu(gate) and u in Active dg = dh u + the count's where active, and du = dh relu(gate), to
// the same places or others. Where there is a gate, h too if it is wanted.
cudaError_t launch_dh(const Ffn&, const Chunk&, const Terms&, const void* dy, const Columns& to, const Device&,
                      cudaStream_t);
// dx = dg Wg + du Wu, from dg and du in Active.
cudaError_t launch_dx(const Ffn&, const Chunk&, const Gradients&, const Device&, cudaStream_t);
// dWd from relu(gate) and u in Active; dWg, dWu and the biases' from dg and du there. `adds`: to what the gradients
// hold already; else that is not read.
cudaError_t launch_add_down(const Ffn&, const Chunk&, bool adds, const Gradients&, const Device&, cudaStream_t);
cudaError_t launch_add_gate_up(const Ffn&, const Chunk&, bool adds, const Gradients&, const Device&, cudaStream_t);

}  // namespace twell::sm90
