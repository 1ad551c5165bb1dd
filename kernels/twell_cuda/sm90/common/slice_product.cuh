// Products over neurons: for each half block of 64 tokens, columns of its activations (or of their gradients) by the
// rows of the neurons that any of the tokens activates.
//
// A persistent thread block of three warpgroups an SM. The first gathers columns and rows with cp.async, or with bulk
// copies where they are neighbours; the other two multiply half of the tokens each. Both operands lie in shared memory
// as they do in global memory, tokens and hidden units contiguous, and the tensor cores read them transposed. Rows of
// bytes are multiplied otherwise (multiply_narrow).
#pragma once

#include <cstddef>
#include <type_traits>

#include "common/quantized.cuh"
#include "sm90/common/chunk.h"
#include "sm90/common/launch.h"
#include "sm90/common/primitives.cuh"
#include "sm90/common/store.cuh"
#include "sm90/common/wgmma.cuh"

namespace twell::sm90::slices {

// What the warpgroups share, and the one that fetches.

constexpr int kFetchers = 128, kThreads = kFetchers + 256, kConsumerWarps = 8, kDepth = 64;
constexpr int kPartBytes = 64 * kDepth * 2;  // 64 tokens or hidden units x 64 neurons; of bytes 128 hidden units
constexpr int kRingBytes = 4 * 6 * kPartBytes, kMaxStages = 8;
constexpr int kListed = 2048;  // neurons in shared memory at a time

constexpr int kFetchRegisters = 72, kMultiplyRegisters = 216;
static_assert(check_registers(kFetchRegisters, kMultiplyRegisters));

template <typename Weight, int kHidden>
struct Shape {
  static constexpr int kPartHidden = 128 / sizeof(Weight), kParts = kHidden / kPartHidden;
  static constexpr int kStageBytes = (2 + kParts) * kPartBytes;
  static constexpr int kStages = kRingBytes / kStageBytes < kMaxStages ? kRingBytes / kStageBytes : kMaxStages;
};

struct Control {
  uint64_t full[kMaxStages], empty[kMaxStages], listed[2];
  uint16_t neurons[2][kListed];
  Counts counts[kMaxBlocks];
};
constexpr int kShared = 1024 + kRingBytes + kConsumerWarps * kTurnBytes + sizeof(Control);
static_assert(kShared <= 227 * 1024);
static_assert(offsetof(Control, neurons) % 16 == 0);

// A half block's entries are [begin, end) of the list; steps without any of them are passed over.
struct HalfEntries {
  int begin, end;
  __device__ __forceinline__ HalfEntries(const Counts& counts, int half)
      : begin(half == 0 ? 0 : counts.first_only), end(half == 0 ? counts.first_only + counts.both : counts.all()) {}
  __device__ __forceinline__ bool in_step(int start) const { return start + kDepth > begin && start < end; }
};

struct Term {
  const void* columns;  // (block, F, 2 halves, 64)
  const void* rows;     // (F, D)
};

// What becomes of a chunk's sums.
struct Output {
  const void* bias;  // (D), or null
  void* y;           // (tokens, D)
  int64_t tokens;    // of the chunk
  int hidden, slices;
};

// The same of 8-bit rows.
struct ScaledOutput : Output {
  const float* scales;  // (D)
};
template <typename Weight>
using OutputOf = std::conditional_t<kScaled<Weight>, ScaledOutput, Output>;

// y = bias + the sum of all terms.
template <int kTerms, typename Out = Output>
struct Arguments {
  Term terms[kTerms];
  Out out;
  Chunk chunk;
  int width;
};

template <int kTerms>
struct Maps {
  CUtensorMap columns[kTerms], rows[kTerms];
};

// Part of a tile's list of neurons; `item` is past the last when there is none.
struct Window {
  int item, start;
};

// Where lists are fetched ahead of the copies that need them.
struct Lists {
  const Active& active;
  Control& c;
  int slices, items, window = 0;
  uint32_t phases = 0;  // a bit for each of the two buffers

  __device__ __forceinline__ Lists(const Active& of, int slices_of_block, Control& control)
      : active(of), c(control), slices(slices_of_block), items(of.blocks * slices_of_block) {}

  __device__ __forceinline__ Window first_from(int item) const {
    while (item < items && c.counts[item / slices].all() == 0) item += gridDim.x;
    return {item, 0};
  }
  __device__ __forceinline__ Window after(Window w) const {
    if (w.start + kListed < c.counts[w.item / slices].all()) return {w.item, w.start + kListed};
    return first_from(w.item + gridDim.x);
  }
  __device__ __forceinline__ void request(Window w, int buffer) {
    if (w.item >= items) return;
    const int block = w.item / slices, count = min(kListed, c.counts[block].all() - w.start);
    const uint32_t bytes = (count * 2 + 15) / 16 * 16;
    barrier_arrive_expect(c.listed + buffer, bytes);
    load_bytes(c.neurons[buffer], active.neurons + static_cast<int64_t>(block) * active.row + w.start, bytes,
               c.listed + buffer);
  }
  // The list of `w`, whose request is under way; asks for the next.
  __device__ __forceinline__ const uint16_t* open(Window w) {
    named_barrier<kFetchers>(1);  // everyone is done with the other buffer
    const int buffer = window++ & 1;
    if (threadIdx.x == 0) request(after(w), buffer ^ 1);
    barrier_wait(c.listed + buffer, phases >> buffer & 1);
    phases ^= 1u << buffer;
    return c.neurons[buffer];
  }
};

// Columns are of type T, rows of Weight.
template <typename T, typename Weight, int kTerms, int kHidden, typename Out>
__device__ __forceinline__ void fetch(const Arguments<kTerms, Out>& a, const Maps<kTerms>& maps, Control& c,
                                      uint8_t* shared, Ring ring) {
  using S = Shape<Weight, kHidden>;
  constexpr int kRows = kFetchers / 8, kBytes = S::kStageBytes, kCopied = 16 / sizeof(Weight);
  // Eight threads copy 128 bytes; every kRows-th row is theirs.
  const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
  const uint32_t stages = smem_address(shared), place = row * 128 + ((chunk ^ (row & 7)) << 4);
  Lists lists(a.chunk.active, a.out.slices, c);
  Window w = lists.first_from(blockIdx.x);
  if (threadIdx.x == 0) lists.request(w, 0);
  for (; w.item < lists.items; w = lists.after(w)) {
    const uint16_t* neurons = lists.open(w);
    const int block = w.item / a.out.slices, first_hidden = w.item % a.out.slices * kHidden;
    const Counts counts = c.counts[block];
    const int first_end = counts.first_only + counts.both, listed = min(kListed, counts.all() - w.start);
    const int hidden_left = a.out.hidden - first_hidden;
    const int64_t first_column = static_cast<int64_t>(block) * a.width * kBlockTokens + chunk * 8;
    for (int start = 0; start < listed; start += kDepth) {
      // 64 neighbours that both halves activate.
      const int lowest = neurons[start], at = w.start + start;
      const bool neighbours = at >= counts.first_only && at + kDepth <= first_end && start + kDepth <= listed &&
                              neurons[start + kDepth - 1] - lowest == kDepth - 1;
#pragma unroll
      for (int t = 0; t < kTerms; ++t, ring.advance()) {
        ring.wait_empty();
        uint64_t* full = ring.full + ring.stage;
        if (neighbours) {
          if (threadIdx.x == 0) {
            barrier_arrive_expect(full, kBytes);
            uint8_t* stage = shared + ring.stage * kBytes;
            for (int half = 0; half < 2; ++half) {
              load_box(stage + half * kPartBytes, maps.columns + t, half * 64, block * a.width + lowest, full);
            }
            for (int part = 0; part < S::kParts; ++part) {
              load_box(stage + (2 + part) * kPartBytes, maps.rows + t, first_hidden + part * S::kPartHidden, lowest,
                       full);
            }
          } else {
            barrier_arrive(full);
          }
          continue;
        }
        const uint32_t to = stages + ring.stage * kBytes + place;
        const T* columns = static_cast<const T*>(a.terms[t].columns) + first_column;
        const Weight* rows = static_cast<const Weight*>(a.terms[t].rows) + first_hidden + chunk * kCopied;
#pragma unroll
        for (int i = 0; i < kDepth / kRows; ++i) {
          const int n = start + row + kRows * i;
          const bool valid = n < listed;
          const int neuron = valid ? neurons[n] : 0;
          const T* column = columns + static_cast<int64_t>(neuron) * kBlockTokens;
          const Weight* from = rows + static_cast<int64_t>(neuron) * a.out.hidden;
          copy_16(to + i * kRows * 128, column, valid && w.start + n < first_end);
          copy_16(to + kPartBytes + i * kRows * 128, column + 64, valid && w.start + n >= counts.first_only);
#pragma unroll
          for (int part = 0; part < S::kParts; ++part) {  // where nothing is valid the address is not read
            copy_16(to + (2 + part) * kPartBytes + i * kRows * 128, from + part * S::kPartHidden,
                    valid && part * S::kPartHidden + chunk * kCopied < hidden_left);
          }
        }
        barrier_arrive_on_copies(full);
      }
    }
  }
}

// The warpgroups that multiply 8-bit rows.
//
// Here hidden units are the product's rows and tokens its columns, as wgmma takes the rows' operand from registers:
// bytes become 16-bit values there, and need no other place. Each warpgroup has half of a slice's hidden units, and all
// tokens. Scales belong to the hidden units, and meet the sums.

// A warp's hidden units come in sixteens, kTiles of them. Of each a lane has two neighbours, 2 (lane / 4) and the next:
// rows lane / 4 and lane / 4 + 8 of the warp's 16.
template <typename T, int kTiles>
struct Scaling {
  float2 scales[kTiles], biases[kTiles];

  // `hidden`: the lane's first.
  __device__ __forceinline__ Scaling(const ScaledOutput& out, int hidden) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t, hidden += 16) {
      scales[t] = biases[t] = float2{};
      if (hidden >= out.hidden) continue;
      scales[t] = {out.scales[hidden], out.scales[hidden + 1]};
      if (out.bias != nullptr) {
        biases[t] = unpack<T>(*reinterpret_cast<const uint32_t*>(static_cast<const T*>(out.bias) + hidden));
      }
    }
  }
  __device__ __forceinline__ uint32_t pack_pair(int t, float low, float high) const {
    return pack<T>(low * scales[t].x + biases[t].x, high * scales[t].y + biases[t].y);
  }
};

// A lane's sums, [tile][half][eights of tokens, row, token], to y: a warp writes 32 bytes of each of four tokens.
template <typename T, int kTiles>
__device__ __forceinline__ void store_scaled(const ScaledOutput& out, const float (&sum)[kTiles][2][32],
                                             const Scaling<T, kTiles>& scaling, int64_t first_token, int hidden) {
  const int64_t token = first_token + threadIdx.x % 4 * 2;  // the lane's first
  const int tokens = static_cast<int>(min(out.tokens - token, int64_t{kBlockTokens}));
  const int row = out.hidden / 2;  // in words of two hidden units
  uint32_t* y = static_cast<uint32_t*>(out.y) + token * row + hidden / 2;
#pragma unroll
  for (int j = 0; j < kBlockTokens / 8; ++j, y += 8 * row) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const float* v = sum[t][j / 8] + j % 8 * 4;
      const bool valid = hidden + 16 * t < out.hidden;
      if (valid && 8 * j < tokens) y[8 * t] = scaling.pack_pair(t, v[0], v[2]);
      if (valid && 8 * j + 1 < tokens) y[row + 8 * t] = scaling.pack_pair(t, v[1], v[3]);
    }
  }
}

// A warp's hidden units of 16 neurons: bytes that lie with 128-byte swizzle, then operands. A transposed load of pairs
// of bytes gives a lane two neighbouring hidden units of two neighbouring neurons in one word.
template <int kTiles>
__device__ __forceinline__ void load_words(uint32_t (&words)[2 * kTiles], uint32_t rows) {
  if constexpr (kTiles == 2) {
    load_matrices_transposed(words, rows);
  } else {
    load_two_matrices_transposed(words, rows);
  }
}
template <typename T, typename Weight, int kTiles>
__device__ __forceinline__ void expand_words(uint32_t (&a)[kTiles][4], const uint32_t (&words)[2 * kTiles]) {
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {  // the first eight neurons and the second, tile by tile
    uint32_t* const of_eight = a[i / 2] + i % 2 * 2;
    expand<T, Weight>(__byte_perm(words[i], 0, 0x3120), of_eight[0], of_eight[1]);
  }
}

// One stage, for the halves of the tokens that activate any of its neurons. Operands of 16 neurons are made while those
// before are multiplied. So the last are not when this returns; the stage before is given back by then.
template <typename T, typename Weight, bool kFirst, bool kSecond, int kTiles>
__device__ __forceinline__ void multiply_stage(float (&sum)[kTiles][2][32], uint32_t stage, uint32_t rows) {
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    uint32_t words[2 * kTiles], a[kTiles][4];
    load_words<kTiles>(words, rows + k * 2048);
    wgmma_wait<1>();
    expand_words<T, Weight>(a, words);
    wgmma_fence();
#pragma unroll
    for (int half = kFirst ? 0 : 1; half < (kSecond ? 2 : 1); ++half) {
      const uint64_t columns = matrix_descriptor(stage + half * kPartBytes + k * 2048, kPartBytes);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) WgmmaOfRegisters<T, 64, 1>::multiply(sum[t][half], a[t], columns);
    }
    wgmma_commit();
  }
}

// `counts_of` gives a block's Counts.
template <typename T, typename Weight, int kHidden, typename CountsOf>
__device__ __forceinline__ void multiply_narrow(const ScaledOutput& out, int blocks, const CountsOf& counts_of,
                                                uint8_t* shared, Ring ring) {
  constexpr int kBytes = Shape<Weight, kHidden>::kStageBytes, kTiles = kHidden / 128;
  static_assert(kTiles == 1 || kTiles == 2);
  const int lane = threadIdx.x % 32, own = (threadIdx.x - kFetchers) / 32 * 16 * kTiles;  // of a slice's hidden units
  const int chunk = own % 128 / 16 + (kTiles == 2 ? lane / 16 : 0);  // whose rows the lane points to
  const uint32_t stages = smem_address(shared);
  const uint32_t rows = stages + (2 + own / 128) * kPartBytes + lane % 16 * 128 + ((chunk ^ (lane & 7)) << 4);
  for (int item = blockIdx.x; item < blocks * out.slices; item += gridDim.x) {
    const int block = item / out.slices, hidden = item % out.slices * kHidden + own + lane / 4 * 2;
    const Scaling<T, kTiles> scaling(out, hidden);
    const Counts counts = counts_of(block);
    const HalfEntries first(counts, 0), second(counts, 1);
    float sum[kTiles][2][32] = {};
    for (int start = 0; start < counts.all(); start += kDepth, ring.advance()) {
      const uint32_t stage = ring.stage * kBytes;
      ring.wait_full();
      fence_async_proxy();  // cp.async wrote, tensor cores read
      if (!second.in_step(start)) {
        multiply_stage<T, Weight, true, false>(sum, stages + stage, rows + stage);
      } else if (!first.in_step(start)) {
        multiply_stage<T, Weight, false, true>(sum, stages + stage, rows + stage);
      } else {
        multiply_stage<T, Weight, true, true>(sum, stages + stage, rows + stage);
      }
      if (start > 0 && lane == 0) barrier_arrive(ring.empty + ring.previous());
    }
    wgmma_wait<0>();
    if (counts.all() > 0 && lane == 0) barrier_arrive(ring.empty + ring.previous());
    store_scaled(out, sum, scaling, static_cast<int64_t>(block) * kBlockTokens, hidden);
  }
}

// `counts_of` gives a block's Counts.
template <typename T, int kTerms, int kHidden, typename CountsOf>
__device__ __forceinline__ void multiply(const Output& out, int blocks, const CountsOf& counts_of, uint8_t* shared,
                                         Ring ring) {
  constexpr int kBytes = Shape<T, kHidden>::kStageBytes;
  const int lane = threadIdx.x % 32, warp = (threadIdx.x - kFetchers) / 32, warpgroup = warp / 4;
  const uint32_t stages = smem_address(shared), turn = stages + kRingBytes + warp * kTurnBytes;
  for (int item = blockIdx.x; item < blocks * out.slices; item += gridDim.x) {
    const int block = item / out.slices, first_hidden = item % out.slices * kHidden;
    const Counts counts = counts_of(block);
    const HalfEntries entries(counts, warpgroup);
    const int steps = (counts.all() + kDepth - 1) / kDepth * kTerms;
    float sum[kHidden / 2];
    bool started = false;
    for (int step = 0; step < steps; ++step, ring.advance()) {
      ring.wait_full();
      if (entries.in_step(step / kTerms * kDepth)) {
        fence_async_proxy();  // cp.async wrote, tensor cores read
        const uint32_t stage = stages + ring.stage * kBytes;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k) {
          Wgmma<T, kHidden, 1, 1>::multiply(
              sum, matrix_descriptor(stage + warpgroup * kPartBytes + k * 2048, kPartBytes),
              matrix_descriptor(stage + 2 * kPartBytes + k * 2048, kPartBytes), started || k);
        }
        wgmma_commit();
        started = true;
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      if (step > 0 && lane == 0) barrier_arrive(ring.empty + ring.previous());
    }
    wgmma_wait<0>();
    if (steps > 0 && lane == 0) barrier_arrive(ring.empty + ring.previous());
    if (!started) {
#pragma unroll
      for (int i = 0; i < kHidden / 2; ++i) sum[i] = 0.0f;
    }

    store_sums<T, kHidden, true>(out, sum, turn, static_cast<int64_t>(block) * kBlockTokens + warp * 16, first_hidden);
  }
}

// `Weight` is T, or an 8-bit type.
template <typename T, typename Weight, int kTerms, int kHidden>
__global__ void __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ Maps<kTerms> maps, const Arguments<kTerms, OutputOf<Weight>> a) {
#if defined(TWELL_SM90_DEVICE)
  if (a.chunk.known_skipped()) {
    launch_dependents();
    wait_for_previous();
    return;
  }
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  Control& c = *reinterpret_cast<Control*>(shared + kRingBytes + kConsumerWarps * kTurnBytes);
  constexpr int kStages = Shape<Weight, kHidden>::kStages;
  if (threadIdx.x == 0) {
    for (int t = 0; t < kTerms; ++t) {
      prefetch_map(maps.columns + t);
      prefetch_map(maps.rows + t);
    }
    for (int s = 0; s < kStages; ++s) {
      barrier_init(c.full + s, kFetchers);
      barrier_init(c.empty + s, kConsumerWarps);
    }
    barrier_init(c.listed, 1);
    barrier_init(c.listed + 1, 1);
    fence_barrier_init();
  }
  launch_dependents();
  wait_for_previous();
  if (a.chunk.skipped()) return;
  const int blocks = a.chunk.active.blocks;
  for (int b = threadIdx.x; b < blocks; b += kThreads) c.counts[b] = a.chunk.active.counts[b];
  __syncthreads();
  const auto counts_of = [&](int block) { return c.counts[block]; };
  const Ring ring(c.full, c.empty, kStages);
  if (threadIdx.x < kFetchers) {
    give_registers<kFetchRegisters>();
    fetch<T, Weight, kTerms, kHidden>(a, maps, c, shared, ring);
  } else {
    take_registers<kMultiplyRegisters>();
    if constexpr (kScaled<Weight>) {
      static_assert(kTerms == 1);
      multiply_narrow<T, Weight, kHidden>(a.out, blocks, counts_of, shared, ring);
    } else {
      multiply<T, kTerms, kHidden>(a.out, blocks, counts_of, shared, ring);
    }
  }
#endif
}

// How many hidden units to a slice.
inline int best_slice(int blocks, int hidden, const Device& device) {
  int best = 256;
  int64_t best_cost = INT64_MAX;
  for (const int slice : {256, 128, 64}) {
    const int64_t items = static_cast<int64_t>(blocks) * ((hidden + slice - 1) / slice);
    // The columns' share of the traffic does not shrink with the slice.
    const int64_t cost = (items + device.sm_count - 1) / device.sm_count * (slice + 96);
    if (cost < best_cost) best = slice, best_cost = cost;
  }
  return best;
}

template <typename T, typename Weight, int kHidden, int kTerms, typename Out>
cudaError_t launch_slice(DType dtype, Arguments<kTerms, Out> a, const Device& device, cudaStream_t stream) {
  const int blocks = a.chunk.active.blocks;
  a.out.slices = (a.out.hidden + kHidden - 1) / kHidden;
  Maps<kTerms> maps;
  for (int t = 0; t < kTerms; ++t) {
    TWELL_RETURN_IF_ERROR(
        make_tensor_map(maps.columns + t, dtype, a.terms[t].columns, int64_t{blocks} * a.width, kBlockTokens, kDepth));
    const void* rows = a.terms[t].rows;
    const int hidden = a.out.hidden;
    TWELL_RETURN_IF_ERROR(kScaled<Weight> ? make_byte_map(maps.rows + t, rows, a.width, hidden, hidden, kDepth)
                                          : make_tensor_map(maps.rows + t, dtype, rows, a.width, hidden, kDepth));
  }
  const int grid = min(device.sm_count, blocks * a.out.slices);
  return launch_kernel(product_kernel<T, Weight, kTerms, kHidden>, grid, kThreads, 1, kShared, stream, maps, a);
}

template <typename T, typename Weight, int kTerms, typename Out>
cudaError_t launch_type(DType dtype, const Arguments<kTerms, Out>& a, const Device& device, cudaStream_t stream) {
  switch (best_slice(a.chunk.active.blocks, a.out.hidden, device)) {
    case 64: return launch_slice<T, Weight, kScaled<Weight> ? 128 : 64>(dtype, a, device, stream);
    case 128: return launch_slice<T, Weight, 128>(dtype, a, device, stream);
    default: return launch_slice<T, Weight, 256>(dtype, a, device, stream);
  }
}

// `y` is that of all tokens.
inline Output output_of(const Ffn& ffn, const Chunk& chunk, const void* bias, void* y) {
  return {bias, static_cast<uint16_t*>(y) + chunk.first * ffn.hidden, chunk.tokens, ffn.hidden, 0};
}

// Of down, whose rows are 8-bit.
inline Arguments<1, ScaledOutput> scaled_arguments(const Ffn& ffn, const Chunk& chunk) {
  return {{{chunk.active.columns, ffn.down.data}},
          {output_of(ffn, chunk, ffn.b_down, ffn.y), ffn.down.scales},
          chunk,
          ffn.width};
}

template <int kTerms>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const Term (&terms)[kTerms], const void* bias, void* y,
                   const Device& device, cudaStream_t stream) {
  Arguments<kTerms> a{};
  for (int t = 0; t < kTerms; ++t) a.terms[t] = terms[t];
  a.out = output_of(ffn, chunk, bias, y);
  a.chunk = chunk;
  a.width = ffn.width;
  return ffn.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16, __nv_bfloat16>(ffn.dtype, a, device, stream)
                                       : launch_type<__half, __half>(ffn.dtype, a, device, stream);
}

}  // namespace twell::sm90::slices
