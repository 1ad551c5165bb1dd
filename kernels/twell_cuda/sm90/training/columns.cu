// The launches of a training step that keeps columns, chunk by chunk of tokens.

#include "sm90/training/columns.h"

#include "sm90/training/chunks.h"
#include "sm90/training/runs.h"
#include "sm90/training/training.h"
#include "sm90/training/weights_columns.h"
#include "twell_state.h"

namespace twell::sm90 {
namespace {

constexpr int64_t kGradientBytes = int64_t{576} << 20;  // of a chunk's columns of dg, du and h

int64_t backward_blocks(const Ffn& ffn) {
  const int64_t least = (count_blocks(ffn) + kMostChunks - 1) / kMostChunks;
  return std::max(chunk_blocks(ffn, kGradientBytes, ffn.gated() ? 3 : 1), std::min<int64_t>(least, kMaxBlocks));
}

// What is kept of the chunk's blocks.
Active kept_columns(const Ffn& ffn, const Chunk& chunk, void* state) {
  const CudaColumnsLayout layout = cuda_columns_layout(ffn.width, ffn.gated());
  const int64_t all = count_blocks(ffn), first = chunk.first_block();
  Active active = chunk.active;
  active.words = (ffn.width + 31) / 32;
  active.row = (ffn.width + 7) / 8 * 8;
  char* next = static_cast<char*>(state);
  const auto place = [&](int64_t block_bytes, int64_t stride) {
    char* const part = next + first * stride;
    next += all * block_bytes;
    return part;
  };
  active.masks = reinterpret_cast<uint32_t*>(place(layout.masks, int64_t{2} * active.words * 4));
  active.counts = reinterpret_cast<Counts*>(place(layout.counts, sizeof(Counts)));
  active.neurons = reinterpret_cast<uint16_t*>(place(layout.neurons, int64_t{active.row} * 2));
  active.columns = place(layout.columns, layout.columns);
  active.ups = ffn.gated() ? place(layout.ups, layout.ups) : nullptr;
  return active;
}

// Forward's columns of h, of a chunk, and the sums of the report.
void place_forward(const Ffn& ffn, Cutter& cutter, void** h, Saving* saving) {
  const int64_t blocks = forward_blocks(ffn);
  *h = nullptr;
  *saving = {};
  if (ffn.gated()) cutter.cut(*h, blocks * ffn.width * kBlockTokens * 2);
  place_sums(ffn, blocks, false, cutter, saving);
}

struct Backward {
  Columns columns;
  WeightScratch weights;
  RunScratch runs;
};
Backward place_backward(const Ffn& ffn, bool weights, const Runs& runs, const Device& device, Cutter& cutter) {
  const int64_t blocks = backward_blocks(ffn), bytes = blocks * ffn.width * kBlockTokens * 2;
  Backward b{};
  cutter.cut(b.columns.gate, bytes);
  if (ffn.gated()) cutter.cut(b.columns.up, bytes);
  if (ffn.gated() && weights) cutter.cut(b.columns.h, bytes);
  if (weights) place_weights(ffn, blocks, device, cutter, &b.weights);
  if (runs.run != nullptr) place_runs(ffn, runs.count, cutter, &b.runs);
  return b;
}

}  // namespace

int64_t columns_forward_bytes(const Ffn& ffn) {
  Cutter cutter(nullptr);
  void* h;
  Saving saving;
  place_forward(ffn, cutter, &h, &saving);
  return cutter.used();
}

cudaError_t columns_forward(const Ffn& ffn, const Transposition& down, const Terms& terms, void* state, void* workspace,
                            const Device& device, cudaStream_t stream) {
  Cutter cutter(workspace);
  void* h;
  Saving saving;
  place_forward(ffn, cutter, &h, &saving);
  Chunk chunk{};
  for (; chunk.first < ffn.tokens; chunk.first += chunk.tokens) {
    fit(ffn, forward_blocks(ffn), &chunk);
    chunk.active = kept_columns(ffn, chunk, state);
    TWELL_RETURN_IF_ERROR(launch_gate(ffn, chunk, device, stream));
    TWELL_RETURN_IF_ERROR(launch_list(ffn, chunk, device, stream));
    if (ffn.gated()) TWELL_RETURN_IF_ERROR(launch_up_beside(ffn, chunk, h, device, stream));
    Chunk products = chunk;
    if (ffn.gated()) products.active.columns = h;
    if (terms.report != nullptr) {
      TWELL_RETURN_IF_ERROR(launch_sum_columns(ffn, chunk, products.active.columns, saving, terms, device, stream));
    }
    TWELL_RETURN_IF_ERROR(add_to_report(ffn, chunk, forward_blocks(ffn), terms.report, &saving, stream));
    // Beside the report, or the end of up: the gate has waited for all that came before.
    if (chunk.first == 0 && down.from != nullptr) TWELL_RETURN_IF_ERROR(transpose(down, Start::kBeside, stream));
    TWELL_RETURN_IF_ERROR(launch_down(ffn, products, device, stream));
  }
  return cudaSuccess;
}

int64_t columns_backward_bytes(const Ffn& ffn, bool weights, const Runs& runs, const Device& device) {
  Cutter cutter(nullptr);
  place_backward(ffn, weights, runs, device, cutter);
  return cutter.used();
}

cudaError_t columns_backward(const Ffn& ffn, const Transposition& down, const Terms& terms, const void* state,
                             const Gradients& gradients, void* workspace, const Device& device, cudaStream_t stream) {
  const bool weights = gradients.weights();
  Gradients biases{};
  biases.b_gate = gradients.b_gate, biases.b_up = gradients.b_up;
  Cutter cutter(workspace);
  const Backward b = place_backward(ffn, weights, terms.runs, device, cutter);
  const bool products = gradients.gate != nullptr || gradients.up != nullptr || gradients.down != nullptr;
  if (terms.runs.run != nullptr) {  // which may go on from one chunk to the next
    Chunk all{};
    fit(ffn, count_blocks(ffn), &all);
    all.active = kept_columns(ffn, all, const_cast<void*>(state));
    TWELL_RETURN_IF_ERROR(launch_find_strongest(ffn, all, terms.runs, b.runs, device, stream));
  }
  Chunk chunk{};
  for (; chunk.first < ffn.tokens; chunk.first += chunk.tokens) {
    fit(ffn, backward_blocks(ffn), &chunk);
    chunk.active = kept_columns(ffn, chunk, const_cast<void*>(state));  // which stays as it is: a graph may be kept
    Chunk of_gradients = chunk;
    of_gradients.active.columns = b.columns.gate;
    of_gradients.active.ups = b.columns.up;
    if (products) TWELL_RETURN_IF_ERROR(launch_weights_lists(ffn, chunk, b.weights, stream));
    // Beside the lists, which take little and have waited for all that came before.
    if (chunk.first == 0 && down.from != nullptr) {
      TWELL_RETURN_IF_ERROR(transpose(down, products ? Start::kBeside : Start::kAfter, stream));
    }
    TWELL_RETURN_IF_ERROR(launch_dh(ffn, chunk, terms, gradients.dy, b.columns, device, stream));
    if (terms.runs.run != nullptr) {
      TWELL_RETURN_IF_ERROR(launch_add_strongest(ffn, chunk, terms, b.runs, b.columns.gate, device, stream));
    }
    if (gradients.x != nullptr) TWELL_RETURN_IF_ERROR(launch_dx(ffn, of_gradients, gradients, device, stream));
    if (!weights) continue;
    const bool adds = chunk.first > 0;
    const ValueColumns values{ffn.gated() ? b.columns.h : chunk.active.columns, b.columns.gate, b.columns.up};
    TWELL_RETURN_IF_ERROR(launch_weights_of_columns(ffn, chunk, values, adds, gradients, b.weights, device, stream));
    TWELL_RETURN_IF_ERROR(launch_add_gate_up(ffn, of_gradients, adds, biases, device, stream));
  }
  return cudaSuccess;
}

}  // namespace twell::sm90
