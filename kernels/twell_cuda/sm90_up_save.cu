// Up projection in training, by the tiles of prefill's (sm90_up.cu): u = x Wu^T + bu stays in registers and shared
// memory. h = relu(gate) * u takes the place of relu(gate), the pairs (relu(gate), u) of kept blocks go to the state, and
// the report's sums are taken on the way. Where there is no pair a column is zero already.

#include "sm90_pairs.cuh"
#include "sm90_up_product.cuh"

namespace twell::sm90 {
namespace {

using namespace up;

// Of a tile's end: passes over so many neurons, whose u lies in shared memory, 256 bytes each.
constexpr int kColumnBytes = kBlockTokens * 2, kPassNeurons = 64, kPassBytes = kPassNeurons * kColumnBytes;
constexpr int kSavingRingBytes = kRingBytes - kPassBytes;
// Of these a lane has eight tokens of every 16th.
constexpr int kPassShare = kPassNeurons / 16;
static_assert(kPassShare == 4);  // their eight bits or counts each share a word
static_assert(kUpTileNeurons <= kMaxNeurons - kUnit * (kWarps - 1));

struct SaveArguments {
  UpArguments up;
  Saving saving;
  Training training;
  int64_t first_block;  // of the chunk
};

// What a lane takes from a tile when the product is done.
struct End {
  const SaveArguments& a;
  const Item& item;
  const int warpgroup, warp, lane;  // a warp of its warpgroup
  const int begin, end;             // neurons of the tile that are active in this half of the block
  const bool kept;
  int64_t first_pair;           // of the block
  uint32_t places[kPassShare];  // in the block: the first pair of each of the lane's neurons and this half
  float l1 = 0.0f;

  __device__ __forceinline__ End(const SaveArguments& arguments, const Item& tile, int64_t kept_blocks, int begin_at,
                                 int end_at)
      : a(arguments),
        item(tile),
        warpgroup((threadIdx.x - kFetchers) / 128),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32),
        begin(begin_at),
        end(end_at),
        kept(tile.block < kept_blocks),
        first_pair(kept ? a.training.state.blocks[a.first_block + tile.block].first_pair : 0) {}

  __device__ __forceinline__ int row() const { return warp * 4 + lane / 8; }
  __device__ __forceinline__ int eighth() const { return warpgroup * 8 + lane % 8; }  // of the block's tokens
  __device__ __forceinline__ bool has(int n) const { return n >= begin && n < end; }

  // For the places of a pass from neuron `pass` of the tile on, long before they are needed.
  __device__ __forceinline__ void ask(int pass) {
    const uint4* entries = a.saving.entries + int64_t{item.block} * a.up.active.row + item.first;
#pragma unroll
    for (int i = 0; i < kPassShare; ++i) {
      const int n = pass + row() + 16 * i;
      if (kept && has(n)) places[i] = __ldcg(reinterpret_cast<const uint32_t*>(entries + n) + warpgroup);
    }
  }

  // Their relu(gate) lies in two stages, u in `ups`.
  template <typename T>
  __device__ __forceinline__ void take(int pass, uint8_t* first_gates, uint8_t* second_gates, const uint8_t* ups,
                                       const uint16_t* neurons) {
    const uint32_t column = (eighth() ^ (row() & 7)) << 4;
    const uint8_t* up_at = ups + row() * kColumnBytes + column;
    const auto gate_at = [&](int i) {
      const int n = pass + row() + 16 * i;
      return (n < kTurnNeurons ? first_gates : second_gates) + n % kTurnNeurons * kColumnBytes + column;
    };
    uint32_t bits = 0, counts = 0;
#pragma unroll
    for (int i = 0; i < kPassShare; ++i) {
      if (!has(pass + row() + 16 * i)) continue;
      const uint32_t active = active_bits(load_shared_16(smem_address(gate_at(i))));
      bits |= active << 8 * i;
      counts |= static_cast<uint32_t>(__popc(active)) << 8 * i;
    }
    uint32_t before = counts;  // in the lanes of the same neurons: at most 64 each
#pragma unroll
    for (int d = 1; d < 8; d *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, before, d, 8);
      if (lane % 8 >= d) before += other;
    }
    before -= counts;
    uint32_t to[kPassShare];
#pragma unroll
    for (int i = 0; i < kPassShare; ++i) to[i] = places[i] + (before >> 8 * i & 0xff);
    ask(pass + kPassNeurons);

    const bool report = a.training.report != nullptr;
    const float* weights = a.training.token_weight;
    if (weights != nullptr) weights += (a.first_block + item.block) * kBlockTokens + eighth() * 8;
    uint16_t* gate_to = static_cast<uint16_t*>(a.training.state.gate) + first_pair;
    uint16_t* up_to = static_cast<uint16_t*>(a.training.state.up) + first_pair;
    float activity[kPassShare]{};
    for (uint32_t left = bits; left != 0; left &= left - 1) {
      const int bit = __ffs(static_cast<int>(left)) - 1, i = bit / 8, token = bit % 8;
      uint16_t* const at = reinterpret_cast<uint16_t*>(gate_at(i)) + token;
      const uint16_t gate = *at, up = reinterpret_cast<const uint16_t*>(up_at + i * (16 * kColumnBytes))[token];
      const uint16_t h = sm90::multiply<T>(gate, up);
      *at = h;
      if (kept) {
        const uint32_t same_before = bits & ((1u << bit) - 1) & 0xffu << 8 * i;
        const uint32_t place = (i == 0 ? to[0] : i == 1 ? to[1] : i == 2 ? to[2] : to[3]) + __popc(same_before);
        gate_to[place] = gate;
        up_to[place] = up;
      }
      if (report) {
        const float size = fabsf(unpack<T>(h).x), weight = weights != nullptr ? weights[token] : 1.0f;
        const float counted = size != 0.0f ? weight : 0.0f;
        l1 += counted != 0.0f ? counted * size : 0.0f;  // no weight: not even NaN counts
#pragma unroll
        for (int j = 0; j < kPassShare; ++j) activity[j] += i == j ? counted : 0.0f;
      }
    }
    __syncwarp();

    uint16_t* columns = static_cast<uint16_t*>(a.up.active.columns) +
                        int64_t{item.block} * a.up.width * kBlockTokens + eighth() * 8;
    float* sums = a.saving.activity + ((a.saving.waiting + item.block) * 2 + warpgroup) * a.up.width;
#pragma unroll
    for (int i = 0; i < kPassShare; ++i) {
      const int n = pass + row() + 16 * i;
      if (report) {
#pragma unroll
        for (int d = 4; d > 0; d /= 2) activity[i] += __shfl_xor_sync(~0u, activity[i], d);
      }
      if (!has(n)) continue;
      const int neuron = neurons[n];
      *reinterpret_cast<uint4*>(columns + neuron * kBlockTokens) =
          load_shared_16(smem_address(gate_at(i)));
      if (report && lane % 8 == 0) sums[neuron] = activity[i];
    }
  }

  __device__ __forceinline__ void finish() {
    if (a.training.report == nullptr || item.count == 0) return;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) l1 += __shfl_xor_sync(~0u, l1, d);
    const int64_t sums = (a.saving.waiting + item.block) * a.saving.groups + item.first / item.width * kConsumerWarps;
    if (lane == 0) a.saving.l1[sums + warpgroup * 4 + warp] = l1;
  }
};

__device__ __forceinline__ void wait_for_half(int warpgroup) {
  if (warpgroup == 0) {
    named_barrier<128>(1);
  } else {
    named_barrier<128>(2);
  }
}

template <typename T>
__device__ __forceinline__ void multiply_all(const SaveArguments& a, int64_t kept_blocks, Control& c, uint8_t* shared,
                                             Ring ring) {
  const int steps = (a.up.hidden + kDepth - 1) / kDepth, lane = threadIdx.x % 32, blocks = a.up.active.blocks;
  const int warp = (threadIdx.x - kFetchers) / 32, warpgroup = warp / 4, bytes = stage_bytes(c.tile);
  const uint32_t stages = smem_address(shared);
  uint8_t* ups = shared + kSavingRingBytes;
  int block = 0, tiles = 0;
  for (int index = blockIdx.x; index < c.first_tile[blocks]; index += gridDim.x, ++tiles) {
    const Item item = item_at(index, block, blocks, c);
    block = item.block;
    // As in prefill's: neurons [begin, end) are active in this half; multiplied are `wide` times 64 from `low` on.
    const Counts counts = c.counts[block];
    const int begin = warpgroup == 0 ? 0 : max(counts.first_only - item.first, 0);
    const int end = min(item.count, warpgroup == 0 ? counts.first_only + counts.both - item.first : item.count);
    const int low = begin / 16 * 16, wide = max(end - low + 63, 0) / 64, skipped = low * kDepth * 2;
    End tile_end(a, item, kept_blocks, begin, end);
    tile_end.ask(low);
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
      fence_async_proxy();  // ordinary stores here, bulk copies next
      __syncwarp();
      release(ring, stage);
    };
#pragma unroll
    for (int p = 0; p < kMaxNeurons / kPassNeurons; ++p) {
      if (p >= wide) break;
      const int pass = low + p * kPassNeurons;
#pragma unroll
      for (int q = 0; q < kPassNeurons; q += 16) {
        if (pass + q >= end) break;
        uint32_t words[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int i = (p * kPassNeurons + q) / 2 + 4 * (m / 2) + m % 2 * 2;
          const int column = pass + q + m / 2 * 8 + lane % 4 * 2;
          float2 bias{};
          if (a.up.bias != nullptr) {
            bias.x = widen(static_cast<const T*>(a.up.bias)[neurons[min(column, item.count - 1)]]);
            bias.y = widen(static_cast<const T*>(a.up.bias)[neurons[min(column + 1, item.count - 1)]]);
          }
          words[m] = pack<T>(sum[i] + bias.x, sum[i + 1] + bias.y);
        }
        const int n = q + lane / 16 * 8 + lane % 8, eighth = 2 * warp + (lane / 8 & 1);
        store_matrices_transposed(smem_address(ups) + n * kColumnBytes + ((eighth ^ (n & 7)) << 4), words);
      }
      wait_for_half(warpgroup);
      tile_end.template take<T>(pass, shared + ring.stage * bytes, shared + second.stage * bytes, ups, neurons);
      wait_for_half(warpgroup);  // u of the next pass comes
      if (both && pass + kPassNeurons >= kTurnNeurons) {
        give_back(ring.stage);
        both = false;
      }
    }
    if (both) give_back(ring.stage);
    give_back(second.stage);
    ring = second;
    ring.advance();
    tile_end.finish();
  }
}

template <typename T, bool kMany>
__global__ void __launch_bounds__(kThreads, 1)
    up_save_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap up_map,
                   const __grid_constant__ SaveArguments a) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ uint8_t raw_shared[];
  uint8_t* shared = raw_shared + (-smem_address(raw_shared) & 1023);
  Control& c = *reinterpret_cast<Control*>(shared + kRingBytes);
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
  for (int b = threadIdx.x; b < a.up.active.blocks; b += kThreads) c.counts[b] = a.up.active.counts[b];
  __syncthreads();
  make_plan(c, a.up.active.blocks, a.up.turned);
  const Ring ring(c.full, c.empty, min(kMaxStages, kSavingRingBytes / stage_bytes(c.tile)));
  if (threadIdx.x < kFetchers) {
    give_registers<kFetchRegisters>();
    fetch<T, kMany>(a.up, &x_map, &up_map, c, shared, ring);
  } else {
    take_registers<kMultiplyRegisters>();
    multiply_all<T>(a, kept_blocks, c, shared, ring);
  }
#endif
}

template <typename T, bool kMany>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const Saving& saving, const Training& training,
                   const Device& device, cudaStream_t stream) {
  CUtensorMap x_map, up_map;
  const T* x = static_cast<const T*>(ffn.x) + chunk.first * ffn.hidden;
  TWELL_RETURN_IF_ERROR(make_tensor_map(&x_map, ffn.dtype, x, chunk.tokens, ffn.hidden, kBlockTokens));
  TWELL_RETURN_IF_ERROR(make_tensor_map(&up_map, ffn.dtype, ffn.up, ffn.width, ffn.hidden, kBoxRows));
  const SaveArguments arguments{
      {ffn.up, ffn.b_up, chunk.active, ffn.hidden, ffn.width, kMany}, saving, training, chunk.first_block()};
  return launch_kernel(up_save_kernel<T, kMany>, device.sm_count, kThreads, 1, kShared, stream, x_map, up_map,
                       arguments);
}

template <typename T>
cudaError_t launch_type(const Ffn& ffn, const Chunk& chunk, const Saving& saving, const Training& training,
                        const Device& device, cudaStream_t stream) {
  return chunk.active.blocks >= kManyBlocks ? launch<T, true>(ffn, chunk, saving, training, device, stream)
                                            : launch<T, false>(ffn, chunk, saving, training, device, stream);
}

}  // namespace

cudaError_t launch_up_save(const Ffn& ffn, const Chunk& chunk, const Saving& saving, const Training& training,
                           const Device& device, cudaStream_t stream) {
  return ffn.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(ffn, chunk, saving, training, device, stream)
                                       : launch_type<__half>(ffn, chunk, saving, training, device, stream);
}

}  // namespace twell::sm90
