// Prefill on compute capability 9.0, chunk by chunk of tokens: gate and packing, lists of active neurons, up, down; for
// fewer tokens, gate and up in one kernel, and down.

#include "sm90.h"

#include <algorithm>

#include "sm90_call.h"
#include "sm90_launch.h"
#include "sm90_mid.h"
#include "sm90_workspace.h"

namespace twell {
namespace {

// Room for the columns of one chunk. A chunk of dense tokens fills it, so it bounds memory at any density and any T. A
// block for each multiprocessor is worth more room: larger matrices are then read by fewer chunks.
constexpr int64_t kColumnBytes = int64_t{192} << 20, kMostColumnBytes = int64_t{640} << 20;

// Chunks of about one size; or of a block for each multiprocessor, where that makes no more of them: then the tiles of
// all but the last fill whole rounds of thread blocks.
int64_t forward_blocks(const Ffn& ffn, const Device& device) {
  const int64_t each = std::min<int64_t>(device.sm_count, sm90::most_blocks(ffn, kMostColumnBytes, 1));
  const int64_t most = std::max(sm90::most_blocks(ffn, kColumnBytes, 1), each);
  const int64_t even = sm90::chunk_blocks(ffn, most);
  const bool whole = even < sm90::count_blocks(ffn) && even <= device.sm_count && device.sm_count <= most;
  return whole ? device.sm_count : even;
}

}  // namespace

int64_t sm90_workspace_bytes(const Ffn& ffn, const Device& device) {
  sm90::Active active;
  sm90::Cutter cutter(nullptr);
  sm90::place_active(ffn, forward_blocks(ffn, device), false, cutter, &active);
  return cutter.used();
}

cudaError_t sm90_forward(const Ffn& ffn, const Device& device, void* workspace, cudaStream_t stream) {
  const int64_t blocks = forward_blocks(ffn, device);
  sm90::Chunk chunk{};
  sm90::Cutter cutter(workspace);
  sm90::place_active(ffn, blocks, false, cutter, &chunk.active);
  sm90::MidPlan plan;
  if (sm90::plan_mid(ffn, device, &plan)) {  // so few neurons and tokens are always one chunk
    sm90::fit(ffn, blocks, &chunk);
    TWELL_RETURN_IF_ERROR(sm90::launch_mid_gate_up(ffn, chunk, plan, stream));
    return sm90::launch_mid_down(ffn, chunk, device, plan, stream);
  }
  for (; chunk.first < ffn.tokens; chunk.first += chunk.tokens) {
    sm90::fit(ffn, blocks, &chunk);
    TWELL_RETURN_IF_ERROR(sm90::launch_gate(ffn, chunk, device, stream));
    TWELL_RETURN_IF_ERROR(sm90::launch_list(ffn, chunk, device, stream));
    if (ffn.up != nullptr) TWELL_RETURN_IF_ERROR(sm90::launch_up(ffn, chunk, device, stream));
    TWELL_RETURN_IF_ERROR(sm90::launch_down(ffn, chunk, device, stream));
  }
  return cudaSuccess;
}

namespace sm90 {

cudaError_t make_tensor_map(CUtensorMap* map, DType dtype, const void* base, int64_t rows, int columns, int box_rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  // The driver is not linked against: its library is there only where a GPU is.
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  if (encode == nullptr) return cudaErrorInsufficientDriver;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  const CUresult result =
      encode(map, dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
             const_cast<void*>(base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace sm90
}  // namespace twell
