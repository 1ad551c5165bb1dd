// Whole calls of e4m3 weights against plain loops, through the table of host/dispatch.cpp.
#pragma once

#include <memory>
#include <stdexcept>

#include "decode/decode.h"
#include "host/dispatch.h"
#include "tests/fp8_gate_data.cuh"

namespace checks {

// h (T, F): relu(x Wg^T + bg) * (x Wu^T + bu), or without Wu the first factor.
template <typename Half>
__global__ void plain_h(const float* x, const float* gate, const float* up, const Half* b_gate, const Half* b_up,
                        int64_t tokens, int hidden, int width, double* h) {
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x, t = i / width, n = i % width;
  if (t >= tokens) return;
  double g = static_cast<float>(b_gate[n]), u = static_cast<float>(b_up[n]);
  for (int k = 0; k < hidden; ++k) g += double{x[t * hidden + k]} * gate[n * hidden + k];
  for (int k = 0; up != nullptr && g > 0 && k < hidden; ++k) u += double{x[t * hidden + k]} * up[n * hidden + k];
  h[i] = g > 0 ? up != nullptr ? g * u : g : 0;
}

// y (T, D): h Wd + bd, Wd by columns.
template <typename Half>
__global__ void plain_y(const double* h, const float* down, const Half* bias, int64_t tokens, int hidden, int width,
                        double* y) {
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x, t = i / hidden, d = i % hidden;
  if (t >= tokens) return;
  double sum = static_cast<float>(bias[d]);
  for (int64_t n = 0; n < width; ++n) sum += h[t * width + n] * down[n * hidden + d];
  y[i] = sum;
}

inline std::vector<float> floats_of(const Rows& rows) {
  const std::vector<uint8_t> codes = rows.values.get();
  const std::vector<float> scales = rows.scales.get();
  std::vector<float> values(codes.size());
  for (size_t i = 0; i < codes.size(); ++i) values[i] = scales[i / rows.stride] * e4m3_value(codes[i]);
  return values;
}
template <typename Half>
std::vector<float> floats_of(const std::vector<Half>& values) {
  return std::vector<float>(values.begin(), values.end());
}

// One call: D a multiple of 16, weights of e4m3.
template <typename Half>
struct WholeCall {
  static constexpr int kHidden = 144, kWidth = 769;
  int tokens;
  bool gated, quantize_x;
  std::vector<Half> x_values;
  Buffer<Half> x, b_gate, b_up, b_down;
  Rows gate, up;
  std::vector<uint8_t> down_codes;
  std::vector<float> down_scales;  // for each of D
  Buffer<uint8_t> down;
  Buffer<float> s_down;
  Guarded<Half> y;

  static std::vector<Half> weights(uint64_t seed) {
    return normals<Half>(kWidth * kHidden, seed, 1.f / std::sqrt(float(kHidden)));
  }
  WholeCall(int count, bool has_gate, bool quantizes)
      : tokens(count), gated(has_gate), quantize_x(quantizes),
        x_values(normals<Half>(int64_t{count} * kHidden, 70, 1.f)), x(x_values),
        b_gate(normals<Half>(kWidth, 71, 0.25f)), b_up(normals<Half>(kWidth, 72, 0.25f)),
        b_down(normals<Half>(kHidden, 73, 0.25f)), gate(kWidth, kHidden), up(kWidth, kHidden),
        down_codes(kWidth * kHidden), down_scales(kHidden), down(kWidth * kHidden), s_down(kHidden),
        y(int64_t{count} * kHidden) {
    gate.quantize(Buffer<Half>(weights(74)).data, kHidden), up.quantize(Buffer<Half>(weights(75)).data, kHidden);
    for (int d = 0; d < kHidden; ++d) down_scales[d] = (1.f + d % 7 / 4.f) / (50.f * std::sqrt(float(kWidth)));
    for (size_t i = 0; i < down_codes.size(); ++i) down_codes[i] = e4m3_code(50.f * normal((uint64_t{76} << 32) + i));
    down.put(down_codes), s_down.put(down_scales);
  }
  Ffn ffn() const {
    Ffn f{};
    f.dtype = dtype_of<Half>(), f.tokens = tokens, f.hidden = kHidden, f.width = kWidth, f.x = x.data, f.y = y.data();
    f.gate = {gate.values.data, DType::kE4m3, kHidden, 1, gate.scales.data};
    if (gated) f.up = {up.values.data, DType::kE4m3, kHidden, 1, up.scales.data};
    f.down = {down.data, DType::kE4m3, kHidden, 1, s_down.data};
    f.b_gate = b_gate.data, f.b_up = gated ? b_up.data : nullptr, f.b_down = b_down.data;
    f.quantize_x = quantize_x;
    return f;
  }
  // Up to 64 tokens are never quantized.
  std::vector<double> want() const {
    const bool quantizes = quantize_x && tokens > kDecodeMaxTokens;
    Rows x_rows(tokens, kHidden);
    if (quantizes) x_rows.quantize(x.data, kHidden);
    std::vector<float> down_values(down_codes.size());
    for (size_t i = 0; i < down_codes.size(); ++i) {
      down_values[i] = down_scales[i % kHidden] * e4m3_value(down_codes[i]);
    }
    const Buffer<float> xs(quantizes ? floats_of(x_rows) : floats_of(x_values)), gates(floats_of(gate)),
        ups(floats_of(up)), downs(down_values);
    const int64_t pairs = int64_t{tokens} * kWidth, outputs = int64_t{tokens} * kHidden;
    Buffer<double> h(pairs), out(outputs);
    plain_h<Half><<<static_cast<unsigned>((pairs + 255) / 256), 256>>>(
        xs.data, gates.data, gated ? ups.data : nullptr, b_gate.data, b_up.data, tokens, kHidden, kWidth, h.data);
    CHECK(cudaGetLastError());
    plain_y<Half><<<static_cast<unsigned>((outputs + 255) / 256), 256>>>(h.data, downs.data, b_down.data, tokens,
                                                                         kHidden, kWidth, out.data);
    CHECK(cudaGetLastError());
    return out.get();
  }
};

struct CallError {
  double all, worst;  // relative RMS: of y, and of the token where it is largest
};

// Infinite where the call wrote past the end, or two runs differ.
template <typename Half>
CallError call_error(int tokens, bool gated, bool quantize_x, const Device& device) {
  const CallError bad{INFINITY, INFINITY};
  WholeCall<Half> call(tokens, gated, quantize_x);
  const std::vector<double> want = call.want();
  std::vector<Half> got[2];
  for (int run = 0; run < 2; ++run) {
    const int poison = run == 0 ? 0xff : 0x7e;
    std::unique_ptr<Guarded<char>> workspace;
    Services services;
    services.workspace = [&](int64_t bytes) {
      workspace = std::make_unique<Guarded<char>>(bytes);
      workspace->poison(poison);
      return workspace->data();
    };
    call.y.poison(poison);
    forward(call.ffn(), device, nullptr, services);
    CHECK(cudaDeviceSynchronize());
    if (!call.y.intact() || !workspace->intact()) return bad;
    got[run] = call.y.get();
  }
  if (std::memcmp(got[0].data(), got[1].data(), got[0].size() * sizeof(Half)) != 0) return bad;
  double error = 0, norm = 0, worst = 0;
  for (int t = 0; t < tokens; ++t) {
    double token_error = 0, token_norm = 0;
    for (int64_t i = int64_t{t} * call.kHidden; i < int64_t{t + 1} * call.kHidden; ++i) {
      const double off = static_cast<float>(got[0][i]) - want[i];
      token_error += off * off, token_norm += want[i] * want[i];
    }
    error += token_error, norm += token_norm;
    const double relative = std::sqrt(token_error / token_norm);
    if (!(relative <= worst)) worst = std::isnan(relative) ? INFINITY : relative;
  }
  const double all = std::sqrt(error / norm);
  return {std::isnan(all) ? INFINITY : all, worst};
}

// What no row of the table takes is refused.
inline bool refuses(DType weights, int hidden, int64_t tokens, const Device& device) {
  Ffn f{};
  f.dtype = DType::kBFloat16, f.tokens = tokens, f.hidden = hidden, f.width = 64, f.gate.dtype = weights;
  f.quantize_x = true;
  try {
    check_quantize_x(f, device);
  } catch (const std::runtime_error&) {
    return true;
  }
  return false;
}

inline bool check_calls(const Device& device, bool verbose) {
  bool ok = true;
  int cases = 0;
  const auto both = [&](int tokens, bool quantize_x) {
    for (const bool gated : {false, true}) {
      const CallError bf16 = call_error<__nv_bfloat16>(tokens, gated, quantize_x, device);
      const CallError fp16 = call_error<__half>(tokens, gated, quantize_x, device);
      const bool right = std::max(bf16.all, fp16.all) < 1. / 64 && std::max(bf16.worst, fp16.worst) < 1. / 16;
      if (verbose || !right) {
        std::printf("%-4s call, T=%d%s%s: bf16 %.6f (%.6f), fp16 %.6f (%.6f)\n", right ? "ok" : "BAD", tokens,
                    gated ? " gated" : "", quantize_x ? ", x quantized" : "", bf16.all, bf16.worst, fp16.all,
                    fp16.worst);
      }
      ok &= right, cases += 2;
    }
  };
  for (const int tokens : {1, 64, 65, 129, 300, 4000, 34000}) both(tokens, true);  // the last in several chunks
  for (const int tokens : {64, 65, 100, 128, 129, 192}) both(tokens, false);       // the last five in pieces
  const bool refused = refuses(DType::kE4m3, 24, 65, device) && refuses(DType::kInt8, 16, 65, device) &&
                       refuses(DType::kBFloat16, 16, 1, device) && !refuses(DType::kE4m3, 24, 64, device) &&
                       !refuses(DType::kE4m3, 16, 65, device);
  if (!refused) std::printf("BAD  not refused, or refused, as dispatch.h has it\n");
  std::printf("%s calls: %d cases\n", ok && refused ? "ok  " : "BAD ", cases);
  return ok && refused;
}

}  // namespace checks
