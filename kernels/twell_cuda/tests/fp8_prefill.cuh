// The prefill around the e4m3 gate against plain loops.
#pragma once

#include "tests/fp8_gate_data.cuh"

namespace checks {

// h (T, F): gates times x Wu^T.
template <typename Half>
__global__ void plain_h(const double* gates, const Half* x, const Half* up, int64_t tokens, int hidden, int width,
                        double* h) {
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x, t = i / width, n = i % width;
  if (t >= tokens) return;
  double sum = up == nullptr ? 1 : 0;
  for (int k = 0; up != nullptr && gates[i] != 0 && k < hidden; ++k) {
    sum += double{static_cast<float>(x[t * hidden + k])} * static_cast<float>(up[n * hidden + k]);
  }
  h[i] = gates[i] * sum;
}

// y (T, D): h Wd, Wd by columns.
template <typename Half>
__global__ void plain_y(const double* h, const Half* down, int64_t tokens, int hidden, int width, double* y) {
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x, t = i / hidden, d = i % hidden;
  if (t >= tokens) return;
  double sum = 0;
  for (int64_t n = 0; n < width; ++n) sum += h[t * width + n] * static_cast<float>(down[n * hidden + d]);
  y[i] = sum;
}

// The relative RMS error of prefill_fp8_forward's y; infinite where it wrote past the end, or two runs differ.
template <typename Half>
double prefill_error(int tokens, bool gated, const Device& device) {
  constexpr int kHidden = 144, kWidth = 769;
  const Call<Half> call({tokens, kHidden, kWidth, Data::kNormal, true});
  const int64_t outputs = int64_t{tokens} * kHidden, pairs = int64_t{tokens} * kWidth;
  Buffer<Half> up(normals<Half>(kWidth * kHidden, 71, 1.f / std::sqrt(float(kHidden))));
  Buffer<Half> down(normals<Half>(kWidth * kHidden, 72, 1.f / std::sqrt(float(kWidth))));
  Guarded<Half> y(outputs);
  Ffn f = call.ffn();
  f.x = call.x_half.data, f.y = y.data(), f.down.data = down.data;
  if (gated) f.up.data = up.data;
  Guarded<char> workspace(sm90::prefill_fp8_workspace_bytes(f, device));

  Buffer<double> gates(call.gates), h(pairs), y_there(outputs);
  plain_h<Half><<<static_cast<unsigned>((pairs + 255) / 256), 256>>>(
      gates.data, call.x_half.data, gated ? up.data : nullptr, tokens, kHidden, kWidth, h.data);
  CHECK(cudaGetLastError());
  plain_y<Half><<<static_cast<unsigned>((outputs + 255) / 256), 256>>>(h.data, down.data, tokens, kHidden, kWidth,
                                                                       y_there.data);
  CHECK(cudaGetLastError());
  const std::vector<double> want = y_there.get();
  std::vector<Half> got[2];
  for (int run = 0; run < 2; ++run) {
    y.poison(run == 0 ? 0xff : 0x7e), workspace.poison(run == 0 ? 0xff : 0x7e);
    CHECK(sm90::prefill_fp8_forward(f, device, workspace.data(), nullptr));
    CHECK(cudaDeviceSynchronize());
    if (!y.intact() || !workspace.intact()) return INFINITY;
    got[run] = y.get();
  }
  if (std::memcmp(got[0].data(), got[1].data(), outputs * sizeof(Half)) != 0) return INFINITY;
  double error = 0, norm = 0;
  for (int64_t i = 0; i < outputs; ++i) {
    const double off = static_cast<float>(got[0][i]) - want[i];
    error += off * off, norm += want[i] * want[i];
  }
  const double relative = std::sqrt(error / norm);
  return std::isnan(relative) ? INFINITY : relative;
}

}  // namespace checks
