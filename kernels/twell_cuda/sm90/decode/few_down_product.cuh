// What sm90/decode/few_down.cuh is made of: lists of neurons, their columns of Wd and h through a ring of stages, and
// their product, by wgmma, or by mma of up to 16 tokens.
#pragma once

#include <type_traits>

#include "decode/quads.cuh"
#include "sm90/common/prefix_sum.cuh"
#include "sm90/common/wgmma.cuh"
#include "sm90/decode/few.cuh"

namespace twell::decoding::few::down {

// What thread blocks have in shared memory, and which neurons each of them takes.

constexpr int kThreads = 320;
constexpr int kColumns = kFewColumns, kBounds = kColumns / 8;
constexpr int kDepth = kDownDepth;
constexpr int kPartBytes = kDepth * kStepBytes, kMaxStages = down_stages(true, true, false);
constexpr int kListed = 1904;  // neurons at a time
constexpr int kAll = 1;        // named

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

using sm90::Ring;

// Where a neuron's 16 bytes `piece` of columns lie in a stage, and of h for 16 tokens: ldmatrix meets no bank twice.
__device__ __forceinline__ uint32_t columns_at(int row, int piece) {
  return row * kStepBytes + ((piece ^ (row & 7)) << 4);
}
__device__ __forceinline__ uint32_t products_at(int row, int piece) {
  return row * 32 + ((piece ^ (row >> 2 & 1)) << 4);
}

// Listed neurons' columns and h, kDepth a stage; past the last, zeros. Little is left in the loop: a thread's rows lie
// alike in a stage, and each next stage's neurons are looked up ahead.
template <typename Weight, bool kSixteen>
__device__ __forceinline__ void fetch(const FewDownParams& p, const Control& c, Ring& ring, uint32_t stages, int slice,
                                      int listed) {
  using F = Form<Weight, kSixteen>;
  constexpr int kApart = F::kFetchers / 8, kRows = kDepth / kApart;  // of a thread
  constexpr uint32_t kProductsApart = kApart * (kSixteen ? 32 : kStepBytes);
  static_assert(kApart % 8 == 0 && kDepth % kApart == 0);  // so its rows are swizzled alike
  const int index = threadIdx.x - F::kMultipliers, piece = index % 8, row = index / 8;
  constexpr int kBytes = sizeof(Weight), kPieces = kRowStep<Weight> / 16;
  const int column = slice * kColumns + piece * (16 / kBytes);
  const bool has_columns = piece < kPieces && column < p.hidden, has_tokens = piece < p.groups;
  const char* const down = p.down + (has_columns ? kBytes * column : 0);
  const char* const products = p.products + (has_tokens ? piece * 16 : 0);
  const uint32_t row_bytes = static_cast<uint32_t>(kBytes) * p.hidden, product_bytes = 16u * p.groups;
  const uint32_t products_to = stages + (kSixteen ? products_at(row, piece) : columns_at(row, piece));
  const uint32_t columns_to =
      stages + F::kProductBytes + (kScaled<Weight> ? narrow_at(row, piece) : columns_at(row, piece));
  uint32_t neurons[kRows];
  const auto look_up = [&](int start) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int at = start + row + i * kApart;
      neurons[i] = at < listed ? c.list[at] : 0;
    }
  };
  look_up(0);
#pragma unroll 1
  for (int start = 0; start < listed; start += kDepth, ring.advance()) {
    const uint32_t stage = ring.stage * F::kStageBytes;
    ring.wait_empty();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool valid = start + row + i * kApart < listed;
      if (has_tokens) {
        sm90::copy_16(products_to + stage + i * kProductsApart, products + uint64_t{neurons[i]} * product_bytes, valid);
      }
      if (piece < kPieces) {
        sm90::copy_16(columns_to + stage + i * kApart * kRowStep<Weight>, down + uint64_t{neurons[i]} * row_bytes,
                      valid && has_columns);
      }
    }
    sm90::barrier_arrive_on_copies(ring.full + ring.stage);
    look_up(start + kDepth);
  }
}

// The same of 8-bit columns for more than 16 tokens, from the neuron `first` on, by any kFetchers threads. Columns have
// half as many pieces as h, so a thread's rows of them are others.
template <typename Weight>
__device__ __forceinline__ void fetch_narrow(const FewDownParams& p, const Control& c, Ring& ring, uint32_t stages,
                                             int slice, int first, int listed) {
  using F = Form<Weight, false>;
  constexpr int kPieces = kNarrowBytes / 16, kApart = F::kFetchers / 8, kColumnsApart = F::kFetchers / kPieces;
  static_assert(kApart % 8 == 0 && kDepth % kApart == 0 && kDepth % kColumnsApart == 0);
  const int index = threadIdx.x % F::kFetchers, piece = index % 8, row = index / 8;
  const int column_piece = index % kPieces, column_row = index / kPieces;
  const int column = slice * kColumns + column_piece * 16;
  const bool has_columns = column < p.hidden, has_tokens = piece < p.groups;
  const char* const down = p.down + (has_columns ? column : 0);
  const char* const products = p.products + (has_tokens ? piece * 16 : 0);
  const uint32_t row_bytes = p.hidden, product_bytes = 16u * p.groups;
  const uint32_t products_to = stages + columns_at(row, piece);
  const uint32_t columns_to = stages + F::kProductBytes + narrow_at(column_row, column_piece);
#pragma unroll 1
  for (int start = first; start < listed; start += kDepth, ring.advance()) {
    const uint32_t stage = ring.stage * F::kStageBytes;
    const int left = listed - start;
    uint32_t of_columns[kDepth / kColumnsApart], of_products[kDepth / kApart];
    const auto look_up = [&](int at) { return at < left ? c.list[start + at] : 0; };
#pragma unroll
    for (int i = 0; i < kDepth / kColumnsApart; ++i) of_columns[i] = look_up(column_row + i * kColumnsApart);
    ring.wait_empty();
#pragma unroll
    for (int i = 0; i < kDepth / kApart; ++i) of_products[i] = look_up(row + i * kApart);
#pragma unroll
    for (int i = 0; i < kDepth / kColumnsApart; ++i) {
      sm90::copy_16(columns_to + stage + i * kColumnsApart * kNarrowBytes, down + uint64_t{of_columns[i]} * row_bytes,
                    has_columns && column_row + i * kColumnsApart < left);
    }
    if (has_tokens) {
#pragma unroll
      for (int i = 0; i < kDepth / kApart; ++i) {
        sm90::copy_16(products_to + stage + i * kApart * kStepBytes,
                      products + uint64_t{of_products[i]} * product_bytes, row + i * kApart < left);
      }
    }
    sm90::barrier_arrive_on_copies(ring.full + ring.stage);
  }
}

// sum += h (as tokens by neurons) times listed neurons' columns.
template <typename Half>
__device__ __forceinline__ void multiply(float (&sum)[kColumns / 2], Ring& ring, uint32_t stages, int listed) {
  const bool releases = threadIdx.x % 32 == 0;
  int held = -1;  // the stage that the products before these read
#pragma unroll 1
  for (int start = 0; start < listed; start += kDepth, ring.advance()) {
    ring.wait_full();
    sm90::fence_async_proxy();  // cp.async wrote, tensor cores read
    const uint32_t stage = stages + ring.stage * Form<Half, false>::kStageBytes;
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      const uint32_t h = stage + k * 2048;
      sm90::Wgmma<Half, kColumns, 1, 1>::multiply(sum, sm90::matrix_descriptor(h, kPartBytes),
                                                  sm90::matrix_descriptor(h + kPartBytes, kPartBytes), 1);
    }
    sm90::wgmma_commit();
    sm90::wgmma_wait<1>();
    if (held >= 0 && releases) sm90::barrier_arrive(ring.empty + held);
    held = ring.stage;
  }
  sm90::wgmma_wait<0>();
  if (held >= 0 && releases) sm90::barrier_arrive(ring.empty + held);
}

// The same of 16 tokens: each warp takes 16 columns.
template <typename Half>
__device__ __forceinline__ void multiply(float (&sum)[8], Ring& ring, uint32_t stages, int listed) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int start = 0; start < listed; start += kDepth, ring.advance()) {
    ring.wait_full();
    using F = Form<Half, true>;
    const uint32_t h = stages + ring.stage * F::kStageBytes, columns = h + F::kProductBytes;
    uint32_t a[kDepth / 16][4], b[kDepth / 16][4];
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      sm90::load_matrices_transposed(a[k], h + products_at(16 * k + lane / 16 * 8 + lane % 8, lane / 8 % 2));
      sm90::load_matrices_transposed(b[k],
                                     columns + columns_at(16 * k + lane / 8 % 2 * 8 + lane % 8, 2 * warp + lane / 16));
    }
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        mma<Half>(reinterpret_cast<float (&)[4]>(sum[4 * j]), a[k][0], a[k][1], a[k][2], a[k][3], b[k][2 * j],
                  b[k][2 * j + 1]);
      }
    }
    if (lane == 0) sm90::barrier_arrive(ring.empty + ring.stage);
  }
}

// The first of 8-bit columns, which are the product's rows here and tokens its columns: bytes become operands in
// registers, each warp's 16 columns. A transposed load gives a lane two neighbouring ones' bytes of two neurons, rows
// lane / 4 and lane / 4 + 8. By mma, eight warps of 32 tokens each: a warp that has 64 tokens' sums has no registers
// left to ask ahead, nor for wgmma's operands.
template <typename Half, typename Weight>
__device__ __forceinline__ void multiply_rows(float (&sum)[16], Ring& ring, uint32_t stages, int listed) {
  using F = Form<Weight, false>;
  constexpr int kParts = kDepth / 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t first_h = columns_at(lane % 16, warp / 4 * 4 + lane / 16);
  const uint32_t first_columns = F::kProductBytes + narrow_at(lane % 16, warp % 4);
#pragma unroll 1
  for (int start = 0; start < listed; start += kDepth, ring.advance()) {
    ring.wait_full();
    const uint32_t stage = stages + ring.stage * F::kStageBytes;
    uint32_t words[kParts][2], h[kParts][2][4];
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      sm90::load_two_matrices_transposed(words[k], stage + first_columns + k * 16 * kNarrowBytes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // 16 tokens each
        sm90::load_matrices_transposed(h[k][i], (stage + first_h + k * 16 * kStepBytes) ^ i << 5);
      }
    }
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      uint32_t a[4];
      expand<Half, Weight>(__byte_perm(words[k][0], 0, 0x3120), a[0], a[1]);
      expand<Half, Weight>(__byte_perm(words[k][1], 0, 0x3120), a[2], a[3]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        mma<Half>(reinterpret_cast<float (&)[4]>(sum[4 * j]), a[0], a[1], a[2], a[3], h[k][j / 2][j % 2 * 2],
                  h[k][j / 2][j % 2 * 2 + 1]);
      }
    }
    if (lane == 0) sm90::barrier_arrive(ring.empty + ring.stage);
  }
}

// The second of 8-bit columns. A transposed load gives a lane two neighbouring columns' bytes of two neurons, so a
// warp's even columns form one operand and its odd ones the other.
template <typename Half, typename Weight>
__device__ __forceinline__ void multiply_narrow(float (&sum)[8], Ring& ring, uint32_t stages, int listed) {
  using F = Form<Weight, true>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int start = 0; start < listed; start += kDepth, ring.advance()) {
    ring.wait_full();
    const uint32_t h = stages + ring.stage * F::kStageBytes, columns = h + F::kProductBytes;
    uint32_t a[kDepth / 16][4], bytes[kDepth / 16][2];
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      sm90::load_matrices_transposed(a[k], h + products_at(16 * k + lane / 16 * 8 + lane % 8, lane / 8 % 2));
      sm90::load_two_matrices_transposed(bytes[k], columns + narrow_at(16 * k + lane % 16, warp));
    }
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t b[2];
        expand<Half, Weight>(__byte_perm(bytes[k][0], bytes[k][1], j == 0 ? 0x6420 : 0x7531), b[0], b[1]);
        mma<Half>(reinterpret_cast<float (&)[4]>(sum[4 * j]), a[k][0], a[k][1], a[k][2], a[k][3], b[0], b[1]);
      }
    }
    if (lane == 0) sm90::barrier_arrive(ring.empty + ring.stage);
  }
}

// A thread's sums as `column_of` has them: of 16 tokens those of even and of odd columns become two bounds of
// neighbouring ones, of more those of two tokens and two columns change places.
__device__ __forceinline__ void join_columns(float (&sum)[8]) {
  const float odd = sum[1], odd_below = sum[3];
  sum[1] = sum[4], sum[3] = sum[6];
  sum[4] = odd, sum[6] = odd_below;
}
__device__ __forceinline__ void join_columns(float (&sum)[16]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float second = sum[4 * j + 1];
    sum[4 * j + 1] = sum[4 * j + 2], sum[4 * j + 2] = second;
  }
}

template <typename Half, typename Weight, int kOwn>
__device__ __forceinline__ void multiply_listed(float (&sum)[kOwn], Ring& ring, uint32_t stages, int listed) {
  if constexpr (!kScaled<Weight>) {
    multiply<Half>(sum, ring, stages, listed);
  } else if constexpr (kOwn == 8) {
    multiply_narrow<Half, Weight>(sum, ring, stages, listed);
  } else {
    multiply_rows<Half, Weight>(sum, ring, stages, listed);
  }
}

#endif

// A thread's sums of a bound: two neighbouring columns of the block's, of two tokens that are `kTokensApart`.
template <typename Weight, bool kSixteen>
constexpr int kTokensApart = Form<Weight, kSixteen>::kByTokens ? 1 : 8;
template <typename Weight, bool kSixteen>
__device__ __forceinline__ int token_of(int bound, int thread) {
  return Form<Weight, kSixteen>::kByTokens ? bound * 8 + thread % 4 * 2 : thread / 32 * 16 + thread % 32 / 4;
}
template <typename Weight, bool kSixteen>
__device__ __forceinline__ int column_of(int bound, int thread) {
  if (Form<Weight, kSixteen>::kByTokens) return thread / 4 * 2;
  if (kScaled<Weight>) return bound / 2 * 16 + thread % 4 * 4 + bound % 2 * 2;
  return bound * 8 + thread % 4 * 2;
}

}  // namespace twell::decoding::few::down
