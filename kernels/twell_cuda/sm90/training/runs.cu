// The count of what neighbours activate together, from columns: a run of tokens counts as its strongest token does, so
// the count's gradient is that token's, in equal parts where several are as strong. A run may lie in several blocks of
// tokens, and in several chunks.

#include "common/terms.cuh"
#include "sm90/common/launch.h"
#include "sm90/common/primitives.cuh"
#include "sm90/training/runs.h"

namespace twell::sm90 {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kResident = 5;  // thread blocks that an SM holds at once
constexpr int kGroupEntries = 32, kVectors = kHalfTokens / 8;         // 16 bytes each of a column's half

struct Arguments {
  Chunk chunk;
  Runs runs;
  RunScratch scratch;
  int width, splits;  // thread blocks for each half of a block of tokens
};

// What a warp does: groups of the entries of half a block, an entry a lane.
struct Work {
  int lane, warp, warps;  // `warp` of all warps that share the half
  int block, half;
  int begin, end;  // entries of the block that the half activates
  const uint16_t* neurons;
  int64_t first_column;  // element of the half's column of neuron 0
  int64_t first_bits;    // of RunScratch::candidates, of the block's entry 0

  __device__ __forceinline__ explicit Work(const Arguments& a) {
    const Active& active = a.chunk.active;
    lane = threadIdx.x % 32;
    warp = static_cast<int>(blockIdx.x) % a.splits * kWarps + static_cast<int>(threadIdx.x) / 32;
    warps = a.splits * kWarps;
    const int half_block = static_cast<int>(blockIdx.x) / a.splits;
    block = half_block / 2, half = half_block % 2;
    const Counts& counts = active.counts[block];
    const int first_only = __ldcg(&counts.first_only), both = __ldcg(&counts.both);
    begin = half == 0 ? 0 : first_only;
    end = first_only + both + (half == 0 ? 0 : __ldcg(&counts.second_only));
    neurons = active.neurons + static_cast<int64_t>(block) * active.row;
    first_column = static_cast<int64_t>(block) * a.width * kBlockTokens + half * kHalfTokens;
    first_bits = ((a.chunk.first_block() + block) * 2 + half) * active.row;
  }
};

// Where the runs of a half's tokens end: a stretch is neighbours of one run. Each lane has tokens `lane` and 32 + lane.
struct Stretches {
  int run[2], size[2];  // of the lane's tokens; size 0: the run adds nothing, or there is no such token
  uint64_t ends;        // a bit for each token that is the last of its stretch

  __device__ __forceinline__ Stretches(const Arguments& a, const Work& work) {
    const int64_t first = static_cast<int64_t>(work.block) * kBlockTokens + work.half * kHalfTokens + work.lane;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t token = first + 32 * i;
      run[i] = token < a.chunk.tokens ? static_cast<int>(__ldcg(a.runs.run + a.chunk.first + token)) : -1;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) size[i] = run[i] < 0 ? 0 : static_cast<int>(__ldcg(a.runs.sizes + run[i]));
    const int middle = __shfl_sync(~0u, run[1], 0);
    const int next[2] = {__shfl_down_sync(~0u, run[0], 1), __shfl_down_sync(~0u, run[1], 1)};
    const bool last = work.lane == 31;
    const uint32_t low = __ballot_sync(~0u, run[0] != (last ? middle : next[0]));
    const uint32_t high = __ballot_sync(~0u, last || run[1] != next[1]);
    ends = static_cast<uint64_t>(high) << 32 | low;
  }
  // Of that token, by all lanes.
  __device__ __forceinline__ int run_of(int token) const {
    return __shfl_sync(~0u, token < 32 ? run[0] : run[1], token % 32);
  }
  __device__ __forceinline__ int size_of(int token) const {
    return __shfl_sync(~0u, token < 32 ? size[0] : size[1], token % 32);
  }
};

// Joins some of a run's tokens, `count` with the largest value, with others of the run: the larger value stays, and how
// many have it, in whatever order they come. True for the first.
__device__ __forceinline__ bool join(uint64_t* strongest, uint32_t value, uint32_t count) {
  auto* const to = reinterpret_cast<unsigned long long*>(strongest);
  for (unsigned long long seen = 0;;) {
    const uint32_t theirs = static_cast<uint32_t>(seen >> 32);
    if (theirs > value) return false;
    const unsigned long long joined =
        theirs == value ? seen + count : static_cast<unsigned long long>(value) << 32 | count;
    const unsigned long long found = atomicCAS(to, seen, joined);
    if (found == seen) return seen == 0;
    seen = found;
  }
}

__global__ void __launch_bounds__(kThreads) clear_kernel(uint64_t* words, int64_t count) {
#if defined(TWELL_SM90_DEVICE)
  launch_dependents();
  wait_for_previous();
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += stride) words[i] = 0;
#endif
}

// Values of relu(gate) are not negative, so that their bits have their order, with NaN above all.
__global__ void __launch_bounds__(kThreads, kResident) find_kernel(const __grid_constant__ Arguments a) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ uint4 staged[kWarps][kGroupEntries * kVectors];  // a warp's columns, turned so that its lanes meet no bank
  launch_dependents();
  wait_for_previous();
  const Work work(a);
  const Stretches stretches(a, work);
  const int lane = work.lane, row = lane / kVectors, vector = lane % kVectors;
  const uint16_t* const columns = static_cast<const uint16_t*>(a.chunk.active.columns) + work.first_column;
  const uint32_t stage = smem_address(staged[threadIdx.x / 32]);
  unsigned long long in_runs = 0;
  for (int first = work.begin + work.warp * kGroupEntries; first < work.end; first += work.warps * kGroupEntries) {
    const int mine = first + lane, neuron = mine < work.end ? __ldcg(work.neurons + mine) : 0;
    // Eight lanes copy an entry's column; what is no entry reads as zero.
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int n = row + kGroupEntries / kVectors * i;
      const int64_t column = __shfl_sync(~0u, neuron, n) * int64_t{kBlockTokens};
      copy_16(stage + ((n * kVectors + (vector ^ (n % kVectors))) << 4), columns + column + vector * 8,
              first + n < work.end);
    }
    wait_for_copies();
    __syncwarp();
    uint64_t candidates = 0, bits = 0;  // of the half's tokens; of the stretch's so far that have the largest value
    uint32_t largest = 0;
#pragma unroll 1
    for (int v = 0; v < kVectors; ++v) {
      const uint4 loaded = load_shared_16(stage + ((lane * kVectors + (v ^ (lane % kVectors))) << 4));
      const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
      const uint32_t ends = static_cast<uint32_t>(stretches.ends >> 8 * v);
      const uint64_t first_bit = uint64_t{1} << 8 * v;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t value = i % 2 == 0 ? words[i / 2] & 0xFFFFu : words[i / 2] >> 16;
        const uint64_t bit = first_bit << i;
        bits = value > largest ? bit : value == largest ? bits | bit : bits;
        largest = max(largest, value);
        if ((ends >> i & 1) == 0) continue;
        const int run = stretches.run_of(8 * v + i), size = stretches.size_of(8 * v + i);
        if (size > 0 && largest > 0) {
          candidates |= bits;
          uint64_t* const strongest = a.scratch.strongest + int64_t{run} * a.width + neuron;
          if (join(strongest, largest, __popcll(bits))) in_runs += size;
        }
        bits = 0;
        largest = 0;
      }
    }
    if (mine < work.end) a.scratch.candidates[work.first_bits + mine] = candidates;
    __syncwarp();  // all have read what the next copies overwrite
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) in_runs += __shfl_xor_sync(~0u, in_runs, d);
  if (lane == 0 && in_runs > 0) atomicAdd(reinterpret_cast<unsigned long long*>(a.scratch.in_runs), in_runs);
#endif
}

// To the columns of dg, which are rounded once more there.
template <typename T>
__global__ void __launch_bounds__(kThreads, kResident)
    add_kernel(const __grid_constant__ Arguments a, const float* scale, uint16_t* gradients) {
#if defined(TWELL_SM90_DEVICE)
  launch_dependents();
  wait_for_previous();
  if (a.chunk.first == 0 && blockIdx.x == 0 && threadIdx.x == 0) {
    *a.runs.in_runs = static_cast<float>(__ldcg(a.scratch.in_runs));
  }
  if (scale == nullptr) return;
  const float pull = *scale;
  const Work work(a);
  const Stretches stretches(a, work);
  const uint16_t* const columns = static_cast<const uint16_t*>(a.chunk.active.columns) + work.first_column;
  for (int first = work.begin + work.warp * kGroupEntries; first < work.end; first += work.warps * kGroupEntries) {
    const int mine = first + work.lane;
    const bool listed = mine < work.end;
    const int neuron = listed ? __ldcg(work.neurons + mine) : 0;
    const uint64_t candidates = listed ? __ldcg(a.scratch.candidates + work.first_bits + mine) : 0;
    const uint16_t* const gates = columns + int64_t{neuron} * kBlockTokens;
    uint16_t* const to = gradients + work.first_column + int64_t{neuron} * kBlockTokens;
    uint64_t before = 0;  // the stretches so far
    for (uint64_t ends = stretches.ends; ends != 0; ends &= ends - 1) {
      const int last = __ffsll(static_cast<long long>(ends)) - 1;
      const int run = stretches.run_of(last), size = stretches.size_of(last);
      const uint64_t until = ~uint64_t{0} >> (63 - last), bits = candidates & until & ~before;
      before = until;
      if (bits == 0) continue;
      const uint64_t strongest = __ldcg(a.scratch.strongest + int64_t{run} * a.width + neuron);
      const uint32_t value = static_cast<uint32_t>(strongest >> 32), count = static_cast<uint32_t>(strongest);
      const float gate = unpack<T>(value).x;
      // All of them have the same value. A NaN that is the strongest has no gradient.
      if (__ldcg(gates + __ffsll(static_cast<long long>(bits)) - 1) != value || !(gate > 0.0f)) continue;
      const float slope = count_gradient(pull * static_cast<float>(size) / static_cast<float>(count), gate);
      for (uint64_t left = bits; left != 0; left &= left - 1) {
        uint16_t* const gradient = to + __ffsll(static_cast<long long>(left)) - 1;
        *gradient = static_cast<uint16_t>(pack<T>(unpack<T>(__ldcg(gradient)).x + slope, 0.0f));
      }
    }
  }
#endif
}

Arguments arguments_of(const Ffn& ffn, const Chunk& chunk, const Runs& runs, const RunScratch& scratch,
                       const Device& device) {
  const int most = (chunk.active.row + kGroupEntries * kWarps - 1) / (kGroupEntries * kWarps);
  const int splits = min(most, max(1, device.sm_count * kResident / (2 * chunk.active.blocks)));
  return {chunk, runs, scratch, ffn.width, splits};
}

}  // namespace

void place_runs(const Ffn& ffn, int64_t count, Cutter& cutter, RunScratch* scratch) {
  cutter.cut(scratch->in_runs, (1 + count * ffn.width) * 8);
  scratch->strongest = scratch->in_runs == nullptr ? nullptr : scratch->in_runs + 1;
  cutter.cut(scratch->candidates, count_blocks(ffn) * 2 * ((ffn.width + 7) / 8 * 8) * 8);
}

cudaError_t launch_find_strongest(const Ffn& ffn, const Chunk& all, const Runs& runs, const RunScratch& scratch,
                                  const Device& device, cudaStream_t stream) {
  // Shared memory as the kernels beside these have it.
  const int64_t words = 1 + runs.count * ffn.width, blocks = (words + kThreads - 1) / kThreads;
  const int grid = static_cast<int>(std::min<int64_t>(blocks, device.sm_count * 8));
  TWELL_RETURN_IF_ERROR(launch_with_carveout(100, clear_kernel, grid, kThreads, 1, 0, stream, scratch.in_runs, words));
  const Arguments arguments = arguments_of(ffn, all, runs, scratch, device);
  return launch_with_carveout(100, find_kernel, 2 * all.active.blocks * arguments.splits, kThreads, 1, 0, stream,
                              arguments);
}

cudaError_t launch_add_strongest(const Ffn& ffn, const Chunk& chunk, const Terms& terms, const RunScratch& scratch,
                                 void* gradients, const Device& device, cudaStream_t stream) {
  const Arguments arguments = arguments_of(ffn, chunk, terms.runs, scratch, device);
  const auto kernel = ffn.dtype == DType::kBFloat16 ? add_kernel<__nv_bfloat16> : add_kernel<__half>;
  return launch_with_carveout(100, kernel, 2 * chunk.active.blocks * arguments.splits, kThreads, 1, 0, stream,
                              arguments, terms.count_scale, static_cast<uint16_t*>(gradients));
}

}  // namespace twell::sm90
