// How a decode call is cut up, and what its two kernels leave for each other in the workspace.
//
// Neurons go in blocks of 16. For each block the gate kernel leaves a 16-bit mask: which neurons are active for any
// token. A block's active neurons in ascending order form quads, the last one filled up with zeros; h lies as
// (block, 4 quads, 8 * groups tokens, 4 neurons), only the quads that the mask implies being written and read. So a
// lane of the down kernel finds its share of a tensor-core operand (one token, four neurons) in one 8-byte word.
#pragma once

#include <initializer_list>

#include "decode.h"

namespace twell::decoding {

constexpr int kDecodeWarps = 8;
constexpr int kDecodeThreads = 32 * kDecodeWarps;
constexpr int kBlockNeurons = 16;
constexpr int kQuadsPerBlock = 4;

// Which kernels run, and how they overlap.
struct Kernels {
  bool bulk_gate = false;  // sm90_decode_gate_up.cu and sm90_few_down.cu; up to 8 tokens
  bool few = false;        // sm90_few_gate_up.cu and sm90_few_down.cu; any number of tokens
  struct Fused {           // one kernel for all (sm90_decode_fused.cu), if takes_fused()
    bool use = false;
    int window_bytes = 64 << 10;  // of gate rows on their way to a thread block before the kernels ahead have ended
    int patience = 1000;          // looks at what other thread blocks leave
    bool warm = false;            // brings the shares' lines into L2 ahead of them
  } fused;
  int few_splits = 0;  // thread blocks of a cluster of sm90_few_down.cu: 1, 2, 3, 4 or 8; 0: choose_few_splits()
  bool overlap = false;    // programmatic dependent launch
};

struct DecodePlan {
  int groups;        // tokens in eights: 1, 2, 4 or 8
  int gate_tiles;    // blocks of 16 neurons for each thread block of the gate kernel: 1 or 3
  int lane_columns;  // columns of y for each lane of the down kernel (a thread block has 8 times as many): 2, 4 or 8
  int slices;        // ceil(D / (8 * lane_columns))
  int splits;        // thread blocks that share a slice, each with its own neurons
  int blocks;        // ceil(F / 16)
  // Byte offsets in the workspace.
  int64_t masks;     // uint16 (blocks, rounded up to even)
  int64_t arrivals;  // uint32 (slices): down-kernel blocks that left their partial sums; the gate kernel sets 0
  int64_t products;  // h; for sm90_few_down.cu as (neuron, 8 * groups tokens)
  int64_t partials;  // float (slices, splits, 8 * lane_columns * 8 * groups), where splits > 1
  int64_t bytes;     // at least the fused kernel's shares of y, uint4 (blocks, tokens, D / 2), and silences
  Kernels kernels;
};

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// The fused kernel: its thread blocks all run at once, two calls' on a multiprocessor; a block's gate rows find room in
// registers (16) and shared memory, and their shares of y stay in L2.
constexpr int kFusedMaxBlocks = 144, kFusedMaxTokens = 4, kFusedMaxHidden = 2048, kFusedMaxRows = 48;
// Gate rows come in runs of neighbours, one bulk copy each; the first ones go on into registers.
constexpr int kFusedRunRows = 4, kFusedHeldRows = 16;
// A thread block's shared memory: barriers and the like; sums of up to two tokens; gate rows.
constexpr int kFusedControlBytes = 1280, kFusedSharedBytes = 113 * 1024 - kFusedControlBytes;
constexpr int kFusedSumsBytes = 3456, kFusedGateBytes = kFusedSharedBytes - kFusedSumsBytes;
inline bool has_fused_shares(const Ffn& ffn) { return ffn.tokens <= kFusedMaxTokens && ffn.hidden <= kFusedMaxHidden; }
inline int fused_blocks(const Ffn& ffn, int most) {
  most = most < kFusedMaxBlocks ? most : kFusedMaxBlocks;
  return ffn.width < most ? ffn.width : most;
}
// From run to run: 64 modulo 128, so that 16-byte reads of two runs' rows meet no bank twice.
inline int64_t fused_run_stride(const Ffn& ffn) { return round_up(2 * int64_t{ffn.hidden} * kFusedRunRows, 128) + 64; }
// What this many gate rows take in shared memory.
inline int64_t fused_gate_bytes(const Ffn& ffn, int rows) {
  return rows / kFusedRunRows * fused_run_stride(ffn) + rows % kFusedRunRows * 2 * int64_t{ffn.hidden};
}
// Pairs of columns that a thread block adds up: a power of two.
inline int fused_units(const Ffn& ffn, int blocks) {
  int units = 8;
  while (int64_t{units} * blocks < ffn.tokens * int64_t{ffn.hidden / 2}) units *= 2;
  return units;
}
inline bool takes_fused(const Ffn& ffn, const Device& device) {
  const int blocks = fused_blocks(ffn, device.sm_count);
  if (!has_fused_shares(ffn) || blocks == 0) return false;
  // Above 2 tokens a warp must have pairs of one token.
  if (ffn.tokens > 2 && (fused_units(ffn, blocks) < 32 || ffn.hidden % 64 != 0)) return false;
  const int rows = (ffn.width + blocks - 1) / blocks;
  const int beside = rows > kFusedHeldRows ? rows - kFusedHeldRows : 0;
  return rows <= kFusedMaxRows && fused_gate_bytes(ffn, beside) <= kFusedGateBytes;
}

inline DecodePlan plan_decode(const Ffn& ffn) {
  DecodePlan p{};
  p.groups = ffn.tokens <= 8 ? 1 : ffn.tokens <= 16 ? 2 : ffn.tokens <= 32 ? 4 : 8;
  p.blocks = (ffn.width + kBlockNeurons - 1) / kBlockNeurons;
  // Each thread block reads all of x. Up to 16 tokens that is little beside its weights and L1 holds it; above, three
  // tiles share each read, unless that would leave most multiprocessors idle.
  p.gate_tiles = p.groups >= 4 && p.blocks >= 3 * 64 ? 3 : 1;
  // Each thread block reads all of h: with many tokens wide slices, shared by several blocks, keep that small.
  if (p.groups >= 4) {
    p.lane_columns = 4;
  } else {
    p.lane_columns = ffn.hidden >= 8192 ? 8 : ffn.hidden >= 4096 ? 4 : 2;
  }
  p.slices = (ffn.hidden + 8 * p.lane_columns - 1) / (8 * p.lane_columns);
  p.splits = p.groups < 4 ? 1 : p.slices > 64 ? 1 : p.slices > 32 ? 2 : 4;
  const int64_t tokens = 8 * p.groups;
  p.masks = 0;
  p.arrivals = round_up(p.masks + 2 * round_up(p.blocks, 2), 256);
  p.products = round_up(p.arrivals + 4 * int64_t{p.slices}, 256);
  p.partials = round_up(p.products + 2 * tokens * kBlockNeurons * p.blocks, 256);
  p.bytes = p.partials + (p.splits > 1 ? 4 * int64_t{p.slices} * p.splits * 8 * p.lane_columns * tokens : 0);
  if (has_fused_shares(ffn)) {
    const int64_t shares = int64_t{fused_blocks(ffn, kFusedMaxBlocks)} * ffn.tokens * (ffn.hidden + 1) * 8;
    if (p.bytes < shares) p.bytes = shares;
  }
  return p;
}

// Thread blocks of a cluster of sm90_few_down.cu, as measured (NOTES.md). Beside a block of the first kernel, of up to
// kFewNeurons neurons, one of them fits, so as many as find a multiprocessor each: clusters of four find only 30 places
// on 132. After larger blocks three fit everywhere, clusters of three lose, and two to a multiprocessor win. Eight
// blocks to a cluster are too many for up to 8 tokens.
constexpr int kFewColumns = 64;  // of y, for each cluster
constexpr int kFewNeurons = 48;
constexpr double kFewPlaces = 0.9;  // of the multiprocessors, for clusters of three and more
// Whether a block of the second kernel finds room on a multiprocessor beside one of the first.
inline bool fits_beside(const Ffn& ffn, const Device& device) { return ffn.width <= kFewNeurons * device.sm_count; }
inline int choose_few_splits(const Ffn& ffn, const Device& device) {
  const int slices = (ffn.hidden + kFewColumns - 1) / kFewColumns;
  const bool beside = fits_beside(ffn, device);
  for (const int splits : {8, 4, 3}) {
    if (splits == 3 && !beside) continue;
    if (splits == 8 && ffn.tokens <= 8) continue;
    if (slices * splits <= (beside ? kFewPlaces : 2.) * device.sm_count) return splits;
  }
  return slices * 2 <= (beside ? 1 : 2) * device.sm_count ? 2 : 1;
}

// The kernels that decode() runs, as measured on an H200 (NOTES.md).
inline Kernels choose_kernels(const Ffn& ffn, const Device& device) {
  Kernels k{};
  k.overlap = device.major >= 9;
  if (device.major != 9 || device.minor != 0) return k;
  const double elements = static_cast<double>(ffn.hidden) * ffn.width / (1 << 20);  // of a matrix, in millions
  if (ffn.tokens <= 2) {
    k.fused.use = elements >= 2 && takes_fused(ffn, device);
    k.fused.warm = true;  // as a model's other weights pass through L2 between two calls
    k.bulk_gate = elements >= 4;
  } else if (ffn.tokens <= 8) {
    k.fused.use = elements >= 6 && takes_fused(ffn, device);
    k.bulk_gate = elements >= 32;
    k.few = elements >= 2 && !k.bulk_gate;
  } else {
    k.few = true;
  }
  return k;
}

// h into the workspace (decode_gate_up.cu), then y from it (decode_down.cu): the portable kernels.
cudaError_t launch_portable_gate_up(const Ffn&, const DecodePlan&, void* workspace, cudaStream_t);
cudaError_t launch_portable_down(const Ffn&, const DecodePlan&, void* workspace, cudaStream_t);
// Hopper's first half for few tokens and large matrices (sm90_decode_gate_up.cu).
cudaError_t launch_bulk_gate_up(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);
// All of the call at once (sm90_decode_fused.cu); both halves (sm90_few_*.cu).
cudaError_t launch_fused(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);
cudaError_t launch_few_gate_up(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);
cudaError_t launch_few_down(const Ffn&, const DecodePlan&, const Device&, void* workspace, cudaStream_t);

inline cudaError_t launch_gate_up(const Ffn& ffn, const DecodePlan& plan, const Device& device, void* workspace,
                                  cudaStream_t stream) {
  if (plan.kernels.fused.use) return launch_fused(ffn, plan, device, workspace, stream);
  if (plan.kernels.few) return launch_few_gate_up(ffn, plan, device, workspace, stream);
  return plan.kernels.bulk_gate ? launch_bulk_gate_up(ffn, plan, device, workspace, stream)
                                : launch_portable_gate_up(ffn, plan, workspace, stream);
}

inline cudaError_t launch_down(const Ffn& ffn, const DecodePlan& plan, const Device& device, void* workspace,
                               cudaStream_t stream) {
  if (plan.kernels.fused.use) return cudaSuccess;
  return plan.kernels.few || plan.kernels.bulk_gate ? launch_few_down(ffn, plan, device, workspace, stream)
                                                    : launch_portable_down(ffn, plan, workspace, stream);
}

// How a kernel is launched. With `overlap` it may start before the kernel ahead of it has ended.
struct Launch {
  dim3 grid;
  int threads = kDecodeThreads;
  int shared_bytes = 0;
  int cluster = 1;
};

template <typename Params>
cudaError_t launch_kernel(void (*kernel)(Params), const Launch& launch, const Params& params, const Kernels& kernels,
                          cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (launch.shared_bytes > 40 * 1024) {  // the rest of 48 may be static
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.shared_bytes);
  }
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[3]{};
  int count = 1;
  // Kernels that overlap must agree on how a multiprocessor divides its memory between L1 and shared.
  attributes[0].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  attributes[0].val.sharedMemCarveout = kernels.bulk_gate || kernels.few || kernels.fused.use ? 100 : 50;
  if (kernels.overlap) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  if (launch.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim = {static_cast<unsigned>(launch.cluster), 1, 1};
    ++count;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = launch.grid;
  config.blockDim = dim3(static_cast<unsigned>(launch.threads));
  config.dynamicSmemBytes = static_cast<size_t>(launch.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = static_cast<unsigned>(count);
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace twell::decoding
