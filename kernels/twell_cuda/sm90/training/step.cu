// The launches of a training step, chunk by chunk of tokens. DESIGN.md says what is kept and why.

#include "sm90/training/step.h"

#include <type_traits>

#include "sm90/common/launch.h"
#include "sm90/common/primitives.cuh"
#include "sm90/common/workspace.h"
#include "sm90/training/columns.h"
#include "sm90/training/chunks.h"
#include "sm90/training/training.h"
#include "twell_state.h"

namespace twell {
namespace sm90 {
namespace {

// Of the columns of one chunk in backward, where the gradients lie beside them.
constexpr int64_t kBackwardBytes = int64_t{72} << 20;
int column_buffers(const Ffn& ffn) { return !ffn.gated() ? 1 : 2; }
// `given` bytes are there at any rate; a 64th of them is more than what lies beside the columns.
int64_t backward_blocks(const Ffn& ffn, int64_t given) {
  const int64_t least = (count_blocks(ffn) + kMostChunks - 1) / kMostChunks;
  const int64_t least_bytes = least * kBlockTokens * ffn.width * 2 * column_buffers(ffn);
  return chunk_blocks(ffn, std::max({kBackwardBytes, least_bytes, given - given / 64}), column_buffers(ffn));
}

State place_state(const Ffn& ffn, int64_t capacity, void* memory) {
  const CudaStateLayout layout = cuda_state_layout(ffn.width, capacity, ffn.gated());
  const int64_t blocks = count_blocks(ffn);
  State state{};
  state.entries = blocks * layout.entries;
  state.pairs = blocks * layout.pairs;
  if (memory == nullptr) return state;  // only the room matters
  char* next = static_cast<char*>(memory);
  const auto place = [&](auto*& part, int64_t block_bytes) {
    part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(next);
    next += blocks * block_bytes;
  };
  place(state.tokens, layout.tokens);
  place(state.values, layout.values);
  place(state.neurons, layout.neurons);
  place(state.first_pairs, layout.first_pairs);
  place(state.totals, layout.totals);
  place(state.blocks, layout.blocks);
  return state;
}
static_assert(CudaStateLayout::kBlockTokens == kBlockTokens && CudaStateLayout::kGroup == kGroup);
static_assert(sizeof(BlockState) == 32);

void place_forward(const Ffn& ffn, Cutter& cutter, Active* active, Saving* saving) {
  const int64_t blocks = forward_blocks(ffn);
  place_active(ffn, blocks, false, cutter, active);
  *saving = {};
  cutter.cut(saving->entries, blocks * active->row * 16);
  cutter.cut(saving->slots, kSlots * 8);
  place_sums(ffn, blocks, ffn.gated(), cutter, saving);
}

// What is needed at different times lies in the same place: pairs first, then what was not kept, chunk by chunk. Chunks
// take the room that pairs need: fewer launches that end at once, and fewer sums that are rounded.
struct Backward {
  Sorted sorted;
  PairGradients pairs;
  void* partials;
  Active active;
  int64_t blocks;  // of a chunk
};

Backward place_backward(const Ffn& ffn, const State& state, bool weights, void* workspace, int64_t* bytes) {
  Backward b{};
  Cutter first(workspace), then(workspace);
  first.cut(b.pairs.values, state.pairs * 4);
  first.cut(b.pairs.places, state.pairs * 2);
  if (weights) {
    first.cut(b.sorted.first, (int64_t{ffn.width} + 1) * 8);
    first.cut(b.sorted.slots, sort_slots(ffn.width) * 8);
    first.cut(b.sorted.places, count_blocks(ffn) * ffn.width * 4);
    first.cut(b.sorted.pairs, state.pairs * 8);
    first.cut(b.sorted.h, state.pairs * 2);
    first.cut(b.partials, weights_partial_bytes(ffn, state.pairs));
  }
  b.blocks = backward_blocks(ffn, first.used());
  place_active(ffn, b.blocks, true, then, &b.active);
  if (bytes != nullptr) *bytes = std::max(first.used(), then.used());
  return b;
}

// What was not kept, chunk by chunk of all tokens: the launches end at once where a chunk was.
cudaError_t launch_not_kept(const Ffn& ffn, const Training& training, const Backward& b, const Gradients& gradients,
                            const Device& device, cudaStream_t stream) {
  const bool weights = gradients.weights();
  Chunk chunk{};
  chunk.kept = training.state.totals;
  chunk.active = b.active;
  for (; chunk.first < ffn.tokens; chunk.first += chunk.tokens) {
    fit(ffn, b.blocks, &chunk);
    TWELL_RETURN_IF_ERROR(launch_gate(ffn, chunk, device, stream));
    chunk.known = true;  // the gate lets others start only after its wait
    TWELL_RETURN_IF_ERROR(launch_list(ffn, chunk, device, stream));
    if (ffn.gated()) TWELL_RETURN_IF_ERROR(launch_up_beside(ffn, chunk, nullptr, device, stream));
    if (weights) TWELL_RETURN_IF_ERROR(launch_add_down(ffn, chunk, true, gradients, device, stream));
    const Columns places{chunk.active.columns, chunk.active.ups, nullptr};
    TWELL_RETURN_IF_ERROR(launch_dh(ffn, chunk, training.terms, gradients.dy, places, device, stream));
    if (gradients.x != nullptr) TWELL_RETURN_IF_ERROR(launch_dx(ffn, chunk, gradients, device, stream));
    if (weights) TWELL_RETURN_IF_ERROR(launch_add_gate_up(ffn, chunk, true, gradients, device, stream));
  }
  return cudaSuccess;
}

}  // namespace
}  // namespace sm90

using namespace sm90;

int64_t sm90_state_bytes(const Ffn& ffn, int64_t capacity) {
  return count_blocks(ffn) * cuda_state_bytes(ffn.width, capacity, ffn.gated());
}

int64_t sm90_training_bytes(const Ffn& ffn, int64_t capacity) {
  if (keeps_columns(ffn.width, capacity)) return columns_forward_bytes(ffn);
  Cutter cutter(nullptr);
  Active active;
  Saving saving;
  place_forward(ffn, cutter, &active, &saving);
  return cutter.used();
}

cudaError_t sm90_training_forward(const Ffn& ffn, const Transposition& down, const Terms& terms, int64_t capacity,
                                  void* state, void* workspace, const Device& device, cudaStream_t stream) {
  if (keeps_columns(ffn.width, capacity)) return columns_forward(ffn, down, terms, state, workspace, device, stream);
  Chunk chunk{};
  Saving saving;
  Cutter cutter(workspace);
  place_forward(ffn, cutter, &chunk.active, &saving);
  const Training training{terms, place_state(ffn, capacity, state)};
  for (; chunk.first < ffn.tokens; chunk.first += chunk.tokens) {
    fit(ffn, forward_blocks(ffn), &chunk);
    TWELL_RETURN_IF_ERROR(launch_gate(ffn, chunk, device, stream));
    const bool first = chunk.first == 0;  // save finds these as its chunks before left them
    const Zeroed totals{reinterpret_cast<uint64_t*>(training.state.totals), first ? 3 : 0};
    TWELL_RETURN_IF_ERROR(launch_list(ffn, chunk, device, stream, totals, {saving.slots, first ? kSlots : 0}));
    ++saving.turn;
    TWELL_RETURN_IF_ERROR(launch_save(ffn, chunk, saving, training, device, stream));
    if (ffn.gated()) TWELL_RETURN_IF_ERROR(launch_up_save(ffn, chunk, saving, training, device, stream));
    TWELL_RETURN_IF_ERROR(add_to_report(ffn, chunk, forward_blocks(ffn), terms.report, &saving, stream));
    // Beside the report, and where up ends on some SMs before others: the gate has waited for all that came before.
    if (first && down.from != nullptr) TWELL_RETURN_IF_ERROR(transpose(down, Start::kBeside, stream));
    TWELL_RETURN_IF_ERROR(launch_down(ffn, chunk, device, stream));
  }
  return cudaSuccess;
}

int64_t sm90_backward_bytes(const Ffn& ffn, int64_t capacity, bool weights, const Runs& runs, const Device& device) {
  if (keeps_columns(ffn.width, capacity)) return columns_backward_bytes(ffn, weights, runs, device);
  int64_t bytes = 0;
  place_backward(ffn, place_state(ffn, capacity, nullptr), weights, nullptr, &bytes);
  return bytes;
}

cudaError_t sm90_backward(const Ffn& ffn, const Transposition& down, const Terms& terms, int64_t capacity,
                          const void* saved, const Gradients& gradients, void* workspace, const Device& device,
                          cudaStream_t stream) {
  if (keeps_columns(ffn.width, capacity)) {
    return columns_backward(ffn, down, terms, saved, gradients, workspace, device, stream);
  }
  const int64_t blocks = count_blocks(ffn);
  const bool weights = gradients.weights();
  const State state = place_state(ffn, capacity, const_cast<void*>(saved));
  const Training training{terms, state};
  const Backward b = place_backward(ffn, state, weights, workspace, nullptr);
  if (weights) {
    TWELL_RETURN_IF_ERROR(launch_sort(ffn, state, b.sorted, blocks, device, stream));
    TWELL_RETURN_IF_ERROR(launch_weights_plan(ffn, state, b.sorted, gradients, b.partials, stream));
  }
  if (down.from != nullptr) {  // the plan takes one SM; sort has waited for all that came before
    TWELL_RETURN_IF_ERROR(transpose(down, weights ? Start::kBeside : Start::kAfter, stream));
  }
  Chunk chunk{};
  chunk.kept = state.totals;
  for (; chunk.first < ffn.tokens; chunk.first += chunk.tokens) {
    fit(ffn, kMaxBlocks, &chunk);
    TWELL_RETURN_IF_ERROR(launch_pair_dh(ffn, chunk, training, gradients, b.pairs, b.sorted, device, stream));
    if (gradients.x == nullptr) continue;
    TWELL_RETURN_IF_ERROR(launch_pair_dx(ffn, chunk, state, b.pairs, gradients, device, stream));
  }
  if (weights) {
    const bool beside_dx = gradients.x != nullptr;
    TWELL_RETURN_IF_ERROR(launch_weights(ffn, state, b.sorted, gradients, b.partials, beside_dx, device, stream));
  }
  return launch_not_kept(ffn, training, b, gradients, device, stream);
}

}  // namespace twell
