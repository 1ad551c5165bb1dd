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

// The neurons that a block of tokens has active, ascending, and each neuron's place among them.
struct Union {
  std::vector<uint32_t> neurons, place;
};

Union union_of(const TokenPairs& pairs, int64_t first, int64_t last, int64_t width) {
  Union out;
  out.place.assign(static_cast<size_t>(width), 0);
  for (int64_t i = pairs.begin[first]; i < pairs.begin[last]; ++i) out.place[pairs.neuron[i]] = 1;
  for (int64_t f = 0; f < width; ++f) {
    if (out.place[f] == 0) continue;
    out.place[f] = static_cast<uint32_t>(out.neurons.size());
    out.neurons.push_back(static_cast<uint32_t>(f));
  }
  return out;
}

}  // namespace

bool down_of_shared(const Block& block, const Kernels& kernels, const Threads& threads, const Part& part, void* y) {
  const TokenPairs& pairs = part.pairs;
  const int64_t tokens = part.tokens(), hidden = block.hidden, element = element_bytes(block.dtype);
  std::vector<Union> unions(static_cast<size_t>((tokens + kBlock - 1) / kBlock));
  for_items(threads, static_cast<int64_t>(unions.size()), [&](int, int64_t i) {
    unions[i] = union_of(pairs, i * kBlock, std::min(tokens, (i + 1) * kBlock), block.width);
  });
  int64_t rows = 0;
  for (const Union& of_block : unions) rows += static_cast<int64_t>(of_block.neurons.size());
  const int64_t blocks = static_cast<int64_t>(unions.size());
  if (rows == 0 || !worth_a_row(pairs.begin.back() / rows, tokens / blocks)) return false;

  const int64_t slice = std::clamp<int64_t>(rounded_up(hidden / (2 * threads.count), 64), 64, 256);
  std::vector<std::vector<float>> scratch(static_cast<size_t>(threads.count));
  Bytes h_rows;
  for (int64_t i = 0; i < blocks; ++i) {
    const Union& of_block = unions[i];
    const int64_t first = i * kBlock, count = std::min(kBlock, tokens - first), padded = rounded_up(count, 16);
    const int64_t ld_h = 32 * (rounded_up(static_cast<int64_t>(of_block.neurons.size()), 32) / 32 | 1);  // odd cache lines
    h_rows.reserve(padded * ld_h * element);
    for_items(threads, padded, [&](int lane, int64_t t) {
      auto& row = scratch[lane];
      row.assign(static_cast<size_t>(ld_h), 0.0f);
      if (t < count) {
        for (int64_t p = pairs.begin[first + t]; p < pairs.begin[first + t + 1]; ++p) {
          row[of_block.place[pairs.neuron[p]]] = part.h[p];
        }
      }
      kernels.round(row.data(), ld_h, at(h_rows.data(), t * ld_h, block.dtype));
    });
    for_items(threads, (hidden + slice - 1) / slice, [&](int lane, int64_t item) {
      const int64_t d = item * slice, width = std::min(slice, hidden - d);
      auto& sums = scratch[lane];
      sums.resize(static_cast<size_t>(padded * slice));
      for (int64_t t = 0; t < padded; ++t) {
        std::fill_n(sums.data() + t * slice, slice, 0.0f);
        if (block.b_down) std::copy_n(block.b_down + d, width, sums.data() + t * slice);
      }
      kernels.gather_matmul(at(block.down, d, block.dtype), block.down_column, of_block.neurons.data(),
                            static_cast<int64_t>(of_block.neurons.size()), width, h_rows.data(), ld_h,
                            static_cast<int>(count), sums.data(), slice);
      for (int64_t t = 0; t < count; ++t) {
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
