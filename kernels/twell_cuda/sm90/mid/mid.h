// Prefill of up to kMidMaxTokens tokens in two kernels: gate and up, then down. What they leave for each other has the
// form of the kernels for more tokens (sm90/common/chunk.h), without lists.
#pragma once

#include "sm90/common/chunk.h"

namespace twell::sm90 {

constexpr int kMidMaxTokens = 2048;
constexpr int kMidMaxHalfTokens = 256;    // up to here thread blocks of 64 tokens win, above those of 128
constexpr int kMidMaxOwn = 384;           // neurons of a thread block; with more, the kernels for more tokens win
constexpr int64_t kMidMaxWork = 3 << 18;  // these times D; with more, the kernels for more tokens win (LOG.md)
// Of both kernels (sm90/common/launch.h), so that down's blocks start beside the first kernel's.
constexpr int kMidCarveout = 100;

// How neurons are shared out: `ranges` thread blocks for each block of tokens, each with `passes` times `neurons` of
// them.
struct MidPlan {
  int neurons, passes, ranges;
  bool half = false;  // 64 tokens a thread block (sm90/mid/half_gate_up.cu), else 128
  int own() const { return neurons * passes; }
};

// False where the kernels for more tokens are better, or F is too large: with 128 tokens a thread block.
bool plan_mid(const Ffn&, const Device&, MidPlan*);
// The same with 64; false too where a thread block's neurons do not fit one pass.
bool plan_mid_half(const Ffn&, const Device&, MidPlan*);

// All of a call; `workspace` of prefill_workspace_bytes().
cudaError_t mid_forward(const Ffn&, const MidPlan&, const Device&, void* workspace, cudaStream_t);

cudaError_t launch_mid_gate_up(const Ffn&, const Chunk&, const MidPlan&, cudaStream_t);
cudaError_t launch_mid_half_gate_up(const Ffn&, const Chunk&, const MidPlan&, cudaStream_t);
cudaError_t launch_mid_down(const Ffn&, const Chunk&, const Device&, const MidPlan&, cudaStream_t);

}  // namespace twell::sm90
