// The down projection of many tokens on a matrix unit.
#include <algorithm>
#include <cstring>

#include "down.h"

namespace twell {
namespace {

constexpr int64_t kBlock = 4 * kPanel;  // tokens that share the rows of one product

int64_t rounded_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// How a block of tokens is computed: neurons that enough of its tokens share, with their h as a matrix in columns of 32
// neurons; and what pairs remain, by token.
struct SharedBlock {
  std::vector<uint32_t> neurons;      // ascending
  std::vector<uint32_t> place;        // (F,) among `neurons`, or kAlone
  Bytes h;                            // [neurons / 32][tokens, padded to 16][32]
  std::vector<uint32_t> alone;        // neurons, each token's from where its pairs begin in the block
  std::vector<float> alone_h;
  std::vector<int64_t> alone_count;   // (tokens,)
};
constexpr uint32_t kAlone = 0xffffffffu;

void find_shared(const TokenPairs& pairs, int64_t first, int64_t last, int64_t width, SharedBlock* out) {
  out->neurons.clear();
  out->place.assign(static_cast<size_t>(width), 0);
  for (int64_t i = pairs.begin[first]; i < pairs.begin[last]; ++i) ++out->place[pairs.neuron[i]];
  for (int64_t f = 0; f < width; ++f) {
    if (worth_a_row(out->place[f], last - first)) {
      out->place[f] = static_cast<uint32_t>(out->neurons.size());
      out->neurons.push_back(static_cast<uint32_t>(f));
    } else {
      out->place[f] = kAlone;
    }
  }
}

// 16 tokens of a block, from `first` on, so that each of its columns' tiles is one thread's.
void place_pairs(const Part& part, const Kernels& kernels, int64_t block_first, int64_t block_tokens, int64_t first,
                 std::vector<float>& row, SharedBlock* out) {
  const TokenPairs& pairs = part.pairs;
  const int64_t columns = rounded_up(static_cast<int64_t>(out->neurons.size()), 32), padded = rounded_up(block_tokens, 16);
  for (int64_t t = first; t < first + 16; ++t) {
    row.assign(static_cast<size_t>(columns), 0.0f);
    if (t < block_tokens) {
      const int64_t begin = pairs.begin[block_first + t], end = pairs.begin[block_first + t + 1];
      int64_t alone = begin - pairs.begin[block_first];
      const int64_t alone_first = alone;
      for (int64_t p = begin; p < end; ++p) {
        const uint32_t place = out->place[pairs.neuron[p]];
        if (place != kAlone) {
          row[place] = part.h[p];
        } else {
          out->alone[alone] = pairs.neuron[p];
          out->alone_h[alone++] = part.h[p];
        }
      }
      out->alone_count[t] = alone - alone_first;
    }
    for (int64_t c = 0; c < columns; c += 32) kernels.round(row.data() + c, 32, out->h.data() + (c * padded + t * 32) * 2);
  }
}

}  // namespace

bool down_of_shared(const Block& block, const Kernels& kernels, const Threads& threads, const Part& part, void* y) {
  const TokenPairs& pairs = part.pairs;
  const int64_t tokens = part.tokens(), hidden = block.hidden;
  const int64_t slice = std::clamp<int64_t>(rounded_up(hidden / (2 * threads.count), 64), 64, 256);
  std::vector<std::vector<float>> scratch(static_cast<size_t>(threads.count));
  SharedBlock shared;
  for (int64_t first = 0; first < tokens; first += kBlock) {
    const int64_t count = std::min(kBlock, tokens - first), padded = rounded_up(count, 16);
    const int64_t block_pairs = pairs.begin[first + count] - pairs.begin[first];
    find_shared(pairs, first, first + count, block.width, &shared);
    const int64_t rows = static_cast<int64_t>(shared.neurons.size());
    if (first == 0 && rows < 16) return false;
    shared.h.reserve(padded * rounded_up(rows, 32) * 2);
    shared.alone.resize(static_cast<size_t>(block_pairs));
    shared.alone_h.resize(static_cast<size_t>(block_pairs));
    shared.alone_count.resize(static_cast<size_t>(count));
    for_items(threads, padded / 16, [&](int lane, int64_t item) {
      place_pairs(part, kernels, first, count, 16 * item, scratch[lane], &shared);
    });
    for_items(threads, (hidden + slice - 1) / slice, [&](int lane, int64_t item) {
      const int64_t d = item * slice, width = std::min(slice, hidden - d);
      auto& sums = scratch[lane];
      sums.resize(static_cast<size_t>(padded * slice));
      for (int64_t t = 0; t < padded; ++t) {
        std::fill_n(sums.data() + t * slice, slice, 0.0f);
        if (block.b_down) std::copy_n(block.b_down + d, width, sums.data() + t * slice);
      }
      const char* down = at(block.down, d, block.dtype);
      kernels.gather_matmul(down, block.down_column, shared.neurons.data(), rows, width, shared.h.data(),
                            static_cast<int>(count), sums.data(), slice);
      for (int64_t t = 0; t < count; ++t) {
        const int64_t begin = pairs.begin[first + t] - pairs.begin[first];
        if (shared.alone_count[t] > 0) {
          kernels.gather_sum(down, block.down_column, shared.alone.data() + begin, shared.alone_h.data() + begin,
                             shared.alone_count[t], width, sums.data() + t * slice);
        }
        kernels.round(sums.data() + t * slice, width, at(y, (part.first + first + t) * hidden + d, block.dtype));
      }
    });
  }
  return true;
}

void down_by_panels(const Block& block, const Kernels& kernels, const Threads& threads, const Part& part, void* y) {
  const TokenPairs& pairs = part.pairs;
  const int64_t tokens = part.tokens(), hidden = block.hidden, bytes = panel_bytes(block.width * 2);
  const int64_t step = std::clamp<int64_t>(kernels.block_bytes * 3 / 2 / bytes, 1, 4) * kPanel;
  const int64_t tile = std::clamp<int64_t>(rounded_up(hidden / (4 * threads.count), 32), 32, kernels.tile_neurons);
  Bytes panels;
  panels.reserve(step / kPanel * bytes);
  std::vector<std::vector<float>> scratch(static_cast<size_t>(threads.count));
  for (int64_t first = 0; first < tokens; first += step) {
    const int64_t count = std::min(step, tokens - first);
    for_items(threads, (count + kPanel - 1) / kPanel, [&](int, int64_t panel) {
      uint16_t* units = reinterpret_cast<uint16_t*>(panels.data() + panel * bytes);
      std::memset(units, 0, static_cast<size_t>(bytes));
      std::vector<uint16_t> rounded;
      for (int64_t t = panel * kPanel; t < std::min(count, (panel + 1) * kPanel); ++t) {
        const int64_t begin = pairs.begin[first + t], n = pairs.begin[first + t + 1] - begin;
        rounded.resize(static_cast<size_t>(n) + 1);
        kernels.round(part.h.data() + begin, n, rounded.data());
        for (int64_t p = 0; p < n; ++p) {
          const int64_t f = pairs.neuron[begin + p];
          units[(f / 2 * kPanel + t % kPanel) * 2 + f % 2] = rounded[p];
        }
      }
    });
    for_items(threads, (hidden + tile - 1) / tile, [&](int lane, int64_t item) {
      const int64_t d0 = item * tile, width = std::min(tile, hidden - d0);
      auto& values = scratch[lane];
      values.resize(static_cast<size_t>(tile * count + tile));
      float* row = values.data() + tile * count;
      kernels.gate_panels(panels.data(), static_cast<int>(count), at(block.down, d0 * block.down_row, block.dtype),
                          block.down_row, static_cast<int>(width), block.width, block.b_down ? block.b_down + d0 : nullptr,
                          values.data(), count);
      for (int64_t t = 0; t < count; ++t) {
        for (int64_t d = 0; d < width; ++d) row[d] = values[d * count + t];
        kernels.round(row, width, at(y, (part.first + first + t) * hidden + d0, block.dtype));
      }
    });
  }
}

}  // namespace twell
