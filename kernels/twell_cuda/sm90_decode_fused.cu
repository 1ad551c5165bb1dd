// A decode call of up to 8 tokens in one kernel, for Hopper: y = h Wd^T + bd with h = relu(x Wg^T + bg) * (x Wu^T +
// bu).
//
// A thread block owns neighbouring neurons. Their gate rows do not depend on the kernel ahead, so they come before it
// has ended: the first 16 into registers, as tensor-core operands, the others by bulk copies into shared memory; two
// blocks share a multiprocessor, this call's and the next one's. Once x is there, eight warps share out k and add up
// through shared memory. Rows of Wu and Wd of the active neurons are asked for together, so that one latency covers
// both. Each thread then owns eight columns of y, and the blocks add up their shares (sm90_decode_fused_sum.cuh).
//
// Within each 32 consecutive k, lane q of four takes 8 consecutive ones (16 bytes) of weights and activations alike:
// both operands see the same permutation of k, so no data moves between lanes.

#include <mutex>
#include <unordered_map>

#include "sm90_decode_fused_sum.cuh"

namespace twell::decoding {
namespace {

using namespace fused;

// kPairs: of tokens, 1, 2 or 4.
template <typename Half, int kPairs>
__global__ void __launch_bounds__(kThreads, 2) fused_kernel(const __grid_constant__ FusedParams p) {
#if defined(TWELL_SM90_DEVICE)
  constexpr int kTokens = 2 * kPairs;
  extern __shared__ __align__(128) char shared[];
  float4* const slots = reinterpret_cast<float4*>(shared + p.slots_at);
  float* const values = reinterpret_cast<float*>(shared + p.values_at);  // relu(gate), then h, of every neuron
  uint32_t* const masks = reinterpret_cast<uint32_t*>(shared + p.masks_at);  // of each 16 neurons
  uint16_t* const list = reinterpret_cast<uint16_t*>(shared + p.list_at);    // of active neurons, ascending
  __shared__ Control c;

  sm90::launch_dependents();
  p.trace.mark(kStarted);
  const int thread = threadIdx.x;
  const Lane l = this_lane();
  if (thread < 2 * kMaxStages) {
    sm90::barrier_init(c.full[0] + thread, 1);
    sm90::barrier_init(c.empty[0] + thread, kDecodeWarps);
    sm90::fence_barrier_init();
  }
  const int chunks = (p.row_bytes + kChunkBytes - 1) / kChunkBytes;
  const int first = static_cast<int64_t>(p.width) * blockIdx.x / gridDim.x;
  const int count = static_cast<int64_t>(p.width) * (blockIdx.x + 1) / gridDim.x - first;
  const Walk walk(count, kStageRows, chunks);
  for (int i = thread; i < walk.tiles; i += kThreads) masks[i] = 0;
  __syncthreads();

  sm90::Ring ring(c.full[0], c.empty[0], p.stages), ring_out = ring;
  int supplied = 2;  // the first two stages are in registers
  const auto row_of = [&](const char* matrix, int neuron) {
    return matrix + static_cast<int64_t>(first + neuron) * p.row_bytes;
  };
  const auto supply_gate = [&] {
    const Place at = walk.at(supplied++);
    fill_stage(ring_out, shared, kStageRows, row_of(p.gate, at.row + l.lane) + at.chunk * kChunkBytes, at.rows,
               chunk_bytes(p, at.chunk), p.row_stride);
  };

  // Before x: what is constant, a few stages at a time.
  const int at_first = min(walk.stages() - 2, p.stages);
  if (l.warp == 0) {
    while (supplied < 2 + at_first) {
      if (supplied >= 2 + p.window) sm90::barrier_wait(c.full[0] + supplied - 2 - p.window, 0);
      supply_gate();
    }
    for (int i = 2 + at_first; i < min(walk.stages(), 2 + at_first + p.ahead); ++i) {
      const Place at = walk.at(i);
      if (l.lane < at.rows) {
        prefetch_row(row_of(p.gate, at.row + l.lane) + at.chunk * kChunkBytes, chunk_bytes(p, at.chunk));
      }
    }
  }
  if (at_first >= p.window) sm90::barrier_wait(c.full[0] + at_first - p.window, 0);
  float sum[kTiles][4] = {};
  uint4 x[kSteps];
  {
    uint4 held[kSteps][2];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const uint32_t k = l.offset + i * kStepBytes;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = l.row + 8 * j;
        load_now(held[i][j], row_of(p.gate, row) + k, row < count && k < p.row_bytes);
      }
    }
    p.trace.mark(kWeights);
    sm90::wait_for_previous();
    p.trace.mark(kCallBefore);
    load_x(x, l, p, 0);
    if (thread == kThreads - 1) check_in(p, c);
    float part[2][4] = {};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) multiply_step<Half>(part, held[i][0], held[i][1], x[i]);
    join(sum[0], part);
  }
  p.trace.mark(kTokensThere);

  bool held = true;
  for (int tile = 0; tile < walk.tiles; tile += kTiles) {
    const int tiles = min(kTiles, walk.tiles - tile);
    if (tile > 0) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) sum[m][0] = sum[m][1] = sum[m][2] = sum[m][3] = 0.f;
    }
    for (int chunk = 0; chunk < chunks; ++chunk) {
      if (chunks > 1 && !held) load_x(x, l, p, chunk);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        if (m >= tiles) break;
        if (m == 0 && held) {
          held = false;
          continue;
        }
        multiply_tile<Half>(sum[m], x, l, ring, shared, kStageRows, walk.tile_rows(tile + m), chunk_bytes(p, chunk),
                            p.row_stride);
        for (int i = 0; i < 2; ++i) {
          if (l.warp == 0 && supplied < walk.stages()) supply_gate();
        }
      }
    }
    leave_sums<kPairs>(slots, sum, tiles, l);
    for (int e = thread; e < tiles * 8 * kPairs; e += kThreads) {
      float4 v = slots[e];
#pragma unroll
      for (int s = 1; s < kDecodeWarps; ++s) {
        const float4 other = slots[s * (kTiles * 8 * kPairs) + e];
        v.x += other.x, v.y += other.y, v.z += other.z, v.w += other.w;
      }
      const int row = e / kPairs % 8, own_tile = tile + e / kPairs / 8, token = e % kPairs * 2;
      const int low = own_tile * 16 + row, high = low + 8;
      const float low_bias = bias_of<Half>(p.b_gate, first + low, p.width);
      const float high_bias = bias_of<Half>(p.b_gate, first + high, p.width);
      v.x = activate(v.x, low_bias, low < count && token < p.tokens);
      v.y = activate(v.y, low_bias, low < count && token + 1 < p.tokens);
      v.z = activate(v.z, high_bias, high < count && token < p.tokens);
      v.w = activate(v.w, high_bias, high < count && token + 1 < p.tokens);
      reinterpret_cast<float4*>(values)[own_tile * 8 * kPairs + e % (8 * kPairs)] = v;
      const uint32_t bits = (v.x != 0.f || v.y != 0.f ? 1u : 0u) | (v.z != 0.f || v.w != 0.f ? 0x100u : 0u);
      if (bits != 0) atomicOr(masks + own_tile, bits << row);
    }
  }
  __syncthreads();
  p.trace.mark(kGateSums);

  int active = 0;
  for (int m = 0; m < walk.tiles; ++m) active += __popc(masks[m]);
  for (int i = thread; i < count; i += kThreads) {
    const uint32_t mask = masks[i / 16], bit = 1u << i % 16;
    if (mask & bit) {
      int rank = __popc(mask & (bit - 1));
      for (int m = 0; m < i / 16; ++m) rank += __popc(masks[m]);
      list[rank] = static_cast<uint16_t>(i);
    }
  }
  sm90::fence_async_proxy();
  __syncthreads();
  p.trace.mark(kListed);

  // Rows of Wu, then of Wd: all of them at once where few neurons are active.
  const int per = active <= 2 * kStageRows && 2 * active <= p.row_places ? max(1, (active + 1) / 2) : kStageRows;
  char* const rows = shared + p.rows_at;
  const Walk up(p.up != nullptr ? active : 0, per, chunks);
  const int groups = (active + per - 1) / per, all_stages = up.stages() + groups * chunks;
  ring = ring_out = sm90::Ring(c.full[1], c.empty[1], min(kMaxStages, p.row_places / per));
  supplied = 0;
  const auto supply_row = [&] {
    const int i = supplied++ - up.stages();
    Place at;
    if (i < 0) {
      at = up.at(i + up.stages());
    } else {
      at.chunk = chunks == 1 ? 0 : i / groups;
      at.row = (i - at.chunk * groups) * per;
      at.rows = min(per, active - at.row);
    }
    const int neuron = l.lane < at.rows ? list[at.row + l.lane] : 0;
    fill_stage(ring_out, rows, per, row_of(i < 0 ? p.up : p.down, neuron) + at.chunk * kChunkBytes, at.rows,
               chunk_bytes(p, at.chunk), p.row_stride);
  };
  if (l.warp == 0) {
    while (supplied < min(all_stages, ring.stages)) supply_row();
  }

  for (int tile = 0; tile < up.tiles; tile += kTiles) {
    const int tiles = min(kTiles, up.tiles - tile);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) sum[m][0] = sum[m][1] = sum[m][2] = sum[m][3] = 0.f;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      if (chunks > 1) load_x(x, l, p, chunk);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        if (m >= tiles) break;
        multiply_tile<Half>(sum[m], x, l, ring, rows, per, up.tile_rows(tile + m), chunk_bytes(p, chunk),
                            p.row_stride);
        for (int i = 0; i < 2; ++i) {
          if (l.warp == 0 && supplied < all_stages) supply_row();
        }
      }
    }
    leave_sums<kPairs>(slots, sum, tiles, l);
    const int begin = tile * 2 * per, end = min(active, (tile + tiles) * 2 * per);
    for (int i = thread; i < (end - begin) * kTokens; i += kThreads) {
      const int row = i / kTokens, token = i % kTokens;
      const int neuron = list[begin + row], in_tile = row % (2 * per);
      float* const value = values + element<kPairs>(neuron / 16, neuron % 16, token);
      if (*value == 0.f) continue;
      const int e = element<kPairs>(row / (2 * per), in_tile < per ? in_tile : in_tile - per + 8, token);
      float u = 0.f;
#pragma unroll
      for (int s = 0; s < kDecodeWarps; ++s) u += reinterpret_cast<const float*>(slots)[s * (kTiles * 32 * kPairs) + e];
      *value *= u + bias_of<Half>(p.b_up, first + neuron, p.width);
    }
  }
  __syncthreads();
  p.trace.mark(kUpSums);

  const uint64_t seal = c.seal;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int threads = min(kChunkColumns, p.hidden - chunk * kChunkColumns) / kThreadColumns;
    float y[kTokens][kThreadColumns] = {};
    for (int group = 0; group < groups; ++group) {
      ring.wait_full();
      const char* at = rows + ring.stage * per * p.row_stride + thread * 16;
      for (int r = group * per; thread < threads && r < min(active, (group + 1) * per); ++r, at += p.row_stride) {
        const uint4 words = *reinterpret_cast<const uint4*>(at);
        const float2 column[4] = {sm90::unpack<Half>(words.x), sm90::unpack<Half>(words.y),
                                  sm90::unpack<Half>(words.z), sm90::unpack<Half>(words.w)};
        const int neuron = list[r];
#pragma unroll
        for (int t = 0; t < kTokens; t += 2) {
          const float2 h = *reinterpret_cast<const float2*>(values + element<kPairs>(neuron / 16, neuron % 16, t));
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            y[t][2 * i] += h.x * column[i].x, y[t][2 * i + 1] += h.x * column[i].y;
            y[t + 1][2 * i] += h.y * column[i].x, y[t + 1][2 * i + 1] += h.y * column[i].y;
          }
        }
      }
      release(ring.empty + ring.stage, l.lane);
      ring.advance();
      if (l.warp == 0 && supplied < all_stages) supply_row();
    }
    p.trace.mark(kDown);
    if (thread < threads) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t >= p.tokens) break;
        uint4* const to = p.partials + (static_cast<int64_t>(blockIdx.x) * p.tokens + t) * (p.hidden / 2) +
                          chunk * (kChunkColumns / 2) + thread;
#pragma unroll
        for (int i = 0; i < 4; ++i) store_sealed(to + i * threads, y[t][2 * i], y[t][2 * i + 1], seal);
      }
    }
  }
  p.trace.mark(kGiven);
  add_up_all<Half>(p, c, reinterpret_cast<float2*>(slots));
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

// Lays out shared memory; false where it is too small.
bool place(FusedParams& p, int pairs, int grid, int room, int* shared_bytes) {
  const int count = (p.width + grid - 1) / grid, tiles = (count + 15) / 16;
  const int chunks = static_cast<int>((p.row_bytes + kChunkBytes - 1) / kChunkBytes);
  const uint32_t chunk = p.row_bytes < kChunkBytes ? p.row_bytes : kChunkBytes;
  p.row_stride = static_cast<uint32_t>(round_up(chunk, 128)) + 64;
  const int stride = static_cast<int>(p.row_stride);
  const int slots = kDecodeWarps * kTiles * 8 * pairs * 16, values = tiles * 8 * pairs * 16;
  const int rest = values + static_cast<int>(round_up(4 * tiles, 16) + round_up(2 * count, 16)) +
                   static_cast<int>(round_up(sizeof(Control), 128));
  const int needed = 2 * tiles * chunks - 2, gate_rows = count > 16 ? count - 16 : 0;
  int ring;
  if (chunks == 1 && tiles <= kTiles && gate_rows * stride + rest <= room) {
    // All rows at once, in one pass; sums take the place of rows that have been multiplied.
    p.stages = needed;
    const int wanted = slots + 3 * kStageRows * stride;
    ring = gate_rows * stride > wanted ? gate_rows * stride : wanted;
    if (ring > room - rest) ring = room - rest;
    p.slots_at = 0, p.rows_at = static_cast<uint32_t>(slots);
    p.row_places = (ring - slots) / stride;
  } else {
    const int stages = (room - rest - slots) / (kStageRows * stride);
    p.stages = stages < needed ? stages : needed;
    if (p.stages > kMaxStages) p.stages = kMaxStages;
    ring = kStageRows * stride * (p.stages < 2 ? 2 : p.stages);
    p.rows_at = 0, p.slots_at = static_cast<uint32_t>(ring);
    p.row_places = ring / stride;
    ring += slots;
  }
  p.values_at = static_cast<uint32_t>(round_up(ring, 16));
  p.masks_at = p.values_at + static_cast<uint32_t>(values);
  p.list_at = p.masks_at + static_cast<uint32_t>(round_up(4 * tiles, 16));
  *shared_bytes = static_cast<int>(p.list_at + round_up(2 * count, 16));
  return p.row_places >= 2 * kStageRows && *shared_bytes + static_cast<int>(sizeof(Control)) <= room &&
         (p.stages >= 2 || needed == 0) && tiles <= kMaxTiles;
}

template <typename Half>
auto kernel_for(int pairs) {
  return pairs == 1 ? fused_kernel<Half, 1> : pairs == 2 ? fused_kernel<Half, 2> : fused_kernel<Half, 4>;
}

}  // namespace

cudaError_t launch_fused(const Ffn& ffn, const DecodePlan& plan, const Device& device, void* workspace,
                         cudaStream_t stream) {
  FusedParams p{};
  p.x = static_cast<const char*>(ffn.x);
  p.gate = static_cast<const char*>(ffn.gate);
  p.up = static_cast<const char*>(ffn.up);
  p.down = static_cast<const char*>(ffn.down);
  p.b_gate = ffn.b_gate, p.b_up = ffn.b_up, p.b_down = ffn.b_down;
  p.partials = static_cast<uint4*>(workspace);
  p.y = ffn.y;
  p.tokens = static_cast<int>(ffn.tokens), p.hidden = ffn.hidden, p.width = ffn.width;
  p.row_bytes = 2u * static_cast<uint32_t>(ffn.hidden);
  const int grid = fused_blocks(ffn, device), pairs = p.tokens <= 2 ? 1 : p.tokens <= 4 ? 2 : 4;
  const int units = p.tokens * (p.hidden / 2);
  for (p.units = 8; int64_t{p.units} * grid < units;) p.units *= 2;
  const Kernels::Fused& how = plan.kernels.fused;
  p.window = how.window, p.patience = how.patience;
  const int64_t chunk = p.row_bytes < kChunkBytes ? p.row_bytes : kChunkBytes;
  p.ahead = static_cast<int>(kPrefetchBytes / (grid * kStageRows * chunk));
  const int meeting = meeting_of(workspace);
  int shared = 0;
  if (meeting < 0 || !takes_fused(ffn) || !place(p, pairs, grid, how.room, &shared)) {
    DecodePlan other = plan;
    other.kernels.fused.use = false;
    const cudaError_t error = launch_gate_up(ffn, other, device, workspace, stream);
    return error != cudaSuccess ? error : launch_down(ffn, other, device, workspace, stream);
  }
  p.meeting = static_cast<uint32_t>(meeting);
  p.trace = Trace::next();
  const auto kernel = ffn.dtype == DType::kBFloat16 ? kernel_for<__nv_bfloat16>(pairs) : kernel_for<__half>(pairs);
  return launch_kernel(kernel, {dim3(static_cast<unsigned>(grid)), kThreads, shared}, p, plan.kernels, stream);
}

}  // namespace twell::decoding
