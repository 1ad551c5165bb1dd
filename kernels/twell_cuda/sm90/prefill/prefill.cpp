// The launches of a prefill, and how its tokens are cut into chunks.

#include "sm90/prefill/prefill.h"

#include <algorithm>

#include "sm90/common/launch.h"
#include "sm90/common/workspace.h"

namespace twell::sm90 {
namespace {

// Room for the columns of one chunk. A chunk of dense tokens fills it, so it bounds memory at any density and any T. A
// block for each multiprocessor is worth more room: larger matrices are then read by fewer chunks.
constexpr int64_t kColumnBytes = int64_t{192} << 20, kMostColumnBytes = int64_t{640} << 20;

// Chunks of about one size; or of a block for each multiprocessor, where that makes no more of them: then the tiles of
// all but the last fill whole rounds of thread blocks.
int64_t forward_blocks(const Ffn& ffn, const Device& device) {
  const int64_t each = std::min<int64_t>(device.sm_count, most_blocks(ffn, kMostColumnBytes, 1));
  const int64_t most = std::max(most_blocks(ffn, kColumnBytes, 1), each);
  const int64_t even = chunk_blocks(ffn, most);
  const bool whole = even < count_blocks(ffn) && even <= device.sm_count && device.sm_count <= most;
  return whole ? device.sm_count : even;
}

}  // namespace

int64_t prefill_workspace_bytes(const Ffn& ffn, const Device& device) {
  Active active;
  Cutter cutter(nullptr);
  place_active(ffn, forward_blocks(ffn, device), false, cutter, &active);
  return cutter.used();
}

Chunk first_chunk(const Ffn& ffn, const Device& device, void* workspace, int64_t* blocks) {
  *blocks = forward_blocks(ffn, device);
  Chunk chunk{};
  Cutter cutter(workspace);
  place_active(ffn, *blocks, false, cutter, &chunk.active);
  fit(ffn, *blocks, &chunk);
  return chunk;
}

cudaError_t prefill_forward(const Ffn& ffn, const Device& device, void* workspace, cudaStream_t stream) {
  int64_t blocks = 0;
  Chunk chunk = first_chunk(ffn, device, workspace, &blocks);
  for (; chunk.first < ffn.tokens; chunk.first += chunk.tokens) {
    fit(ffn, blocks, &chunk);
    TWELL_RETURN_IF_ERROR(launch_gate(ffn, chunk, device, stream));
    TWELL_RETURN_IF_ERROR(launch_list(ffn, chunk, device, stream));
    if (ffn.gated()) TWELL_RETURN_IF_ERROR(launch_up(ffn, chunk, device, stream));
    TWELL_RETURN_IF_ERROR(launch_down(ffn, chunk, device, stream));
  }
  return cudaSuccess;
}

}  // namespace twell::sm90
