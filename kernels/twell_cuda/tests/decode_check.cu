// Checks decode(), with every choice of kernels that the GPU runs, against plain fp32 kernels over awkward shapes,
// types, densities and biases, with poisoned memory; then times the choices side by side inside captured graphs over 28
// sets of weights, so that weights come from device memory.
//
// Built by kernels/tests/check_cuda.sh.
//   ./decode_check          checks, then timings      ./decode_check check | verbose | time | few | fused | spaced | large
//
// "few" times 1 to 64 tokens of several shapes alone. Built with -DTWELL_FEW_TRACE it also says when Hopper's kernels
// for them reach each of their phases.
// "fused" times 1 to 8 tokens alone; with -DTWELL_FUSED_TRACE (for all files) it says the same of the fused kernel.
// "spaced" times calls as a model has them: between two of them stand other kernels, whose own time is taken off.
// "large" times 1 to 8 tokens of larger matrices, in chains and as "spaced" does.
// "cases" and "chains" are the two parts of "check".
//
// Exits 1 on any mismatch or CUDA error.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "decode/decode.h"
#include "host/dispatch.h"
#include "sm90/decode/few.cuh"
#include "sm90/decode/fused.cuh"
#include "tests/compare.cuh"
#include "tests/graph.cuh"

namespace {

using namespace twell;
using namespace twell::decoding;

__device__ uint32_t mix(uint64_t v) {
  v = (v ^ v >> 31) * 0x9e3779b97f4a7c15ull;
  v = (v ^ v >> 29) * 0xbf58476d1ce4e5b9ull;
  return static_cast<uint32_t>(v ^ v >> 32);
}

// Normal numbers of the given deviation around `mean`.
template <typename Half>
__global__ void fill_kernel(Half* out, int64_t n, uint64_t seed, float mean, float deviation) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < n; i += gridDim.x * int64_t{256}) {
    const float u = (mix(seed * 0x51ed2701ull + 2 * i) + 0.5f) * 2.3283064e-10f;
    const float v = mix(seed * 0x51ed2701ull + 2 * i + 1) * 2.3283064e-10f;
    out[i] = Half(mean + deviation * sqrtf(-2.f * logf(u)) * cospif(2.f * v));
  }
}

template <typename Half>
__global__ void set_column_kernel(Half* out, int rows, int columns, float value) {
  for (int r = blockIdx.x * 256 + threadIdx.x; r < rows; r += gridDim.x * 256) {
    out[static_cast<int64_t>(r) * columns] = Half(value);
  }
}

template <typename Half>
__device__ float dot(const Half* a, const Half* b, int n) {
  float s = 0.f;
  for (int i = threadIdx.x % 32; i < n; i += 32) s += to_float(a[i]) * to_float(b[i]);
  for (int d = 16; d > 0; d /= 2) s += __shfl_xor_sync(0xffffffffu, s, d);
  return s;
}

// One warp for each (token, neuron).
// NaN into all shared memory that a thread block can have: what a kernel leaves unwritten there must not matter.
__global__ void poison_shared_kernel(int words) {
  extern __shared__ uint32_t shared[];
  for (int i = threadIdx.x; i < words; i += blockDim.x) reinterpret_cast<volatile uint32_t*>(shared)[i] = 0x7fff7fffu;
}

template <typename Half>
__global__ void naive_products(const Ffn f, float* h, unsigned long long* active) {
  const int64_t warp = (blockIdx.x * int64_t{256} + threadIdx.x) / 32;
  if (warp >= f.tokens * f.width) return;
  const int64_t t = warp / f.width, n = warp % f.width;
  const Half* x = static_cast<const Half*>(f.x) + t * f.hidden;
  float g = dot(x, static_cast<const Half*>(f.gate.data) + n * f.hidden, f.hidden);
  if (f.b_gate) g += to_float(static_cast<const Half*>(f.b_gate)[n]);
  g = g <= 0.f ? 0.f : g;
  float v = g;
  if (f.up.data != nullptr && g != 0.f) {
    float u = dot(x, static_cast<const Half*>(f.up.data) + n * f.hidden, f.hidden);
    if (f.b_up) u += to_float(static_cast<const Half*>(f.b_up)[n]);
    v = g * u;
  }
  if (threadIdx.x % 32 == 0) {
    h[t * f.width + n] = v;
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
    if (v != 0.f) s += v * to_float(static_cast<const Half*>(f.down.data)[static_cast<int64_t>(n) * f.hidden + d]);
  }
  if (f.b_down) s += to_float(static_cast<const Half*>(f.b_down)[d]);
  y[t * f.hidden + d] = s;
}

template <typename T>
T* device_alloc(int64_t n) {
  void* p = nullptr;
  CHECK(cudaMalloc(&p, static_cast<size_t>(n) * sizeof(T)));
  return static_cast<T*>(p);
}

void poison_shared(const Device& device) {
  static const int bytes = [] {
    int id = 0, most = 0;
    CHECK(cudaGetDevice(&id));
    CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, id));
    CHECK(cudaFuncSetAttribute(poison_shared_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    return most;
  }();
  poison_shared_kernel<<<2 * device.sm_count, 1024, bytes>>>(bytes / 4);
  CHECK(cudaGetLastError());
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

struct Variant {
  const char* name;
  Kernels kernels;
};

Kernels kernels(bool bulk_gate, bool overlap) {
  Kernels k{};
  k.bulk_gate = bulk_gate, k.overlap = overlap;
  return k;
}

Kernels few_kernels(bool overlap) {
  Kernels k = kernels(false, overlap);
  k.few = true;
  return k;
}

// Down in clusters of `splits`, whatever the shape.
Kernels few_in_clusters(int splits, bool overlap = true) {
  Kernels k = few_kernels(overlap);
  k.forced_splits = splits;
  return k;
}

Kernels fused_kernels(bool overlap, int patience = 1000, int window_kib = 64, bool warm = false) {
  Kernels k = kernels(true, overlap);
  k.fused.use = true, k.fused.patience = patience, k.fused.window_bytes = window_kib << 10, k.fused.warm = warm;
  return k;
}

bool is_hopper(const Device& device) { return device.major == 9 && device.minor == 0; }

bool takes_bulk(const Ffn& f, const Device& device) { return is_hopper(device) && f.tokens <= 8; }

// Every kernel at least once; the first is what decode() chooses.
std::vector<Variant> checked_variants(const Ffn& f, const Device& device) {
  std::vector<Variant> v{{"chosen", choose_kernels(f, device)}};
  v.push_back({"portable, serial", kernels(false, false)});
  if (is_hopper(device)) {
    v.push_back({"few", few_kernels(true)});
    v.push_back({"few, serial", few_kernels(false)});
    v.push_back({"few, 1", few_in_clusters(1)});
    v.push_back({"few, 2", few_in_clusters(2)});
    v.push_back({"few, 3", few_in_clusters(3)});
    v.push_back({"few, 4", few_in_clusters(4)});
    v.push_back({"few, 8", few_in_clusters(8)});
    v.push_back({"few, 3, serial", few_in_clusters(3, false)});
  }
  if (takes_bulk(f, device)) {
    v.push_back({"bulk", kernels(true, true)});
    v.push_back({"bulk, serial", kernels(true, false)});
  }
  if (is_hopper(device) && takes_fused(f, device)) {
    v.push_back({"fused", fused_kernels(true)});
    v.push_back({"fused, serial", fused_kernels(false)});
    v.push_back({"fused, impatient", fused_kernels(true, 0)});
    v.push_back({"fused, impatient, serial", fused_kernels(false, 0)});
    v.push_back({"fused, 8 KiB", fused_kernels(true, 1000, 8)});
    v.push_back({"fused, 96 KiB, warm", fused_kernels(true, 1000, 96, true)});
    v.push_back({"fused, impatient, warm", fused_kernels(true, 0, 64, true)});
  }
  return v;
}

cudaError_t run(const Ffn& f, const Kernels& k, const Device& device, void* workspace, cudaStream_t stream) {
  DecodePlan plan = plan_decode(f);
  plan.kernels = k;
  const cudaError_t error = launch_gate_up(f, plan, device, workspace, stream);
  return error != cudaSuccess ? error : launch_down(f, plan, device, workspace, stream);
}

enum class Threshold { kCoordinate, kBias };

struct Case {
  int tokens, hidden, width;
  double density;  // below 0: no neuron; above 1: all
  bool gated, biases;
  Threshold by;
  bool one_neuron = false, nan_token = false;
};

template <typename Half>
void fill(Half* p, int64_t n, uint64_t seed, float mean, float deviation) {
  fill_kernel<<<1024, 256>>>(p, n, seed, mean, deviation);
  CHECK(cudaGetLastError());
}

template <typename Half>
void set_column(Half* p, int rows, int columns, double value) {
  set_column_kernel<<<64, 256>>>(p, rows, columns, static_cast<float>(value));
  CHECK(cudaGetLastError());
}

template <typename Half>
struct Layer {
  Half *gate, *up = nullptr, *down, *b_gate = nullptr, *b_up = nullptr, *b_down = nullptr;

  Layer(int hidden, int width, bool gated, bool biases, bool bias_threshold, uint64_t seed) {
    const int64_t n = int64_t{hidden} * width;
    const float deviation = 1.f / std::sqrt(static_cast<float>(hidden));
    gate = device_alloc<Half>(n);
    fill(gate, n, seed, 0.f, deviation);
    if (gated) {
      up = device_alloc<Half>(n);
      fill(up, n, seed + 1, 0.f, deviation);
    }
    down = device_alloc<Half>(n);
    fill(down, n, seed + 2, 0.f, 1.f / std::sqrt(static_cast<float>(width)));
    if (biases || bias_threshold) {
      b_gate = device_alloc<Half>(width);
      fill(b_gate, width, seed + 3, 0.f, 0.25f);
    }
    if (biases && gated) {
      b_up = device_alloc<Half>(width);
      fill(b_up, width, seed + 4, 0.f, 0.5f);
    }
    if (biases) {
      b_down = device_alloc<Half>(hidden);
      fill(b_down, hidden, seed + 5, 0.f, 0.01f);
    }
  }
  void release() {
    for (void* p : {gate, up, down, b_gate, b_up, b_down}) CHECK(cudaFree(p));
  }
};

constexpr int kGuard = 4096;  // bytes behind y and the workspace that must stay as they were

template <typename Half>
bool check(const Case& c, const Device& device, const char* type, double tolerance, bool verbose) {
  static uint64_t seed = 1;
  seed += 10;
  const bool by_bias = c.by == Threshold::kBias;
  Layer<Half> w(c.hidden, c.width, c.gated, c.biases, by_bias, seed);
  Half* const x = device_alloc<Half>(int64_t{c.tokens} * c.hidden);
  fill(x, int64_t{c.tokens} * c.hidden, seed + 6, 0.f, 1.f);
  const double z = c.density <= 0 ? 60. : c.density >= 1 ? -60. : checks::quantile(c.density);
  if (by_bias) {
    fill(w.b_gate, c.width, seed + 7, static_cast<float>(-z), 0.f);
  } else {
    set_column(x, c.tokens, c.hidden, 1.);
    set_column(w.gate, c.width, c.hidden, -z);
  }
  if (c.one_neuron) {  // the last one, always
    Half* const last = by_bias ? w.b_gate + c.width - 1 : w.gate + int64_t{c.width - 1} * c.hidden;
    set_column(last, 1, 1, 60.);
  }
  if (c.nan_token) set_column(x + int64_t{c.tokens / 2} * c.hidden + c.hidden - 1, 1, 1, NAN);

  Ffn f{};
  f.dtype = sizeof(Half) == 2 && std::strcmp(type, "bf16") == 0 ? DType::kBFloat16 : DType::kFloat16;
  f.tokens = c.tokens, f.hidden = c.hidden, f.width = c.width;
  f.x = x, f.gate.data = w.gate, f.up.data = w.up, f.down.data = w.down;
  f.b_gate = w.b_gate, f.b_up = w.b_up, f.b_down = w.b_down;
  const int64_t outputs = int64_t{c.tokens} * c.hidden;
  const int64_t workspace_bytes = decode_workspace_bytes(f);
  char* const workspace = device_alloc<char>(workspace_bytes + kGuard);
  char* const y = device_alloc<char>(2 * outputs + kGuard);
  f.y = y;

  const std::vector<Variant> variants = checked_variants(f, device);
  std::vector<std::vector<uint16_t>> results;
  bool ok = true;
  for (size_t i = 0; i < variants.size(); ++i) {
    std::vector<uint16_t> got[2];
    for (int run_index = 0; run_index < 2; ++run_index) {  // two poisons, one result
      const int poison = run_index == 0 ? 0xff : 0x7e;
      CHECK(cudaMemset(workspace, poison, workspace_bytes + kGuard));
      CHECK(cudaMemset(y, poison, 2 * outputs + kGuard));
      poison_shared(device);
      CHECK(i == 0 ? decode(f, choose_kernels(f, device), device, workspace, nullptr) : run(f, variants[i].kernels, device, workspace, nullptr));
      CHECK(cudaDeviceSynchronize());
      std::vector<uint8_t> bytes(2 * outputs + kGuard), guard(kGuard);
      CHECK(cudaMemcpy(bytes.data(), y, bytes.size(), cudaMemcpyDeviceToHost));
      CHECK(cudaMemcpy(guard.data(), workspace + workspace_bytes, kGuard, cudaMemcpyDeviceToHost));
      bool kept = true;
      for (int k = 0; k < kGuard; ++k) kept &= bytes[2 * outputs + k] == poison && guard[k] == poison;
      if (!kept) std::printf("%s wrote past the end of y or the workspace\n", variants[i].name);
      ok &= kept;
      got[run_index].resize(outputs);
      std::memcpy(got[run_index].data(), bytes.data(), 2 * outputs);
    }
    // NaN payloads may differ where NaN is right; a case without NaN must repeat bit by bit.
    if (got[0] != got[1] && !c.nan_token) {
      ok = false;
      std::printf("%s: two runs differ\n", variants[i].name);
    }
    results.push_back(got[0]);
  }

  float* const h = device_alloc<float>(int64_t{c.tokens} * c.width);
  float* const y_float = device_alloc<float>(outputs);
  auto* const active = device_alloc<unsigned long long>(1);
  CHECK(cudaMemset(active, 0, 8));
  const int64_t warps = int64_t{c.tokens} * c.width;
  naive_products<Half><<<static_cast<unsigned>((warps + 7) / 8), 256>>>(f, h, active);
  CHECK(cudaGetLastError());
  naive_outputs<Half><<<dim3((c.hidden + 255) / 256, c.tokens), 256>>>(f, h, y_float);
  CHECK(cudaGetLastError());
  std::vector<float> want(outputs);
  unsigned long long active_host = 0;
  CHECK(cudaMemcpy(want.data(), y_float, 4 * outputs, cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(&active_host, active, 8, cudaMemcpyDeviceToHost));

  for (size_t variant = 0; variant < variants.size(); ++variant) {
    double error = 0, norm = 0;
    int64_t wrong_nan = 0, wrong_zero = 0;
    for (int64_t i = 0; i < outputs; ++i) {
      const float g = static_cast<float>(reinterpret_cast<const Half&>(results[variant][i])), r = want[i];
      if (std::isnan(g) || std::isnan(r)) {
        wrong_nan += std::isnan(g) != std::isnan(r);
        continue;
      }
      wrong_zero += r == 0.f && g != 0.f;
      error += (double{g} - r) * (double{g} - r);
      norm += double{r} * r;
    }
    const double relative = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
    // 0 times a column of NaN-free numbers can only be 0; with fewer columns than 8 active pairs sums may cancel to it.
    const bool right =
        wrong_nan == 0 && wrong_zero <= (norm > 0 && !c.one_neuron ? outputs / 1000 : 0) && relative <= tolerance;
    if (verbose || !right) {
      const double percent = 100. * static_cast<double>(active_host) / static_cast<double>(warps);
      std::printf("%-4s %4s T=%-3d D=%-6d F=%-6d %s%s%s%s active %7.3f %%  error %.5f%s  (%s)\n", right ? "ok" : "BAD",
                  type, c.tokens, c.hidden, c.width, c.gated ? "gated" : "plain", c.biases ? " biases" : "",
                  by_bias ? " by-bias" : "", c.nan_token ? " NaN" : "", percent, relative,
                  wrong_nan ? "  NaN differ" : wrong_zero ? "  zeros differ" : "", variants[variant].name);
    }
    ok &= right;
  }
  for (void* p : {static_cast<void*>(x), static_cast<void*>(workspace), static_cast<void*>(y), static_cast<void*>(h),
                  static_cast<void*>(y_float), static_cast<void*>(active)}) {
    CHECK(cudaFree(p));
  }
  w.release();
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
  const auto coordinate = Threshold::kCoordinate, bias = Threshold::kBias;
  // The workload, at every density.
  for (int tokens : {1, 2, 3, 4, 7, 8, 16, 33, 64}) {
    for (double density : {0., 0.0005, 0.005, 0.02, 0.1, 0.5, 1.}) {
      both({tokens, 2048, 5632, density, true, false, coordinate});
    }
  }
  // Every way to cut T, D and F.
  const int shapes[][2] = {{8, 1},      {8, 16},      {16, 17},    {24, 31},     {40, 48},    {72, 100},
                           {136, 257},  {264, 769},   {576, 1536}, {896, 4864},  {1024, 3072}, {1000, 3073},
                           {2056, 3089}, {4096, 3200}, {4104, 1041}, {8192, 1024}, {8200, 530}, {16384, 300},
                           {2048, 131}, {2048, 2112}, {2040, 2113}, {1992, 4224}, {64, 6336},
                           {1920, 5808}, {1024, 6300}, {64, 1},     {128, 33},    {512, 16},   {1088, 2113}, {1472, 131}, {1536, 4608}};
  for (const auto& s : shapes) {
    for (int tokens : {1, 2, 3, 4, 8, 9, 17, 32, 47, 64}) {
      both({tokens, s[0], s[1], 0.3, true, tokens % 2 == 0, tokens % 3 == 0 ? bias : coordinate});
    }
    both({5, s[0], s[1], 1., false, true, bias});
    both({3, s[0], s[1], 1., true, true, bias});
    both({4, s[0], s[1], 0.5, false, true, coordinate});
    both({40, s[0], s[1], 0.5, false, false, coordinate});
    both({12, s[0], s[1], 0., true, false, coordinate});
    both({60, s[0], s[1], 0., true, true, bias});
  }
  // One active neuron; a NaN token beside good ones; every T.
  for (int tokens : {1, 2, 3, 4, 6, 13, 30, 64}) {
    both({tokens, 2048, 5632, 0., true, false, coordinate, true});
    both({tokens, 1000, 3073, 0., true, false, bias, true});
    both({tokens, 2048, 5632, 0.01, true, false, coordinate, false, true});
    both({tokens, 576, 1536, 0., false, true, coordinate, false, true});
  }
  for (int tokens = 1; tokens <= 64; ++tokens) both({tokens, 520, 3100, 0.05, true, false, coordinate});
  // Limits: 65,536 neurons, 16,384 columns, matrices past 2^31 bytes.
  both({3, 64, 65536, 0.4, true, true, coordinate});
  both({64, 128, 65536, 0.9, true, false, coordinate});
  both({2, 16384, 65536, 0.02, true, false, coordinate});
  both({6, 4096, 8192, 0.02, true, false, coordinate});
  both({20, 16384, 65535, 0.2, false, false, coordinate});
  both({64, 16384, 65536, 0.01, true, false, coordinate});

  Ffn bad{};
  bad.dtype = DType::kBFloat16, bad.tokens = 65, bad.hidden = 64, bad.width = 64;
  ok &= decode(bad, {}, device, nullptr, nullptr) == cudaErrorInvalidValue;
  bad.tokens = 1, bad.hidden = 63;
  ok &= decode(bad, {}, device, nullptr, nullptr) == cudaErrorInvalidValue;
  std::printf("%d cases: %s\n", cases, ok ? "all right" : "FAILED");
  return ok;
}

// A neuron's firing rates differ: log-normal with this deviation, so that the neurons active in any of 64 tokens are as
// many as in running text (22 % of 5632 at L0 = 30, 55 % at L0 = 120; with equal rates 29 % and 75 %).
constexpr double kRateSpread = 1.15;
constexpr double kMaxRate = 0.98;

// A threshold for each neuron, of a standard normal, with mean rate `density`.
std::vector<float> thresholds(int width, double density, uint64_t seed) {
  std::vector<double> rates(width);
  uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
  const auto uniform = [&] {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (static_cast<double>(state >> 33) + 0.5) / 2147483648.;
  };
  for (double& r : rates) {
    const double radius = std::sqrt(-2. * std::log(uniform()));
    r = std::exp(kRateSpread * radius * std::cos(6.283185307179586 * uniform()));
  }
  double low = 0, high = 1e6;
  for (int i = 0; i < 60; ++i) {
    const double scale = (low + high) / 2;
    double mean = 0;
    for (double r : rates) mean += std::fmin(kMaxRate, scale * r) / width;
    (mean > density ? high : low) = scale;
  }
  std::vector<float> z(width);
  for (int i = 0; i < width; ++i) z[i] = static_cast<float>(checks::quantile(std::fmin(kMaxRate, low * rates[i])));
  return z;
}

template <typename Half>
__global__ void set_thresholds_kernel(Half* gate, const float* z, int rows, int columns) {
  for (int r = blockIdx.x * 256 + threadIdx.x; r < rows; r += gridDim.x * 256) {
    gate[static_cast<int64_t>(r) * columns] = Half(-z[r]);
  }
}

void add_fused(std::vector<Variant>& v) {
  v.push_back({"U", fused_kernels(true)});
  v.push_back({"U warm", fused_kernels(true, 1000, 64, true)});
  v.push_back({"U serial", fused_kernels(false)});
}

std::vector<Variant> timed_variants(const Ffn& f, const Device& device) {
  std::vector<Variant> v{{"P serial", kernels(false, false)}};
  if (device.major >= 9) v.push_back({"P", kernels(false, true)});
  if (is_hopper(device)) {
    v.push_back({"F", few_kernels(true)});
    for (const auto& [name, splits] : {std::pair{"F 3", 3}, {"F 4", 4}, {"F 8", 8}}) {
      v.push_back({name, few_in_clusters(splits)});
    }
  }
  if (takes_bulk(f, device)) {
    v.push_back({"B", kernels(true, true)});
    v.push_back({"B serial", kernels(true, false)});
  }
  if (is_hopper(device) && takes_fused(f, device)) {
    add_fused(v);
  }
  return v;
}

std::vector<Variant> spaced_variants(const Ffn& f, const Device& device) {
  std::vector<Variant> v{{"P serial", kernels(false, false)}, {"P", kernels(false, true)}};
  if (!is_hopper(device)) return v;
  if (takes_bulk(f, device)) {
    v.push_back({"B", kernels(true, true)});
    v.push_back({"B serial", kernels(true, false)});
  }
  v.push_back({"F", few_kernels(true)});
  if (!takes_fused(f, device)) return v;
  add_fused(v);
  return v;
}

// What stands between two calls in a model: reads y, writes the next x (always the same), a NaN apart. With `lets` it
// takes part in programmatic launch, as kernels of torch.compile do if asked (TORCHINDUCTOR_ENABLE_PDL=1).
__global__ void spacer_kernel(const uint4* y, const uint4* from, uint4* x, int words, bool lets,
                              unsigned long long* end) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (lets) asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) {
    const uint4 v = y[i], w = from[i];
    const bool wrong = (v.x & v.y & v.z & v.w) == 0xffffffffu;
    x[i] = wrong ? v : w;
  }
  __syncthreads();
  if (end != nullptr && threadIdx.x == 0) {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    atomicMax(end, now);
  }
}

// The code of what stands there: 192 KiB without a loop, so that caches of instructions forget others.
__global__ void code_kernel(float* never, float a, float b) {
  float v[4] = {a, b, a + b, a - b};
#pragma unroll
  for (int i = 0; i < 3072; ++i) {
#pragma unroll
    for (float& x : v) x = fmaf(x, a, b);
  }
  if (v[0] + v[1] + v[2] + v[3] == 1e30f) *never = v[0];
}

// The weights of what stands there, slowly: a model's other kernels do not fill the memory.
__global__ void stream_kernel(const uint4* from, int64_t words, uint32_t* never) {
  uint32_t all = 0;
#pragma unroll 4
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < words; i += gridDim.x * int64_t{256}) {
    const uint4 v = from[i];
    all |= v.x | v.y | v.z | v.w;
  }
  if (all == 0x12345678u) *never = all;
}

#if defined(TWELL_FUSED_TRACE)
// When the fused kernel's thread blocks reach each phase, in microseconds after the last block of the call before (or
// of what stands between calls) has ended: the first of them, half of them, the last. Then, on average over calls, the
// course of the block that comes last to some of the phases, and which one that is most often.
void print_fused_phases(const std::vector<uint64_t>& times, int calls, const std::vector<unsigned long long>& ends) {
  using fused::kPhases, fused::kTracedBlocks;
  const char* const names[kPhases] = {"starts",   "16 rows held", "weights asked for", "call before done",
                                      "x there",  "gate sums",    "rows asked for",    "rows multiplied",
                                      "up sums",  "given",        "taken",             "stored"};
  const auto time = [&](int call, int block, int phase) {
    return times[(static_cast<int64_t>(call) * kTracedBlocks + block) * kPhases + phase];
  };
  std::vector<uint64_t> zero(calls);
  for (int call = 1; call < calls; ++call) {
    for (int b = 0; b < kTracedBlocks; ++b) zero[call] = std::max(zero[call], time(call - 1, b, fused::kStored));
    if (ends[call] != 0) zero[call] = ends[call];
  }
  const auto after = [&](int call, int block, int phase) {
    return (static_cast<double>(time(call, block, phase)) - static_cast<double>(zero[call])) / 1000.;
  };
  for (int phase = 0; phase < kPhases; ++phase) {
    std::vector<double> v;
    for (int call = 1; call < calls; ++call) {
      for (int b = 0; b < kTracedBlocks; ++b) {
        if (time(call, b, phase) != 0) v.push_back(after(call, b, phase));
      }
    }
    if (v.empty()) continue;
    std::sort(v.begin(), v.end());
    std::printf("    %-18s first %6.2f  half %6.2f  nine tenths %6.2f  last %6.2f\n", names[phase], v[0],
                v[v.size() / 2], v[v.size() * 9 / 10], v.back());
  }
  for (const int last : {fused::kTokensThere, fused::kRowsThere, fused::kGiven}) {
    double mean[kPhases]{};
    int seen[kPhases]{}, often[kTracedBlocks]{};
    for (int call = 1; call < calls; ++call) {
      int block = 0;
      for (int b = 1; b < kTracedBlocks; ++b) {
        if (time(call, b, last) > time(call, block, last)) block = b;
      }
      ++often[block];
      for (int phase = 0; phase < kPhases; ++phase) {
        if (time(call, block, phase) != 0) mean[phase] += after(call, block, phase), ++seen[phase];
      }
    }
    const int most = static_cast<int>(std::max_element(often, often + kTracedBlocks) - often);
    std::printf("    last to '%s' (block %d %d times):", names[last], most, often[most]);
    for (int phase = 0; phase < kPhases; ++phase) {
      if (seen[phase] > 0) std::printf(" %s %.2f,", names[phase], mean[phase] / seen[phase]);
    }
    std::printf("\n");
  }
}
#endif

#if defined(TWELL_FEW_TRACE)
// When the thread blocks reach each phase, in microseconds after the last block of the call before has ended.
void print_phases(const std::vector<uint64_t>& times, int calls, const std::vector<unsigned long long>& ends) {
  using few::kPhases, few::kTracedBlocks;
  const char* const names[2][kPhases] = {
      {"gate starts", "call before done", "x there", "gate sums", "masks", "up sums", "stored", "up's rows asked",
       "up's rows there", ""},
      {"down starts", "gate done", "listed", "first rows", "multiplied", "sums", "stored", "", "", ""}};
  const auto time = [&](int launch, int block, int phase) {
    return times[(static_cast<int64_t>(launch) * kTracedBlocks + block) * kPhases + phase];
  };
  std::vector<double> after[2 * kPhases];
  for (int call = 1; call < calls; ++call) {
    uint64_t zero = 0;
    for (int b = 0; b < kTracedBlocks; ++b) zero = std::max(zero, time(2 * call - 1, b, 6));
    if (ends[call] != 0) zero = ends[call];
    for (int k = 0; k < 2 * kPhases; ++k) {
      if (k % kPhases == kPhases - 1) continue;
      for (int b = 0; b < kTracedBlocks; ++b) {
        const uint64_t t = time(2 * call + k / kPhases, b, k % kPhases);
        if (t != 0) after[k].push_back((static_cast<double>(t) - static_cast<double>(zero)) / 1000.);
      }
    }
  }
  for (int k = 0; k < 2 * kPhases; ++k) {
    std::vector<double>& v = after[k];
    if (v.empty()) continue;
    std::sort(v.begin(), v.end());
    std::printf("    %-16s half %6.2f  last %6.2f\n", names[k / kPhases][k % kPhases], v[v.size() / 2], v.back());
  }
  for (int kernel = 0; kernel < 2; ++kernel) {
    double mean = 0;
    for (int call = 1; call < calls; ++call) {
      std::vector<int> blocks(1024);
      for (int b = 0; b < kTracedBlocks; ++b) ++blocks[time(2 * call + kernel, b, kPhases - 1) % 1024];
      mean += *std::max_element(blocks.begin() + 1, blocks.end()) / (calls - 1.);
    }
    std::printf("    %s: %.1f blocks on the fullest multiprocessor\n", kernel == 0 ? "gate" : "down", mean);
  }
}
#endif

// A chain of calls, each reading what the one before wrote, and what single calls give.
struct Chain {
  const char* name;
  int tokens;
  Kernels kernels, single;
};

// Chains in graphs that replay on several streams at a time: bit by bit what single calls give, after each replay. Tells
// of each kind of chain how many of its replays were wrong, and what was wrong first.
bool check_chains(const Device& device, const std::vector<Chain>& chains) {
  using Half = __nv_bfloat16;
  constexpr int kHidden = 2048, kWidth = 5632, kLayers = 24, kStreams = 4, kReplays = 90;
  std::vector<Layer<Half>> weights;
  for (int i = 0; i < kLayers; ++i) weights.emplace_back(kHidden, kWidth, true, true, false, 5000 + 10 * i);
  bool ok = true;
  for (const Chain& chain : chains) {
    const int tokens = chain.tokens;
    for (const float threshold : {0.f, 0.5f}) {
      for (int i = 0; i < kLayers; ++i) fill(weights[i].b_gate, kWidth, 5003 + 10 * i, -threshold, 0.25f);
      const int values = tokens * kHidden, all = values * kLayers;
      const auto call = [&](int i, Half* x) {
        const Layer<Half>& w = weights[i];
        Ffn f{};
        f.dtype = DType::kBFloat16, f.tokens = tokens, f.hidden = kHidden, f.width = kWidth;
        f.x = x + i * values, f.y = x + (i + 1) * values, f.gate.data = w.gate, f.up.data = w.up, f.down.data = w.down;
        f.b_gate = w.b_gate, f.b_up = w.b_up, f.b_down = w.b_down;
        return f;
      };
      const int64_t workspace_bytes = decode_workspace_bytes(call(0, nullptr));
      struct Stream {
        checks::Buffer<Half> x;
        checks::Buffer<char> workspace;
        checks::Buffer<checks::Mismatch> found;
        checks::Buffer<int> replay{1};
      };
      std::vector<std::unique_ptr<Stream>> streams;
      for (int s = 0; s < kStreams; ++s) {
        streams.emplace_back(new Stream{checks::Buffer<Half>(values + all), checks::Buffer<char>(workspace_bytes),
                                        checks::Buffer<checks::Mismatch>(kReplays)});
        fill(streams[s]->x.data, values, 99, 0.f, 1.f);
        streams[s]->replay.put({0});
        CHECK(cudaMemset(streams[s]->workspace.data, 0x7e, workspace_bytes));
      }
      CHECK(cudaDeviceSynchronize());
      const auto single_calls = [&] {
        Stream& s = *streams[0];
        for (int i = 0; i < kLayers; ++i) {
          CHECK(run(call(i, s.x.data), chain.single, device, s.workspace.data, nullptr));
          CHECK(cudaDeviceSynchronize());
        }
        std::vector<uint16_t> bits(all);
        CHECK(cudaMemcpy(bits.data(), s.x.data + values, 2 * all, cudaMemcpyDeviceToHost));
        return bits;
      };
      const std::vector<uint16_t> once = single_calls();
      const bool repeats = single_calls() == once;
      const checks::Buffer<uint16_t> want(once);
      std::vector<checks::Graph> graphs;
      for (const auto& s : streams) {
        CHECK(cudaMemset(s->x.data + values, 0xff, 2 * all));
        graphs.emplace_back(kLayers + 1, [&](int i, cudaStream_t stream) {
          if (i < kLayers) {
            CHECK(run(call(i, s->x.data), chain.kernels, device, s->workspace.data, stream));
          } else {
            checks::compare_kernel<<<1, 1024, 0, stream>>>(reinterpret_cast<uint16_t*>(s->x.data) + values, want.data,
                                                           kLayers, values, kHidden, s->found.data, s->replay.data);
            CHECK(cudaGetLastError());
          }
        });
      }
      CHECK(cudaDeviceSynchronize());
      for (int i = 0; i < kReplays; ++i) {
        for (checks::Graph& g : graphs) CHECK(cudaGraphLaunch(g.exec, g.stream));
      }
      CHECK(cudaDeviceSynchronize());
      int wrong_replays = 0;
      for (int s = 0; s < kStreams; ++s) {
        int i = -1;
        for (const checks::Mismatch& m : streams[s]->found.get()) {
          ++i;
          if (m.wrong == 0 || ++wrong_replays > 1) continue;
          std::printf("chain BAD: %s, %d tokens, threshold %.1f: replay %d, stream %d: call %d first, %d of its values "
                      "wrong (by token %d %d %d %d) in columns %d to %d; %d in all calls\n",
                      chain.name, tokens, threshold, i, s, m.call, m.in_call, m.of_token[0], m.of_token[1],
                      m.of_token[2], m.of_token[3], m.low_column, m.high_column, m.wrong);
        }
      }
      for (checks::Graph& g : graphs) g.release();
      std::printf("%-34s T=%-2d threshold %.1f: %s, %d of %d replays wrong\n", chain.name, tokens, threshold,
                  repeats ? "single calls repeat" : "single calls DIFFER", wrong_replays, kReplays * kStreams);
      std::fflush(stdout);
      ok &= repeats && wrong_replays == 0;
    }
  }
  for (Layer<Half>& w : weights) w.release();
  std::printf("chains: %s\n", ok ? "all right" : "FAILED");
  return ok;
}

std::vector<Chain> checked_chains() {
  std::vector<Chain> chains;
  for (const int tokens : {1, 2, 3, 4}) {
    const Kernels single = fused_kernels(false);
    chains.push_back({"fused", tokens, fused_kernels(true), single});
    chains.push_back({"fused, warm", tokens, fused_kernels(true, 1000, 64, true), single});
    chains.push_back({"fused, 24 KiB", tokens, fused_kernels(true, 1000, 24), single});
    chains.push_back({"fused, 96 KiB, warm", tokens, fused_kernels(true, 1000, 96, true), single});
    chains.push_back({"fused, impatient, warm", tokens, fused_kernels(true, 0, 64, true), single});
  }
  for (const int tokens : {1, 8}) {
    chains.push_back({"bulk", tokens, kernels(true, true), kernels(true, false)});
  }
  for (const int tokens : {3, 8, 9, 16, 64}) {
    chains.push_back({"few", tokens, few_kernels(true), few_kernels(false)});
    chains.push_back({"few, 4", tokens, few_in_clusters(4), few_in_clusters(4, false)});
  }
  return chains;
}

struct Row {
  int tokens, active;
  double bar;  // microseconds; 0: none
};

// What stands between calls: nothing, a small kernel, that and one that reads other weights or has much code, or a
// small kernel that takes part in programmatic launch.
enum class Between { kNothing, kSpacer, kWeights, kCode, kProgrammatic };
constexpr int64_t kWeightBytes = 32 << 20;  // four times 2048 x 2048 in 16 bits

void time_shape(int hidden, int width, int layers, const std::vector<Row>& rows, const Device& device,
                std::vector<std::string>& best, Between between = Between::kNothing) {
  using Half = __nv_bfloat16;
  std::vector<Layer<Half>> weights;
  for (int i = 0; i < layers; ++i) weights.emplace_back(hidden, width, true, false, false, 1000 + 10 * i);
  Half* const x = device_alloc<Half>(64 * int64_t{hidden});
  Half* const y = device_alloc<Half>(64 * int64_t{hidden});
  float* const z = device_alloc<float>(width);
  fill(x, 64 * int64_t{hidden}, 77, 0.f, 1.f);
  set_column(x, 64, hidden, 1.);
  const bool spaced = between != Between::kNothing;
  Half* const next_x = device_alloc<Half>(64 * int64_t{hidden});
  auto* const spacer_ends = device_alloc<unsigned long long>(layers);
  uint4* const others = between == Between::kWeights ? device_alloc<uint4>(kWeightBytes / 16 * layers) : nullptr;
  if (others != nullptr) CHECK(cudaMemset(others, 0, kWeightBytes * layers));
  int64_t workspace_bytes = 0;
  for (const int tokens : {1, 2, 4, 8, 16, 32, 64}) {  // the fused kernel's shares take more than more tokens do
    Ffn any{};
    any.tokens = tokens, any.hidden = hidden, any.width = width;
    workspace_bytes = std::max(workspace_bytes, decode_workspace_bytes(any));
  }
  char* const workspace = device_alloc<char>(workspace_bytes);
  int last_active = -1;
  for (const Row& row : rows) {
    if (row.active != last_active) {
      last_active = row.active;
      for (int i = 0; i < layers; ++i) {
        const std::vector<float> values = thresholds(width, static_cast<double>(row.active) / width, 7 + i);
        CHECK(cudaMemcpy(z, values.data(), 4 * values.size(), cudaMemcpyHostToDevice));
        set_thresholds_kernel<<<64, 256>>>(weights[i].gate, z, width, hidden);
        CHECK(cudaDeviceSynchronize());
      }
    }
    std::vector<Ffn> calls;
    for (const auto& w : weights) {
      Ffn f{};
      f.dtype = DType::kBFloat16, f.tokens = row.tokens, f.hidden = hidden, f.width = width;
      f.x = spaced ? next_x : x, f.gate.data = w.gate, f.up.data = w.up, f.down.data = w.down, f.y = y;
      calls.push_back(f);
    }
    CHECK(cudaMemcpy(next_x, x, 128 * int64_t{hidden}, cudaMemcpyDeviceToDevice));
    const auto between_calls = [&](int i, cudaStream_t s, bool traced) {
      if (between == Between::kWeights) {
        stream_kernel<<<64, 256, 0, s>>>(others + kWeightBytes / 16 * i, kWeightBytes / 16,
                                         reinterpret_cast<uint32_t*>(z));
      }
      if (between == Between::kCode) code_kernel<<<device.sm_count, 32, 0, s>>>(z, 0.5f, 0.25f);
      const bool lets = between == Between::kProgrammatic;
      cudaLaunchAttribute attribute{};
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
      cudaLaunchConfig_t config{};
      config.gridDim = dim3(8), config.blockDim = dim3(256), config.stream = s;
      config.attrs = &attribute, config.numAttrs = lets ? 1 : 0;
      CHECK(cudaLaunchKernelEx(&config, spacer_kernel, reinterpret_cast<const uint4*>(y),
                               reinterpret_cast<const uint4*>(x), reinterpret_cast<uint4*>(next_x),
                               row.tokens * hidden / 8, lets, traced ? spacer_ends + i : nullptr));
    };
    const auto call = [&](const Variant& v, int i, cudaStream_t s) {
      CHECK(run(calls[i], v.kernels, device, workspace, s));
    };
    const std::vector<Variant> variants = spaced ? spaced_variants(calls[0], device) : timed_variants(calls[0], device);
    DecodePlan plan = plan_decode(calls[0]);
    // The union over the tokens, as the gate kernel counts it.
    CHECK(run(calls[0], kernels(false, false), device, workspace, nullptr));
    std::vector<uint16_t> masks(plan.blocks);
    CHECK(cudaMemcpy(masks.data(), workspace + plan.masks, 2 * masks.size(), cudaMemcpyDeviceToHost));
    int together = 0;
    for (uint16_t m : masks) together += __builtin_popcount(m);

    std::vector<std::string> names;
    std::vector<checks::Graph> graphs;
    for (const Variant& v : variants) {
      names.push_back(v.name);
      graphs.emplace_back(layers, [&](int i, cudaStream_t s) {
        if (spaced) between_calls(i, s, false);
        call(v, i, s);
      });
    }
    const size_t whole = graphs.size();
    const auto part = [&](const std::string& name, const Kernels& k, auto launch) {
      plan.kernels = k;
      names.push_back(name);
      graphs.emplace_back(layers, [&](int i, cudaStream_t s) { CHECK(launch(calls[i], plan, device, workspace, s)); });
    };
    if (spaced) {
      names.push_back("between alone");
      graphs.emplace_back(layers, [&](int i, cudaStream_t s) { between_calls(i, s, false); });
    }
    // Each down after a gate that leaves what it reads.
    if (!spaced && takes_bulk(calls[0], device)) part("gate B", kernels(true, true), launch_gate_up);
    if (!spaced) {
      part("gate P", kernels(false, device.major >= 9), launch_gate_up);
      part("down P", kernels(false, device.major >= 9), launch_down);
    }
    if (!spaced && is_hopper(device)) {
      part("gate F", few_kernels(true), launch_gate_up);
      part("down F", few_kernels(true), launch_down);
    }
    for (int i = 0; i < 19; ++i) {
      for (checks::Graph& g : graphs) g.replay(i >= 4);
    }
    std::printf("%d x %d T=%d L0=%d (together %d, %.1f %%)\n ", hidden, width, row.tokens, row.active, together,
                100. * together / width);
#if defined(TWELL_FUSED_TRACE) || defined(TWELL_FEW_TRACE)
    std::vector<unsigned long long> ends(layers);
    const auto clear_ends = [&] { CHECK(cudaMemset(spacer_ends, 0, 8 * layers)); };
    const auto read_ends = [&] { CHECK(cudaMemcpy(ends.data(), spacer_ends, 8 * layers, cudaMemcpyDeviceToHost)); };
#endif
#if defined(TWELL_FUSED_TRACE)
    for (const Variant& v : variants) {
      if (!v.kernels.fused.use || !v.kernels.overlap) continue;
      const size_t count = size_t{1} * layers * fused::kTracedBlocks * fused::kPhases;
      uint64_t* const buffer = device_alloc<uint64_t>(count);
      std::vector<uint64_t> times(count);
      CHECK(cudaMemset(buffer, 0, 8 * count));
      fused::trace = buffer;
      clear_ends();
      checks::Graph traced(layers, [&](int i, cudaStream_t s) {
        if (spaced) between_calls(i, s, true);
        call(v, i, s);
      });
      fused::trace = nullptr;
      for (int i = 0; i < 5; ++i) traced.replay(i > 1);
      std::printf("  phases of %s, %.2f us a call:\n", v.name, traced.median());
      traced.release();
      CHECK(cudaMemcpy(times.data(), buffer, 8 * count, cudaMemcpyDeviceToHost));
      read_ends();
      print_fused_phases(times, layers, ends);
      CHECK(cudaFree(buffer));
    }
#endif
#if defined(TWELL_FEW_TRACE)
    for (const Variant& v : variants) {
      if (!v.kernels.few) continue;
      const size_t count = size_t{2} * layers * few::kTracedBlocks * few::kPhases;
      uint64_t* const buffer = device_alloc<uint64_t>(count);
      std::vector<uint64_t> times(count);
      CHECK(cudaMemset(buffer, 0, 8 * count));
      few::trace = buffer;
      clear_ends();
      checks::Graph traced(layers, [&](int i, cudaStream_t s) {
        if (spaced) between_calls(i, s, true);
        call(v, i, s);
      });
      few::trace = nullptr;
      for (int i = 0; i < 5; ++i) traced.replay(i > 1);
      std::printf("  phases of %s, %.2f us a call:\n", v.name, traced.median());
      traced.release();
      CHECK(cudaMemcpy(times.data(), buffer, 8 * count, cudaMemcpyDeviceToHost));
      read_ends();
      print_phases(times, layers, ends);
      CHECK(cudaFree(buffer));
    }
#endif
    size_t fastest = 0;
    double fastest_us = 1e9, first_us = 0;
    const double alone = spaced ? graphs[whole].median() : 0;
    for (size_t i = 0; i < graphs.size(); ++i) {
      const double us = graphs[i].median() - (i < whole ? alone : 0);
      std::printf(" | %s %.2f", names[i].c_str(), us);
      if (i == 0) first_us = us;
      if (i < whole && us < fastest_us) fastest = i, fastest_us = us;
      graphs[i].release();
    }
    std::printf("\n");
    std::fflush(stdout);
    char line[200];
    std::snprintf(line, sizeof line, "%5d x %-6d T=%-3d L0=%-5d P serial %6.2f  best %6.2f (%s)", hidden, width,
                  row.tokens, row.active, first_us, fastest_us, names[fastest].c_str());
    best.push_back(line);
    if (row.bar > 0) {
      std::snprintf(line, sizeof line, "  bar %.1f: %.2f of it", row.bar, fastest_us / row.bar);
      best.back() += line;
    }
  }
  for (auto& w : weights) w.release();
  for (void* p : {static_cast<void*>(x), static_cast<void*>(y), static_cast<void*>(workspace), static_cast<void*>(z),
                  static_cast<void*>(next_x), static_cast<void*>(spacer_ends), static_cast<void*>(others)}) {
    CHECK(cudaFree(p));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Device device = read_device();
  const bool only_large = argc > 1 && std::strcmp(argv[1], "large") == 0;
  const bool only_few = argc > 1 && std::strcmp(argv[1], "few") == 0;
  const bool only_fused = argc > 1 && std::strcmp(argv[1], "fused") == 0;
  const bool only_spaced = argc > 1 && std::strcmp(argv[1], "spaced") == 0;
  const bool only_time = only_few || only_large || only_fused || only_spaced || (argc > 1 && std::strcmp(argv[1], "time") == 0);
  const bool only_check = argc > 1 && !only_time;
  const bool only_chains = argc > 1 && std::strcmp(argv[1], "chains") == 0;
  if (only_chains) return check_chains(device, checked_chains()) ? 0 : 1;
  if (!only_time) {
    if (!check_all(device, argc > 1 && std::strcmp(argv[1], "verbose") == 0)) return 1;
    const bool only_cases = argc > 1 && std::strcmp(argv[1], "cases") == 0;
    if (is_hopper(device) && !only_cases && !check_chains(device, checked_chains())) return 1;
  }
  // Names: gate and up kernel (P portable, B bulk copies; F, and down too: Hopper's for 3 to 64 tokens, a number being
  // the thread blocks of down's clusters; U one kernel for all); overlapped unless "serial".
  std::vector<std::string> best;
  if (only_fused) {
    const auto at = [](std::initializer_list<int> densities) {
      std::vector<Row> rows;
      for (const int active : densities) {
        for (const int tokens : {1, 2, 4}) rows.push_back({tokens, active, 0});
      }
      return rows;
    };
#if defined(TWELL_FUSED_TRACE) || defined(TWELL_FEW_TRACE)
    time_shape(2048, 5632, 28, {{1, 30, 0}}, device, best);
    return 0;
#endif
    time_shape(2048, 5632, 28, at({30, 120, 600}), device, best);
    time_shape(896, 4864, 28, {{1, 26, 0}, {2, 26, 0}}, device, best);
    time_shape(1024, 3072, 28, {{1, 16, 0}, {2, 16, 0}}, device, best);
    for (const std::string& line : best) std::printf("%s\n", line.c_str());
  } else if (only_spaced) {
    bool right = true;  // the whole check takes longer
    for (const int tokens : {1, 2, 3, 4}) {
      for (const double density : {0.005, 0.5}) {
        right &= check<__nv_bfloat16>({tokens, 2048, 5632, density, true, true, Threshold::kCoordinate}, device, "bf16",
                                      1. / 128, false);
      }
    }
    std::printf("every variant: %s\n", right ? "all right" : "FAILED");
#if defined(TWELL_FUSED_TRACE) || defined(TWELL_FEW_TRACE)
    time_shape(2048, 5632, 28, {{1, 30, 0}, {2, 120, 0}, {16, 30, 0}}, device, best, Between::kSpacer);
    std::printf("with other code between:\n");
    time_shape(2048, 5632, 28, {{1, 30, 0}}, device, best, Between::kCode);
    return 0;
#endif
    std::vector<Row> rows;
    for (const int active : {30, 120}) {
      for (const int tokens : {1, 2, 4, 16, 64}) rows.push_back({tokens, active, 0});
    }
    time_shape(2048, 5632, 28, rows, device, best, Between::kSpacer);
    best.push_back("with other weights between:");
    time_shape(2048, 5632, 28, {{1, 30, 0}, {2, 30, 0}, {4, 30, 0}}, device, best, Between::kWeights);
    best.push_back("with a kernel between that takes part in programmatic launch:");
    time_shape(2048, 5632, 28, {{1, 30, 0}, {2, 30, 0}, {4, 30, 0}}, device, best, Between::kProgrammatic);
    best.push_back("with other code between:");
    time_shape(2048, 5632, 28, {{1, 30, 0}, {2, 30, 0}, {4, 30, 0}}, device, best, Between::kCode);
    for (const std::string& line : best) std::printf("%s\n", line.c_str());
  } else if (only_large) {
    for (const Between between : {Between::kNothing, Between::kSpacer}) {
      best.push_back(between == Between::kNothing ? "chains:" : "spaced:");
      time_shape(1536, 8960, 12, {{1, 48, 0}, {2, 48, 0}}, device, best, between);
      time_shape(2048, 8192, 12, {{1, 44, 0}, {2, 44, 0}, {4, 44, 0}, {1, 880, 0}}, device, best, between);
      time_shape(3584, 18944, 6, {{1, 100, 0}, {2, 100, 0}, {4, 100, 0}, {8, 100, 0}, {1, 2000, 0}}, device, best, between);
      time_shape(4096, 14336, 6, {{1, 70, 0}, {2, 70, 0}, {4, 70, 0}, {8, 70, 0}, {1, 1400, 0}}, device, best, between);
      time_shape(8192, 28672, 4, {{1, 150, 0}, {2, 150, 0}, {4, 150, 0}, {8, 150, 0}}, device, best, between);
    }
    for (const std::string& line : best) std::printf("%s\n", line.c_str());
  } else if (only_few) {
    time_shape(2048, 5632, 28,
               {{1, 30, 0}, {2, 30, 0}, {3, 30, 0}, {4, 30, 0}, {6, 30, 0}, {8, 30, 0},
                {16, 30, 13.8}, {32, 30, 0}, {64, 30, 18.3},
                {4, 120, 0}, {8, 120, 0}, {16, 120, 17.8}, {32, 120, 0}, {64, 120, 27},
                {4, 600, 0}, {8, 600, 0}, {16, 600, 26.7}, {32, 600, 0}, {64, 600, 33}},
               device, best);
    time_shape(4096, 14336, 12, {{1, 70, 0}, {2, 70, 0}, {4, 70, 0}, {8, 70, 0}, {16, 70, 0}}, device, best);
    time_shape(3584, 18944, 12, {{1, 100, 0}, {2, 100, 0}, {4, 100, 0}, {8, 100, 0}, {16, 100, 0}}, device, best);
    time_shape(2048, 8192, 28, {{1, 44, 0}, {2, 44, 0}, {4, 44, 0}, {8, 44, 0}, {16, 44, 0}}, device, best);
    time_shape(1024, 3072, 28, {{4, 16, 0}, {8, 16, 0}, {16, 16, 0}, {64, 16, 0}}, device, best);
    time_shape(896, 4864, 28, {{4, 26, 0}, {8, 26, 0}, {16, 26, 0}, {64, 26, 0}}, device, best);
    time_shape(576, 1536, 28, {{4, 8, 0}, {8, 8, 0}, {16, 8, 0}, {64, 8, 0}}, device, best);
    for (const std::string& line : best) std::printf("%s\n", line.c_str());
  } else if (!only_check) {
    time_shape(2048, 5632, 28,
               {{1, 30, 11.1}, {3, 30, 0}, {4, 30, 0}, {6, 30, 0}, {8, 30, 0}, {16, 30, 13.8}, {64, 30, 18.5},
                {1, 120, 12}, {4, 120, 0}, {8, 120, 0}, {16, 120, 17.8}, {64, 120, 27},
                {1, 600, 15.6}, {4, 600, 0}, {8, 600, 0}, {16, 600, 26.7}, {64, 600, 33},
                {1, 2800, 20.8}, {4, 2800, 0}, {8, 2800, 0}, {16, 2800, 33.7}, {64, 2800, 33}},
               device, best);
    time_shape(4096, 14336, 12, {{1, 70, 35.4}, {16, 70, 0}, {64, 70, 0}, {1, 1400, 0}}, device, best);
    time_shape(576, 1536, 28,
               {{1, 10, 0}, {4, 10, 0}, {8, 10, 0}, {16, 10, 0}, {64, 10, 0}, {1, 1400, 0}, {64, 1400, 0}}, device,
               best);
    time_shape(896, 4864, 28, {{1, 30, 0}, {4, 30, 0}, {8, 30, 0}, {64, 30, 0}, {1, 2400, 0}, {64, 2400, 0}}, device,
               best);
    time_shape(1024, 3072, 28, {{1, 30, 0}, {4, 30, 0}, {8, 30, 0}, {64, 30, 0}, {1, 1500, 0}}, device, best);
    for (const std::string& line : best) std::printf("%s\n", line.c_str());
  }
  return 0;
}
