// Rows of weights that are fetched while others are multiplied: hardware starts on them too late at each row's end.
#pragma once

#include <algorithm>
#include <cstdint>

namespace {

// Time enough for memory to answer; from 16 to 128 KB measure alike.
constexpr int64_t kBytesAhead = 32 << 10;
constexpr int kCacheLine = 64;

// They go into the second-level cache, whose queue holds more than the first-level's.
struct RowsAhead {
  uintptr_t first;
  int64_t stride;
  int count;

  // The i-th of n parts: each tile of tokens fetches one, so that memory is busy throughout.
  RowsAhead part(int i, int n) const {
    const int begin = i * count / n;
    return {first + begin * stride, stride, (i + 1) * count / n - begin};
  }
  inline void fetch(int64_t byte) const {
    for (int f = 0; f < count; ++f) __builtin_prefetch(reinterpret_cast<const char*>(first + f * stride + byte), 0, 2);
  }
};

// What to fetch beside `count` rows from `row` on, of `rows` that are `stride` bytes apart and after which this thread
// goes on with `next`; nothing of those where that is null. Addresses, as nothing may lie there.
inline RowsAhead rows_ahead(const void* w, const void* next, int64_t stride, int row, int count, int rows) {
  const int64_t distance = std::clamp<int64_t>(kBytesAhead / std::max<int64_t>(stride, 1), 4, 32) & ~3;
  const int64_t from = row + distance;
  if (from < rows) return {reinterpret_cast<uintptr_t>(w) + from * stride, stride, count};
  return {reinterpret_cast<uintptr_t>(next) + (from - rows) * stride, stride, next ? count : 0};
}

}  // namespace
