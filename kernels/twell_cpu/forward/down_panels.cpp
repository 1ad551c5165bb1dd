// The down projection of many tokens where down lies by rows, on a matrix unit.
#include <algorithm>
#include <cstring>

#include "forward/down.h"

namespace twell {
namespace {

int64_t rounded_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

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
                          block.down_row, static_cast<int>(width), block.width,
                          block.b_down ? block.b_down + d0 : nullptr, nullptr, values.data(), count);
      for (int64_t t = 0; t < count; ++t) {
        for (int64_t d = 0; d < width; ++d) row[d] = values[d * count + t];
        kernels.round(row, width, at(y, (part.first + first + t) * hidden + d0, block.dtype));
      }
    });
  }
}

}  // namespace twell
