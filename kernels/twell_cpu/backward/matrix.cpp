#include "backward/matrix.h"

#include <algorithm>
#include <cstring>

#include "common/terms.h"

namespace twell {
namespace {

constexpr int64_t kValuesAtOnce = 256 << 10;  // of neurons x tokens, so that they stay in cache

int64_t rounded_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

SharedNeuronGradients::SharedNeuronGradients(const Block& block, const Kernels& kernels, const Threads& threads,
                                             const void* grad_y, const Pulls& pulls)
    : block_(block), kernels_(kernels), pulls_(pulls), padded_(rounded_up(block.tokens, 32)) {
  const int64_t hidden = block.hidden, tokens = block.tokens, bytes = panel_bytes(hidden * 2);
  const int64_t panels = (tokens + kPanel - 1) / kPanel, slices = (hidden + kPairColumns - 1) / kPairColumns;
  grad_panels_.reserve(panels * bytes);
  grad_pairs_.reserve(slices * padded_ * kPairColumns * 2);
  x_pairs_.reserve(slices * padded_ * kPairColumns * 2);
  for_items(threads, panels, [&](int, int64_t panel) {
    const int64_t t = panel * kPanel;
    kernels.pack_panel(at(grad_y, t * hidden, block.dtype), hidden,
                       static_cast<int>(std::min<int64_t>(kPanel, tokens - t)), hidden,
                       grad_panels_.data() + panel * bytes);
  });
  for_items(threads, slices, [&](int, int64_t slice) {
    const int64_t d = slice * kPairColumns, width = std::min(kPairColumns, hidden - d), to = d * padded_ * 2;
    kernels.pair_rows(at(block.x, d, block.dtype), hidden, nullptr, tokens, width, x_pairs_.data() + to);
    kernels.pair_rows(at(grad_y, d, block.dtype), hidden, nullptr, tokens, width, grad_pairs_.data() + to);
  });
}

void SharedNeuronGradients::add(const std::vector<int64_t>& shared, int64_t first, const NeuronPairs& neurons,
                                const char* down, int64_t down_stride, TokenPairs* pairs, const Gradients& gradients,
                                char* grad_down, int64_t grad_stride, Scratch* scratch) const {
  const int64_t all = static_cast<int64_t>(shared.size());
  const int64_t some = std::max<int64_t>(16, kValuesAtOnce / block_.tokens / 16 * 16);
  for (int64_t i = 0; i < all; i += some) {
    add_some(shared.data() + i, std::min(some, all - i), first, neurons, down, down_stride, pairs, gradients, grad_down,
             grad_stride, scratch);
  }
}

void SharedNeuronGradients::add_some(const int64_t* shared, int64_t count, int64_t first, const NeuronPairs& neurons,
                                     const char* down, int64_t down_stride, TokenPairs* pairs,
                                     const Gradients& gradients, char* grad_down, int64_t grad_stride,
                                     Scratch* scratch) const {
  const int64_t hidden = block_.hidden, tokens = block_.tokens, row_bytes = hidden * 2;
  const int64_t stride = rounded_up(hidden, 32) + 32;  // rows in different cache sets
  scratch->rows.reserve(count * stride * 2);
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(scratch->rows.data() + i * stride * 2, down + (shared[i] - first) * down_stride * 2, row_bytes);
  }
  scratch->values.resize(static_cast<size_t>(count * tokens));
  kernels_.gate_panels(grad_panels_.data(), static_cast<int>(tokens), scratch->rows.data(), stride,
                       static_cast<int>(count), hidden, nullptr, nullptr, scratch->values.data(), tokens);

  // Factors of rows of x (the gate's, then up's) and of grad_y, as matrices in columns of 32 tokens.
  const int64_t gate_at = 0, up_at = gradients.gate ? count : 0, x_outputs = up_at + (gradients.up ? count : 0);
  const int64_t x_padded = rounded_up(x_outputs, 16), grad_padded = rounded_up(count, 16);
  scratch->x_scale.reserve(padded_ * x_padded * 2 + 1);
  scratch->grad_scale.reserve(padded_ * grad_padded * 2);
  std::memset(scratch->x_scale.data(), 0, static_cast<size_t>(padded_ * x_padded * 2));
  std::memset(scratch->grad_scale.data(), 0, static_cast<size_t>(padded_ * grad_padded * 2));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = neurons.begin[shared[i]], n = neurons.begin[shared[i] + 1] - begin;
    const uint32_t* token = neurons.token.data() + begin;
    scratch->pair_values.resize(static_cast<size_t>(4 * n));
    scratch->rounded.resize(static_cast<size_t>(6 * n));
    float *grad_gate = scratch->pair_values.data(), *grad_up = grad_gate + n, *h = grad_up + n, *gates = h + n;
    for (int64_t p = 0; p < n; ++p) {
      const int64_t source = neurons.source[begin + p];
      const float gate = pairs->gate[source], up = pairs->up[source];
      gates[p] = gate;
      h[p] = gate * up;
      float grad_h = scratch->values[i * tokens + token[p]];
      if (pulls_.l1) grad_h += l1_gradient(pulls_.l1[token[p]], h[p]);
      grad_gate[p] = grad_h * up;
      if (pulls_.count) grad_gate[p] += count_gradient(pulls_.count[token[p]], gate);
      pairs->up[source] = grad_up[p] = grad_h * gate;
    }
    if (pulls_.runs.run) scratch->runs.add(pulls_.runs, token, gates, n, grad_gate);
    double bias_gate = 0, bias_up = 0;
    for (int64_t p = 0; p < n; ++p) {
      pairs->gate[neurons.source[begin + p]] = grad_gate[p];
      bias_gate += grad_gate[p];
      bias_up += grad_up[p];
    }
    if (gradients.b_gate) gradients.b_gate[shared[i]] = static_cast<float>(bias_gate);
    if (gradients.b_up) gradients.b_up[shared[i]] = static_cast<float>(bias_up);
    kernels_.round(grad_gate, 3 * n, scratch->rounded.data());
    const char* values = scratch->rounded.data();
    const auto place = [&](Bytes& matrix, int64_t outputs, int64_t output, const char* from) {
      for (int64_t p = 0; p < n; ++p) {
        std::memcpy(matrix.data() + (token[p] / 32 * outputs * 32 + output * 32 + token[p] % 32) * 2, from + 2 * p, 2);
      }
    };
    if (gradients.gate) place(scratch->x_scale, x_padded, gate_at + i, values);
    if (gradients.up) place(scratch->x_scale, x_padded, up_at + i, values + 2 * n);
    if (gradients.down) place(scratch->grad_scale, grad_padded, i, values + 4 * n);
  }

  float* sums = nullptr;
  const auto multiply = [&](Bytes& pairs_of_rows, int64_t d, int64_t width, Bytes& scale, int64_t outputs,
                            int64_t padded) {
    scratch->sums.assign(static_cast<size_t>(padded * kPairColumns), 0.0f);
    sums = scratch->sums.data();
    kernels_.matmul_pairs(pairs_of_rows.data() + d * padded_ * 2, tokens, width, scale.data(),
                          static_cast<int>(outputs), sums, kPairColumns);
  };
  for (int64_t d = 0; d < hidden; d += kPairColumns) {
    const int64_t width = std::min(kPairColumns, hidden - d);
    const auto write = [&](int64_t output, char* row) {
      kernels_.round(sums + output * kPairColumns, width, row + 2 * d);
    };
    if (x_outputs > 0) multiply(x_pairs_, d, width, scratch->x_scale, x_outputs, x_padded);
    for (int64_t i = 0; i < count; ++i) {
      if (gradients.gate) write(gate_at + i, static_cast<char*>(gradients.gate) + shared[i] * row_bytes);
      if (gradients.up) write(up_at + i, static_cast<char*>(gradients.up) + shared[i] * row_bytes);
    }
    if (gradients.down == nullptr) continue;
    multiply(grad_pairs_, d, width, scratch->grad_scale, count, grad_padded);
    for (int64_t i = 0; i < count; ++i) write(i, grad_down + (shared[i] - first) * grad_stride * 2);
  }
}

}  // namespace twell
