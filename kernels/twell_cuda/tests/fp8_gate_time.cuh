// Times of the e4m3 gate, up and down and of what goes with them, beside the 16-bit ones in the same run.
#pragma once

#include <memory>

#include "tests/fp8_gate_data.cuh"
#include "tests/graph.cuh"

namespace checks {

__global__ void fill_normal(__nv_bfloat16* out, int64_t count, uint64_t seed, float deviation) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < count; i += gridDim.x * int64_t{256}) {
    const uint64_t bits = hash(seed * 0x51ed2701ull + i);
    const float u = (static_cast<uint32_t>(bits) + 0.5f) * 2.3283064e-10f, v = (bits >> 32) * 2.3283064e-10f;
    out[i] = __nv_bfloat16(deviation * sqrtf(-2.f * logf(u)) * cospif(2.f * v));
  }
}

__global__ void set_first_column(__nv_bfloat16* out, int64_t rows, int columns, const float* values, int count) {
  const int64_t row = blockIdx.x * int64_t{256} + threadIdx.x;
  if (row < rows) out[row * columns] = __nv_bfloat16(values[row % count]);
}

// Log-normal firing rates whose mean is `density`, as thresholds of a standard normal (prefill_check.cu).
inline std::vector<float> thresholds(int width, double density, uint64_t seed) {
  std::vector<double> rates(width);
  for (int i = 0; i < width; ++i) rates[i] = std::exp(1.85 * normal(seed << 20 | i));
  double low = 0, high = 1e6;
  for (int i = 0; i < 60; ++i) {
    const double scale = (low + high) / 2;
    double mean = 0;
    for (const double r : rates) mean += std::fmin(0.98, scale * r) / width;
    (mean > density ? high : low) = scale;
  }
  std::vector<float> z(width);
  for (int i = 0; i < width; ++i) z[i] = static_cast<float>(-quantile(std::fmin(0.98, low * rates[i])));
  return z;
}

// One layer's tokens and weights in both forms. x has 1 in its first column, Wg thresholds.
struct TimedSet {
  static constexpr int kHidden = 2048, kWidth = 5632, kActive = 30;
  Buffer<__nv_bfloat16> x, gate, up, down, y;
  Rows x_rows, gate_rows, up_rows, down_rows;

  TimedSet(int tokens, uint64_t seed)
      : x(size_t(tokens) * kHidden), gate(size_t(kWidth) * kHidden), up(size_t(kWidth) * kHidden),
        down(size_t(kWidth) * kHidden), y(size_t(tokens) * kHidden), x_rows(tokens, kHidden),
        gate_rows(kWidth, kHidden), up_rows(kWidth, kHidden), down_rows(kWidth, kHidden) {
    fill(x, seed, 1.f), fill(gate, seed + 1, 1.f / std::sqrt(float(kHidden)));
    fill(up, seed + 2, 1.f / std::sqrt(float(kHidden))), fill(down, seed + 3, 1.f / std::sqrt(float(kWidth)));
    set(x, {1.f}), set(gate, thresholds(kWidth, double{kActive} / kWidth, seed));
    x_rows.quantize(x.data, kHidden), gate_rows.quantize(gate.data, kHidden);
    up_rows.quantize(up.data, kHidden), down_rows.quantize(down.data, kHidden);
  }
  static void fill(Buffer<__nv_bfloat16>& out, uint64_t seed, float deviation) {
    fill_normal<<<1024, 256>>>(out.data, static_cast<int64_t>(out.bytes / 2), seed, deviation);
    CHECK(cudaGetLastError());
  }
  static void set(Buffer<__nv_bfloat16>& out, const std::vector<float>& values) {
    const Buffer<float> there(values);
    const auto rows = static_cast<int64_t>(out.bytes / 2 / kHidden);
    set_first_column<<<static_cast<unsigned>((rows + 255) / 256), 256>>>(out.data, rows, kHidden, there.data,
                                                                         static_cast<int>(values.size()));
    CHECK(cudaDeviceSynchronize());
  }
  Ffn ffn(bool e4m3) const {
    Ffn f{};
    f.dtype = DType::kBFloat16, f.tokens = x_rows.rows, f.hidden = kHidden, f.width = kWidth;
    const auto weight = [&](const Buffer<__nv_bfloat16>& plain, const Rows& rows) {
      return e4m3 ? Operand{rows.values.data, DType::kE4m3, kHidden, 1, rows.scales.data}
                  : Operand{plain.data, DType::kBFloat16, kHidden};
    };
    f.x = x.data, f.y = y.data, f.gate = weight(gate, gate_rows), f.up = weight(up, up_rows);
    f.down = weight(down, down_rows);
    if (e4m3) f.down.scales = gate_rows.scales.data;  // any: rows here are neurons, and each of D wants one
    return f;
  }
};

// Each launch has a set of its own, and all sets together are several times what the L2 cache holds.
inline void time_gates(int tokens, const Device& device) {
  constexpr int kSets = 8;
  std::vector<std::unique_ptr<TimedSet>> sets;
  for (int i = 0; i < kSets; ++i) sets.push_back(std::make_unique<TimedSet>(tokens, 1000 + 10 * i));
  const Ffn first = sets[0]->ffn(true);
  const Buffer<char> workspace(sm90::prefill_fp8_workspace_bytes(first, device));
  Buffer<char> chunk_workspace(gate_workspace_bytes(first));
  const sm90::Chunk chunk = chunk_of(first, chunk_workspace.data);
  const double gate_flops = 2. * tokens * TimedSet::kHidden * TimedSet::kWidth;

  struct Timed {
    std::string name;
    double flops;
    Graph graph;
  };
  std::vector<Timed> all;
  const auto add = [&](const std::string& name, double flops, auto launch) {
    all.push_back({name, flops, Graph(kSets, [&](int i, cudaStream_t s) { CHECK(launch(*sets[i], s)); })});
  };
  const auto gate_fp8 = [&](const TimedSet& set, cudaStream_t s) {
    return sm90::launch_gate_fp8(set.ffn(true), set.x_rows.view(), chunk, device, s);
  };
  const auto quantize = [&](const TimedSet& set, cudaStream_t s) {
    return sm90::launch_quantize_rows(DType::kBFloat16, set.x.data, tokens, TimedSet::kHidden, set.x_rows.view(), s);
  };
  add("gate bf16", gate_flops, [&](const TimedSet& set, cudaStream_t s) {
    return sm90::launch_gate(set.ffn(false), chunk, device, s);
  });
  add("gate e4m3", gate_flops, gate_fp8);
  add("gate e4m3, promoted", gate_flops, [&](const TimedSet& set, cudaStream_t s) {
    return sm90::gate::launch_fp8<true>(set.ffn(true), set.x_rows.view(), chunk, device, s);
  });
  for (const int neurons : {256, 192, 128}) {
    const Launch tiles = launch_cut<__nv_bfloat16, false, 2>(neurons, neurons);
    add("gate e4m3, tiles of " + std::to_string(neurons), gate_flops, [&](const TimedSet& set, cudaStream_t s) {
      return tiles(set.ffn(true), set.x_rows.view(), chunk, device, s);
    });
  }
  add("quantize", 0, quantize);
  add("quantize, gate e4m3", gate_flops, [&](const TimedSet& set, cudaStream_t s) {
    TWELL_RETURN_IF_ERROR(quantize(set, s));
    return gate_fp8(set, s);
  });
  // Up and down alone, over the lists of the first set.
  CHECK(sm90::launch_gate(sets[0]->ffn(false), chunk, device, nullptr));
  CHECK(sm90::launch_list(first, chunk, device, nullptr));
  CHECK(cudaDeviceSynchronize());
  add("up bf16", 0, [&](const TimedSet& set, cudaStream_t s) {
    return sm90::launch_up(set.ffn(false), chunk, device, s);
  });
  for (const bool many : {false, true}) {
    const std::string name = many ? "up e4m3, for many blocks" : "up e4m3, for few blocks";
    add(name, 0, [&, many](const TimedSet& set, cudaStream_t s) {
      return sm90::launch_up_fp8_as(set.ffn(true), set.x_rows.view(), chunk, device, s, many);
    });
  }
  add("down bf16", 0, [&](const TimedSet& set, cudaStream_t s) {
    return sm90::launch_down(set.ffn(false), chunk, device, s);
  });
  add("down e4m3", 0, [&](const TimedSet& set, cudaStream_t s) {
    return sm90::launch_down_fp8(set.ffn(true), chunk, device, s);
  });
  add("prefill bf16", 0, [&](const TimedSet& set, cudaStream_t s) {
    return sm90::prefill_forward(set.ffn(false), device, workspace.data, s);
  });
  add("prefill e4m3", 0, [&](const TimedSet& set, cudaStream_t s) {
    return sm90::prefill_fp8_forward(set.ffn(true), device, workspace.data, s);
  });
  for (int i = 0; i < 19; ++i) {
    for (Timed& timed : all) timed.graph.replay(i >= 4);
  }
  std::printf("T=%d D=%d F=%d, L0 = %d, median of 15, us a launch\n", tokens, TimedSet::kHidden, TimedSet::kWidth,
              TimedSet::kActive);
  for (Timed& timed : all) {
    std::printf("  %-28s %8.2f", timed.name.c_str(), timed.graph.median());
    if (timed.flops > 0) std::printf("  %6.0f TFLOP/s", timed.flops / timed.graph.median() * 1e-6);
    std::printf("\n");
    timed.graph.release();
  }
  std::fflush(stdout);
}

}  // namespace checks
