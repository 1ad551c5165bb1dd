// Weights' gradients from a chunk's columns (of those blocks that were not kept): dense products with rows of x or dy,
// in which columns of half blocks that do not activate the neuron count as zero. They are added to what is there.
//
// A persistent thread block of three warpgroups an SM: the first fetches, the other two multiply 64 neurons each.

#include "sm90/common/launch.h"
#include "sm90/common/primitives.cuh"
#include "sm90/training/neuron_product.cuh"
#include "sm90/training/training.h"

namespace twell::sm90::add {

// What is multiplied, and how it comes: a stage has a tile of neurons' values of a half block, through
// registers, because what is not active has to become zero and h is a product, and the half block's rows of x or dy, by
// bulk tensor copies. The biases' gradients are summed on the way.

constexpr int kFetchers = 128;  // threads

// matrix (F, D) += values^T rows; values are (columns, times `factors` if there are any).
struct Product {
  const void* columns;
  const void* factors;
  void* matrix;  // or null
  void* bias;    // (F), sums of values; or null
  int slices;    // of the hidden size; one, for the bias, where no matrix is wanted
};

struct Arguments {
  Product products[2];
  const uint32_t* masks;
  const int64_t* kept;          // as in Chunk
  bool known;                   // as in Chunk
  bool adds;                    // else the gradients hold nothing yet
  int64_t first_block, tokens;  // of the chunk
  int blocks, words, hidden, width;
};

struct Tile {
  Product product;
  int neuron, hidden;  // the first
};

__device__ __forceinline__ int neuron_tiles(const Arguments& a) { return (a.width + kNeurons - 1) / kNeurons; }
__device__ __forceinline__ int count_items(const Arguments& a) {
  return neuron_tiles(a) * (a.products[0].slices + a.products[1].slices);
}
__device__ __forceinline__ Tile tile_at(const Arguments& a, int item) {
  const int first_items = neuron_tiles(a) * a.products[0].slices;
  const bool second = item >= first_items;
  const Product product = second ? a.products[1] : a.products[0];
  const int at = second ? item - first_items : item;
  return {product, at / product.slices * kNeurons, at % product.slices * kHidden};
}

// Which of a tile's neurons a half block activates.
struct Bits {
  uint32_t words[kNeurons / 32];
  __device__ __forceinline__ void load(const Arguments& a, int half_block, int neuron) {
    const uint32_t* masks = a.masks + static_cast<int64_t>(half_block) * a.words;
#pragma unroll
    for (int i = 0; i < kNeurons / 32; ++i) {
      const int word = neuron / 32 + i;
      words[i] = word < a.words ? __ldcg(masks + word) : 0;
    }
  }
};

__device__ __forceinline__ void store_shared_16(uint32_t shared, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

template <typename T>
__device__ __forceinline__ uint32_t multiply_words(uint32_t a, uint32_t b) {
  const float2 x = unpack<T>(a), y = unpack<T>(b);
  return pack<T>(x.x * y.x, x.y * y.y);
}
template <typename T>
__device__ __forceinline__ float sum_words(const uint4& v) {
  const float2 a = unpack<T>(v.x), b = unpack<T>(v.y), c = unpack<T>(v.z), d = unpack<T>(v.w);
  return ((a.x + a.y) + (b.x + b.y)) + ((c.x + c.y) + (d.x + d.y));
}
// Of a word's two values those among the first `count`.
__device__ __forceinline__ uint32_t keep_first(uint32_t word, int64_t count) {
  return count >= 2 ? word : count == 1 ? word & 0xFFFF : 0;
}

template <typename T, bool kMultiplied>
__device__ __forceinline__ void fetch(const Arguments& a, const CUtensorMap* row_map, int first_block, uint8_t* shared,
                                      Ring ring) {
  constexpr int kRows = kFetchers / 8, kShare = kNeurons / kRows;
  static_assert(kRows == 16);  // two share a word of bits
  // Eight threads copy a half block's column; every kRows-th neuron is theirs.
  const int row = threadIdx.x / 8, chunk = threadIdx.x % 8, items = count_items(a);
  const uint32_t stages = smem_address(shared), place = row * 128 + ((chunk ^ (row & 7)) << 4);
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const Tile tile = tile_at(a, item);
    const int64_t offset = int64_t{tile.neuron + row} * kBlockTokens + chunk * 8;
    const T* columns = static_cast<const T*>(tile.product.columns) + offset;
    const T* factors = static_cast<const T*>(tile.product.factors) + offset;
    const bool with_bias = tile.hidden == 0 && tile.product.bias != nullptr;
    float bias[kShare]{};
    Bits bits;
    bits.load(a, 2 * first_block, tile.neuron);
    for (int half_block = 2 * first_block; half_block < 2 * a.blocks; ++half_block, ring.advance()) {
      const int64_t from = int64_t{half_block / 2} * a.width * kBlockTokens + half_block % 2 * kHalfTokens;
      uint4 values[kShare], others[kShare];
#pragma unroll
      for (int i = 0; i < kShare; ++i) {
        const bool active = bits.words[i / 2] >> (row + i % 2 * kRows) & 1;
        values[i] = others[i] = uint4{};
        if (active && tile.neuron + row + kRows * i < a.width) {
          const int64_t at = from + i * kRows * kBlockTokens;
          values[i] = __ldcg(reinterpret_cast<const uint4*>(columns + at));
          if constexpr (kMultiplied) others[i] = __ldcg(reinterpret_cast<const uint4*>(factors + at));
        }
      }
      if (half_block + 1 < 2 * a.blocks) bits.load(a, half_block + 1, tile.neuron);
      ring.wait_empty();
      uint64_t* full = ring.full + ring.stage;
      if (threadIdx.x == 0) {
        barrier_arrive_expect(full, kParts * kPartBytes);
        uint8_t* rows = shared + ring.stage * kStageBytes + kColumnBytes;
        for (int part = 0; part < kParts; ++part) {
          load_box(rows + part * kPartBytes, row_map, tile.hidden + part * 64, half_block * kHalfTokens, full);
        }
      }
      const int64_t left = a.tokens - (int64_t{half_block} * kHalfTokens + chunk * 8);
#pragma unroll
      for (int i = 0; i < kShare; ++i) {
        uint4& v = values[i];
        if constexpr (kMultiplied) {
          v = {multiply_words<T>(v.x, others[i].x), multiply_words<T>(v.y, others[i].y),
               multiply_words<T>(v.z, others[i].z), multiply_words<T>(v.w, others[i].w)};
        }
        if (left < 8) {
          v = {keep_first(v.x, left), keep_first(v.y, left - 2), keep_first(v.z, left - 4), keep_first(v.w, left - 6)};
        }
        if (with_bias) bias[i] += sum_words<T>(v);
        store_shared_16(stages + ring.stage * kStageBytes + place + i * kRows * 128, v);
      }
      fence_async_proxy();  // ordinary stores here, tensor cores read
      barrier_arrive(full);
    }
    if (!with_bias) continue;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
#pragma unroll
      for (int d = 1; d < 8; d *= 2) bias[i] += __shfl_xor_sync(~0u, bias[i], d);
      const int neuron = tile.neuron + row + kRows * i;
      if (chunk == 0 && neuron < a.width) {
        uint16_t* const to = static_cast<uint16_t*>(tile.product.bias) + neuron;
        const float old = a.adds ? unpack<T>(__ldcg(to)).x : 0.0f;
        *to = static_cast<uint16_t>(pack<T>(bias[i] + old, 0.0f));
      }
    }
  }
}

}  // namespace twell::sm90::add

namespace twell::sm90 {
namespace {

using namespace add;

constexpr int kThreads = kFetchers + 256, kConsumerWarps = 8;
constexpr int kStages = 4;

constexpr int kFetchRegisters = 104, kMultiplyRegisters = 200;
static_assert(check_registers(kFetchRegisters, kMultiplyRegisters));

struct Control {
  uint64_t full[kStages], empty[kStages];
};
constexpr int kShared = 1024 + kStages * kStageBytes + sizeof(Control);
static_assert(kShared <= 227 * 1024);

template <typename T>
__device__ __forceinline__ void multiply(const Arguments& a, int first_block, uint8_t* shared, Ring ring) {
  const int lane = threadIdx.x % 32, warp = (threadIdx.x - kFetchers) / 32, warpgroup = warp / 4;
  const int items = count_items(a), steps = 2 * (a.blocks - first_block);
  const uint32_t stages = smem_address(shared);
  const auto release = [&](int stage) {
    if (lane == 0) barrier_arrive(ring.empty + stage);
  };
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    float sum[kHidden / 2];
    multiply_neurons<T>(sum, steps, stages, ring, warpgroup, release);

    const Tile tile = tile_at(a, item);
    if (tile.product.matrix == nullptr) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int neuron = tile.neuron + warp * 16 + half * 8 + lane / 4;
      if (neuron >= a.width) continue;
      T* const to = static_cast<T*>(tile.product.matrix) + int64_t{neuron} * a.hidden + tile.hidden + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kHidden / 8; ++j) {
        if (tile.hidden + j * 8 < a.hidden) {
          uint32_t* const word = reinterpret_cast<uint32_t*>(to + j * 8);
          const float2 old = a.adds ? unpack<T>(__ldcg(word)) : float2{};
          *word = pack<T>(sum[4 * j + 2 * half] + old.x, sum[4 * j + 2 * half + 1] + old.y);
        }
      }
    }
  }
}

template <typename T, bool kMultiplied>
__global__ void __launch_bounds__(kThreads, 1)
    add_kernel(const __grid_constant__ CUtensorMap row_map, const Arguments a) {
#if defined(TWELL_SM90_DEVICE)
  launch_dependents();
  int64_t kept = a.known ? __ldcg(a.kept) : 0;
  wait_for_previous();
  if (!a.known && a.kept != nullptr) kept = __ldcg(a.kept);
  if (kept >= a.first_block + a.blocks) return;
  const int first_block = kept > a.first_block ? static_cast<int>(kept - a.first_block) : 0;
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  Control& c = *reinterpret_cast<Control*>(shared + kStages * kStageBytes);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(c.full + s, kFetchers + 1);
      barrier_init(c.empty + s, kConsumerWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const Ring ring(c.full, c.empty, kStages);
  if (threadIdx.x < kFetchers) {
    give_registers<kFetchRegisters>();
    fetch<T, kMultiplied>(a, &row_map, first_block, shared, ring);
  } else {
    take_registers<kMultiplyRegisters>();
    multiply<T>(a, first_block, shared, ring);
  }
#endif
}

template <typename T, bool kMultiplied>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, bool adds, const void* rows, const Product& first,
                   const Product& second, const Device& device, cudaStream_t stream) {
  const Active& active = chunk.active;
  const Arguments arguments{{first, second}, active.masks,  chunk.kept,   chunk.known, adds,     chunk.first_block(),
                            chunk.tokens,    active.blocks, active.words, ffn.hidden,  ffn.width};
  const int items = (ffn.width + kNeurons - 1) / kNeurons * (first.slices + second.slices);
  CUtensorMap row_map;
  const T* from = static_cast<const T*>(rows) + chunk.first * ffn.hidden;
  TWELL_RETURN_IF_ERROR(make_tensor_map(&row_map, ffn.dtype, from, chunk.tokens, ffn.hidden, kDepth));
  const int grid = items < device.sm_count ? items : device.sm_count;
  return launch_kernel(add_kernel<T, kMultiplied>, grid, kThreads, 1, kShared, stream, row_map, arguments);
}

Product make_product(const Ffn& ffn, const void* columns, const void* factors, void* matrix, void* bias) {
  const int slices = matrix != nullptr ? (ffn.hidden + kHidden - 1) / kHidden : bias != nullptr ? 1 : 0;
  return {columns, factors, matrix, bias, slices};
}

}  // namespace

cudaError_t launch_add_down(const Ffn& ffn, const Chunk& chunk, bool adds, const Gradients& gradients,
                            const Device& device, cudaStream_t stream) {
  if (gradients.down == nullptr) return cudaSuccess;
  const bool gated = ffn.gated(), bfloat = ffn.dtype == DType::kBFloat16;
  const void* ups = gated ? chunk.active.ups : nullptr;
  const Product h = make_product(ffn, chunk.active.columns, ups, gradients.down, nullptr);
  const auto run = bfloat  ? gated ? launch<__nv_bfloat16, true> : launch<__nv_bfloat16, false>
                   : gated ? launch<__half, true>
                           : launch<__half, false>;
  return run(ffn, chunk, adds, gradients.dy, h, {}, device, stream);
}

cudaError_t launch_add_gate_up(const Ffn& ffn, const Chunk& chunk, bool adds, const Gradients& gradients,
                               const Device& device, cudaStream_t stream) {
  const Product dg = make_product(ffn, chunk.active.columns, nullptr, gradients.gate, gradients.b_gate);
  Product du{};
  if (ffn.gated()) du = make_product(ffn, chunk.active.ups, nullptr, gradients.up, gradients.b_up);
  if (dg.slices + du.slices == 0) return cudaSuccess;
  const auto run = ffn.dtype == DType::kBFloat16 ? launch<__nv_bfloat16, false> : launch<__half, false>;
  return run(ffn, chunk, adds, ffn.x, dg, du, device, stream);
}

}  // namespace twell::sm90
