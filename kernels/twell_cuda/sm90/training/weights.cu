// Gradients of the weights from the sorted pairs of the kept blocks: each neuron's sums of rows of x and dy.
//
// Slice by slice of the hidden size, so that the rows' pieces come from L2: x and dy as a whole do not fit. A warp sums
// a unit of pairs in a slice; a second kernel adds up the units of neurons with many pairs, in order.

#include "sm90/common/launch.h"
#include "sm90/common/primitives.cuh"
#include "sm90/training/weights.h"

namespace twell::sm90 {
namespace {

constexpr int kThreads = 256, kBatch = 8;    // rows of each matrix under way in a warp
constexpr int64_t kWideSliceTokens = 20480;  // of so many, pieces of 512 bytes of all rows lie in L2 together

struct Arguments {
  const void* x;
  Sorted sorted;
  Gradients gradients;
  Scratch scratch;
  int hidden;
  bool beside;  // the launch before only sums other neurons: nothing to wait for, until the end
};

template <typename T>
__device__ __forceinline__ void store_bias(void* bias, int neuron, float sum) {
  if (bias != nullptr) static_cast<uint16_t*>(bias)[neuron] = static_cast<uint16_t>(pack<T>(sum, 0.0f));
}

// A token and what its row of dy (h) and x (dg, du) is multiplied with.
struct Pair {
  uint32_t token;
  float h, dg, du;
};

template <typename T>
__device__ __forceinline__ Pair load_pair(const Sorted& s, uint32_t begin, uint32_t at, uint32_t pairs) {
  Pair pair{};
  if (at < pairs) {
    const int64_t i = static_cast<int64_t>(begin) + at;
    const uint2 sorted = __ldcg(s.pairs + i);
    const float2 gradients = unpack<T>(sorted.y);
    pair = {sorted.x, unpack<T>(__ldcg(static_cast<const uint16_t*>(s.h) + i)).x, gradients.x, gradients.y};
  }
  return pair;
}

template <typename T>
__device__ __forceinline__ void add_row(float (&sum)[8], float factor, const uint4& row) {
  const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float2 v = unpack<T>(words[w]);
    sum[2 * w] += factor * v.x;
    sum[2 * w + 1] += factor * v.y;
  }
}

// Eight neighbours of one neuron's row.
template <typename T>
__device__ __forceinline__ void store_row(void* matrix, int64_t at, const float (&sum)[8]) {
  if (matrix == nullptr) return;
  *reinterpret_cast<uint4*>(static_cast<T*>(matrix) + at) = {pack<T>(sum[0], sum[1]), pack<T>(sum[2], sum[3]),
                                                             pack<T>(sum[4], sum[5]), pack<T>(sum[6], sum[7])};
}

__device__ __forceinline__ void store_partial(float* to, const float (&sum)[8]) {
  reinterpret_cast<float4*>(to)[0] = {sum[0], sum[1], sum[2], sum[3]};
  reinterpret_cast<float4*>(to)[1] = {sum[4], sum[5], sum[6], sum[7]};
}

// kLanes lanes share a row's piece of a slice; the warp's groups of lanes take rows in turn.
template <typename T, int kLanes, bool kGated>
__global__ void __launch_bounds__(kThreads, 2) gather_kernel(const Arguments a) {
#if defined(TWELL_SM90_DEVICE)
  constexpr int kGroups = 32 / kLanes;
  const int lane = threadIdx.x % 32, group = lane / kLanes;
  launch_dependents();
  if (!a.beside) wait_for_previous();
  const Scratch& scratch = a.scratch;
  const Gradients& out = a.gradients;
  const bool with_dy = out.down != nullptr;
  const bool with_x = out.gate != nullptr || (kGated && out.up != nullptr);
  const int units = __ldcg(&scratch.plan->units), slices = (a.hidden + kLanes * 8 - 1) / (kLanes * 8);
  const uint32_t row_bytes = static_cast<uint32_t>(a.hidden) * 2;
  int next = lane == 0 ? atomicAdd(&scratch.plan->next, 1) : 0;
  for (;;) {
    const int item = __shfl_sync(~0u, next, 0);
    if (item >= units * slices) break;
    if (lane == 0) next = atomicAdd(&scratch.plan->next, 1);
    const int slice = item / units, column = (slice * kLanes + lane % kLanes) * 8;
    const uint4 words = __ldcg(reinterpret_cast<const uint4*>(scratch.units + (item - slice * units)));
    const Unit unit{words.x, words.y, static_cast<int>(words.z), static_cast<int>(words.w)};
    const bool inside = column < a.hidden;
    const char* x = static_cast<const char*>(a.x) + column * 2;
    const char* dy = static_cast<const char*>(out.dy) + column * 2;
    float down[8]{}, gate[8]{}, up[8]{}, bias_gate = 0.0f, bias_up = 0.0f;
    Pair following = load_pair<T>(a.sorted, unit.begin, lane, unit.pairs);
    for (uint32_t start = 0; start < unit.pairs; start += 32) {
      const Pair mine = following;
      following = load_pair<T>(a.sorted, unit.begin, start + 32 + lane, unit.pairs);
      bias_gate += mine.dg;
      bias_up += mine.du;
      const int left = static_cast<int>(min(32u, unit.pairs - start));
      const int x_left = inside && with_x ? left : 0, dy_left = inside && with_dy ? left : 0;
#pragma unroll 1
      for (int base = 0; base < left; base += kBatch * kGroups) {
        uint4 x_rows[kBatch], dy_rows[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int source = base + i * kGroups + group;
          const uint64_t offset = uint64_t{__shfl_sync(~0u, mine.token, source)} * row_bytes;
          x_rows[i] = source < x_left ? *reinterpret_cast<const uint4*>(x + offset) : uint4{};
          dy_rows[i] = source < dy_left ? *reinterpret_cast<const uint4*>(dy + offset) : uint4{};
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int source = base + i * kGroups + group;
          add_row<T>(down, __shfl_sync(~0u, mine.h, source), dy_rows[i]);
          add_row<T>(gate, __shfl_sync(~0u, mine.dg, source), x_rows[i]);
          if constexpr (kGated) add_row<T>(up, __shfl_sync(~0u, mine.du, source), x_rows[i]);
        }
      }
    }
#pragma unroll
    for (int d = kLanes; d < 32; d *= 2) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        down[i] += __shfl_xor_sync(~0u, down[i], d);
        gate[i] += __shfl_xor_sync(~0u, gate[i], d);
        if constexpr (kGated) up[i] += __shfl_xor_sync(~0u, up[i], d);
      }
    }
    if (slice == 0) {
#pragma unroll
      for (int d = 16; d > 0; d /= 2) {
        bias_gate += __shfl_xor_sync(~0u, bias_gate, d);
        bias_up += __shfl_xor_sync(~0u, bias_up, d);
      }
      if (lane == 0 && unit.slot < 0) {
        store_bias<T>(out.b_gate, unit.neuron, bias_gate);
        if constexpr (kGated) store_bias<T>(out.b_up, unit.neuron, bias_up);
      } else if (lane == 0) {
        reinterpret_cast<float2*>(scratch.biases)[unit.slot] = {bias_gate, bias_up};
      }
    }
    if (!inside || group != 0) continue;
    if (unit.slot < 0) {
      const int64_t at = int64_t{unit.neuron} * a.hidden + column;
      store_row<T>(out.down, at, down);
      store_row<T>(out.gate, at, gate);
      if constexpr (kGated) store_row<T>(out.up, at, up);
    } else {
      float* to = scratch.sums + int64_t{unit.slot} * scratch.matrices * a.hidden + column;
      store_partial(to, down);
      store_partial(to + a.hidden, gate);
      if constexpr (kGated) store_partial(to + 2 * a.hidden, up);
    }
  }
  if (a.beside) wait_for_previous();  // whoever waits for this waits for that too
#endif
}

// A thread for eight columns of one matrix of a split neuron.
template <typename T>
__global__ void __launch_bounds__(kThreads) combine_kernel(const Arguments a) {
#if defined(TWELL_SM90_DEVICE)
  launch_dependents();
  wait_for_previous();
  const Scratch& scratch = a.scratch;
  const int pieces = a.hidden / 8, shares = scratch.matrices * pieces;
  const int64_t work = int64_t{__ldcg(&scratch.plan->splits)} * shares;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < work; i += int64_t{gridDim.x} * kThreads) {
    const int share = static_cast<int>(i % shares), matrix = share / pieces, column = share % pieces * 8;
    const Split split = scratch.splits[i / shares];
    const int64_t slot_size = int64_t{shares} * 8;
    const float* from = scratch.sums + split.slot * slot_size + share * 8;
    float sum[8]{};
#pragma unroll 4
    for (int u = 0; u < split.units; ++u) {
      const float4 low = __ldcg(reinterpret_cast<const float4*>(from + u * slot_size));
      const float4 high = __ldcg(reinterpret_cast<const float4*>(from + u * slot_size) + 1);
      sum[0] += low.x, sum[1] += low.y, sum[2] += low.z, sum[3] += low.w;
      sum[4] += high.x, sum[5] += high.y, sum[6] += high.z, sum[7] += high.w;
    }
    void* const out = matrix == 0 ? a.gradients.down : matrix == 1 ? a.gradients.gate : a.gradients.up;
    store_row<T>(out, int64_t{split.neuron} * a.hidden + column, sum);
    if (share != 0) continue;
    float bias_gate = 0.0f, bias_up = 0.0f;
    for (int u = 0; u < split.units; ++u) {
      const float2 part = __ldcg(reinterpret_cast<const float2*>(scratch.biases) + split.slot + u);
      bias_gate += part.x;
      bias_up += part.y;
    }
    store_bias<T>(a.gradients.b_gate, split.neuron, bias_gate);
    if (scratch.matrices == 3) store_bias<T>(a.gradients.b_up, split.neuron, bias_up);
  }
#endif
}

// Some of its rows are in L1 already, because another warp's neuron was active for the same token: all of it is asked
// for.
template <typename T, int kLanes>
cudaError_t launch_gather(const Arguments& a, const Device& device, cudaStream_t stream) {
  const auto kernel = a.scratch.matrices == 3 ? gather_kernel<T, kLanes, true> : gather_kernel<T, kLanes, false>;
  return launch_with_carveout(0, kernel, 2 * device.sm_count, kThreads, 1, 0, stream, a);
}

template <typename T>
cudaError_t launch(const Ffn& ffn, const State& state, const Arguments& a, bool beside_dx, const Device& device,
                   cudaStream_t stream) {
  if (a.beside) {
    TWELL_RETURN_IF_ERROR(launch_spread(ffn, state, a.sorted, a.gradients, a.scratch, beside_dx, device, stream));
    TWELL_RETURN_IF_ERROR(launch_heavy(ffn, state, a.gradients, a.scratch, device, stream));
  }
  TWELL_RETURN_IF_ERROR(ffn.tokens <= kWideSliceTokens && ffn.hidden > 64 ? launch_gather<T, 32>(a, device, stream)
                                                                          : launch_gather<T, 8>(a, device, stream));
  return launch_kernel(combine_kernel<T>, 2 * device.sm_count, kThreads, 1, 0, stream, a);
}

Scratch scratch_of(const Ffn& ffn, const State& state, const Gradients& gradients, void* partials) {
  Scratch scratch;
  place_scratch(ffn, state.pairs, partials, &scratch);
  const bool biases_alone = gradients.down == nullptr && gradients.gate == nullptr && gradients.up == nullptr;
  if (biases_alone) scratch.heavy.tiles = 0;
  return scratch;
}

}  // namespace

cudaError_t launch_weights_plan(const Ffn& ffn, const State& state, const Sorted& sorted, const Gradients& gradients,
                                void* partials, cudaStream_t stream) {
  if (!gradients.weights()) return cudaSuccess;
  return launch_plan(ffn, sorted.first, scratch_of(ffn, state, gradients, partials), stream);
}

cudaError_t launch_weights(const Ffn& ffn, const State& state, const Sorted& sorted, const Gradients& gradients,
                           void* partials, bool beside_dx, const Device& device, cudaStream_t stream) {
  if (!gradients.weights()) return cudaSuccess;
  Arguments arguments{ffn.x, sorted, gradients, scratch_of(ffn, state, gradients, partials), ffn.hidden, false};
  arguments.beside = arguments.scratch.heavy.tiles > 0;
  return ffn.dtype == DType::kBFloat16 ? launch<__nv_bfloat16>(ffn, state, arguments, beside_dx, device, stream)
                                       : launch<__half>(ffn, state, arguments, beside_dx, device, stream);
}

}  // namespace twell::sm90
