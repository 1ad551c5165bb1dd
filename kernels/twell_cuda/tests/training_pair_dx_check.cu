// Checks the gradient of x from the pairs of kept blocks against plain loops in double. Leaves with 1 where anything is
// wrong.
//
// Built by kernels/tests/check_cuda.sh.
//   ./training_pair_dx_check [random cases, or time]
//
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "sm90/training/pair_dx_kernel.cuh"
#include "tests/check.cuh"

namespace {

using namespace twell;
using namespace twell::sm90;
using checks::Buffer;
using checks::hash;

struct Random {
  uint64_t state;
  uint64_t next() { return hash(++state); }
  int below(int count) { return static_cast<int>(next() % count); }
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-24f; }  // [0, 1)
};

float widen(DType dtype, uint16_t bits) {
  if (dtype == DType::kFloat16) return __half2float(__half(__half_raw{bits}));
  return __bfloat162float(__nv_bfloat16(__nv_bfloat16_raw{bits}));
}
uint16_t round_to(DType dtype, float value) {
  if (dtype == DType::kFloat16) return static_cast<__half_raw>(__float2half_rn(value)).x;
  return static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(value)).x;
}
std::vector<uint16_t> random_values(DType dtype, size_t count, Random& random, float spread) {
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) value = round_to(dtype, (2.0f * random.uniform() - 1.0f) * spread);
  return values;
}

// kUnion: 24 % of a block's neurons, about 2.9 tokens each. kSkewed: the same, but of ten neurons one has a third of
// all tokens. kIdle: as kUnion, and entries without a pair. kMixed: by turns.
enum class Kind { kNone, kOne, kUnion, kSkewed, kIdle, kEarly, kLate, kTenth, kMost, kAll, kMixed };
constexpr int kKinds = 11;

// Words of tokens that activate a neuron.
struct Mask {
  uint32_t words[4] = {};
  void set(int t) { words[t / 32] |= 1u << t % 32; }
  bool has(int t) const { return words[t / 32] >> t % 32 & 1; }
  bool any(int half) const { return (words[2 * half] | words[2 * half + 1]) != 0; }
};

Mask draw_mask(Kind kind, int neuron, int width, Random& random) {
  if (kind == Kind::kMixed) kind = static_cast<Kind>(neuron / 37 % (kKinds - 1));
  Mask mask;
  const auto each = [&](float share, int begin, int end) {
    for (int t = begin; t < end; ++t) {
      if (random.uniform() < share) mask.set(t);
    }
  };
  switch (kind) {
    case Kind::kNone: case Kind::kMixed: break;
    case Kind::kOne: if (neuron == width - 1) mask.set(random.below(kBlockTokens)); break;
    case Kind::kSkewed: if (neuron % 10 == 0) { each(0.33f, 0, kBlockTokens); break; } [[fallthrough]];
    case Kind::kUnion: case Kind::kIdle:
      if (random.uniform() < 0.24f) {
        mask.set(random.below(kBlockTokens));
        each(1.87f / 127.0f, 0, kBlockTokens);
      }
      break;
    case Kind::kEarly: each(0.1f, 0, kHalfTokens); break;
    case Kind::kLate: each(0.1f, kHalfTokens, kBlockTokens); break;
    case Kind::kTenth: each(0.1f, 0, kBlockTokens); break;
    case Kind::kMost: each(0.7f, 0, kBlockTokens); break;
    case Kind::kAll: each(1.0f, 0, kBlockTokens); break;
  }
  return mask;
}

// A state as forward leaves it, of `kept` blocks.
struct HostState {
  std::vector<BlockState> blocks;
  std::vector<uint4> tokens;
  std::vector<uint32_t> first_pairs;
  std::vector<uint16_t> neurons, places;  // of pairs in their tiles
  int64_t pairs = 0;

  HostState(int64_t token_count, int width, int64_t kept, int64_t all_blocks, Kind kind, Random& random) {
    blocks.resize(all_blocks);
    std::memset(blocks.data(), 0xff, blocks.size() * sizeof(BlockState));
    for (int64_t b = 0; b < kept; ++b) {
      std::vector<Mask> masks(width);
      std::vector<int> lists[3];
      for (int n = 0; n < width; ++n) {
        masks[n] = draw_mask(kind, n, width, random);
        for (int t = 0; t < kBlockTokens; ++t) {
          if (b * kBlockTokens + t >= token_count) masks[n].words[t / 32] &= ~(1u << t % 32);
        }
        if (masks[n].any(0) || masks[n].any(1)) {
          lists[!masks[n].any(1) ? 0 : masks[n].any(0) ? 1 : 2].push_back(n);
        } else if (kind == Kind::kIdle && random.below(4) == 0) {
          lists[random.below(3)].push_back(n);
        }
      }
      BlockState& block = blocks[b];
      block.counts = {static_cast<int>(lists[0].size()), static_cast<int>(lists[1].size()),
                      static_cast<int>(lists[2].size())};
      block.first_entry = static_cast<int64_t>(tokens.size());
      block.first_pair = pairs;
      block.pairs = 0;
      for (const std::vector<int>& list : lists) {
        for (const int n : list) {
          if (tokens.size() % kGroup == 0) first_pairs.push_back(block.pairs);
          const uint32_t* w = masks[n].words;
          tokens.push_back({w[0], w[1], w[2], w[3]});
          neurons.push_back(static_cast<uint16_t>(n));
          for (int t = 0; t < kBlockTokens; ++t) {
            if (masks[n].has(t)) places.push_back(static_cast<uint16_t>(tile_place((tokens.size() - 1) % kGroup, t)));
          }
          for (int i = 0; i < 4; ++i) block.pairs += __builtin_popcount(w[i]);
        }
      }
      pairs += block.pairs;
      while (tokens.size() % kGroup != 0) {  // nobody may read these
        tokens.push_back({~0u, ~0u, ~0u, ~0u});
        neurons.push_back(0xffff);
      }
    }
  }
};

struct Case {
  DType dtype;
  bool gated;
  int64_t tokens, kept;
  int hidden, width, first_block, chunk_blocks, sm_count;
  Kind kind;
};

constexpr int64_t kGuard = 4096;

struct Setup {
  HostState host;
  std::vector<uint16_t> gate, up, dg, du;
  Buffer<BlockState> blocks;
  Buffer<uint4> tokens;
  Buffer<uint32_t> first_pairs, values;
  Buffer<uint16_t> neurons, gate_rows, up_rows, places, dx;
  Buffer<int64_t> totals;
  Ffn ffn{};
  State state{};
  PairGradients pairs{};
  Gradients gradients{};

  // Without a gate nobody may use what lies above dg.
  std::vector<uint32_t> both(const Case& c) const {
    std::vector<uint32_t> values(host.pairs);
    for (size_t i = 0; i < values.size(); ++i) values[i] = dg[i] | uint32_t{c.gated ? du[i] : uint16_t{0xffff}} << 16;
    return values;
  }

  Setup(const Case& c, Random random)
      : host(c.tokens, c.width, c.kept, (c.tokens + kBlockTokens - 1) / kBlockTokens, c.kind, random),
        gate(random_values(c.dtype, size_t(c.width) * c.hidden, random, 0.1f)),
        up(random_values(c.dtype, size_t(c.width) * c.hidden, random, 0.1f)),
        dg(random_values(c.dtype, host.pairs, random, 1.0f)),
        du(random_values(c.dtype, host.pairs, random, 1.0f)),
        blocks(host.blocks),
        tokens(host.tokens),
        first_pairs(host.first_pairs),
        values(both(c)),
        neurons(host.neurons),
        gate_rows(gate),
        up_rows(up),
        places(host.places),
        dx(c.tokens * c.hidden + kGuard),
        totals(std::vector<int64_t>{c.kept, static_cast<int64_t>(host.tokens.size()), host.pairs}) {
    ffn.dtype = c.dtype;
    ffn.tokens = c.tokens;
    ffn.hidden = c.hidden;
    ffn.width = c.width;
    ffn.gate.data = gate_rows.data;
    ffn.up.data = c.gated ? up_rows.data : nullptr;
    state.totals = totals.data;
    state.blocks = blocks.data;
    state.tokens = tokens.data;
    state.first_pairs = first_pairs.data;
    state.neurons = neurons.data;
    state.entries = static_cast<int64_t>(host.tokens.size());
    state.pairs = static_cast<int64_t>(dg.size());
    pairs = {values.data, places.data};
    gradients.x = dx.data;
  }

  Chunk chunk_of(const Case& c) const {
    Chunk chunk{};
    chunk.first = int64_t{c.first_block} * kBlockTokens;
    chunk.tokens = std::min(c.tokens - chunk.first, int64_t{c.chunk_blocks} * kBlockTokens);
    chunk.active.blocks = static_cast<int>((chunk.tokens + kBlockTokens - 1) / kBlockTokens);
    chunk.kept = totals.data;
    return chunk;
  }
  void launch(const Case& c, const Device& real) const {
    const Device device{c.sm_count, real.major, real.minor};
    CHECK(launch_pair_dx(ffn, chunk_of(c), state, pairs, gradients, device, nullptr));
  }
  // With a gate, in slices of 256, but only some of the work: what is in dx then means nothing.
  template <int kParts>
  void launch_parts(const Case& c, const Device& device) const {
    const dx::Arguments<2> arguments = dx::arguments_of<2>(ffn, chunk_of(c), state, pairs, gradients.x);
    CHECK((dx::launch_slice<__nv_bfloat16, 2, 256, kParts>(arguments, device, nullptr)));
  }
};

struct Sum {
  double value = 0.0, size = 0.0;  // of the sum; of its terms
};

// One rounding, and what sums in fp32 may lose.
bool close(DType dtype, float value, const Sum& sum) {
  if (std::isnan(value)) return false;
  const double half_ulp = dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
  return std::fabs(value - sum.value) <= 1.01 * half_ulp * std::fabs(sum.value) + 0x1p-16 * sum.size + 0x1p-24;
}

bool check_case(const Case& c, const Device& real, uint64_t seed) {
  Setup s(c, Random{seed});
  s.launch(c, real);
  CHECK(cudaDeviceSynchronize());
  const std::vector<uint16_t> dx = s.dx.get();
  s.dx.poison();
  s.launch(c, real);
  CHECK(cudaDeviceSynchronize());
  int64_t wrong = 0, first = -1;
  const auto judge = [&](bool good, int64_t i) {
    if (good) return;
    if (wrong++ == 0) first = i;
  };
  if (s.dx.get() != dx) judge(false, -2);
  const int64_t first_block = c.first_block, end = std::min<int64_t>(c.kept, first_block + c.chunk_blocks);
  const int64_t first_token = std::min(first_block * kBlockTokens, c.tokens);
  const int64_t end_token = std::max(first_token, std::min(end * kBlockTokens, c.tokens));
  for (int64_t i = 0; i < static_cast<int64_t>(dx.size()); ++i) {
    if (i < first_token * c.hidden || i >= end_token * c.hidden) judge(dx[i] == 0xffff, i);
  }
  std::vector<float> gate(s.gate.size()), up(s.up.size());
  for (size_t i = 0; i < gate.size(); ++i) gate[i] = widen(c.dtype, s.gate[i]), up[i] = widen(c.dtype, s.up[i]);
  for (int64_t b = first_block; b < end; ++b) {
    const BlockState& block = s.host.blocks[b];
    std::vector<Sum> sums(size_t(kBlockTokens) * c.hidden);
    int64_t pair = block.first_pair;
    for (int e = 0; e < block.counts.all(); ++e) {
      Mask mask;
      std::memcpy(mask.words, &s.host.tokens[block.first_entry + e], sizeof(mask));
      const size_t row = size_t(s.host.neurons[block.first_entry + e]) * c.hidden;
      for (int t = 0; t < kBlockTokens; ++t) {
        if (!mask.has(t)) continue;
        const float dg = widen(c.dtype, s.dg[pair]), du = c.gated ? widen(c.dtype, s.du[pair]) : 0.0f;
        ++pair;
        for (int d = 0; d < c.hidden; ++d) {
          const double a = double{dg} * gate[row + d], b2 = double{du} * up[row + d];
          Sum& sum = sums[size_t(t) * c.hidden + d];
          sum.value += a + b2;
          sum.size += std::fabs(a) + std::fabs(b2);
        }
      }
    }
    for (int64_t i = 0; i < static_cast<int64_t>(sums.size()); ++i) {
      const int64_t at = b * kBlockTokens * c.hidden + i;
      if (at < end_token * c.hidden) judge(close(c.dtype, widen(c.dtype, dx[at]), sums[i]), at);
    }
  }
  if (wrong != 0) {
    std::printf("WRONG: %s %s T=%lld D=%d F=%d kept %lld, blocks from %d, chunks of %d, %d SMs, kind %d: %lld wrong, "
                "the first at %lld (-2: not the same again)\n",
                c.dtype == DType::kBFloat16 ? "bf16" : "fp16", c.gated ? "gated" : "plain",
                static_cast<long long>(c.tokens), c.hidden, c.width, static_cast<long long>(c.kept), c.first_block,
                c.chunk_blocks, c.sm_count, static_cast<int>(c.kind), static_cast<long long>(wrong),
                static_cast<long long>(first));
  }
  return wrong == 0;
}

int check(const Device& real, int random_cases) {
  int checks = 0, failures = 0;
  const auto run = [&](const Case& c) {
    ++checks;
    failures += !check_case(c, real, 1000 * checks);
  };
  for (const Kind kind : {Kind::kUnion, Kind::kSkewed, Kind::kMixed, Kind::kAll}) {
    for (const bool gated : {true, false}) {
      run({DType::kBFloat16, gated, 300, 3, 2048, 344, 0, 256, real.sm_count, kind});
      run({DType::kFloat16, gated, 300, 3, 512, 1001, 0, 256, 1, kind});
      run({DType::kBFloat16, gated, 130, 2, 128, 5632, 0, 256, 1, kind});
    }
  }
  const int64_t tokens[] = {1, 63, 64, 65, 128, 130, 257, 512, 700};
  const int hidden[] = {8, 64, 72, 128, 136, 256, 264, 520}, widths[] = {1, 16, 64, 65, 70, 129, 344, 701};
  Random random{7};
  for (int i = 0; i < random_cases; ++i) {
    Case c{};
    c.dtype = random.below(2) ? DType::kBFloat16 : DType::kFloat16;
    c.gated = random.below(3) != 0;
    c.tokens = tokens[random.below(9)];
    const int blocks = static_cast<int>((c.tokens + kBlockTokens - 1) / kBlockTokens);
    c.kept = random.below(2) ? blocks : random.below(blocks + 1);
    c.hidden = hidden[random.below(8)];
    c.width = widths[random.below(8)];
    c.first_block = random.below(2) ? 0 : random.below(blocks);
    c.chunk_blocks = random.below(2) ? kMaxBlocks : 1 + random.below(3);
    const int sm_counts[] = {real.sm_count, 7, 1};
    c.sm_count = sm_counts[random.below(3)];
    c.kind = static_cast<Kind>(random.below(kKinds));
    run(c);
  }
  // Many blocks, so that the chunk is full.
  run({DType::kBFloat16, true, 40000, 290, 8, 40, 0, 256, real.sm_count, Kind::kTenth});
  run({DType::kBFloat16, true, 40000, 290, 8, 40, 256, 256, real.sm_count, Kind::kTenth});
  std::printf("%d checks, %d wrong\n", checks, failures);
  return failures;
}

// The median of some launches, in microseconds.
template <typename Launch>
float measure(const Launch& launch) {
  static Buffer<uint8_t> other(size_t{256} << 20);  // more than the L2 cache
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int repeat = 0; repeat < 25; ++repeat) {
    other.poison();
    CHECK(cudaEventRecord(begin));
    launch();
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    float milliseconds = 0.0f;
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    times.push_back(1000.0f * milliseconds);
  }
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void time(const Device& device, Kind kind, bool gated) {
  constexpr int64_t kTokens = 16384;
  const Case c{DType::kBFloat16, gated, kTokens, kTokens / kBlockTokens, 2048, 5632, 0, 256, device.sm_count, kind};
  const Setup s(c, Random{1});
  int64_t entries = 0;
  for (const BlockState& block : s.host.blocks) entries += block.counts.all();
  // A thread block takes every sm_count-th item: slice by slice the blocks of tokens.
  const int blocks = static_cast<int>(s.host.blocks.size()), items = blocks * (c.hidden / 256);
  int64_t most_steps = 0;
  for (int first = 0; first < device.sm_count; ++first) {
    int64_t steps = 0;
    for (int i = first; i < items; i += device.sm_count) steps += group_count(s.host.blocks[i % blocks].counts.all());
    most_steps = std::max(most_steps, steps);
  }
  const float all = measure([&] { s.launch(c, device); });
  std::printf("%s kind %d: %lld entries, %lld pairs: %.0f us, %.3f us for each of at most %lld steps\n",
              gated ? "gated" : "plain", static_cast<int>(kind), static_cast<long long>(entries),
              static_cast<long long>(s.host.pairs), all, all / most_steps, static_cast<long long>(most_steps));
  if (!gated) return;
  const auto parts = [&](const char* name, auto which) {
    std::printf("  %s %.0f", name, measure([&] { s.launch_parts<decltype(which)::value>(c, device); }));
  };
  using dx::kBuild;
  using dx::kGather;
  using dx::kMultiply;
  parts("without building", std::integral_constant<int, kGather | kMultiply>());
  parts("without gathers", std::integral_constant<int, kBuild | kMultiply>());
  parts("without products", std::integral_constant<int, kBuild | kGather>());
  parts("building alone", std::integral_constant<int, kBuild>());
  parts("gathers alone", std::integral_constant<int, kGather>());
  parts("products alone", std::integral_constant<int, kMultiply>());
  parts("nothing", std::integral_constant<int, 0>());
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  const Device real{properties.multiProcessorCount, properties.major, properties.minor};
  if (argc > 1 && std::strcmp(argv[1], "time") == 0) {
    for (const Kind kind : {Kind::kUnion, Kind::kSkewed, Kind::kTenth}) time(real, kind, true);
    time(real, Kind::kUnion, false);
    return 0;
  }
  return check(real, argc > 1 ? std::atoi(argv[1]) : 400) == 0 ? 0 : 1;
}
