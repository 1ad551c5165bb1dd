// Sizes and launches of the portable prefill.
#include <algorithm>

#include "portable/chunk.h"
#include "portable/portable.h"

namespace twell {

namespace {

using namespace portable;

constexpr int64_t kChunkBytes = int64_t{176} << 20;
constexpr int64_t kElementBytes = 2;

int64_t list_bytes(const Ffn& ffn) { return round_up(ffn.width, kTileNeurons) * int64_t{sizeof(int)}; }

int64_t h_bytes(const Ffn& ffn) { return round_up(ffn.width, kTileNeurons) * kBlockTokens * kElementBytes; }

int64_t progress_bytes(const Ffn& ffn, int64_t blocks) {
  return round_up((1 + blocks * (round_up(ffn.width, kSliceNeurons) / kSliceNeurons)) * int64_t{sizeof(unsigned)}, 256);
}

int64_t counts_bytes(int64_t blocks) { return round_up(blocks * int64_t{sizeof(int)}, 256); }

}  // namespace

int64_t portable_chunk_tokens(const Ffn& ffn) {
  const int64_t gate_bytes = int64_t{kBlockTokens} * ffn.width * kElementBytes;
  const int64_t fitting = kChunkBytes / (gate_bytes + h_bytes(ffn) + list_bytes(ffn));
  const int64_t most = std::clamp<int64_t>(fitting, 1, kMaxBlocks);
  const int64_t blocks = std::max<int64_t>(1, round_up(ffn.tokens, kBlockTokens) / kBlockTokens);
  const int64_t chunks = (blocks + most - 1) / most;
  return (blocks + chunks - 1) / chunks * kBlockTokens;
}

int64_t portable_workspace_bytes(const Ffn& ffn) {
  const int64_t blocks = portable_chunk_tokens(ffn) / kBlockTokens;
  return progress_bytes(ffn, blocks) + counts_bytes(blocks) + blocks * (list_bytes(ffn) + h_bytes(ffn));
}

portable::Chunk portable::make_chunk(const Ffn& ffn, int64_t first, int64_t count, const void* gate, void* workspace) {
  const int64_t blocks = round_up(count, kBlockTokens) / kBlockTokens;
  const int64_t row_bytes = ffn.hidden * kElementBytes;
  Chunk chunk{};
  chunk.dtype = ffn.dtype;
  chunk.tokens = static_cast<int>(count);
  chunk.blocks = static_cast<int>(blocks);
  chunk.hidden = ffn.hidden;
  chunk.width = ffn.width;
  chunk.slices = static_cast<int>(round_up(ffn.width, kSliceNeurons) / kSliceNeurons);
  chunk.tiles = static_cast<int>(round_up(ffn.width, kTileNeurons) / kTileNeurons);
  chunk.listed = static_cast<int>(round_up(ffn.width, kTileNeurons));
  chunk.gate = gate;
  chunk.x = static_cast<const char*>(ffn.x) + first * row_bytes;
  chunk.up = ffn.up.data;
  chunk.down = ffn.down.data;
  chunk.b_up = ffn.b_up;
  chunk.b_down = ffn.b_down;
  chunk.y = static_cast<char*>(ffn.y) + first * row_bytes;
  char* at = static_cast<char*>(workspace);
  chunk.progress = reinterpret_cast<unsigned*>(at);
  at += progress_bytes(ffn, blocks);
  chunk.counts = reinterpret_cast<int*>(at);
  at += counts_bytes(blocks);
  chunk.lists = reinterpret_cast<int*>(at);
  at += blocks * list_bytes(ffn);
  chunk.h = at;
  return chunk;
}

cudaError_t portable_chunk(const Ffn& ffn, int64_t first, int64_t count, const void* gate, void* workspace,
                           const Device& device, cudaStream_t stream) {
  const int64_t most = portable_chunk_tokens(ffn);
  if (first < 0 || count < 0 || count > most || first + count > ffn.tokens) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  const Chunk chunk = make_chunk(ffn, first, count, gate, workspace);
  cudaError_t error = pack(chunk, stream);
  if (error == cudaSuccess && chunk.up != nullptr) error = up(chunk, device, stream);
  if (error == cudaSuccess) error = down(chunk, device, stream);
  return error;
}

}  // namespace twell
