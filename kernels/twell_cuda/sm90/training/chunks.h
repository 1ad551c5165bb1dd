// What both forms of a training step share on the host: chunks of forward, and the report's sums.
#pragma once

#include <algorithm>

#include "sm90/common/launch.h"
#include "sm90/common/workspace.h"
#include "sm90/training/training.h"

namespace twell::sm90 {

constexpr int64_t kForwardBytes = int64_t{176} << 20;  // of a chunk's columns in forward: most of what it holds
inline int64_t forward_blocks(const Ffn& ffn) { return chunk_blocks(ffn, kForwardBytes, 1); }

// The weights' gradients are rounded to 16 bits after each chunk of dense products: after so many, by less than eager
// rounds.
constexpr int64_t kMostChunks = 8;

constexpr int64_t kReportBytes = int64_t{16} << 20;  // of sums that wait for the report, where a chunk's are not more

// Of chunks of so many blocks. `halves`: of each block up takes those of its two halves apart.
inline void place_sums(const Ffn& ffn, int64_t blocks, bool halves, Cutter& cutter, Saving* saving) {
  const int row = (ffn.width + 7) / 8 * 8;
  saving->parts = halves ? 2 : 1;
  saving->groups = sum_groups(row, halves);
  saving->rows = std::max(blocks, std::min(count_blocks(ffn), kReportBytes / (int64_t{saving->parts} * ffn.width * 4)));
  cutter.cut(saving->activity, saving->rows * saving->parts * ffn.width * 4);
  cutter.cut(saving->l1, saving->rows * saving->groups * 4);
}

// A chunk's sums are there: those of all chunks so far are reported where the next chunk's find no room, or none comes.
inline cudaError_t add_to_report(const Ffn& ffn, const Chunk& chunk, int64_t blocks, float* report, Saving* saving,
                                 cudaStream_t stream) {
  saving->waiting += chunk.active.blocks;
  const bool last = chunk.first + chunk.tokens == ffn.tokens;
  if (report == nullptr || (!last && saving->waiting + blocks <= saving->rows)) return cudaSuccess;
  TWELL_RETURN_IF_ERROR(launch_report(ffn, *saving, report, stream));
  saving->waiting = 0;
  saving->reported = true;
  return cudaSuccess;
}

}  // namespace twell::sm90
