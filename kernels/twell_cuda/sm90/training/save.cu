// Finds the pairs of a chunk's blocks, and what of them is kept. Each warp finds those of its groups; then its thread
// block learns from the others where they go in the state. Entries of kept blocks go there. Without a gate so do their
// pairs, and the report's sums are taken on the way. With a gate up_save.cu does both, and this kernel clears the sums
// where there is no entry.

#include "sm90/common/launch.h"
#include "sm90/training/pairs.cuh"

namespace twell::sm90 {

// Where the pairs of a chunk's blocks go, while thread blocks still find them: each learns from the others' slots.

constexpr int kSaveWarps = 4, kSaveThreads = kSaveWarps * 32;
constexpr int kSlotBatch = kSlots / kSaveThreads;  // that a thread reads

// A thread block's part of a block of tokens.
struct BlockPart {
  int share, block, index;  // thread blocks of a block; which block; which of its thread blocks
};

// Pairs and groups that come before a thread block's own.
struct Before {
  uint32_t groups, pairs;  // of earlier blocks
  uint32_t here;           // pairs of this block's earlier thread blocks
  uint32_t block;          // all pairs of this block
};

// Adds up the values of all threads.
__device__ __forceinline__ Before add_threads(Before own, Before* warp_sums) {
  own = {__reduce_add_sync(~0u, own.groups), __reduce_add_sync(~0u, own.pairs), __reduce_add_sync(~0u, own.here),
         __reduce_add_sync(~0u, own.block)};
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = own;
  __syncthreads();
  Before sum{};
#pragma unroll
  for (int w = 0; w < kSaveWarps; ++w) {
    const Before other = warp_sums[w];
    sum = {sum.groups + other.groups, sum.pairs + other.pairs, sum.here + other.here, sum.block + other.block};
  }
  return sum;
}

// A slot says all that other thread blocks need to know: nothing else has to be visible with it.
__device__ __forceinline__ void fill_slot(const Saving& saving, uint32_t pairs) {
  *const_cast<volatile uint64_t*>(saving.slots + blockIdx.x) = static_cast<uint64_t>(saving.turn) << 32 | pairs;
}

// Waits for the thread blocks up to the last of this block. All of them come: the GPU starts thread blocks in order,
// and those of one block fit at once.
__device__ __forceinline__ Before wait_for_slots(const Active& a, const Saving& saving, const BlockPart& part,
                                                 Before* warp_sums) {
  int entries[kMaxBlocks / kSaveThreads];
#pragma unroll
  for (int i = 0; i < kMaxBlocks / kSaveThreads; ++i) {
    const int b = i * kSaveThreads + static_cast<int>(threadIdx.x);
    entries[i] = b < part.block ? a.counts[b].all() : 0;
  }
  const volatile uint64_t* slots = saving.slots;
  const int first = part.block * part.share, mine = first + part.index, end = first + part.share;
  uint64_t seen[kSlotBatch] = {};
  bool missing;
  do {
#pragma unroll
    for (int i = 0; i < kSlotBatch; ++i) {
      const int slot = i * kSaveThreads + static_cast<int>(threadIdx.x);
      if (slot < end && seen[i] >> 32 != saving.turn) seen[i] = slots[slot];
    }
    missing = false;
#pragma unroll
    for (int i = 0; i < kSlotBatch; ++i) {
      const int slot = i * kSaveThreads + static_cast<int>(threadIdx.x);
      missing = missing || (slot < end && seen[i] >> 32 != saving.turn);
    }
    if (missing) __nanosleep(50);
  } while (missing);
  Before before{};
#pragma unroll
  for (const int count : entries) before.groups += group_count(count);
#pragma unroll
  for (int i = 0; i < kSlotBatch; ++i) {
    const int slot = i * kSaveThreads + static_cast<int>(threadIdx.x);
    const uint32_t pairs = slot < end ? static_cast<uint32_t>(seen[i]) : 0;
    if (slot < first) before.pairs += pairs;
    if (slot >= first && slot < mine) before.here += pairs;
    if (slot >= first) before.block += pairs;
  }
  return add_threads(before, warp_sums);
}

struct BlockPlace {
  bool kept;
  int64_t first_entry, first_pair;  // of the block
};

// Where the chunk starts, if it is kept. Totals only grow, and are at least its first block if and only if all blocks
// before it were kept: no matter what this chunk's have added to them.
__device__ __forceinline__ BlockPlace start_of_chunk(const State& state, int64_t first_block) {
  if (first_block == 0) return {true, 0, 0};
  const BlockState last = state.blocks[first_block - 1];
  return {*const_cast<const volatile int64_t*>(state.totals) >= first_block,
          last.first_entry + int64_t{group_count(last.counts.all())} * kGroup, last.first_pair + last.pairs};
}

// A block fits if what all blocks up to it take fits: no block after the first that does not can.
__device__ __forceinline__ BlockPlace place_block(const State& state, const BlockPlace& chunk, const Before& before,
                                                  int groups) {
  const int64_t first_entry = chunk.first_entry + int64_t{before.groups} * kGroup;
  const int64_t first_pair = chunk.first_pair + before.pairs;
  const bool kept =
      chunk.kept && first_entry + int64_t{groups} * kGroup <= state.entries && first_pair + before.block <= state.pairs;
  return {kept, first_entry, first_pair};
}

__device__ __forceinline__ void keep_block(const State& state, int64_t block, const BlockState& kept) {
  state.blocks[block] = kept;
  const int64_t entries = kept.first_entry + int64_t{group_count(kept.counts.all())} * kGroup;
  const int64_t ends[3] = {block + 1, entries, kept.first_pair + kept.pairs};
  long long* totals = reinterpret_cast<long long*>(state.totals);
#pragma unroll
  for (int i = 0; i < 3; ++i) atomicMax(totals + i, static_cast<long long>(ends[i]));
}

namespace {

constexpr int kResident = 6;  // thread blocks that an SM holds at once
constexpr int kBatch = 4;     // pairs of a lane under way

struct Arguments {
  Chunk chunk;
  Saving saving;
  Training training;
  int width;
};

// The report's sums where there is no entry.
template <bool kGated>
__device__ __forceinline__ void clear_sums(const Active& a, const Saving& saving, const BlockPart& part, int groups,
                                           int width) {
  const int64_t row = saving.waiting + part.block;
  const int lane = threadIdx.x % 32, warp = part.index * kSaveWarps + static_cast<int>(threadIdx.x) / 32;
  const uint32_t* masks = a.masks + int64_t{part.block} * 2 * a.words;
  for (int word = warp; word < a.words; word += part.share * kSaveWarps) {
    const uint32_t first = __ldcg(masks + word), second = __ldcg(masks + a.words + word);
    const int neuron = word * 32 + lane;
    if (neuron >= width) continue;
    if constexpr (kGated) {
      if ((first >> lane & 1) == 0) saving.activity[2 * row * width + neuron] = 0.0f;
      if ((second >> lane & 1) == 0) saving.activity[(2 * row + 1) * width + neuron] = 0.0f;
    } else {
      if (((first | second) >> lane & 1) == 0) saving.activity[row * width + neuron] = 0.0f;
    }
  }
  for (int group = (kGated ? 0 : groups) + warp * 32 + lane; group < saving.groups;
       group += part.share * kSaveThreads) {
    saving.l1[row * saving.groups + group] = 0.0f;
  }
}

// Adds 32 neighbouring pairs to their entries' sums. Each lane brings one, its entry's `rank`-th; lanes past the last
// pair bring zero, and kGroup for the entry.
__device__ __forceinline__ void add_by_entry(float* sums, float value, int entry, int rank, int lane) {
  const int same_before = min(lane, rank);
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float other = __shfl_up_sync(~0u, value, d);
    if (d <= same_before) value += other;
  }
  const bool last = __shfl_down_sync(~0u, entry, 1) != entry || lane == 31;
  if (last && entry < kGroup) sums[entry] += value;
  __syncwarp();
}

template <typename T, bool kGated, bool kReport>
__global__ void __launch_bounds__(kSaveThreads, kResident) save_kernel(const __grid_constant__ Arguments arguments) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ GroupPairs all_pairs[kSaveWarps];
  __shared__ float all_sums[kSaveWarps][kGroup];
  __shared__ Before warp_sums[kSaveWarps];
  __shared__ uint32_t warp_pairs[kSaveWarps];
  const Active& a = arguments.chunk.active;
  const Saving& saving = arguments.saving;
  const State& state = arguments.training.state;
  const float* token_weight = arguments.training.terms.token_weight;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, share = gridDim.x / a.blocks;
  GroupPairs& pairs = all_pairs[warp];
  float* sums = all_sums[warp];
  launch_dependents();
  wait_for_previous();
  const BlockPart part{share, static_cast<int>(blockIdx.x) / share, static_cast<int>(blockIdx.x) % share};
  const int64_t block = part.block, offset = block * arguments.width * kBlockTokens;
  const Counts counts = a.counts[block];
  const int entries = counts.all(), all_groups = group_count(entries), warp_of_block = part.index * kSaveWarps + warp;
  const int begin = warp_of_block * all_groups / (share * kSaveWarps);
  const int end = (warp_of_block + 1) * all_groups / (share * kSaveWarps);
  const uint16_t* columns = static_cast<const uint16_t*>(a.columns) + offset;
  const uint16_t* neurons = a.neurons + block * a.row;
  uint4* listed = saving.entries + block * a.row;

  int neuron = 0;
  uint4 tokens{};
  uint32_t count = 0;
  for (int group = begin; group < end; ++group) {
    const int mine = group * kGroup + lane;
    neuron = mine < entries ? neurons[mine] : 0;
    tokens = find_tokens(pairs, columns, counts, group * kGroup, neuron, lane);
    if (group + 1 < end) listed[mine] = tokens;  // the last are the first to be saved
    count += __reduce_add_sync(~0u, count_tokens(tokens));
  }
  if (lane == 0) warp_pairs[warp] = count;
  __syncthreads();
  uint32_t own = 0, to_end = 0;  // pairs of this thread block; those up to this warp's last
#pragma unroll
  for (int w = 0; w < kSaveWarps; ++w) {
    own += warp_pairs[w];
    if (w <= warp) to_end += warp_pairs[w];
  }
  if (threadIdx.x == 0) fill_slot(saving, own);
  if constexpr (kReport) clear_sums<kGated>(a, saving, part, all_groups, arguments.width);
  const int64_t first_block = arguments.chunk.first_block();
  const BlockPlace chunk = start_of_chunk(state, first_block);
  const Before before = wait_for_slots(a, saving, part, warp_sums);
  const auto [kept, first_entry, first_pair] = place_block(state, chunk, before, all_groups);
  if (kept && part.index == 0 && threadIdx.x == 0) {
    keep_block(state, first_block + block, {counts, before.block, first_entry, first_pair});
  }

  to_end += before.here;
#pragma unroll 1
  for (int group = end - 1; group >= begin; --group) {  // what was found last is near
    const int mine = group * kGroup + lane;
    if (group + 1 < end) {
      neuron = neurons[mine];
      tokens = listed[mine];
    }
    if (kept) {
      state.tokens[first_entry + mine] = tokens;
      state.neurons[first_entry + mine] = static_cast<uint16_t>(neuron);
    }
    if constexpr (kGated) {
      const uint32_t count = count_tokens(tokens), before = sum_before(count, lane);
      to_end -= __shfl_sync(~0u, before + count, 31);
      const uint32_t first = to_end + before;
      if (mine < entries) {
        listed[mine] = kept ? uint4{first, first + __popc(tokens.x) + __popc(tokens.y), 0, 0} : tokens;
      }
      if (kept && lane == 0) state.first_pairs[first_entry / kGroup + group] = to_end;
      continue;
    }
    const EntryPairs own = expand_group(pairs, tokens, lane);
    to_end -= own.count;
    if (kept && lane == 0) state.first_pairs[first_entry / kGroup + group] = to_end;
    uint16_t* gate_to = static_cast<uint16_t*>(state.values) + first_pair + to_end;
    sums[lane] = 0.0f;
    __syncwarp();
    float l1 = 0.0f;
    for (uint32_t start = 0; start < own.count; start += kBatch * 32) {
      uint16_t gate[kBatch];
      int entry[kBatch];
      float weight[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t index = min(start + i * 32 + lane, own.count - 1);
        const int token = pairs.token(index);
        entry[i] = pairs.entry(index);
        gate[i] = __ldcg(columns + __shfl_sync(~0u, neuron, entry[i]) * kBlockTokens + token);
        if constexpr (kReport) {
          weight[i] = 1.0f;
          if (token_weight != nullptr) weight[i] = token_weight[arguments.chunk.first + block * kBlockTokens + token];
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t index = start + i * 32 + lane;
        const bool valid = index < own.count;
        if (valid && kept) gate_to[index] = gate[i];
        if constexpr (kReport) {
          const float size = fabsf(unpack<T>(gate[i]).x), counted = valid && size != 0.0f ? weight[i] : 0.0f;
          l1 += counted != 0.0f ? counted * size : 0.0f;  // no weight: not even NaN counts
          const int rank = index - __shfl_sync(~0u, own.before, entry[i]);
          add_by_entry(sums, counted, valid ? entry[i] : kGroup, rank, lane);
        }
      }
    }
    if constexpr (kReport) {
      const int64_t row = saving.waiting + block;
#pragma unroll
      for (int d = 16; d > 0; d /= 2) l1 += __shfl_xor_sync(~0u, l1, d);
      if (lane == 0) saving.l1[row * saving.groups + group] = l1;
      if (mine < entries) saving.activity[row * arguments.width + neuron] = sums[lane];
    }
  }
#endif
}

// A multiple of the chunk's blocks, about as many as the GPU holds at once.
int save_grid(const Active& active, const Device& device) {
  const int most = (group_count(active.row) + kSaveWarps - 1) / kSaveWarps;
  return active.blocks * min(most, max(1, min(device.sm_count * kResident, kSlots) / active.blocks));
}

template <typename T, bool kGated>
cudaError_t launch(const Ffn& ffn, const Chunk& chunk, const Saving& saving, const Training& training,
                   const Device& device, cudaStream_t stream) {
  const auto kernel = training.terms.report != nullptr ? save_kernel<T, kGated, true> : save_kernel<T, kGated, false>;
  TWELL_RETURN_IF_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  return launch_kernel(kernel, save_grid(chunk.active, device), kSaveThreads, 1, 0, stream,
                       Arguments{chunk, saving, training, ffn.width});
}

}  // namespace

cudaError_t launch_save(const Ffn& ffn, const Chunk& chunk, const Saving& saving, const Training& training,
                        const Device& device, cudaStream_t stream) {
  const bool bfloat = ffn.dtype == DType::kBFloat16;  // where there is a gate only zeros are told from other values
  const auto run = ffn.gated() ? launch<__half, true> : bfloat ? launch<__nv_bfloat16, false> : launch<__half, false>;
  return run(ffn, chunk, saving, training, device, stream);
}

}  // namespace twell::sm90
