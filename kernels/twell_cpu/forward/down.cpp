#include "forward/down.h"

#include <algorithm>
#include <cstring>

#include "common/shared_rows.h"
#include "forward/weight_rows.h"

namespace twell {
namespace {

// How the kernel shares out its work: the most tokens of its smallest product, whose sums lie on the stack.
constexpr int64_t kFewTokens = 16;
constexpr int64_t kTileNeurons = 48;  // a multiple of the gate kernel's register tile
// A column of a matrix stored by rows costs a cache line for each of its elements, and those come one by one.
constexpr int64_t kCacheLine = 64;

// Rows of down's transpose, numbered by `index`, from one of their columns on.
struct TransposedRows {
  const uint32_t* index;
  const void* data;
  int64_t ld;
  bool int8;  // not of the block's type

  TransposedRows from(int64_t d, DType dtype) const {
    return {index, static_cast<const char*>(data) + d * (int8 ? 1 : element_bytes(dtype)), ld, int8};
  }
};

// sums = b_down[d ...] + s_down[d ...] * sum over a token's pairs of h * rows[neuron, d ...], rounded into y.
void add_token(const Block& block, const Kernels& kernels, const Part& part, int64_t token, const TransposedRows& rows,
               int64_t d, int64_t width, float* sums, void* y) {
  if (block.b_down && block.s_down == nullptr) {
    std::memcpy(sums, block.b_down + d, sizeof(float) * width);
  } else {
    std::fill_n(sums, width, 0.0f);
  }
  const int64_t begin = part.pairs.begin[token], count = part.pairs.begin[token + 1] - begin;
  if (count > 0) {
    const uint32_t* index = rows.index + begin;
    const float* h = part.h.data() + begin;
    if (rows.int8) {
      kernels.gather_sum_int8(static_cast<const int8_t*>(rows.data), rows.ld, index, h, count, width, sums);
    } else {
      kernels.gather_sum(rows.data, rows.ld, index, h, count, width, sums);
    }
  }
  for (int64_t i = 0; block.s_down && i < width; ++i) {
    sums[i] = sums[i] * block.s_down[d + i] + (block.b_down ? block.b_down[d + i] : 0.0f);
  }
  kernels.round(sums, width, at(y, (part.first + token) * block.hidden + d, block.dtype));
}

void down_by_rows(const Block& block, const Kernels& kernels, const Threads& threads, const Part& part,
                  const TransposedRows& rows, void* y) {
  const int64_t tokens = part.tokens();
  // Few tokens: slices of D keep every thread busy.
  const int64_t most = std::max<int64_t>(1, std::min<int64_t>(threads.count, block.hidden / 256));
  const int64_t slices = tokens >= 4 * threads.count ? 1 : most;
  const int64_t slice = (block.hidden + slices - 1) / slices;
  std::vector<std::vector<float>> sums(static_cast<size_t>(threads.count));
  for_items(threads, tokens * slices, [&](int lane, int64_t item) {
    const int64_t d = item % slices * slice, width = std::min(slice, block.hidden - d);
    sums[lane].resize(static_cast<size_t>(slice));
    add_token(block, kernels, part, item / slices, rows.from(d, block.dtype), d, width, sums[lane].data(), y);
  });
}

// y where down lies by rows and few neurons are active: their columns are copied out first.
void down_by_active_columns(const Block& block, const Kernels& kernels, const Threads& threads, const Part& part,
                            void* y) {
  Values<uint32_t> active(part.pairs.neuron), index(part.pairs.neuron.size());
  std::sort(active.begin(), active.end());
  active.erase(std::unique(active.begin(), active.end()), active.end());
  for (size_t i = 0; i < index.size(); ++i) {
    const auto place = std::lower_bound(active.begin(), active.end(), part.pairs.neuron[i]);
    index[i] = static_cast<uint32_t>(place - active.begin());
  }
  const bool int8 = block.s_down != nullptr;
  const int64_t count = static_cast<int64_t>(active.size()), element = int8 ? 1 : element_bytes(block.dtype);
  Bytes rows;
  rows.reserve(count * block.hidden * element + 1);
  const int64_t slice = int8 ? 64 : 32;  // a cache line of outputs of one or two bytes
  for_items(threads, (block.hidden + slice - 1) / slice, [&](int, int64_t item) {
    const int64_t first = item * slice, last = std::min(block.hidden, first + slice);
    const int64_t step = block.down_row * element;
    for (int64_t c = 0; c < count; ++c) {
      const char* from = static_cast<const char*>(block.down) + (first * block.down_row + active[c]) * element;
      char* to = rows.data() + (c * block.hidden + first) * element;
      for (int64_t d = first; int8 && d < last; ++d, from += step) *to++ = *from;
      for (int64_t d = first; !int8 && d < last; ++d, from += step, to += element) {
        std::memcpy(to, from, 2);
        if (element == 4) std::memcpy(to + 2, from + 2, 2);
      }
    }
  });
  down_by_rows(block, kernels, threads, part, {index.data(), rows.data(), block.hidden, int8}, y);
}

// y where down lies by rows, for few tokens with many active neurons: h (T, F) against rows of down, as they lie.
void down_by_row_dots(const Block& block, const Kernels& kernels, const Threads& threads, int64_t tokens, const char* h,
                      void* y) {
  std::vector<Bytes> scratch(static_cast<size_t>(threads.count));
  const int64_t tiles = (block.hidden + kTileNeurons - 1) / kTileNeurons;
  for_items(threads, tiles, [&](int lane, int64_t tile) {
    const int64_t d0 = tile * kTileNeurons, count = std::min(kTileNeurons, block.hidden - d0);
    const int64_t next = (tile + threads.count) % tiles * kTileNeurons;
    float values[kTileNeurons * kFewTokens], row[kTileNeurons];
    rows_product(down_rows(block), block.dtype, kernels, {h, nullptr, static_cast<int>(tokens)}, d0,
                 static_cast<int>(count), next, &scratch[lane], values);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t d = 0; d < count; ++d) row[d] = values[d * tokens + t];
      kernels.round(row, count, at(y, t * block.hidden + d0, block.dtype));
    }
  });
}

void down_of_few(const Block& block, const Kernels& kernels, const Threads& threads, const Part& part, void* y) {
  const int64_t tokens = part.tokens(), element = element_bytes(block.dtype);
  std::vector<char> h(static_cast<size_t>(tokens * block.width * element));
  std::vector<float> row(static_cast<size_t>(block.width));
  for (int64_t t = 0; t < tokens; ++t) {
    std::fill(row.begin(), row.end(), 0.0f);
    for (int64_t i = part.pairs.begin[t]; i < part.pairs.begin[t + 1]; ++i) row[part.pairs.neuron[i]] = part.h[i];
    kernels.round(row.data(), block.width, h.data() + t * block.width * element);
  }
  down_by_row_dots(block, kernels, threads, tokens, h.data(), y);
}

// y where down lies by rows: slices of its rows are transposed in cache, each for all tokens.
void down_by_slices(const Block& block, const Kernels& kernels, const Threads& threads, const Part& part, void* y) {
  const int64_t element = element_bytes(block.dtype);
  const int64_t fits = (768 << 10) / (block.width * element) / 32 * 32;
  const int64_t slice = std::clamp<int64_t>(fits, 32, 128);
  std::vector<Bytes> copies(static_cast<size_t>(threads.count)), widened(copies.size());
  for_items(threads, (block.hidden + slice - 1) / slice, [&](int lane, int64_t item) {
    const int64_t d = item * slice, width = std::min(slice, block.hidden - d);
    copies[lane].reserve(block.width * slice * element);
    char* rows = copies[lane].data();
    const char* from = down_rows(block).row(d, block.dtype);
    int64_t ld = block.down_row;
    if (block.s_down) {
      ld = block.width + 32;  // rows in different cache sets
      widened[lane].reserve(slice * ld * element);
      widen_rows(down_rows(block), block.dtype, kernels, d, width, widened[lane].data(), ld);
      from = widened[lane].data();
    }
    kernels.transpose(from, ld, width, block.width, rows, slice, false);
    float sums[128];
    const int64_t tokens = part.tokens();
    for (int64_t token = 0; token < tokens; ++token) {
      add_token(block, kernels, part, token, {part.pairs.neuron.data(), rows, slice, false}, d, width, sums, y);
    }
  });
}

}  // namespace

void down_product(const Block& block, const Kernels& kernels, const Threads& threads, const Part& part, void* y) {
  const int64_t tokens = part.tokens(), total = part.pairs.begin.back();
  const bool int8 = block.s_down != nullptr;
  const bool shares = kernels.matmul_pairs != nullptr && tokens >= kernels.sums_from && !int8;
  const bool matrix = kernels.matrix_unit && shares;
  if (down_by_column(block)) {
    const ScaledRows rows{block.down, block.down_column, part.h.data()};
    void* out = at(y, part.first * block.hidden, block.dtype);
    if (shares && sum_shared_rows(block, kernels, threads, part.pairs, {rows}, block.b_down, out)) return;
    down_by_rows(block, kernels, threads, part, {part.pairs.neuron.data(), block.down, block.down_column, int8}, y);
  } else if (block.tokens == tokens && 2 * total * kCacheLine < down_rows(block).row_bytes(block.dtype)) {
    down_by_active_columns(block, kernels, threads, part, y);
  } else if (matrix && kernels.pair_cells * total > block.width * (tokens - 64)) {
    // Transposing slices of down costs as much as multiplying it by 64 tokens.
    down_by_panels(block, kernels, threads, part, y);
  } else if (block.tokens <= kFewTokens) {
    down_of_few(block, kernels, threads, part, y);
  } else {
    down_by_slices(block, kernels, threads, part, y);
  }
}

}  // namespace twell
