// Checks the portable prefill against plain fp32 loops, then times its three kernels. Leaves with 1 where anything is
// wrong.
//
// Built by kernels/tests/check_cuda.sh.
//   ./portable_check [--no-times]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "portable/chunk.h"
#include "portable/element.cuh"
#include "portable/portable.h"
#include "tests/check.cuh"

namespace {

using namespace twell;
using checks::hash;

// Device memory that starts as NaN in every 16-bit type, with a guard behind it.
struct Buffer {
  static constexpr size_t kGuard = 4096;
  char* data = nullptr;
  size_t bytes = 0;
  explicit Buffer(size_t size) : bytes(size) {
    CHECK(cudaMalloc(&data, bytes + kGuard));
    poison(0xff);
  }
  ~Buffer() { cudaFree(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void poison(int byte) {
    CHECK(cudaMemset(data, byte, bytes));
    CHECK(cudaMemset(data + bytes, 0x5a, kGuard));
  }
  bool guard_whole() const {
    std::vector<unsigned char> guard(kGuard);
    CHECK(cudaMemcpy(guard.data(), data + bytes, kGuard, cudaMemcpyDeviceToHost));
    return std::all_of(guard.begin(), guard.end(), [](unsigned char byte) { return byte == 0x5a; });
  }
};

__device__ float uniform(uint64_t seed, uint64_t i) {  // [0, 1)
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

__global__ void fill(DType dtype, void* values, int64_t count, uint64_t seed, float scale) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    store(dtype, values, i, (2.0f * uniform(seed, i) - 1.0f) * scale);
  }
}

enum class Pattern { kDensity, kOneElement, kUnion, kNan };

// kDensity: each gate is positive with probability `share`. kUnion: of each 128 tokens, `share` of the neurons are
// active in about 2.9 of these tokens. The others are negative, 0 or -0. kNan: kDensity, and NaN (with either sign) for
// token 5.
__global__ void fill_gate(DType dtype, void* gate, int64_t tokens, int width, Pattern pattern, float share,
                          uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < tokens * width;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t token = i / width, neuron = i % width;
    const float size = 0.1f + uniform(seed, i);
    bool active = uniform(seed + 1, i) < share;
    if (pattern == Pattern::kOneElement) active = token == tokens / 2 && neuron == width - 1;
    if (pattern == Pattern::kUnion) {
      const uint64_t member = token / 128 * width + neuron;
      active = uniform(seed + 2, member) < share && (hash(member + seed) % 128 == static_cast<uint64_t>(token % 128) ||
                                                     uniform(seed + 1, i) < 1.87f / 127.0f);
    }
    float value = active ? size : i % 3 == 0 ? -0.0f : i % 3 == 1 ? 0.0f : -size;
    if (pattern == Pattern::kNan && token == 5 && neuron % 7 == 3) value = neuron % 2 ? NAN : -NAN;
    store(dtype, gate, i, value);
  }
}

__global__ void reference_h(Ffn ffn, const void* gate, float* h, int64_t first, int64_t count, double* pairs) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= count * ffn.width) return;
  const int64_t token = first + i / ffn.width, neuron = i % ffn.width;
  const float value = load(ffn.dtype, gate, token * ffn.width + neuron);
  h[i] = 0.0f;
  if (value <= 0.0f) return;
  atomicAdd(pairs, 1.0);
  float factor = 1.0f;
  if (ffn.up.data != nullptr) {
    factor = ffn.b_up == nullptr ? 0.0f : load(ffn.dtype, ffn.b_up, neuron);
    for (int d = 0; d < ffn.hidden; ++d) {
      factor += load(ffn.dtype, ffn.x, token * ffn.hidden + d) * load(ffn.dtype, ffn.up.data, neuron * ffn.hidden + d);
    }
  }
  h[i] = value * factor;
}

__global__ void reference_y(Ffn ffn, const float* h, float* y, int64_t count) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= count * ffn.hidden) return;
  const int64_t token = i / ffn.hidden, d = i % ffn.hidden;
  float sum = ffn.b_down == nullptr ? 0.0f : load(ffn.dtype, ffn.b_down, d);
  for (int f = 0; f < ffn.width; ++f) {
    const float value = h[token * ffn.width + f];
    if (value != 0.0f) sum += value * load(ffn.dtype, ffn.down.data, f * int64_t{ffn.hidden} + d);
  }
  y[i] = sum;
}

// Adds to {sum of squared differences, sum of squares, elements that must be zero or NaN and are not, NaN where none
// belongs}.
__global__ void compare(DType dtype, const void* y, const float* expected, int64_t first, int64_t count, double* sums) {
  double difference = 0.0, square = 0.0, wrong = 0.0, nan = 0.0;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const float value = load(dtype, y, first + i), truth = expected[i];
    if (isnan(truth)) {
      wrong += !isnan(value);
    } else if (isnan(value)) {
      nan += 1.0;
    } else {
      wrong += truth == 0.0f && value != 0.0f;
      difference += (double{value} - truth) * (double{value} - truth);
      square += double{truth} * truth;
    }
  }
  atomicAdd(sums, difference);
  atomicAdd(sums + 1, square);
  atomicAdd(sums + 2, wrong);
  atomicAdd(sums + 3, nan);
}

__global__ void count_differences(const uint16_t* a, const uint16_t* b, int64_t count, unsigned long long* different) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    if (a[i] != b[i]) atomicAdd(different, 1ull);
  }
}

struct Case {
  DType dtype;
  int64_t tokens;
  int hidden, width;
  bool gated, biased;
  Pattern pattern;
  float share;
  Device device;
};

// One call's tensors.
struct Call {
  Case of;
  Buffer x, up, down, b_up, b_down, y, gate;
  Ffn ffn;

  explicit Call(const Case& c, uint64_t seed)
      : of(c),
        x(c.tokens * c.hidden * 2),
        up(int64_t{c.width} * c.hidden * 2),
        down(int64_t{c.width} * c.hidden * 2),
        b_up(c.width * 2),
        b_down(c.hidden * 2),
        y(c.tokens * c.hidden * 2),
        gate(c.tokens * c.width * 2) {
    const auto random = [&](Buffer& buffer, float scale) {
      fill<<<1024, 256>>>(c.dtype, buffer.data, static_cast<int64_t>(buffer.bytes / 2), seed++, scale);
      CHECK(cudaGetLastError());
    };
    random(x, 1.0f);
    random(up, 1.0f / std::sqrt(static_cast<float>(c.hidden)));
    random(down, 1.0f / std::sqrt(static_cast<float>(c.width)));
    random(b_up, 0.5f);
    random(b_down, 0.5f);
    fill_gate<<<2048, 256>>>(c.dtype, gate.data, c.tokens, c.width, c.pattern, c.share, seed);
    CHECK(cudaGetLastError());
    ffn = Ffn{c.dtype,
              c.tokens,
              c.hidden,
              c.width,
              x.data,
              {},
              {c.gated ? up.data : nullptr},
              {down.data},
              nullptr,
              c.gated && c.biased ? b_up.data : nullptr,
              c.biased ? b_down.data : nullptr,
              y.data};
  }

  const char* gate_of(int64_t first) const { return gate.data + first * of.width * 2; }

  void run(Buffer& workspace, cudaStream_t stream) const {
    const int64_t most = portable_chunk_tokens(ffn);
    for (int64_t first = 0; first < of.tokens; first += most) {
      const int64_t count = std::min(most, of.tokens - first);
      CHECK(portable_chunk(ffn, first, count, gate_of(first), workspace.data, of.device, stream));
    }
  }
};

// h and y are each rounded once: 2.4e-3 in bf16. Eager PyTorch, which also rounds up's output, has 3.3e-3. The
// roundings of fewer than 64 active pairs do not average out.
double limit(DType dtype, double pairs) {
  if (pairs < 64.0) return dtype == DType::kBFloat16 ? 0x1p-7 : 0x1p-10;
  return dtype == DType::kBFloat16 ? 3.3e-3 : 4.2e-4;
}

struct Verdict {
  double error;  // relative RMS
  double wrong;  // elements that must be zero or NaN and are not, or are NaN and must not be
  bool good;
};

// Rows [first, first + count) of y.
Verdict judge(const Call& call, int64_t first, int64_t count) {
  const Case& c = call.of;
  Buffer h(count * c.width * 4), y(count * c.hidden * 4), sums(5 * sizeof(double));
  CHECK(cudaMemset(sums.data, 0, sums.bytes));
  float* h_values = reinterpret_cast<float*>(h.data);
  float* y_values = reinterpret_cast<float*>(y.data);
  reference_h<<<static_cast<unsigned>((count * c.width + 255) / 256), 256>>>(
      call.ffn, call.gate.data, h_values, first, count, reinterpret_cast<double*>(sums.data) + 4);
  CHECK(cudaGetLastError());
  reference_y<<<static_cast<unsigned>((count * c.hidden + 255) / 256), 256>>>(call.ffn, h_values, y_values, count);
  CHECK(cudaGetLastError());
  compare<<<512, 256>>>(c.dtype, call.y.data, y_values, first * c.hidden, count * c.hidden,
                        reinterpret_cast<double*>(sums.data));
  CHECK(cudaGetLastError());
  double host[5];
  CHECK(cudaMemcpy(host, sums.data, sizeof(host), cudaMemcpyDeviceToHost));
  const double error = host[1] == 0.0 ? std::sqrt(host[0]) : std::sqrt(host[0] / host[1]);
  const double wrong = host[2] + host[3];
  return {error, wrong, wrong == 0.0 && error <= limit(c.dtype, host[4])};
}

bool check(const Case& c, uint64_t seed) {
  Call call(c, seed);
  Buffer workspace(portable_workspace_bytes(call.ffn)), again(call.y.bytes), different(8);
  call.run(workspace, nullptr);
  CHECK(cudaDeviceSynchronize());
  bool right = call.y.guard_whole() && workspace.guard_whole();
  CHECK(cudaMemcpy(again.data, call.y.data, again.bytes, cudaMemcpyDeviceToDevice));

  // The same from a captured graph, over other rubbish.
  call.y.poison(0x7f);
  workspace.poison(0x7f);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  call.run(workspace, stream);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&executable, graph, 0));
  CHECK(cudaGraphLaunch(executable, stream));
  CHECK(cudaStreamSynchronize(stream));
  CHECK(cudaGraphExecDestroy(executable));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaStreamDestroy(stream));
  CHECK(cudaMemset(different.data, 0, 8));
  count_differences<<<512, 256>>>(reinterpret_cast<uint16_t*>(call.y.data), reinterpret_cast<uint16_t*>(again.data),
                                  static_cast<int64_t>(again.bytes / 2),
                                  reinterpret_cast<unsigned long long*>(different.data));
  CHECK(cudaGetLastError());
  unsigned long long changed = 0;
  CHECK(cudaMemcpy(&changed, different.data, 8, cudaMemcpyDeviceToHost));

  const Verdict verdict = judge(call, 0, c.tokens);
  right = right && changed == 0 && verdict.good && call.y.guard_whole() && workspace.guard_whole();
  if (!right) {
    std::printf(
        "WRONG %s T=%lld D=%d F=%d %s %s pattern %d share %.2f sm_%d%d x%d: error %.2e, %g wrong, %llu not repeated, "
        "guards %d %d\n",
        c.dtype == DType::kBFloat16 ? "bf16" : "fp16", static_cast<long long>(c.tokens), c.hidden, c.width,
        c.gated ? "gated" : "plain", c.biased ? "biased" : "unbiased", static_cast<int>(c.pattern), c.share,
        c.device.major, c.device.minor, c.device.sm_count, verdict.error, verdict.wrong, changed, call.y.guard_whole(),
        workspace.guard_whole());
  }
  return right;
}

float median(std::vector<float> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

bool time(int64_t tokens, float share, const Device& device) {
  const Case c{DType::kBFloat16, tokens, 2048, 5632, true, false, Pattern::kUnion, share, device};
  Call call(c, 77);
  Buffer workspace(portable_workspace_bytes(call.ffn));
  call.run(workspace, nullptr);
  CHECK(cudaDeviceSynchronize());
  const Verdict head = judge(call, 0, 200), tail = judge(call, tokens - 200, 200);
  if (!head.good || !tail.good) {
    std::printf("WRONG T=%lld share %.2f: error %.2e %.2e\n", static_cast<long long>(tokens), share, head.error,
                tail.error);
    return false;
  }

  const int64_t most = portable_chunk_tokens(call.ffn);
  cudaEvent_t events[4];
  for (cudaEvent_t& event : events) CHECK(cudaEventCreate(&event));
  std::vector<float> times[3], whole;
  double neurons = 0.0;
  for (int repeat = 0; repeat < 25; ++repeat) {
    float sums[3] = {0.0f, 0.0f, 0.0f};
    neurons = 0.0;
    for (int64_t first = 0; first < tokens; first += most) {
      const portable::Chunk chunk =
          portable::make_chunk(call.ffn, first, std::min(most, tokens - first), call.gate_of(first), workspace.data);
      CHECK(cudaEventRecord(events[0]));
      CHECK(portable::pack(chunk, nullptr));
      CHECK(cudaEventRecord(events[1]));
      CHECK(portable::up(chunk, device, nullptr));
      CHECK(cudaEventRecord(events[2]));
      CHECK(portable::down(chunk, device, nullptr));
      CHECK(cudaEventRecord(events[3]));
      CHECK(cudaEventSynchronize(events[3]));
      for (int i = 0; i < 3; ++i) {
        float milliseconds = 0.0f;
        CHECK(cudaEventElapsedTime(&milliseconds, events[i], events[i + 1]));
        sums[i] += milliseconds;
      }
      std::vector<int> counts(chunk.blocks);
      CHECK(cudaMemcpy(counts.data(), chunk.counts, counts.size() * sizeof(int), cudaMemcpyDeviceToHost));
      for (int count : counts) neurons += count;
    }
    for (int i = 0; i < 3; ++i) times[i].push_back(sums[i]);
    CHECK(cudaEventRecord(events[0]));
    call.run(workspace, nullptr);
    CHECK(cudaEventRecord(events[3]));
    CHECK(cudaEventSynchronize(events[3]));
    float milliseconds = 0.0f;
    CHECK(cudaEventElapsedTime(&milliseconds, events[0], events[3]));
    whole.push_back(milliseconds);
  }
  for (cudaEvent_t event : events) CHECK(cudaEventDestroy(event));
  const double flops = 2.0 * 128 * neurons * c.hidden;
  const float pack = median(times[0]), up = median(times[1]), down = median(times[2]);
  std::printf("%7lld  %5.0f  %6lld  %7.4f  %7.4f  %7.4f  %7.4f  %7.0f  %7.0f\n", static_cast<long long>(tokens),
              neurons / std::ceil(tokens / 128.0), static_cast<long long>(most), pack, up, down, median(whole),
              flops / up * 1e-9, flops / down * 1e-9);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  const Device real{properties.multiProcessorCount, properties.major, properties.minor};
  // Few multiprocessors: wide tiles also for small shapes, and thread blocks that walk many of them. 8.6: the variant
  // for 99 KiB.
  const Device one{1, properties.major, properties.minor}, three_shallow{3, 8, 6}, shallow{real.sm_count, 8, 6};

  struct Shape {
    int64_t tokens;
    int hidden, width;
  };
  const Shape shapes[] = {{65, 64, 192},     {1, 8, 1},        {63, 8, 7},        {128, 256, 256},
                          {129, 264, 1000},  {199, 520, 1283}, {257, 2048, 5632}, {1000, 136, 320},
                          {300, 1032, 4097}, {70, 16384, 264}, {130, 40, 65536}};
  int checks = 0, failures = 0;
  uint64_t seed = 1;
  const auto expect = [&](const Case& c) {
    ++checks;
    failures += !check(c, seed += 100);
  };
  for (const Shape& shape : shapes) {
    for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      for (const Device& device : {real, one, three_shallow}) {
        for (bool gated : {true, false}) {
          const auto expect_shape = [&](Pattern pattern, float share, bool biased) {
            expect({dtype, shape.tokens, shape.hidden, shape.width, gated, biased, pattern, share, device});
          };
          expect_shape(Pattern::kDensity, 0.0f, true);
          expect_shape(Pattern::kDensity, 0.0f, false);
          expect_shape(Pattern::kOneElement, 0.0f, false);
          expect_shape(Pattern::kDensity, 0.01f, true);
          expect_shape(Pattern::kDensity, 0.01f, false);
          expect_shape(Pattern::kUnion, 0.24f, false);
          expect_shape(Pattern::kDensity, 0.5f, true);
          expect_shape(Pattern::kDensity, 1.0f, false);
          if (shape.tokens > 5) expect_shape(Pattern::kNan, 0.02f, true);
        }
      }
    }
  }
  // Several chunks: 256 blocks are the most that one takes.
  for (const Device& device : {real, shallow}) {
    expect({DType::kBFloat16, 4096, 1024, 1408, true, true, Pattern::kUnion, 0.3f, device});
    expect({DType::kBFloat16, 65537, 64, 72, true, true, Pattern::kDensity, 0.1f, device});
    expect({DType::kFloat16, 20000, 128, 5000, true, true, Pattern::kUnion, 0.3f, device});
  }
  std::printf("%d checks, %d wrong\n", checks, failures);

  if (argc < 2 || std::strcmp(argv[1], "--no-times") != 0) {
    std::printf("%s, bf16, D=2048 F=5632; ms, TFLOP/s of the union\n", properties.name);
    std::printf(" tokens  union   chunk     pack       up     down    whole   up TF/s  down TF/s\n");
    for (int64_t tokens : {int64_t{16384}, int64_t{4096}, int64_t{1024}, int64_t{256}}) {
      for (float share : {0.2377f, 0.5f, 1.0f}) failures += !time(tokens, share, real);
    }
  }
  return failures == 0 ? 0 : 1;
}
