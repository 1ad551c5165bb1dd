// Checks the gradients of h at pairs (launch_pair_dh) on compute capability 9.0 against plain loops on the host. Leaves
// with 1 where anything is wrong.
//
// Built by kernels/tests/check_cuda.sh.
//   ./training_pair_dh_check [time]
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "sm90/training/training.h"
#include "tests/check.cuh"

namespace {

using namespace twell;
using namespace twell::sm90;
using checks::Buffer;
using checks::hash;

inline float uniform(uint64_t seed, uint64_t i) {  // [0, 1)
  return static_cast<float>(hash(seed * 0x100000001b3ull + i) >> 40) * 0x1p-24f;
}

uint16_t narrow(DType dtype, float value) {
  uint16_t bits;
  if (dtype == DType::kBFloat16) {
    const __nv_bfloat16 rounded = __float2bfloat16_rn(value);
    std::memcpy(&bits, &rounded, 2);
  } else {
    const __half rounded = __float2half_rn(value);
    std::memcpy(&bits, &rounded, 2);
  }
  return bits;
}
float widen(DType dtype, uint16_t bits) {
  if (dtype == DType::kBFloat16) {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
  }
  __half value;
  std::memcpy(&value, &bits, 2);
  return __half2float(value);
}

std::vector<uint16_t> random_values(DType dtype, int64_t count, uint64_t seed, float spread) {
  std::vector<uint16_t> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = narrow(dtype, (2.0f * uniform(seed, i) - 1.0f) * spread);
  return values;
}

// kLate: as kShare, but only in second halves. kUnion: of each 128 tokens, `share` of the neurons are active, in one
// token and each other with probability `more`. kNan: kShare, with some values NaN.
enum class Kind { kShare, kOneElement, kLate, kNan, kUnion };
struct Pattern {
  Kind kind;
  float share, more;
};

bool is_active(const Pattern& p, int64_t tokens, int width, int64_t t, int n, uint64_t seed) {
  switch (p.kind) {
    case Kind::kOneElement: return t == tokens / 2 && n == width - 1;
    case Kind::kLate: return t % kBlockTokens >= kHalfTokens && uniform(seed, t * width + n) < p.share;
    case Kind::kUnion: {
      const uint64_t member = t / kBlockTokens * width + n;
      return uniform(seed + 2, member) < p.share && (hash(member + seed) % kBlockTokens == uint64_t(t % kBlockTokens) ||
                                                     uniform(seed + 1, t * width + n) < p.more);
    }
    default: return uniform(seed, t * width + n) < p.share;
  }
}

struct Entry {
  int neuron;
  uint32_t tokens[4];
  int64_t first_pair;  // in the pools
};
struct Block {
  std::vector<Entry> entries;
  BlockState state;
};

// The state of the first `kept` blocks. `gaps` leaves unused room between blocks, and lists entries without pairs.
struct HostState {
  std::vector<Block> blocks;
  std::vector<uint4> tokens;
  std::vector<uint32_t> first_pairs, places;
  std::vector<uint16_t> neurons, gate, up;
  int64_t pairs = 0;  // room in the pools

  HostState(DType dtype, const Pattern& p, int64_t all_tokens, int width, int64_t kept, bool gaps, uint64_t seed)
      : blocks(kept), places(kept * width, 0xffffffffu) {
    int64_t room = gaps ? kGroup : 0;
    pairs = gaps ? 3 : 0;
    for (int64_t b = 0; b < kept; ++b) {
      Block& block = blocks[b];
      std::vector<Entry> classes[3];
      for (int n = 0; n < width; ++n) {
        if (p.kind == Kind::kUnion && uniform(seed + 2, b * width + n) >= p.share) continue;
        Entry entry{n, {}, 0};
        for (int slot = 0; slot < kBlockTokens && b * kBlockTokens + slot < all_tokens; ++slot) {
          if (is_active(p, all_tokens, width, b * kBlockTokens + slot, n, seed)) {
            entry.tokens[slot / 32] |= 1u << slot % 32;
          }
        }
        const bool early = entry.tokens[0] | entry.tokens[1], late = entry.tokens[2] | entry.tokens[3];
        const bool none = !early && !late;
        if (none && !(gaps && hash(seed + n) % 50 == 0)) continue;
        classes[none ? n % 3 : early ? late : 2].push_back(entry);
      }
      block.state.counts = {static_cast<int>(classes[0].size()), static_cast<int>(classes[1].size()),
                            static_cast<int>(classes[2].size())};
      for (const auto& entries : classes) block.entries.insert(block.entries.end(), entries.begin(), entries.end());
      block.state.first_entry = room;
      block.state.first_pair = pairs;
      const int64_t groups = (block.entries.size() + kGroup - 1) / kGroup;
      room += (groups + (gaps && b % 2 == 1)) * kGroup;
      tokens.resize(room, {~0u, ~0u, ~0u, ~0u});
      neurons.resize(room, 0xffff);
      first_pairs.resize(room / kGroup, ~0u);
      for (size_t e = 0; e < block.entries.size(); ++e) {
        Entry& entry = block.entries[e];
        const int64_t at = block.state.first_entry + e;
        const uint32_t* t = entry.tokens;
        entry.first_pair = pairs;
        tokens[at] = {t[0], t[1], t[2], t[3]};
        neurons[at] = static_cast<uint16_t>(entry.neuron);
        if (e % kGroup == 0) first_pairs[at / kGroup] = static_cast<uint32_t>(pairs - block.state.first_pair);
        pairs += __builtin_popcount(t[0]) + __builtin_popcount(t[1]) + __builtin_popcount(t[2]) +
                 __builtin_popcount(t[3]);
      }
      block.state.pairs = static_cast<uint32_t>(pairs - block.state.first_pair);
      if (gaps) pairs += hash(seed + b) % 6;
    }
    gate.resize(pairs);
    up.resize(pairs);
    for (int64_t i = 0; i < pairs; ++i) {
      const bool nan = p.kind == Kind::kNan && hash(seed + 7 * i) % 61 == 0;
      gate[i] = narrow(dtype, nan ? NAN : 0.1f + uniform(seed + 3, i));
      up[i] = i % 29 == 0 ? 0 : narrow(dtype, 2.0f * uniform(seed + 4, i) - 1.0f);
    }
    std::vector<uint32_t> counts(width + 1);
    for (const Block& block : blocks) {
      for (const Entry& entry : block.entries) counts[entry.neuron + 1] += count(entry);
    }
    for (int n = 0; n < width; ++n) counts[n + 1] += counts[n];
    for (int64_t b = 0; b < kept; ++b) {
      for (const Entry& entry : blocks[b].entries) {
        if (count(entry) == 0) continue;
        places[b * width + entry.neuron] = counts[entry.neuron];
        counts[entry.neuron] += count(entry);
      }
    }
  }
  std::vector<uint32_t> both() const {
    std::vector<uint32_t> values(pairs);
    for (int64_t i = 0; i < pairs; ++i) values[i] = gate[i] | uint32_t{up[i]} << 16;
    return values;
  }
  static uint32_t count(const Entry& entry) {
    uint32_t sum = 0;
    for (const uint32_t word : entry.tokens) sum += __builtin_popcount(word);
    return sum;
  }
};

enum class L1 { kNone, kOnes, kWeights };
struct Case {
  DType dtype;
  int64_t tokens;
  int hidden, width;
  Pattern pattern;
  bool gated, gaps, wants_pairs, wants_sorted;
  int kept_part;  // all blocks, half of them, none
  L1 l1;
  int chunk_blocks, sm_count;
};

// What the kernel writes, and what it should.
struct Results {
  std::vector<uint32_t> values;
  std::vector<uint16_t> tile_places, sorted_h, sorted_du, sorted_dg;
  std::vector<int32_t> tokens;

  Results() = default;
  Results(std::vector<uint32_t> both, std::vector<uint16_t> places, const std::vector<uint2>& sorted,
          std::vector<uint16_t> h)
      : values(std::move(both)), tile_places(std::move(places)), sorted_h(std::move(h)) {
    for (const uint2& pair : sorted) {
      tokens.push_back(static_cast<int32_t>(pair.x));
      sorted_dg.push_back(static_cast<uint16_t>(pair.y)), sorted_du.push_back(static_cast<uint16_t>(pair.y >> 16));
    }
  }
  bool operator==(const Results& o) const {
    return values == o.values && tile_places == o.tile_places && sorted_h == o.sorted_h && sorted_du == o.sorted_du &&
           sorted_dg == o.sorted_dg && tokens == o.tokens;
  }
};

class Run {
 public:
  static constexpr int kGuard = 64;

  Run(const Case& c, const Device& real, uint64_t seed)
      : c_(c),
        device_{c.sm_count, real.major, real.minor},
        blocks_((c.tokens + kBlockTokens - 1) / kBlockTokens),
        kept_(c.kept_part == 0 ? blocks_ : c.kept_part == 1 ? blocks_ / 2 : 0),
        host_(c.dtype, c.pattern, c.tokens, c.width, kept_, c.gaps, seed),
        dy_(random_values(c.dtype, c.tokens * c.hidden, seed + 11, 1.0f)),
        down_(random_values(c.dtype, int64_t{c.width} * c.hidden, seed + 12, 0.1f)),
        weights_(c.tokens) {
    for (int64_t t = 0; t < c.tokens; ++t) weights_[t] = t % 5 == 0 ? 0.0f : uniform(seed + 9, t);
  }

  bool check() {
    launch();
    const Results first = results_;
    launch();
    if (!(first == results_)) fail("again", 0);
    verify();
    return good_;
  }

 private:
  void launch() {
    const DType dtype = c_.dtype;
    std::vector<BlockState> states(blocks_);
    std::memset(static_cast<void*>(states.data()), 0x7f, states.size() * sizeof(BlockState));
    for (int64_t b = 0; b < kept_; ++b) states[b] = host_.blocks[b].state;
    const Buffer<uint16_t> dy(dy_), down(down_), neurons(host_.neurons), gate(host_.gate);
    const Buffer<uint4> tokens(host_.tokens);
    const Buffer<uint32_t> both(host_.both()), first_pairs(host_.first_pairs), places(host_.places);
    const Buffer<BlockState> block_states(states);
    const Buffer<int64_t> totals(std::vector<int64_t>{kept_, 0, 0});
    const Buffer<float> l1_scale(std::vector<float>{kScale}), weights(weights_);
    const size_t room = host_.pairs + kGuard;
    Buffer<uint32_t> values(room);
    Buffer<uint2> sorted_pairs(room);
    Buffer<uint16_t> tile_places(room), sorted_h(room);
    Ffn ffn{};
    ffn.dtype = dtype;
    ffn.tokens = c_.tokens;
    ffn.hidden = c_.hidden;
    ffn.width = c_.width;
    ffn.up.data = c_.gated ? down.data : nullptr;  // never read
    ffn.down.data = down.data;
    Training training{};
    if (c_.l1 != L1::kNone) training.l1_scale = l1_scale.data;
    if (c_.l1 == L1::kWeights) training.token_weight = weights.data;
    training.state = State{totals.data,  block_states.data, tokens.data, first_pairs.data,
                           neurons.data, gate.data,         static_cast<int64_t>(host_.tokens.size()),
                           host_.pairs};
    if (c_.gated) training.state.values = both.data;
    Gradients gradients{};
    gradients.dy = dy.data;
    PairGradients pair_gradients{};
    if (c_.wants_pairs) pair_gradients = {values.data, tile_places.data};
    Sorted sorted{};
    if (c_.wants_sorted) sorted = {nullptr, places.data, sorted_pairs.data, sorted_h.data};
    for (int64_t first = 0; first < blocks_; first += c_.chunk_blocks) {
      const int64_t tokens_left = c_.tokens - first * kBlockTokens;
      Chunk chunk{};
      chunk.first = first * kBlockTokens;
      chunk.tokens = std::min<int64_t>(tokens_left, int64_t{c_.chunk_blocks} * kBlockTokens);
      chunk.active.blocks = static_cast<int>((chunk.tokens + kBlockTokens - 1) / kBlockTokens);
      chunk.kept = totals.data;
      CHECK(launch_pair_dh(ffn, chunk, training, gradients, pair_gradients, sorted, device_, nullptr));
    }
    CHECK(cudaDeviceSynchronize());
    results_ = {values.get(), tile_places.get(), sorted_pairs.get(), sorted_h.get()};
  }

  // One rounding, and what sums in fp32 may lose.
  bool close(uint16_t bits, double truth, double size) const {
    const float value = widen(c_.dtype, bits);
    if (std::isnan(truth) || std::isnan(value)) return std::isnan(truth) && std::isnan(value);
    const double half_ulp = c_.dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
    return std::fabs(value - truth) <= 1.01 * half_ulp * std::fabs(truth) + 0x1p-16 * size + 0x1p-24;
  }

  void verify() {
    std::vector<float> dy(dy_.size()), down(down_.size());
    for (size_t i = 0; i < dy.size(); ++i) dy[i] = widen(c_.dtype, dy_[i]);
    for (size_t i = 0; i < down.size(); ++i) down[i] = widen(c_.dtype, down_[i]);
    Results seen = results_;  // what was written as it should be becomes NaN again
    for (int64_t b = 0; b < kept_; ++b) {
      const std::vector<Entry>& entries = host_.blocks[b].entries;
      for (const Entry& entry : entries) {
        int64_t pair = entry.first_pair, place = host_.places[b * c_.width + entry.neuron];
        for (int slot = 0; slot < kBlockTokens; ++slot) {
          if (!(entry.tokens[slot / 32] >> slot % 32 & 1)) continue;
          const int64_t t = b * kBlockTokens + slot;
          const float g = widen(c_.dtype, host_.gate[pair]), u = c_.gated ? widen(c_.dtype, host_.up[pair]) : 1.0f;
          const uint16_t h = c_.gated ? narrow(c_.dtype, g * u) : host_.gate[pair];
          const float sign = widen(c_.dtype, h) > 0.0f ? 1.0f : widen(c_.dtype, h) < 0.0f ? -1.0f : 0.0f;
          double sums[4] = {}, sizes[4] = {};
          const float *x = dy.data() + t * c_.hidden, *y = down.data() + int64_t{entry.neuron} * c_.hidden;
          for (int d = 0; d < c_.hidden; d += 4) {
            for (int i = 0; i < 4; ++i) {
              const double term = double{x[d + i]} * y[d + i];
              sums[i] += term;
              sizes[i] += std::fabs(term);
            }
          }
          double dh = sums[0] + sums[1] + sums[2] + sums[3], size = sizes[0] + sizes[1] + sizes[2] + sizes[3];
          if (c_.l1 != L1::kNone) dh += double{kScale} * (c_.l1 == L1::kWeights ? weights_[t] : 1.0f) * sign;
          size += kScale;
          const auto expect = [&](uint16_t value, double factor, const char* what) {
            if (!close(value, dh * factor, size * std::fabs(factor))) fail(what, pair);
          };
          if (c_.wants_pairs) {
            expect(static_cast<uint16_t>(seen.values[pair]), u, "dg");
            if (c_.gated) expect(static_cast<uint16_t>(seen.values[pair] >> 16), g, "du");
            if (seen.tile_places[pair] != tile_place((&entry - entries.data()) % kGroup, slot)) fail("tile", pair);
            seen.values[pair] = ~0u;
            seen.tile_places[pair] = 0xffff;
          }
          if (c_.wants_sorted) {
            expect(seen.sorted_dg[place], u, "sorted dg");
            if (c_.gated) expect(seen.sorted_du[place], g, "sorted du");
            seen.sorted_dg[place] = seen.sorted_du[place] = 0xffff;
            if (seen.tokens[place] != t) fail("sorted token", pair);
            const float seen_h = widen(c_.dtype, seen.sorted_h[place]), true_h = widen(c_.dtype, h);
            if (!(seen.sorted_h[place] == h || (std::isnan(seen_h) && std::isnan(true_h)))) fail("sorted h", pair);
            seen.tokens[place] = -1;
            seen.sorted_h[place] = 0xffff;
          }
          ++pair;
          ++place;
        }
      }
    }
    const auto untouched = [&](const auto& values, const char* what) {
      for (size_t i = 0; i < values.size(); ++i) {
        if (static_cast<uint32_t>(values[i]) != (sizeof(values[0]) == 2 ? 0xffffu : ~0u)) return fail(what, i);
      }
    };
    untouched(seen.values, "values elsewhere"), untouched(seen.tile_places, "tile elsewhere");
    untouched(seen.sorted_h, "sorted h elsewhere"), untouched(seen.sorted_du, "sorted du elsewhere");
    untouched(seen.sorted_dg, "sorted dg elsewhere"), untouched(seen.tokens, "sorted tokens elsewhere");
  }

  void fail(const char* what, int64_t pair) {
    if (!good_) return;
    good_ = false;
    std::printf(
        "WRONG %s: %s T=%lld D=%d F=%d pattern %d share %.3f %s, kept %lld of %lld blocks, l1 %d, %s%s%s, chunks of %d "
        "blocks, %d SMs: first at pair %lld of %lld\n",
        what, c_.dtype == DType::kBFloat16 ? "bf16" : "fp16", static_cast<long long>(c_.tokens), c_.hidden, c_.width,
        static_cast<int>(c_.pattern.kind), c_.pattern.share, c_.gated ? "gated" : "plain",
        static_cast<long long>(kept_), static_cast<long long>(blocks_), static_cast<int>(c_.l1),
        c_.wants_pairs ? "pairs " : "", c_.wants_sorted ? "sorted " : "", c_.gaps ? "gaps" : "no gaps",
        c_.chunk_blocks, c_.sm_count, static_cast<long long>(pair), static_cast<long long>(host_.pairs));
  }

  static constexpr float kScale = 0.3f;
  const Case c_;
  const Device device_;
  const int64_t blocks_, kept_;
  const HostState host_;
  const std::vector<uint16_t> dy_, down_;
  std::vector<float> weights_;
  Results results_;
  bool good_ = true;
};

int check(const Device& real) {
  const Pattern patterns[] = {{Kind::kShare, 0.0f, 0.0f}, {Kind::kOneElement, 0.0f, 0.0f},
                              {Kind::kShare, 0.01f, 0.0f}, {Kind::kShare, 0.1f, 0.0f},
                              {Kind::kShare, 0.6f, 0.0f},  {Kind::kShare, 1.0f, 0.0f},
                              {Kind::kLate, 0.3f, 0.0f},   {Kind::kNan, 0.02f, 0.0f},
                              {Kind::kUnion, 0.3f, 0.015f}};
  int checks = 0, failures = 0;
  uint64_t seed = 1;
  const auto add = [&](int64_t tokens, int hidden, int width, const Pattern& pattern) {
    const uint64_t draw = hash(seed += 100);
    const auto pick = [&](int shift, int choices) { return static_cast<int>((draw >> shift & 0xff) % choices); };
    const int sm_counts[] = {real.sm_count, real.sm_count, 7, 1}, chunks[] = {8, 8, 3, 1}, wanted = pick(24, 4);
    const Case c{pick(8, 2) ? DType::kBFloat16 : DType::kFloat16,
                 tokens,
                 hidden,
                 width,
                 pattern,
                 pick(16, 3) != 0,
                 pick(0, 3) != 0,
                 wanted != 1,
                 wanted != 2,
                 std::max(pick(32, 6) - 3, 0),
                 static_cast<L1>(pick(40, 3)),
                 chunks[pick(48, 4)],
                 sm_counts[pick(56, 4)]};
    ++checks;
    failures += !Run(c, real, seed).check();
  };
  for (const int64_t tokens : {1, 63, 64, 65, 128, 130, 300, 1000}) {
    for (const int hidden : {8, 72, 200, 520, 1032}) {
      for (const int width : {16, 70, 344, 1001}) {
        for (const Pattern& pattern : patterns) {
          if (tokens * hidden * width * std::max(pattern.share, 0.05f) < 1.5e7f) add(tokens, hidden, width, pattern);
        }
      }
    }
  }
  for (const Pattern& pattern : {Pattern{Kind::kUnion, 0.24f, 1.87f / 127.0f}, Pattern{Kind::kShare, 0.02f, 0.0f}}) {
    for (const int64_t tokens : {256, 700}) add(tokens, 2048, 5632, pattern);
  }
  add(40, 8, 65536, {Kind::kShare, 0.5f, 0.0f});
  std::printf("%d checks, %d wrong\n", checks, failures);
  return failures;
}

void time(const Device& device, const char* what, const Pattern& pattern) {
  constexpr int64_t kTokens = 16384, kHidden = 2048, kWidth = 5632, kBlocks = kTokens / kBlockTokens;
  constexpr DType kType = DType::kBFloat16;
  const HostState host(kType, pattern, kTokens, kWidth, kBlocks, false, 5);
  std::vector<BlockState> states;
  int64_t entries = 0, halves = 0;
  for (const Block& block : host.blocks) {
    states.push_back(block.state);
    entries += block.state.counts.all();
    halves += block.state.counts.all() + block.state.counts.both;
  }
  const Buffer<uint16_t> dy(random_values(kType, kTokens * kHidden, 1, 1.0f));
  const Buffer<uint16_t> down(random_values(kType, kWidth * kHidden, 2, 0.1f));
  const Buffer<uint16_t> neurons(host.neurons);
  const Buffer<uint32_t> values(host.both());
  const Buffer<uint4> tokens(host.tokens);
  const Buffer<uint32_t> first_pairs(host.first_pairs), places(host.places);
  const Buffer<BlockState> block_states(states);
  const Buffer<int64_t> totals(std::vector<int64_t>{kBlocks, 0, 0});
  const Buffer<float> l1(std::vector<float>{1e-3f});
  Buffer<uint32_t> pair_values(host.pairs);
  Buffer<uint2> sorted_pairs(host.pairs);
  Buffer<uint16_t> tile_places(host.pairs), sorted_h(host.pairs);
  Buffer<uint8_t> flush(size_t{256} << 20);
  Ffn ffn{};
  ffn.dtype = kType;
  ffn.tokens = kTokens;
  ffn.hidden = kHidden;
  ffn.width = kWidth;
  ffn.up.data = ffn.down.data = down.data;
  Training training{};
  training.l1_scale = l1.data;
  training.state = State{totals.data,  block_states.data, tokens.data, first_pairs.data,
                         neurons.data, values.data,       static_cast<int64_t>(host.tokens.size()),
                         host.pairs};
  Gradients gradients{};
  gradients.dy = dy.data;
  const PairGradients pair_gradients{pair_values.data, tile_places.data};
  const Sorted sorted{nullptr, places.data, sorted_pairs.data, sorted_h.data};
  Chunk chunk{};
  chunk.tokens = kTokens;
  chunk.active.blocks = kBlocks;
  chunk.kept = totals.data;
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  const auto median = [&](const PairGradients& pairs, const Sorted& to) {
    std::vector<float> times;
    for (int repeat = 0; repeat < 25; ++repeat) {
      flush.poison();
      CHECK(cudaEventRecord(begin));
      CHECK(launch_pair_dh(ffn, chunk, training, gradients, pairs, to, device, nullptr));
      CHECK(cudaEventRecord(end));
      CHECK(cudaEventSynchronize(end));
      float milliseconds = 0.0f;
      CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
      times.push_back(1000.0f * milliseconds);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  };
  const float both = median(pair_gradients, sorted), pairs = median(pair_gradients, {}), none = median({}, {});
  const double flops = 2.0 * kHalfTokens * halves * kHidden;
  std::printf("%s: %lld pairs, %lld entries: %.0f us (%.0f TFLOP/s), without sorted %.0f, without results %.0f\n", what,
              static_cast<long long>(host.pairs), static_cast<long long>(entries), both, flops / both * 1e-6, pairs,
              none);
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
}

}  // namespace

int main(int argc, char** argv) {
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  const Device real{properties.multiProcessorCount, properties.major, properties.minor};
  if (argc > 1 && std::strcmp(argv[1], "time") == 0) {
    time(real, "L0 = 30", {Kind::kUnion, 0.24f, 1.87f / 127.0f});
    time(real, "L0 = 120", {Kind::kUnion, 0.6f, 3.5f / 127.0f});
    time(real, "L0 = 600", {Kind::kUnion, 1.0f, 12.6f / 127.0f});
    return 0;
  }
  return check(real) == 0 ? 0 : 1;
}
