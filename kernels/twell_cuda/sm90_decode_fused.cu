// A decode call of few tokens in one kernel, for Hopper: y = h Wd^T + bd with h = relu(x Wg^T + bg) * (x Wu^T +
// bu).
//
// A thread block owns neighbouring neurons. Their gate rows do not depend on the kernel ahead, so they come before it
// has ended: by bulk copies, a few at a time, into shared memory; the first 16 go on into registers, as tensor-core
// operands. So two blocks share a multiprocessor, this call's and the next one's. Once x is there, eight warps share
// out k and add up through shared memory. Rows of Wu and Wd of the active neurons are asked for together, so that one
// latency covers both. Each thread then owns eight columns of y, and the blocks add up their shares
// (sm90_decode_fused_sum.cuh).
//
// Within each 32 consecutive k, lane q of four takes 8 consecutive ones (16 bytes) of weights and activations alike:
// both operands see the same permutation of k, so no data moves between lanes.

#include <mutex>
#include <unordered_map>

#include "sm90_decode_fused_gate.cuh"
#include "sm90_decode_fused_list.cuh"

namespace twell::decoding {
namespace {

using namespace fused;

template <typename Half, int kTokens>
__global__ void __launch_bounds__(kThreads, 2) fused_kernel(const __grid_constant__ FusedParams p) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ __align__(128) char shared[];
  auto& sums = *reinterpret_cast<Sums<kTokens>*>(shared);  // once the gate's rows there are multiplied
  char* const rows = shared + sizeof sums;                 // of up and down, then too
  __shared__ Control c;

  const int thread = threadIdx.x;
  const Lane l = this_lane();
  const Neurons own = neurons_of(p, blockIdx.x);
  float sum[kTiles][4] = {};
  uint4 x[kSteps];
  const unsigned long long meeting_before = multiply_gate<Half>(p, c, shared, l, own, sum, x);
  leave_sums(sums, sum, own.tiles(), l);
  p.trace.mark(kGateSums);

  ActiveRows active(0, false, 0);
  sm90::Ring ring(c.full, c.empty, 1), ring_out = ring;
  int supplied = 0;
  const auto plan_rows = [&] {
    active = ActiveRows(c.active, p.up != nullptr, p.row_places);
    ring.stages = ring_out.stages = min(kMaxStages, p.row_places / active.per);
  };
  const auto supply_row = [&] {
    const int stage = supplied++, stage_rows = active.rows(stage);
    const int neuron = l.lane < stage_rows ? c.list[active.first_row(stage) + l.lane] : 0;
    ring_out.wait_empty();
    ask_for(ring_out.full + ring_out.stage, rows + ring_out.stage * active.per * p.row_stride,
            row_of(stage < active.up_stages ? p.up : p.down, own.first + neuron, p), stage_rows, p);
    ring_out.advance();
  };
  if (l.warp == 0) {
    list_active(p, c, sums, own.count);
    plan_rows();
    while (supplied < min(active.stages, ring.stages)) supply_row();
    p.trace.mark(kListed);
  }
  if (thread == kThreads - 1) number_call(p, c, meeting_before);
  __syncthreads();
  if (l.warp != 0) plan_rows();
  const uint64_t seal = c.seal;
  const uint32_t loud = kQuiet<kTokens> ? c.loud : ~0u;
  if (kQuiet<kTokens> && thread < p.tokens && (loud >> thread & 1) == 0) {
    store_silence(p.silences + thread * gridDim.x + blockIdx.x, seal);
  }

  const int threads = p.hidden / kThreadColumns;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) sum[m][0] = sum[m][1] = sum[m][2] = sum[m][3] = 0.f;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    if (m >= active.tiles) break;
    multiply_stages<Half>(sum[m], x, l, ring, rows, active, m, p);
    for (int i = 0; i < 2; ++i) {
      if (l.warp == 0 && supplied < active.stages) supply_row();
    }
  }
  if (active.tiles > 0) {
    p.trace.mark(kRowsThere);
    leave_sums(sums, sum, active.tiles, l);
    const auto multiply_value = [&](int i) {
      if (i >= active.active * kTokens) return;
      const int row = i / kTokens, token = i % kTokens, neuron = c.list[row];
      float* const value = reinterpret_cast<float*>(sums.values + neuron) + token;
      if (*value == 0.f) return;
      const int tile = row / (2 * active.per), in_tile = row % (2 * active.per);
      const int high = in_tile >= active.per, element = tile * 8 + sums.place(in_tile - high * active.per, token / 2);
      float u = 0.f;
#pragma unroll
      for (int s = 0; s < kDecodeWarps; ++s) {
        u += reinterpret_cast<const float*>(sums.slots[s][token / 2] + element)[2 * high + token % 2];
      }
      *value *= u + c.b_up[neuron];
    };
#pragma unroll
    for (int first = 0; first < kFusedMaxRows * kTokens; first += kThreads) multiply_value(first + thread);
    __syncthreads();
    p.trace.mark(kUpSums);
  }

  const uint64_t silence = kQuiet<kTokens> ? ask_early<kTokens>(p) : 0;
  float y[kTokens][kThreadColumns] = {};
  for (int begin = 0; begin < active.active; begin += active.per) {
    ring.wait_full();
    const char* at = rows + ring.stage * active.per * p.row_stride + thread * 16;
    const auto multiply_row = [&](int r) {
      const uint4 words = *reinterpret_cast<const uint4*>(at);
      const float2 column[4] = {sm90::unpack<Half>(words.x), sm90::unpack<Half>(words.y), sm90::unpack<Half>(words.z),
                                sm90::unpack<Half>(words.w)};
      const auto h = sums.values[c.list[r]];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int q = 0; q < kTokens / 2; ++q) {
          y[2 * q][2 * i] += h.pair[q].x * column[i].x, y[2 * q][2 * i + 1] += h.pair[q].x * column[i].y;
          y[2 * q + 1][2 * i] += h.pair[q].y * column[i].x, y[2 * q + 1][2 * i + 1] += h.pair[q].y * column[i].y;
        }
      }
      at += p.row_stride;
    };
    const int end = thread < threads ? min(active.active, begin + active.per) : begin;
    int r = begin;
    if constexpr (kTokens > 2) {
      constexpr int kTogether = 16 / kTokens;  // so that loads run ahead of products
      for (; r + kTogether <= end; r += kTogether) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) multiply_row(r + i);
      }
    }
#pragma unroll 1
    for (; r < end; ++r) multiply_row(r);
    release(ring.empty + ring.stage, l.lane);
    ring.advance();
    if (l.warp == 0 && supplied < active.stages) supply_row();
  }
  if (thread < threads) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= p.tokens) break;
      if (kQuiet<kTokens> && (loud >> t & 1) == 0) continue;
      uint4* const to = p.shares + (blockIdx.x * p.tokens + t) * (p.hidden / 2) + thread;
#pragma unroll
      for (int i = 0; i < 4; ++i) store_sealed(to + i * threads, y[t][2 * i], y[t][2 * i + 1], seal);
    }
  }
  p.trace.mark(kGiven);
  add_up_all<Half, kTokens>(p, c, reinterpret_cast<float2*>(shared), silence);
  p.trace.mark(kStored);
#endif
}

// The workspace's word, or -1 once there is none left.
int meeting_of(const void* workspace) {
  static std::mutex mutex;
  static std::unordered_map<const void*, int> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(workspace);
  if (found != known.end()) return found->second;
  const int next = static_cast<int>(known.size());
  return next < kMeetings ? known.emplace(workspace, next).first->second : -1;
}

template <int kTokens>
cudaError_t launch_for(const Ffn& ffn, FusedParams p, const Launch& launch, const Kernels& kernels,
                       cudaStream_t stream) {
  p.row_places = (kFusedRingBytes - static_cast<int>(sizeof(Sums<kTokens>))) / static_cast<int>(p.row_stride);
  const bool bfloat16 = ffn.dtype == DType::kBFloat16;
  return launch_kernel(bfloat16 ? fused_kernel<__nv_bfloat16, kTokens> : fused_kernel<__half, kTokens>, launch, p,
                       kernels, stream);
}

}  // namespace

cudaError_t launch_fused(const Ffn& ffn, const DecodePlan& plan, const Device& device, void* workspace,
                         cudaStream_t stream) {
  const int meeting = meeting_of(workspace);
  if (meeting < 0 || !takes_fused(ffn, device)) {
    DecodePlan other = plan;
    other.kernels.fused.use = false;
    const cudaError_t error = launch_gate_up(ffn, other, device, workspace, stream);
    return error != cudaSuccess ? error : launch_down(ffn, other, device, workspace, stream);
  }
  FusedParams p{};
  p.x = static_cast<const char*>(ffn.x);
  p.gate = static_cast<const char*>(ffn.gate);
  p.up = static_cast<const char*>(ffn.up);
  p.down = static_cast<const char*>(ffn.down);
  p.b_gate = ffn.b_gate, p.b_up = ffn.b_up, p.b_down = ffn.b_down;
  p.shares = static_cast<uint4*>(workspace);
  p.tokens = static_cast<int>(ffn.tokens), p.hidden = ffn.hidden, p.width = ffn.width;
  p.row_bytes = 2u * static_cast<uint32_t>(ffn.hidden);
  p.row_stride = static_cast<uint32_t>(fused_row_stride(ffn));
  const int grid = fused_blocks(ffn, device.sm_count);
  p.units = fused_units(ffn, grid);
  p.silences = reinterpret_cast<uint64_t*>(p.shares + int64_t{grid} * p.tokens * (p.hidden / 2));
  p.y = ffn.y;
  const int portion_bytes = kPortionRows * static_cast<int>(p.row_bytes);
  const Kernels::Fused& how = plan.kernels.fused;
  p.window = how.window_bytes > portion_bytes ? how.window_bytes / portion_bytes : 1;
  p.held_at = kFusedRingBytes / static_cast<int>(p.row_stride) - kHeldRows;
  p.patience = how.patience;
  p.meeting = static_cast<uint32_t>(meeting);
  p.trace = Trace::next();
  const Launch launch{dim3(static_cast<unsigned>(grid)), kThreads, kFusedRingBytes};
  return (p.tokens <= 2 ? launch_for<2> : launch_for<4>)(ffn, p, launch, plan.kernels, stream);
}

}  // namespace twell::decoding
