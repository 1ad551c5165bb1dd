// Checks what training keeps of forward, and its report, against plain loops on the host. Leaves with 1 where anything
// is wrong.
//
// Built by kernels/tests/check_cuda.sh.
//   ./training_state_check [time]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "sm90/training/training.h"
#include "tests/check.cuh"

namespace {

using namespace twell;
using namespace twell::sm90;
using checks::hash;

// Device memory in one piece, handed out as NaN in every type, with guards between.
class Arena {
 public:
  static constexpr size_t kGuard = 256;
  explicit Arena(size_t bytes) : room_(bytes) { CHECK(cudaMalloc(&base_, bytes)); }
  ~Arena() { cudaFree(base_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  void clear() { used_ = 0, guards_.clear(); }
  template <typename Value>
  Value* take(int64_t count) {
    const size_t bytes = (count * sizeof(Value) + 255) / 256 * 256;
    if (used_ + bytes + kGuard > room_) std::printf("arena too small\n"), std::exit(1);
    char* part = base_ + used_;
    CHECK(cudaMemset(part, 0xff, bytes));
    CHECK(cudaMemset(part + bytes, 0x5a, kGuard));
    guards_.push_back(part + bytes);
    used_ += bytes + kGuard;
    return reinterpret_cast<Value*>(part);
  }
  bool guards_whole() const {
    for (const char* guard : guards_) {
      unsigned char bytes[kGuard];
      CHECK(cudaMemcpy(bytes, guard, kGuard, cudaMemcpyDeviceToHost));
      if (!std::all_of(bytes, bytes + kGuard, [](unsigned char byte) { return byte == 0x5a; })) return false;
    }
    return true;
  }

 private:
  char* base_ = nullptr;
  size_t room_, used_ = 0;
  std::vector<char*> guards_;
};

template <typename Value>
void upload(Value* to, const std::vector<Value>& from) {
  if (!from.empty()) CHECK(cudaMemcpy(to, from.data(), from.size() * sizeof(Value), cudaMemcpyHostToDevice));
}
template <typename Value>
std::vector<Value> download(const Value* from, int64_t count) {
  std::vector<Value> to(count);
  if (count > 0) CHECK(cudaMemcpy(to.data(), from, count * sizeof(Value), cudaMemcpyDeviceToHost));
  return to;
}

double uniform(uint64_t bits) { return static_cast<double>(hash(bits) >> 11) * 0x1p-53; }

uint16_t narrow(DType dtype, float value) {
  return dtype == DType::kBFloat16 ? __bfloat16_as_ushort(__float2bfloat16_rn(value))
                                   : __half_as_ushort(__float2half_rn(value));
}
float widen(DType dtype, uint16_t bits) {
  return dtype == DType::kBFloat16 ? __bfloat162float(__ushort_as_bfloat16(bits))
                                   : __half2float(__ushort_as_half(bits));
}
bool is_nan(DType dtype, uint16_t bits) { return (bits & 0x7fff) > (dtype == DType::kBFloat16 ? 0x7f80 : 0x7c00); }
constexpr uint16_t kGarbage = 0xffff;

enum class Pattern { kNone, kOnePair, kFew, kThird, kAll, kUnion };
enum class Weights { kNull, kZeroOne, kFraction };
enum class Room { kAll, kEntries, kPairs, kNone };

struct Case {
  DType dtype;
  int width, blocks, chunks, reported, cut;  // blocks of a chunk; chunks reported at once; tokens the last block lacks
  Pattern pattern;
  bool gated;
  Weights weights;
  Room room;
  bool report, nan;
  int sm_count;
};

struct Entry {
  int neuron;
  bool halves[2];
  uint32_t tokens[4];
  bool has(int token) const { return tokens[token / 32] >> token % 32 & 1; }
};

struct Block {
  Counts counts{};
  std::vector<Entry> entries;
  std::vector<uint16_t> gate, up;  // of pairs
};

// Values come from the place alone.
struct Problem {
  Case of;
  uint64_t seed;
  int64_t tokens;
  std::vector<Block> blocks;
  std::vector<float> weights;

  Problem(const Case& c, uint64_t s) : of(c), seed(s), tokens(int64_t{c.blocks} * c.chunks * kBlockTokens - c.cut) {
    for (int b = 0; b < c.blocks * c.chunks; ++b) blocks.push_back(make_block(b));
    for (int64_t t = 0; c.weights != Weights::kNull && t < tokens; ++t) {
      const double random = uniform(seed * 31 + t);
      const bool zero = t % 7 == 0 || random < 0.2;
      weights.push_back(zero ? 0.0f : c.weights == Weights::kZeroOne ? 1.0f : static_cast<float>(random));
    }
  }

  uint64_t place(int64_t block, int neuron, int token) const {
    return seed * 0x100000001b3ull + (block * 65536 + neuron) * kBlockTokens + token;
  }
  uint16_t gate_at(int64_t block, int neuron, int token) const {
    if (of.nan && (block * kBlockTokens + token) % 7 == 0) return neuron % 2 == 0 ? 0x7fff : 0xffff;
    return narrow(of.dtype, 0.01f + static_cast<float>(uniform(place(block, neuron, token))));
  }
  // A token of a block has a one in x, at its place there: u is a value of Wu, and the bias.
  bool biased() const { return of.gated && seed % 3 == 0; }
  uint16_t weight_at(int neuron, int token) const {
    const uint64_t random = hash(place(0, neuron, token) ^ 0x5bd1e995);
    if (of.pattern == Pattern::kUnion) return narrow(of.dtype, 1.0f + (random % 16) / 64.0f);
    if (random % 16 < 2) return 0x0000;
    return narrow(of.dtype, static_cast<float>(random >> 40) * 0x1p-23f - 1.0f);
  }
  uint16_t bias_at(int neuron) const {
    return narrow(of.dtype, static_cast<float>(uniform(seed * 7 + neuron)) - 0.5f);
  }
  uint16_t up_at(int neuron, int token) const {
    const uint16_t weight = weight_at(neuron, token);
    return biased() ? narrow(of.dtype, widen(of.dtype, weight) + widen(of.dtype, bias_at(neuron))) : weight;
  }
  uint16_t h_of(uint16_t gate, uint16_t up) const {
    return of.gated ? narrow(of.dtype, widen(of.dtype, gate) * widen(of.dtype, up)) : gate;
  }

  void draw(int64_t block, int neuron, uint32_t (&bits)[4]) const {
    const uint64_t at = hash(place(block, neuron, 0) + 0x1234567);
    const int there = static_cast<int>(std::min<int64_t>(kBlockTokens, tokens - block * kBlockTokens));
    double shares[kBlockTokens] = {};
    switch (of.pattern) {
      case Pattern::kNone: return;
      case Pattern::kOnePair:
        if (neuron == of.width * 2 / 3 && (block + static_cast<int64_t>(seed)) % 2 == 0) shares[at % there] = 1.0;
        break;
      case Pattern::kFew: std::fill(shares, shares + kBlockTokens, 0.01); break;
      case Pattern::kThird: std::fill(shares, shares + kBlockTokens, 0.3); break;
      case Pattern::kAll: std::fill(shares, shares + kBlockTokens, 1.0); break;
      case Pattern::kUnion: {
        if (uniform(at) >= 1340.0 / 5632.0) return;
        const int token = static_cast<int>(at >> 20) & 127;
        const bool one_half = (at >> 40) % 2 == 0;
        for (int t = 0; t < kBlockTokens; ++t) {
          shares[t] = t == token                                   ? 1.0
                      : !one_half                                  ? 1.87 / 127
                      : t / kHalfTokens == token / kHalfTokens ? 1.87 / 63
                                                                   : 0.0;
        }
      }
    }
    for (int t = 0; t < there; ++t) {
      if (shares[t] > 0.0 && uniform(place(block, neuron, t) * 3 + 1) < shares[t]) bits[t / 32] |= 1u << t % 32;
    }
  }

  Block make_block(int64_t b) const {
    std::vector<Entry> classes[3];
    for (int n = 0; n < of.width; ++n) {
      Entry entry{n, {}, {}};
      draw(b, n, entry.tokens);
      for (int half = 0; half < 2; ++half) {
        // Some halves are listed though nothing is active in them, as the gate does in nearly full tiles.
        const bool listed = of.pattern != Pattern::kUnion && hash(place(b, n, half) + 77) % 32 == 0;
        entry.halves[half] = (entry.tokens[2 * half] | entry.tokens[2 * half + 1]) != 0 || listed;
      }
      if (entry.halves[0] || entry.halves[1]) classes[!entry.halves[1] ? 0 : entry.halves[0] ? 1 : 2].push_back(entry);
    }
    Block block;
    block.counts = {static_cast<int>(classes[0].size()), static_cast<int>(classes[1].size()),
                    static_cast<int>(classes[2].size())};
    for (const auto& entries : classes) block.entries.insert(block.entries.end(), entries.begin(), entries.end());
    for (const Entry& e : block.entries) {
      for (int t = 0; t < kBlockTokens; ++t) {
        if (!e.has(t)) continue;
        block.gate.push_back(gate_at(b, e.neuron, t));
        if (of.gated) block.up.push_back(up_at(e.neuron, t));
      }
    }
    return block;
  }

  // Columns of blocks [first, first + count): `pair` (of block, entry, token, index of the block's pair) where there is
  // a pair, `other` elsewhere in active halves.
  template <typename Pair, typename Other>
  std::vector<uint16_t> columns(int64_t first, int count, Pair pair, Other other) const {
    std::vector<uint16_t> result(int64_t{count} * of.width * kBlockTokens, kGarbage);
    for (int b = 0; b < count; ++b) {
      int64_t index = 0;
      for (const Entry& e : blocks[first + b].entries) {
        uint16_t* column = result.data() + (int64_t{b} * of.width + e.neuron) * kBlockTokens;
        for (int t = 0; t < kBlockTokens; ++t) {
          if (e.has(t)) {
            column[t] = pair(first + b, e, t, index++);
          } else if (e.halves[t / kHalfTokens]) {
            column[t] = other(first + b, e, t);
          }
        }
      }
    }
    return result;
  }
  std::vector<uint16_t> gate_columns(int64_t first, int count) const {
    return columns(first, count, [&](int64_t b, const Entry&, int, int64_t i) { return blocks[b].gate[i]; },
                   [](int64_t, const Entry&, int) { return uint16_t{0}; });
  }
};

int round_up(int64_t value, int unit) { return static_cast<int>((value + unit - 1) / unit * unit); }

// Device memory of a run, and what calls get.
struct Run {
  const Problem& problem;
  Device device;
  Ffn ffn{};
  Active active{};
  Saving saving{};
  Training training{};
  int64_t all_blocks;

  Run(Arena& arena, const Problem& p, int64_t room_entries, int64_t room_pairs) : problem(p) {
    const Case& c = p.of;
    device = {c.sm_count, 9, 0};
    all_blocks = static_cast<int64_t>(p.blocks.size());
    ffn.dtype = c.dtype, ffn.tokens = p.tokens, ffn.hidden = kBlockTokens, ffn.width = c.width;
    active.words = (c.width + 31) / 32, active.row = round_up(c.width, 8);
    active.masks = arena.take<uint32_t>(int64_t{c.blocks} * 2 * active.words);
    active.counts = arena.take<Counts>(c.blocks);
    active.neurons = arena.take<uint16_t>(int64_t{c.blocks} * active.row);
    active.columns = arena.take<uint16_t>(column_count(c.blocks));
    if (c.gated) bring_up(arena);
    saving.parts = c.gated ? 2 : 1;
    saving.groups = sum_groups(active.row, c.gated);
    saving.entries = arena.take<uint4>(int64_t{c.blocks} * active.row);
    saving.slots = arena.take<uint64_t>(kSlots);
    CHECK(cudaMemset(saving.slots, 0, kSlots * sizeof(uint64_t)));
    saving.rows = int64_t{c.blocks} * c.reported;
    saving.activity = arena.take<float>(saving.rows * saving.parts * c.width);
    saving.l1 = arena.take<float>(saving.rows * saving.groups);
    State& state = training.state;
    state.entries = room_entries, state.pairs = room_pairs;
    state.totals = arena.take<int64_t>(3);
    state.blocks = arena.take<BlockState>(all_blocks);
    state.tokens = arena.take<uint4>(room_entries);
    state.first_pairs = arena.take<uint32_t>(room_entries / kGroup);
    state.neurons = arena.take<uint16_t>(room_entries);
    state.values = arena.take<uint16_t>(room_pairs * (c.gated ? 2 : 1));
    CHECK(cudaMemset(state.totals, 0, 3 * sizeof(int64_t)));
    if (c.weights != Weights::kNull) {
      float* weights = arena.take<float>(p.tokens);
      upload(weights, p.weights);
      training.token_weight = weights;
    }
    if (c.report) training.report = arena.take<float>(1 + c.width);
  }

  int64_t column_count(int blocks) const { return int64_t{blocks} * problem.of.width * kBlockTokens; }
  uint16_t* columns() const { return static_cast<uint16_t*>(active.columns); }

  // x, Wu and its bias.
  void bring_up(Arena& arena) {
    const int width = problem.of.width;
    const DType dtype = problem.of.dtype;
    std::vector<uint16_t> x(problem.tokens * kBlockTokens), up(int64_t{width} * kBlockTokens), bias(width);
    for (int64_t t = 0; t < problem.tokens; ++t) x[t * kBlockTokens + t % kBlockTokens] = narrow(dtype, 1.0f);
    for (int n = 0; n < width; ++n) {
      for (int t = 0; t < kBlockTokens; ++t) up[int64_t{n} * kBlockTokens + t] = problem.weight_at(n, t);
      bias[n] = problem.bias_at(n);
    }
    const auto bring = [&](const std::vector<uint16_t>& values) {
      uint16_t* to = arena.take<uint16_t>(values.size());
      upload(to, values);
      return to;
    };
    ffn.x = bring(x), ffn.up.data = bring(up), ffn.b_up = problem.biased() ? bring(bias) : nullptr;
  }

  Chunk chunk(int64_t first_block, int blocks) const {
    Chunk result{};
    result.first = first_block * kBlockTokens;
    result.tokens = std::min(problem.tokens - result.first, int64_t{blocks} * kBlockTokens);
    result.active = active;
    result.active.blocks = blocks;
    return result;
  }

  void poison(void* data, int64_t bytes) const {
    if (data != nullptr) CHECK(cudaMemset(data, 0xff, bytes));
  }

  // What gate and list leave.
  void bring_forward(int64_t first, int count) const {
    std::vector<uint32_t> masks(int64_t{count} * 2 * active.words);
    std::vector<Counts> counts(count);
    std::vector<uint16_t> neurons(int64_t{count} * active.row, kGarbage);
    for (int b = 0; b < count; ++b) {
      const Block& block = problem.blocks[first + b];
      counts[b] = block.counts;
      for (size_t i = 0; i < block.entries.size(); ++i) {
        const Entry& e = block.entries[i];
        neurons[int64_t{b} * active.row + i] = static_cast<uint16_t>(e.neuron);
        for (int half = 0; half < 2; ++half) {
          if (e.halves[half]) masks[(int64_t{b} * 2 + half) * active.words + e.neuron / 32] |= 1u << e.neuron % 32;
        }
      }
    }
    upload(active.masks, masks);
    upload(active.counts, counts);
    upload(active.neurons, neurons);
    upload(columns(), problem.gate_columns(first, count));
  }
};

// Where kept blocks go.
struct Kept {
  int64_t blocks = 0, entries = 0, pairs = 0;
  std::vector<BlockState> states;
};
Kept keep(const Problem& p, int64_t room_entries, int64_t room_pairs) {
  Kept kept;
  for (const Block& block : p.blocks) {
    const int64_t entries = kept.entries + round_up(block.counts.all(), kGroup);
    const int64_t pairs = kept.pairs + static_cast<int64_t>(block.gate.size());
    if (entries > room_entries || pairs > room_pairs) break;
    kept.states.push_back({block.counts, static_cast<uint32_t>(block.gate.size()), kept.entries, kept.pairs});
    ++kept.blocks, kept.entries = entries, kept.pairs = pairs;
  }
  return kept;
}

struct Judge {
  const Case& of;
  bool right = true;
  std::string first_wrong;

  void expect(bool good, const std::string& what) {
    if (!good && right) first_wrong = what;
    right = right && good;
  }
  template <typename Value>
  void expect_same(const std::vector<Value>& seen, const std::vector<Value>& expected, const char* what) {
    const bool same = seen.size() == expected.size() &&
                      (seen.empty() || std::memcmp(seen.data(), expected.data(), seen.size() * sizeof(Value)) == 0);
    if (same) return;
    size_t i = 0;
    while (i < std::min(seen.size(), expected.size()) && std::memcmp(&seen[i], &expected[i], sizeof(Value)) == 0) ++i;
    expect(false, std::string(what) + " at " + std::to_string(i));
  }
  // Any NaN will do where one is due, and any zero; what was never to be written is kGarbage in both.
  void expect_values(const std::vector<uint16_t>& seen, const std::vector<uint16_t>& expected, const char* what) {
    for (size_t i = 0; i < seen.size(); ++i) {
      const bool nan = expected[i] != kGarbage && is_nan(of.dtype, expected[i]);
      const bool zero = ((seen[i] | expected[i]) & 0x7fff) == 0;
      if (nan ? !is_nan(of.dtype, seen[i]) : seen[i] != expected[i] && !zero) {
        char text[96];
        std::snprintf(text, sizeof(text), "%s at %zu: %04x for %04x", what, i, seen[i], expected[i]);
        return expect(false, text);
      }
    }
  }
  // NaN in `expected`: must be NaN.
  void expect_near(const std::vector<float>& seen, const std::vector<double>& expected, const char* what) {
    for (size_t i = 0; i < seen.size(); ++i) {
      const bool good = std::isnan(expected[i]) ? std::isnan(seen[i])
                                                : std::fabs(seen[i] - expected[i]) <= 3e-5 * std::fabs(expected[i]);
      if (!good) {
        char text[96];
        std::snprintf(text, sizeof(text), "%s at %zu: %g for %g", what, i, seen[i], expected[i]);
        return expect(false, text);
      }
    }
  }
};

uint4 tokens_of(const Entry& e) { return {e.tokens[0], e.tokens[1], e.tokens[2], e.tokens[3]}; }

void check_forward(const Run& run, const Kept& kept, Judge& judge) {
  const Problem& p = run.problem;
  const Case& c = p.of;
  Saving saving = run.saving;
  std::vector<double> report(1 + c.width, 0.0);
  std::vector<double> activity, l1;  // of the rows that wait
  for (int64_t first = 0; first < run.all_blocks; first += c.blocks) {
    run.bring_forward(first, c.blocks);
    if (saving.waiting == 0) {
      run.poison(saving.activity, saving.rows * saving.parts * c.width * 4);
      run.poison(saving.l1, saving.rows * saving.groups * 4);
      activity.assign(saving.rows * saving.parts * c.width, NAN), l1.assign(saving.rows, NAN);
    }
    ++saving.turn;
    CHECK(launch_save(run.ffn, run.chunk(first, c.blocks), saving, run.training, run.device, nullptr));
    if (c.gated) {
      CHECK(launch_up_save(run.ffn, run.chunk(first, c.blocks), saving, run.training, run.device, nullptr));
    }
    const int64_t before = saving.waiting;
    saving.waiting += c.blocks;
    const bool full = saving.waiting == saving.rows || first + c.blocks == run.all_blocks;
    if (c.report && full) CHECK(launch_report(run.ffn, saving, run.training, nullptr));
    CHECK(cudaDeviceSynchronize());

    for (int b = 0; c.report && b < c.blocks; ++b) {
      const Block& block = p.blocks[first + b];
      const int64_t row = before + b;
      std::fill_n(activity.begin() + row * saving.parts * c.width, saving.parts * c.width, 0.0);
      l1[row] = 0.0;
      uint32_t index = 0;
      for (const Entry& e : block.entries) {
        for (int t = 0; t < kBlockTokens; ++t) {
          if (!e.has(t)) continue;
          const uint16_t h = p.h_of(block.gate[index], c.gated ? block.up[index] : 0);
          ++index;
          const double weight = p.weights.empty() ? 1.0 : p.weights[(first + b) * kBlockTokens + t];
          if ((h & 0x7fff) == 0 || weight == 0.0) continue;
          activity[(row * saving.parts + (c.gated ? t / kHalfTokens : 0)) * c.width + e.neuron] += weight;
          report[1 + e.neuron] += weight;
          l1[row] += weight * std::fabs(widen(c.dtype, h));
        }
      }
      report[0] += l1[row];
    }
    judge.expect_near(download(saving.activity, activity.size()), activity, "activity");
    const auto sums = download(saving.l1, saving.rows * saving.groups);
    std::vector<float> rows(saving.rows, 0.0f);
    for (size_t i = 0; i < sums.size(); ++i) rows[i / saving.groups] += sums[i];
    judge.expect_near(rows, l1, "l1");
    if (full) saving.waiting = 0, saving.reported = true;
    const auto h = p.columns(first, c.blocks, [&](int64_t b, const Entry&, int, int64_t i) {
      return p.h_of(p.blocks[b].gate[i], c.gated ? p.blocks[b].up[i] : 0);
    }, [](int64_t, const Entry&, int) { return uint16_t{0}; });
    judge.expect_values(download(run.columns(), h.size()), h, "h");
  }
  if (c.report) judge.expect_near(download(run.training.report, 1 + c.width), report, "report");

  const State& state = run.training.state;
  judge.expect_same(download(state.totals, 3), {kept.blocks, kept.entries, kept.pairs}, "totals");
  std::vector<BlockState> states(run.all_blocks);
  std::memset(static_cast<void*>(states.data()), 0xff, states.size() * sizeof(BlockState));
  std::copy(kept.states.begin(), kept.states.end(), states.begin());
  judge.expect_same(download(state.blocks, run.all_blocks), states, "blocks' states");
  std::vector<uint4> tokens(state.entries, uint4{~0u, ~0u, ~0u, ~0u});
  std::vector<uint16_t> neurons(state.entries, kGarbage), gate(state.pairs, kGarbage), up(state.pairs, kGarbage);
  std::vector<uint32_t> first_pairs(state.entries / kGroup, ~0u);
  for (int64_t b = 0; b < kept.blocks; ++b) {
    const Block& block = p.blocks[b];
    const BlockState& at = kept.states[b];
    uint32_t pairs = 0;
    for (int i = 0; i < round_up(block.entries.size(), kGroup); ++i) {
      const bool there = i < static_cast<int>(block.entries.size());
      const uint4 bits = there ? tokens_of(block.entries[i]) : uint4{};
      if (i % kGroup == 0) first_pairs[(at.first_entry + i) / kGroup] = pairs;
      tokens[at.first_entry + i] = bits;
      neurons[at.first_entry + i] = there ? static_cast<uint16_t>(block.entries[i].neuron) : 0;
      for (const uint32_t word : {bits.x, bits.y, bits.z, bits.w}) pairs += __builtin_popcount(word);
    }
    std::copy(block.gate.begin(), block.gate.end(), gate.begin() + at.first_pair);
    std::copy(block.up.begin(), block.up.end(), up.begin() + at.first_pair);
  }
  judge.expect_same(download(state.tokens, state.entries), tokens, "state's tokens");
  judge.expect_same(download(state.neurons, state.entries), neurons, "state's neurons");
  judge.expect_same(download(state.first_pairs, state.entries / kGroup), first_pairs, "state's first pairs");
  const int values = c.gated ? 2 : 1;  // of a pair
  const auto seen = download(static_cast<uint16_t*>(state.values), state.pairs * values);
  std::vector<uint16_t> seen_gate(state.pairs), seen_up(state.pairs, kGarbage);
  for (int64_t i = 0; i < state.pairs; ++i) {
    seen_gate[i] = seen[i * values];
    if (c.gated) seen_up[i] = seen[i * values + 1];
  }
  judge.expect_same(seen_gate, gate, "state's gate");
  if (c.gated) judge.expect_values(seen_up, up, "state's up");
}

bool check(Arena& arena, const Case& c, uint64_t seed) {
  const Problem problem(c, seed);
  const Kept all = keep(problem, INT64_MAX, INT64_MAX);
  int64_t entries = all.entries, pairs = all.pairs;  // just enough
  if (c.room == Room::kEntries) entries = std::max<int64_t>(0, entries - kGroup) * 3 / 4 / kGroup * kGroup;
  if (c.room == Room::kPairs) pairs = std::max<int64_t>(0, pairs - 1) * 3 / 4;
  if (c.room == Room::kNone) entries = pairs = 0;
  arena.clear();
  const Run run(arena, problem, entries, pairs);
  const Kept kept = keep(problem, entries, pairs);
  Judge judge{c};
  check_forward(run, kept, judge);
  judge.expect(arena.guards_whole(), "guards");
  if (!judge.right) {
    std::printf("WRONG %s F=%d blocks %d x %d, reported %d, cut %d, pattern %d, %s, weights %d, room %d (%lld of %lld), "
                "report %d, nan %d, %d SMs: %s\n",
                c.dtype == DType::kBFloat16 ? "bf16" : "fp16", c.width, c.blocks, c.chunks, c.reported, c.cut,
                static_cast<int>(c.pattern), c.gated ? "gated" : "plain", static_cast<int>(c.weights),
                static_cast<int>(c.room), static_cast<long long>(kept.blocks), static_cast<long long>(run.all_blocks),
                c.report, c.nan, c.sm_count, judge.first_wrong.c_str());
  }
  return judge.right;
}

void time(Arena& arena, int sm_count) {
  constexpr int kBlocks = 64, kChunks = 2, kRepeats = 25;
  constexpr size_t kFlush = size_t{256} << 20;
  const Case c{DType::kBFloat16, 5632,           kBlocks,    kChunks, kChunks, 0,       Pattern::kUnion,
               true,             Weights::kNull, Room::kAll, true,    false,   sm_count};
  const Problem problem(c, 7);
  const Kept kept = keep(problem, INT64_MAX, INT64_MAX);
  arena.clear();
  char* flush = arena.take<char>(kFlush);
  // A set of columns for each chunk.
  std::vector<Run> runs;
  for (int i = 0; i < kChunks; ++i) runs.emplace_back(arena, problem, kept.entries, kept.pairs);
  for (int i = 0; i < kChunks; ++i) runs[i].bring_forward(i * kBlocks, kBlocks);
  const Ffn& ffn = runs[0].ffn;
  const Training& training = runs[0].training;
  Saving saving = runs[0].saving;
  const auto save = [&](int i) {
    saving.turn = i + 1;
    saving.waiting = int64_t{i} * kBlocks;
    return launch_save(ffn, runs[i].chunk(i * kBlocks, kBlocks), saving, training, runs[0].device, nullptr);
  };
  const auto report = [&] {
    saving.waiting = int64_t{kChunks} * kBlocks;
    return launch_report(ffn, saving, training, nullptr);
  };

  cudaEvent_t events[3];
  for (cudaEvent_t& event : events) CHECK(cudaEventCreate(&event));
  const auto between = [&](int from, int to) {
    float milliseconds = 0.0f;
    CHECK(cudaEventElapsedTime(&milliseconds, events[from], events[to]));
    return milliseconds * 1e3f;
  };
  std::vector<float> saves, reports, whole;
  for (int repeat = 0; repeat < 2 * kRepeats; ++repeat) {
    const bool apart = repeat < kRepeats;
    CHECK(cudaMemset(training.state.totals, 0, 3 * sizeof(int64_t)));
    CHECK(cudaMemset(saving.slots, 0, kSlots * sizeof(uint64_t)));
    CHECK(cudaMemset(flush, repeat, kFlush));
    CHECK(cudaEventRecord(events[0]));
    for (int i = 0; i < kChunks; ++i) CHECK(save(i));
    if (apart) CHECK(cudaEventRecord(events[1]));
    CHECK(report());
    CHECK(cudaEventRecord(events[2]));
    CHECK(cudaEventSynchronize(events[2]));
    if (apart) saves.push_back(between(0, 1)), reports.push_back(between(1, 2));
    if (!apart) whole.push_back(between(0, 2));
  }
  for (cudaEvent_t event : events) CHECK(cudaEventDestroy(event));
  const auto median = [](std::vector<float> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  };
  std::printf("us of all chunks, T=%lld F=%d bf16: %lld pairs, %lld entries; %d chunks\n",
              static_cast<long long>(problem.tokens), c.width, static_cast<long long>(kept.pairs),
              static_cast<long long>(kept.entries), kChunks);
  std::printf("save     %8.1f\nreport   %8.1f\ntogether %8.1f (no event between)\n", median(saves), median(reports),
              median(whole));
  int64_t totals[3];
  CHECK(cudaMemcpy(totals, training.state.totals, sizeof(totals), cudaMemcpyDeviceToHost));
  if (totals[0] != runs[0].all_blocks) std::printf("WRONG: %lld blocks kept\n", static_cast<long long>(totals[0]));
}

}  // namespace

int main(int argc, char** argv) {
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  Arena arena(size_t{3} << 30);
  if (argc > 1 && std::strcmp(argv[1], "time") == 0) {
    time(arena, properties.multiProcessorCount);
    return 0;
  }
  int checks = 0, failures = 0;
  const auto expect = [&](const Case& c) {
    ++checks;
    failures += !check(arena, c, checks);
  };
  const Pattern patterns[] = {Pattern::kNone, Pattern::kOnePair, Pattern::kFew, Pattern::kThird, Pattern::kAll};
  const Weights weights[] = {Weights::kNull, Weights::kZeroOne, Weights::kFraction};
  const Room rooms[] = {Room::kAll, Room::kEntries, Room::kPairs, Room::kNone};
  // What is not varied on its own takes turns. Few multiprocessors: warps that work on several groups.
  int turn = 0;
  const auto expect_turn = [&](int width, int blocks, int chunks, Pattern pattern, bool gated, Weights weight,
                               Room room) {
    const int i = turn++;
    const DType dtype = i % 2 == 0 ? DType::kBFloat16 : DType::kFloat16;
    const int sm_count = i % 4 == 1 ? 1 : i % 4 == 2 ? 5 : properties.multiProcessorCount;
    expect({dtype, width, blocks, chunks, 1 + i % 3, i % 5 * 31, pattern, gated, weight, room, i % 7 != 3, i % 3 != 1,
            sm_count});
  };
  for (const int width : {16, 70, 344}) {
    for (const int blocks : {1, 2, 5}) {
      for (const Pattern pattern : patterns) {
        for (const bool gated : {true, false}) {
          for (const Weights weight : weights) {
            for (const Room room : rooms) expect_turn(width, blocks, 1 + turn % 3, pattern, gated, weight, room);
          }
        }
      }
    }
  }
  for (const int width : {1001, 5632}) {
    for (const int blocks : {1, 2, 5}) {
      for (const Pattern pattern : patterns) {
        const int i = turn;
        expect_turn(width, blocks, blocks == 5 ? 1 : 2, pattern, i % 3 != 0, weights[i % 3], rooms[i % 4]);
      }
    }
  }
  expect_turn(5632, 5, 2, Pattern::kUnion, true, Weights::kZeroOne, Room::kPairs);
  expect_turn(40, kMaxBlocks, 2, Pattern::kThird, true, Weights::kFraction, Room::kEntries);
  expect_turn(40, 37, 3, Pattern::kFew, true, Weights::kNull, Room::kAll);
  expect_turn(65536, 1, 1, Pattern::kFew, true, Weights::kNull, Room::kAll);
  expect_turn(65536, 1, 1, Pattern::kAll, false, Weights::kFraction, Room::kAll);
  std::printf("%d checks, %d wrong\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
