// Inputs of the e4m3 gate and up, what plain double loops make of the gate's, and ways to launch it.
#pragma once

#include <functional>
#include <string>

#include "sm90/common/workspace.h"
#include "sm90/prefill/gate_fp8_launch.cuh"
#include "sm90/prefill/prefill.h"
#include "tests/fp8.cuh"

namespace checks {

using namespace twell;

// kExact: values of which sums of any order are exact, scales that are powers of two. kSpecial: the same with scales of
// 0, infinity, NaN and below 0. kNormal: normal values, quantized.
enum class Data { kExact, kSpecial, kNormal };
inline const char* name_of(Data data) {
  return data == Data::kExact ? "exact" : data == Data::kSpecial ? "special scales" : "normal";
}

struct Case {
  int tokens, hidden, width;
  Data data;
  bool biases;             // of kExact: about 1 of 10 neurons is active in a half block, and all are without
  bool every_way = false;  // to cut tiles
  bool report = false;     // say how large errors are
};

inline Device read_device() {
  Device d{};
  int id = 0;
  CHECK(cudaGetDevice(&id));
  CHECK(cudaDeviceGetAttribute(&d.sm_count, cudaDevAttrMultiProcessorCount, id));
  CHECK(cudaDeviceGetAttribute(&d.major, cudaDevAttrComputeCapabilityMajor, id));
  CHECK(cudaDeviceGetAttribute(&d.minor, cudaDevAttrComputeCapabilityMinor, id));
  return d;
}

inline int64_t gate_workspace_bytes(const Ffn& f) {
  sm90::Cutter cutter(nullptr);
  sm90::Active active;
  sm90::place_active(f, sm90::count_blocks(f), false, cutter, &active);
  return cutter.used();
}

inline sm90::Chunk chunk_of(const Ffn& f, void* workspace) {
  sm90::Chunk chunk{};
  sm90::Cutter cutter(workspace);
  sm90::place_active(f, sm90::count_blocks(f), false, cutter, &chunk.active);
  sm90::fit(f, sm90::count_blocks(f), &chunk);
  return chunk;
}

// values (T, F): sums times scales, plus bias, or relu of that. sizes (T, F): the same of magnitudes, which no sum on
// the way exceeds.
template <typename Half>
__global__ void plain_sums(const sm90::QuantizedRows x, const sm90::QuantizedRows w, const Half* bias, int64_t tokens,
                           int hidden, int width, bool relu, double* values, double* sizes) {
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x, t = i / width, n = i % width;
  if (t >= tokens) return;
  double sum = 0, size = 0;
  for (int k = 0; k < hidden; ++k) {
    const double product = double{e4m3_value(x.values[t * x.stride + k])} * e4m3_value(w.values[n * w.stride + k]);
    sum += product, size += fabs(product);
  }
  sum = sum * w.scales[n] * x.scales[t], size *= fabs(double{w.scales[n]} * x.scales[t]);
  if (bias != nullptr) sum += static_cast<float>(bias[n]), size += fabs(static_cast<float>(bias[n]));
  values[i] = relu && sum <= 0 ? 0 : sum;  // NaN stays
  sizes[i] = size;
}

// Quantized rows on the device. With kExact, what lies past the columns is NaN: nothing may read it.
struct Rows {
  int64_t rows, stride;
  Buffer<uint8_t> values;
  Buffer<float> scales;

  Rows(int64_t count, int columns, int further = 0)
      : rows(count), stride(sm90::quantized_stride(columns) + further), values(count * stride), scales(count) {}
  sm90::QuantizedRows view() const { return {values.data, scales.data, stride}; }

  // Of `choices`, and scales of 0.5, 1 and 2.
  void fill(int columns, const std::vector<float>& choices, uint64_t seed) {
    std::vector<uint8_t> codes(rows * stride, 0x7f);
    std::vector<float> factors(rows);
    for (int64_t r = 0; r < rows; ++r) {
      factors[r] = std::ldexp(1.f, static_cast<int>(hash(seed + r) % 3) - 1);
      for (int c = 0; c < columns; ++c) {
        codes[r * stride + c] = e4m3_code(choices[hash(seed ^ (r << 24 | c) * 0x9e3779b9ull) % choices.size()]);
      }
    }
    values.put(codes), scales.put(factors);
  }
  template <typename Half>
  void quantize(const Half* from, int columns) {
    CHECK(sm90::launch_quantize_rows(dtype_of<Half>(), from, rows, columns, view(), nullptr));
    CHECK(cudaDeviceSynchronize());
  }
};

template <typename Half>
std::vector<Half> normals(int64_t count, uint64_t seed, float deviation) {
  std::vector<Half> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = Half(deviation * normal(seed * 0x100000001b3ull + i));
  return values;
}

// One call: operands, and what its gates should be.
template <typename Half>
struct Call {
  Case c;
  Rows x, w;
  Buffer<Half> x_half, bias;  // x_half: what x was quantized from, with kNormal
  std::vector<float> neuron_scales;
  std::vector<double> gates, sizes;

  explicit Call(const Case& wanted)
      : c(wanted), x(c.tokens, c.hidden), w(c.width, c.hidden), x_half(size_t(c.tokens) * c.hidden), bias(c.width) {
    static uint64_t seed = 1;
    seed += 10;
    if (c.data == Data::kNormal) {
      x_half.put(normals<Half>(int64_t{c.tokens} * c.hidden, seed, 1.f));
      Buffer<Half> w_half(normals<Half>(int64_t{c.width} * c.hidden, seed + 1, 1.f / std::sqrt(float(c.hidden))));
      x.quantize(x_half.data, c.hidden), w.quantize(w_half.data, c.hidden);
      bias.put(normals<Half>(c.width, seed + 2, 0.25f));
    } else {
      x.fill(c.hidden, {-1.f, 0.f, 1.f}, seed << 32);
      w.fill(c.hidden, {-1.f, -0.5f, 0.f, 0.5f, 1.f}, (seed + 1) << 32);
      if (c.data == Data::kSpecial) make_special();
      set_biases(std::sqrt(static_cast<float>(c.hidden) / 3));
    }
    neuron_scales = w.scales.get();
    const int64_t count = int64_t{c.tokens} * c.width;
    Buffer<double> gates_there(count), sizes_there(count);
    plain_sums<Half><<<static_cast<unsigned>((count + 255) / 256), 256>>>(
        x.view(), w.view(), c.biases ? bias.data : nullptr, c.tokens, c.hidden, c.width, true, gates_there.data,
        sizes_there.data);
    CHECK(cudaGetLastError());
    gates = gates_there.get(), sizes = sizes_there.get();
  }
  void make_special() {
    std::vector<float> tokens = x.scales.get(), neurons = w.scales.get();
    tokens[c.tokens / 2] = NAN, tokens[c.tokens / 3] = INFINITY, tokens[c.tokens / 4] = 0.f;
    for (int n = 5; n < c.width; n += 32) neurons[n] = n % 3 == 0 ? NAN : n % 3 == 1 ? INFINITY : 0.f;
    for (int n = 17; n < c.width; n += 32) neurons[n] = -1.f;
    x.scales.put(tokens), w.scales.put(neurons);
  }
  // Five deviations of a sum where a token's scale is 1. Whole numbers to 256 times a power of two: exact in bf16.
  void set_biases(float deviation) {
    std::vector<float> scales = w.scales.get();
    std::vector<Half> values(c.width);
    for (int n = 0; n < c.width; ++n) {
      const float scale = std::isfinite(scales[n]) ? std::fabs(scales[n]) : 1.f;
      values[n] = Half(-std::fmin(256.f, std::ceil(5 * deviation)) * scale);
    }
    bias.put(values);
  }
  Ffn ffn() const {
    Ffn f{};
    f.dtype = dtype_of<Half>(), f.tokens = c.tokens, f.hidden = c.hidden, f.width = c.width;
    f.gate = {w.values.data, DType::kE4m3, w.stride, 1, w.scales.data};
    f.b_gate = c.biases ? bias.data : nullptr;
    return f;
  }
};

using Launch = std::function<cudaError_t(const Ffn&, const sm90::QuantizedRows&, const sm90::Chunk&, const Device&,
                                         cudaStream_t)>;
struct Way {
  std::string name;
  bool promote;
  Launch launch;
};

// Tiles of `unit` neurons; where `last` is fewer, the second half of them in parts of so many, by a second launch.
template <typename Half, bool kPromote, int kCluster>
Launch launch_cut(int unit, int last) {
  return [=](const Ffn& f, const sm90::QuantizedRows& x, const sm90::Chunk& chunk, const Device& device,
             cudaStream_t stream) {
    const sm90::gate::Factors factors{x.values, f.gate.data, x.stride, f.gate.row_stride, {x.scales, f.gate.scales}};
    const int groups = (chunk.active.blocks + kCluster - 1) / kCluster;
    const int tiles = groups * ((f.width + unit - 1) / unit), whole = last == unit ? tiles : (tiles + 1) / 2;
    const auto run = [&](int neurons, int begin, int end) {
      return sm90::gate::launch_width<Half, __nv_fp8_e4m3, kCluster, kPromote>(neurons, f, factors, chunk, device,
                                                                               stream, unit, begin, end);
    };
    TWELL_RETURN_IF_ERROR(run(unit, 0, whole));
    return whole == tiles ? cudaSuccess : run(last, whole, tiles);
  };
}

}  // namespace checks
