// Checks the weights' gradients (sorting, sums of kept blocks' pairs, products of the other blocks) against sums in
// double; or times them. Leaves with 1 where anything is wrong.
//
// Built by kernels/tests/check_cuda.sh.
//   ./training_weights_check [time]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "sm90/training/weights.h"
#include "tests/check.cuh"

namespace {

using namespace twell;
using namespace twell::sm90;
using checks::hash;

// Device memory that starts as NaN in every type, with a guard behind it.
struct Buffer {
  static constexpr size_t kGuard = 1024;
  char* data = nullptr;
  size_t bytes = 0;
  explicit Buffer(size_t size) : bytes(size) {
    CHECK(cudaMalloc(&data, bytes + kGuard));
    poison();
  }
  template <typename V>
  explicit Buffer(const std::vector<V>& values) : Buffer(values.size() * sizeof(V)) {
    fill(values);
  }
  ~Buffer() { cudaFree(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void poison() {
    CHECK(cudaMemset(data, 0xff, bytes));
    CHECK(cudaMemset(data + bytes, 0x5a, kGuard));
  }
  template <typename V>
  void fill(const std::vector<V>& values) {
    CHECK(cudaMemcpy(data, values.data(), values.size() * sizeof(V), cudaMemcpyHostToDevice));
  }
  template <typename V>
  V* as() const {
    return reinterpret_cast<V*>(data);
  }
  template <typename V>
  std::vector<V> read() const {
    std::vector<V> values(bytes / sizeof(V));
    CHECK(cudaMemcpy(values.data(), data, values.size() * sizeof(V), cudaMemcpyDeviceToHost));
    return values;
  }
  bool guard_whole() const {
    std::vector<unsigned char> guard(kGuard);
    CHECK(cudaMemcpy(guard.data(), data + bytes, kGuard, cudaMemcpyDeviceToHost));
    return std::all_of(guard.begin(), guard.end(), [](unsigned char byte) { return byte == 0x5a; });
  }
};

struct Random {
  uint64_t state;
  float next() { return static_cast<float>(hash(state++) >> 40) * 0x1p-24f; }  // [0, 1)
  int below(int n) { return static_cast<int>(hash(state++) % n); }
};

uint16_t narrow(DType dtype, float value) {
  uint16_t bits;
  const __nv_bfloat16 bfloat = __float2bfloat16_rn(value);
  const __half half = __float2half_rn(value);
  std::memcpy(&bits, dtype == DType::kBFloat16 ? static_cast<const void*>(&bfloat) : &half, 2);
  return bits;
}
float widen(DType dtype, uint16_t bits) {
  __nv_bfloat16 bfloat;
  __half half;
  std::memcpy(static_cast<void*>(&bfloat), &bits, 2);
  std::memcpy(static_cast<void*>(&half), &bits, 2);
  return dtype == DType::kBFloat16 ? __bfloat162float(bfloat) : __half2float(half);
}

template <typename Body>
void parallel_for(int count, const Body& body) {
  const int workers = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> threads;
  for (int w = 0; w < workers; ++w) {
    threads.emplace_back([&, w] {
      for (int i = w; i < count; i += workers) body(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

enum : int { kNoDown = 1, kNoGate = 2, kNoUp = 4, kNoBiases = 8 };

struct Case {
  DType dtype;
  int tokens, hidden, width;
  float density;  // negative: one pair
  bool skewed, gated;
  int kept, chunk_blocks;
  int missing;     // of the gradients
  int64_t room;    // pairs, for the size of the scratch; 0: as many as there are
  int heavy = -1;  // how many neurons are to be heavy; negative: any number
  int blocks() const { return (tokens + kBlockTokens - 1) / kBlockTokens; }
  std::string name() const {
    char text[200];
    std::snprintf(text, sizeof(text), "%s T=%d D=%d F=%d density %g%s %s kept %d/%d by %d missing %d room %lld",
                  dtype == DType::kBFloat16 ? "bf16" : "fp16", tokens, hidden, width, density, skewed ? " skewed" : "",
                  gated ? "gated" : "plain", kept, blocks(), chunk_blocks, missing, static_cast<long long>(room));
    return text;
  }
};

// All pairs by neuron, then by token.
struct Pairs {
  std::vector<int64_t> first;
  std::vector<int32_t> tokens;
  std::vector<uint16_t> g, u, h, du, dg;

  void add(const Case& c, int token, Random& random) {
    const float g_value = widen(c.dtype, narrow(c.dtype, 0.1f + random.next()));
    const float u_value = c.gated ? widen(c.dtype, narrow(c.dtype, 2.0f * random.next() - 1.0f)) : 1.0f;
    const float dh = 2.0f * random.next() - 1.0f;
    tokens.push_back(token);
    g.push_back(narrow(c.dtype, g_value));
    u.push_back(narrow(c.dtype, u_value));
    h.push_back(narrow(c.dtype, g_value * u_value));
    du.push_back(narrow(c.dtype, dh * g_value));
    dg.push_back(narrow(c.dtype, dh * u_value));
  }
};

Pairs make_pairs(const Case& c, Random& random) {
  // Shares as 1 / (1 + rank / 47), the ranks in disorder.
  std::vector<float> shares(c.width, c.density);
  if (c.skewed) {
    double sum = 0.0;
    for (int n = 0; n < c.width; ++n) sum += shares[n] = 1.0f / (1.0f + n / 47.0f);
    for (float& share : shares) share = std::min(1.0, share * c.density * c.width / sum);
    for (int n = c.width - 1; n > 0; --n) std::swap(shares[n], shares[random.below(n + 1)]);
  }
  Pairs pairs;
  const int one_neuron = random.below(c.width), one_token = random.below(c.tokens);
  for (int n = 0; n < c.width; ++n) {
    pairs.first.push_back(static_cast<int64_t>(pairs.tokens.size()));
    for (int t = 0; t < c.tokens; ++t) {
      const bool active = c.density < 0.0f ? n == one_neuron && t == one_token : random.next() < shares[n];
      if (active) pairs.add(c, t, random);
    }
  }
  pairs.first.push_back(static_cast<int64_t>(pairs.tokens.size()));
  return pairs;
}

std::vector<uint16_t> make_values(DType dtype, int64_t count, Random& random) {
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) value = narrow(dtype, 2.0f * random.next() - 1.0f);
  return values;
}

// Everything on the device that a case needs.
struct Setup {
  Case c;
  Pairs pairs;
  std::vector<uint16_t> x_host, dy_host;
  std::vector<int64_t> first_kept;
  std::vector<uint32_t> places_kept;  // 0xffffffff where a block has no pair of the neuron
  Buffer x, dy, totals, block_states, entry_tokens, entry_neurons;
  Buffer first, slots, places, sorted_pairs, h, partials;
  Buffer down, gate, up, b_gate, b_up;
  Ffn ffn{};
  State state{};
  Sorted sorted{};
  Gradients gradients{};

  static int64_t entry_room(const Case& c) { return int64_t{c.blocks()} * ((c.width + 31) / 32 + 1) * 32; }

  Setup(const Case& of, Random random)
      : c(of),
        pairs(make_pairs(c, random)),
        x_host(make_values(c.dtype, int64_t{c.tokens} * c.hidden, random)),
        dy_host(make_values(c.dtype, int64_t{c.tokens} * c.hidden, random)),
        x(x_host),
        dy(dy_host),
        totals(24),
        block_states(c.blocks() * sizeof(BlockState)),
        entry_tokens(entry_room(c) * sizeof(uint4)),
        entry_neurons(entry_room(c) * 2),
        first((c.width + 1) * 8),
        slots(sort_slots(c.width) * 8),
        places(int64_t{c.kept} * c.width * 4),
        sorted_pairs(pairs.tokens.size() * 8),
        h(pairs.tokens.size() * 2),
        partials(partial_bytes()),
        down(matrix_bytes()),
        gate(matrix_bytes()),
        up(matrix_bytes()),
        b_gate(c.width * 2),
        b_up(c.width * 2) {
    ffn = make_ffn();
    state.totals = totals.as<int64_t>();
    state.blocks = block_states.as<BlockState>();
    state.tokens = entry_tokens.as<uint4>();
    state.neurons = entry_neurons.as<uint16_t>();
    state.pairs = room();
    sorted = {first.as<int64_t>(), places.as<uint32_t>(), sorted_pairs.as<uint2>(), h.data, slots.as<uint64_t>()};
    gradients.dy = c.missing & kNoDown ? nullptr : dy.data;
    gradients.down = c.missing & kNoDown ? nullptr : down.data;
    gradients.gate = c.missing & kNoGate ? nullptr : gate.data;
    gradients.up = c.missing & kNoUp || !c.gated ? nullptr : up.data;
    gradients.b_gate = c.missing & kNoBiases ? nullptr : b_gate.data;
    gradients.b_up = c.missing & kNoBiases || !c.gated ? nullptr : b_up.data;
    fill_state();
    fill_sorted();
  }

  int64_t room() const { return c.room > 0 ? c.room : static_cast<int64_t>(pairs.tokens.size()); }
  int64_t matrix_bytes() const { return int64_t{c.width} * c.hidden * 2; }
  Ffn make_ffn() const {
    Ffn made{};
    made.dtype = c.dtype, made.tokens = c.tokens, made.hidden = c.hidden, made.width = c.width;
    made.x = x.data;
    made.up.data = c.gated ? x.data : nullptr;  // only whether there is one matters here
    return made;
  }
  int64_t partial_bytes() const { return weights_partial_bytes(make_ffn(), room()); }

  void fill_state() {
    const int blocks = c.blocks(), width = c.width;
    std::vector<uint4> masks(int64_t{c.kept} * width, uint4{});
    first_kept.assign(width + 1, 0);
    places_kept.assign(int64_t{c.kept} * width, ~0u);
    int64_t count = 0;
    for (int n = 0; n < width; ++n) {
      first_kept[n] = count;
      for (int64_t i = pairs.first[n]; i < pairs.first[n + 1]; ++i) {
        const int b = pairs.tokens[i] / kBlockTokens, t = pairs.tokens[i] % kBlockTokens;
        if (b >= c.kept) break;
        const int64_t at = int64_t{b} * width + n;
        (&masks[at].x)[t / 32] |= 1u << t % 32;
        places_kept[at] = std::min(places_kept[at], static_cast<uint32_t>(count));
        ++count;
      }
    }
    first_kept[width] = count;
    std::vector<uint8_t> raw(blocks * sizeof(BlockState), 0xff);
    std::vector<uint4> entries(entry_room(c), uint4{~0u, ~0u, ~0u, ~0u});
    std::vector<uint16_t> neurons(entry_room(c), 0xffff);
    int64_t entry = 0, pair = 0;
    for (int b = 0; b < c.kept; ++b) {
      BlockState block{{0, 0, 0}, 0, entry, pair};
      for (int pass = 0; pass < 3; ++pass) {
        for (int n = 0; n < width; ++n) {
          const uint4 m = masks[int64_t{b} * width + n];
          const int halves = (m.x | m.y ? 1 : 0) + (m.z | m.w ? 2 : 0);
          if (halves != (pass == 0 ? 1 : pass == 1 ? 3 : 2)) continue;
          entries[entry] = m;
          neurons[entry++] = static_cast<uint16_t>(n);
          ++(pass == 0 ? block.counts.first_only : pass == 1 ? block.counts.both : block.counts.second_only);
          for (const uint32_t word : {m.x, m.y, m.z, m.w}) block.pairs += __builtin_popcount(word);
        }
      }
      pair += block.pairs;
      entry = (entry + kGroup - 1) / kGroup * kGroup + b % 2 * kGroup;  // now and then a hole
      std::memcpy(raw.data() + b * sizeof(BlockState), &block, sizeof(BlockState));
    }
    block_states.fill(raw);
    entry_tokens.fill(entries);
    entry_neurons.fill(neurons);
    totals.fill(std::vector<int64_t>{c.kept, entry, pair});
  }

  void fill_sorted() {
    std::vector<uint2> sorted_host;
    std::vector<uint16_t> h_host;
    for (size_t i = 0; i < pairs.tokens.size(); ++i) {
      if (pairs.tokens[i] >= int64_t{c.kept} * kBlockTokens) continue;
      const uint32_t up = c.gated ? pairs.du[i] : 0xffff;  // nobody may use it
      sorted_host.push_back({static_cast<uint32_t>(pairs.tokens[i]), pairs.dg[i] | up << 16});
      h_host.push_back(pairs.h[i]);
    }
    sorted_pairs.fill(sorted_host), h.fill(h_host);
  }

  // A chunk's masks and columns; all of it rubbish where every block is kept.
  struct Columns {
    std::vector<uint32_t> masks;
    std::vector<uint16_t> g, u, dg, du;
  };
  Columns make_columns(int first_block, int blocks) const {
    const int words = (c.width + 31) / 32;
    const int64_t size = int64_t{blocks} * c.width * kBlockTokens;
    const bool rubbish = first_block + blocks <= c.kept;
    Columns made;
    made.masks.assign(int64_t{blocks} * 2 * words, rubbish ? ~0u : 0);
    for (auto* part : {&made.g, &made.u, &made.dg, &made.du}) part->assign(size, 0xffff);
    for (int n = 0; n < c.width && !rubbish; ++n) {
      int64_t i = pairs.first[n];
      for (int b = 0; b < blocks; ++b) {
        for (int half = 0; half < 2; ++half) {
          const int64_t from = int64_t{first_block + b} * kBlockTokens + half * kHalfTokens, to = from + kHalfTokens;
          const int64_t at = ((int64_t{b} * c.width + n) * 2 + half) * kHalfTokens;
          while (i < pairs.first[n + 1] && pairs.tokens[i] < from) ++i;
          if (i == pairs.first[n + 1] || pairs.tokens[i] >= to) continue;
          made.masks[(b * 2 + half) * int64_t{words} + n / 32] |= 1u << n % 32;
          for (int t = 0; t < kHalfTokens && from + t < c.tokens; ++t) {
            made.g[at + t] = made.dg[at + t] = made.du[at + t] = 0;
            made.u[at + t] = narrow(c.dtype, 0.5f);
          }
          for (; i < pairs.first[n + 1] && pairs.tokens[i] < to; ++i) {
            const int64_t place = at + pairs.tokens[i] - from;
            made.g[place] = pairs.g[i], made.u[place] = pairs.u[i];
            made.dg[place] = pairs.dg[i], made.du[place] = pairs.du[i];
          }
        }
      }
    }
    return made;
  }

  void run(const Device& device) {
    for (Buffer* buffer : {&first, &slots, &places, &partials, &down, &gate, &up, &b_gate, &b_up}) buffer->poison();
    CHECK(launch_sort(ffn, state, sorted, c.blocks(), device, nullptr));
    CHECK(launch_weights_plan(ffn, state, sorted, gradients, partials.data, nullptr));
    CHECK(launch_weights(ffn, state, sorted, gradients, partials.data, false, device, nullptr));
    for (int b = 0; b < c.blocks(); b += c.chunk_blocks) {
      Chunk chunk{};
      chunk.active.blocks = std::min(c.chunk_blocks, c.blocks() - b);
      chunk.active.words = (c.width + 31) / 32;
      chunk.active.row = (c.width + 7) / 8 * 8;
      chunk.first = int64_t{b} * kBlockTokens;
      chunk.tokens = std::min<int64_t>(chunk.active.blocks * kBlockTokens, c.tokens - chunk.first);
      const Columns host = make_columns(b, chunk.active.blocks);
      const Buffer masks(host.masks), g(host.g), u(host.u), dg_columns(host.dg), du_columns(host.du);
      chunk.active.masks = masks.as<uint32_t>();
      chunk.active.columns = g.data;
      chunk.active.ups = c.gated ? u.data : nullptr;
      CHECK(launch_add_down(ffn, chunk, state, gradients, device, nullptr));
      chunk.active.columns = dg_columns.data;
      chunk.active.ups = c.gated ? du_columns.data : nullptr;
      CHECK(launch_add_gate_up(ffn, chunk, state, gradients, device, nullptr));
      CHECK(cudaDeviceSynchronize());
    }
    CHECK(cudaDeviceSynchronize());
  }

  int heavy_neurons() const {
    if (!gradients.weights()) return 0;
    Scratch scratch;
    place_scratch(ffn, state.pairs, partials.data, &scratch);
    Plan plan;
    CHECK(cudaMemcpy(&plan, scratch.plan, sizeof(plan), cudaMemcpyDeviceToHost));
    return plan.heavy;
  }

  bool guards_whole() const {
    for (const Buffer* buffer :
         {&first, &slots, &places, &partials, &down, &gate, &up, &b_gate, &b_up, &sorted_pairs, &h}) {
      if (!buffer->guard_whole()) return false;
    }
    return true;
  }
};

bool sort_right(const Setup& s) {
  if (s.first.read<int64_t>() != s.first_kept) return false;
  const std::vector<uint32_t> places = s.places.read<uint32_t>();
  for (size_t i = 0; i < places.size(); ++i) {
    if (s.places_kept[i] != ~0u && places[i] != s.places_kept[i]) return false;
  }
  return true;
}

struct Verdict {
  double difference = 0.0, square = 0.0;
  int64_t wrong = 0;  // NaN, or not zero where it must be
};

// (F, columns) sums of rows (T, columns), or of ones where there are none.
bool sums_right(const Setup& s, const char* what, const void* wanted, const Buffer& buffer,
                const std::vector<uint16_t>& factors, const std::vector<uint16_t>* rows) {
  const Case& c = s.c;
  const int columns = rows == nullptr ? 1 : c.hidden;
  const std::vector<uint16_t> values = buffer.read<uint16_t>();
  if (wanted == nullptr) {
    return std::all_of(values.begin(), values.end(), [](uint16_t value) { return value == 0xffff; });
  }
  std::vector<float> wide(rows == nullptr ? 0 : rows->size());
  parallel_for(c.tokens, [&](int t) {
    for (int64_t i = int64_t{t} * columns; !wide.empty() && i < int64_t{t + 1} * columns; ++i) {
      wide[i] = widen(c.dtype, (*rows)[i]);
    }
  });
  std::vector<Verdict> verdicts(c.width);
  parallel_for(c.width, [&](int n) {
    std::vector<double> sum(columns, 0.0);
    for (int64_t i = s.pairs.first[n]; i < s.pairs.first[n + 1]; ++i) {
      const double factor = widen(c.dtype, factors[i]);
      const float* row = wide.data() + int64_t{s.pairs.tokens[i]} * columns;
      for (int d = 0; d < columns; ++d) sum[d] += rows == nullptr ? factor : factor * row[d];
    }
    const bool empty = s.pairs.first[n] == s.pairs.first[n + 1];
    for (int d = 0; d < columns; ++d) {
      const float value = widen(c.dtype, values[int64_t{n} * columns + d]);
      if (std::isnan(value) || (empty && value != 0.0f)) {
        ++verdicts[n].wrong;
        continue;
      }
      verdicts[n].difference += (value - sum[d]) * (value - sum[d]);
      verdicts[n].square += sum[d] * sum[d];
    }
  });
  Verdict all;
  for (const Verdict& v : verdicts) {
    all.difference += v.difference, all.square += v.square, all.wrong += v.wrong;
  }
  const double error = all.square == 0.0 ? std::sqrt(all.difference) : std::sqrt(all.difference / all.square);
  const double roundings = 1.0 + (c.blocks() - c.kept + c.chunk_blocks - 1) / c.chunk_blocks;
  const double limit = (c.dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11) * std::sqrt(std::max(1.0, roundings / 2.0));
  if (all.wrong == 0 && error <= limit) return true;
  std::printf("WRONG %s: %s error %.2e, %lld wrong\n", c.name().c_str(), what, error,
              static_cast<long long>(all.wrong));
  return false;
}

bool check(const Case& c, uint64_t seed, const Device& device, int* heavy) {
  Setup s(c, Random{seed << 32});
  s.run(device);
  const int heavies = s.heavy_neurons();
  *heavy += heavies > 0;
  const bool sorted = sort_right(s), guarded = s.guards_whole(), as_wanted = c.heavy < 0 || heavies == c.heavy;
  if (!sorted || !guarded) std::printf("WRONG %s: %s\n", c.name().c_str(), sorted ? "guards" : "sort");
  if (!as_wanted) std::printf("WRONG %s: %d heavy neurons, not %d\n", c.name().c_str(), heavies, c.heavy);
  bool right = sorted && guarded && as_wanted;
  right &= sums_right(s, "down", s.gradients.down, s.down, s.pairs.h, &s.dy_host);
  right &= sums_right(s, "gate", s.gradients.gate, s.gate, s.pairs.dg, &s.x_host);
  right &= sums_right(s, "up", s.gradients.up, s.up, s.pairs.du, &s.x_host);
  right &= sums_right(s, "b_gate", s.gradients.b_gate, s.b_gate, s.pairs.dg, nullptr);
  right &= sums_right(s, "b_up", s.gradients.b_up, s.b_up, s.pairs.du, nullptr);
  std::vector<std::vector<uint16_t>> before;
  const std::vector<const Buffer*> outputs{&s.down, &s.gate, &s.up, &s.b_gate, &s.b_up};
  for (const Buffer* output : outputs) before.push_back(output->read<uint16_t>());
  s.run(device);
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i]->read<uint16_t>() != before[i]) {
      std::printf("WRONG %s: output %zu is not repeated\n", c.name().c_str(), i);
      right = false;
    }
  }
  return right;
}

std::vector<Case> make_cases() {
  constexpr DType kB = DType::kBFloat16, kF = DType::kFloat16;
  std::vector<Case> cases{
      {kB, 4097, 2048, 5632, 0.005f, true, true, 33, 11, 0, 0},
      {kB, 4097, 2048, 5632, 0.005f, true, true, 33, 11, 0, 64 * 4097},
      {kF, 1000, 2048, 5632, 0.01f, true, true, 3, 3, 0, 0},
      {kB, 1000, 2048, 1001, 0.1f, false, true, 0, 4, 0, 0},
      {kB, 4097, 264, 70, 1.0f, false, true, 33, 33, 0, 0},
      {kB, 4097, 264, 70, 1.0f, false, true, 33, 33, 0, 20000},
      {kF, 4097, 264, 70, 1.0f, false, false, 20, 12, 0, 3000},
      {kB, 4097, 2048, 16, 1.0f, false, true, 30, 10, 0, 0},
      {kB, 4097, 136, 344, 0.1f, true, true, 33, 33, 0, 1},
      {kB, 20600, 136, 70, 0.05f, true, true, 161, 161, 0, 0},
      {kF, 20600, 264, 16, 0.3f, true, false, 100, 40, 0, 0},
      {kB, 300, 16384, 40, 0.2f, false, true, 2, 2, 0, 0},
      {kB, 130, 8, 65536, 0.01f, false, true, 2, 1, 0, 0},
  };
  // Three tiles of heavy neurons cost 960 pairs and have to save 80, as a block of tokens is multiplied whole; without a
  // gate 639 and 53.
  for (const int tokens : {1, 2, 3, 4, 63, 127}) {
    const bool gated_heavy = tokens >= 4, plain_heavy = tokens >= 3;
    cases.push_back({kB, tokens, 136, 344, 1.0f, false, true, 1, 1, 0, 16384, gated_heavy ? 344 : 0});
    cases.push_back({kF, tokens, 72, 344, 1.0f, false, false, 1, 1, 0, 16384, plain_heavy ? 344 : 0});
  }
  const int sizes[] = {1, 63, 128, 130, 1000}, hiddens[] = {8, 72, 136, 264}, widths[] = {16, 70, 344, 1001};
  const float densities[] = {0.0f, -1.0f, 0.01f, 0.1f, 1.0f};
  Random random{99};
  for (int i = 0; i < 500; ++i) {
    Case c{};
    c.dtype = i % 2 ? kF : kB;
    c.tokens = sizes[random.below(5)], c.hidden = hiddens[random.below(4)], c.width = widths[random.below(4)];
    c.density = densities[random.below(5)];
    if (c.density == 1.0f && c.tokens * c.width > 100000) c.density = 0.1f;
    c.skewed = random.below(2), c.gated = random.below(3) > 0;
    const int blocks = c.blocks(), mode = random.below(3);
    c.kept = mode == 0 ? blocks : mode == 1 ? random.below(blocks + 1) : 0;
    c.chunk_blocks = 1 + random.below(blocks);
    c.missing = random.below(2) ? 1 << random.below(4) : random.below(4) ? 0 : random.below(16);
    c.room = random.below(3) ? 0 : 1 + random.below(5000);
    cases.push_back(c);
  }
  return cases;
}

template <typename Launch>
double microseconds(const Launch& launch) {
  static const Buffer flush(int64_t{256} << 20);
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < 25; ++i) {
    CHECK(cudaMemsetAsync(flush.data, i, flush.bytes));
    CHECK(cudaEventRecord(begin));
    CHECK(launch());
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    times.emplace_back();
    CHECK(cudaEventElapsedTime(&times.back(), begin, end));
  }
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] * 1e3;
}

void time(int mean_active, const Device& device) {
  constexpr int kTokens = 16384, kHidden = 2048, kWidth = 5632, kBlocks = kTokens / kBlockTokens, kChunkBlocks = 21;
  const float density = static_cast<float>(mean_active) / kWidth;
  Setup s({DType::kBFloat16, kTokens, kHidden, kWidth, density, true, true, kBlocks, kBlocks, 0, 0}, Random{5});
  s.run(device);
  std::vector<int64_t> counts(kWidth);
  for (int n = 0; n < kWidth; ++n) counts[n] = s.pairs.first[n + 1] - s.pairs.first[n];
  std::sort(counts.begin(), counts.end(), std::greater<>());
  int64_t top = 0;
  for (int n = 0; n < 512; ++n) top += counts[n];
  const double all = static_cast<double>(s.pairs.tokens.size());
  std::printf("L0=%d: %.0f pairs, most active %lld, top 512 %.0f %%, scratch %.1f MiB\n", mean_active, all,
              static_cast<long long>(counts[0]), 100.0 * top / all, s.partials.bytes / 1048576.0);
  std::printf("  sort %.1f us\n", microseconds([&] {
                return launch_sort(s.ffn, s.state, s.sorted, kBlocks, device, nullptr);
              }));
  const auto weights = [&] {
    CHECK(launch_weights_plan(s.ffn, s.state, s.sorted, s.gradients, s.partials.data, nullptr));
    return launch_weights(s.ffn, s.state, s.sorted, s.gradients, s.partials.data, false, device, nullptr);
  };
  const double all_us = microseconds(weights);
  std::printf("  weights %.1f us, %.2f TB/s of rows\n", all_us, all * kHidden * 4 / all_us * 1e-6);
  Gradients part = s.gradients;
  part.gate = part.up = part.b_gate = part.b_up = nullptr;
  std::printf("  weights of down alone %.1f us\n", microseconds([&] {
                CHECK(launch_weights_plan(s.ffn, s.state, s.sorted, part, s.partials.data, nullptr));
                return launch_weights(s.ffn, s.state, s.sorted, part, s.partials.data, false, device, nullptr);
              }));

  Random random{6};
  const Buffer columns(make_values(DType::kBFloat16, int64_t{kChunkBlocks} * kWidth * kBlockTokens, random));
  const Buffer ups(make_values(DType::kBFloat16, int64_t{kChunkBlocks} * kWidth * kBlockTokens, random));
  const Buffer masks(kChunkBlocks * 2 * ((kWidth + 31) / 32) * 4);  // all ones
  Chunk chunk{};
  chunk.tokens = kChunkBlocks * kBlockTokens;
  chunk.active.masks = masks.as<uint32_t>();
  chunk.active.columns = columns.data;
  chunk.active.ups = ups.data;
  chunk.active.blocks = kChunkBlocks;
  chunk.active.words = (kWidth + 31) / 32;
  const auto add_down = [&] { return launch_add_down(s.ffn, chunk, s.state, s.gradients, device, nullptr); };
  const auto add_gate_up = [&] { return launch_add_gate_up(s.ffn, chunk, s.state, s.gradients, device, nullptr); };
  std::printf("  add, %d blocks, all kept: down %.1f us, gate and up %.1f us\n", kChunkBlocks, microseconds(add_down),
              microseconds(add_gate_up));
  for (const int64_t first : {0, kChunkBlocks}) {
    s.totals.fill(std::vector<int64_t>{0, 0, 0});
    chunk.first = first * kBlockTokens;
    const double flop = 2.0 * kWidth * kHidden * kChunkBlocks * kBlockTokens;
    const double down_us = microseconds(add_down), gate_up_us = microseconds(add_gate_up);
    std::printf("  add, %d blocks, %s: down %.1f us (%.0f TFLOP/s), gate and up %.1f us (%.0f TFLOP/s)\n",
                kChunkBlocks, first == 0 ? "writes" : "adds", down_us, flop / down_us * 1e-6, gate_up_us,
                2 * flop / gate_up_us * 1e-6);
  }
}

}  // namespace

int main(int argc, char** argv) {
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  const Device device{properties.multiProcessorCount, properties.major, properties.minor};
  if (argc > 1 && std::strcmp(argv[1], "time") == 0) {
    time(30, device);
    time(120, device);
    return 0;
  }
  const std::vector<Case> cases = make_cases();
  int wrong = 0, heavy = 0;
  for (size_t i = 0; i < cases.size(); ++i) wrong += !check(cases[i], i + 1, device, &heavy);
  std::printf("%zu cases, %d with heavy neurons, %d wrong\n", cases.size(), heavy, wrong);
  return wrong == 0 ? 0 : 1;
}
