// The layout of what forward saves for backward, of either backend: the bytes that each part takes for one block of
// tokens, in the order in which the parts lie, each for all blocks of the call. So the whole state is blocks times the
// bytes of one, which Python can compute for a number of tokens that it knows only by name.
#pragma once

#include <cstdint>

namespace twell {

// A CPU's block is one token. Counts come first and neurons, two bytes each, last: every part starts at a multiple of
// its elements' size.
struct CpuStateLayout {
  static constexpr int64_t kBlockTokens = 1;
  int64_t count, gate, up, neuron;
  constexpr int64_t bytes() const { return count + gate + up + neuron; }
};
constexpr CpuStateLayout cpu_state_layout(int64_t capacity, int64_t element_size, bool gated) {
  return {4, capacity * element_size, gated ? capacity * element_size : 0, capacity * 2};
}

// Of sm90::State, whose members these are. Every part takes a multiple of 32 bytes for a block.
struct CudaStateLayout {
  static constexpr int64_t kBlockTokens = 128, kGroup = 32;
  int64_t entries, pairs;  // a block's room, on average
  int64_t tokens, values, neurons, first_pairs, totals, blocks;
  constexpr int64_t bytes() const { return tokens + values + neurons + first_pairs + totals + blocks; }
};
constexpr CudaStateLayout cuda_state_layout(int64_t width, int64_t capacity, bool gated) {
  constexpr int64_t kGroup = CudaStateLayout::kGroup;
  // Blocks use about a third as many entries as pairs where few neurons are active, and fewer where more are.
  const int64_t some = 256 + 20 * capacity, groups = ((width < some ? width : some) + kGroup - 1) / kGroup;
  const int64_t entries = groups * kGroup, pairs = CudaStateLayout::kBlockTokens * capacity;
  return {entries, pairs, 16 * entries, (gated ? 4 : 2) * pairs, 2 * entries, (4 * groups + 31) / 32 * 32, 32, 32};
}

// Where the capacity is all of F, whole columns are kept in place of pairs: of sm90::Active, whose members these are.
// Every part takes a multiple of 32 bytes for a block.
struct CudaColumnsLayout {
  int64_t masks, counts, neurons, columns, ups;
  constexpr int64_t bytes() const { return masks + counts + neurons + columns + ups; }
};
constexpr bool keeps_columns(int64_t width, int64_t capacity) { return capacity >= width; }
constexpr CudaColumnsLayout cuda_columns_layout(int64_t width, bool gated) {
  const int64_t columns = CudaStateLayout::kBlockTokens * width * 2;
  const int64_t masks = ((width + 31) / 32 * 8 + 31) / 32 * 32, neurons = (2 * width + 31) / 32 * 32;
  return {masks, 32, neurons, columns, gated ? columns : 0};
}

// Of one block of tokens, in either form.
constexpr int64_t cuda_state_bytes(int64_t width, int64_t capacity, bool gated) {
  return keeps_columns(width, capacity) ? cuda_columns_layout(width, gated).bytes()
                                        : cuda_state_layout(width, capacity, gated).bytes();
}

}  // namespace twell
