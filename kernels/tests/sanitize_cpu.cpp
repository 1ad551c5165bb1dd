// The CPU kernels without PyTorch, for the address and undefined-behaviour sanitizers: every instruction set, type and
// awkward size, buffers of exactly the documented sizes, against a plain double-precision result.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "backward/backward.h"
#include "common/dense.h"
#include "forward/forward.h"

namespace {

using namespace twell;

void run_threads(int64_t count, void (*body)(int64_t, int64_t, void*), void* context) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < count; ++i) threads.emplace_back(body, i, i + 1, context);
  for (auto& thread : threads) thread.join();
}

// A buffer of elements with its exact fp32 values beside it.
struct Buffer {
  std::vector<float> values;
  std::vector<char> bytes;

  Buffer(const Kernels& kernels, DType dtype, std::vector<float> from)
      : values(std::move(from)), bytes(values.size() * element_bytes(dtype)) {
    kernels.round(values.data(), static_cast<int64_t>(values.size()), bytes.data());
    kernels.widen(bytes.data(), static_cast<int64_t>(values.size()), values.data());
  }
};

std::vector<float> random(std::mt19937& engine, int64_t count, float scale) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& value : out) value = normal(engine);
  return out;
}

double relative_error(const std::vector<double>& truth, const std::vector<float>& value) {
  double difference = 0, norm = 1e-30;
  for (size_t i = 0; i < truth.size(); ++i) {
    difference += (truth[i] - value[i]) * (truth[i] - value[i]);
    norm += truth[i] * truth[i];
  }
  return std::sqrt(difference / norm);
}

double count_slope(double gate) { return 5 / std::pow(std::cosh(5 * gate), 2); }

// `share`: tokens of a run; 0 for no runs.
double check(DType dtype, int64_t tokens, int64_t hidden, int64_t width, bool gated, bool by_column, int64_t capacity,
             int64_t share) {
  const Kernels& kernels = select_kernels(dtype);
  const Threads threads{2, run_threads};
  std::mt19937 engine(7);
  const Buffer x(kernels, dtype, random(engine, tokens * hidden, 1)),
      gate(kernels, dtype, random(engine, width * hidden, 0.3f)),
      up(kernels, dtype, random(engine, width * hidden, 0.3f)),
      down(kernels, dtype, random(engine, width * hidden, 0.3f)),
      grad(kernels, dtype, random(engine, tokens * hidden, 1));
  // All tokens share every eleventh neuron, and have a few others of their own: sparse enough for the kernels at any
  // number of tokens.
  const float scale = std::sqrt(static_cast<float>(hidden));
  std::vector<float> bias(static_cast<size_t>(width), -0.45f * scale);
  for (int64_t f = 5; f < width; f += 11) bias[f] = 2.0f * scale;
  std::vector<double> active(static_cast<size_t>(width));
  Block block{dtype,
              tokens,
              hidden,
              width,
              x.bytes.data(),
              gate.bytes.data(),
              gated ? up.bytes.data() : nullptr,
              down.bytes.data(),
              by_column ? 1 : width,
              by_column ? hidden : 1,
              bias.data(),
              nullptr,
              nullptr};
  const int64_t element = element_bytes(dtype);
  std::vector<char> y(x.bytes.size()), saved(static_cast<size_t>(State::bytes(tokens, capacity, element, gated)));
  Report report{nullptr, 0, active.data()};
  const State state = State::at(saved.data(), tokens, capacity, element, gated);
  bool dense = false;
  forward(block, kernels, threads, y.data(), &report, &state, [&](int64_t, int64_t) { dense = true; });
  if (dense) return 0;  // the caller's matmuls would follow
  std::vector<char> grad_x(x.bytes.size()), grad_gate(gate.bytes.size()), grad_up(gate.bytes.size()),
      grad_down(gate.bytes.size());
  std::vector<float> bias_gate(static_cast<size_t>(width)), bias_up(static_cast<size_t>(width));
  std::vector<float> pulls(static_cast<size_t>(tokens));
  for (int64_t t = 0; t < tokens; ++t) pulls[t] = 0.25f + 0.125f * (t % 3);
  // Every fifth token is padding.
  const int64_t count = share > 0 ? tokens / share + 2 : 0;
  std::vector<int64_t> run(static_cast<size_t>(tokens)), size(static_cast<size_t>(count));
  for (int64_t t = 0; share > 0 && t < tokens; ++t) {
    run[t] = t % 5 == 4 ? count - 1 : t / share;
    size[run[t]] += t % 5 != 4;
  }
  int64_t in_runs = 0, truth_in_runs = 0;
  backward(block, kernels, threads, grad.bytes.data(), state,
           {pulls.data(), pulls.data(), {share > 0 ? run.data() : nullptr, size.data(), count, 0.25f}},
           {grad_x.data(), grad_gate.data(), gated ? grad_up.data() : nullptr, grad_down.data(), bias_gate.data(),
            bias_up.data(), &in_runs});

  std::vector<double> truth(x.values.size(), 0), truth_grad(x.values.size(), 0);
  const auto gate_of = [&](int64_t t, int64_t f) {
    double g = bias[f];
    for (int64_t d = 0; d < hidden; ++d) {
      g += static_cast<double>(x.values[t * hidden + d]) * gate.values[f * hidden + d];
    }
    return std::max(g, 0.0);
  };
  std::vector<double> strongest(static_cast<size_t>(count * width));
  for (int64_t t = 0; share > 0 && t < tokens; ++t) {
    for (int64_t f = 0; f < width; ++f) {
      double& most = strongest[run[t] * width + f];
      most = std::max(most, gate_of(t, f));
    }
  }
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t f = 0; f < width; ++f) truth_in_runs += strongest[r * width + f] > 0 ? size[r] : 0;
  }
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t f = 0; f < width; ++f) {
      double u = gated ? 0 : 1, grad_h = 0;
      const double g = gate_of(t, f);
      for (int64_t d = 0; d < hidden; ++d) {
        if (gated) u += static_cast<double>(x.values[t * hidden + d]) * up.values[f * hidden + d];
      }
      if (g <= 0) continue;
      const auto weight = [&](int64_t d) { return down.values[by_column ? f * hidden + d : d * width + f]; };
      for (int64_t d = 0; d < hidden; ++d) {
        truth[t * hidden + d] += g * u * weight(d);
        grad_h += static_cast<double>(grad.values[t * hidden + d]) * weight(d);
      }
      grad_h += g * u > 0 ? pulls[t] : g * u < 0 ? -pulls[t] : 0;
      double grad_gate = grad_h * u + pulls[t] * count_slope(g);
      if (share > 0 && g == strongest[run[t] * width + f]) grad_gate += 0.25 * size[run[t]] * count_slope(g);
      for (int64_t d = 0; d < hidden; ++d) {
        truth_grad[t * hidden + d] += grad_gate * gate.values[f * hidden + d];
        if (gated) truth_grad[t * hidden + d] += grad_h * g * up.values[f * hidden + d];
      }
    }
  }
  std::vector<float> result(truth.size()), result_grad(truth.size());
  kernels.widen(y.data(), static_cast<int64_t>(truth.size()), result.data());
  kernels.widen(grad_x.data(), static_cast<int64_t>(truth.size()), result_grad.data());
  if (in_runs != truth_in_runs) return 1;
  return std::max(relative_error(truth, result), relative_error(truth_grad, result_grad));
}

// Forward on int8 weights, whose buffers end where their last value does.
double check_int8(DType dtype, int64_t tokens, int64_t hidden, int64_t width, bool gated, bool by_column, float bias) {
  const Kernels& kernels = select_kernels(dtype);
  const Threads threads{2, run_threads};
  std::mt19937 engine(9);
  const Buffer x(kernels, dtype, random(engine, tokens * hidden, 1));
  const auto weights = [&] {
    std::vector<int8_t> out(static_cast<size_t>(width * hidden));
    for (int8_t& value : out) value = static_cast<int8_t>(static_cast<int>(engine() % 256) - 128);
    return out;
  };
  const auto scales = [&](int64_t rows) {
    std::vector<float> out = random(engine, rows, 0.1f / 74);
    for (float& value : out) value = std::fabs(value) + 0.3f / 74;  // 74: what int8 values measure on average
    return out;
  };
  const std::vector<int8_t> gate = weights(), up = weights(), down = weights();
  const std::vector<float> s_gate = scales(width), s_up = scales(width), s_down = scales(hidden),
                           b_gate(static_cast<size_t>(width), bias * std::sqrt(static_cast<float>(hidden))),
                           b_up = random(engine, width, 1), b_down = random(engine, hidden, 1);
  Block block{dtype,
              tokens,
              hidden,
              width,
              x.bytes.data(),
              gate.data(),
              gated ? up.data() : nullptr,
              down.data(),
              by_column ? 1 : width,
              by_column ? hidden : 1,
              b_gate.data(),
              gated ? b_up.data() : nullptr,
              b_down.data(),
              s_gate.data(),
              gated ? s_up.data() : nullptr,
              s_down.data()};
  std::vector<char> y(x.bytes.size());
  Report report{nullptr, 0, nullptr};
  bool dense = false;
  forward(block, kernels, threads, y.data(), &report, nullptr, [&](int64_t, int64_t) { dense = true; });
  if (dense) return 0;  // the caller's matmuls would follow
  std::vector<double> truth(x.values.size());
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t d = 0; d < hidden; ++d) truth[t * hidden + d] = b_down[d];
    for (int64_t f = 0; f < width; ++f) {
      double g = 0, u = 0;
      for (int64_t d = 0; d < hidden; ++d) {
        g += static_cast<double>(x.values[t * hidden + d]) * gate[f * hidden + d] * s_gate[f];
        u += static_cast<double>(x.values[t * hidden + d]) * up[f * hidden + d] * s_up[f];
      }
      g += b_gate[f];
      u = gated ? u + b_up[f] : 1;
      for (int64_t d = 0; g > 0 && d < hidden; ++d) {
        truth[t * hidden + d] += g * u * down[by_column ? f * hidden + d : d * width + f] * s_down[d];
      }
    }
  }
  std::vector<float> result(truth.size());
  kernels.widen(y.data(), static_cast<int64_t>(truth.size()), result.data());
  return relative_error(truth, result);
}

// Digits of tokens, and elements by high digits alone, against exact sums. In every second row these are near zero and
// low digits point the same way as the weights, so that only the last of them tells the sign. Returns what is wrong.
const char* check_screened(const Kernels& kernels, DType dtype, int64_t tokens, int64_t hidden, int64_t width) {
  if (kernels.fixed == nullptr) return nullptr;
  std::mt19937 engine(11);
  std::vector<float> some = random(engine, tokens * hidden, 1);
  for (float& value : some) value = std::nearbyint(64 * value) / 64;  // which digits hold exactly, among outliers too
  for (int64_t t = 0; t < tokens; ++t) some[t * hidden] = 6;          // where weights make sums negative
  const Buffer x(kernels, dtype, some);
  const int64_t ld = (hidden + 63) / 64 * 64;
  std::vector<uint8_t> digits(static_cast<size_t>(2 * tokens * ld));
  std::vector<float> step(tokens), base(tokens), norm(tokens);
  std::vector<int32_t> largest(tokens), beyond(tokens);
  std::vector<int64_t> whole(static_cast<size_t>(tokens * hidden));
  for (int64_t t = 0; t < tokens; ++t) {
    uint8_t *high = digits.data() + 2 * t * ld, *low = high + ld;
    FixedScale scale;
    if (!kernels.fixed->digits(x.bytes.data() + 2 * t * hidden, hidden, true, high, low, &scale)) return "no digits";
    step[t] = scale.step;
    base[t] = scale.base;
    norm[t] = scale.low_norm;
    largest[t] = scale.largest;
    beyond[t] = scale.beyond;
    double squares = 0;
    for (int64_t d = 0; d < hidden; ++d) {
      int64_t& value = whole[t * hidden + d];
      value = static_cast<int64_t>(scale.base) * (high[d] - 128) + low[d] + (d == scale.largest ? scale.beyond : 0);
      if (static_cast<double>(value) * scale.step != x.values[t * hidden + d]) return "a digit";
      squares += std::pow(low[d] - std::floor(scale.base / 2), 2);
    }
    if (scale.base > 256 || scale.low_norm < std::sqrt(squares)) return "a norm";
  }
  std::vector<int8_t> w(static_cast<size_t>(width * hidden));
  std::normal_distribution<float> normal(0, 30);
  for (int64_t f = 0; f < width; ++f) {
    const int64_t t = f % tokens, middle = static_cast<int64_t>(base[t] / 2);
    const uint8_t* low = digits.data() + (2 * t + 1) * ld;
    int64_t sum = 0;
    for (int64_t d = 1; d < hidden; ++d) {
      const double wanted = f % 2 ? (low[d] - middle) : normal(engine);
      w[f * hidden + d] = static_cast<int8_t>(std::min(std::max(std::nearbyint(wanted), -128.0), 127.0));
      sum += whole[t * hidden + d] * w[f * hidden + d];
    }
    const int64_t shift =
        f % 2 ? -sum / whole[t * hidden] : -static_cast<int64_t>(14 * std::sqrt(static_cast<double>(hidden)));
    w[f * hidden] = static_cast<int8_t>(std::min<int64_t>(std::max<int64_t>(shift, -128), 127));
  }
  std::vector<float> out(static_cast<size_t>(width * tokens), std::nanf(""));
  const FixedRows rows{digits.data(), ld, step.data(), base.data(), norm.data(), largest.data(), beyond.data()};
  const int64_t computed = kernels.fixed->screened_gate(rows, static_cast<int>(tokens), w.data(), hidden,
                                                        static_cast<int>(width), hidden, nullptr, out.data(), tokens);
  for (int64_t f = 0; f < width; ++f) {
    for (int64_t t = 0; t < tokens; ++t) {
      int64_t sum = 0;
      for (int64_t d = 0; d < hidden; ++d) sum += whole[t * hidden + d] * w[f * hidden + d];
      const float value = out[f * tokens + t];
      if (sum > 0 ? value != static_cast<float>(sum) * step[t] : !(value <= 0)) return "an element";
    }
  }
  return hidden >= 64 && computed > width * tokens * 3 / 5 ? "it screens nothing" : nullptr;
}

// Forward and backward of a dense block's activation, with both terms and the report.
double check_activation(DType dtype, int64_t tokens, int64_t width, bool gated) {
  const Kernels& kernels = select_kernels(dtype);
  const Threads threads{2, run_threads};
  std::mt19937 engine(8);
  const int64_t count = tokens * width;
  const Buffer gate(kernels, dtype, random(engine, count, 1)), up(kernels, dtype, random(engine, count, 1)),
      grad(kernels, dtype, random(engine, count, 1));
  const std::vector<float> weight(static_cast<size_t>(tokens), 0.5f);
  std::vector<float> report(static_cast<size_t>(1 + width));
  const size_t bytes = gate.bytes.size(), values = gate.values.size();
  std::vector<char> h(bytes), again(bytes), grad_gate(bytes), grad_up(bytes);
  const Activation a{dtype, tokens, width, gate.bytes.data(), gated ? up.bytes.data() : nullptr};
  activation(kernels, threads, a, h.data());
  activation_backward(kernels, threads, a, grad.bytes.data(), {0.25f, 0.5f, weight.data(), report.data()},
                      grad_gate.data(), gated ? grad_up.data() : nullptr, again.data());
  if (h != again) return 1;
  std::vector<double> truth(values), truth_gate(values), truth_up(values), truth_report(report.size());
  for (int64_t i = 0; i < count; ++i) {
    const double g = std::max(gate.values[i], 0.0f), u = gated ? up.values[i] : 1.0f;
    truth[i] = g * u;
    const double dh = grad.values[i] + (truth[i] > 0 ? 0.125 : truth[i] < 0 ? -0.125 : 0);
    truth_gate[i] = g > 0 ? dh * u + 0.25 * count_slope(g) : 0;
    truth_up[i] = gated ? dh * g : 0;
    truth_report[0] += 0.5 * std::fabs(truth[i]);
    truth_report[1 + i % width] += truth[i] != 0 ? 0.5 : 0;
  }
  double error = relative_error(truth_report, report);
  for (const auto& [wanted, rounded] : {std::pair{&truth, &h}, {&truth_gate, &grad_gate}, {&truth_up, &grad_up}}) {
    std::vector<float> result(values);
    kernels.widen(rounded->data(), count, result.data());
    error = std::max(error, relative_error(*wanted, result));
  }
  return error;
}

double allowed(DType dtype) { return dtype == DType::kFloat32 ? 1e-5 : dtype == DType::kBFloat16 ? 2e-2 : 3e-3; }

}  // namespace

int main() {
  int checked = 0;
  for (const char* isa : {"portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "avx512_bf16_wide", "amx"}) {
    setenv("HF_TWELL_CPU_ISA", isa, 1);
    try {
      select_kernels(DType::kFloat32);
    } catch (const std::exception& error) {
      std::printf("skipped: %s\n", error.what());
      continue;
    }
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (int64_t tokens : {1, 3, 5, 70, 131}) {
        const auto accept = [&](const char* what, int64_t hidden, int64_t width, int variant, double error) {
          ++checked;
          if (error < allowed(dtype)) return;
          std::printf("%s, %s, dtype %d, T %ld, D %ld, F %ld, variant %d: error %g\n", what, isa,
                      static_cast<int>(dtype), static_cast<long>(tokens), static_cast<long>(hidden),
                      static_cast<long>(width), variant, error);
          std::exit(1);
        };
        for (int64_t width : {1, 96, 133}) {
          for (bool gated : {true, false}) {
            accept("activation", 0, width, gated, check_activation(dtype, tokens, width, gated));
          }
        }
        for (auto [hidden, width] : {std::pair<int64_t, int64_t>{1, 1}, {37, 133}, {64, 96}, {130, 50}, {2048, 23}}) {
          const char* wrong = check_screened(select_kernels(dtype), dtype, tokens, hidden, width);
          accept(wrong ? wrong : "screened gate", hidden, width, 0, wrong ? INFINITY : 0);
        }
        for (auto [hidden, width] : {std::pair<int64_t, int64_t>{1, 1}, {37, 133}, {64, 96}, {130, 50}, {300, 260}}) {
          for (int variant = 0; variant < 8; ++variant) {
            const bool gated = variant & 1, by_column = variant & 2;
            // About a tenth of the pairs, or half of them, which calls of one token alone do not leave to matmuls.
            const float bias = variant & 4 ? 0.0f : -0.5f;
            accept("int8", hidden, width, variant, check_int8(dtype, tokens, hidden, width, gated, by_column, bias));
            const int64_t capacity = variant & 4 ? 2 : width;
            for (int64_t share : {0, 1, 4, 64}) {
              const double error = check(dtype, tokens, hidden, width, gated, by_column, capacity, share);
              accept("block", hidden, width, variant, error);
            }
          }
        }
      }
    }
  }
  std::printf("%d cases\n", checked);
  return 0;
}
