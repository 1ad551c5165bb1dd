// What the thread blocks of sm90/decode/few_down.cuh have in shared memory, and which neurons each of them takes.
#pragma once

#include <type_traits>

#include "decode/quads.cuh"
#include "sm90/common/prefix_sum.cuh"
#include "sm90/decode/few_narrow.cuh"

namespace twell::decoding::few::down {

constexpr int kThreads = 320;
constexpr int kColumns = kFewColumns, kBounds = kColumns / 8;
constexpr int kDepth = kDownDepth;
constexpr int kPartBytes = kDepth * kStepBytes, kMaxStages = down_stages(true, true, false);
constexpr int kListed = 1904;  // neurons at a time
constexpr int kAll = 1;  // named

// Up to 16 tokens are multiplied by mma, a warp for 16 columns, and more by wgmma, a warp for 16 of 64 tokens. With
// 8-bit weights more are multiplied by mma too, a warp for 16 columns and 32 tokens. A bound is what a cluster's blocks
// share out: eight columns of all tokens, or, there, eight tokens of all columns.
template <typename Weight, bool kSixteen>
struct Form {
  static constexpr bool kByTokens = kScaled<Weight> && !kSixteen;
  static constexpr int kMultipliers = kByTokens ? 256 : 128, kFetchers = kThreads - kMultipliers;
  static constexpr int kFirstStages = kMultipliers / kFetchers;  // that those who multiply ask for, where they are more
  static constexpr int kProductBytes = kSixteen ? kDepth * 32 : kPartBytes;
  static constexpr int kStageBytes = kProductBytes + kDepth * kRowStep<Weight>;
  static constexpr int kBoundThreads = kSixteen ? 32 : 128;  // that have sums of the same bound
  static constexpr int kBoundBytes = kBoundThreads * 16;
  static constexpr int kOwn = kSixteen ? 8 : kByTokens ? 16 : kColumns / 2;  // sums of a thread
  // From each block of the cluster what this one finishes; of three blocks' sums one more comes where the list was.
  static constexpr int kExchangeBytes = kBounds * kBoundBytes;
};

struct FewDownParams : DownParams {
  int groups;  // tokens in eights: 1, 2, 4 or 8
  int stages;
  Trace trace;
};

struct Control {
  uint16_t list[kListed];  // in the end, what the exchange has no place for
  int warp_counts[kThreads / 32];
  uint64_t full[kMaxStages], empty[kMaxStages], sums;
};

// The same with the scales of the block's columns.
struct ScaledControl : Control {
  float scales[kColumns];
};
template <typename Weight>
using ControlOf = std::conditional_t<kScaled<Weight>, ScaledControl, Control>;

static_assert(Form<uint16_t, false>::kBoundBytes <= kListed * 2 && kListed * 2 % 16 == 0);
static_assert(sizeof(Control) == kDownControl);
template <bool kSixteen>
constexpr bool kAsPlanned = Form<uint16_t, kSixteen>::kStageBytes == down_stage_bytes(kSixteen) &&
                            Form<uint16_t, kSixteen>::kExchangeBytes == down_exchange_bytes(kSixteen);
static_assert(kAsPlanned<true> && kAsPlanned<false>);

// Of a thread block. Beside one of the first kernel 8-bit weights take what was planned.
template <typename Weight, bool kSixteen>
constexpr int shared_bytes(bool beside) {
  using F = Form<Weight, kSixteen>;
  return down_stages(kSixteen, beside, kScaled<Weight>) * F::kStageBytes + F::kExchangeBytes +
         static_cast<int>(sizeof(ControlOf<Weight>));
}
static_assert(Form<int8_t, false>::kFirstStages < down_stages(false, false, true));
static_assert(shared_bytes<int8_t, true>(true) == down_shared(true, true, true));
static_assert(shared_bytes<int8_t, false>(true) == down_shared(false, true, true));

#if defined(TWELL_SM90_DEVICE)

// The block's active neurons, found by all threads: of every 32 * splits neurons 32 are this block's. Each thread looks
// at neighbouring octets of those, one unless F is large.
template <int kSplits>
struct Neurons {
  int split;
  int first_octet, last_octet;
  uint32_t first_mask;
  int before;  // active neurons of earlier threads
  int count;   // of the block

  __device__ __forceinline__ Neurons(const FewDownParams& p, int split) : split(split) {
    const int octets = static_cast<uint32_t>(p.mask_pairs + kSplits - 1 - split) / kSplits * 4;
    const int each = (octets + kThreads - 1) / kThreads;
    first_octet = min(static_cast<int>(threadIdx.x) * each, octets);
    last_octet = min(first_octet + each, octets);
    asm volatile("" : "+r"(first_octet), "+r"(last_octet));  // here, and not after what comes next
  }

  // Once the first kernel has ended.
  __device__ __forceinline__ void find(const FewDownParams& p, Control& c) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    first_mask = first_octet < last_octet ? mask(p, first_octet) : 0;
    int sum = __popc(first_mask);
#pragma unroll 1
    for (int i = first_octet + 1; i < last_octet; ++i) sum += __popc(mask(p, i));
    const sm90::ThreadSums sums = sm90::sum_threads<kThreads>(sum, warp, lane, c.warp_counts, kAll);
    before = sums.before;
    count = sums.all;
  }

  __device__ __forceinline__ int word(int octet) const { return octet / 4 * kSplits + split; }
  __device__ __forceinline__ uint32_t mask(const FewDownParams& p, int octet) const {
    return __ldcg(p.masks + word(octet)) >> octet % 4 * 8 & 0xff;
  }

  // Neurons `from` to `from` + kListed of the active ones, in ascending order.
  __device__ __forceinline__ void list(const FewDownParams& p, Control& c, int from) const {
    if (from > 0) sm90::named_barrier<kThreads>(kAll);  // those before are not needed any more
    const int last = min(from + kListed, count);
    int at = before;
    uint32_t left = first_mask;
#pragma unroll 1
    for (int i = first_octet; i < last_octet && at < last;) {
      const int first = word(i) * 32 + i % 4 * 8;
#pragma unroll
      for (int n = 0; n < 8; ++n) {  // without turns for those that are active
        if ((left >> n & 1) != 0 && at >= from && at < last) c.list[at - from] = static_cast<uint16_t>(first + n);
        at += left >> n & 1;
      }
      if (++i < last_octet) left = mask(p, i);
    }
    sm90::named_barrier<kThreads>(kAll);
  }
};

#endif

}  // namespace twell::decoding::few::down
