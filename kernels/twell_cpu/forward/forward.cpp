#include "forward/forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "forward/down.h"
#include "forward/weight_rows.h"
#include "twell_limits.h"

namespace twell {
namespace {

constexpr int64_t kStepsAtOnce = 8;  // blocks of tokens between two barriers

// Shares of active (token, neuron) pairs and of neurons that are active in at least one of the tokens.
struct Shares {
  double pairs, neurons;
};

// Of tokens whose rows are these, by so many groups of neurons; they lie all over the matrix, as neurons may be sorted.
Shares active_shares(const Block& block, const Kernels& kernels, const char* rows, int64_t tokens, int64_t groups) {
  Bytes scratch, panels;
  if (kernels.matrix_unit && tokens > kPanel) {  // where products are fast, a sample by rows would be long beside them
    const int64_t bytes = panel_bytes(block.hidden * kernels.panel_element);
    panels.reserve((tokens + kPanel - 1) / kPanel * bytes);
    for (int64_t t = 0; t < tokens; t += kPanel) {
      kernels.pack_panel(rows + t * block.hidden * element_bytes(block.dtype), block.hidden,
                         static_cast<int>(std::min<int64_t>(kPanel, tokens - t)), block.hidden,
                         panels.data() + t / kPanel * bytes);
    }
  }
  const size_t cells = static_cast<size_t>(kCpuGroupNeurons * tokens);
  std::vector<float> values(cells), kept(static_cast<size_t>(tokens));
  std::vector<uint32_t> position(kept.size());
  int64_t pairs = 0, neurons = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t f = group * (block.width - kCpuGroupNeurons) / std::max<int64_t>(groups - 1, 1);
    rows_product(gate_rows(block), block.dtype, kernels, {rows, panels.data(), static_cast<int>(tokens)}, f,
                 kCpuGroupNeurons, f, &scratch, values.data());
    for (int64_t n = 0; n < kCpuGroupNeurons; ++n) {
      const int active =
          kernels.pack(values.data() + n * tokens, static_cast<int>(tokens), 0, position.data(), kept.data());
      pairs += active;
      neurons += active > 0;
    }
  }
  const double all = static_cast<double>(groups * kCpuGroupNeurons);
  return {static_cast<double>(pairs) / (all * static_cast<double>(tokens)), static_cast<double>(neurons) / all};
}

// A dense call would waste the first blocks on finding out, so a sample of its tokens and neurons decides.
bool sample_is_dense(const Block& block, const Kernels& kernels, const Limit& limit) {
  if (limit.density >= 1) return false;
  const int64_t sample = std::min(kCpuSampleTokens, block.tokens);
  const int64_t groups =
      std::min(block.width / kCpuGroupNeurons, block.tokens < kCpuGroupsTokens ? kCpuGroupsFew : kCpuGroupsMany);
  if (groups == 0) return false;
  const int64_t row_bytes = block.hidden * element_bytes(block.dtype);
  std::vector<char> rows(static_cast<size_t>(sample * row_bytes));
  for (int64_t i = 0; i < sample; ++i) {
    const int64_t token = (2 * i + 1) * block.tokens / (2 * sample);
    std::memcpy(rows.data() + i * row_bytes, at(block.x, token * block.hidden, block.dtype), row_bytes);
  }
  const double density = active_shares(block, kernels, rows.data(), sample, groups).pairs;
  if (density <= limit.density) return false;
  if (density > limit.by_union) return true;
  const int64_t run = std::min(kNeighbours, block.tokens);
  const char* neighbours = at(block.x, (block.tokens - run) / 2 * block.hidden, block.dtype);
  return active_shares(block, kernels, neighbours, run, std::min(groups, kCpuGroupsFew)).neurons > limit.neurons;
}

void count_pairs(const Part& part, Report* report) {
  const TokenPairs& pairs = part.pairs;
  for (size_t token = 0; token + 1 < pairs.begin.size(); ++token) {
    const float weight = report->token_weight ? report->token_weight[part.first + static_cast<int64_t>(token)] : 1.0f;
    if (!(weight > 0)) continue;  // padding may hold NaN, and 0 * NaN would count it
    double l1 = 0;
    for (int64_t i = pairs.begin[token]; i < pairs.begin[token + 1]; ++i) {
      l1 += std::fabs(part.h[i]);
      if (part.h[i] != 0.0f) report->active[pairs.neuron[i]] += weight;
    }
    report->l1 += weight * l1;
  }
}

}  // namespace

int64_t block_tokens(const Block& block, const Kernels& kernels) {
  const int64_t bytes = std::max<int64_t>(block.hidden * element_bytes(block.dtype), 1);
  return std::clamp<int64_t>(kernels.block_bytes / bytes / kPanel * kPanel, kPanel, 4 * kPanel);
}

Limit limit_of(const Block& block, const Kernels& kernels, bool training) {
  const bool amx = kernels.matrix_unit;  // which is of bfloat16 alone
  if (training) return {amx ? kCpuTrainingMaxDensityAmx : kCpuTrainingMaxDensity, 0, 0};
  const bool float32 = block.dtype == DType::kFloat32 && !block.s_gate;
  const DensityLimit* row = amx ? kCpuLimitsAmx : float32 ? kCpuLimitsFloat32 : kCpuLimits;
  while (row->tokens < block.tokens) ++row;
  if (block.s_gate || block.tokens < kNeighbours) return {row->density, 0, 0};
  return {row->density, amx ? kCpuUnionMaxDensityAmx : kCpuUnionMaxDensity, amx ? kCpuMaxUnionAmx : kCpuMaxUnion};
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

void forward(const Block& block, const Kernels& kernels, const Threads& threads, void* y, Report* report,
             const State* state, const DenseRange& dense, double max_density) {
  const auto go_dense = [&](int64_t first, int64_t last) {
    if (state) std::fill(state->count + first, state->count + last, State::kDense);
    dense(first, last);
  };
  if (block.tokens == 0) return;
  Limit limit = limit_of(block, kernels, state != nullptr);
  limit.density = std::min(max_density, limit.density);
  limit.by_union = std::min(max_density, limit.by_union);
  if (sample_is_dense(block, kernels, limit)) return go_dense(0, block.tokens);

  PairFinder finder(block, kernels, threads);
  int64_t slot = 0;
  const int64_t step = kStepsAtOnce * block_tokens(block, kernels);
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
    down_product(block, kernels, threads, part, y);
  }
}

}  // namespace twell
