// Inputs of the e4m3 up projection, what plain double loops make of them, and which tiles a call has.
#pragma once

#include "sm90/prefill/up_tiles.cuh"
#include "tests/fp8_gate_data.cuh"

namespace checks {

// A gate's operands, and beside them up's. Of exact data rows of Wu lie further apart than they are long.
template <typename Half>
struct UpCall {
  Call<Half> gate;
  Rows w;
  Buffer<Half> bias;
  std::vector<float> neuron_scales;
  std::vector<double> ups, sizes;

  explicit UpCall(const Case& c)
      : gate(c), w(c.width, c.hidden, c.data == Data::kNormal ? 0 : 32), bias(c.width) {
    static uint64_t seed = 7;
    seed += 10;
    if (c.data == Data::kNormal) {
      Buffer<Half> plain(normals<Half>(int64_t{c.width} * c.hidden, seed, 1.f / std::sqrt(float(c.hidden))));
      w.quantize(plain.data, c.hidden);
      bias.put(normals<Half>(c.width, seed + 1, 0.5f));
    } else {
      w.fill(c.hidden, {-1.f, -0.5f, 0.f, 0.5f, 1.f}, seed << 32);
      if (c.data == Data::kSpecial) make_special();
      std::vector<Half> values(c.width);
      for (int n = 0; n < c.width; ++n) values[n] = Half(static_cast<float>(hash(seed + n) % 33) - 16.f);
      bias.put(values);
    }
    neuron_scales = w.scales.get();
    const int64_t count = int64_t{c.tokens} * c.width;
    Buffer<double> ups_there(count), sizes_there(count);
    plain_sums<Half><<<static_cast<unsigned>((count + 255) / 256), 256>>>(
        gate.x.view(), w.view(), c.biases ? bias.data : nullptr, c.tokens, c.hidden, c.width, false, ups_there.data,
        sizes_there.data);
    CHECK(cudaGetLastError());
    ups = ups_there.get(), sizes = sizes_there.get();
  }
  // The gate's are at other neurons.
  void make_special() {
    std::vector<float> scales = w.scales.get();
    for (size_t n = 3; n < scales.size(); n += 16) scales[n] = n % 3 == 0 ? NAN : n % 3 == 1 ? INFINITY : 0.f;
    for (size_t n = 9; n < scales.size(); n += 16) scales[n] = -2.f;
    w.scales.put(scales);
  }
  Ffn ffn() const {
    Ffn f = gate.ffn();
    f.up = {w.values.data, DType::kE4m3, w.stride, 1, w.scales.data};
    f.b_up = gate.c.biases ? bias.data : nullptr;
    return f;
  }
};

// Of what kinds a call's tiles are, as make_plan and item_at of up_tiles.cuh cut them.
struct Tiles {
  int64_t all = 0, neighbours = 0;     // whose rows come by boxes
  int64_t half_empty = 0;              // of which one half of the tokens activates nothing
  int64_t wide = 0, most_in_turn = 0;  // with two stages of relu(gate); of one thread block

  void add(const Tiles& other) {
    all += other.all, neighbours += other.neighbours, half_empty += other.half_empty, wide += other.wide;
    most_in_turn = std::max(most_in_turn, other.most_in_turn);
  }
};

inline Tiles tiles_of(const std::vector<sm90::Counts>& counts, const std::vector<uint16_t>& neurons, int row,
                      const Device& device) {
  namespace up = sm90::up;
  const auto tiles_in = [](int all, int limit) { return (all + limit - 1) / limit; };
  const auto width_in = [&](int all, int limit) {
    const int unit = std::max(tiles_in(all, limit), 1) * up::kUnit;
    return (all + unit - 1) / unit * up::kUnit;
  };
  int limit = 0, best = INT32_MAX;
  for (int w = 0; w < up::kWarps; ++w) {
    const int candidate = up::kMaxNeurons - up::kUnit * w;
    int tiles = 0, widest = 0;
    for (const sm90::Counts& c : counts) {
      tiles += tiles_in(c.all(), candidate), widest = std::max(widest, width_in(c.all(), candidate));
    }
    const int cost = (tiles + device.sm_count - 1) / device.sm_count * (widest + 96);
    if (cost < best) best = cost, limit = candidate;
  }
  Tiles found;
  for (size_t b = 0; b < counts.size(); ++b) {
    const sm90::Counts& c = counts[b];
    const int width = width_in(c.all(), limit);
    for (int i = 0; i < tiles_in(c.all(), limit); ++i) {
      const int first = i * width, count = std::max(std::min(width, c.all() - first), 0), last = first + count - 1;
      const uint16_t* list = neurons.data() + b * row;
      const auto inside = [&](int border) { return border > first && border <= last; };
      const bool one_class = !inside(c.first_only) && !inside(c.first_only + c.both);
      ++found.all;
      found.neighbours += count > 0 && one_class && count % up::kBoxRows == 0 && list[last] - list[first] == count - 1;
      found.half_empty += first >= c.first_only + c.both || last < c.first_only;
      found.wide += width > up::kTurnNeurons;
    }
  }
  found.most_in_turn = (found.all + device.sm_count - 1) / device.sm_count;
  return found;
}

}  // namespace checks
