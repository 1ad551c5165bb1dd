// Forward of the feed-forward block over its active pairs; every pointer is to contiguous rows unless a stride is
// given.
#pragma once

#include <functional>

#include "common/pairs.h"
#include "common/parallel.h"
#include "forward/fixed_tokens.h"
#include "isa/kernels.h"

namespace twell {

// Shapes: x (T, D); gate, up (F, D); down (D, F) in either memory order.
struct Block {
  DType dtype;
  int64_t tokens, hidden, width;
  const void* x;
  const void* gate;  // without a gate: the up projection, and `up` null
  const void* up;
  const void* down;
  int64_t down_row, down_column;  // strides of `down`; one of them is 1
  const float* b_gate;
  const float* b_up;
  const float* b_down;
  // Of int8 weights, all three of which it then holds: each row's scale. Null: the weights are of `dtype`.
  const float* s_gate = nullptr;
  const float* s_up = nullptr;
  const float* s_down = nullptr;
};

struct Report {
  const float* token_weight;  // null for ones
  double l1 = 0;
  double* active;  // (F,), or null where nothing is counted; fp32 sums over 65,537 tokens lose digits
};

// Tokens [first, last) computed densely by the caller.
using DenseRange = std::function<void(int64_t first, int64_t last)>;

// What decides whether a call is dense.
struct Limit {
  double density;  // up to which it is not
  double
      by_union;  // the density up to which it is not, either, where kNeighbours tokens activate no more than `neurons`
  double neurons;  // a share of all
};

// Pairs of the tokens [first, last) (numbered from 0); false once they are so many that dense products are faster.
class PairFinder {
 public:
  PairFinder(const Block& block, const Kernels& kernels, const Threads& threads);
  bool find(int64_t first, int64_t last, const Limit& limit, TokenPairs* pairs);

 private:
  // What one thread reuses from item to item.
  struct Scratch {
    std::vector<float> gate, up;
    std::vector<size_t> shared;
    Bytes rows, row;
  };
  // Runs [begin, end) of a lane: what a tile of neurons has in a step's tokens.
  struct Tile {
    int lane;
    size_t begin, end;
  };
  void by_token(const std::vector<Tile>& tiles, int64_t tokens, TokenPairs* pairs) const;
  void up_products(LanePairs& lane, size_t first_run, int64_t first_token, int64_t tokens, const char* x,
                   const char* panels, Scratch& scratch);

  const Block& block_;
  const Kernels& kernels_;
  const Threads& threads_;
  std::vector<LanePairs> lanes_;
  std::vector<Scratch> scratch_;
  Bytes panels_;
  FixedTokens fixed_;
};

inline const char* at(const void* base, int64_t elements, DType dtype) {
  return static_cast<const char*>(base) + elements * element_bytes(dtype);
}

inline char* at(void* base, int64_t elements, DType dtype) {
  return static_cast<char*>(base) + elements * element_bytes(dtype);
}

// Whether a product over `tokens` beats one gather for each of the `pairs` of a row's tokens. A row costs 40 cells to
// be put in place. Such prices say how kernels share out their work; which way a call goes is decided before that, by
// twell_limits.h.
inline bool worth_a_row(const Kernels& kernels, int64_t pairs, int64_t tokens) {
  return kernels.pair_cells * pairs > 40 + tokens;
}

// Whether `down` lies in memory by columns, as the products over active pairs read it.
inline bool down_by_column(const Block& block) { return block.down_row == 1; }

// Tokens that are processed together, so that their rows of x stay in the second-level cache.
int64_t block_tokens(const Block& block, const Kernels& kernels);

// By the rows that hf_twell/dispatch/choose.py reads too. `training`: with backward, which computes densely again what
// forward did.
Limit limit_of(const Block& block, const Kernels& kernels, bool training);

// Pairs behind one another from `slot` on; rows that do not fit are marked. Returns the next free slot.
int64_t save_pairs(const State& state, const TokenPairs& pairs, int64_t first_token, int64_t slot,
                   const Kernels& kernels, int64_t element);

// `max_density`: the density above which the call is dense whatever `limit_of` says.
void forward(const Block& block, const Kernels& kernels, const Threads& threads, void* y, Report* report,
             const State* state, const DenseRange& dense, double max_density = 1.0);

}  // namespace twell
