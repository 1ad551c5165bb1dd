// The gradient of x from pairs, for one slice width. A persistent thread block of four warpgroups an SM: the first
// gathers rows with cp.async, the second builds tiles, the other two multiply half of the tokens each.
#pragma once

#include <type_traits>

#include "sm90/training/pair_dx_build.cuh"

namespace twell::sm90::dx {

// What the kernel does; less than all only to see what its time is made of.
constexpr int kBuild = 1, kGather = 2, kMultiply = 4, kAll = kBuild | kGather | kMultiply;

template <typename T, int kTerms, int kHidden, bool kCopy>
__device__ __forceinline__ void gather(const Arguments<kTerms>& a, Control& c, const Work& work, uint8_t* shared,
                                       Ring ring) {
  using Stage = Shape<kTerms, kHidden>;
  constexpr int kRows = kGatherers / 8, kTurns = kGroup / kRows;
  // Eight threads copy 128 bytes; every kRows-th row is theirs.
  const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
  const uint32_t place = smem_address(shared) + 2 * kPartBytes + row * 128 + ((chunk ^ (row & 7)) << 4);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Position p = work.first_from(blockIdx.x), ahead = p;
  work.advance(ahead, warp);
  const auto ask = [&](uint32_t turn) {  // each warp for its share of the lists
    if (lane != 0 || turn % kWarps != warp || !work.exists(ahead)) return;
    uint64_t* listed = c.listed + turn % kLists;
    barrier_arrive_expect(listed, kGroup * 2);
    load_bytes(c.neurons[turn % kLists],
               a.state.neurons + work.first_entry + c.blocks[ahead.block].first_entry + ahead.start(), kGroup * 2,
               listed);
    work.advance(ahead, kWarps);
  };
#pragma unroll 1
  for (int i = 0; i < kListLead; ++i) ask(i);
  for (uint32_t turn = 0; work.exists(p); ++turn, ring.advance(), work.advance(p)) {
    const int first_hidden = p.slice * kHidden, hidden_left = a.out.hidden - first_hidden;
    const int left = work.left(p);
    barrier_wait(c.listed + turn % kLists, turn / kLists & 1);
    int64_t from[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      from[i] = int64_t{c.neurons[turn % kLists][row + i * kRows]} * a.out.hidden + first_hidden + chunk * 8;
    }
    ring.wait_empty();  // so everyone has read the list of kStages steps ago
    if constexpr (kCopy) {
      const auto copy = [&](auto all) {
#pragma unroll
        for (int t = 0; t < kTerms; ++t) {
          const uint32_t to = place + ring.stage * Stage::kStageBytes + t * Stage::kTermBytes;
          const T* rows = static_cast<const T*>(a.rows[t]);
#pragma unroll
          for (int i = 0; i < kTurns; ++i) {
#pragma unroll
            for (int part = 0; part < kHidden / 64; ++part) {  // where nothing is valid the address is not read
              copy_16(to + part * kPartBytes + i * kRows * 128, rows + from[i] + part * 64,
                      all.value || (row + i * kRows < left && part * 64 + chunk * 8 < hidden_left));
            }
          }
        }
      };
      left >= kGroup && hidden_left >= kHidden ? copy(std::true_type()) : copy(std::false_type());  // most are whole
      barrier_arrive_on_copies(ring.full + ring.stage);
    } else {
      barrier_arrive(ring.full + ring.stage);
    }
    ask(turn + kListLead);
  }
}

template <typename T, int kTerms, int kHidden, bool kProducts>
__device__ __forceinline__ void multiply(const Arguments<kTerms>& a, const Work& work, uint8_t* shared, Ring ring) {
  using Stage = Shape<kTerms, kHidden>;
  constexpr int kWide = kHidden < kProduct ? kHidden : kProduct;
  const int lane = threadIdx.x % 32, warp = (threadIdx.x - kHelpers) / 32, half = warp / 4;
  const uint32_t stages = smem_address(shared), turn = stages + kRingBytes + warp * kTurnBytes;
  for (int item = blockIdx.x; item < work.items; item += gridDim.x) {
    Position p = work.at(item);
    const Counts counts = work.c.blocks[p.block].counts;
    float sum[kHidden / 2];
    bool started = false;
    for (; p.step < p.steps; ++p.step, ring.advance()) {
      ring.wait_full();
      if (kProducts && Work::has(counts, half, p.start())) {
        fence_async_proxy();  // ordinary stores and cp.async wrote, tensor cores read
        const uint32_t stage = stages + ring.stage * Stage::kStageBytes;
        wgmma_fence();
#pragma unroll
        for (int t = 0; t < kTerms; ++t) {
#pragma unroll
          for (int k = 0; k < kGroup / 16; ++k) {
            const uint32_t term = stage + t * Stage::kTermBytes + k * 2048;
#pragma unroll
            for (int n = 0; n < kHidden / kWide; ++n) {
              Wgmma<T, kWide, 1, 1>::multiply(
                  sum + n * kWide / 2, matrix_descriptor(term + half * kPartBytes, kPartBytes),
                  matrix_descriptor(term + (2 + n * kWide / 64) * kPartBytes, kPartBytes), started || t || k);
            }
          }
        }
        wgmma_commit();
        started = true;
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      if (p.step > 0 && lane == 0) barrier_arrive(ring.empty + ring.previous());
    }
    wgmma_wait<0>();
    if (p.steps > 0 && lane == 0) barrier_arrive(ring.empty + ring.previous());
    if (!started) {
#pragma unroll
      for (int i = 0; i < kHidden / 2; ++i) sum[i] = 0.0f;
    }
    store_sums<T, kHidden, false>(a.out, sum, turn, int64_t{p.block} * kBlockTokens + warp * 16, p.slice * kHidden);
  }
}

template <typename T, int kTerms, int kHidden, int kParts>
__global__ void __launch_bounds__(kThreads, 1) kernel(const Arguments<kTerms> a) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ uint8_t raw_shared[];
  constexpr int kStages = Shape<kTerms, kHidden>::kStages;
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  Control& c = *reinterpret_cast<Control*>(shared + kRingBytes + kMultiplyWarps * kTurnBytes);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(c.full + s, kArrivals);
      barrier_init(c.empty + s, kMultiplyWarps);
      c.known[s].count = kKnown + 1;
    }
    for (int i = 0; i < kLists; ++i) barrier_init(c.listed + i, 1);
    fence_barrier_init();
  }
  wait_for_previous();
  launch_dependents();  // not earlier: what runs beside this relies on what came before it
  const Work work(a, c);
  __syncthreads();
  const Ring ring(c.full, c.empty, kStages);
  if (threadIdx.x < kHelpers) {
    give_registers<kHelpRegisters>();
    constexpr bool kCopies = (kParts & kGather) != 0, kBuilds = (kParts & kBuild) != 0;
    if (threadIdx.x < kGatherers) {
      gather<T, kTerms, kHidden, kCopies>(a, c, work, shared, ring);
    } else {
      build_all<kBuilds, kTerms, kHidden>(a, c, work, shared, ring);
    }
  } else {
    take_registers<kMultiplyRegisters>();
    multiply<T, kTerms, kHidden, (kParts & kMultiply) != 0>(a, work, shared, ring);
  }
#endif
}

template <typename T, int kTerms, int kHidden, int kParts>
cudaError_t launch_slice(Arguments<kTerms> a, const Device& device, cudaStream_t stream) {
  a.out.slices = (a.out.hidden + kHidden - 1) / kHidden;
  const int grid = min(device.sm_count, a.blocks * a.out.slices);
  return launch_kernel(kernel<T, kTerms, kHidden, kParts>, grid, kThreads, 1, kShared, stream, a);
}

template <int kTerms>
Arguments<kTerms> arguments_of(const Ffn& ffn, const Chunk& chunk, const State& state, const PairGradients& pairs,
                               void* y) {
  Arguments<kTerms> a{};
  a.rows[0] = ffn.gate.data;
  if constexpr (kTerms > 1) a.rows[1] = ffn.up.data;
  a.pairs = pairs;
  a.out = slices::output_of(ffn, chunk, nullptr, y);
  a.state = state;
  a.first_block = chunk.first_block();
  a.blocks = chunk.active.blocks;
  return a;
}

}  // namespace twell::sm90::dx
