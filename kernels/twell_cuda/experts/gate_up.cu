// First of the two kernels of routed experts: groups of visits, and h = relu(gate) * up of their active neurons
// (experts/experts.h says what is left where).
//
// Thread blocks walk items of a group and 16 neurons, neighbouring blocks neighbouring neurons; of large groups each
// takes several in a row, so that L1 still holds x. Of an item, the gate's rows come once, straight into tensor-core
// operands, then up's rows of the neurons that any of the group's visits activates. Warps share out k by pieces of 64
// bytes, and add up through shared memory. Within a piece lane q of four takes 16 consecutive bytes, of weights and of
// x: both operands see the same permutation of k.

#include "decode/gate.cuh"
#include "decode/launch.h"
#include "decode/reduce.cuh"
#include "experts/routing.cuh"

namespace twell::experts {
namespace {

using namespace decoding;

constexpr uint32_t kPieceBytes = 64, kStepBytes = kDecodeWarps * kPieceBytes;  // of a row: a piece for each warp
constexpr int kAhead = 4;                                                      // steps of weights in flight
template <int kOctets>
constexpr int kXAhead = kOctets == 1 ? 4 : 2;
constexpr uint32_t kNoRow = 0xffffffff;
template <int kOctets>
constexpr int kMaxRun = kOctets == 4 ? 4 : 1;  // items in a row

constexpr int residents(int octets) { return octets == 4 ? 2 : 3; }

// sum[octet] = two rows of weights for this lane, lane / 4 and lane / 4 + 8 of 16, times x of the group's visits.
// `x_row`: where x of visit lane / 4 of each octet begins.
template <typename Half, int kOctets>
__device__ __forceinline__ void multiply(float (&sum)[kOctets][4], const char* low, const char* high,
                                         const uint32_t (&x_row)[kOctets], const Params& p) {
  const uint32_t row_bytes = 2u * p.call.hidden, of_warp = threadIdx.x / 32 * kPieceBytes;
  const uint32_t of_lane = threadIdx.x % 4 * 16;
  const char* const x = static_cast<const char*>(p.call.x);
  uint4 a[kAhead][2], b[kXAhead<kOctets>][kOctets];
  const auto load_a = [&](uint4(&to)[2], uint32_t k) {
    load_weights(to[0], low + k, k < row_bytes);
    load_weights(to[1], high + k, k < row_bytes);
  };
  const auto load_b = [&](uint4(&to)[kOctets], uint32_t k) {
#pragma unroll
    for (int n = 0; n < kOctets; ++n) load_tokens(to[n], x + x_row[n] + k, k < row_bytes && x_row[n] != kNoRow);
  };
#pragma unroll
  for (int n = 0; n < kOctets; ++n) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.f;
#pragma unroll
  for (int u = 0; u < kAhead; ++u) load_a(a[u], of_warp + of_lane + u * kStepBytes);
#pragma unroll
  for (int u = 0; u < kXAhead<kOctets>; ++u) load_b(b[u], of_warp + of_lane + u * kStepBytes);
#pragma unroll 1
  for (uint32_t base = of_warp; base < row_bytes; base += kAhead * kStepBytes) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const uint32_t piece = base + u * kStepBytes, k = piece + of_lane;
      if (piece >= row_bytes) break;  // the same for the whole warp
      auto& x_piece = b[u % kXAhead<kOctets>];
#pragma unroll
      for (int n = 0; n < kOctets; ++n) {
        mma<Half>(sum[n], a[u][0].x, a[u][1].x, a[u][0].y, a[u][1].y, x_piece[n].x, x_piece[n].y);
        mma<Half>(sum[n], a[u][0].z, a[u][1].z, a[u][0].w, a[u][1].w, x_piece[n].z, x_piece[n].w);
      }
      load_b(x_piece, k + kXAhead<kOctets> * kStepBytes);
      load_a(a[u], k + kAhead * kStepBytes);
    }
  }
}

template <typename Half, int kOctets>
__global__ void __launch_bounds__(kDecodeThreads, residents(kOctets)) gate_up_kernel(const __grid_constant__ Params p) {
  constexpr int kElements = kOctets * 32;  // of four sums
  constexpr int kRoom = 8 * kOctets;       // visits
  __shared__ Routed routed;
  __shared__ float4 slots[kDecodeWarps * kElements], gate[kElements];
  __shared__ uint32_t mask;                  // of the item's neurons
  __shared__ uint8_t active[kBlockNeurons];  // in ascending order
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const Experts& call = p.call;
  const uint32_t row_bytes = 2u * call.hidden;

  wait_for_previous_kernel();
  let_next_kernel_start();
  route(routed, call, kRoom);
  if (blockIdx.x == 0) {
    constexpr int kWords = sizeof(Routing) / 4;
    static_assert(sizeof(Routing) % 4 == 0);
    for (int i = thread; i < kWords; i += kDecodeThreads) {
      reinterpret_cast<uint32_t*>(p.routing)[i] = reinterpret_cast<const uint32_t*>(&routed.to)[i];
    }
  }
  for (int i = blockIdx.x * kDecodeThreads + thread; i < p.slices * call.tokens; i += gridDim.x * kDecodeThreads) {
    p.arrivals[i] = 0;
  }

  const int items = routed.to.routed * p.blocks, grid = gridDim.x;
  const int run = max(1, min(kMaxRun<kOctets>, items / (4 * grid)));  // not at the cost of even shares
#pragma unroll 1
  for (int item = blockIdx.x * run; item < items; item += (item + 1) % run == 0 ? (grid - 1) * run + 1 : 1) {
    const int g = item / p.blocks, block = item - g * p.blocks, first = block * kBlockNeurons;
    const Group group = unpack_group(routed.to.group[g]);
    uint32_t x_row[kOctets];
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const int slot = n * 8 + lane / 4;
      x_row[n] = slot < group.visits
                     ? static_cast<uint32_t>(routed.to.order[group.first + slot] / call.top_k) * row_bytes
                     : kNoRow;
    }
    // Rows that are not there: one that other lanes read anyway, whose sums are not used.
    const auto row_at = [&](const ExpertRows& rows, int neuron) {
      return rows.data + group.expert * rows.expert_bytes + min(neuron, call.width - 1) * rows.row_bytes;
    };
    if (thread == 0) mask = 0;
    float sum[kOctets][4];
    multiply<Half, kOctets>(sum, row_at(call.gate, first + lane / 4), row_at(call.gate, first + lane / 4 + 8), x_row,
                            p);
    leave_partials<kDecodeWarps>(slots, sum, warp, lane);
    for (int e = thread; e < kElements; e += kDecodeThreads) {  // whole warps; e % 32 == lane
      float4 v = sum_of_partials<kDecodeWarps>(slots, kElements, e);
      const int neuron = first + lane / 4, slot = e / 32 * 8 + lane % 4 * 2;
      v.x = activate(v.x, 0.f, neuron < call.width && slot < group.visits);
      v.y = activate(v.y, 0.f, neuron < call.width && slot + 1 < group.visits);
      v.z = activate(v.z, 0.f, neuron + 8 < call.width && slot < group.visits);
      v.w = activate(v.w, 0.f, neuron + 8 < call.width && slot + 1 < group.visits);
      gate[e] = v;
      const uint32_t low = any_of_four(v.x != 0.f || v.y != 0.f), high = any_of_four(v.z != 0.f || v.w != 0.f);
      if (lane == 0) atomicOr(&mask, low | high << 8);
    }
    __syncthreads();

    const uint32_t mine = mask;
    const int active_count = __popc(mine);
    uint16_t* const masks = p.masks + int64_t{2} * p.mask_pairs * g;
    if (thread == 0) masks[block] = static_cast<uint16_t>(mine);
    if (thread == 0 && block == p.blocks - 1 && p.blocks % 2 == 1) masks[p.blocks] = 0;
    if (active_count > 0) {
      if (thread < kBlockNeurons && (mine >> thread & 1) != 0) {
        active[__popc(mine & ((1u << thread) - 1))] = static_cast<uint8_t>(thread);
      }
      __syncthreads();
      if (active_count <= p.prefetch_max_active) {
        for (int i = warp; i < active_count; i += kDecodeWarps) {
          const char* const row = row_at(call.down, first + active[i]);
          for (uint32_t byte = lane * 128; byte < row_bytes; byte += 32 * 128) prefetch_l2(row + byte);
        }
      }
      const auto up_row = [&](int rank) { return row_at(call.up, first + active[min(rank, active_count - 1)]); };
      multiply<Half, kOctets>(sum, up_row(lane / 4), up_row(lane / 4 + 8), x_row, p);
      leave_partials<kDecodeWarps>(slots, sum, warp, lane);
      for (int i = thread; i < kQuadsPerBlock * kRoom; i += kDecodeThreads) {
        const int quad = i / kRoom, slot = i % kRoom;
        if (4 * quad >= active_count) break;
        float h[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int rank = 4 * quad + j;
          if (rank >= active_count) break;
          h[j] = sum_at<kOctets>(gate, active[rank], slot);
          if (h[j] == 0.f) continue;
          float up = sum_at<kOctets>(slots, rank, slot);
#pragma unroll
          for (int s = 1; s < kDecodeWarps; ++s) up += sum_at<kOctets>(slots + s * kElements, rank, slot);
          h[j] *= up;
        }
        p.products[((int64_t{g} * p.blocks + block) * kQuadsPerBlock + quad) * kRoom + slot] =
            make_uint2(pack<Half>(h[0], h[1]), pack<Half>(h[2], h[3]));
      }
    }
    __syncthreads();  // the next item's sums and lists go where this one's are
  }
}

template <typename Half, int kOctets>
cudaError_t launch(const Plan& plan, const Params& p, const Device& device, cudaStream_t stream) {
  const int64_t items = int64_t{plan.groups} * plan.blocks, most = int64_t{residents(kOctets)} * device.sm_count;
  const dim3 grid(static_cast<unsigned>(items < most ? items : most));
  return launch_decode_kernel(gate_up_kernel<Half, kOctets>, {grid}, p, kernels_of(plan, device), stream);
}

template <typename Half>
cudaError_t launch_type(const Plan& plan, const Params& p, const Device& device, cudaStream_t stream) {
  switch (plan.octets) {
    case 1: return launch<Half, 1>(plan, p, device, stream);
    case 2: return launch<Half, 2>(plan, p, device, stream);
    default: return launch<Half, 4>(plan, p, device, stream);
  }
}

}  // namespace

cudaError_t launch_gate_up(const Plan& plan, const Params& p, const Device& device, cudaStream_t stream) {
  return p.call.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(plan, p, device, stream)
                                          : launch_type<__half>(plan, p, device, stream);
}

}  // namespace twell::experts
