// Second of a decode call's two kernels: y = h Wd^T + bd from what the first one left (layout: decode_plan.cuh).
//
// A thread block owns a slice of y's columns and, with `splits` of them to a slice, its own share of the neurons. Each
// of its warps takes masks in a fixed stride, lists their quads of active neurons, and multiplies the columns of those
// neurons' rows (gathered straight into registers) with h. Columns are the rows of the product, tokens its columns.
//
// A tensor-core operand wants two neurons of one column in a register, rows hold two columns of one neuron: a lane
// loads the same columns of its quad's four rows and swaps halves. Which column stands in which row of the product is
// free, so the lane keeps neighbouring columns throughout and no data moves between lanes.

#include "decode_reduce.cuh"
#include "mma.cuh"

namespace twell::decoding {
namespace {

struct DownParams {
  const char* down;
  const void* b_down;
  const uint32_t* masks;  // of two blocks each
  const char* products;
  float4* partials;
  uint32_t* arrivals;
  void* y;
  int tokens, hidden, mask_pairs;
};

constexpr int kMaxQuads = 32 * 2 * kQuadsPerBlock;  // of the 32 mask pairs that a warp lists at a time

// A quad in 32 bits: its block (12), its number in the block (2), neurons in it less one (2), their places in the block
// (4 x 4, the first lowest).
__device__ __forceinline__ int list_quads(uint32_t* list, int at, uint32_t mask, uint32_t block) {
  for (uint32_t quad = 0; mask != 0; ++quad) {
    uint32_t places = 0, count = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (mask == 0) break;
      places |= static_cast<uint32_t>(__ffs(static_cast<int>(mask)) - 1) << (4 * j);
      mask &= mask - 1;
      ++count;
    }
    list[at++] = block << 20 | quad << 18 | (count - 1) << 16 | places;
  }
  return at;
}

template <int kColumns, int kGroups>
struct Piece {  // what a lane multiplies in one step: four rows' columns, and h
  uint32_t row[4][kColumns / 2];
  uint2 h[kGroups];
};

template <typename Half, int kColumns, int kGroups>
__global__ void __launch_bounds__(kDecodeThreads, kGroups <= 2 ? (kColumns == 2 ? 3 : 2) : 1) down_kernel(
    const __grid_constant__ DownParams p) {
  constexpr int kTiles = kColumns / 2 * kGroups;
  constexpr int kSlots = kTiles >= 16 ? kDecodeWarps / 2 : kDecodeWarps;
  constexpr int kElements = kTiles * 32;
  constexpr int kDepth = kGroups == 8 ? 3 : kColumns == 8 ? 2 : 4;  // steps in flight
  using Step = Piece<kColumns, kGroups>;
  __shared__ float4 slots[kSlots * kElements];
  __shared__ uint32_t lists[kDecodeWarps][kMaxQuads];
  __shared__ bool is_last;

  let_next_kernel_start();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int split = blockIdx.y, splits = gridDim.y;
  const int column = (blockIdx.x * 8 + lane / 4) * kColumns;  // the lane's first
  const bool inside = column < p.hidden;
  uint32_t* const list = lists[warp];
  const int64_t row_bytes = int64_t{2} * p.hidden;
  const char* const rows = p.down + 2 * column;

  float sum[kTiles][4];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0.f;

  wait_for_previous_kernel();
  const int first = split * kDecodeWarps + warp, stride = splits * kDecodeWarps;
  for (int base = first; base < p.mask_pairs; base += 32 * stride) {
    const int pair = base + lane * stride;
    const uint32_t mask = pair < p.mask_pairs ? __ldcg(p.masks + pair) : 0;
    const int quads = (__popc(mask & 0xffffu) + 3) / 4 + (__popc(mask >> 16) + 3) / 4;
    int end = quads;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, end, d);
      if (lane >= d) end += before;
    }
    const int total = __shfl_sync(0xffffffffu, end, 31);
    int at = list_quads(list, end - quads, mask & 0xffffu, 2 * pair);
    list_quads(list, at, mask >> 16, 2 * pair + 1);
    __syncwarp();

    const auto load = [&](Step& to, int index) {
      const bool valid = index < total;
      const uint32_t quad = valid ? list[index] : 0;
      const uint32_t block = quad >> 20;
      const char* h = p.products + ((quad >> 18) * (8 * kGroups) + lane / 4) * 8;  // 4 * block + number
#pragma unroll
      for (int n = 0; n < kGroups; ++n) load_products(to.h[n], h + n * 64, valid);
      const char* block_rows = rows + static_cast<int64_t>(block) * kBlockNeurons * row_bytes;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t place = quad >> (4 * j) & 15;
        load_columns(to.row[j], block_rows + place * static_cast<uint32_t>(row_bytes),
                     valid && inside && j <= static_cast<int>(quad >> 16 & 3));
      }
    };

    Step steps[kDepth];
    const int mine = lane % 4;
#pragma unroll
    for (int u = 0; u < kDepth; ++u) load(steps[u], 4 * u + mine);
    for (int start = 0; start < total; start += 4 * kDepth) {
#pragma unroll
      for (int u = 0; u < kDepth; ++u) {
        if (start + 4 * u >= total) break;
        Step& s = steps[u];
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) {
          const uint32_t a0 = __byte_perm(s.row[0][i], s.row[1][i], 0x5410);
          const uint32_t a1 = __byte_perm(s.row[0][i], s.row[1][i], 0x7632);
          const uint32_t a2 = __byte_perm(s.row[2][i], s.row[3][i], 0x5410);
          const uint32_t a3 = __byte_perm(s.row[2][i], s.row[3][i], 0x7632);
#pragma unroll
          for (int n = 0; n < kGroups; ++n) mma<Half>(sum[i * kGroups + n], a0, a1, a2, a3, s.h[n].x, s.h[n].y);
        }
        load(s, start + 4 * (u + kDepth) + mine);
      }
    }
    __syncwarp();  // the list is free again
  }
  leave_partials<kSlots>(slots, sum, warp, lane);

  if (splits > 1) {
    float4* const slice = p.partials + static_cast<int64_t>(blockIdx.x) * splits * kElements;
    for (int e = thread; e < kElements; e += kDecodeThreads) {
      slice[split * kElements + e] = sum_of_partials<kSlots>(slots, kElements, e);
    }
    __threadfence();
    __syncthreads();
    const uint32_t last = splits - 1;
    if (thread == 0) is_last = atomicInc(p.arrivals + blockIdx.x, last) == last;  // back to 0 after the last
    __syncthreads();
    if (!is_last) return;
    __threadfence();
  }

  // The last block of a slice adds up all of them: whichever it is, in the same order.
  for (int e = thread; e < kElements; e += kDecodeThreads) {
    float4 v;
    if (splits == 1) {
      v = sum_of_partials<kSlots>(slots, kElements, e);
    } else {
      const float4* const slice = p.partials + static_cast<int64_t>(blockIdx.x) * splits * kElements + e;
      v = __ldcg(slice);
      for (int s = 1; s < splits; ++s) {
        const float4 other = __ldcg(slice + s * kElements);
        v.x += other.x, v.y += other.y, v.z += other.z, v.w += other.w;
      }
    }
    const int tile = e / 32;
    const int d = column + tile / kGroups * 2;  // this lane's columns: e % 32 == lane
    const int token = tile % kGroups * 8 + lane % 4 * 2;
    if (d >= p.hidden) continue;
    float low_bias = 0.f, high_bias = 0.f;
    if (p.b_down != nullptr) {
      low_bias = to_float(static_cast<const Half*>(p.b_down)[d]);
      high_bias = to_float(static_cast<const Half*>(p.b_down)[d + 1]);
    }
    uint32_t* const y = static_cast<uint32_t*>(p.y) + (static_cast<int64_t>(token) * p.hidden + d) / 2;
    if (token < p.tokens) y[0] = pack<Half>(v.x + low_bias, v.z + high_bias);
    if (token + 1 < p.tokens) y[p.hidden / 2] = pack<Half>(v.y + low_bias, v.w + high_bias);
  }
}

template <typename Half, int kColumns, int kGroups>
cudaError_t launch(const DecodePlan& plan, const DownParams& params, const Device& device, cudaStream_t stream) {
  return launch_overlapped(down_kernel<Half, kColumns, kGroups>, dim3(plan.slices, plan.splits), 0, params, device,
                           stream);
}

template <typename Half>
cudaError_t launch_for(const DecodePlan& plan, const DownParams& params, const Device& device, cudaStream_t stream) {
  if (plan.groups == 4) return launch<Half, 4, 4>(plan, params, device, stream);
  if (plan.groups == 8) return launch<Half, 4, 8>(plan, params, device, stream);
  switch (plan.lane_columns * 10 + plan.groups) {
    case 21: return launch<Half, 2, 1>(plan, params, device, stream);
    case 22: return launch<Half, 2, 2>(plan, params, device, stream);
    case 41: return launch<Half, 4, 1>(plan, params, device, stream);
    case 42: return launch<Half, 4, 2>(plan, params, device, stream);
    case 81: return launch<Half, 8, 1>(plan, params, device, stream);
    default: return launch<Half, 8, 2>(plan, params, device, stream);
  }
}

}  // namespace

cudaError_t launch_down(const Ffn& ffn, const DecodePlan& plan, const Device& device, void* workspace,
                        cudaStream_t stream) {
  char* const base = static_cast<char*>(workspace);
  DownParams params{};
  params.down = static_cast<const char*>(ffn.down);
  params.b_down = ffn.b_down;
  params.masks = reinterpret_cast<const uint32_t*>(base + plan.masks);
  params.products = base + plan.products;
  params.partials = reinterpret_cast<float4*>(base + plan.partials);
  params.arrivals = reinterpret_cast<uint32_t*>(base + plan.arrivals);
  params.y = ffn.y;
  params.tokens = static_cast<int>(ffn.tokens);
  params.hidden = ffn.hidden;
  params.mask_pairs = (plan.blocks + 1) / 2;
  return ffn.dtype == DType::kBFloat16 ? launch_for<__nv_bfloat16>(plan, params, device, stream)
                                       : launch_for<__half>(plan, params, device, stream);
}

}  // namespace twell::decoding

namespace twell {

int64_t decode_workspace_bytes(const Ffn& ffn) { return decoding::plan_decode(ffn).bytes; }

cudaError_t decode(const Ffn& ffn, const Device& device, void* workspace, cudaStream_t stream) {
  if (ffn.tokens < 1 || ffn.tokens > kDecodeMaxTokens || ffn.hidden < 8 || ffn.hidden > 16384 || ffn.hidden % 8 != 0 ||
      ffn.width < 1 || ffn.width > 65536) {
    return cudaErrorInvalidValue;
  }
  const decoding::DecodePlan plan = decoding::plan_decode(ffn);
  const cudaError_t error = decoding::launch_gate_up(ffn, plan, device, workspace, stream);
  return error != cudaSuccess ? error : decoding::launch_down(ffn, plan, device, workspace, stream);
}

}  // namespace twell
