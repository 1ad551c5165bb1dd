// Checks the products of training on compute capability 9.0 (up, up beside relu(gate), dh, dx), and gate, list and
// down, against plain loops in double. Leaves with 1 where anything is wrong.
//
// Built by kernels/tests/check_cuda.sh.
//   ./training_products_check [time]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "portable/element.cuh"
#include "sm90/training/training.h"
#include "tests/check.cuh"

namespace {

using namespace twell;
using namespace twell::sm90;
using checks::Buffer;
using checks::hash;

__host__ __device__ inline float uniform(uint64_t seed, uint64_t i) {  // [0, 1)
  return static_cast<float>(hash(seed * 0x100000001b3ull + i) >> 40) * 0x1p-24f;
}

__device__ float load(DType dtype, const void* values, int64_t i) {
  return dtype == DType::kBFloat16 ? portable::BFloat16::widen_one(values, i) : portable::Float16::widen_one(values, i);
}
__device__ void store(DType dtype, void* values, int64_t i, float value) {
  if (dtype == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(values)[i] = __float2bfloat16_rn(value);
  } else {
    static_cast<__half*>(values)[i] = __float2half_rn(value);
  }
}
__device__ float rounded(DType dtype, float value) {
  if (dtype == DType::kBFloat16) return __bfloat162float(__float2bfloat16_rn(value));
  return __half2float(__float2half_rn(value));
}

// Uniform in `middle` +- `spread`.
__global__ void fill(DType dtype, void* values, int64_t count, uint64_t seed, float middle, float spread) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    store(dtype, values, i, middle + (2.0f * uniform(seed, i) - 1.0f) * spread);
  }
}

// kLate: as kShare, but only in second halves. kUnion: of each 128 tokens, `share` of the neurons are active, in
// about 2.9 of these tokens. kNan: kShare, and NaN for token 5 of each block.
enum class Kind { kShare, kOneElement, kLate, kNan, kUnion };
struct Pattern {
  Kind kind;
  float share;
};

__host__ __device__ inline bool is_active(const Pattern& p, int64_t tokens, int width, int64_t t, int n,
                                          uint64_t seed) {
  if (t >= tokens) return false;
  const bool drawn = uniform(seed, t * width + n) < p.share;
  switch (p.kind) {
    case Kind::kOneElement: return t == tokens / 2 && n == width - 1;
    case Kind::kLate: return drawn && t % kBlockTokens >= kHalfTokens;
    case Kind::kNan: return drawn || (t % kBlockTokens == 5 && n % 7 == 3);
    case Kind::kUnion: {
      const uint64_t member = t / kBlockTokens * width + n;
      return uniform(seed + 2, member) < p.share && (hash(member + seed) % kBlockTokens == uint64_t(t % kBlockTokens) ||
                                                     uniform(seed + 1, t * width + n) < 1.87f / 127.0f);
    }
    default: return drawn;
  }
}

// What the reference reads: one chunk's tensors and lists, and relu(gate) and u as they were.
struct Given {
  Ffn ffn;
  Chunk chunk;
  Training training;
  const void* dy;
  const uint8_t* halves;  // (blocks, F): bit 0 and 1
  const uint16_t *g, *u;
};

struct Faults {
  unsigned long long count, first;
  __device__ void add(int64_t i) {
    atomicAdd(&count, 1ull);
    atomicMin(&first, static_cast<unsigned long long>(i));
  }
};

__global__ void fill_gate(Given a, Pattern p, uint16_t* columns, uint64_t seed) {
  const int64_t count = int64_t{a.chunk.active.blocks} * a.ffn.width * kBlockTokens;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t entry = i / kBlockTokens, t = a.chunk.first + entry / a.ffn.width * kBlockTokens + i % kBlockTokens;
    const int n = static_cast<int>(entry % a.ffn.width);
    if (!(a.halves[entry] >> (i % kBlockTokens / kHalfTokens) & 1)) continue;
    float value = is_active(p, a.ffn.tokens, a.ffn.width, t, n, seed) ? 0.1f + uniform(seed + 3, i) : 0.0f;
    if (p.kind == Kind::kNan && value != 0.0f && t % kBlockTokens == 5 && n % 7 == 3) value = NAN;
    store(a.ffn.dtype, columns, i, value);
  }
}

struct Sum {
  double value = 0.0, size = 0.0;  // of the sum; of its terms
  __device__ void add(double term) {
    value += term;
    size += fabs(term);
  }
};

__device__ Sum dot(const Ffn& ffn, const void* a, int64_t row, const void* b, int64_t other) {
  Sum sum;
  for (int d = 0; d < ffn.hidden; ++d) {
    sum.add(double{load(ffn.dtype, a, row * ffn.hidden + d)} * load(ffn.dtype, b, other * ffn.hidden + d));
  }
  return sum;
}

// One rounding, and what sums in fp32 may lose.
__device__ bool close(DType dtype, float value, double truth, double size) {
  if (isnan(truth) || isnan(value)) return isnan(truth) && isnan(value);
  const double half_ulp = dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
  return fabs(value - truth) <= 1.01 * half_ulp * fabs(truth) + 0x1p-16 * size + 0x1p-24;
}

enum class Step { kGate, kUp, kBeside, kDh };

// Columns that no token of a half activates must be as they were: NaN.
__global__ void check_columns(Given a, Step step, const uint16_t* columns, const uint16_t* ups, Faults* faults) {
  const Ffn& ffn = a.ffn;
  const int64_t count = int64_t{a.chunk.active.blocks} * ffn.width * kBlockTokens;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t entry = i / kBlockTokens, slot = entry / ffn.width * kBlockTokens + i % kBlockTokens;
    const int64_t t = a.chunk.first + slot, n = entry % ffn.width;
    const bool inside = slot < a.chunk.tokens, written = a.halves[entry] >> (i % kBlockTokens / kHalfTokens) & 1;
    const auto result = [&](const uint16_t* values) { return load(ffn.dtype, values, i); };
    bool good = written || (columns[i] == 0xffff && (ups == nullptr || ups[i] == 0xffff));
    if (step == Step::kGate) {
      Sum sum;
      if (inside) sum = dot(ffn, ffn.x, t, ffn.gate.data, n);
      if (inside && ffn.b_gate != nullptr) sum.add(load(ffn.dtype, ffn.b_gate, n));
      good = good && close(ffn.dtype, written ? result(columns) : 0.0f, fmax(sum.value, 0.0), sum.size);
    } else if (written && step != Step::kDh) {
      Sum sum;
      if (inside) sum = dot(ffn, ffn.x, t, ffn.up.data, n);
      if (ffn.b_up != nullptr) sum.add(load(ffn.dtype, ffn.b_up, n));
      if (step == Step::kBeside) {
        good = columns[i] == a.g[i] && close(ffn.dtype, result(ups), sum.value, sum.size);
      } else {
        const double g = load(ffn.dtype, a.g, i);
        good = close(ffn.dtype, result(columns), g * sum.value, g * sum.size);
      }
    } else if (written) {
      const float g = load(ffn.dtype, a.g, i), u = ffn.up.data == nullptr ? 1.0f : load(ffn.dtype, a.u, i);
      const float h = ffn.up.data == nullptr ? g : rounded(ffn.dtype, g * u);
      Sum dh;
      if (inside) dh = dot(ffn, a.dy, t, ffn.down.data, n);
      if (inside && a.training.l1_scale != nullptr) {
        const float weight = a.training.token_weight == nullptr ? 1.0f : a.training.token_weight[t];
        dh.add(double{*a.training.l1_scale} * weight * (h > 0.0f ? 1.0 : h < 0.0f ? -1.0 : 0.0));
      }
      const bool active = g != 0.0f;
      good = close(ffn.dtype, result(columns), active ? dh.value * u : 0.0, active ? fabs(dh.size * u) : 0.0);
      if (ffn.up.data != nullptr) good = good && close(ffn.dtype, result(ups), dh.value * g, dh.size * g);
    }
    if (!good) faults->add(i);
  }
}

struct Term {
  const uint16_t* columns;
  const void* rows;
};

// `count` elements of y, of which the chunk's are sums over neurons and the others NaN still.
__global__ void check_rows(Given a, Term first, Term second, const void* bias, const uint16_t* y, int64_t count,
                           Faults* faults) {
  const Ffn& ffn = a.ffn;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t slot = i / ffn.hidden - a.chunk.first, d = i % ffn.hidden;
    if (slot < 0 || slot >= a.chunk.tokens) {
      if (y[i] != 0xffff) faults->add(i);
      continue;
    }
    const int64_t block = slot / kBlockTokens;
    const Counts counts = a.chunk.active.counts[block];
    const bool late = slot % kBlockTokens >= kHalfTokens;
    const uint16_t* list = a.chunk.active.neurons + block * a.chunk.active.row;
    Sum sum;
    if (bias != nullptr) sum.add(load(ffn.dtype, bias, d));
    const int end = late ? counts.all() : counts.first_only + counts.both;
    for (int e = late ? counts.first_only : 0; e < end; ++e) {
      const int64_t at = (block * ffn.width + list[e]) * kBlockTokens + slot % kBlockTokens;
      const int64_t weight = int64_t{list[e]} * ffn.hidden + d;
      sum.add(double{load(ffn.dtype, first.columns, at)} * load(ffn.dtype, first.rows, weight));
      if (second.rows == nullptr) continue;
      sum.add(double{load(ffn.dtype, second.columns, at)} * load(ffn.dtype, second.rows, weight));
    }
    if (!close(ffn.dtype, load(ffn.dtype, y, i), sum.value, sum.size)) faults->add(i);
  }
}

// Both the same, or `b` null and all of `a` as poisoned.
__global__ void check_equal(const uint8_t* a, const uint8_t* b, int64_t count, Faults* faults) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    if (a[i] != (b == nullptr ? 0xff : b[i])) faults->add(i);
  }
}

constexpr int kGrid = 2112, kThreads = 256, kGuard = 4096;

enum class Kept { kNull, kBefore, kThis };
enum class L1 { kNone, kOnes, kWeights };
struct Case {
  DType dtype;
  int64_t tokens;
  int hidden, width;
  Pattern pattern;
  bool gated, biased, listed_by_kernels;
  Kept kept;
  L1 l1;
  int chunk_blocks, sm_count;
};

// Memory for all cases.
struct Pool {
  static constexpr int64_t kEntries = int64_t{8} * 5632, kMatrix = int64_t{5632} * 2048, kTokens = 1000 * 2048;
  DType dtype;
  Buffer<uint16_t> x{kTokens}, dy{kTokens}, gate{kMatrix}, up{kMatrix}, down{kMatrix}, b_gate{5632}, b_up{5632};
  Buffer<uint16_t> b_down{2048}, y{kTokens + kGuard}, dx{kTokens + kGuard}, dx_before{kTokens + kGuard};
  Buffer<uint16_t> columns{kEntries * kBlockTokens}, ups{kEntries * kBlockTokens};
  Buffer<uint16_t> g{kEntries * kBlockTokens}, u{kEntries * kBlockTokens};
  Buffer<uint16_t> dg{kEntries * kBlockTokens}, du{kEntries * kBlockTokens}, neurons{kEntries};
  Buffer<uint32_t> masks{kEntries};
  Buffer<Counts> counts{8};
  Buffer<uint8_t> halves{kEntries};
  Buffer<float> l1_scale{1}, token_weight{1000 + kBlockTokens};
  Buffer<int64_t> kept{1};
  Buffer<Faults> faults{1};

  explicit Pool(DType type) : dtype(type) {
    uint64_t seed = 1;
    const auto random = [&](Buffer<uint16_t>& buffer, float spread) {
      fill<<<kGrid, kThreads>>>(dtype, buffer.data, static_cast<int64_t>(buffer.bytes / 2), seed++, 0.0f, spread);
      CHECK(cudaGetLastError());
    };
    random(x, 1.0f), random(dy, 1.0f), random(gate, 0.1f), random(up, 0.1f), random(down, 0.1f);
    random(b_up, 0.5f), random(b_down, 0.5f);
    l1_scale.put({0.3f});
  }
};

class Chain {  // all kernels of one chunk, each checked
 public:
  Chain(const Case& c, Pool& pool, const Device& real, int64_t first, uint64_t seed)
      : c_(c), p_(pool), real_(real), device_{c.sm_count, real.major, real.minor}, seed_(seed) {
    const int64_t tokens = std::min<int64_t>(c.tokens - first, int64_t{c.chunk_blocks} * kBlockTokens);
    const int blocks = static_cast<int>((tokens + kBlockTokens - 1) / kBlockTokens);
    const bool by_kernels = c.listed_by_kernels;
    ffn_ = Ffn{c.dtype,
               c.tokens,
               c.hidden,
               c.width,
               p_.x.data,
               {p_.gate.data},
               {c.gated ? p_.up.data : nullptr},
               {p_.down.data},
               by_kernels ? p_.b_gate.data : nullptr,
               c.gated && c.biased ? p_.b_up.data : nullptr,
               c.biased ? p_.b_down.data : nullptr,
               p_.y.data};
    const Active active{p_.masks.data, p_.counts.data, p_.neurons.data, p_.columns.data,
                        c.gated ? p_.ups.data : nullptr, blocks, (c.width + 31) / 32, (c.width + 7) / 8 * 8};
    chunk_ = Chunk{first, tokens, active, c.kept == Kept::kNull ? nullptr : p_.kept.data};
    if (c.l1 != L1::kNone) training_.l1_scale = p_.l1_scale.data;
    if (c.l1 == L1::kWeights) training_.token_weight = p_.token_weight.data;
    gradients_.dy = p_.dy.data;
    gradients_.x = p_.dx.data;
    entries_ = int64_t{blocks} * c.width;
    given_ = Given{ffn_, chunk_, training_, p_.dy.data, p_.halves.data, p_.g.data, p_.u.data};
  }

  bool run() {
    const int64_t end_block = chunk_.first_block() + chunk_.active.blocks;
    p_.token_weight.poison();
    fill_weights();
    poison();
    p_.kept.put({c_.kept == Kept::kThis ? end_block : end_block - 1});
    if (c_.kept == Kept::kThis) {
      forward(chunk_, true);
      if (c_.gated) CHECK(launch_up(ffn_, chunk_, device_, nullptr));
      expect_untouched();
      chunk_.kept = nullptr;  // dh and dx take it all the same, below
    }
    make_lists();
    copy(p_.g, p_.columns);
    columns(Step::kGate, c_.listed_by_kernels, "gate");
    if (c_.gated) {
      CHECK(launch_up_beside(ffn_, chunk_, device_, nullptr));
      columns(Step::kBeside, true, "beside");
      copy(p_.u, p_.ups);
      CHECK(launch_up(ffn_, chunk_, device_, nullptr));
      columns(Step::kUp, true, "up");
    }
    CHECK(launch_down(ffn_, chunk_, device_, nullptr));
    rows({p_.columns.data, ffn_.down.data}, {}, ffn_.b_down, p_.y, "down");

    copy(p_.columns, p_.g);
    CHECK(launch_dh(ffn_, chunk_, training_, gradients_, device_, nullptr));
    columns(Step::kDh, true, "dh");
    CHECK(launch_dx(ffn_, chunk_, gradients_, device_, nullptr));
    const Term second = c_.gated ? Term{p_.ups.data, ffn_.up.data} : Term{};
    rows({p_.columns.data, ffn_.gate.data}, second, nullptr, p_.dx, "dx");

    // Again, one after the other.
    copy(p_.dg, p_.columns);
    copy(p_.du, p_.ups);
    CHECK(cudaMemcpyAsync(p_.dx_before.data, p_.dx.data, p_.dx.bytes, cudaMemcpyDeviceToDevice));
    p_.dx.poison();
    p_.ups.poison();
    if (c_.listed_by_kernels) {
      p_.columns.poison();
    } else {
      copy(p_.columns, p_.g);
    }
    forward(chunk_, c_.listed_by_kernels);
    CHECK(launch_dh(ffn_, chunk_, training_, gradients_, device_, nullptr));
    CHECK(launch_dx(ffn_, chunk_, gradients_, device_, nullptr));
    equal(p_.columns, p_.dg, entries_ * kBlockTokens, "dg again");
    if (c_.gated) equal(p_.ups, p_.du, entries_ * kBlockTokens, "du again");
    equal(p_.dx, p_.dx_before, c_.tokens * c_.hidden + kGuard, "dx again");
    return good_;
  }

 private:
  void copy(Buffer<uint16_t>& to, const Buffer<uint16_t>& from) {
    CHECK(cudaMemcpyAsync(to.data, from.data, entries_ * kBlockTokens * 2, cudaMemcpyDeviceToDevice));
  }
  void poison() {
    p_.columns.poison(), p_.ups.poison(), p_.y.poison(), p_.dx.poison();
    p_.masks.poison(), p_.counts.poison(), p_.neurons.poison();
  }
  void fill_weights() {
    std::vector<float> weights(c_.tokens);
    for (int64_t t = 0; t < c_.tokens; ++t) weights[t] = t % 5 == 0 ? 0.0f : uniform(seed_ + 9, t);
    p_.token_weight.put(weights);
    // A bias that lets about the pattern's share through.
    const float share = c_.pattern.share, deviation = std::sqrt(static_cast<float>(c_.hidden)) / 30.0f;
    const float z = share == 0.0f ? -7.0f : share < 0.05f ? -2.3f : share < 0.3f ? -1.3f : share < 1.0f ? 0.3f : 7.0f;
    fill<<<kGrid, kThreads>>>(c_.dtype, p_.b_gate.data, c_.width, seed_, z * deviation, 0.1f * deviation);
    CHECK(cudaGetLastError());
  }
  void forward(const Chunk& chunk, bool gate) {
    if (gate) {
      CHECK(launch_gate(ffn_, chunk, real_, nullptr));
      CHECK(launch_list(ffn_, chunk, device_, nullptr));
    }
    if (c_.gated) CHECK(launch_up_beside(ffn_, chunk, device_, nullptr));
  }
  void make_lists() {
    const int blocks = chunk_.active.blocks, row = chunk_.active.row;
    std::vector<uint8_t> halves(entries_);
    if (c_.listed_by_kernels) {
      forward_lists(halves, blocks, row);
      p_.halves.put(halves);
      return;
    }
    std::vector<Counts> counts(blocks);
    std::vector<uint16_t> neurons(int64_t{blocks} * row, 0xffff);
    for (int b = 0; b < blocks; ++b) {
      uint8_t* active = halves.data() + int64_t{b} * c_.width;
      for (int n = 0; n < c_.width; ++n) {
        for (int slot = 0; slot < kBlockTokens; ++slot) {
          const int64_t t = chunk_.first + int64_t{b} * kBlockTokens + slot;
          if (is_active(c_.pattern, c_.tokens, c_.width, t, n, seed_)) active[n] |= 1 << slot / kHalfTokens;
        }
      }
      int sizes[3], place = b * row;
      for (int kind : {0, 1, 2}) {
        const int begin = place, wanted[] = {1, 3, 2};
        for (int n = 0; n < c_.width; ++n) {
          if (active[n] == wanted[kind]) neurons[place++] = static_cast<uint16_t>(n);
        }
        sizes[kind] = place - begin;
      }
      counts[b] = {sizes[0], sizes[1], sizes[2]};
    }
    p_.counts.put(counts);
    p_.neurons.put(neurons);
    p_.halves.put(halves);
    fill_gate<<<kGrid, kThreads>>>(given_, c_.pattern, p_.columns.data, seed_);
    CHECK(cudaGetLastError());
  }
  void forward_lists(std::vector<uint8_t>& halves, int blocks, int row) {
    CHECK(launch_gate(ffn_, chunk_, real_, nullptr));
    CHECK(launch_list(ffn_, chunk_, device_, nullptr));
    const std::vector<Counts> counts = p_.counts.get(blocks);
    const std::vector<uint16_t> neurons = p_.neurons.get(int64_t{blocks} * row);
    for (int b = 0; b < blocks; ++b) {
      const Counts k = counts[b];
      bool right = k.first_only >= 0 && k.both >= 0 && k.second_only >= 0 && k.all() <= c_.width;
      for (int e = 0; right && e < k.all(); ++e) {
        const int n = neurons[b * row + e], kind = e < k.first_only ? 1 : e < k.first_only + k.both ? 3 : 2;
        const bool starts = e == 0 || e == k.first_only || e == k.first_only + k.both;
        right = n < c_.width && (starts || n > neurons[b * row + e - 1]) && halves[int64_t{b} * c_.width + n] == 0;
        if (right) halves[int64_t{b} * c_.width + n] = static_cast<uint8_t>(kind);
      }
      if (!right) fail("list", {1, static_cast<unsigned long long>(b)});
    }
  }

  void fail(const char* what, const Faults& faults) {
    good_ = false;
    std::printf(
        "WRONG %s: %s T=%lld D=%d F=%d pattern %d share %.2f %s %s lists %s, kept %d, l1 %d, first token %lld, chunks "
        "of %d blocks, %d SMs: %llu wrong, the first at %llu\n",
        what, c_.dtype == DType::kBFloat16 ? "bf16" : "fp16", static_cast<long long>(c_.tokens), c_.hidden, c_.width,
        static_cast<int>(c_.pattern.kind), c_.pattern.share, c_.gated ? "gated" : "plain",
        c_.biased ? "biased" : "unbiased", c_.listed_by_kernels ? "by kernels" : "by host", static_cast<int>(c_.kept),
        static_cast<int>(c_.l1), static_cast<long long>(chunk_.first), c_.chunk_blocks, c_.sm_count, faults.count,
        faults.first);
  }
  template <typename Launch>
  void judge(const char* what, const Launch& launch) {
    p_.faults.put({{0, ~0ull}});
    launch();
    CHECK(cudaGetLastError());
    const Faults faults = p_.faults.get(1)[0];
    if (faults.count != 0) fail(what, faults);
  }
  void columns(Step step, bool wanted, const char* what) {
    if (!wanted) return;
    const uint16_t* ups = c_.gated && step != Step::kUp ? p_.ups.data : nullptr;
    judge(what, [&] { check_columns<<<kGrid, kThreads>>>(given_, step, p_.columns.data, ups, p_.faults.data); });
  }
  void rows(Term first, Term second, const void* bias, const Buffer<uint16_t>& y, const char* what) {
    const int64_t count = c_.tokens * c_.hidden + kGuard;
    judge(what, [&] { check_rows<<<kGrid, kThreads>>>(given_, first, second, bias, y.data, count, p_.faults.data); });
  }
  void equal(const Buffer<uint16_t>& a, const Buffer<uint16_t>& b, int64_t count, const char* what) {
    judge(what, [&] {
      check_equal<<<kGrid, kThreads>>>(reinterpret_cast<const uint8_t*>(a.data),
                                       reinterpret_cast<const uint8_t*>(b.data), count * 2, p_.faults.data);
    });
  }
  void expect_untouched() {
    const auto untouched = [&](const auto& buffer) {
      check_equal<<<kGrid, kThreads>>>(reinterpret_cast<const uint8_t*>(buffer.data), nullptr,
                                       static_cast<int64_t>(buffer.bytes), p_.faults.data);
    };
    judge("skipped", [&] {
      untouched(p_.columns), untouched(p_.ups), untouched(p_.masks), untouched(p_.counts), untouched(p_.neurons);
    });
  }

  const Case c_;
  Pool& p_;
  const Device real_, device_;
  const uint64_t seed_;
  Ffn ffn_{};
  Chunk chunk_{};
  Training training_{};
  Gradients gradients_{};
  Given given_{};
  int64_t entries_ = 0;
  bool good_ = true;
};

int check(const Device& real) {
  Pool bf16(DType::kBFloat16), fp16(DType::kFloat16);
  const Pattern patterns[] = {{Kind::kShare, 0.0f}, {Kind::kOneElement, 0.0f}, {Kind::kShare, 0.01f},
                              {Kind::kShare, 0.1f}, {Kind::kShare, 0.6f},      {Kind::kShare, 1.0f},
                              {Kind::kLate, 1.0f},  {Kind::kNan, 0.02f}};
  int checks = 0, failures = 0;
  uint64_t seed = 1;
  for (const int64_t tokens : {1, 63, 64, 65, 128, 130, 300, 1000}) {
    for (const int hidden : {8, 72, 136, 264, 2048}) {
      for (const int width : {16, 70, 344, 1001, 5632}) {
        for (const Pattern& pattern : patterns) {
          const uint64_t draw = hash(seed += 100);
          const auto pick = [&](int shift, int choices) { return static_cast<int>((draw >> shift & 0xff) % choices); };
          const int sm_counts[] = {real.sm_count, real.sm_count, 7, 1}, chunks[] = {8, 8, 3, 1};
          const bool by_kernels = pattern.kind == Kind::kShare && pick(0, 2) == 0;
          const Case c{pick(8, 2) ? DType::kBFloat16 : DType::kFloat16,
                       tokens,
                       hidden,
                       width,
                       pattern,
                       pick(16, 3) != 0,
                       pick(24, 2) != 0,
                       by_kernels,
                       static_cast<Kept>(pick(32, 3)),
                       static_cast<L1>(pick(40, 3)),
                       chunks[pick(48, 4)],
                       sm_counts[pick(56, 4)]};
          bool good = true;
          for (int64_t first = 0; first < tokens; first += int64_t{c.chunk_blocks} * kBlockTokens) {
            good = Chain(c, c.dtype == DType::kBFloat16 ? bf16 : fp16, real, first, seed).run() && good;
          }
          ++checks;
          failures += !good;
        }
      }
    }
  }
  std::printf("%d checks, %d wrong\n", checks, failures);
  return failures;
}

float median(std::vector<float> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Bits of the halves, from the pattern.
__global__ void mark(Given a, Pattern p, uint64_t seed) {
  const int64_t entries = int64_t{a.chunk.active.blocks} * a.ffn.width;
  for (int64_t e = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; e < entries; e += int64_t{gridDim.x} * blockDim.x) {
    const int64_t block = e / a.ffn.width, n = e % a.ffn.width;
    uint32_t bits = 0;
    for (int slot = 0; slot < kBlockTokens; ++slot) {
      const int64_t t = block * kBlockTokens + slot;
      if (is_active(p, a.ffn.tokens, a.ffn.width, t, static_cast<int>(n), seed)) bits |= 1u << slot / kHalfTokens;
    }
    const_cast<uint8_t*>(a.halves)[e] = static_cast<uint8_t>(bits);
    for (int half = 0; half < 2; ++half) {
      uint32_t* word = a.chunk.active.masks + (block * 2 + half) * a.chunk.active.words + n / 32;
      if (bits >> half & 1) atomicOr(word, 1u << n % 32);
    }
  }
}

// Chunks of so many blocks, one after the other, each with its own memory.
void time(const Device& device, float share, int chunk_blocks) {
  constexpr int64_t kTokens = 16384, kHidden = 2048, kWidth = 5632, kBlocks = kTokens / kBlockTokens;
  constexpr int64_t kValues = kBlocks * kWidth * kBlockTokens;
  Buffer<uint16_t> x(kTokens * kHidden), dy(kTokens * kHidden), out(kTokens * kHidden), gate(kWidth * kHidden);
  Buffer<uint16_t> up(kWidth * kHidden), down(kWidth * kHidden), columns(kValues), ups(kValues), g(kValues), u(kValues);
  Buffer<uint16_t> neurons(kBlocks * kWidth);
  Buffer<uint32_t> masks(kBlocks * 2 * kWidth / 32);
  Buffer<Counts> counts(kBlocks);
  Buffer<uint8_t> halves(kBlocks * kWidth);
  Buffer<float> l1(1);
  l1.put({1e-3f});
  uint64_t seed = 1;
  for (Buffer<uint16_t>* values : {&x, &dy, &gate, &up, &down}) {
    const int64_t count = static_cast<int64_t>(values->bytes / 2);
    fill<<<kGrid, kThreads>>>(DType::kBFloat16, values->data, count, ++seed, 0.0f, 0.05f);
    CHECK(cudaGetLastError());
  }
  const Ffn ffn{DType::kBFloat16, kTokens, kHidden, kWidth,  x.data,  {gate.data},
                {up.data},        {down.data}, nullptr, nullptr, nullptr, out.data};
  const auto part = [&](int64_t first_block, int64_t blocks) {
    const Active active{masks.data + first_block * 2 * (kWidth / 32),
                        counts.data + first_block,
                        neurons.data + first_block * kWidth,
                        columns.data + first_block * kWidth * kBlockTokens,
                        ups.data + first_block * kWidth * kBlockTokens,
                        static_cast<int>(blocks),
                        kWidth / 32,
                        kWidth};
    return Chunk{first_block * kBlockTokens, blocks * kBlockTokens, active, nullptr};
  };
  const Chunk whole = part(0, kBlocks);
  Training training{};
  training.l1_scale = l1.data;
  Gradients gradients{};
  gradients.dy = dy.data;
  gradients.x = out.data;
  const Given given{ffn, whole, training, dy.data, halves.data, g.data, u.data};
  const Pattern pattern{share < 1.0f ? Kind::kUnion : Kind::kShare, share};
  CHECK(cudaMemset(masks.data, 0, masks.bytes));
  mark<<<kGrid, kThreads>>>(given, pattern, seed);
  CHECK(cudaGetLastError());
  fill_gate<<<kGrid, kThreads>>>(given, pattern, g.data, seed);
  CHECK(cudaGetLastError());
  CHECK(launch_list(ffn, whole, device, nullptr));
  const auto restore = [&] {
    CHECK(cudaMemcpyAsync(columns.data, g.data, g.bytes, cudaMemcpyDeviceToDevice));
    CHECK(cudaMemcpyAsync(ups.data, u.data, u.bytes, cudaMemcpyDeviceToDevice));
  };
  restore();
  CHECK(launch_up_beside(ffn, whole, device, nullptr));
  CHECK(cudaMemcpyAsync(u.data, ups.data, u.bytes, cudaMemcpyDeviceToDevice));

  constexpr int kKernels = 5, kRepeats = 25;
  const char* names[kKernels] = {"up", "up beside", "down", "dh", "dx"};
  std::vector<float> times[kKernels];
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    for (int kernel = 0; kernel < kKernels; ++kernel) {
      restore();
      CHECK(cudaEventRecord(begin));
      for (int64_t block = 0; block < kBlocks; block += chunk_blocks) {
        const Chunk chunk = part(block, std::min<int64_t>(chunk_blocks, kBlocks - block));
        switch (kernel) {
          case 0: CHECK(launch_up(ffn, chunk, device, nullptr)); break;
          case 1: CHECK(launch_up_beside(ffn, chunk, device, nullptr)); break;
          case 2: CHECK(launch_down(ffn, chunk, device, nullptr)); break;
          case 3: CHECK(launch_dh(ffn, chunk, training, gradients, device, nullptr)); break;
          default: CHECK(launch_dx(ffn, chunk, gradients, device, nullptr)); break;
        }
      }
      CHECK(cudaEventRecord(end));
      CHECK(cudaEventSynchronize(end));
      float milliseconds = 0.0f;
      CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
      times[kernel].push_back(1000.0f * milliseconds);
    }
  }
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
  double active[2] = {0.0, 0.0};  // neurons of whole and of half blocks
  for (const Counts& k : counts.get(kBlocks)) {
    active[0] += k.all();
    active[1] += k.first_only + 2.0 * k.both + k.second_only;
  }
  std::printf("chunks of %d blocks, %.0f neurons a block, %.0f a half block:", chunk_blocks, active[0] / kBlocks,
              active[1] / kBlocks / 2);
  for (int kernel = 0; kernel < kKernels; ++kernel) {
    const double flops = 2.0 * kHalfTokens * active[1] * kHidden * (kernel == 4 ? 2 : 1);
    const float microseconds = median(times[kernel]);
    std::printf("  %s %.0f us (%.0f TFLOP/s)", names[kernel], microseconds, flops / microseconds * 1e-6);
  }
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  const Device real{properties.multiProcessorCount, properties.major, properties.minor};
  if (argc > 1 && std::strcmp(argv[1], "time") == 0) {
    for (const float share : {0.24f, 1.0f}) {
      for (const int chunk_blocks : {128, 21}) time(real, share, chunk_blocks);
    }
    return 0;
  }
  return check(real) == 0 ? 0 : 1;
}
