// How a chunk's buffers lie in the workspace.
#pragma once

#include <algorithm>

#include "sm90/common/chunk.h"

namespace twell::sm90 {

constexpr int64_t kPartBorder = 256;  // each part starts at a multiple of it

// Cuts parts out of one allocation; without one it only counts.
class Cutter {
 public:
  explicit Cutter(void* base) : base_(static_cast<char*>(base)) {}
  template <typename T>
  void cut(T*& part, int64_t bytes) {
    part = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (bytes + kPartBorder - 1) / kPartBorder * kPartBorder;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

inline int64_t count_blocks(const Ffn& ffn) { return (ffn.tokens + kBlockTokens - 1) / kBlockTokens; }

// Blocks of a chunk whose columns, in so many buffers, take at most `bytes`.
inline int64_t most_blocks(const Ffn& ffn, int64_t bytes, int buffers) {
  return std::clamp<int64_t>(bytes / (int64_t{ffn.width} * kBlockTokens * 2 * buffers), 1, kMaxBlocks);
}

// Blocks of a chunk where each has `most` at most and all are of about one size.
inline int64_t chunk_blocks(const Ffn& ffn, int64_t most) {
  const int64_t blocks = count_blocks(ffn), chunks = (blocks + most - 1) / most;
  return (blocks + chunks - 1) / std::max<int64_t>(chunks, 1);
}
inline int64_t chunk_blocks(const Ffn& ffn, int64_t bytes, int buffers) {
  return chunk_blocks(ffn, most_blocks(ffn, bytes, buffers));
}

inline void place_active(const Ffn& ffn, int64_t blocks, bool training, Cutter& cutter, Active* active) {
  active->words = (ffn.width + 31) / 32;
  active->row = (ffn.width + 7) / 8 * 8;
  cutter.cut(active->masks, blocks * 2 * active->words * 4);
  cutter.cut(active->counts, blocks * static_cast<int64_t>(sizeof(Counts)));
  cutter.cut(active->neurons, blocks * active->row * 2);
  const int64_t column_bytes = blocks * ffn.width * kBlockTokens * 2;
  cutter.cut(active->columns, column_bytes);
  active->ups = nullptr;
  if (training && ffn.gated()) cutter.cut(active->ups, column_bytes);
}

// The chunk from its first token on: `blocks` blocks, or what is left of the call.
inline void fit(const Ffn& ffn, int64_t blocks, Chunk* chunk) {
  chunk->tokens = std::min(blocks * kBlockTokens, ffn.tokens - chunk->first);
  chunk->active.blocks = static_cast<int>((chunk->tokens + kBlockTokens - 1) / kBlockTokens);
}

}  // namespace twell::sm90
