// Checks sm90::forward() for 65 to 2,048 tokens, with every way to share out the neurons and with the kernels for more
// tokens, against plain fp32 loops over awkward shapes, densities and biases, with poisoned memory; then times the
// parts and the whole inside captured graphs over several sets of weights, so that weights come from device memory.
//
// Built by kernels/tests/check_cuda.sh.
//   ./prefill_check          checks, then timings      ./prefill_check check | verbose | time | long
//
// Built with -DTWELL_MID_TRACE, the timings also say when thread blocks reach each of their phases.
//
// Exits 1 on any mismatch or CUDA error.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>

#include "host/dispatch.h"
#include "sm90/common/launch.h"
#include "sm90/common/workspace.h"
#include "sm90/mid/mid.h"
#include "sm90/prefill/prefill.h"
#include "tests/graph.cuh"

namespace {

using namespace twell;
using checks::Buffer;

template <typename Half>
__global__ void fill_kernel(Half* out, int64_t n, uint64_t seed, float mean, float deviation) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < n; i += gridDim.x * int64_t{256}) {
    const uint64_t bits = checks::hash(seed * 0x51ed2701ull + i);
    const float u = (static_cast<uint32_t>(bits) + 0.5f) * 2.3283064e-10f, v = (bits >> 32) * 2.3283064e-10f;
    out[i] = Half(mean + deviation * sqrtf(-2.f * logf(u)) * cospif(2.f * v));
  }
}

// values[r % count] into the first column.
template <typename Half>
__global__ void set_column_kernel(Half* out, int64_t rows, int64_t columns, const float* values, int count) {
  for (int64_t r = blockIdx.x * int64_t{256} + threadIdx.x; r < rows; r += gridDim.x * int64_t{256}) {
    out[r * columns] = Half(values[r % count]);
  }
}

template <typename Half>
__device__ float dot(const Half* a, const Half* b, int n) {
  float s = 0.f;
  for (int i = threadIdx.x % 32; i < n; i += 32) s += static_cast<float>(a[i]) * static_cast<float>(b[i]);
  for (int d = 16; d > 0; d /= 2) s += __shfl_xor_sync(~0u, s, d);
  return s;
}

// One warp for each (token, neuron).
template <typename Half>
__global__ void naive_products(const Ffn f, float* h, unsigned long long* active) {
  const int64_t warp = (blockIdx.x * int64_t{256} + threadIdx.x) / 32;
  if (warp >= f.tokens * f.width) return;
  const int64_t t = warp / f.width, n = warp % f.width;
  const Half* x = static_cast<const Half*>(f.x) + t * f.hidden;
  float g = dot(x, static_cast<const Half*>(f.gate.data) + n * f.hidden, f.hidden);
  if (f.b_gate) g += static_cast<float>(static_cast<const Half*>(f.b_gate)[n]);
  g = g <= 0.f ? 0.f : g;
  float v = g;
  if (f.up.data != nullptr && g != 0.f) {
    float u = dot(x, static_cast<const Half*>(f.up.data) + n * f.hidden, f.hidden);
    if (f.b_up) u += static_cast<float>(static_cast<const Half*>(f.b_up)[n]);
    v = g * u;
  }
  if (threadIdx.x % 32 == 0) {
    h[warp] = v;
    if (g != 0.f) atomicAdd(active, 1ull);
  }
}

template <typename Half>
__global__ void naive_outputs(const Ffn f, const float* h, float* y) {
  const int d = blockIdx.x * 256 + threadIdx.x;
  const int64_t t = blockIdx.y;
  if (d >= f.hidden) return;
  float s = 0.f;
  for (int n = 0; n < f.width; ++n) {
    const float v = h[t * f.width + n];
    if (v != 0.f) s += v * static_cast<float>(static_cast<const Half*>(f.down.data)[static_cast<int64_t>(n) * f.hidden + d]);
  }
  if (f.b_down) s += static_cast<float>(static_cast<const Half*>(f.b_down)[d]);
  y[t * f.hidden + d] = s;
}

Device read_device() {
  Device d{};
  int id = 0;
  CHECK(cudaGetDevice(&id));
  CHECK(cudaDeviceGetAttribute(&d.sm_count, cudaDevAttrMultiProcessorCount, id));
  CHECK(cudaDeviceGetAttribute(&d.major, cudaDevAttrComputeCapabilityMajor, id));
  CHECK(cudaDeviceGetAttribute(&d.minor, cudaDevAttrComputeCapabilityMinor, id));
  return d;
}

// The weights of one block; the first column of `gate` holds thresholds, where that of x is 1.
template <typename Half>
struct Layer {
  int hidden, width;
  Buffer<Half> gate, up, down, b_gate, b_up, b_down;

  Layer(int d, int f, uint64_t seed)
      : hidden(d), width(f), gate(size_t(d) * f), up(size_t(d) * f), down(size_t(d) * f), b_gate(f), b_up(f),
        b_down(d) {
    const float deviation = 1.f / std::sqrt(static_cast<float>(d));
    fill(gate, seed, deviation), fill(up, seed + 1, deviation);
    fill(down, seed + 2, 1.f / std::sqrt(static_cast<float>(f)));
    fill(b_gate, seed + 3, 0.25f), fill(b_up, seed + 4, 0.5f), fill(b_down, seed + 5, 0.01f);
  }
  static void fill(Buffer<Half>& out, uint64_t seed, float deviation) {
    fill_kernel<<<1024, 256>>>(out.data, static_cast<int64_t>(out.bytes / sizeof(Half)), seed, 0.f, deviation);
    CHECK(cudaGetLastError());
  }
  static void set_column(Half* out, int64_t rows, int64_t columns, const std::vector<float>& values) {
    const Buffer<float> all(values);
    set_column_kernel<<<64, 256>>>(out, rows, columns, all.data, static_cast<int>(values.size()));
    CHECK(cudaDeviceSynchronize());
  }
  Ffn ffn(int tokens, const Half* x, void* y, bool gated, bool biases) const {
    Ffn f{};
    f.dtype = std::is_same<Half, __half>::value ? DType::kFloat16 : DType::kBFloat16;
    f.tokens = tokens, f.hidden = hidden, f.width = width;
    f.x = x, f.gate.data = gate.data, f.up.data = gated ? up.data : nullptr, f.down.data = down.data, f.y = y;
    if (biases) f.b_gate = b_gate.data, f.b_up = gated ? b_up.data : nullptr, f.b_down = b_down.data;
    return f;
  }
};

sm90::Chunk chunk_of(const Ffn& f, void* workspace) {
  sm90::Chunk chunk{};
  sm90::Cutter cutter(workspace);
  sm90::place_active(f, sm90::count_blocks(f), false, cutter, &chunk.active);
  sm90::fit(f, sm90::count_blocks(f), &chunk);
  return chunk;
}

using Part = std::function<cudaError_t(const Ffn&, const sm90::Chunk&, const Device&, cudaStream_t)>;
using Ways = std::vector<std::pair<const char*, Part>>;

// Ways to compute up: as launch_up() chooses, and each of both.
Ways ways_up() {
  Ways ways{{"as chosen", sm90::launch_up}};
  for (const bool many : {false, true}) {
    ways.emplace_back(many ? "for many blocks" : "for few blocks",
                      [=](const Ffn& f, const sm90::Chunk& chunk, const Device& device, cudaStream_t stream) {
                        return sm90::launch_up_as(f, chunk, device, stream, many);
                      });
  }
  return ways;
}

cudaError_t run_long(const Ffn& f, const Device& device, void* workspace, cudaStream_t stream,
                     const Part& up = sm90::launch_up, int64_t blocks = 0) {
  if (blocks == 0) blocks = sm90::chunk_blocks(f, int64_t{192} << 20, 1);
  sm90::Chunk chunk{};
  sm90::Cutter cutter(workspace);
  sm90::place_active(f, blocks, false, cutter, &chunk.active);
  for (; chunk.first < f.tokens; chunk.first += chunk.tokens) {
    sm90::fit(f, blocks, &chunk);
    TWELL_RETURN_IF_ERROR(sm90::launch_gate(f, chunk, device, stream));
    TWELL_RETURN_IF_ERROR(sm90::launch_list(f, chunk, device, stream));
    if (f.up.data != nullptr) TWELL_RETURN_IF_ERROR(up(f, chunk, device, stream));
    TWELL_RETURN_IF_ERROR(sm90::launch_down(f, chunk, device, stream));
  }
  return cudaSuccess;
}

cudaError_t run_mid(const Ffn& f, const sm90::MidPlan& plan, const Device& device, void* workspace,
                    cudaStream_t stream) {
  const sm90::Chunk chunk = chunk_of(f, workspace);
  TWELL_RETURN_IF_ERROR(sm90::launch_mid_gate_up(f, chunk, plan, stream));
  return sm90::launch_mid_down(f, chunk, device, plan, stream);
}

struct Variant {
  std::string name;
  std::function<cudaError_t(const Ffn&, void*)> run;
};

// Lets the next kernel start at once, and changes masks then.
__global__ void flip_masks(uint32_t* masks, int64_t words) {
  cudaTriggerProgrammaticLaunchCompletion();
  const long long start = clock64();
  while (clock64() - start < 20000) {
  }
  for (int64_t i = threadIdx.x; i < words; i += blockDim.x) masks[i] = ~masks[i];
}

// So that down's first guess is wrong: all inactive neurons and none of the active ones.
cudaError_t run_mid_guessing_wrong(const Ffn& f, const sm90::MidPlan& plan, const Device& device, void* workspace) {
  const sm90::Chunk chunk = chunk_of(f, workspace);
  TWELL_RETURN_IF_ERROR(sm90::launch_mid_gate_up(f, chunk, plan, nullptr));
  for (int i = 0; i < 2; ++i) {
    flip_masks<<<1, 256>>>(chunk.active.masks, int64_t{2} * chunk.active.blocks * chunk.active.words);
    TWELL_RETURN_IF_ERROR(cudaGetLastError());
  }
  return sm90::launch_mid_down(f, chunk, device, plan, nullptr);
}

std::vector<Variant> variants_of(const Ffn& f, const Device& device, bool every_plan, bool nan_token) {
  std::vector<Variant> all{
      {"chosen", [=](const Ffn& g, void* workspace) { return sm90::forward(g, device, workspace, nullptr); }}};
  if (!nan_token || f.width % 32 == 0) {  // a NaN token wakes neurons past the last there
    for (const auto& [name, up] : ways_up()) {
      all.push_back({std::string("for more tokens, up ") + name,
                     [=, way = up](const Ffn& g, void* w) { return run_long(g, device, w, nullptr, way); }});
    }
  }
  sm90::MidPlan chosen{};
  if (!sm90::choose_mid(f, device, &chosen)) return all;
  if (chosen.half) {
    all.push_back({"64 tokens, wrong guesses",
                   [=](const Ffn& g, void* w) { return run_mid_guessing_wrong(g, chosen, device, w); }});
  }
  if (!every_plan) return all;
  for (const int neurons : {96, 128, 176, 256}) {
    const int ranges = ((f.width + 31) / 32 * 32 + neurons - 1) / neurons;
    const sm90::MidPlan plan{neurons, 1, ranges, true};
    all.push_back({"64 tokens by " + std::to_string(neurons),
                   [=](const Ffn& g, void* w) { return run_mid(g, plan, device, w, nullptr); }});
  }
  for (const int neurons : {96, 128, 176, 192}) {
    for (const int passes : {1, 2, sm90::kMidMaxOwn / neurons}) {
      sm90::MidPlan plan{neurons, passes, 0};
      plan.ranges = ((f.width + plan.own() - 1) / plan.own() + 1) / 2 * 2;
      all.push_back({std::to_string(passes) + " x " + std::to_string(neurons),
                     [=](const Ffn& g, void* w) { return run_mid(g, plan, device, w, nullptr); }});
    }
  }
  return all;
}

struct Case {
  int tokens, hidden, width;
  double density;  // below 0: no neuron; above 1: all
  bool gated = true, biases = false;
  bool every_plan = false, nan_token = false;
};

constexpr int kGuard = 4096;  // bytes behind y and the workspace that must stay as they were

template <typename Half>
bool check(const Case& c, const Device& device, const char* type, double tolerance, bool verbose) {
  static uint64_t seed = 1;
  seed += 10;
  Layer<Half> w(c.hidden, c.width, seed);
  Buffer<Half> x(size_t(c.tokens) * c.hidden);
  Layer<Half>::fill(x, seed + 6, 1.f);
  const double z = c.density <= 0 ? 60. : c.density >= 1 ? -60. : checks::quantile(c.density);
  // A second of three neurons is rarer, so that halves of a block differ.
  const auto level = [&](double share) { return static_cast<float>(-z - (z > 0 && z < 50 ? share : 0)); };
  Layer<Half>::set_column(x.data, c.tokens, c.hidden, {1.f});
  Layer<Half>::set_column(w.gate.data, c.width, c.hidden, {level(0), level(1), level(0)});
  if (c.nan_token) {
    Layer<Half>::set_column(x.data + int64_t{c.tokens / 2} * c.hidden + c.hidden - 1, 1, 1, {NAN});
  }
  const int64_t outputs = int64_t{c.tokens} * c.hidden;
  Buffer<char> y(2 * outputs + kGuard);
  const Ffn f = w.ffn(c.tokens, x.data, y.data, c.gated, c.biases);
  const int64_t workspace_bytes = sm90::prefill_workspace_bytes(f, device);
  Buffer<char> workspace(workspace_bytes + kGuard);

  Buffer<float> h(size_t(c.tokens) * c.width), y_float(outputs);
  Buffer<unsigned long long> active(std::vector<unsigned long long>{0});
  const int64_t warps = int64_t{c.tokens} * c.width;
  naive_products<Half><<<static_cast<unsigned>((warps + 7) / 8), 256>>>(f, h.data, active.data);
  CHECK(cudaGetLastError());
  naive_outputs<Half><<<dim3((c.hidden + 255) / 256, c.tokens), 256>>>(f, h.data, y_float.data);
  CHECK(cudaGetLastError());
  const std::vector<float> want = y_float.get();

  bool ok = true;
  for (const Variant& variant : variants_of(f, device, c.every_plan, c.nan_token)) {
    std::vector<uint16_t> got[2];
    for (int run = 0; run < 2; ++run) {  // two poisons, one result
      const int poison = run == 0 ? 0xff : 0x7e;
      CHECK(cudaMemset(workspace.data, poison, workspace.bytes));
      CHECK(cudaMemset(y.data, poison, y.bytes));
      CHECK(variant.run(f, workspace.data));
      CHECK(cudaDeviceSynchronize());
      std::vector<char> bytes = y.get(), guard(kGuard);
      CHECK(cudaMemcpy(guard.data(), workspace.data + workspace_bytes, kGuard, cudaMemcpyDeviceToHost));
      for (int k = 0; k < kGuard; ++k) {
        if (bytes[2 * outputs + k] == static_cast<char>(poison) && guard[k] == static_cast<char>(poison)) continue;
        std::printf("%s wrote past the end of y or the workspace\n", variant.name.c_str());
        ok = false;
        break;
      }
      got[run].resize(outputs);
      std::memcpy(got[run].data(), bytes.data(), 2 * outputs);
    }
    if (got[0] != got[1] && !c.nan_token) {  // payloads of NaN may differ
      ok = false;
      std::printf("%s: two runs differ\n", variant.name.c_str());
    }
    double error = 0, norm = 0, worst = 0;
    int64_t wrong_nan = 0;
    for (int64_t i = 0; i < outputs; ++i) {
      const float g = static_cast<float>(reinterpret_cast<const Half&>(got[0][i])), r = want[i];
      if (std::isnan(g) || std::isnan(r)) {
        wrong_nan += std::isnan(g) != std::isnan(r);
        continue;
      }
      error += (double{g} - r) * (double{g} - r);
      norm += double{r} * r;
      worst = std::max(worst, std::fabs(double{g} - r));
    }
    // One wrong row must not hide among many right ones.
    const double relative = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
    const double far = worst / std::max(std::sqrt(norm / static_cast<double>(outputs)), 1e-6);
    const bool right = wrong_nan == 0 && relative <= tolerance && (norm == 0 || far <= 32 * tolerance);
    if (verbose || !right) {
      std::printf("%-4s %4s T=%-4d D=%-5d F=%-5d %s%s%s active %7.3f %%  error %.5f, worst %.3f%s  (%s)\n",
                  right ? "ok" : "BAD", type, c.tokens, c.hidden, c.width, c.gated ? "gated" : "plain",
                  c.biases ? " biases" : "", c.nan_token ? " NaN" : "",
                  100. * static_cast<double>(active.get()[0]) / static_cast<double>(warps), relative, far,
                  wrong_nan ? "  NaN differ" : "", variant.name.c_str());
      std::fflush(stdout);
    }
    ok &= right;
  }
  return ok;
}

bool check_all(const Device& device, bool verbose) {
  bool ok = true;
  int cases = 0;
  const auto both = [&](const Case& c) {
    ok &= check<__nv_bfloat16>(c, device, "bf16", 1. / 128, verbose);
    ok &= check<__half>(c, device, "fp16", 1. / 1024, verbose);
    cases += 2;
  };
  // The workload's shape at every density.
  for (const int tokens : {65, 256, 1024}) {
    for (const double density : {0., 0.0005, 0.005, 0.1, 1.}) both({tokens, 2048, 5632, density});
  }
  for (const int tokens : {128, 384, 512, 2048, 2049}) both({tokens, 2048, 5632, 0.005});
  // Every way to cut T, D and F, and to share out the neurons.
  const int shapes[][2] = {{8, 1}, {8, 17}, {72, 100}, {136, 257}, {264, 769}, {264, 1500}, {576, 1536}, {1000, 3073}};
  for (const auto& s : shapes) {
    for (const int tokens : {65, 100, 128, 129, 192, 193, 500}) {
      both({tokens, s[0], s[1], 0.02, true, tokens % 2 == 0, tokens % 64 == 1 || tokens == 500});
      both({tokens, s[0], s[1], 0.3, tokens % 2 == 0, tokens % 3 == 0});
    }
    both({200, s[0], s[1], 1., true, true, true});
    both({200, s[0], s[1], 0., true, true, true});
    both({333, s[0], s[1], 1., false, true, true});
    both({150, s[0], s[1], 0.05, true, false, true, true});
  }
  both({200, 136, 552, 1., true, true, true});  // 200 neurons, the rest of 2 x 176, are up's rows
  for (int tokens = 65; tokens < 700; tokens += 37) both({tokens, 520, 3100, 0.02});
  both({200, 4096, 3000, 0.02});  // guesses where down's blocks have 128 columns, and 256
  both({256, 8192, 1000, 0.05});
  both({1024, 4096, 1000, 0.01});
  both({70, 16384, 9000, 0.01});
  both({300, 64, 20000, 0.01});
  // Several rounds of tiles for each thread block.
  for (const double density : {0., 0.001, 0.02, 0.3, 1.}) both({5000, 136, 3000, density, true, density > 0.01});
  both({9000, 72, 1111, 0.05, true, true});
  both({9000, 8, 600, 0.5});
  both({3000, 1000, 5632, 0.005});
  std::printf("%d cases: %s\n", cases, ok ? "all right" : "FAILED");
  return ok;
}

// Neurons' firing rates differ: log-normal with this deviation, so that 64 and 128 tokens use about as many neurons
// together as in running text (920 and 1,339 of 5,632 at L0 = 30).
constexpr double kRateSpread = 1.85, kMaxRate = 0.98;

// A threshold for each neuron, of a standard normal, with mean rate `density`.
std::vector<float> thresholds(int width, double density, uint64_t seed) {
  std::vector<double> rates(width);
  for (int i = 0; i < width; ++i) {
    const uint64_t bits = checks::hash(seed << 20 | i);
    const double u = (static_cast<uint32_t>(bits) + 0.5) / 4294967296., v = (bits >> 32) / 4294967296.;
    rates[i] = std::exp(kRateSpread * std::sqrt(-2. * std::log(u)) * std::cos(6.283185307179586 * v));
  }
  double low = 0, high = 1e6;
  for (int i = 0; i < 60; ++i) {
    const double scale = (low + high) / 2;
    double mean = 0;
    for (const double r : rates) mean += std::fmin(kMaxRate, scale * r) / width;
    (mean > density ? high : low) = scale;
  }
  std::vector<float> z(width);
  for (int i = 0; i < width; ++i) z[i] = static_cast<float>(-checks::quantile(std::fmin(kMaxRate, low * rates[i])));
  return z;
}

#if defined(TWELL_MID_TRACE)
// When the thread blocks reach each phase, in microseconds after the last block of the call before has ended.
// `names`: of each of a call's kernels.
using PhaseNames = std::array<const char*, sm90::kMidPhases>;
void print_phases(const std::vector<uint64_t>& times, int calls, const std::vector<PhaseNames>& names) {
  using sm90::kMidPhases, sm90::kMidTracedBlocks;
  const int kernels = static_cast<int>(names.size());
  const auto time = [&](int launch, int block, int phase) {
    return times[(static_cast<int64_t>(launch) * kMidTracedBlocks + block) * kMidPhases + phase];
  };
  for (int k = 0; k < kernels * kMidPhases; ++k) {
    std::vector<double> after;
    for (int call = 1; call < calls; ++call) {
      uint64_t zero = 0;
      for (int b = 0; b < kMidTracedBlocks; ++b) zero = std::max(zero, time(kernels * call - 1, b, 6));
      for (int b = 0; b < kMidTracedBlocks; ++b) {
        const uint64_t t = time(kernels * call + k / kMidPhases, b, k % kMidPhases);
        if (t != 0) after.push_back((static_cast<double>(t) - static_cast<double>(zero)) / 1000.);
      }
    }
    if (after.empty()) continue;
    std::sort(after.begin(), after.end());
    std::printf("    %-18s first %7.2f  half %7.2f  last %7.2f\n", names[k / kMidPhases][k % kMidPhases], after[0],
                after[after.size() / 2], after.back());
  }
}

const std::vector<PhaseNames> kMidNames{
    {"gate starts", "call before done", "first step there", "gate stored", "listed", "up multiplied", "stored", ""},
    {"down starts", "gate_up done", "listed", "first rows", "", "multiplied", "stored", ""}};
const std::vector<PhaseNames> kUpNames{
    {"starts", "planned", "second tile begins", "multiplied", "gate there", "stored", "all stored", ""}};
#endif

struct Row {
  int tokens, active;
  double bar;  // microseconds; 0: none
};

void time_shape(int hidden, int width, int layers, const std::vector<Row>& rows, const Device& device) {
  using Half = __nv_bfloat16;
  std::vector<std::unique_ptr<Layer<Half>>> weights;
  for (int i = 0; i < layers; ++i) weights.push_back(std::make_unique<Layer<Half>>(hidden, width, 1000 + 10 * i));
  int most = 0;
  for (const Row& row : rows) most = std::max(most, row.tokens);
  Buffer<Half> x(size_t(most) * hidden), y(size_t(most) * hidden);
  Layer<Half>::fill(x, 77, 1.f);
  Layer<Half>::set_column(x.data, most, hidden, {1.f});
  const Buffer<char> workspace(sm90::prefill_workspace_bytes(weights[0]->ffn(most, x.data, y.data, true, false), device));
  for (const Row& row : rows) {
    for (int i = 0; i < layers; ++i) {
      Layer<Half>::set_column(weights[i]->gate.data, width, hidden,
                              thresholds(width, static_cast<double>(row.active) / width, 7 + i));
    }
    std::vector<Ffn> calls;
    for (const auto& w : weights) calls.push_back(w->ffn(row.tokens, x.data, y.data, true, false));
    const sm90::Chunk chunk = chunk_of(calls[0], workspace.data);

    sm90::MidPlan plan{};
    const bool takes_mid = sm90::choose_mid(calls[0], device, &plan);
    std::printf("%d x %d T=%d L0=%d", hidden, width, row.tokens, row.active);
    if (row.bar > 0) std::printf(" (bar %.1f)", row.bar);
    if (takes_mid) {
      std::printf(", %d tokens, %d ranges of %d x %d", plan.half ? 64 : 128, plan.ranges, plan.passes, plan.neurons);
    }
    std::vector<std::string> names;
    std::vector<checks::Graph> graphs;
    const auto add = [&](const char* name, auto launch) {
      names.push_back(name);
      graphs.emplace_back(layers, [&](int i, cudaStream_t s) { CHECK(launch(calls[i], s)); });
    };
    // Each part after one that leaves what it reads.
    if (takes_mid) {
      add("gate+up", [&](const Ffn& f, cudaStream_t s) { return sm90::launch_mid_gate_up(f, chunk, plan, s); });
      add("down", [&](const Ffn& f, cudaStream_t s) { return sm90::launch_mid_down(f, chunk, device, plan, s); });
      add("whole", [&](const Ffn& f, cudaStream_t s) { return run_mid(f, plan, device, workspace.data, s); });
    }
    add("\n   for more tokens: gate",
        [&](const Ffn& f, cudaStream_t s) { return sm90::launch_gate(f, chunk, device, s); });
    add("list", [&](const Ffn& f, cudaStream_t s) { return sm90::launch_list(f, chunk, device, s); });
    add("up", [&](const Ffn& f, cudaStream_t s) { return sm90::launch_up(f, chunk, device, s); });
    add("down", [&](const Ffn& f, cudaStream_t s) { return sm90::launch_down(f, chunk, device, s); });
    add("whole", [&](const Ffn& f, cudaStream_t s) { return run_long(f, device, workspace.data, s); });
    for (int i = 0; i < 19; ++i) {
      for (checks::Graph& g : graphs) g.replay(i >= 4);
    }
    CHECK(run_long(calls[0], device, workspace.data, nullptr));
    std::vector<sm90::Counts> counts(chunk.active.blocks);
    CHECK(cudaMemcpy(counts.data(), chunk.active.counts, counts.size() * sizeof(sm90::Counts), cudaMemcpyDeviceToHost));
    double block_mean = 0, half_mean = 0;
    for (const sm90::Counts& n : counts) {
      block_mean += n.all() / static_cast<double>(counts.size());
      half_mean += (n.all() + n.both) / 2. / static_cast<double>(counts.size());
    }
    std::printf("; 128 tokens use %.0f, 64 %.0f\n ", block_mean, half_mean);
    for (size_t i = 0; i < graphs.size(); ++i) {
      std::printf(" %s %.2f", names[i].c_str(), graphs[i].median());
      graphs[i].release();
    }
    std::printf("\n");
#if defined(TWELL_MID_TRACE)
    if (takes_mid && row.bar > 0) {
      const size_t count = size_t{2} * layers * sm90::kMidTracedBlocks * sm90::kMidPhases;
      Buffer<uint64_t> buffer(std::vector<uint64_t>(count, 0));
      sm90::mid_trace = buffer.data;
      checks::Graph traced(layers, [&](int i, cudaStream_t s) {
        CHECK(run_mid(calls[i], plan, device, workspace.data, s));
      });
      sm90::mid_trace = nullptr;
      for (int i = 0; i < 5; ++i) traced.replay(i > 1);
      std::printf("  phases, %.2f us a call:\n", traced.median());
      traced.release();
      print_phases(buffer.get(), layers, kMidNames);
    }
#endif
    std::fflush(stdout);
  }
}

struct LongRow {
  int tokens, active;
  std::vector<int> chunks;  // blocks of each
};

// Many tokens: the parts of the first chunk, the whole by each way to compute up, and the whole in other chunks.
void time_long(int hidden, int width, const std::vector<LongRow>& rows, const Device& device) {
  using Half = __nv_bfloat16;
  constexpr int kLayers = 4;
  std::vector<std::unique_ptr<Layer<Half>>> weights;
  for (int i = 0; i < kLayers; ++i) weights.push_back(std::make_unique<Layer<Half>>(hidden, width, 1000 + 10 * i));
  int most = 0;
  for (const LongRow& row : rows) most = std::max(most, row.tokens);
  Buffer<Half> x(size_t(most) * hidden), y(size_t(most) * hidden);
  Layer<Half>::fill(x, 77, 1.f);
  Layer<Half>::set_column(x.data, most, hidden, {1.f});
  sm90::Cutter counter(nullptr);
  sm90::Active largest;
  sm90::place_active(weights[0]->ffn(most, x.data, y.data, true, false), sm90::kMaxBlocks, false, counter, &largest);
  const Buffer<char> workspace(counter.used());
  for (const LongRow& row : rows) {
    for (int i = 0; i < kLayers; ++i) {
      Layer<Half>::set_column(weights[i]->gate.data, width, hidden,
                              thresholds(width, static_cast<double>(row.active) / width, 7 + i));
    }
    std::vector<Ffn> calls;
    for (const auto& w : weights) calls.push_back(w->ffn(row.tokens, x.data, y.data, true, false));
    const int64_t blocks = sm90::chunk_blocks(calls[0], int64_t{192} << 20, 1);
    sm90::Chunk chunk{};
    sm90::Cutter cutter(workspace.data);
    sm90::place_active(calls[0], blocks, false, cutter, &chunk.active);
    sm90::fit(calls[0], blocks, &chunk);
    std::printf("%d x %d T=%d L0=%d, chunks of %lld blocks", hidden, width, row.tokens, row.active, static_cast<long long>(blocks));
    std::vector<std::string> names;
    std::vector<checks::Graph> graphs;
    const auto add = [&](const std::string& name, auto launch) {
      names.push_back(name);
      graphs.emplace_back(kLayers, [&](int i, cudaStream_t s) { CHECK(launch(calls[i], s)); });
    };
    const Ways ways = ways_up();
    // Each part after one that leaves what it reads.
    add("gate", [&](const Ffn& f, cudaStream_t s) { return sm90::launch_gate(f, chunk, device, s); });
    add("list", [&](const Ffn& f, cudaStream_t s) { return sm90::launch_list(f, chunk, device, s); });
    for (const auto& way : ways) {
      add(std::string("up ") + way.first,
          [&](const Ffn& f, cudaStream_t s) { return way.second(f, chunk, device, s); });
    }
    add("down", [&](const Ffn& f, cudaStream_t s) { return sm90::launch_down(f, chunk, device, s); });
    for (const auto& way : ways) {
      add(std::string("whole ") + way.first,
          [&](const Ffn& f, cudaStream_t s) { return run_long(f, device, workspace.data, s, way.second); });
    }
    for (const int each : row.chunks) {
      add("whole by " + std::to_string(each), [&, each](const Ffn& f, cudaStream_t s) {
        return run_long(f, device, workspace.data, s, sm90::launch_up, each);
      });
    }
    for (int i = 0; i < 19; ++i) {
      for (checks::Graph& g : graphs) g.replay(i >= 4);
    }
    CHECK(sm90::launch_gate(calls[0], chunk, device, nullptr));
    CHECK(sm90::launch_list(calls[0], chunk, device, nullptr));
    std::vector<sm90::Counts> counts(chunk.active.blocks);
    CHECK(cudaMemcpy(counts.data(), chunk.active.counts, counts.size() * sizeof(sm90::Counts), cudaMemcpyDeviceToHost));
    double block_mean = 0, half_mean = 0;
    for (const sm90::Counts& n : counts) {
      block_mean += n.all() / static_cast<double>(counts.size());
      half_mean += (n.all() + n.both) / 2. / static_cast<double>(counts.size());
    }
    std::printf("; 128 tokens use %.0f, 64 %.0f\n", block_mean, half_mean);
    for (size_t i = 0; i < graphs.size(); ++i) {
      std::printf("    %-28s %8.2f\n", names[i].c_str(), graphs[i].median());
      graphs[i].release();
    }
#if defined(TWELL_MID_TRACE)
    for (const auto& way : ways) {
      if (&way == &ways.front()) continue;
      const size_t count = size_t{kLayers} * sm90::kMidTracedBlocks * sm90::kMidPhases;
      Buffer<uint64_t> buffer(std::vector<uint64_t>(count, 0));
      sm90::mid_trace = buffer.data;
      checks::Graph traced(kLayers, [&](int i, cudaStream_t s) { CHECK(way.second(calls[i], chunk, device, s)); });
      sm90::mid_trace = nullptr;
      for (int i = 0; i < 5; ++i) traced.replay(i > 1);
      std::printf("    phases of up %s, %.2f us a call:\n", way.first, traced.median());
      traced.release();
      print_phases(buffer.get(), kLayers, kUpNames);
    }
#endif
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Device device = read_device();
  if (argc > 1 && std::strcmp(argv[1], "long") == 0) {
    time_long(2048, 5632,
              {{4096, 30, {}}, {16384, 30, {}}, {18944, 30, {74, 132}}, {32768, 30, {128, 132}},
               {65536, 30, {128, 132}}, {131072, 30, {128, 132}}, {16384, 120, {}}, {65536, 120, {128, 132}}, {16384, 600, {}}},
              device);
    time_long(2048, 8192, {{16384, 44, {64, 128}}, {65536, 44, {86, 128, 132}}}, device);
    time_long(3584, 18944, {{16384, 101, {32, 43, 64, 128}}}, device);
    time_long(4096, 14336, {{16384, 76, {43, 64, 128}}, {65536, 76, {52, 64, 132}}}, device);
    time_long(8192, 28672, {{16384, 153, {26, 32, 43, 64}}}, device);
    return 0;
  }
  const bool only_time = argc > 1 && std::strcmp(argv[1], "time") == 0;
  if (!only_time && !check_all(device, argc > 1 && std::strcmp(argv[1], "verbose") == 0)) return 1;
  if (argc > 1 && !only_time) return 0;
  time_shape(2048, 5632, 20,
             {{65, 30, 0}, {128, 30, 0}, {256, 30, 23.8}, {384, 30, 0}, {512, 30, 0}, {1024, 30, 68.8}, {2048, 30, 0},
              {256, 120, 0}, {1024, 120, 0}, {256, 600, 0}, {1024, 600, 0}, {1024, 2800, 0}},
             device);
  time_shape(4096, 14336, 6, {{256, 70, 0}, {512, 70, 0}, {1024, 70, 0}}, device);
  time_shape(896, 4864, 20, {{256, 26, 0}, {1024, 26, 0}}, device);
  return 0;
}
