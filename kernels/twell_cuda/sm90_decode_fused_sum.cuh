// How the thread blocks of the fused decode kernel add up y: each leaves its share in the workspace, 16 bytes at a
// time: two columns and the call's seal, 64 bits that no earlier call has used. Whoever reads waits for seals, so no
// fence and no counter stand between a share and its readers. Each block adds up some columns, always in the order of
// shares. The next call's blocks may be there already, but write nothing before all of this one have ended: no share is
// overwritten while it is read. In a quiet kernel a block stores no share of zeros, but its seal in a word of its own,
// as soon as it knows.
//
// Where other kernels have pushed the shares' lines out of L2, a look at one not yet written fetches it from memory. So
// a block may write its lines ahead ("warm"): with no seal, once the kernels ahead have ended and so nobody reads them
// any more, and by the very threads that later store the share there. Two stores of one thread to one address take
// effect in order, and 16 bytes are written and read as one: what a reader finds is an older call's seal, none, or this
// call's with its columns. "None" is 0; of all 2^64 pairs of a word and a call one has that seal.
//
// A block that waits for others needs them to run. That is counted as they start; one that has waited for long while
// others have not even started gives up, and the last block to start does the work of all that gave up. So nothing
// hangs where other work holds multiprocessors.
#pragma once

#include "sm90_decode_fused.cuh"

namespace twell::decoding::fused {

// One word for each workspace, as two calls under way at once have two: calls so far (32 bits), blocks of this call
// that have started (16), blocks that gave up (16). Each call adds 65,536 to the blocks, so it leaves nothing to
// reset.
constexpr int kMeetings = 65536;
constexpr int kCallShift = 32;
constexpr unsigned long long kOneBlock = 1ull << 16, kGaveUp = 1;
static __device__ unsigned long long meetings[kMeetings];

#if defined(TWELL_SM90_DEVICE)

// By the word's address, not its index: a process may have loaded this code twice.
__device__ __forceinline__ uint64_t seal_of(const unsigned long long* word, uint32_t call) {
  uint64_t v = (reinterpret_cast<uint64_t>(word) / sizeof *word << 32 | call) + 0x9e3779b97f4a7c15ull;
  v = (v ^ v >> 30) * 0xbf58476d1ce4e5b9ull;
  v = (v ^ v >> 27) * 0x94d049bb133111ebull;
  return v ^ v >> 31;
}

// What a block that starts adds.
__device__ __forceinline__ unsigned long long started_as(unsigned block, unsigned blocks) {
  return block == 0 ? kOneBlock * (65536 - (blocks - 1)) : kOneBlock;
}

// This block has started; says what the word was before. The answer takes a while: number_call() reads it later.
__device__ __forceinline__ unsigned long long check_in(const FusedParams& p) {
  return atomicAdd(meetings + p.meeting, started_as(blockIdx.x, gridDim.x));
}

// The call's seal; and, for the last block to start, how many gave up before.
__device__ __forceinline__ void number_call(const FusedParams& p, Control& c, unsigned long long before) {
  const unsigned long long after = before + started_as(blockIdx.x, gridDim.x);
  const bool last = after >> kCallShift != before >> kCallShift;
  const int gave_up = last ? static_cast<int>(before & (kOneBlock - 1)) : 0;
  if (gave_up > 0) atomicAdd(meetings + p.meeting, -(kGaveUp * gave_up));
  c.left_over = gave_up;
  c.seal = seal_of(meetings + p.meeting, static_cast<uint32_t>(before >> kCallShift));
  c.all_in = static_cast<int>(before >> kCallShift);  // until may_wait_on(): the call's number
}

// Whether all blocks have started, so that waiting ends; if not, this one has given up.
__device__ __forceinline__ bool may_wait_on(const FusedParams& p, const Control& c) {
  const unsigned long long before = atomicAdd(meetings + p.meeting, kGaveUp);
  const bool all = static_cast<int>(before >> kCallShift) != c.all_in;
  if (all) atomicAdd(meetings + p.meeting, -kGaveUp);
  return all;
}

__device__ __forceinline__ void store_sealed(uint4* to, float a, float b, uint64_t seal) {
  asm volatile(
      "{\n\t.reg .b64 v;\n\t.reg .b128 w;\n\tmov.b64 v, {%1, %2};\n\tmov.b128 w, {v, %3};\n\t"
      "st.relaxed.gpu.global.b128 [%0], w;\n\t}" ::"l"(to),
      "f"(a), "f"(b), "l"(seal)
      : "memory");
}

__device__ __forceinline__ void store_silence(uint64_t* to, uint64_t seal) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(seal) : "memory");
}

__device__ __forceinline__ uint64_t load_silence(const uint64_t* from) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}

struct Sealed {
  uint64_t columns, seal;
};

// Where `wanted`; else `v` stays.
__device__ __forceinline__ void load_sealed(Sealed& v, const uint4* from, bool wanted) {
  asm volatile(
      "{\n\t.reg .pred p;\n\t.reg .b128 w;\n\tsetp.ne.b32 p, %3, 0;\n\tmov.b128 w, {%0, %1};\n\t"
      "@p ld.relaxed.gpu.global.b128 w, [%2];\n\tmov.b128 {%0, %1}, w;\n\t}"
      : "+l"(v.columns), "+l"(v.seal)
      : "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
}

// Where a thread's columns of token `token` lie in its block's share: four times two, `hidden / kThreadColumns` apart.
__device__ __forceinline__ uint4* share_of(const FusedParams& p, int token) {
  return p.shares + (blockIdx.x * p.tokens + token) * (p.hidden / 2) + threadIdx.x;
}

__device__ __forceinline__ void store_share(const FusedParams& p, int token, const float (&y)[kThreadColumns],
                                            uint64_t seal) {
  const int threads = p.hidden / kThreadColumns;
  if (threadIdx.x >= threads) return;
#pragma unroll
  for (int i = 0; i < kThreadColumns / 2; ++i) {
    store_sealed(share_of(p, token) + i * threads, y[2 * i], y[2 * i + 1], seal);
  }
}

__device__ __forceinline__ void warm_share(const FusedParams& p) {
  constexpr uint64_t kNoSeal = 0;
  const float none[kThreadColumns] = {};
#pragma unroll 1
  for (int t = 0; t < p.tokens; ++t) store_share(p, t, none, kNoSeal);
}

// Which column pair `pair` of a share's row begins with.
__device__ __forceinline__ int column_of(const FusedParams& p, int pair) {
  const int threads = p.hidden / kThreadColumns;
  const int i = (pair >= threads) + (pair >= 2 * threads) + (pair >= 3 * threads);
  return (pair - i * threads) * kThreadColumns + 2 * i;
}

// Of which token unit `unit` is: a pair of columns.
template <int kTokens>
__device__ __forceinline__ int token_of(const FusedParams& p, int unit) {
  int token = 0;
#pragma unroll
  for (int t = 1; t < kTokens; ++t) token += unit >= t * (p.hidden / 2);
  return token;
}

// How a thread block's threads share out its units: `together`, a power of two, of neighbouring units, in `parts` that
// take turns at the shares.
struct Places {
  int together, parts_log2, parts, unit, part;
  __device__ __forceinline__ explicit Places(const FusedParams& p) : together(min(p.units, kThreads)) {
    const int log2 = __ffs(together) - 1;
    parts_log2 = __ffs(kThreads) - 1 - log2, parts = 1 << parts_log2;
    unit = threadIdx.x & (together - 1), part = threadIdx.x >> log2;
  }
};

// Loads of a thread in flight; up to four tokens all that it wants.
template <int kTokens>
constexpr int kBatch = kTokens == 2 ? 10 : 18;

// Of a quiet kernel, whose warps have neighbouring pairs of one token and whose lanes all add up the same shares: each
// lane asks whether one of the next ones is zeros.
template <int kTokens>
__device__ __forceinline__ uint64_t ask_for_silence(const FusedParams& p, int token, int row, int parts) {
  const int lane = threadIdx.x % 32, shares = gridDim.x;
  row += lane * parts;
  return lane < kBatch<kTokens> && row < shares ? load_silence(p.silences + token * shares + row) : 0;
}

// The same ahead of add_up(), for this block's own columns.
template <int kTokens>
__device__ __forceinline__ uint64_t ask_early(const FusedParams& p) {
  const Places at(p);
  const int unit = blockIdx.x * p.units + at.unit;
  if (unit >= p.tokens * (p.hidden / 2)) return 0;
  return ask_for_silence<kTokens>(p, token_of<kTokens>(p, unit), at.part, at.parts);
}

// Adds up the columns of thread block `block` and stores them, if all shares arrive before `patience` looks at each;
// the same answer for all threads. `scratch` holds kThreads of two; `silence` is what ask_early() said.
template <typename Half, int kTokens>
__device__ __forceinline__ bool add_up(const FusedParams& p, const Control& c, float2* scratch, int block,
                                       int patience, uint64_t silence) {
  const int thread = threadIdx.x, shares = gridDim.x;
  const int pairs = p.hidden / 2, all_units = p.tokens * pairs;
  const Places at(p);
  const int together = at.together, parts = at.parts, part = at.part;
  const uint64_t seal = c.seal;
  for (int base = block * p.units; base < min((block + 1) * p.units, all_units); base += together) {
    const int unit = base + at.unit;
    const bool inside = unit < all_units;
    const int token = kQuiet<kTokens> ? token_of<kTokens>(p, unit) : 0;
    const uint4* const from = p.shares + unit;
    int at_y = 0;
    Half bias[2] = {Half(0.f), Half(0.f)};
    const auto find_place = [&] {
      const int t = token_of<kTokens>(p, unit), column = column_of(p, unit - t * pairs);
      at_y = (t * p.hidden + column) / 2;
      if (p.b_down == nullptr) return;
      bias[0] = static_cast<const Half*>(p.b_down)[column], bias[1] = static_cast<const Half*>(p.b_down)[column + 1];
    };
    if (kQuiet<kTokens> && inside) find_place();
    float2 sum = make_float2(0.f, 0.f);
    bool in_vain = false;
    for (int row = part; inside && !in_vain && row < shares; row += kBatch<kTokens> * parts) {
      Sealed v[kBatch<kTokens>] = {};
      uint32_t missing = (1u << min(kBatch<kTokens>, (shares - row + parts - 1) >> at.parts_log2)) - 1;
      uint32_t wanted = missing;
      for (int looks = 0;; ++looks) {
        if constexpr (kQuiet<kTokens>) {
          const uint32_t silent = __ballot_sync(0xffffffffu, silence == seal);
          missing &= ~silent, wanted &= ~silent;
          silence = 0;
        }
        if (kQuiet<kTokens> ? !__any_sync(0xffffffffu, missing != 0) : missing == 0) break;
        if (looks > patience) {
          in_vain = true;
          break;
        }
        if constexpr (kQuiet<kTokens>) silence = ask_for_silence<kTokens>(p, token, row, parts);
        const uint4* share = from + row * all_units;
#pragma unroll
        for (int i = 0; i < kBatch<kTokens>; ++i) {
          load_sealed(v[i], share, missing >> i & 1);
          share += parts * all_units;
          asm volatile("" : "+l"(share));  // not all addresses at a time: too many registers, and instructions ahead
        }
        if (!kQuiet<kTokens> && looks == 0) find_place();  // while the first look is on its way
#pragma unroll
        for (int i = 0; i < kBatch<kTokens>; ++i) {
          if (v[i].seal == seal) missing &= ~(1u << i);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch<kTokens>; ++i) {
        if (wanted >> i & 1) {
          sum.x += __uint_as_float(static_cast<uint32_t>(v[i].columns));
          sum.y += __uint_as_float(static_cast<uint32_t>(v[i].columns >> 32));
        }
      }
    }
    if (__syncthreads_or(in_vain)) return false;
    for (int d = together; d < 32; d *= 2) {
      sum.x += __shfl_xor_sync(0xffffffffu, sum.x, d);
      sum.y += __shfl_xor_sync(0xffffffffu, sum.y, d);
    }
    const int lanes = min(together, 32);  // of a warp that hold different sums
    if (thread % 32 < lanes) scratch[together < 32 ? thread / 32 * together + thread % 32 : thread] = sum;
    __syncthreads();
    if (thread < together && inside) {
      float2 v = scratch[thread];
      float2 others[kDecodeWarps];
      const int groups = min(parts, kDecodeWarps);
#pragma unroll
      for (int q = 1; q < kDecodeWarps; ++q) {
        others[q] = q < groups ? scratch[q * together + thread] : float2{};
      }
#pragma unroll
      for (int q = 1; q < kDecodeWarps; ++q) {
        if (q < groups) v.x += others[q].x, v.y += others[q].y;
      }
      static_cast<uint32_t*>(p.y)[at_y] = pack<Half>(v.x + to_float(bias[0]), v.y + to_float(bias[1]));
    }
    __syncthreads();  // `scratch` is free again
  }
  return true;
}

// y, once this block has left its share.
template <typename Half, int kTokens>
__device__ __forceinline__ void add_up_all(const FusedParams& p, Control& c, float2* scratch, uint64_t silence) {
  constexpr int kForEver = 0x7fffffff;
  const int units = p.tokens * (p.hidden / 2);
  // Its own columns; and all others' if it is the last block and some gave up.
  int block = blockIdx.x, next = 0, patience = p.patience;
#pragma unroll 1
  while (true) {
    if (static_cast<int64_t>(block) * p.units < units &&
        !add_up<Half, kTokens>(p, c, scratch, block, patience, silence)) {
      if (threadIdx.x == 0) c.all_in = may_wait_on(p, c);
      __syncthreads();
      if (!c.all_in) return;
    } else {
      p.trace.mark(kTaken);
      if (c.left_over == 0 || next == static_cast<int>(gridDim.x)) return;
      block = next++;
    }
    patience = kForEver, silence = 0;
  }
}

#endif

}  // namespace twell::decoding::fused
