// Stores that leave the caches out: for results that are large and not read soon. They spare the read of each line that
// a plain store begins with, a third of the memory traffic.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace twell {

static inline bool whole_lines(const void* to, int64_t bytes) {
  return (reinterpret_cast<uintptr_t>(to) | static_cast<uintptr_t>(bytes)) % 64 == 0;
}

// Zeroes `bytes`; call publish() before other threads may read them.
static inline void clear_past_caches(void* to, int64_t bytes) {
#if defined(__SSE2__)
  if (whole_lines(to, bytes)) {
    __m128i* const words = static_cast<__m128i*>(to);
    for (int64_t i = 0; i < bytes / 16; ++i) _mm_stream_si128(words + i, _mm_setzero_si128());
    return;
  }
#endif
  std::memset(to, 0, static_cast<size_t>(bytes));
}

// Such stores are not ordered with others until this.
static inline void publish() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace twell
