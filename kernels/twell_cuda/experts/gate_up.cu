// First of the two kernels of routed experts: groups of visits, and h = relu(gate) * up of their active neurons
// (experts/experts.h says what is left where).
//
// Thread blocks walk items of a group and one or two tiles of 16 neurons, neighbouring blocks neighbouring neurons. x
// of a large group is as many bytes as a tile's weights: two tiles share it, and of the largest groups each thread
// block takes two items in a row, for what L1 still holds of it. Of an item, the gate's rows come once, straight into
// tensor-core operands, then up's rows of the neurons that any of the group's visits activates. Warps share out k by
// pieces of 64 bytes, and add up through shared memory. Within a piece lane q of four takes 16 consecutive bytes, of
// weights and of x: both operands see the same permutation of k.

#include <type_traits>

#include "decode/gate.cuh"
#include "decode/launch.h"
#include "decode/reduce.cuh"
#include "experts/routing.cuh"

namespace twell::experts {
namespace {

using namespace decoding;

constexpr uint32_t kPieceBytes = 64, kStepBytes = kDecodeWarps * kPieceBytes;  // of a row: a piece for each warp
constexpr uint32_t kNoRow = 0xffffffff;

constexpr int residents(int tiles) { return tiles == 2 ? 2 : 3; }
__host__ __device__ constexpr int max_run(int octets) { return octets >= 3 ? 2 : 1; }  // items in a row

// Steps in flight.
template <int kTiles, int kOctets>
struct Ahead {
  static constexpr int weights = 4 / kTiles;
  static constexpr int x = kOctets == 1 ? 4 : 2 / kTiles;
  static_assert(weights % x == 0, "a step's place in what is in flight is known when it is compiled");
};

// The two rows of each tile that a lane reads: lane / 4 and lane / 4 + 8.
template <int kTiles>
struct Rows {
  const char* at[2 * kTiles];
};

// sum[tile * kOctets + octet] = the rows of weights times x of the group's visits.
// `x_row`: where x of visit lane / 4 of each octet begins.
template <typename Half, int kTiles, int kOctets>
__device__ __forceinline__ void multiply(float (&sum)[kTiles * kOctets][4], const Rows<kTiles>& rows,
                                         const uint32_t (&x_row)[kOctets], const Params& p) {
  constexpr int kAhead = Ahead<kTiles, kOctets>::weights, kXAhead = Ahead<kTiles, kOctets>::x;
  const uint32_t row_bytes = 2u * p.call.hidden, of_warp = threadIdx.x / 32 * kPieceBytes;
  const uint32_t of_lane = threadIdx.x % 4 * 16;
  const char* const x = static_cast<const char*>(p.call.x);
  uint4 a[kAhead][2 * kTiles], b[kXAhead][kOctets];
  const auto load_a = [&](uint4(&to)[2 * kTiles], uint32_t k) {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) load_weights(to[i], rows.at[i] + k, k < row_bytes);
  };
  const auto load_b = [&](uint4(&to)[kOctets], uint32_t k) {
#pragma unroll
    for (int n = 0; n < kOctets; ++n) load_tokens(to[n], x + x_row[n] + k, k < row_bytes && x_row[n] != kNoRow);
  };
#pragma unroll
  for (auto& each : sum) each[0] = each[1] = each[2] = each[3] = 0.f;
#pragma unroll
  for (int u = 0; u < kAhead; ++u) load_a(a[u], of_warp + of_lane + u * kStepBytes);
#pragma unroll
  for (int u = 0; u < kXAhead; ++u) load_b(b[u], of_warp + of_lane + u * kStepBytes);
#pragma unroll 1
  for (uint32_t base = of_warp; base < row_bytes; base += kAhead * kStepBytes) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const uint32_t piece = base + u * kStepBytes, k = piece + of_lane;
      if (piece >= row_bytes) break;  // the same for the whole warp
      auto& x_piece = b[u % kXAhead];
#pragma unroll
      for (int i = 0; i < kTiles * kOctets; ++i) {
        const uint4 &low = a[u][i / kOctets * 2], &high = a[u][i / kOctets * 2 + 1], &of_x = x_piece[i % kOctets];
        mma<Half>(sum[i], low.x, high.x, low.y, high.y, of_x.x, of_x.y);
        mma<Half>(sum[i], low.z, high.z, low.w, high.w, of_x.z, of_x.w);
      }
      load_b(x_piece, k + kXAhead * kStepBytes);
      load_a(a[u], k + kAhead * kStepBytes);
    }
  }
}

template <typename Half, int kTiles, int kOctets>
__global__ void __launch_bounds__(kDecodeThreads, residents(kTiles)) gate_up_kernel(const __grid_constant__ Params p) {
  constexpr int kNeurons = kTiles * kBlockNeurons;
  // Of two tiles and four octets, a slot for each warp would not fit into 48 KB.
  constexpr int kSlots = kTiles == 1 ? kDecodeWarps : kDecodeWarps / 2;
  constexpr int kElements = kTiles * kOctets * 32;  // of four sums
  constexpr int kRoom = 8 * kOctets;                // visits
  __shared__ Routed routed;
  __shared__ float4 slots[kSlots * kElements], gate[kElements];
  __shared__ uint32_t mask[kTiles];     // of the item's neurons
  __shared__ uint8_t active[kNeurons];  // in ascending order
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

  const int of_group = (p.blocks + kTiles - 1) / kTiles, items = routed.to.routed * of_group, grid = gridDim.x;
  const int run = max(1, min(max_run(kOctets), items / (4 * grid)));  // not at the cost of even shares
#pragma unroll 1
  for (int item = blockIdx.x * run; item < items; item += (item + 1) % run == 0 ? (grid - 1) * run + 1 : 1) {
    const int g = item / of_group, block = (item - g * of_group) * kTiles, first = block * kBlockNeurons;
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
    if (thread < kTiles) mask[thread] = 0;
    {
      Rows<kTiles> rows;
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) rows.at[i] = row_at(call.gate, first + i * 8 + lane / 4);
      float sum[kTiles * kOctets][4];
      multiply<Half, kTiles, kOctets>(sum, rows, x_row, p);
      leave_partials<kSlots>(slots, sum, warp, lane);
    }
    for (int e = thread; e < kElements; e += kDecodeThreads) {  // whole warps; e % 32 == lane
      float4 v = sum_of_partials<kSlots>(slots, kElements, e);
      const int tile = e / 32 / kOctets, neuron = first + tile * kBlockNeurons + lane / 4;
      const int slot = e / 32 % kOctets * 8 + lane % 4 * 2;
      v.x = activate(v.x, 0.f, neuron < call.width && slot < group.visits);
      v.y = activate(v.y, 0.f, neuron < call.width && slot + 1 < group.visits);
      v.z = activate(v.z, 0.f, neuron + 8 < call.width && slot < group.visits);
      v.w = activate(v.w, 0.f, neuron + 8 < call.width && slot + 1 < group.visits);
      gate[e] = v;
      const uint32_t low = any_of_four(v.x != 0.f || v.y != 0.f), high = any_of_four(v.z != 0.f || v.w != 0.f);
      if (lane == 0) atomicOr(&mask[tile], low | high << 8);
    }
    __syncthreads();

    uint32_t mine = 0;  // bit i: neuron `first` + i
#pragma unroll
    for (int m = 0; m < kTiles; ++m) mine |= mask[m] << m * kBlockNeurons;
    const int active_count = __popc(mine);
    uint16_t* const masks = p.masks + int64_t{2} * p.mask_pairs * g + block;
    if (thread < kTiles) masks[thread] = static_cast<uint16_t>(mask[thread]);
    if (kTiles == 1 && thread == 0 && block == p.blocks - 1 && p.blocks % 2 == 1) masks[1] = 0;
    if (active_count > 0) {
      if (thread < kNeurons && (mine >> thread & 1) != 0) {
        active[__popc(mine & ((1u << thread) - 1))] = static_cast<uint8_t>(thread);
      }
      __syncthreads();
      if (active_count <= kTiles * p.prefetch_max_active) {
        for (int i = warp; i < active_count; i += kDecodeWarps) {
          const char* const row = row_at(call.down, first + active[i]);
          for (uint32_t byte = lane * 128; byte < row_bytes; byte += 32 * 128) prefetch_l2(row + byte);
        }
      }
      const auto multiply_up = [&](auto tiles) {
        constexpr int kUpTiles = decltype(tiles)::value;
        Rows<kUpTiles> rows;
#pragma unroll
        for (int i = 0; i < 2 * kUpTiles; ++i) {
          rows.at[i] = row_at(call.up, first + active[min(i * 8 + lane / 4, active_count - 1)]);
        }
        float sum[kUpTiles * kOctets][4];
        multiply<Half, kUpTiles, kOctets>(sum, rows, x_row, p);
        leave_partials<kSlots>(slots, sum, warp, lane);
      };
      const bool one_tile = active_count <= kBlockNeurons;
      if (one_tile) {
        multiply_up(std::integral_constant<int, 1>{});
      } else if constexpr (kTiles == 2) {
        multiply_up(std::integral_constant<int, 2>{});
      }
      const int up_elements = (one_tile ? 1 : kTiles) * kOctets * 32;
      for (int i = thread; i < kTiles * kQuadsPerBlock * kRoom; i += kDecodeThreads) {
        const int tile = i / kRoom / kQuadsPerBlock, quad = i / kRoom % kQuadsPerBlock, slot = i % kRoom;
        const int rest = __popc(mask[tile]) - 4 * quad;  // neurons from this quad on
        if (rest <= 0) continue;
        const int rank = 4 * quad + (tile == 1 ? __popc(mask[0]) : 0);
        float h[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (j >= rest) break;
          h[j] = sum_at<kOctets>(gate, active[rank + j], slot);
          if (h[j] == 0.f) continue;
          float up = sum_at<kOctets>(slots, rank + j, slot);
#pragma unroll
          for (int s = 1; s < kSlots; ++s) up += sum_at<kOctets>(slots + s * up_elements, rank + j, slot);
          h[j] *= up;
        }
        p.products[((int64_t{g} * p.blocks + block + tile) * kQuadsPerBlock + quad) * kRoom + slot] =
            make_uint2(pack<Half>(h[0], h[1]), pack<Half>(h[2], h[3]));
      }
    }
    __syncthreads();  // the next item's sums and lists go where this one's are
  }
}

template <typename Half, int kTiles, int kOctets>
cudaError_t launch(const Plan& plan, const Params& p, const Device& device, cudaStream_t stream) {
  const int64_t items = int64_t{plan.groups} * ((plan.blocks + kTiles - 1) / kTiles);
  const int64_t most = int64_t{residents(kTiles)} * device.sm_count;
  const dim3 grid(static_cast<unsigned>(items < most ? items : most));
  return launch_decode_kernel(gate_up_kernel<Half, kTiles, kOctets>, {grid}, p, kernels_of(plan, device), stream);
}

template <typename Half>
cudaError_t launch_type(const Plan& plan, const Params& p, const Device& device, cudaStream_t stream) {
  switch (plan.octets) {
    case 1: return launch<Half, 1, 1>(plan, p, device, stream);
    case 2:
      return plan.tiles == 1 ? launch<Half, 1, 2>(plan, p, device, stream)
                             : launch<Half, 2, 2>(plan, p, device, stream);
    case 3: return launch<Half, 2, 3>(plan, p, device, stream);
    default: return launch<Half, 2, 4>(plan, p, device, stream);  // from three octets on: two tiles
  }
}

}  // namespace

cudaError_t launch_gate_up(const Plan& plan, const Params& p, const Device& device, cudaStream_t stream) {
  return p.call.dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(plan, p, device, stream)
                                          : launch_type<__half>(plan, p, device, stream);
}

}  // namespace twell::experts
