// A decode call of few tokens in one kernel, for Hopper: y = h Wd^T + bd with h = relu(x Wg^T + bg) * (x Wu^T +
// bu).
//
// A thread block owns neighbouring neurons. Their gate rows do not depend on the kernel ahead, so they come before it
// has ended: by bulk copies, a few at a time, into shared memory; the first 16 go on into registers, as tensor-core
// operands (sm90/decode/fused_gate.cuh). So two blocks share a multiprocessor,
// this call's and the next one's. Once x is there, eight warps share out k and add up through shared memory. Rows of Wu
// and Wd of the active neurons are asked for together, so that one latency covers both: by each thread for itself where
// they are few, else in stages (sm90/decode/fused_active.cuh). Each thread then owns eight
// columns of y, and the blocks add up their shares (sm90/decode/fused_sum.cuh).
//
// Within each 64 consecutive bytes of weights, lane q of four takes 16 consecutive ones, and the activations of the
// same k: both operands see the same permutation of k, so no data moves between lanes. `Weight` is the call's own type,
// or an 8-bit one.

#include <mutex>
#include <unordered_map>

#include "decode/decode.h"
#include "decode/launch.h"
#include "sm90/decode/fused_gate.cuh"
#include "sm90/decode/fused_active.cuh"

namespace twell::decoding {
namespace {

using namespace fused;

template <typename Half, typename Weight, int kTokens>
__global__ void __launch_bounds__(kThreads, 2) fused_kernel(const __grid_constant__ FusedParams p) {
#if defined(TWELL_SM90_DEVICE)
  extern __shared__ __align__(128) char shared[];
  auto& sums = *reinterpret_cast<Sums<kTokens>*>(shared);
  char* const rows = shared + sizeof sums;  // of up and down, once the gate's rows there are multiplied
  __shared__ Control c;

  const Lane l = this_lane();
  const Neurons own = neurons_of(p, blockIdx.x);
  float y[kTokens][kThreadColumns] = {};
  uint64_t silence = 0;
  uint32_t loud;
  {
    float sum[kTiles][4] = {};
    uint4 x[kXPieces];
    if constexpr (kScaled<Weight>) {
      multiply_narrow_gate<Half, Weight>(p, c, rows, l, own, sum, x);
    } else {
      multiply_gate<Half, Weight, kTokens == 2>(p, c, Sums<kTokens>::kOverGate ? shared : rows, l, own, sum, x);
    }
    if (Sums<kTokens>::kOverGate) __syncthreads();  // all have read the rows there
    // Whoever passes its barrier may write where the gate's rows were, by bulk copies too: each warp has left sums
    // that need all that it read.
    leave_sums(sums, sum, own.tiles(), l);
    const Active<kTokens> active = find_active<Weight>(p, c, sums, own.count);
    loud = active.loud;
    if (kQuiet<kTokens> && threadIdx.x < p.tokens && (loud >> threadIdx.x & 1) == 0) {
      store_silence(p.silences + threadIdx.x * gridDim.x + blockIdx.x, c.seal);
    }
    if (active.count() == 0) {
      if constexpr (kQuiet<kTokens>) silence = ask_early<kTokens>(p);
    } else if (active.count() <= kOwnRows) {
      multiply_own<Half, Weight>(y, p, c, rows, l, own, x, active, silence);
    } else {
      multiply_staged<Half, Weight>(y, p, c, sums, rows, l, own, x, active, silence);
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (t < p.tokens && (loud >> t & 1) != 0) store_share(p, t, y[t], c.seal);
  }
  add_up_all<Half, Weight, kTokens>(p, c, reinterpret_cast<float2*>(shared), silence);
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

template <typename Half, int kTokens>
auto kernel_of(DType weights) {
  if constexpr (kTokens <= kFusedMaxNarrowTokens) {
    if (weights == DType::kInt8) return fused_kernel<Half, int8_t, kTokens>;
    if (weights == DType::kE4m3) return fused_kernel<Half, E4m3, kTokens>;
  }
  return fused_kernel<Half, Half, kTokens>;
}

template <int kTokens>
cudaError_t launch_for(const Ffn& ffn, FusedParams p, const Launch& launch, const Kernels& kernels,
                       cudaStream_t stream) {
  p.row_places = (kFusedSharedBytes - static_cast<int>(sizeof(Sums<kTokens>))) / static_cast<int>(p.row_stride);
  const auto kernel = ffn.dtype == DType::kBFloat16 ? kernel_of<__nv_bfloat16, kTokens>(ffn.gate.dtype)
                                                    : kernel_of<__half, kTokens>(ffn.gate.dtype);
  return launch_decode_kernel(kernel, launch, p, kernels, stream);
}

}  // namespace

cudaError_t launch_fused(const Ffn& ffn, const DecodePlan& plan, const Device& device, void* workspace,
                         cudaStream_t stream) {
  const int meeting = meeting_of(workspace);
  if (meeting < 0) return cudaErrorNotSupported;
  FusedParams p{};
  p.x = static_cast<const char*>(ffn.x);
  p.gate = static_cast<const char*>(ffn.gate.data);
  p.up = static_cast<const char*>(ffn.up.data);
  p.down = static_cast<const char*>(ffn.down.data);
  p.b_gate = ffn.b_gate, p.b_up = ffn.b_up, p.b_down = ffn.b_down;
  p.s_gate = ffn.gate.scales, p.s_up = ffn.up.scales, p.s_down = ffn.down.scales;
  p.shares = static_cast<uint4*>(workspace);
  p.tokens = static_cast<int>(ffn.tokens), p.hidden = ffn.hidden, p.width = ffn.width;
  p.row_bytes = static_cast<uint32_t>(fused_row_bytes(ffn));
  p.run_stride = static_cast<uint32_t>(fused_run_stride(ffn));
  p.row_stride = static_cast<uint32_t>(round_up(p.row_bytes, 128)) + 64;
  const int grid = fused_blocks(ffn, device.sm_count);
  p.block_rows = ffn.width / grid, p.longer_blocks = ffn.width % grid;
  p.units = fused_units(ffn, grid);
  p.silences = reinterpret_cast<uint64_t*>(p.shares + int64_t{grid} * p.tokens * (p.hidden / 2));
  p.y = ffn.y;
  const int run_bytes = kRunRows * static_cast<int>(p.row_bytes);
  const Kernels::Fused& how = plan.kernels.fused;
  p.window = how.window_bytes > run_bytes ? how.window_bytes / run_bytes : 1;
  p.held_at = kFusedGateBytes / static_cast<int>(p.run_stride) - kHeldRuns;
  p.warm = how.warm;
  p.patience = how.patience;
  p.meeting = static_cast<uint32_t>(meeting);
  const Launch launch{dim3(static_cast<unsigned>(grid)), kThreads, kFusedSharedBytes};
  return (p.tokens <= 2 ? launch_for<2> : launch_for<4>)(ffn, p, launch, plan.kernels, stream);
}

}  // namespace twell::decoding
