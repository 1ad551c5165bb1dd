// Checks whole training steps (forward, backward) against plain matrix products, with blocks of tokens that are kept,
// that are not, and some of both; or times the steps and what they are made of. Leaves with 1 where anything is wrong.
//
// Built by kernels/tests/check_cuda.sh.
//   ./training_check [time]
#include <cstring>
#include <iterator>
#include <string>

#include "sm90/training/step.cu"  // with what it keeps to itself

#include "common/transpose.h"
#include "tests/check.cuh"

namespace training_check {

using namespace twell;
using namespace twell::sm90;
using checks::hash;
using Bytes = checks::Buffer<char>;
using Floats = checks::Buffer<float>;

constexpr int kSequence = 1024, kTopic = 256, kVocabulary = 4096;  // as in hf_twell/bench/workload.py

struct Case {
  int tokens, hidden, width;
  double active;  // neurons a token
  int64_t capacity;
  bool gated;
};

// ---- inputs

__device__ float normal(uint64_t key) {
  const uint64_t bits = hash(key);
  const float a = (static_cast<uint32_t>(bits) + 0.5f) * 0x1p-32f, b = static_cast<uint32_t>(bits >> 32) * 0x1p-32f;
  return sqrtf(-2.0f * logf(a)) * cosf(6.2831853f * b);
}
__global__ void make_tokens(__nv_bfloat16* x, const int* words, int64_t tokens, int hidden) {
  for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < tokens * hidden; i += gridDim.x * 256) {
    const int64_t t = i / hidden, d = i % hidden;
    float value = sqrtf(0.40f) * normal((uint64_t{1} << 60) + uint64_t(words[t]) * 65536 + d) +
                  sqrtf(0.25f) * normal((uint64_t{2} << 60) + uint64_t(t / kTopic) * 65536 + d) +
                  sqrtf(0.35f) * normal((uint64_t{3} << 60) + i);
    if (d == 0) value = 8.0f;
    if (d == 1) value = 0.28f * normal((uint64_t{4} << 60) + t) + 1.1f * expf(-float(t % kSequence) / 6.0f);
    x[i] = __float2bfloat16(value);
  }
}
// With a threshold: a gate's rows.
__global__ void make_rows(__nv_bfloat16* w, uint64_t seed, float scale, int64_t rows, int hidden, float threshold) {
  for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < rows * hidden; i += gridDim.x * 256) {
    float value = scale * normal((seed << 56) + i);
    if (threshold != 0.0f && i % hidden == 0) value = -(0.45f * normal((uint64_t{9} << 56) + i) + threshold) / 8.0f;
    if (threshold != 0.0f && i % hidden == 1) value = 1.0f;
    w[i] = __float2bfloat16(value);
  }
}

float threshold_for(double share) {
  double low = -9, high = 9;
  for (int i = 0; i < 40; ++i) {
    const double mid = (low + high) / 2;
    double mean = 0.0;
    for (int place = 0; place < kSequence; ++place) {
      mean += 0.5 * std::erfc((mid - 1.1 * std::exp(-place / 6.0)) / std::sqrt(2 * (1 + 0.28 * 0.28 + 0.45 * 0.45)));
    }
    (mean / kSequence > share ? low : high) = mid;
  }
  return static_cast<float>(low);
}

std::vector<int> make_words(int tokens) {
  std::vector<double> until(kVocabulary);
  double sum = 0.0;
  for (int w = 0; w < kVocabulary; ++w) until[w] = sum += 1.0 / (w + 1);
  std::vector<int> words(tokens);
  for (int t = 0; t < tokens; ++t) {
    const double at = static_cast<double>(hash(t + 77) >> 11) * 0x1p-53 * sum;
    words[t] = static_cast<int>(std::lower_bound(until.begin(), until.end(), at) - until.begin());
  }
  return words;
}

struct Setup {
  const Case c;
  Bytes x, gate, up, down, down_weight, dy, y, dx, d_gate, d_up, d_down, d_weight, b_gate, b_up, state, workspace;
  Floats report, scale;
  Ffn ffn{};
  Gradients gradients{};
  L1 forward_l1{}, backward_l1{};
  Device device;

  static int64_t bytes(int64_t rows, int64_t columns) { return rows * columns * 2; }
  static Ffn make_ffn(const Case& c) {
    Ffn ffn{};
    ffn.dtype = DType::kBFloat16, ffn.tokens = c.tokens, ffn.hidden = c.hidden, ffn.width = c.width;
    ffn.up.data = c.gated ? &ffn : nullptr;  // only whether there is one
    return ffn;
  }

  Setup(const Case& of, const Device& on)
      : c(of), x(bytes(c.tokens, c.hidden)), gate(bytes(c.width, c.hidden)), up(gate.bytes), down(gate.bytes),
        down_weight(gate.bytes), dy(x.bytes), y(x.bytes), dx(x.bytes), d_gate(gate.bytes), d_up(gate.bytes),
        d_down(gate.bytes), d_weight(gate.bytes), b_gate(c.width * 2), b_up(c.width * 2),
        state(sm90_state_bytes(make_ffn(c), c.capacity)),
        workspace(std::max(sm90_training_bytes(make_ffn(c)), sm90_backward_bytes(make_ffn(c), c.capacity, true))),
        report(1 + c.width), scale(std::vector<float>{1e-3f}), device(on) {
    const checks::Buffer<int> words(make_words(c.tokens));
    const auto bf = [](const Bytes& b) { return reinterpret_cast<__nv_bfloat16*>(b.data); };
    make_tokens<<<2048, 256>>>(bf(x), words.data, c.tokens, c.hidden);
    const float gate_scale = 1.0f / std::sqrt(static_cast<float>(c.hidden));
    make_rows<<<2048, 256>>>(bf(gate), 10, gate_scale, c.width, c.hidden, threshold_for(c.active / c.width));
    make_rows<<<2048, 256>>>(bf(up), 11, gate_scale, c.width, c.hidden, 0.0f);
    make_rows<<<2048, 256>>>(bf(down_weight), 12, 1.0f / std::sqrt(float(c.width)), c.hidden, c.width, 0.0f);
    make_rows<<<2048, 256>>>(bf(dy), 13, 1.0f, c.tokens, c.hidden, 0.0f);
    CHECK(transpose(down_rows(), Start::kAlone, nullptr));
    CHECK(cudaDeviceSynchronize());
    ffn = make_ffn(c);
    ffn.x = x.data, ffn.gate.data = gate.data, ffn.up.data = c.gated ? up.data : nullptr, ffn.down.data = down.data, ffn.y = y.data;
    forward_l1.report = report.data;
    backward_l1.scale = scale.data;
    gradients = {dy.data, dx.data, d_gate.data, c.gated ? d_up.data : nullptr, d_down.data, b_gate.data,
                 c.gated ? b_up.data : nullptr};
  }

  std::vector<const Bytes*> outputs() const {
    if (c.gated) return {&y, &dx, &d_gate, &d_down, &b_gate, &d_up, &b_up};
    return {&y, &dx, &d_gate, &d_down, &b_gate};
  }
  // The stock layout of down_proj is (D, F).
  Transposition down_rows() const { return {down_weight.data, c.hidden, c.width, down.data}; }
  Transposition down_gradient() const { return {d_down.data, c.width, c.hidden, d_weight.data}; }
  bool transposes() const { return c.width % 8 == 0; }
  // `poisoned`: nobody may use the rows of before.
  void step(cudaStream_t stream, const Gradients& wanted, bool poisoned = false) {
    const Transposition rows = transposes() ? down_rows() : Transposition{};
    const auto poison = [&] {
      if (transposes() && poisoned) CHECK(cudaMemsetAsync(down.data, 0xff, down.bytes, stream));
    };
    poison();
    CHECK(sm90_training_forward(ffn, rows, forward_l1, c.capacity, state.data, workspace.data, device, stream));
    poison();
    CHECK(sm90_backward(ffn, rows, backward_l1, c.capacity, state.data, wanted, workspace.data, device, stream));
    if (transposes() && wanted.down != nullptr) CHECK(transpose(down_gradient(), Start::kAfter, stream));
  }
  std::vector<std::vector<char>> results(const Gradients& wanted) {
    for (const Bytes* output : outputs()) const_cast<Bytes*>(output)->poison();
    state.poison(), workspace.poison(), report.poison();
    CHECK(cudaDeviceSynchronize());
    step(nullptr, wanted, true);
    CHECK(cudaDeviceSynchronize());
    std::vector<std::vector<char>> all;
    for (const Bytes* output : outputs()) all.push_back(output->get());
    return all;
  }
  bool turned_back() const {
    const std::vector<char> rows = d_down.get(), turned = d_weight.get();
    for (int64_t f = 0; f < c.width; ++f) {
      for (int64_t d = 0; d < c.hidden; ++d) {
        if (std::memcmp(&rows[2 * (f * c.hidden + d)], &turned[2 * (d * c.width + f)], 2) != 0) return false;
      }
    }
    return true;
  }
  std::vector<int64_t> totals() const {  // blocks kept, entries, pairs
    std::vector<int64_t> values(3);
    CHECK(cudaMemcpy(values.data(), state.data, 24, cudaMemcpyDeviceToHost));
    return values;
  }
};

// ---- reference

__global__ void widen_all(const __nv_bfloat16* from, float* to, int64_t count) {
  for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) to[i] = __bfloat162float(from[i]);
}
struct Matrix {
  const float* values;
  int64_t row, column;  // strides
};
__global__ void multiply_all(Matrix a, Matrix b, float* out, int64_t rows, int64_t depth, int64_t columns, bool add) {
  for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < rows * columns; i += gridDim.x * 256) {
    const int64_t r = i / columns, c = i % columns;
    double sum = add ? out[i] : 0.0;
    for (int64_t k = 0; k < depth; ++k) {
      sum += double(a.values[r * a.row + k * a.column]) * b.values[k * b.row + c * b.column];
    }
    out[i] = static_cast<float>(sum);
  }
}
__device__ float rounded(float v) { return __bfloat162float(__float2bfloat16(v)); }
__global__ void activate(float* g, float* u, float* h, int64_t count, bool gated) {
  for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) {
    g[i] = rounded(fmaxf(g[i], 0.0f)), u[i] = gated ? rounded(u[i]) : 1.0f;
    h[i] = rounded(g[i] * u[i]);
  }
}
__global__ void differentiate(float* g, float* u, const float* h, const float* dh, float l1, int64_t count) {
  for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) {
    const float d = dh[i] + (h[i] > 0.0f ? l1 : h[i] < 0.0f ? -l1 : 0.0f), dg = g[i] != 0.0f ? rounded(d * u[i]) : 0.0f;
    u[i] = rounded(d * g[i]), g[i] = dg;
  }
}

struct Reference {
  const Case c;
  std::vector<std::vector<float>> outputs;  // in the order of Setup::outputs()

  explicit Reference(const Setup& s) : c(s.c) {
    const int64_t T = c.tokens, D = c.hidden, F = c.width;
    const auto wide = [](const Bytes& from, Floats& to) {
      widen_all<<<1024, 256>>>(reinterpret_cast<const __nv_bfloat16*>(from.data), to.data, from.bytes / 2);
    };
    Floats x(T * D), dy(T * D), gate(F * D), up(F * D), down(F * D), g(T * F), u(T * F), h(T * F), dh(T * F);
    wide(s.x, x), wide(s.dy, dy), wide(s.gate, gate), wide(s.up, up), wide(s.down, down);
    const auto product = [](Matrix a, Matrix b, Floats& out, int64_t rows, int64_t depth, int64_t columns,
                            bool add = false) {
      multiply_all<<<2048, 256>>>(a, b, out.data, rows, depth, columns, add);
    };
    product({x.data, D, 1}, {gate.data, 1, D}, g, T, D, F);
    product({x.data, D, 1}, {up.data, 1, D}, u, T, D, F);
    activate<<<1024, 256>>>(g.data, u.data, h.data, T * F, c.gated);
    Floats y(T * D), dx(T * D), d_gate(F * D), d_up(F * D), d_down(F * D), b_gate(F), b_up(F);
    const Floats ones(std::vector<float>(T, 1.0f));
    product({h.data, F, 1}, {down.data, D, 1}, y, T, F, D);
    product({h.data, 1, F}, {dy.data, D, 1}, d_down, F, T, D);
    product({dy.data, D, 1}, {down.data, 1, D}, dh, T, D, F);
    differentiate<<<1024, 256>>>(g.data, u.data, h.data, dh.data, 1e-3f, T * F);
    product({g.data, F, 1}, {gate.data, D, 1}, dx, T, F, D);
    if (c.gated) product({u.data, F, 1}, {up.data, D, 1}, dx, T, F, D, true);
    product({g.data, 1, F}, {x.data, D, 1}, d_gate, F, T, D);
    product({u.data, 1, F}, {x.data, D, 1}, d_up, F, T, D);
    product({g.data, 1, F}, {ones.data, 1, 0}, b_gate, F, T, 1);
    product({u.data, 1, F}, {ones.data, 1, 0}, b_up, F, T, 1);
    CHECK(cudaDeviceSynchronize());
    for (const Floats* each : {&y, &dx, &d_gate, &d_down, &b_gate}) outputs.push_back(each->get());
    if (c.gated) outputs.push_back(d_up.get()), outputs.push_back(b_up.get());
  }
};

float widened(const std::vector<char>& bytes, size_t i) {
  uint16_t bits;
  std::memcpy(&bits, bytes.data() + 2 * i, 2);
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

constexpr const char* kOutputs[] = {"y", "dx", "dWg", "dWd", "dbg", "dWu", "dbu"};

// Whether all outputs are near.
bool near(const std::vector<std::vector<char>>& seen, const Reference& reference, const std::string& what) {
  constexpr double kLimit = 0.01;
  bool right = true;
  for (size_t o = 0; o < seen.size(); ++o) {
    double difference = 0.0, square = 0.0;
    for (size_t i = 0; i < seen[o].size() / 2; ++i) {
      const double e = reference.outputs[o][i], d = widened(seen[o], i) - e;
      difference += d * d, square += e * e;
    }
    const double error = std::sqrt(difference / square);
    if (error <= kLimit) continue;  // NaN is not
    std::printf("WRONG %s: %s error %.2e\n", what.c_str(), kOutputs[o], error);
    right = false;
  }
  return right;
}

std::string name_of(const Case& c) {
  char text[160];
  std::snprintf(text, sizeof(text), "T=%d D=%d F=%d L0=%g capacity %lld %s", c.tokens, c.hidden, c.width, c.active,
                static_cast<long long>(c.capacity), c.gated ? "gated" : "plain");
  return text;
}

bool check(const Case& c, const Device& device) {
  Setup s(c, device);
  const Reference reference(s);
  const std::string name = name_of(c);
  const auto seen = s.results(s.gradients), again = s.results(s.gradients);
  bool right = near(seen, reference, name);
  if (s.transposes() && !s.turned_back()) std::printf("WRONG %s: dWd's transpose\n", name.c_str()), right = false;
  auto x_alone = s.results({s.gradients.dy, s.gradients.x});
  x_alone.resize(2);  // y and dx
  right &= near(x_alone, reference, name + ", no weights' gradients");
  if (seen != again) std::printf("WRONG %s: not repeated\n", name.c_str()), right = false;

  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  s.step(stream, s.gradients);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  for (const Bytes* output : s.outputs()) const_cast<Bytes*>(output)->poison();
  CHECK(cudaDeviceSynchronize());
  for (int i = 0; i < 2; ++i) CHECK(cudaGraphLaunch(exec, stream));
  CHECK(cudaStreamSynchronize(stream));
  std::vector<std::vector<char>> replayed;
  for (const Bytes* output : s.outputs()) replayed.push_back(output->get());
  if (replayed != seen) std::printf("WRONG %s: graph differs\n", name.c_str()), right = false;
  CHECK(cudaGraphExecDestroy(exec));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaStreamDestroy(stream));
  return right;
}

// ---- times

// Lets the host get ahead of the GPU.
__global__ void idle(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
}

// Launches with an event after each stage.
struct Stages {
  struct Stage {
    std::string name;
    std::vector<float> us;
  };
  std::vector<Stage> stages;
  std::vector<cudaEvent_t> events;
  size_t next = 0;

  cudaEvent_t event(size_t i) {
    while (events.size() <= i) CHECK(cudaEventCreate(&events.emplace_back()));
    return events[i];
  }
  void begin() {
    next = 0;
    idle<<<1, 1>>>(1000000);
    CHECK(cudaEventRecord(event(0)));
  }
  void end(const char* name) {
    CHECK(cudaEventRecord(event(++next)));
    if (stages.size() < next) stages.push_back({name, {}});
  }
  void collect() {
    CHECK(cudaDeviceSynchronize());
    for (size_t i = 0; i < next; ++i) {
      stages[i].us.emplace_back();
      CHECK(cudaEventElapsedTime(&stages[i].us.back(), events[i], events[i + 1]));
    }
  }
  static double median(std::vector<float> ms) {
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2] * 1e3;
  }
};

// What a step launches, part by part. Parts that run in each chunk are added up by name.
void launch_parts(Setup& s, Stages& stages) {
  const Ffn& ffn = s.ffn;
  const Device& device = s.device;
  const Case& c = s.c;
  stages.begin();
  CHECK(transpose(s.down_rows(), Start::kAlone, nullptr));
  stages.end("transpose");
  Chunk chunk{};
  Saving saving;
  Cutter cutter(s.workspace.data);
  place_forward(ffn, cutter, &chunk.active, &saving);
  const State state = place_state(ffn, c.capacity, s.state.data);
  const Training training{nullptr, nullptr, s.report.data, state};
  for (; chunk.first < ffn.tokens; chunk.first += chunk.tokens) {
    fit(ffn, forward_blocks(ffn), &chunk);
    CHECK(launch_gate(ffn, chunk, device, nullptr));
    stages.end("gate");
    const bool first = chunk.first == 0;
    const Zeroed totals{reinterpret_cast<uint64_t*>(state.totals), first ? 3 : 0};
    CHECK(launch_list(ffn, chunk, device, nullptr, totals, {saving.slots, first ? kSlots : 0}));
    stages.end("list");
    ++saving.turn;
    CHECK(launch_save(ffn, chunk, saving, training, device, nullptr));
    stages.end("save");
    CHECK(launch_up_save(ffn, chunk, saving, training, device, nullptr));
    stages.end("up");
    saving.waiting += chunk.active.blocks;
    const bool last = chunk.first + chunk.tokens == ffn.tokens;
    if (last || saving.waiting + forward_blocks(ffn) > saving.rows) {
      CHECK(launch_report(ffn, saving, training, nullptr));
      saving.waiting = 0, saving.reported = true;
    }
    stages.end("report");
    CHECK(launch_down(ffn, chunk, device, nullptr));
    stages.end("down");
  }
  CHECK(transpose(s.down_rows(), Start::kAlone, nullptr));
  stages.end("transpose");
  const Training trained{s.scale.data, nullptr, nullptr, state};
  const Backward b = place_backward(ffn, state, true, s.workspace.data, nullptr);
  CHECK(launch_sort(ffn, state, b.sorted, count_blocks(ffn), device, nullptr));
  CHECK(launch_weights_plan(ffn, state, b.sorted, s.gradients, b.partials, nullptr));
  stages.end("sort");
  chunk = {};
  chunk.kept = state.totals;
  for (; chunk.first < ffn.tokens; chunk.first += chunk.tokens) {
    fit(ffn, kMaxBlocks, &chunk);
    CHECK(launch_pair_dh(ffn, chunk, trained, s.gradients, b.pairs, b.sorted, device, nullptr));
    stages.end("dh");
    CHECK(launch_pair_dx(ffn, chunk, state, b.pairs, s.gradients, device, nullptr));
    stages.end("dx");
  }
  CHECK(launch_weights(ffn, state, b.sorted, s.gradients, b.partials, true, device, nullptr));
  stages.end("weights");
  CHECK(launch_not_kept(ffn, trained, b, s.gradients, device, nullptr));
  stages.end("not kept");
  CHECK(transpose(s.down_gradient(), Start::kAfter, nullptr));
  stages.end("transpose");
}

constexpr int kRepeats = 15;

void print(const Stages& stages) {
  std::vector<std::pair<std::string, double>> sums;
  double all = 0.0;
  for (const Stages::Stage& stage : stages.stages) {
    const double us = Stages::median(stage.us);
    all += us;
    auto at = std::find_if(sums.begin(), sums.end(), [&](const auto& sum) { return sum.first == stage.name; });
    if (at == sums.end()) at = sums.insert(sums.end(), {stage.name, 0.0});
    at->second += us;
  }
  std::printf(" ");
  for (const auto& [name, us] : sums) std::printf(" %s %.1f", name.c_str(), us);
  std::printf("; together %.0f\n", all);
}

double whole(Setup& s) {
  Stages stages;
  for (int i = 0; i < kRepeats + 3; ++i) {
    stages.begin();
    s.step(nullptr, s.gradients);
    stages.end("step");
    if (i >= 3) stages.collect();
  }
  for (cudaEvent_t event : stages.events) CHECK(cudaEventDestroy(event));
  return Stages::median(stages.stages[0].us);
}

void time(int tokens, double active, const Device& device) {
  Setup s({tokens, 2048, 5632, active, static_cast<int64_t>(1.5 * active), true}, device);
  const double us = whole(s);
  const std::vector<int64_t> totals = s.totals();
  std::printf("T=%d L0=%g: %lld of %lld blocks kept, %lld entries, %.1f pairs a token\n", tokens, active,
              static_cast<long long>(totals[0]), static_cast<long long>(count_blocks(s.ffn)),
              static_cast<long long>(totals[1]), static_cast<double>(totals[2]) / tokens);
  std::printf("  whole %.1f us, workspace %.1f MiB, of backward %.1f, state %.1f\n", us, s.workspace.bytes / 1048576.0,
              sm90_backward_bytes(s.ffn, s.c.capacity, true) / 1048576.0, s.state.bytes / 1048576.0);
  Stages stages;
  for (int i = 0; i < kRepeats; ++i) {
    launch_parts(s, stages);
    stages.collect();
  }
  for (cudaEvent_t event : stages.events) CHECK(cudaEventDestroy(event));
  print(stages);
}

}  // namespace training_check

int main(int argc, char** argv) {
  using namespace training_check;
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  const Device device{properties.multiProcessorCount, properties.major, properties.minor};
  if (argc > 1 && std::strcmp(argv[1], "time") == 0) {
    for (const double active : {15.0, 30.0, 60.0, 120.0}) time(16384, active, device);
    for (const int tokens : {4096, 32768}) time(tokens, 30.0, device);
    return 0;
  }
  // A capacity of 1 leaves no room for heavy neurons.
  const Case cases[] = {
      {1000, 264, 1001, 40, 1001, true},  {1000, 264, 1001, 40, 30, true},  {1000, 264, 1001, 40, 1, true},
      {1000, 264, 1001, 40, 1001, false}, {1000, 264, 1001, 40, 30, false}, {2500, 520, 2500, 60, 2500, true},
      {2500, 520, 2500, 60, 45, true},    {2500, 136, 344, 60, 344, true},  {130, 264, 1001, 300, 1001, true},
      {9000, 264, 504, 20, 100, true},    {9000, 264, 504, 20, 19, true},   {9000, 72, 504, 20, 12, false},
      {1000, 264, 1000, 40, 1000, true},  {1000, 264, 1000, 40, 30, false}, {2500, 520, 2504, 60, 45, true},
      {9000, 136, 2500, 60, 100, true},   {9000, 136, 2500, 60, 40, true},  {9000, 136, 2500, 60, 10, true},
  };
  int wrong = 0;
  for (const Case& c : cases) wrong += !check(c, device);
  std::printf("%zu cases, %d wrong\n", std::size(cases), wrong);
  return wrong == 0 ? 0 : 1;
}
