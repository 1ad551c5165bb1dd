// Inputs of the e4m3 down projection, which neurons its blocks list, and what plain double loops make of them.
#pragma once

#include <string>

#include "sm90/common/slice_product.cuh"
#include "sm90/prefill/prefill_fp8.h"
#include "tests/fp8_gate_data.cuh"

namespace checks {

// What a block lists: nothing; 1 of 20 neurons; 3 of 8; all, of both halves; all, of one half alone; runs of
// neighbours; or one of these, block by block.
enum class List { kNone, kFew, kHalf, kAll, kFirst, kSecond, kRuns, kMixed };
inline const char* name_of(List list) {
  constexpr const char* kNames[] = {"none", "few", "half", "all", "first", "second", "runs", "mixed"};
  return kNames[static_cast<int>(list)];
}

struct DownCase {
  int tokens, hidden, width;
  List list;
  bool biases;
  bool special;  // scales of 0, infinity, NaN and below 0; NaN among Wd's values
};

// Which halves of a block activate a neuron: bit 0 the first, bit 1 the second.
inline int halves_of(List list, int64_t block, int neuron, int width, uint64_t seed) {
  if (list == List::kMixed) list = static_cast<List>(hash(seed + block) % 7);
  const uint64_t random = hash(seed ^ (block << 20 | neuron) * 0x9e3779b97f4a7c15ull);
  switch (list) {
    case List::kNone: return 0;
    case List::kFew: return random % 20 == 0 ? static_cast<int>((random >> 32) % 3) + 1 : 0;
    case List::kHalf: return random % 2 == 0 ? static_cast<int>(random >> 32 & 3) : 0;
    case List::kAll: return 3;
    case List::kFirst: return 1;
    case List::kSecond: return 2;
    default: return neuron % 200 < 150 && neuron < width - 3 ? 3 : static_cast<int>(random % 4);
  }
}

// How the fetching warpgroup takes the blocks' lists.
struct Steps {
  int64_t neighbours = 0, first = 0, second = 0, both = 0, empty = 0;  // steps by what they multiply; blocks of none
  void add(const Steps& other) {
    neighbours += other.neighbours, first += other.first, second += other.second, both += other.both;
    empty += other.empty;
  }
  void add(const sm90::Counts& c, const uint16_t* list) {
    const int both_end = c.first_only + c.both;
    empty += c.all() == 0;
    for (int start = 0; start < c.all(); start += 64) {
      const bool in_first = start < both_end, in_second = start + 64 > c.first_only;
      (in_first && in_second ? both : in_first ? first : second) += 1;
      neighbours += start >= c.first_only && start + 64 <= both_end && list[start + 63] - list[start] == 63;
    }
  }
};

// y (T, D) by the blocks' lists; `spoilt` where NaN of Wd meets a token whose h is 0.
template <typename Half>
__global__ void plain_down(const sm90::Active active, const uint8_t* down, const float* scales, const Half* bias,
                           int64_t tokens, int hidden, int width, double* y, uint8_t* spoilt) {
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x, t = i / hidden, d = i % hidden;
  if (t >= tokens) return;
  const int64_t block = t / sm90::kBlockTokens;
  const int half = t / 64 % 2;
  const sm90::Counts counts = active.counts[block];
  double sum = 0;
  spoilt[i] = 0;
  for (int n = 0; n < counts.all(); ++n) {
    const int neuron = active.neurons[block * active.row + n];
    const double w = e4m3_value(down[int64_t{neuron} * hidden + d]);
    if (isnan(w)) spoilt[i] = 1;
    const bool mine = half == 0 ? n < counts.first_only + counts.both : n >= counts.first_only;
    if (!mine) continue;
    const Half* column = static_cast<const Half*>(active.columns) + ((block * width + neuron) * 2 + half) * 64;
    const double h = static_cast<float>(column[t % 64]);
    if (h != 0) sum += h * w;
  }
  y[i] = sum * scales[d] + (bias != nullptr ? static_cast<float>(bias[d]) : 0.f);
}

// One call: all sums are whole numbers of 2^-9, of less than 24 bits, and scales powers of two.
template <typename Half>
struct DownCall {
  DownCase c;
  int blocks, row;
  Buffer<sm90::Counts> counts;
  Buffer<uint16_t> neurons, columns;
  Buffer<uint8_t> down;
  Buffer<float> scales;
  Buffer<Half> bias;
  Guarded<Half> y;
  std::vector<double> want;
  std::vector<uint8_t> spoilt;
  Steps steps;

  explicit DownCall(const DownCase& wanted)
      : c(wanted), blocks((c.tokens + 127) / 128), row((c.width + 7) / 8 * 8), counts(blocks),
        neurons(size_t(blocks) * row), columns(size_t(blocks) * c.width * 128), down(size_t(c.width) * c.hidden),
        scales(c.hidden), bias(c.hidden), y(size_t(c.tokens) * c.hidden) {
    static uint64_t seed = 100;
    ++seed;
    const std::vector<bool> listed = make_activations(seed << 40);
    make_weights(listed, (seed << 40) + (uint64_t{1} << 39));
    const int64_t count = int64_t{c.tokens} * c.hidden;
    Buffer<double> there(count);
    Buffer<uint8_t> spoilt_there(count);
    plain_down<Half><<<static_cast<unsigned>((count + 255) / 256), 256>>>(
        chunk().active, down.data, scales.data, c.biases ? bias.data : nullptr, c.tokens, c.hidden, c.width,
        there.data, spoilt_there.data);
    CHECK(cudaGetLastError());
    want = there.get(count), spoilt = spoilt_there.get(count);
  }

  // Whether any block lists a neuron. Columns that no half activates stay NaN, and so does what lies past the tokens.
  std::vector<bool> make_activations(uint64_t seed) {
    std::vector<sm90::Counts> all_counts(blocks);
    std::vector<uint16_t> list(size_t(blocks) * row, 0xffff), h(size_t(blocks) * c.width * 128, 0xffff);
    std::vector<bool> listed(c.width);
    // A token has about eight values that are not 0, so that all e4m3 values are summed up exactly.
    const uint64_t every = std::max(1, c.width / 8);
    for (int b = 0; b < blocks; ++b) {
      std::vector<uint16_t> classes[3];  // of the first half, of both, of the second
      for (int n = 0; n < c.width; ++n) {
        const int halves = halves_of(c.list, b, n, c.width, seed);
        if (halves == 0) continue;
        listed[n] = true;
        classes[halves == 1 ? 0 : halves == 3 ? 1 : 2].push_back(static_cast<uint16_t>(n));
        for (int i = 0; i < 128; ++i) {
          const int64_t t = int64_t{b} * 128 + i;
          if ((halves >> i / 64 & 1) == 0 || t >= c.tokens) continue;
          const uint64_t random = hash(seed ^ (t << 20 | n) * 0x51ed2701ull);
          const int sized = static_cast<int>(random >> 32 & 3);  // of -2, -1, 1 and 2
          const Half value(random % every == 0 ? static_cast<float>(sized < 2 ? sized - 2 : sized - 1) : 0.f);
          h[(size_t(b) * c.width + n) * 128 + i] = reinterpret_cast<const uint16_t&>(value);
        }
      }
      all_counts[b] = {static_cast<int>(classes[0].size()), static_cast<int>(classes[1].size()),
                       static_cast<int>(classes[2].size())};
      auto to = list.begin() + int64_t{b} * row;
      for (const auto& of_class : classes) to = std::copy(of_class.begin(), of_class.end(), to);
      steps.add(all_counts[b], list.data() + int64_t{b} * row);
    }
    counts.put(all_counts), neurons.put(list), columns.put(h);
    return listed;
  }

  // Every value; NaN where nothing may read, and with `special` in some rows.
  void make_weights(const std::vector<bool>& listed, uint64_t seed) {
    std::vector<uint8_t> codes(size_t(c.width) * c.hidden, 0x7f);
    for (int n = 0; n < c.width; ++n) {
      if (!listed[n]) continue;
      for (int d = 0; d < c.hidden; ++d) {
        uint8_t& code = codes[size_t(n) * c.hidden + d];
        code = static_cast<uint8_t>(hash(seed + (uint64_t(n) << 16 | d)));
        const bool is_nan = (code & 0x7f) == 0x7f;
        if (is_nan && !(c.special && n % 64 == 5)) code ^= 0x40;
      }
    }
    std::vector<float> factors(c.hidden);
    std::vector<Half> biases(c.hidden);
    for (int d = 0; d < c.hidden; ++d) {
      factors[d] = std::ldexp(1.f, static_cast<int>(hash(seed + 1 + d) % 3) - 1);
      biases[d] = Half(factors[d] * (static_cast<float>(hash(seed + 2 + d) % 17) - 8.f));
      if (c.special && d % 16 == 3) factors[d] = d % 3 == 0 ? NAN : d % 3 == 1 ? INFINITY : 0.f;
      if (c.special && d % 16 == 10) factors[d] = -2.f;
    }
    down.put(codes), scales.put(factors), bias.put(biases);
  }

  sm90::Chunk chunk() const {
    sm90::Chunk chunk{};
    chunk.tokens = c.tokens;
    chunk.active = {nullptr, counts.data, neurons.data, columns.data, nullptr, blocks, (c.width + 31) / 32, row};
    return chunk;
  }

  // In slices of so many hidden units; of 0 as the launcher chooses.
  cudaError_t launch(int slice, const Device& device) const {
    Ffn f{};
    f.dtype = dtype_of<Half>(), f.tokens = c.tokens, f.hidden = c.hidden, f.width = c.width, f.y = y.data();
    f.down = {down.data, DType::kE4m3, c.hidden, 1, scales.data};
    f.b_down = c.biases ? bias.data : nullptr;
    if (slice == 0) return sm90::launch_down_fp8(f, chunk(), device, nullptr);
    const auto arguments = sm90::slices::scaled_arguments(f, chunk());
    return slice == 128 ? sm90::slices::launch_slice<Half, E4m3, 128>(f.dtype, arguments, device, nullptr)
                        : sm90::slices::launch_slice<Half, E4m3, 256>(f.dtype, arguments, device, nullptr);
  }
};

}  // namespace checks
