// Prefill on compute capability 9.0, chunk by chunk of tokens: gate and packing, lists of active neurons, up, down.

#include "sm90.h"

#include <algorithm>

#include "sm90_call.h"
#include "sm90_launch.h"

namespace twell {
namespace {

using sm90::kBlockTokens;

// Room for the columns of one chunk. A chunk of dense tokens fills it, so it bounds memory at any density and any T.
constexpr int64_t kColumnBytes = int64_t{192} << 20;

int64_t chunk_blocks(const Ffn& ffn) {
  const int64_t blocks = (ffn.tokens + kBlockTokens - 1) / kBlockTokens;
  const int64_t block_bytes = int64_t{ffn.width} * kBlockTokens * 2;
  const int64_t most = std::clamp<int64_t>(kColumnBytes / block_bytes, 1, sm90::kMaxBlocks);
  const int64_t chunks = (blocks + most - 1) / most;
  return (blocks + chunks - 1) / std::max<int64_t>(chunks, 1);  // chunks of about one size
}

// Cuts the parts of a chunk's activations out of `workspace`, if there is one; returns the bytes they take.
int64_t place(const Ffn& ffn, void* workspace, sm90::Active* active) {
  const int64_t blocks = chunk_blocks(ffn);
  int64_t used = 0;
  const auto cut = [&](int64_t bytes) {
    void* part = workspace == nullptr ? nullptr : static_cast<char*>(workspace) + used;
    used += (bytes + 255) / 256 * 256;
    return part;
  };
  active->words = (ffn.width + 31) / 32;
  active->row = (ffn.width + 7) / 8 * 8;
  active->masks = static_cast<uint32_t*>(cut(blocks * 2 * active->words * 4));
  active->counts = static_cast<sm90::Counts*>(cut(blocks * sizeof(sm90::Counts)));
  active->neurons = static_cast<uint16_t*>(cut(blocks * active->row * 2));
  active->columns = cut(blocks * ffn.width * kBlockTokens * 2);
  return used;
}

}  // namespace

int64_t sm90_workspace_bytes(const Ffn& ffn, const Device&) {
  sm90::Active active;
  return place(ffn, nullptr, &active);
}

cudaError_t sm90_forward(const Ffn& ffn, const Device& device, void* workspace, cudaStream_t stream) {
  const int64_t blocks = chunk_blocks(ffn);
  sm90::Chunk chunk{};
  place(ffn, workspace, &chunk.active);
  for (; chunk.first < ffn.tokens; chunk.first += chunk.tokens) {
    chunk.tokens = std::min(blocks * kBlockTokens, ffn.tokens - chunk.first);
    chunk.active.blocks = static_cast<int>((chunk.tokens + kBlockTokens - 1) / kBlockTokens);
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
