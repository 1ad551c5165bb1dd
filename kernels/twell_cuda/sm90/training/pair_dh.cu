// The gradient of h at the kept blocks' pairs, and what it gives: dh = dy Wd + L1's, du = dh relu(gate), dg = dh u +
// the count's. Without a gate h is relu(gate): dg = dh + the count's. The products are those of whole blocks by all
// their entries; of the sums about one in fifty belongs to a pair.

#include <type_traits>

#include "common/terms.cuh"
#include "sm90/training/pairs.cuh"
#include "sm90/training/tile_product.cuh"

namespace twell::sm90 {
namespace {

constexpr int kWarpTokens = kHalfTokens / 4;  // whose sums one warp has
constexpr int kPieces = tiles::kMaxNeurons / kGroup;
constexpr int kRoundTokens = 8, kRounds = kWarpTokens / kRoundTokens;  // whose sums lie in shared memory at a time
// Of a tile, with gate and up in shared memory: more than most tiles have. Those of the others come from global memory.
constexpr int kStagedPairs = 2560;

__device__ __forceinline__ void copy_4(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_address(shared)), "l"(global) : "memory");
}

// A warp's sums of one group of a tile's entries for some tokens, 32 bytes of them at a time swizzled by token.
struct Sums {
  float values[kRoundTokens * kGroup];
  static __device__ __forceinline__ int at(int token, int entry) { return token * kGroup + (entry ^ (token & 3) * 8); }
};

template <typename T, bool kGated>
struct PairGradient {
  using Element = T;
  using Values = std::conditional_t<kGated, uint32_t, uint16_t>;  // of a pair in the state
  struct Given {
    Training training;
    PairGradients gradients;
    Sorted sorted;
  };
  // Of a tile, brought by the fetching threads: tokens, values, places, first_pairs.
  struct Own {
    uint4 tokens[tiles::kMaxNeurons];
    alignas(16) Values values[kStagedPairs];  // from the 16 bytes on in which the tile's first pair lies
    uint32_t places[tiles::kMaxNeurons];
    uint32_t first_pairs[kPieces];
    Sums sums[tiles::kConsumerWarps];
    float weights[tiles::kConsumerWarps][kWarpTokens];  // of the tokens
    int64_t first_entry, first_pair;                    // of the chunk; blocks' count from there
    uint32_t first_entries[kMaxBlocks], first_pairs_of_blocks[kMaxBlocks];
    uint64_t taken;  // barrier: the multiplying warps are done with the tile's entries
  };
  static constexpr int kLow = kGroup;
  static constexpr bool kAside = true;
  static constexpr int kStep = 16 / sizeof(Values);  // pairs of a copy

  const Given& given;
  const tiles::Arguments& a;
  Own& own;

  __device__ __forceinline__ PairGradient(const Given& from, const tiles::Arguments& arguments, Own& shared)
      : given(from), a(arguments), own(shared) {}
  static __device__ __forceinline__ void init(Own& own) { barrier_init(&own.taken, tiles::kConsumerWarps); }

  __device__ __forceinline__ int64_t kept() const { return given.training.state.totals[0] - a.chunk.first_block(); }
  __device__ __forceinline__ bool idle() const { return kept() <= 0; }
  __device__ __forceinline__ void count(tiles::Control& c) const {
    const BlockState* blocks = given.training.state.blocks + a.chunk.first_block();
    const int64_t end = kept(), first_entry = blocks[0].first_entry, first_pair = blocks[0].first_pair;
    if (threadIdx.x == 0) own.first_entry = first_entry, own.first_pair = first_pair;
    for (int b = threadIdx.x; b < a.chunk.active.blocks; b += tiles::kThreads) {
      c.counts[b] = {};
      if (b < end) {
        c.counts[b] = blocks[b].counts;
        own.first_entries[b] = static_cast<uint32_t>(blocks[b].first_entry - first_entry);
        own.first_pairs_of_blocks[b] = static_cast<uint32_t>(blocks[b].first_pair - first_pair);
      }
    }
  }
  __device__ __forceinline__ const uint16_t* list(int block) const {
    return given.training.state.neurons + own.first_entry + own.first_entries[block];
  }

  __device__ __forceinline__ void fetch_aside(const tiles::Item& item, const uint16_t* list, int tiles) const {
    const State& state = given.training.state;
    const int64_t first_entry = own.first_entry + own.first_entries[item.block] + item.first;
    const int64_t first_pair =
        own.first_pair + own.first_pairs_of_blocks[item.block] + __ldcg(state.first_pairs + first_entry / kGroup);
    barrier_wait(&own.taken, (tiles & 1) ^ 1);
#pragma unroll
    for (int i = threadIdx.x * kStep; i < kStagedPairs; i += tiles::kFetchers * kStep) {  // more than the tile's, maybe
      const int64_t from = first_pair / kStep * kStep + i;
      const bool there = from < state.pairs;
      copy_16(smem_address(own.values + i), static_cast<const Values*>(state.values) + (there ? from : 0), there);
    }
#pragma unroll 1
    for (int e = threadIdx.x; e < item.count; e += tiles::kFetchers) {
      copy_16(smem_address(own.tokens + e), state.tokens + first_entry + e);
      if (given.sorted.pairs != nullptr) {
        copy_4(own.places + e, given.sorted.places + (a.chunk.first_block() + item.block) * a.width + list[e]);
      }
    }
    if (threadIdx.x < group_count(item.count)) {
      copy_4(own.first_pairs + threadIdx.x, state.first_pairs + first_entry / kGroup + threadIdx.x);
    }
  }
  __device__ __forceinline__ void fetch_end(const tiles::Item&, tiles::Control&, const int (&)[tiles::kFetchShare],
                                            uint32_t, Ring&) const {}

  static constexpr int kPairBits = 23;
  static_assert(kBlockTokens * 65536 == 1 << kPairBits && kBlockTokens <= 1 << (32 - kPairBits));

  // Lane i has entry i of each group, and the pairs of it that are the warp's tokens'.
  struct End {
    const PairGradient& job;
    const tiles::Item& item;
    const tiles::Part part;
    const int64_t first_pair, first_token;
    uint32_t pairs[kPieces];  // the first, in the block; above kPairBits: how many tokens before the warp's activate it
    uint32_t staged;          // the block's pair that lies first in shared memory; before its first: below zero
    float l1_scale, count_scale, weight;

    __device__ __forceinline__ End(const PairGradient& of, const tiles::Item& tile, const tiles::Part& mine,
                                   tiles::Control&, int, uint32_t)
        : job(of),
          item(tile),
          part(mine),
          first_pair(of.own.first_pair + of.own.first_pairs_of_blocks[tile.block]),
          first_token(of.a.chunk.first + tile.block * kBlockTokens + mine.warp * kWarpTokens) {}

    // Which of the warp's tokens activate the lane's entry.
    __device__ __forceinline__ uint32_t tokens_of(int p) const {
      const int entry = part.low + p * kGroup + part.lane;
      const uint16_t* parts = reinterpret_cast<const uint16_t*>(job.own.tokens);
      return entry < item.count ? parts[entry * tiles::kConsumerWarps + part.warp] : 0;
    }

    __device__ __forceinline__ uint32_t load(uint32_t pair) const {
      const uint32_t at = pair - staged;
      if (at < kStagedPairs) return job.own.values[at];
      return static_cast<const Values*>(job.given.training.state.values)[first_pair + pair];
    }

    __device__ __forceinline__ void prepare() {
      const Terms& terms = job.given.training.terms;
      const int lane = part.lane, word = part.warp / 2, shift = part.warp % 2 * kWarpTokens;
      const bool inside = lane < kWarpTokens && first_token + lane < job.a.chunk.first + job.a.chunk.tokens;
      l1_scale = terms.l1_scale != nullptr ? *terms.l1_scale : 0.0f;
      count_scale = terms.count_scale != nullptr ? *terms.count_scale : 0.0f;
      weight = inside && terms.token_weight != nullptr ? terms.token_weight[first_token + lane] : 1.0f;
      staged = job.own.first_pairs[0] - static_cast<uint32_t>((first_pair + job.own.first_pairs[0]) % kStep);
#pragma unroll
      for (int p = 0; p < kPieces; p += 2) {
        if (p >= 2 * part.groups) break;
        uint32_t counts[2], before[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int entry = part.low + (p + i) * kGroup + lane;
          const uint4 m = entry < item.count ? job.own.tokens[entry] : uint4{};
          const uint32_t x = __popc(m.x), y = __popc(m.y), z = __popc(m.z);
          const uint32_t mine = word == 0 ? m.x : word == 1 ? m.y : word == 2 ? m.z : m.w;
          const uint32_t words_before = (word > 0 ? x : 0) + (word > 1 ? y : 0) + (word > 2 ? z : 0);
          before[i] = words_before + __popc(mine & ((1u << shift) - 1));
          counts[i] = x + y + z + __popc(m.w);
        }
        const uint32_t sums = sum_before(counts[0] | counts[1] << 16, lane);  // each at most 32 * 128
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t first = job.own.first_pairs[part.low / kGroup + p + i] + (sums >> 16 * i & 0xffff);
          pairs[p + i] = (first + before[i]) | before[i] << kPairBits;
        }
      }
    }

    __device__ __forceinline__ void apply(const float* sum, Ring&) {
      const int lane = part.lane, row = lane / 4;
      Sums& sums = job.own.sums[part.warp];
      float* weights = job.own.weights[part.warp];
      if (part.groups > 0 && lane < kWarpTokens) weights[lane] = weight;
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        if (p >= 2 * part.groups) break;
        const uint32_t all = tokens_of(p);
        uint32_t pair = pairs[p] & ((1u << kPairBits) - 1), place = pairs[p] >> kPairBits;
        if (job.given.sorted.pairs != nullptr && all != 0) place += job.own.places[part.low + p * kGroup + lane];
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          const uint32_t bits = all >> kRoundTokens * r & ((1u << kRoundTokens) - 1);
          if (!__any_sync(~0u, bits != 0)) continue;
#pragma unroll
          for (int q = 0; q < kGroup / 8; ++q) {
            const int i = 4 * (kGroup / 8 * p + q) + 2 * r;
            float* to = sums.values + Sums::at(row, 8 * q + lane % 4 * 2);
            *reinterpret_cast<float2*>(to) = {sum[i], sum[i + 1]};
          }
          __syncwarp();
          walk(sums, weights + kRoundTokens * r, kRoundTokens * r, bits, pair, place);
          __syncwarp();
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&job.own.taken);
    }

    // The pairs of the lane's entry with some of the warp's tokens, of which `first` is the first.
    __device__ __forceinline__ void walk(const Sums& sums, const float* weights, int first, uint32_t bits,
                                         uint32_t& pair, uint32_t& place) const {
      const bool sorted = job.given.sorted.pairs != nullptr;
      const uint32_t tile = tile_place(part.lane, part.warp * kWarpTokens + first);
      for (; bits != 0; bits &= bits - 1) {
        const int token = __ffs(bits) - 1;
        const uint32_t values = load(pair);
        const float g = unpack<T>(values).x, u = kGated ? unpack<T>(values).y : 1.0f;
        const uint32_t rounded = kGated ? pack<T>(g * u, 0.0f) : values;
        const float h = unpack<T>(rounded).x, of_token = weights[token];
        const float dh = sums.values[Sums::at(token, part.lane)] + l1_gradient(l1_scale * of_token, h);
        const float dg = dh * u + count_gradient(count_scale * of_token, g);
        store(pack<T>(dg, dh * g), pair, tile ^ token * 2, place, sorted, first + token, rounded);
        ++pair;
        ++place;
      }
    }

    __device__ __forceinline__ void store(uint32_t results, uint32_t pair, uint32_t in_tile, uint32_t place,
                                          bool sorted, int token, uint32_t h) const {
      const PairGradients& gradients = job.given.gradients;
      const Sorted& to = job.given.sorted;
      if (gradients.values != nullptr) {
        gradients.values[first_pair + pair] = results;
        gradients.places[first_pair + pair] = static_cast<uint16_t>(in_tile);
      }
      if (sorted) {
        to.pairs[place] = {static_cast<uint32_t>(first_token) + token, results};
        static_cast<uint16_t*>(to.h)[place] = static_cast<uint16_t>(h);
      }
    }
  };
};

template <typename T>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const Training& training, const void* dy,
                   const PairGradients& gradients, const Sorted& sorted, const Device& device, cudaStream_t stream) {
  const tiles::Arguments arguments{ffn.down.data, chunk, ffn.hidden, ffn.width};
  return ffn.gated()
             ? tiles::launch<PairGradient<T, true>>(ffn, dy, arguments, {training, gradients, sorted}, device, stream)
             : tiles::launch<PairGradient<T, false>>(ffn, dy, arguments, {training, gradients, sorted}, device, stream);
}

}  // namespace

cudaError_t launch_pair_dh(const Ffn& ffn, const Chunk& chunk, const Training& training, const Gradients& gradients,
                           const PairGradients& pair_gradients, const Sorted& sorted, const Device& device,
                           cudaStream_t stream) {
  const void* dy = gradients.dy;
  return ffn.dtype == DType::kBFloat16
             ? launch<__nv_bfloat16>(ffn, chunk, training, dy, pair_gradients, sorted, device, stream)
             : launch<__half>(ffn, chunk, training, dy, pair_gradients, sorted, device, stream);
}

}  // namespace twell::sm90
