// How a decode call is cut up, and what its two kernels leave for each other in the workspace.
//
// Neurons go in blocks of 16. For each block the gate kernel leaves a 16-bit mask: which neurons are active for any
// token. A block's active neurons in ascending order form quads, the last one filled up with zeros; h lies as
// (block, 4 quads, 8 * groups tokens, 4 neurons), only the quads that the mask implies being written and read. So a
// lane of the down kernel finds its share of a tensor-core operand (one token, four neurons) in one 8-byte word.
#pragma once

#include "common/ffn.h"
#include "sm90/decode/fused_plan.h"

namespace twell::decoding {

constexpr int kDecodeWarps = 8;
constexpr int kDecodeThreads = 32 * kDecodeWarps;
constexpr int kBlockNeurons = 16;
constexpr int kQuadsPerBlock = 4;

// How the kernels of a call are launched (host/dispatch.cpp says).
struct Kernels {
  // Programmatic dependent launch. Kernels that overlap must agree on how a multiprocessor divides its memory between
  // L1 and shared: how much of it is shared, in percent.
  bool overlap = false;
  int carveout = 50;
  struct Fused {                  // of sm90/decode/fused.cu
    int window_bytes = 64 << 10;  // of gate rows on their way to a thread block before the kernels ahead have ended
    int patience = 1000;          // looks at what other thread blocks leave
    bool warm = false;            // brings the shares' lines into L2 ahead of them
  } fused;
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
  int64_t products;  // h; for sm90/decode/few_down.cu as (neuron, 8 * groups tokens)
  int64_t partials;  // float (slices, splits, 8 * lane_columns * 8 * groups), where splits > 1
  int64_t bytes;     // at least the fused kernel's shares of y, uint4 (blocks, tokens, D / 2), and silences
  Kernels kernels;
};

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
    p.lane_columns = ffn.hidden >= 8192 ? 8 : ffn.hidden >= 4096 || ffn.scaled() ? 4 : 2;  // 4 bytes at least
  }
  p.slices = (ffn.hidden + 8 * p.lane_columns - 1) / (8 * p.lane_columns);
  p.splits = (p.groups < 4 && !ffn.scaled()) || p.slices > 64 ? 1 : p.slices > 32 ? 2 : 4;
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

}  // namespace twell::decoding
