#include "forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace twell {
namespace {

constexpr int64_t kFewTokens = 16;
constexpr int64_t kStepsAtOnce = 8;  // blocks of tokens between two barriers
constexpr int64_t kTileNeurons = 48;  // a multiple of both gate kernels' register tiles

const char* at(const void* base, int64_t elements, DType dtype) {
  return static_cast<const char*>(base) + elements * element_bytes(dtype);
}

char* at(void* base, int64_t elements, DType dtype) {
  return static_cast<char*>(base) + elements * element_bytes(dtype);
}

inline void prefetch(const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// A dense call would waste the first blocks on finding out, so a sample of its tokens and neurons decides.
bool sample_is_dense(const Block& block, const Kernels& kernels) {
  constexpr int64_t kMaxSample = 16;
  if (max_density(block.tokens) >= 1) return false;
  const int64_t sample = std::min(kMaxSample, block.tokens);
  const int64_t groups = std::min<int64_t>(block.width / kTileNeurons, block.tokens < 64 ? 3 : 6);
  if (groups == 0) return false;
  const int64_t row_bytes = block.hidden * element_bytes(block.dtype);
  std::vector<char> rows(static_cast<size_t>(sample * row_bytes));
  for (int64_t i = 0; i < sample; ++i) {
    const int64_t token = (2 * i + 1) * block.tokens / (2 * sample);
    std::memcpy(rows.data() + i * row_bytes, at(block.x, token * block.hidden, block.dtype), row_bytes);
  }
  float values[kTileNeurons * kMaxSample];
  uint32_t position[kTileNeurons * kMaxSample];
  float kept[kTileNeurons * kMaxSample];
  int64_t active = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t f = group * (block.width - kTileNeurons) / std::max<int64_t>(groups - 1, 1);
    kernels.gate(rows.data(), block.hidden, sample, at(block.gate, f * block.hidden, block.dtype), block.hidden,
                 kTileNeurons, block.hidden, block.b_gate ? block.b_gate + f : nullptr, values, sample);
    active += kernels.pack(values, kTileNeurons * sample, 0, position, kept);
  }
  return static_cast<double>(active) > max_density(block.tokens) * static_cast<double>(groups * kTileNeurons * sample);
}

// Consecutive tokens with their pairs; h = gate * up.
struct Part {
  int64_t first;
  TokenPairs pairs;
  std::vector<float> h;
};

// sums = b_down[d ...] + sum over a token's pairs of h * rows[neuron, d ...], rounded into y.
void add_token(const Block& block, const Kernels& kernels, const Part& part, int64_t token, const uint32_t* index,
               const void* rows, int64_t ld_rows, int64_t d, int64_t width, float* sums, void* y) {
  if (block.b_down) {
    std::memcpy(sums, block.b_down + d, sizeof(float) * width);
  } else {
    std::fill_n(sums, width, 0.0f);
  }
  const int64_t begin = part.pairs.begin[token], count = part.pairs.begin[token + 1] - begin;
  if (count > 0) kernels.gather_sum(rows, ld_rows, index + begin, part.h.data() + begin, count, width, sums);
  kernels.round(sums, width, at(y, (part.first + token) * block.hidden + d, block.dtype));
}

// y from rows of down's transpose, numbered by `index`.
void down_by_rows(const Block& block, const Kernels& kernels, const Threads& threads, const Part& part,
                  const uint32_t* index, const void* rows, int64_t ld_rows, void* y) {
  const int64_t tokens = static_cast<int64_t>(part.pairs.begin.size()) - 1;
  // Few tokens: slices of D keep every thread busy.
  const int64_t most = std::max<int64_t>(1, std::min<int64_t>(threads.count, block.hidden / 256));
  const int64_t slices = tokens >= 4 * threads.count ? 1 : most;
  const int64_t slice = (block.hidden + slices - 1) / slices;
  std::vector<std::vector<float>> sums(static_cast<size_t>(threads.count));
  for_items(threads, tokens * slices, [&](int lane, int64_t item) {
    const int64_t d = item % slices * slice, width = std::min(slice, block.hidden - d);
    sums[lane].resize(static_cast<size_t>(slice));
    add_token(block, kernels, part, item / slices, index, at(rows, d, block.dtype), ld_rows, d, width,
              sums[lane].data(), y);
  });
}

// y where down lies by rows and few neurons are active: their columns are copied out first.
void down_by_active_columns(const Block& block, const Kernels& kernels, const Threads& threads, const Part& part,
                            void* y) {
  std::vector<uint32_t> active(part.pairs.neuron), index(part.pairs.neuron.size());
  std::sort(active.begin(), active.end());
  active.erase(std::unique(active.begin(), active.end()), active.end());
  for (size_t i = 0; i < index.size(); ++i) {
    const auto place = std::lower_bound(active.begin(), active.end(), part.pairs.neuron[i]);
    index[i] = static_cast<uint32_t>(place - active.begin());
  }
  const int64_t count = static_cast<int64_t>(active.size()), element = element_bytes(block.dtype);
  Bytes rows;
  rows.reserve(count * block.hidden * element + 1);
  constexpr int64_t kSlice = 32;  // a cache line of 16-bit outputs
  for_items(threads, (block.hidden + kSlice - 1) / kSlice, [&](int, int64_t item) {
    const int64_t first = item * kSlice, last = std::min(block.hidden, first + kSlice);
    const int64_t step = block.down_row * element;
    for (int64_t c = 0; c < count; ++c) {
      const char* from = at(block.down, first * block.down_row + active[c], block.dtype);
      char* to = at(rows.data(), c * block.hidden + first, block.dtype);
      for (int64_t d = first; d < last; ++d, from += step, to += element) {
        std::memcpy(to, from, 2);
        if (element == 4) std::memcpy(to + 2, from + 2, 2);
      }
    }
  });
  down_by_rows(block, kernels, threads, part, index.data(), rows.data(), block.hidden, y);
}

// y where down lies by rows, for few tokens with many active neurons: h (T, F) against rows of down, as they lie.
void down_by_row_dots(const Block& block, const Kernels& kernels, const Threads& threads, int64_t tokens, const char* h,
                      void* y) {
  for_items(threads, (block.hidden + kTileNeurons - 1) / kTileNeurons, [&](int, int64_t tile) {
    const int64_t d0 = tile * kTileNeurons, count = std::min(kTileNeurons, block.hidden - d0);
    float values[kTileNeurons * kFewTokens], row[kTileNeurons];
    kernels.gate(h, block.width, static_cast<int>(tokens), at(block.down, d0 * block.down_row, block.dtype),
                 block.down_row, static_cast<int>(count), block.width, block.b_down ? block.b_down + d0 : nullptr, values,
                 tokens);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t d = 0; d < count; ++d) row[d] = values[d * tokens + t];
      kernels.round(row, count, at(y, t * block.hidden + d0, block.dtype));
    }
  });
}

void down_of_few(const Block& block, const Kernels& kernels, const Threads& threads, const Part& part, void* y) {
  const int64_t tokens = static_cast<int64_t>(part.pairs.begin.size()) - 1, element = element_bytes(block.dtype);
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
  std::vector<Bytes> copies(static_cast<size_t>(threads.count));
  for_items(threads, (block.hidden + slice - 1) / slice, [&](int lane, int64_t item) {
    const int64_t d = item * slice, width = std::min(slice, block.hidden - d);
    copies[lane].reserve(block.width * slice * element);
    char* rows = copies[lane].data();
    kernels.transpose(at(block.down, d * block.down_row, block.dtype), block.down_row, width, block.width, rows, slice);
    float sums[128];
    const int64_t tokens = static_cast<int64_t>(part.pairs.begin.size()) - 1;
    for (int64_t token = 0; token < tokens; ++token) {
      add_token(block, kernels, part, token, part.pairs.neuron.data(), rows, slice, d, width, sums, y);
    }
  });
}

void count_pairs(const Part& part, Report* report) {
  const TokenPairs& pairs = part.pairs;
  for (size_t token = 0; token + 1 < pairs.begin.size(); ++token) {
    const float weight = report->token_weight ? report->token_weight[part.first + static_cast<int64_t>(token)] : 1.0f;
    double l1 = 0;
    for (int64_t i = pairs.begin[token]; i < pairs.begin[token + 1]; ++i) {
      l1 += std::fabs(part.h[i]);
      if (part.h[i] != 0.0f) report->active[pairs.neuron[i]] += weight;
    }
    report->l1 += weight * l1;
  }
}

}  // namespace

int64_t block_tokens(const Block& block) {
  const int64_t bytes = std::max<int64_t>(block.hidden * element_bytes(block.dtype), 1);
  return std::clamp<int64_t>((512 << 10) / bytes / kPanel * kPanel, kPanel, 4 * kPanel);
}

double max_density(int64_t tokens) {
  // Few tokens are bound by weight traffic, which active rows always save; many by arithmetic, which matmuls do
  // about five times as fast for each pair.
  if (tokens <= 2) return 1.0;
  if (tokens <= 8) return 0.3;
  if (tokens <= 32) return 0.2;
  return 0.18;
}

PairFinder::PairFinder(const Block& block, const Kernels& kernels, const Threads& threads)
    : block_(block),
      kernels_(kernels),
      threads_(threads),
      lanes_(static_cast<size_t>(threads.count)),
      scratch_(static_cast<size_t>(threads.count)) {}

bool PairFinder::find(int64_t first, int64_t last, double max_density, TokenPairs* pairs) {
  struct Tile {
    int lane;
    size_t begin, end;
  };
  const int64_t tokens = last - first, hidden = block_.hidden, element = element_bytes(block_.dtype);
  const char* x = at(block_.x, first * hidden, block_.dtype);
  const int64_t tile_count = (block_.width + kTileNeurons - 1) / kTileNeurons;
  const int64_t step = block_tokens(block_), steps = (tokens + step - 1) / step;
  std::vector<Tile> tiles(static_cast<size_t>(steps * tile_count));
  for (auto& lane : lanes_) lane.clear();

  const bool use_panels = kernels_.gate_panel != nullptr && tokens >= kPanel / 2;
  const int64_t panel_count = (tokens + kPanel - 1) / kPanel, panel_bytes = kPanel * (hidden + 1) * element;
  if (use_panels) {
    panels_.resize(static_cast<size_t>(panel_count * panel_bytes + 64));
    for_items(threads_, panel_count, [&](int, int64_t panel) {
      kernels_.pack_panel(x + panel * kPanel * hidden * element, hidden,
                          static_cast<int>(std::min<int64_t>(kPanel, tokens - panel * kPanel)), hidden,
                          panels_.data() + panel * panel_bytes);
    });
  }

  std::atomic<bool> too_dense{false};
  std::vector<int64_t> seen(static_cast<size_t>(threads_.count) * 8, 0);
  const double allowance = 0.02 * static_cast<double>(tokens * block_.width) + static_cast<double>(tokens) * 4;
  // One parallel pass over all tokens: a step's tokens meet every tile of neurons while they are in cache.
  for_items(threads_, steps * tile_count, [&](int lane_index, int64_t tile) {
    if (too_dense.load(std::memory_order_relaxed)) return;
    LanePairs& lane = lanes_[lane_index];
    auto& values = scratch_[lane_index];
    const int64_t t0 = tile / tile_count * step, count = std::min(step, tokens - t0);
    values.resize(static_cast<size_t>(kTileNeurons * count));
    const int64_t f0 = tile % tile_count * kTileNeurons;
    const int neurons = static_cast<int>(std::min(kTileNeurons, block_.width - f0));
    const float* bias = block_.b_gate ? block_.b_gate + f0 : nullptr;
    const char* w = at(block_.gate, f0 * hidden, block_.dtype);
    if (use_panels) {
      for (int64_t t = 0; t < count; t += kPanel) {
        kernels_.gate_panel(panels_.data() + (t0 + t) / kPanel * panel_bytes,
                            static_cast<int>(std::min<int64_t>(kPanel, count - t)), w, hidden, neurons, hidden, bias,
                            values.data() + t, count);
      }
    } else {
      kernels_.gate(x + t0 * hidden * element, hidden, static_cast<int>(count), w, hidden, neurons, hidden, bias,
                    values.data(), count);
    }

    tiles[tile] = {lane_index, lane.runs.size(), 0};
    for (int n = 0; n < neurons; ++n) {
      lane.reserve(count);
      const float* row = values.data() + n * count;
      if (count == 1 && row[0] <= 0.0f) continue;
      const int64_t begin = lane.used;
      const int kept = kernels_.pack(row, static_cast<int>(count), static_cast<uint32_t>(t0), lane.token.data() + begin, lane.gate.data() + begin);
      if (kept == 0) continue;
      lane.runs.push_back({static_cast<uint32_t>(f0 + n), begin, kept});
      lane.used += kept;
    }
    seen[lane_index * 8] += neurons * count;
    if (static_cast<double>(lane.used) > max_density * static_cast<double>(seen[lane_index * 8]) + allowance) {
      too_dense.store(true, std::memory_order_relaxed);
      return;
    }
    for (size_t r = tiles[tile].begin; r < lane.runs.size(); ++r) {
      const auto& run = lane.runs[r];
      float* up = lane.up.data() + run.begin;
      if (block_.up != nullptr && r + 1 < lane.runs.size()) {
        prefetch(at(block_.up, lane.runs[r + 1].neuron * hidden, block_.dtype), hidden * element);
      }
      if (block_.up == nullptr) {
        std::fill_n(up, run.count, 1.0f);
        continue;
      }
      kernels_.gather_dot(at(block_.up, run.neuron * hidden, block_.dtype), x, hidden, lane.token.data() + run.begin,
                          run.count, hidden, up);
      if (block_.b_up) {
        for (int64_t i = 0; i < run.count; ++i) up[i] += block_.b_up[run.neuron];
      }
    }
    tiles[tile].end = lane.runs.size();
  });
  if (too_dense) return false;

  pairs->begin.assign(static_cast<size_t>(tokens) + 1, 0);
  int64_t total = 0;
  for (const auto& lane : lanes_) {
    total += lane.used;
    for (int64_t i = 0; i < lane.used; ++i) ++pairs->begin[lane.token[i] + 1];
  }
  for (int64_t t = 0; t < tokens; ++t) pairs->begin[t + 1] += pairs->begin[t];
  pairs->neuron.resize(static_cast<size_t>(total));
  pairs->gate.resize(static_cast<size_t>(total));
  pairs->up.resize(static_cast<size_t>(total));
  std::vector<int64_t> next(pairs->begin.begin(), pairs->begin.end() - 1);
  for (const Tile& tile : tiles) {  // in order of neurons, whichever lane had them
    const LanePairs& lane = lanes_[tile.lane];
    for (size_t r = tile.begin; r < tile.end; ++r) {
      const auto& run = lane.runs[r];
      for (int64_t i = run.begin; i < run.begin + run.count; ++i) {
        const int64_t place = next[lane.token[i]]++;
        pairs->neuron[place] = run.neuron;
        pairs->gate[place] = lane.gate[i];
        pairs->up[place] = lane.up[i];
      }
    }
  }
  return true;
}

int64_t save_pairs(const State& state, const TokenPairs& pairs, int64_t first_token, int64_t slot,
                   const Kernels& kernels, int64_t element) {
  for (size_t token = 0; token + 1 < pairs.begin.size(); ++token) {
    const int64_t begin = pairs.begin[token], count = pairs.begin[token + 1] - begin;
    int32_t& saved = state.count[first_token + static_cast<int64_t>(token)];
    if (slot + count > state.slots) {
      saved = State::kRecompute;
      continue;
    }
    saved = static_cast<int32_t>(count);
    for (int64_t i = 0; i < count; ++i) state.neuron[slot + i] = static_cast<uint16_t>(pairs.neuron[begin + i]);
    kernels.round(pairs.gate.data() + begin, count, state.gate + slot * element);
    if (state.up) kernels.round(pairs.up.data() + begin, count, state.up + slot * element);
    slot += count;
  }
  return slot;
}

// A column of a matrix stored by rows costs a cache line for each of its elements, and those come one by one.
constexpr int64_t kCacheLine = 64;

void forward(const Block& block, const Kernels& kernels, const Threads& threads, void* y, Report* report,
             const State* state, const DenseRange& dense) {
  const auto go_dense = [&](int64_t first, int64_t last) {
    if (state) std::fill(state->count + first, state->count + last, State::kDense);
    dense(first, last);
  };
  if (block.tokens == 0) return;
  if (sample_is_dense(block, kernels)) return go_dense(0, block.tokens);

  PairFinder finder(block, kernels, threads);
  int64_t slot = 0;
  const int64_t step = kStepsAtOnce * block_tokens(block);
  const double limit = max_density(block.tokens);
  for (int64_t first = 0; first < block.tokens; first += step) {
    const int64_t last = std::min(block.tokens, first + step);
    Part part;
    part.first = first;
    if (!finder.find(first, last, limit, &part.pairs)) {
      go_dense(first, last);
      continue;
    }
    const TokenPairs& pairs = part.pairs;
    const int64_t total = pairs.begin.back();
    part.h.resize(static_cast<size_t>(total));
    for (int64_t i = 0; i < total; ++i) part.h[i] = pairs.gate[i] * pairs.up[i];
    if (report->active) count_pairs(part, report);
    if (state) slot = save_pairs(*state, pairs, first, slot, kernels, element_bytes(block.dtype));
    if (down_by_column(block)) {
      down_by_rows(block, kernels, threads, part, pairs.neuron.data(), block.down, block.down_column, y);
    } else if (block.tokens <= step && 2 * total * kCacheLine < block.width * element_bytes(block.dtype)) {
      down_by_active_columns(block, kernels, threads, part, y);
    } else if (block.tokens <= kFewTokens) {
      down_of_few(block, kernels, threads, part, y);
    } else {
      down_by_slices(block, kernels, threads, part, y);
    }
  }
}

}  // namespace twell
