#include "backward/backward.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "backward/matrix.h"
#include "common/terms.h"
#include "common/shared_rows.h"
#include "simd/past_caches.h"

namespace twell {
namespace {

// The pairs of tokens that did not fit the saved state, computed again from x.
TokenPairs recompute(const Block& block, const Kernels& kernels, const Threads& threads,
                     const std::vector<int64_t>& tokens) {
  const int64_t row_bytes = block.hidden * element_bytes(block.dtype), count = static_cast<int64_t>(tokens.size());
  const int64_t step = block_tokens(block, kernels);
  std::vector<char> rows(static_cast<size_t>(std::min(step, count) * row_bytes));
  Block part = block;
  part.x = rows.data();
  PairFinder finder(part, kernels, threads);
  TokenPairs all, pairs;
  all.begin.push_back(0);
  for (int64_t first = 0; first < count; first += step) {
    const int64_t n = std::min(step, count - first);
    for (int64_t i = 0; i < n; ++i) {
      std::memcpy(rows.data() + i * row_bytes, at(block.x, tokens[first + i] * block.hidden, block.dtype), row_bytes);
    }
    finder.find(0, n, {2.0, 0, 0}, &pairs);
    const int64_t before = all.begin.back();
    for (int64_t i = 1; i <= n; ++i) all.begin.push_back(before + pairs.begin[i]);
    all.neuron.insert(all.neuron.end(), pairs.neuron.begin(), pairs.neuron.end());
    all.gate.insert(all.gate.end(), pairs.gate.begin(), pairs.gate.end());
    all.up.insert(all.up.end(), pairs.up.begin(), pairs.up.end());
  }
  return all;
}

TokenPairs load_pairs(const Block& block, const Kernels& kernels, const Threads& threads, const State& state,
                      bool has_runs, std::vector<std::pair<int64_t, int64_t>>* dense) {
  const auto recomputes = [&](int64_t t) {
    return state.count[t] == State::kRecompute || (has_runs && state.count[t] == State::kDense);
  };
  std::vector<int64_t> missing;
  for (int64_t t = 0; t < block.tokens; ++t) {
    if (recomputes(t)) {
      missing.push_back(t);
      continue;
    }
    if (state.count[t] != State::kDense) continue;
    if (!dense->empty() && dense->back().second == t) {
      dense->back().second = t + 1;
    } else {
      dense->push_back({t, t + 1});
    }
  }
  TokenPairs again;
  if (!missing.empty()) again = recompute(block, kernels, threads, missing);

  TokenPairs pairs;
  pairs.begin.resize(static_cast<size_t>(block.tokens) + 1);
  size_t next_missing = 0;
  for (int64_t t = 0; t < block.tokens; ++t) {
    int64_t count = std::max<int64_t>(state.count[t], 0);
    if (recomputes(t)) {
      count = again.begin[next_missing + 1] - again.begin[next_missing];
      ++next_missing;
    }
    pairs.begin[t + 1] = pairs.begin[t] + count;
  }
  const int64_t total = pairs.begin.back(), element = element_bytes(block.dtype);
  pairs.neuron.resize(static_cast<size_t>(total));
  pairs.gate.resize(static_cast<size_t>(total));
  pairs.up.resize(static_cast<size_t>(total));
  std::vector<char> rounded(static_cast<size_t>(has_runs ? block.width * element : 0));
  int64_t slot = 0;
  next_missing = 0;
  for (int64_t t = 0; t < block.tokens; ++t) {
    const int64_t begin = pairs.begin[t], count = pairs.begin[t + 1] - begin;
    if (recomputes(t)) {
      const int64_t from = again.begin[next_missing++];
      std::copy_n(again.neuron.begin() + from, count, pairs.neuron.begin() + begin);
      std::copy_n(again.gate.begin() + from, count, pairs.gate.begin() + begin);
      if (has_runs) {  // whose strongest is found among gates that are all rounded as the saved ones
        kernels.round(again.gate.data() + from, count, rounded.data());
        kernels.widen(rounded.data(), count, pairs.gate.data() + begin);
      }
      std::copy_n(again.up.begin() + from, count, pairs.up.begin() + begin);
      continue;
    }
    for (int64_t i = 0; i < count; ++i) pairs.neuron[begin + i] = state.neuron[slot + i];
    kernels.widen(state.gate + slot * element, count, pairs.gate.data() + begin);
    if (state.up) {
      kernels.widen(state.up + slot * element, count, pairs.up.data() + begin);
    } else {
      std::fill_n(pairs.up.begin() + begin, count, 1.0f);
    }
    slot += count;
  }
  return pairs;
}

NeuronPairs by_neuron(const TokenPairs& pairs, int64_t width) {
  NeuronPairs out;
  out.begin.assign(static_cast<size_t>(width) + 1, 0);
  for (uint32_t neuron : pairs.neuron) ++out.begin[neuron + 1];
  for (int64_t f = 0; f < width; ++f) out.begin[f + 1] += out.begin[f];
  out.token.resize(pairs.neuron.size());
  out.source.resize(pairs.neuron.size());
  std::vector<int64_t> next(out.begin.begin(), out.begin.end() - 1);
  for (size_t token = 0; token + 1 < pairs.begin.size(); ++token) {
    for (int64_t i = pairs.begin[token]; i < pairs.begin[token + 1]; ++i) {
      const int64_t place = next[pairs.neuron[i]]++;
      out.token[place] = static_cast<uint32_t>(token);
      out.source[place] = i;
    }
  }
  return out;
}

// Buffers of one thread in the neuron-major pass.
struct NeuronScratch {
  std::vector<float> grad_h, grad_gate, grad_up, h, gate;  // one neuron's pairs
  std::vector<float> sums;                                 // three rows of D
  Bytes down;                                              // the group's columns of down, as rows
  Bytes grad_down;                                         // and of its gradient
  std::vector<int64_t> shared;                             // neurons left to the matrix unit
  SharedNeuronGradients::Scratch matrix;
  RunScratch runs;
};

}  // namespace

std::vector<std::pair<int64_t, int64_t>> backward(const Block& block, const Kernels& kernels, const Threads& threads,
                                                  const void* grad_y, const State& state, const Pulls& pulls,
                                                  const Gradients& gradients) {
  const bool matrix = kernels.matrix_unit && block.tokens >= kernels.panels_from;
  // A group's gradient of down fills whole cache lines; on a matrix unit, which takes many at once, more of each page.
  const int64_t group_size = matrix ? 384 : 32;
  const int64_t stride = block.hidden + 32;  // of a group's rows, so that they lie in different cache sets
  const DType dtype = block.dtype;
  const int64_t hidden = block.hidden, element = element_bytes(dtype), row_bytes = hidden * element;
  std::vector<std::pair<int64_t, int64_t>> dense;
  TokenPairs pairs = load_pairs(block, kernels, threads, state, pulls.runs.run != nullptr, &dense);
  const NeuronPairs neurons = by_neuron(pairs, block.width);

  std::optional<SharedNeuronGradients> shared_gradients;
  if (matrix && worth_a_row(kernels, pairs.begin.back() / block.width * 2, block.tokens)) {
    shared_gradients.emplace(block, kernels, threads, grad_y, pulls);
  }
  Values<float>& grad_gate = pairs.gate;  // each pair's factors are replaced by its gradients once they are used
  Values<float>& grad_up = pairs.up;
  std::vector<NeuronScratch> scratch(static_cast<size_t>(threads.count));
  for_items(threads, (block.width + group_size - 1) / group_size, [&](int lane, int64_t group) {
    NeuronScratch& my = scratch[lane];
    my.sums.resize(static_cast<size_t>(3 * hidden));
    float *sum_gate = my.sums.data(), *sum_up = sum_gate + hidden, *sum_down = sum_up + hidden;
    const int64_t first = group * group_size, last = std::min(block.width, first + group_size);
    if (gradients.down) my.grad_down.reserve(group_size * stride * element);
    const char* down = at(block.down, first * block.down_column, dtype);
    int64_t down_stride = block.down_column;
    if (!down_by_column(block) && neurons.begin[first] < neurons.begin[last]) {
      my.down.reserve(group_size * stride * element);
      kernels.transpose(down, block.down_row, hidden, last - first, my.down.data(), stride, false);
      down = my.down.data();
      down_stride = stride;
    }
    my.shared.clear();
    for (int64_t f = first; shared_gradients && f < last; ++f) {
      if (worth_a_row(kernels, neurons.begin[f + 1] - neurons.begin[f], block.tokens)) my.shared.push_back(f);
    }
    if (my.shared.size() < 8) my.shared.clear();
    if (!my.shared.empty()) {
      shared_gradients->add(my.shared, first, neurons, down, down_stride, &pairs, gradients, my.grad_down.data(),
                            stride, &my.matrix);
    }
    size_t next_shared = 0;
    for (int64_t f = first; f < last; ++f) {
      if (next_shared < my.shared.size() && my.shared[next_shared] == f) {
        ++next_shared;
        continue;
      }
      const int64_t begin = neurons.begin[f], count = neurons.begin[f + 1] - begin;
      if (gradients.b_gate) gradients.b_gate[f] = 0;
      if (gradients.b_up) gradients.b_up[f] = 0;
      if (count == 0) {
        if (gradients.gate) clear_past_caches(at(gradients.gate, f * hidden, dtype), row_bytes);
        if (gradients.up) clear_past_caches(at(gradients.up, f * hidden, dtype), row_bytes);
        if (gradients.down) std::memset(my.grad_down.data() + (f - first) * stride * element, 0, row_bytes);
        continue;
      }
      const uint32_t* tokens = neurons.token.data() + begin;
      for (auto* buffer : {&my.grad_h, &my.grad_gate, &my.grad_up, &my.h, &my.gate}) {
        if (static_cast<int64_t>(buffer->size()) < count) buffer->resize(static_cast<size_t>(count));
      }
      kernels.gather_dot(at(down, (f - first) * down_stride, dtype), grad_y, hidden, tokens, count, hidden,
                         my.grad_h.data());
      for (int64_t i = 0; i < count; ++i) {
        const int64_t source = neurons.source[begin + i];
        const float gate = pairs.gate[source], up = pairs.up[source], h = gate * up;
        float grad_h = my.grad_h[i];
        if (pulls.l1) grad_h += l1_gradient(pulls.l1[tokens[i]], h);
        my.gate[i] = gate;
        my.h[i] = h;
        my.grad_gate[i] = grad_h * up;
        if (pulls.count) my.grad_gate[i] += count_gradient(pulls.count[tokens[i]], gate);
        grad_up[source] = my.grad_up[i] = grad_h * gate;
      }
      if (pulls.runs.run) my.runs.add(pulls.runs, tokens, my.gate.data(), count, my.grad_gate.data());
      double bias_gate = 0, bias_up = 0;
      for (int64_t i = 0; i < count; ++i) {
        grad_gate[neurons.source[begin + i]] = my.grad_gate[i];
        bias_gate += my.grad_gate[i];
        bias_up += my.grad_up[i];
      }
      if (gradients.b_gate) gradients.b_gate[f] = static_cast<float>(bias_gate);
      if (gradients.b_up) gradients.b_up[f] = static_cast<float>(bias_up);
      if (gradients.gate && gradients.up) {
        std::fill_n(sum_gate, 2 * hidden, 0.0f);
        kernels.gather_sum2(block.x, hidden, tokens, my.grad_gate.data(), my.grad_up.data(), count, hidden, sum_gate,
                            sum_up);
      } else if (gradients.gate || gradients.up) {
        float* sum = gradients.gate ? sum_gate : sum_up;
        std::fill_n(sum, hidden, 0.0f);
        kernels.gather_sum(block.x, hidden, tokens, (gradients.gate ? my.grad_gate : my.grad_up).data(), count, hidden,
                           sum);
      }
      if (gradients.gate) kernels.round(sum_gate, hidden, at(gradients.gate, f * hidden, dtype));
      if (gradients.up) kernels.round(sum_up, hidden, at(gradients.up, f * hidden, dtype));
      if (gradients.down) {
        std::fill_n(sum_down, hidden, 0.0f);
        kernels.gather_sum(grad_y, hidden, tokens, my.h.data(), count, hidden, sum_down);
        kernels.round(sum_down, hidden, my.grad_down.data() + (f - first) * stride * element);
      }
    }
    if (gradients.down && down_by_column(block)) {
      for (int64_t f = first; f < last; ++f) {
        std::memcpy(at(gradients.down, f * hidden, dtype), my.grad_down.data() + (f - first) * stride * element,
                    row_bytes);
      }
    } else if (gradients.down) {
      kernels.transpose(my.grad_down.data(), stride, last - first, hidden, at(gradients.down, first, dtype),
                        block.width, true);
    }
    publish();
  });
  if (pulls.runs.run) {
    *gradients.in_runs = 0;
    for (const NeuronScratch& my : scratch) *gradients.in_runs += my.runs.active() + my.matrix.runs.active();
  }

  if (gradients.x && matrix) {
    std::vector<ScaledRows> terms{{block.gate, hidden, grad_gate.data()}};
    if (block.up) terms.push_back({block.up, hidden, grad_up.data()});
    if (sum_shared_rows(block, kernels, threads, pairs, terms, nullptr, gradients.x)) return dense;
  }
  if (gradients.x) {
    for_items(threads, block.tokens, [&](int lane, int64_t token) {
      auto& sums = scratch[lane].sums;
      sums.assign(static_cast<size_t>(hidden), 0.0f);
      const int64_t begin = pairs.begin[token], count = pairs.begin[token + 1] - begin;
      if (count > 0) {
        const uint32_t* index = pairs.neuron.data() + begin;
        kernels.gather_sum(block.gate, hidden, index, grad_gate.data() + begin, count, hidden, sums.data());
        if (block.up) kernels.gather_sum(block.up, hidden, index, grad_up.data() + begin, count, hidden, sums.data());
      }
      kernels.round(sums.data(), hidden, at(gradients.x, token * hidden, dtype));
    });
  }
  return dense;
}

}  // namespace twell
