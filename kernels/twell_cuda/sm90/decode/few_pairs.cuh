// Up of few pairs of a neuron and a token that activates it, for which sm90/decode/few_gate_up.cuh would read all of x
// again.
#pragma once

#include "sm90/decode/few_tile.cuh"

namespace twell::decoding::few {

// Hidden units of both rows of a pair that a warp asks for at a time, and how many such steps are on their way to it,
// of this pair or of its next one.
constexpr int kPairStep = 1024, kPairSteps = 2;
template <typename Weight>
constexpr uint32_t kPairStepBytes = kPairStep * (2 + sizeof(Weight));  // weights, then x

#if defined(TWELL_SM90_DEVICE)

// Whether there are few enough. Two rows a pair are then often more bytes than the active neurons' rows and x again, but
// they come in one round or few, where a product over those waits for lists, stages and sums that meet.
template <int kNeurons>
__device__ __forceinline__ bool takes_pairs(const FewParams& p, const Control<kNeurons>& c) {
  return p.up != nullptr && c.pair_count <= kMaxPairs;
}

// Eight weights of a row as 16-bit values.
template <typename Half, typename Weight>
__device__ __forceinline__ uint4 load_eight(uint32_t shared) {
  if constexpr (kScaled<Weight>) {
    const uint2 bytes = load_shared_8(shared);
    uint4 v;
    expand<Half, Weight>(bytes.x, v.x, v.y);
    expand<Half, Weight>(bytes.y, v.z, v.w);
    return v;
  } else {
    return sm90::load_shared_16(shared);
  }
}

// A warp's product of two rows. Tensor cores multiply each lane's numbers by those of eight groups of lanes, and only
// the diagonal is looked at: still far fewer instructions than ordinary cores take. Of a lane's eight numbers words 0
// and 2 lie in a product's first rows and 1 and 3 in its last, so each half is multiplied by its own weights.
template <typename Half, typename Weight>
struct PairSum {
  float even[4] = {}, odd[4] = {};

  // A step's numbers; a lane reads what others have copied.
  __device__ __forceinline__ void add(uint32_t step) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t row = step + lane * (8 * sizeof(Weight)), x = step + kPairStep * sizeof(Weight) + lane * 16;
#pragma unroll
    for (int k = 0; k < kPairStep / 256; ++k) {
      const uint4 a = sm90::load_shared_16(x + k * 512);
      const uint4 w = load_eight<Half, Weight>(row + k * 256 * sizeof(Weight));
      mma<Half>(even, a.x, a.y, a.z, a.w, w.x, w.z);
      mma<Half>(odd, a.x, a.y, a.z, a.w, w.y, w.w);
    }
  }
  __device__ __forceinline__ float total() const {
    const int lane = threadIdx.x % 32, group = lane / 4;  // whose numbers are row and column `group` (`mma`)
    float sum = group % 2 == 0 ? even[0] + odd[2] : even[1] + odd[3];
    if (lane % 4 != group / 2) sum = 0.f;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    return sum;
  }
};

// kBytes of a row from `from` on, of which the lane copies every 32nd piece of 16; past the row's end, where `left`
// bytes are, zeros.
template <int kBytes>
__device__ __forceinline__ void copy_step(uint32_t to, const char* from, int left) {
  const int own = threadIdx.x % 32 * 16;
  to += own, from += own, left -= own;
  asm volatile("" : "+r"(to), "+l"(from));  // one address, and copies at fixed distances from it
#pragma unroll
  for (int k = 0; k < kBytes; k += 512) sm90::copy_16(to + k, from + k, k < left);
}

// relu(gate) becomes h, a pair for each warp; while it is summed the next one's rows are on their way. They come where
// the rings were: a block that takes pairs has read all that it asked for there, and asks for nothing more.
template <typename Half, typename Weight, int kNeurons>
__device__ __forceinline__ void multiply_pairs(const FewParams& p, const ControlOf<Weight, kNeurons>& c, float* gate,
                                               int first, uint32_t shared) {
  constexpr int kBytes = sizeof(Weight);
  constexpr uint32_t kStep = kPairStepBytes<Weight>;
  const int warp = threadIdx.x / 32, count = c.pair_count, hidden = static_cast<int>(p.row_bytes / kBytes);
  const uint32_t steps = shared + warp * kPairSteps * kStep;
  int asked = warp, unit = 0;  // the pair and its hidden unit that are asked for next
  const auto ask = [&](uint32_t step) {
    if (asked < count) {
      const int token = c.pairs[asked] / 64, n = c.pairs[asked] % 64, left = hidden - unit;
      const char* const row = p.up + (static_cast<int64_t>(first + n) * hidden + unit) * kBytes;
      copy_step<kPairStep * kBytes>(step, row, left * kBytes);
      copy_step<kPairStep * 2>(step + kPairStep * kBytes, p.x + (token * hidden + unit) * 2, left * 2);
      unit += kPairStep;
      if (unit >= hidden) unit = 0, asked += kWarps;
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll 1
  for (int k = 0; k < kPairSteps; ++k) ask(steps + k * kStep);
  uint32_t step = steps;
#pragma unroll 1
  for (int i = warp; i < count; i += kWarps) {
    PairSum<Half, Weight> sums;
#pragma unroll 1
    for (int summed = 0; summed < hidden; summed += kPairStep) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kPairSteps - 1) : "memory");
      __syncwarp();
      sums.add(step);
      __syncwarp();
      ask(step);
      step = 2 * steps + kStep - step;  // the other one
    }
    const int token = c.pairs[i] / 64, n = c.pairs[i] % 64;
    float sum = sums.total();
    if constexpr (kScaled<Weight>) sum *= c.up_scale[n];
    if (threadIdx.x % 32 == 0) gate[token * kGateRow<kNeurons> + n] *= sum + c.up_bias[n];
  }
}

// Active neurons' h from shared memory: a thread takes 8 tokens of a neuron.
template <typename Half, int kNeurons>
__device__ __forceinline__ void store_pairs(const FewParams& p, const Active<kNeurons>& active, const float* gate,
                                            int first) {
  const int n = threadIdx.x / 8, chunk = threadIdx.x % 8;
  if (n >= kNeurons || chunk >= p.groups || !active.has(n)) return;
  const float* const from = gate + 8 * chunk * kGateRow<kNeurons> + n;
  uint32_t h[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    h[i] = sm90::pack<Half>(from[2 * i * kGateRow<kNeurons>], from[(2 * i + 1) * kGateRow<kNeurons>]);
  }
  *reinterpret_cast<uint4*>(reinterpret_cast<char*>(p.products) +
                            (static_cast<int64_t>(first + n) * p.groups + chunk) * 16) = {h[0], h[1], h[2], h[3]};
}

#endif

}  // namespace twell::decoding::few
