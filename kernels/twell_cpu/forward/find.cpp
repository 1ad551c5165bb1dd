#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "forward/forward.h"
#include "forward/weight_rows.h"
#include "twell_limits.h"

namespace twell {
namespace {

// How the kernels share out their work, and not whether they do it.
constexpr size_t kTileRows = 16;    // of matrix units
constexpr int64_t kNarrowest = 48;  // neurons of an item, where wider ones are too few to keep all threads busy
constexpr int64_t kShares = 8;      // of pairs to be sorted, at most, as one thread goes through what each has counted
constexpr int64_t kItemsPerThread = 4;  // at least
constexpr int64_t kScreenedFrom = 8;    // tokens; for fewer, the rows' norms cost what low digits do

// A step through so many tiles that meets each of them, far from the one before: the first tiles decide whether the
// call is too dense, and neighbouring neurons may be alike.
int64_t scattering_step(int64_t tiles) {
  int64_t step = std::max<int64_t>(1, tiles * 5 / 8);
  while (std::gcd(step, tiles) != 1) ++step;
  return step;
}

inline void prefetch(const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// Whether a product's sign is the element's: no bias and no scale turns it.
bool sign_stays(const WeightRows& gate, int64_t neurons) {
  const auto keeps_sign = [](float scale) { return scale >= 0.0f; };
  return !gate.bias && std::all_of(gate.scales, gate.scales + neurons, keeps_sign);
}

// Whether products of high digits tell the sign of most elements, by a sample.
bool screening_pays(const FixedPointKernels& kernels, const WeightRows& gate, int64_t neurons, const FixedRows& x,
                    int64_t tokens) {
  constexpr int64_t kRows = 16, kTokens = 64;
  constexpr double kMost = 0.25;  // of the elements; where more stay open, nothing was gained (LOG.md)
  const int64_t rows = std::min(kRows, neurons), count = std::min(kTokens, tokens);
  float values[kRows * kTokens];
  const int64_t whole = kernels.screened_gate(x.from((tokens - count) / 2), static_cast<int>(count),
                                              static_cast<const int8_t*>(gate.data), neurons / rows * gate.ld,
                                              static_cast<int>(rows), gate.columns, nullptr, values, count);
  return static_cast<double>(whole) < kMost * static_cast<double>(rows * count);
}

// Of runs whose rows are to be a product's, those that tiles hold well: the last tile is at least half full. The runs
// that go have the fewest pairs.
void leave_whole_tiles(const LanePairs& lane, std::vector<size_t>* runs) {
  const size_t rest = runs->size() % kTileRows;
  if (rest >= kTileRows / 2) return;
  const auto more_pairs = [&](size_t a, size_t b) { return lane.runs[a].count > lane.runs[b].count; };
  std::nth_element(runs->begin(), runs->end() - rest, runs->end(), more_pairs);
  runs->resize(runs->size() - rest);
  std::sort(runs->begin(), runs->end());
}

}  // namespace

PairFinder::PairFinder(const Block& block, const Kernels& kernels, const Threads& threads)
    : block_(block),
      kernels_(kernels),
      threads_(threads),
      lanes_(static_cast<size_t>(threads.count)),
      scratch_(static_cast<size_t>(threads.count)) {}

// The up product of a lane's runs from `first_run` on, whose tokens are `tokens` from `first_token` on. `x` holds the
// rows that pairs number; `panels`, if any, those of these tokens.
void PairFinder::up_products(LanePairs& lane, size_t first_run, int64_t first_token, int64_t tokens, const char* x,
                             const char* panels, Scratch& scratch) {
  const WeightRows up = up_rows(block_);
  const int64_t hidden = block_.hidden, row_bytes = up.row_bytes(block_.dtype);
  const auto up_row = [&](size_t run) { return up.row(lane.runs[run].neuron, block_.dtype); };
  const auto widen = [&](size_t run, char* to) {
    kernels_.widen_int8(reinterpret_cast<const int8_t*>(up_row(run)), hidden, to, 0);
  };
  std::vector<size_t>& shared = scratch.shared;
  shared.clear();
  if (panels != nullptr && kernels_.matmul_pairs != nullptr) {
    for (size_t r = first_run; r < lane.runs.size(); ++r) {
      if (worth_a_row(kernels_, lane.runs[r].count, tokens)) shared.push_back(r);
    }
    if (kernels_.matrix_unit) leave_whole_tiles(lane, &shared);
  }
  if (!shared.empty()) {
    const int64_t count = static_cast<int64_t>(shared.size()), stride = hidden + 32;  // rows in different cache sets
    scratch.rows.reserve(count * stride * element_bytes(block_.dtype));
    for (int64_t i = 0; i < count; ++i) {
      if (i + 1 < count) prefetch(up_row(shared[i + 1]), row_bytes);
      char* row = at(scratch.rows.data(), i * stride, block_.dtype);
      if (up.scales) {
        widen(shared[i], row);
      } else {
        std::memcpy(row, up_row(shared[i]), row_bytes);
      }
    }
    scratch.up.resize(static_cast<size_t>(count * tokens));
    kernels_.gate_panels(panels, static_cast<int>(tokens), scratch.rows.data(), stride, static_cast<int>(count), hidden,
                         nullptr, nullptr, scratch.up.data(), tokens);
    for (int64_t i = 0; i < count; ++i) {
      const auto& run = lane.runs[shared[i]];
      const float* values = scratch.up.data() + i * tokens - first_token;
      for (int64_t p = run.begin; p < run.begin + run.count; ++p) lane.up[p] = values[lane.token[p]];
    }
  }
  size_t next_shared = 0;
  for (size_t r = first_run; r < lane.runs.size(); ++r) {
    if (next_shared < shared.size() && shared[next_shared] == r) {
      ++next_shared;
      continue;
    }
    const auto& run = lane.runs[r];
    if (r + 1 < lane.runs.size()) prefetch(up_row(r + 1), row_bytes);
    const void* row = up_row(r);
    if (up.scales) {
      scratch.row.reserve(hidden * element_bytes(block_.dtype));
      widen(r, scratch.row.data());
      row = scratch.row.data();
    }
    kernels_.gather_dot(row, x, hidden, lane.token.data() + run.begin, run.count, hidden, lane.up.data() + run.begin);
  }
  for (size_t r = first_run; up.scales && r < lane.runs.size(); ++r) {
    const auto& run = lane.runs[r];
    for (int64_t i = run.begin; i < run.begin + run.count; ++i) lane.up[i] *= up.scales[run.neuron];
  }
  for (size_t r = first_run; up.bias && r < lane.runs.size(); ++r) {
    const auto& run = lane.runs[r];
    for (int64_t i = run.begin; i < run.begin + run.count; ++i) lane.up[i] += up.bias[run.neuron];
  }
}

bool PairFinder::find(int64_t first, int64_t last, const Limit& limit, TokenPairs* pairs) {
  const int64_t tokens = last - first, hidden = block_.hidden, element = element_bytes(block_.dtype);
  const char* x = at(block_.x, first * hidden, block_.dtype);
  const int64_t step = block_tokens(block_, kernels_), steps = (tokens + step - 1) / step;
  int64_t width = tokens > kPanel ? kernels_.tile_neurons : kernels_.few_tile_neurons;
  while (width > kNarrowest && steps * (block_.width / width) < kItemsPerThread * threads_.count) width /= 2;
  const int64_t tile_count = (block_.width + width - 1) / width;
  std::vector<Tile> tiles(static_cast<size_t>(steps * tile_count));
  for (auto& lane : lanes_) lane.clear();

  const bool may_fix = block_.s_gate && kernels_.fixed && hidden <= kFixedColumns;
  const auto make_fixed = [&](bool small_low) {
    return fixed_.make(*kernels_.fixed, threads_, x, hidden * element, tokens, hidden, small_low);
  };
  const bool screened = may_fix && tokens >= kScreenedFrom && tokens < kernels_.screened_until &&
                        sign_stays(gate_rows(block_), block_.width) && make_fixed(true) &&
                        screening_pays(*kernels_.fixed, gate_rows(block_), block_.width, fixed_.rows(), tokens);
  const bool use_fixed = screened || (may_fix && tokens < kernels_.fixed_until && make_fixed(false));
  const int64_t panels_from = block_.s_gate ? kernels_.int8_panels_from : kernels_.panels_from;
  const bool use_panels = !use_fixed && kernels_.gate_panels != nullptr && tokens >= panels_from;
  const int64_t panel_count = (tokens + kPanel - 1) / kPanel;
  const int64_t bytes = panel_bytes(hidden * kernels_.panel_element);
  if (use_panels) {
    panels_.reserve(panel_count * bytes);
    for_items(threads_, panel_count, [&](int, int64_t panel) {
      kernels_.pack_panel(x + panel * kPanel * hidden * element, hidden,
                          static_cast<int>(std::min<int64_t>(kPanel, tokens - panel * kPanel)), hidden,
                          panels_.data() + panel * bytes);
    });
  }

  std::atomic<bool> too_dense{false};
  std::vector<int64_t> seen(static_cast<size_t>(threads_.count) * 8, 0);
  // One tile may hold all neurons that are always active, as they may be sorted.
  const double spare_neurons = std::max(kCpuCountSpare * static_cast<double>(block_.width), static_cast<double>(width));
  const double spare_pairs = static_cast<double>(tokens) * (spare_neurons + static_cast<double>(kCpuCountSparePairs));
  const double spare_rows = kCpuCountSpare * static_cast<double>(steps * block_.width);
  const int64_t scattering = scattering_step(tile_count);
  // One parallel pass over all tokens: a step's tokens meet every tile of neurons while they are in cache.
  for_items(threads_, steps * tile_count, [&](int lane_index, int64_t item) {
    if (too_dense.load(std::memory_order_relaxed)) return;
    LanePairs& lane = lanes_[lane_index];
    Scratch& scratch = scratch_[lane_index];
    const int64_t place = item % tile_count * scattering % tile_count, tile = item - item % tile_count + place;
    const int64_t t0 = item / tile_count * step, count = std::min(step, tokens - t0);
    scratch.gate.resize(static_cast<size_t>(width * count));
    float* values = scratch.gate.data();
    const int64_t f0 = place * width;
    const int neurons = static_cast<int>(std::min(width, block_.width - f0));
    const char* panels = use_panels ? panels_.data() + t0 / kPanel * bytes : nullptr;
    const TokenRows some{x + t0 * hidden * element, panels, static_cast<int>(count),
                         use_fixed ? fixed_.rows().from(t0) : FixedRows{}, screened};
    const int64_t next = (place + threads_.count * scattering) % tile_count * width;
    rows_product(gate_rows(block_), block_.dtype, kernels_, some, f0, neurons, next, &scratch.rows, values);

    tiles[tile] = {lane_index, lane.runs.size(), 0};
    for (int n = 0; n < neurons; ++n) {
      lane.reserve(count);
      const float* row = values + n * count;
      if (count == 1 && row[0] <= 0.0f) continue;
      const int64_t begin = lane.used;
      const int kept = kernels_.pack(row, static_cast<int>(count), static_cast<uint32_t>(t0), lane.token.data() + begin,
                                     lane.gate.data() + begin);
      if (kept == 0) continue;
      lane.runs.push_back({static_cast<uint32_t>(f0 + n), begin, kept});
      lane.used += kept;
    }
    const double rows = static_cast<double>(seen[lane_index * 8 + 1] += neurons);
    const double cells = static_cast<double>(seen[lane_index * 8] += neurons * count);
    const auto denser = [&](double share) { return static_cast<double>(lane.used) > share * cells + spare_pairs; };
    // Active in one of the tokens or more. These may be more than kNeighbours, and share less: so on a matrix unit,
    // too, the limit is the wider one.
    const double active_rows = static_cast<double>(lane.runs.size());
    if (denser(limit.density) && (denser(limit.by_union) || active_rows > kCpuMaxUnion * rows + spare_rows)) {
      too_dense.store(true, std::memory_order_relaxed);
      return;
    }
    if (block_.up != nullptr) {
      up_products(lane, tiles[tile].begin, t0, count, x, panels, scratch);
    } else {
      for (size_t r = tiles[tile].begin; r < lane.runs.size(); ++r)
        std::fill_n(lane.up.data() + lane.runs[r].begin, lane.runs[r].count, 1.0f);
    }
    tiles[tile].end = lane.runs.size();
  });
  if (too_dense) return false;

  by_token(tiles, tokens, pairs);
  return true;
}

// Pairs of tiles in order of their neurons, sorted by token. Each thread counts the pairs of its share of the tiles,
// and then knows where they go.
void PairFinder::by_token(const std::vector<Tile>& tiles, int64_t tokens, TokenPairs* pairs) const {
  const int64_t shares = tokens > kPanel ? std::min(kShares, static_cast<int64_t>(threads_.count)) : 1;
  const int64_t count = static_cast<int64_t>(tiles.size());
  // [share][token]: pairs, then the next one's place
  std::vector<int64_t> next(static_cast<size_t>(shares * tokens), 0);
  const auto for_share = [&](const auto& run_of) {
    for_items(threads_, shares, [&](int, int64_t share) {
      for (int64_t i = share * count / shares; i < (share + 1) * count / shares; ++i) {
        const LanePairs& lane = lanes_[tiles[i].lane];
        for (size_t r = tiles[i].begin; r < tiles[i].end; ++r) run_of(lane, lane.runs[r], next.data() + share * tokens);
      }
    });
  };
  for_share([](const LanePairs& lane, const LanePairs::Run& run, int64_t* of) {
    for (int64_t i = run.begin; i < run.begin + run.count; ++i) ++of[lane.token[i]];
  });
  pairs->begin.resize(static_cast<size_t>(tokens) + 1);
  int64_t total = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    pairs->begin[t] = total;
    for (int64_t share = 0; share < shares; ++share) {
      total += std::exchange(next[share * tokens + t], total);
    }
  }
  pairs->begin[tokens] = total;
  pairs->neuron.resize(static_cast<size_t>(total));
  pairs->gate.resize(static_cast<size_t>(total));
  pairs->up.resize(static_cast<size_t>(total));
  for_share([&](const LanePairs& lane, const LanePairs::Run& run, int64_t* of) {
    for (int64_t i = run.begin; i < run.begin + run.count; ++i) {
      const int64_t place = of[lane.token[i]]++;
      pairs->neuron[place] = run.neuron;
      pairs->gate[place] = lane.gate[i];
      pairs->up[place] = lane.up[i];
    }
  });
}

}  // namespace twell
