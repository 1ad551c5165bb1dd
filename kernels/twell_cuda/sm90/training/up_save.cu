// Up projection in training, by the tiles of prefill's (sm90/prefill/up.cu): u = x Wu^T + bu stays in registers and
// shared memory. At each pair h = relu(gate) * u takes the place of relu(gate), (relu(gate), u) of kept blocks go to
// the state, and the report's sums are taken on the way. Where there is no pair a column is zero already.

#include "sm90/prefill/up_product.cuh"
#include "sm90/training/pairs.cuh"

namespace twell::sm90::up {

// The end of a tile: its pairs.
//
// Which pairs there are the kernel before has found. A warp has 16 of a block's tokens and shares its pairs out evenly
// among its lanes, so that a neuron which most tokens activate does not keep one of them busy while the others wait.
// Warps meet once a tile, for the report's sums.

// Of a tile's end: a warp's passes over so many neurons, two of them a lane's, whose u lies in its shared memory.
constexpr int kPassNeurons = 64, kPasses = kMaxNeurons / kPassNeurons, kLaneNeurons = kPassNeurons / 32;
constexpr int kWarpTokens = kHalfTokens / 4, kColumnBytes = kBlockTokens * 2, kUpBytes = kWarpTokens * 2;
static_assert(kLaneNeurons * kWarpTokens == 32);  // a lane's part of a pass: a word of bits

constexpr int kWindow = 128;  // pairs that are shared out at a time
// A pair's code: its token, its neuron of the pass, and above kPlaceShift its place among the tile's pairs.
constexpr int kPlaceShift = 10;
static_assert(kWarpTokens * kPassNeurons == 1 << kPlaceShift);
static_assert(kMaxNeurons * kBlockTokens <= 1 << (32 - kPlaceShift));

// What lies between the stages and Control.
struct Ends {
  uint8_t ups[kConsumerWarps][kPassNeurons * kUpBytes];
  uint32_t codes[kConsumerWarps][kWindow];
  uint32_t zeros[kMaxNeurons][kBlockTokens / 32];  // active tokens of the tile's neurons whose h is zero; else clear
};
constexpr int kSavingRingBytes = kRingBytes - static_cast<int>(sizeof(Ends));
static_assert(4 * (kTokenBytes + kMaxNeurons * kDepth * 2) <= kSavingRingBytes);
static_assert(kUpTileNeurons <= kMaxNeurons - kUnit * (kWarps - 1));

// And behind it, instead of Control.
struct SaveControl {
  Control c;
  uint32_t first_groups[kMaxBlocks];  // of the kept blocks' entries in the state
};
constexpr int kSavingShared = 1024 + kRingBytes + sizeof(SaveControl);
static_assert(kSavingShared <= 227 * 1024);

struct SaveArguments {
  UpArguments up;
  Saving saving;
  Training training;
  int64_t first_block;  // of the chunk
};

// What a warp takes from a tile when the product is done.
struct End {
  const SaveArguments& a;
  Ends& shared;
  const Item& item;
  const int half, warp, lane;  // a warp of its half
  const int begin, end;        // neurons of the tile that are active in this half
  const int low, wide;         // `wide` passes over neurons from `low` on
  const bool kept;
  int64_t first_pair;                      // of the block
  uint32_t tile_place;                     // in the block: the tile's first pair
  uint2 tokens[kPasses][kLaneNeurons];     // of this half that activate the lane's neurons
  uint32_t places[kPasses][kLaneNeurons];  // in the block: their first pair of this half
  uint2 own[kLaneNeurons];                 // of the pass whose activity the warp adds up
  float l1 = 0.0f;

  // Loads that have the product's time.
  __device__ __forceinline__ End(const SaveArguments& arguments, Ends& ends, const Item& tile, int64_t kept_blocks,
                                 uint32_t first_group, int first, int last, int low_at, int passes)
      : a(arguments),
        shared(ends),
        item(tile),
        half((threadIdx.x - kFetchers) / 128),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32),
        begin(first),
        end(last),
        low(low_at),
        wide(passes),
        kept(tile.block < kept_blocks) {
    const State& state = a.training.state;
    const uint4* listed = a.saving.entries + int64_t{item.block} * a.up.active.row + item.first;
    const uint4* masks = kept ? state.tokens + int64_t{first_group} * kGroup + item.first : listed;
    first_pair = kept ? __ldcg(&state.blocks[a.first_block + item.block].first_pair) : 0;
    tile_place = kept ? __ldcg(&listed->x) : 0;
    const auto tokens_of = [&](int p, int n) {
      return p < wide && n < item.count ? reinterpret_cast<const uint2*>(masks + n)[half] : uint2{};
    };
#pragma unroll
    for (int i = 0; i < kLaneNeurons; ++i) {
#pragma unroll
      for (int p = 0; p < kPasses; ++p) {
        const int n = neuron(p, i);
        tokens[p][i] = tokens_of(p, n);
        places[p][i] = kept && p < wide && n < item.count ? reinterpret_cast<const uint32_t*>(listed + n)[half] : 0;
      }
      own[i] =
          tokens_of(warp, neuron(warp, i));  // once more: an index that is known late would keep all in local memory
    }
  }

  // The lane's neurons, of the tile.
  __device__ __forceinline__ int neuron(int p, int i) const { return low + p * kPassNeurons + kLaneNeurons * lane + i; }
  __device__ __forceinline__ uint8_t* ups() const { return shared.ups[half * 4 + warp]; }
  // Of a neuron of the pass and eight of the warp's tokens: without conflicts for eight neurons in turn.
  static __device__ __forceinline__ int up_at(int n, int eighth) {
    return n * kUpBytes + ((eighth ^ (n >> 2 & 1)) << 4);
  }

  // Pass p: relu(gate) of the tile lies in two stages, the pass's u in ups().
  template <typename T>
  __device__ __forceinline__ void take(int p, const uint8_t* first_gates, const uint8_t* second_gates,
                                       const uint16_t* neurons) {
    const int shift = warp % 2 * kWarpTokens;
    uint32_t bits = 0, first[kLaneNeurons];
#pragma unroll
    for (int i = 0; i < kLaneNeurons; ++i) {
      const uint2 t = tokens[p][i];
      const uint32_t word = warp < 2 ? t.x : t.y;
      first[i] =
          places[p][i] - tile_place + __popc(word & ((1u << shift) - 1)) + (warp < 2 ? 0 : __popc(t.x)) - __popc(bits);
      bits |= (word >> shift & 0xffff) << i * kWarpTokens;
    }
    const uint32_t count = __popc(bits), before = sum_before(count, lane);
    const uint32_t total = __shfl_sync(~0u, before + count, 31);
    uint32_t* const codes = shared.codes[half * 4 + warp];
    for (uint32_t start = 0; start < total; start += kWindow) {
      __syncwarp();
      uint32_t at = before - start, rank = 0;
      for (uint32_t left = bits; left != 0; left &= left - 1, ++at, ++rank) {
        const uint32_t bit = __ffs(static_cast<int>(left)) - 1;
        const uint32_t place = (bit < kWarpTokens ? first[0] : first[1]) + rank;
        if (at < kWindow) codes[at] = place << kPlaceShift | lane << 5 | bit;
      }
      __syncwarp();
      const uint32_t end = min(total - start, static_cast<uint32_t>(kWindow));
      for (uint32_t i = lane; i < end; i += 32) {
        take_pair<T>(codes[i], low + p * kPassNeurons, first_gates, second_gates, neurons);
      }
    }
  }

  template <typename T>
  __device__ __forceinline__ void take_pair(uint32_t code, int pass, const uint8_t* first_gates,
                                            const uint8_t* second_gates, const uint16_t* neurons) {
    const int token = code % kWarpTokens, eighth = token / 8, of_half = warp * kWarpTokens + token;
    const uint32_t in_pass = code / kWarpTokens % kPassNeurons, n = pass + in_pass;
    const uint8_t* gates = (n < kTurnNeurons ? first_gates : second_gates) + n % kTurnNeurons * kColumnBytes +
                           ((((half * 4 + warp) * 2 + eighth) ^ (n & 7)) << 4);
    const uint16_t gate = reinterpret_cast<const uint16_t*>(gates)[token % 8];
    const uint16_t up = reinterpret_cast<const uint16_t*>(ups() + up_at(in_pass, eighth))[token % 8];
    const uint16_t h = sm90::multiply<T>(gate, up);
    uint16_t* columns = static_cast<uint16_t*>(a.up.active.columns) + int64_t{item.block} * a.up.width * kBlockTokens;
    columns[neurons[n] * kBlockTokens + half * kHalfTokens + of_half] = h;
    if (kept) {
      const int64_t pair = first_pair + tile_place + (code >> kPlaceShift);
      static_cast<uint32_t*>(a.training.state.values)[pair] = gate | static_cast<uint32_t>(up) << 16;
    }
    if (a.training.terms.report == nullptr) return;
    if ((h & 0x7fff) == 0) {
      atomicOr(&shared.zeros[n][half * 2 + of_half / 32], 1u << of_half % 32);
    } else {
      const float weight = token_weights() != nullptr ? token_weights()[of_half] : 1.0f;
      l1 += weight != 0.0f ? weight * fabsf(unpack<T>(h).x) : 0.0f;  // no weight: not even NaN counts
    }
  }

  // Of this half's tokens, or null for ones.
  __device__ __forceinline__ const float* token_weights() const {
    const float* weights = a.training.terms.token_weight;
    return weights == nullptr ? nullptr : weights + (a.first_block + item.block) * kBlockTokens + half * kHalfTokens;
  }

  // The sum of weights of the half's tokens that count for a neuron.
  __device__ __forceinline__ float activity(uint2 counted) const {
    const float* weights = token_weights();
    if (weights == nullptr) return static_cast<float>(__popc(counted.x) + __popc(counted.y));
    float sum = 0.0f;
    for (uint64_t left = uint64_t{counted.y} << 32 | counted.x; left != 0; left &= left - 1) {
      sum += weights[__ffsll(static_cast<int64_t>(left)) - 1];
    }
    return sum;
  }

  // The report's sums, when the warp has been through its passes. Each warp of the half has the activity of one pass.
  __device__ __forceinline__ void finish(const uint16_t* neurons) {
    if (a.training.terms.report == nullptr || item.count == 0) return;
    const int64_t row = a.saving.waiting + item.block;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) l1 += __shfl_xor_sync(~0u, l1, d);
    const int64_t group = row * a.saving.groups + item.first / item.width * kConsumerWarps + half * 4 + warp;
    if (lane == 0) a.saving.l1[group] = l1;
    wait_for_half(half);  // for all zeros
    float* sums = a.saving.activity + (row * 2 + half) * a.up.width;
#pragma unroll
    for (int i = 0; i < kLaneNeurons; ++i) {
      const uint2 counted = own[i];  // none where only tokens past the last one activate the neuron
      const int n = neuron(warp, i);
      if (n < begin || n >= end) continue;
      uint2* const zeros = reinterpret_cast<uint2*>(shared.zeros[n]) + half;
      const uint2 none = *zeros;
      if ((none.x | none.y) != 0) *zeros = {};
      sums[neurons[n]] = activity({counted.x & ~none.x, counted.y & ~none.y});
    }
    wait_for_half(half);  // zeros of the next tile come
  }
};
static_assert(kPasses == 4);  // warps of a half

}  // namespace twell::sm90::up

namespace twell::sm90 {
namespace {

using namespace up;

template <typename T, bool kBias>
__device__ __forceinline__ void multiply_all(const SaveArguments& a, int64_t kept_blocks, SaveControl& control,
                                             uint8_t* shared, Ring ring) {
  Control& c = control.c;
  const int steps = (a.up.hidden + kDepth - 1) / kDepth, lane = threadIdx.x % 32, blocks = a.up.active.blocks;
  const int warpgroup = (threadIdx.x - kFetchers) / 128, bytes = stage_bytes(c.tile);
  const uint32_t stages = smem_address(shared);
  Ends& ends = *reinterpret_cast<Ends*>(shared + kSavingRingBytes);
  int block = 0, tiles = 0;
  for (int index = blockIdx.x; index < c.first_tile[blocks]; index += gridDim.x, ++tiles) {
    const Item item = item_at(index, block, blocks, c);
    block = item.block;
    // As in prefill's: neurons [begin, end) are active in this half; multiplied are `wide` times 64 from `low` on.
    const Counts counts = c.counts[block];
    const int begin = warpgroup == 0 ? 0 : max(counts.first_only - item.first, 0);
    const int end = min(item.count, warpgroup == 0 ? counts.first_only + counts.both - item.first : item.count);
    const int low = begin / 16 * 16, wide = max(end - low + 63, 0) / 64, skipped = low * kDepth * 2;
    End tile_end(a, ends, item, kept_blocks, control.first_groups[block], begin, end, low, wide);
    float sum[kMaxNeurons / 2];
    switch (wide) {
      case 0: multiply_tile<T, 0>(sum, ring, stages, bytes, skipped, steps, warpgroup); break;
      case 1: multiply_tile<T, 64>(sum, ring, stages, bytes, skipped, steps, warpgroup); break;
      case 2: multiply_tile<T, 128>(sum, ring, stages, bytes, skipped, steps, warpgroup); break;
      case 3: multiply_tile<T, 192>(sum, ring, stages, bytes, skipped, steps, warpgroup); break;
      default: multiply_tile<T, 256>(sum, ring, stages, bytes, skipped, steps, warpgroup); break;
    }
    barrier_wait(c.listed + tiles % kLists, tiles / kLists & 1);
    const uint16_t* neurons = c.neurons[tiles % kLists];
    // relu(gate) fills one stage or two.
    Ring second = ring;
    if (item.width > kTurnNeurons) second.advance();
    ring.wait_full();
    second.wait_full();
    bool both = item.width > kTurnNeurons;  // stages are held
    const auto give_back = [&](int stage) {
      __syncwarp();
      release(ring, stage);
    };
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      if (p >= wide) break;
      const int pass = low + p * kPassNeurons;
      __syncwarp();  // u of the pass before has been read
#pragma unroll
      for (int q = 0; q < kPassNeurons; q += 16) {
        if (pass + q >= end) break;
        uint32_t words[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int i = (p * kPassNeurons + q) / 2 + 4 * (m / 2) + m % 2 * 2;
          if constexpr (kBias) {
            const T* bias = static_cast<const T*>(a.up.bias);
            const int column = pass + q + m / 2 * 8 + lane % 4 * 2;
            words[m] = pack<T>(sum[i] + widen(bias[neurons[min(column, item.count - 1)]]),
                               sum[i + 1] + widen(bias[neurons[min(column + 1, item.count - 1)]]));
          } else {
            words[m] = pack<T>(sum[i], sum[i + 1]);
          }
        }
        const int at = End::up_at(q + lane / 16 * 8 + lane % 8, lane / 8 & 1);
        store_matrices_transposed(smem_address(tile_end.ups()) + at, words);
      }
      tile_end.template take<T>(p, shared + ring.stage * bytes, shared + second.stage * bytes, neurons);
      if (both && pass + kPassNeurons >= kTurnNeurons) {
        give_back(ring.stage);
        both = false;
      }
    }
    if (both) give_back(ring.stage);
    give_back(second.stage);
    ring = second;
    ring.advance();
    tile_end.finish(neurons);
  }
}

template <typename T, bool kMany, bool kBias>
__global__ void __launch_bounds__(kThreads, 1)
    up_save_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap up_map,
                   const __grid_constant__ SaveArguments a) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  SaveControl& control = *reinterpret_cast<SaveControl*>(shared + kRingBytes);
  Control& c = control.c;
  if (threadIdx.x == 0) {
    prefetch_map(&x_map);
    prefetch_map(&up_map);
    for (int s = 0; s < kMaxStages; ++s) {
      barrier_init(c.full + s, kFetchers + 1);
      barrier_init(c.empty + s, kConsumerWarps);
    }
    for (int i = 0; i < kLists; ++i) barrier_init(c.listed + i, 1);
    fence_barrier_init();
  }
  launch_dependents();
  wait_for_previous();
  const int64_t kept_blocks = __ldcg(a.training.state.totals) - a.first_block;
  for (int b = threadIdx.x; b < a.up.active.blocks; b += kThreads) {
    c.counts[b] = a.up.active.counts[b];
    if (b < kept_blocks) {
      control.first_groups[b] = static_cast<uint32_t>(a.training.state.blocks[a.first_block + b].first_entry / kGroup);
    }
  }
  uint32_t* zeros = &reinterpret_cast<Ends*>(shared + kSavingRingBytes)->zeros[0][0];
  for (int i = threadIdx.x; i < kMaxNeurons * kBlockTokens / 32; i += kThreads) zeros[i] = 0;
  __syncthreads();
  make_plan(c, a.up.active.blocks, a.up.turned);
  const Ring ring(c.full, c.empty, min(kMaxStages, kSavingRingBytes / stage_bytes(c.tile)));
  if (threadIdx.x < kFetchers) {
    give_registers<kFetchRegisters>();
    fetch<T, kMany>(a.up, &x_map, &up_map, c, shared, ring);
  } else {
    take_registers<kMultiplyRegisters>();
    multiply_all<T, kBias>(a, kept_blocks, control, shared, ring);
  }
#endif
}

template <typename T, bool kMany, bool kBias>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const Saving& saving, const Training& training,
                   const Device& device, cudaStream_t stream) {
  CUtensorMap x_map, up_map;
  const T* x = static_cast<const T*>(ffn.x) + chunk.first * ffn.hidden;
  TWELL_RETURN_IF_ERROR(make_tensor_map(&x_map, ffn.dtype, x, chunk.tokens, ffn.hidden, kBlockTokens));
  TWELL_RETURN_IF_ERROR(make_tensor_map(&up_map, ffn.dtype, ffn.up.data, ffn.width, ffn.hidden, kBoxRows));
  const SaveArguments arguments{
      {ffn.up.data, ffn.b_up, chunk.active, ffn.hidden, ffn.width, kMany}, saving, training, chunk.first_block()};
  return launch_kernel(up_save_kernel<T, kMany, kBias>, device.sm_count, kThreads, 1, kSavingShared, stream, x_map,
                       up_map, arguments);
}

template <typename T>
cudaError_t launch_type(const Ffn& ffn, const Chunk& chunk, const Saving& saving, const Training& training,
                        const Device& device, cudaStream_t stream) {
  const bool many = chunk.active.blocks >= kManyBlocks, bias = ffn.b_up != nullptr;
  const auto run = bias ? (many ? launch<T, true, true> : launch<T, false, true>)
                        : (many ? launch<T, true, false> : launch<T, false, false>);
  return run(ffn, chunk, saving, training, device, stream);
}

}  // namespace

cudaError_t launch_up_save(const Ffn& ffn, const Chunk& chunk, const Saving& saving, const Training& training,
                           const Device& device, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(ffn, chunk, saving, training, device, stream)
                                       : launch_type<__half>(ffn, chunk, saving, training, device, stream);
}

}  // namespace twell::sm90
