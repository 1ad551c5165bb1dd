// Second of Hopper's two decode kernels for 3 to 64 tokens: y = h Wd^T + bd from what the first one left
// (sm90_few_gate_up.cu).
//
// A thread block owns 64 columns of y and, with `splits` of them to a cluster, its own share of the active neurons. All
// threads list those; then one warpgroup multiplies and the others gather columns of Wd and h. The blocks of a cluster
// add up through each other's shared memory: each finishes some of the columns.

#include "decode_quads.cuh"
#include "sm90_few.cuh"

namespace twell::decoding {
namespace {

using namespace few;

constexpr int kMultipliers = 128, kFetchers = 192, kThreads = kMultipliers + kFetchers;
constexpr int kColumns = kFewColumns, kBounds = kColumns / 8;
constexpr int kDepth = 48;  // neurons of a stage
constexpr int kPartBytes = kDepth * kStepBytes, kStageBytes = 2 * kPartBytes, kStages = 4;
constexpr int kListed = 1408;  // neurons at a time
constexpr int kBoundBytes = kMultipliers * 16;  // of the sums of eight columns
constexpr int kAll = 1;  // named barrier

struct FewDownParams : DownParams {
  int groups;  // tokens in eights: 1, 2, 4 or 8
  Trace trace;
};

struct Control {
  uint16_t list[kListed];  // in the end, what the exchange has no place for
  uint64_t full[kStages], empty[kStages], sums;
  int warp_counts[kThreads / 32];
};

// From each block of the cluster what this one finishes; of three blocks' sums one more comes where the list was.
constexpr int kExchangeBytes = kBounds * kBoundBytes;
static_assert(kBoundBytes <= kListed * 2 && kListed * 2 % 16 == 0);
constexpr int kShared = kStages * kStageBytes + kExchangeBytes + static_cast<int>(sizeof(Control));
static_assert(kShared <= kDownShared);

#if defined(TWELL_SM90_DEVICE)

using sm90::Ring;

// The block's active neurons, found by all threads: of every 32 * splits neurons 32 are this block's. Each thread looks
// at neighbouring octets of those, one unless F is large.
template <int kSplits>
struct Neurons {
  int split;
  int first_octet, last_octet;
  uint32_t first_mask;
  int before;  // active neurons of earlier threads
  int count;   // of the block

  __device__ __forceinline__ Neurons(const FewDownParams& p, Control& c, int split) : split(split) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int octets = static_cast<uint32_t>(p.mask_pairs + kSplits - 1 - split) / kSplits * 4;
    const int each = (octets + kThreads - 1) / kThreads;
    first_octet = min(static_cast<int>(threadIdx.x) * each, octets);
    last_octet = min(first_octet + each, octets);
    first_mask = first_octet < last_octet ? mask(p, first_octet) : 0;
    const int first_count = __popc(first_mask);
    int sum = first_count;
#pragma unroll 1
    for (int i = first_octet + 1; i < last_octet; ++i) sum += __popc(mask(p, i));
    const int own = sum;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == 31) c.warp_counts[warp] = sum;
    sm90::named_barrier<kThreads>(kAll);
    before = sum - own;
    count = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      const int n = c.warp_counts[w];
      before += w < warp ? n : 0;
      count += n;
    }
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
#pragma unroll 1
      for (; left != 0; left &= left - 1, ++at) {
        const int n = first + __ffs(static_cast<int>(left)) - 1;
        if (at >= from && at < last) c.list[at - from] = static_cast<uint16_t>(n);
      }
      if (++i < last_octet) left = mask(p, i);
    }
    sm90::named_barrier<kThreads>(kAll);
  }
};

// Listed neurons' columns and h, kDepth a stage; past the last, zeros. Little is left in the loop: a thread's rows lie
// alike in a stage, and each next stage's neurons are looked up ahead.
__device__ __forceinline__ void fetch(const FewDownParams& p, const Control& c, Ring& ring, uint32_t stages, int slice,
                                      int listed) {
  constexpr int kApart = kFetchers / 8, kRows = kDepth / kApart;  // of a thread
  static_assert(kApart % 8 == 0);  // so its rows are swizzled alike
  const int index = threadIdx.x - kMultipliers, piece = index % 8, row = index / 8;
  const int column = slice * kColumns + piece * 8;
  const bool has_columns = column < p.hidden, has_tokens = piece < p.groups;
  const char* const down = p.down + (has_columns ? 2 * column : 0);
  const char* const products = p.products + (has_tokens ? piece * 16 : 0);
  const uint32_t row_bytes = 2u * p.hidden, product_bytes = 16u * p.groups;
  const uint32_t place = stages + row * kStepBytes + ((piece ^ (row & 7)) << 4);
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
    ring.wait_empty();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool valid = start + row + i * kApart < listed;
      const uint32_t to = place + ring.stage * kStageBytes + i * kApart * kStepBytes;
      if (has_tokens) sm90::copy_16(to, products + uint64_t{neurons[i]} * product_bytes, valid);
      sm90::copy_16(to + kPartBytes, down + uint64_t{neurons[i]} * row_bytes, valid && has_columns);
    }
    sm90::barrier_arrive_on_copies(ring.full + ring.stage);
    look_up(start + kDepth);
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
    const uint32_t stage = stages + ring.stage * kStageBytes;
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

// Which bounds of eight columns each block of a cluster finishes, and where it finds what block `from` has of them.
template <int kSplits>
struct Shares {
  static __device__ __forceinline__ int first(int owner) { return kBounds * owner / kSplits; }
  static __device__ __forceinline__ int count(int owner) { return first(owner + 1) - first(owner); }
  static __device__ __forceinline__ int owner(int bound) { return ((bound + 1) * kSplits - 1) / kBounds; }
  static __device__ __forceinline__ int slot(int owner, int from, int bound) {
    // Of three blocks the owner comes last: only it knows that its list is over, where the last may lie.
    const int turn = kSplits != 3 ? from : from == owner ? 2 : from < owner ? from : from - 1;
    return turn * count(owner) + bound;
  }
};

// Adds up what the cluster's blocks left for this one, in their order, and writes its columns.
template <typename Half, int kSplits>
__device__ __forceinline__ void finish(const FewDownParams& p, uint32_t exchange, int slice, int split) {
  using Share = Shares<kSplits>;
#pragma unroll 1
  for (int item = threadIdx.x; item < kMultipliers * Share::count(split); item += kThreads) {
    const int bound = item / kMultipliers, thread = item % kMultipliers;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (int s = 0; s < kSplits; ++s) {
      const uint4 part = sm90::load_shared_16(exchange + Share::slot(split, s, bound) * kBoundBytes + thread * 16);
      v.x += __uint_as_float(part.x), v.y += __uint_as_float(part.y);
      v.z += __uint_as_float(part.z), v.w += __uint_as_float(part.w);
    }
    const int token = thread / 32 * 16 + thread % 32 / 4;
    const int column = slice * kColumns + (Share::first(split) + bound) * 8 + thread % 4 * 2;
    if (token >= p.tokens || column >= p.hidden) continue;
    float2 bias{};
    if (p.b_down != nullptr) bias = sm90::unpack<Half>(static_cast<const uint32_t*>(p.b_down)[column / 2]);
    uint32_t* const y = static_cast<uint32_t*>(p.y) + (token * p.hidden + column) / 2;
    y[0] = sm90::pack<Half>(v.x + bias.x, v.y + bias.y);
    if (token + 8 < p.tokens) y[4 * p.hidden] = sm90::pack<Half>(v.z + bias.x, v.w + bias.y);
  }
}

#endif

// 64 registers, so that it fits beside the first kernel.
template <typename Half, int kSplits>
__global__ void __launch_bounds__(kThreads, 3) few_down_kernel(const __grid_constant__ FewDownParams p) {
#if defined(TWELL_SM90_DEVICE)
  using Share = Shares<kSplits>;
  extern __shared__ __align__(1024) uint8_t stage_bytes[];
  const uint32_t stages = smem_address(stage_bytes), exchange = stages + kStages * kStageBytes;
  Control& c = *reinterpret_cast<Control*>(stage_bytes + kStages * kStageBytes + kExchangeBytes);
  const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread / 32, 0);
  const int slice = blockIdx.x / kSplits, split = blockIdx.x % kSplits;
  constexpr bool kSends = kSplits > 1;  // st.async wants a launch in clusters
  if (p.lets_next_start) sm90::launch_dependents();
  if (thread == 0) {
    p.trace.start();
    for (int s = 0; s < kStages; ++s) {
      sm90::barrier_init(c.full + s, kFetchers);
      sm90::barrier_init(c.empty + s, kMultipliers / 32);
    }
    sm90::barrier_init(&c.sums, 1);
    sm90::fence_barrier_init();
    // From the whole cluster what this block finishes: sums of 16 tokens a warp.
    sm90::barrier_arrive_expect(&c.sums, kSplits * Share::count(split) * ((p.tokens + 15) / 16) * 32 * 16);
  }
  __syncthreads();
  cluster_arrive();  // who has started may be written to
  sm90::wait_for_previous();
  if (thread == 0) p.trace.mark(1);
  const Neurons<kSplits> neurons(p, c, split);
  Ring ring(c.full, c.empty, kStages);

  if (warp >= kMultipliers / 32) {
#pragma unroll 1
    for (int from = 0; from < neurons.count; from += kListed) {
      neurons.list(p, c, from);
      fetch(p, c, ring, stages, slice, min(kListed, neurons.count - from));
    }
    __syncwarp();
    cluster_wait();
  } else {
    float sum[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) sum[i] = 0.f;
#pragma unroll 1
    for (int from = 0; from < neurons.count; from += kListed) {
      neurons.list(p, c, from);
      if (thread == 0) p.trace.mark(2);
#if defined(TWELL_FEW_TRACE)
      ring.wait_full();
      if (thread == 0) p.trace.mark(3);
#endif
      multiply<Half>(sum, ring, stages, min(kListed, neurons.count - from));
    }
    if (thread == 0) p.trace.mark(4);
    __syncwarp();
    cluster_wait();
    if (warp * 16 < p.tokens) {
#pragma unroll
      for (int j = 0; j < kBounds; ++j) {
        const int owner = Share::owner(j);
        const uint32_t to = exchange + Share::slot(owner, split, j - Share::first(owner)) * kBoundBytes + thread * 16;
        if constexpr (kSends) {
          send_at_rank(to, owner, sum + 4 * j, &c.sums);
        } else {
          store_at_rank(to, owner, sum + 4 * j);
        }
      }
    }
    __syncwarp();
  }
  if constexpr (kSends) {
    wait_for_sent(&c.sums);
  } else {
    cluster_arrive();
    cluster_wait();
  }
  if (thread == 0) p.trace.mark(5);
  finish<Half, kSplits>(p, exchange, slice, split);
  if (thread == 0) p.trace.mark(6);
#endif
}

template <typename Half, int kSplits>
cudaError_t launch(const DecodePlan& plan, const FewDownParams& p, cudaStream_t stream) {
  const int slices = (p.hidden + kColumns - 1) / kColumns;
  const Launch launch{dim3(slices * kSplits), kThreads, kShared, kSplits};
  return launch_kernel(few_down_kernel<Half, kSplits>, launch, p, plan.kernels, stream);
}

template <typename Half>
cudaError_t launch_for(const DecodePlan& plan, const FewDownParams& p, int splits, cudaStream_t stream) {
  if (splits == 1) return launch<Half, 1>(plan, p, stream);
  if (splits == 2) return launch<Half, 2>(plan, p, stream);
  if (splits == 3) return launch<Half, 3>(plan, p, stream);
  if (splits == 4) return launch<Half, 4>(plan, p, stream);
  return launch<Half, 8>(plan, p, stream);
}

}  // namespace

cudaError_t launch_few_down(const Ffn& ffn, const DecodePlan& plan, const Device& device, void* workspace,
                            cudaStream_t stream) {
  FewDownParams p{};
  static_cast<DownParams&>(p) = down_params(ffn, plan, workspace);
  p.groups = plan.groups;
  p.trace = Trace::next();
  const int splits = plan.kernels.few_splits > 0 ? plan.kernels.few_splits : choose_few_splits(ffn, device);
  return ffn.dtype == DType::kBFloat16 ? launch_for<__nv_bfloat16>(plan, p, splits, stream)
                                       : launch_for<__half>(plan, p, splits, stream);
}

}  // namespace twell::decoding
