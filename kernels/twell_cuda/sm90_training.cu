// Training on compute capability 9.0, chunk by chunk of tokens. NOTES.md says what is kept and why.

#include "sm90_training.h"

#include "sm90_launch.h"
#include "sm90_primitives.cuh"
#include "sm90_workspace.h"

namespace twell {
namespace sm90 {
namespace {

// Of the columns of one chunk. In forward they are most of what it holds; in backward the gradients lie beside them.
constexpr int64_t kForwardBytes = int64_t{176} << 20, kBackwardBytes = int64_t{48} << 20;

int64_t forward_blocks(const Ffn& ffn) { return chunk_blocks(ffn, kForwardBytes, ffn.up == nullptr ? 1 : 2); }
int64_t backward_blocks(const Ffn& ffn) { return chunk_blocks(ffn, kBackwardBytes, ffn.up == nullptr ? 1 : 2); }

int64_t whole_groups(int64_t entries) { return (entries + kGroup - 1) / kGroup * kGroup; }

// Blocks use about a third as many entries as pairs where few neurons are active, and fewer where more are.
int64_t block_entries(const Ffn& ffn, int64_t capacity) {
  return std::min(whole_groups(ffn.width), whole_groups(256 + 20 * capacity));
}

State place_state(const Ffn& ffn, int64_t capacity, Cutter& cutter) {
  State state;
  const int64_t blocks = count_blocks(ffn);
  state.entries = blocks * block_entries(ffn, capacity);
  state.pairs = blocks * kBlockTokens * capacity;
  cutter.cut(state.totals, 3 * 8);
  cutter.cut(state.blocks, blocks * static_cast<int64_t>(sizeof(BlockState)));
  cutter.cut(state.tokens, state.entries * 16);
  cutter.cut(state.first_pairs, state.entries / kGroup * 4);
  cutter.cut(state.neurons, state.entries * 2);
  cutter.cut(state.gate, state.pairs * 2);
  state.up = nullptr;
  if (ffn.up != nullptr) cutter.cut(state.up, state.pairs * 2);
  return state;
}
static_assert(sizeof(BlockState) == 32);

void place_forward(const Ffn& ffn, Cutter& cutter, Active* active, Saving* saving) {
  const int64_t blocks = forward_blocks(ffn);
  place_active(ffn, blocks, true, cutter, active);
  saving->groups = static_cast<int>((active->row + kGroup - 1) / kGroup);
  cutter.cut(saving->tokens, blocks * active->row * 16);
  cutter.cut(saving->pairs, blocks * saving->groups * 4);
  cutter.cut(saving->sums, blocks * 4);
  cutter.cut(saving->activity, blocks * ffn.width * 4);
  cutter.cut(saving->l1, blocks * saving->groups * 4);
}

// Where the weights' sums of many pairs lie the chunks are done with.
struct Backward {
  Active active;
  Sorted sorted;
  int64_t* totals;  // of the state, with whole chunks kept
  void* partials;
};

Backward place_backward(const Ffn& ffn, const State& state, bool weights, void* workspace, int64_t* bytes) {
  Backward b{};
  Cutter cutter(workspace);
  cutter.cut(b.totals, 3 * 8);
  if (weights) {
    cutter.cut(b.sorted.first, (int64_t{ffn.width} + 1) * 8);
    cutter.cut(b.sorted.places, count_blocks(ffn) * ffn.width * 4);
    cutter.cut(b.sorted.tokens, state.pairs * 4);
    cutter.cut(b.sorted.h, state.pairs * 2);
    cutter.cut(b.sorted.dg, state.pairs * 2);
    if (ffn.up != nullptr) cutter.cut(b.sorted.du, state.pairs * 2);
  }
  Cutter later = cutter;
  place_active(ffn, backward_blocks(ffn), true, cutter, &b.active);
  later.cut(b.partials, weights ? weights_partial_bytes(ffn, state.pairs) : 0);
  if (bytes != nullptr) *bytes = std::max(cutter.used(), later.used());
  return b;
}

// A chunk of which some block was not kept is computed again as a whole.
__global__ void round_kept_kernel(const int64_t* totals, int64_t blocks, int64_t chunk, int64_t* rounded) {
#if defined(TWELL_SM90_DEVICE)
  launch_dependents();
  wait_for_previous();
  rounded[0] = totals[0] == blocks ? blocks : totals[0] / chunk * chunk;
  rounded[1] = totals[1];
  rounded[2] = totals[2];
#endif
}

}  // namespace
}  // namespace sm90

using namespace sm90;

int64_t sm90_state_bytes(const Ffn& ffn, int64_t capacity) {
  Cutter cutter(nullptr);
  if (ffn.tokens > 0) place_state(ffn, capacity, cutter);
  return cutter.used();
}

int64_t sm90_training_bytes(const Ffn& ffn) {
  Cutter cutter(nullptr);
  Active active;
  Saving saving;
  place_forward(ffn, cutter, &active, &saving);
  return cutter.used();
}

cudaError_t sm90_training_forward(const Ffn& ffn, const L1& l1, int64_t capacity, void* state, void* workspace,
                                  const Device& device, cudaStream_t stream) {
  Chunk chunk{};
  Saving saving;
  Cutter cutter(workspace), state_cutter(state);
  place_forward(ffn, cutter, &chunk.active, &saving);
  const Training training{l1.scale, l1.token_weight, l1.report, place_state(ffn, capacity, state_cutter)};
  TWELL_RETURN_IF_ERROR(cudaMemsetAsync(training.state.totals, 0, 3 * 8, stream));
  if (l1.report != nullptr) TWELL_RETURN_IF_ERROR(cudaMemsetAsync(l1.report, 0, (1 + size_t(ffn.width)) * 4, stream));
  for (; chunk.first < ffn.tokens; chunk.first += chunk.tokens) {
    fit(ffn, forward_blocks(ffn), &chunk);
    TWELL_RETURN_IF_ERROR(launch_gate(ffn, chunk, device, stream));
    TWELL_RETURN_IF_ERROR(launch_list(ffn, chunk, device, stream));
    if (ffn.up != nullptr) TWELL_RETURN_IF_ERROR(launch_up_beside(ffn, chunk, device, stream));
    TWELL_RETURN_IF_ERROR(launch_mark(ffn, chunk, saving, device, stream));
    TWELL_RETURN_IF_ERROR(launch_place(chunk, saving, training.state, device, stream));
    TWELL_RETURN_IF_ERROR(launch_save(ffn, chunk, saving, training, device, stream));
    if (l1.report != nullptr) TWELL_RETURN_IF_ERROR(launch_report(ffn, chunk, saving, training, device, stream));
    TWELL_RETURN_IF_ERROR(launch_down(ffn, chunk, device, stream));
  }
  return cudaSuccess;
}

int64_t sm90_backward_bytes(const Ffn& ffn, int64_t capacity, bool weights) {
  Cutter cutter(nullptr);
  int64_t bytes = 0;
  place_backward(ffn, place_state(ffn, capacity, cutter), weights, nullptr, &bytes);
  return bytes;
}

cudaError_t sm90_backward(const Ffn& ffn, const L1& l1, int64_t capacity, const void* saved, const Gradients& gradients,
                          void* workspace, const Device& device, cudaStream_t stream) {
  const int64_t blocks = count_blocks(ffn), of_chunk = backward_blocks(ffn);
  const bool weights = gradients.weights();
  Cutter state_cutter(const_cast<void*>(saved));
  State state = place_state(ffn, capacity, state_cutter);
  const Backward b = place_backward(ffn, state, weights, workspace, nullptr);
  TWELL_RETURN_IF_ERROR(launch_kernel(round_kept_kernel, 1, 1, 1, 0, stream, state.totals, blocks, of_chunk, b.totals));
  state.totals = b.totals;
  const Training training{l1.scale, l1.token_weight, nullptr, state};
  if (weights) TWELL_RETURN_IF_ERROR(launch_sort(ffn, state, b.sorted, blocks, device, stream));
  Chunk chunk{};
  chunk.active = b.active;
  chunk.kept = state.totals;
  for (; chunk.first < ffn.tokens; chunk.first += chunk.tokens) {
    fit(ffn, of_chunk, &chunk);
    TWELL_RETURN_IF_ERROR(launch_unpack(ffn, chunk, state, device, stream));
    TWELL_RETURN_IF_ERROR(launch_gate(ffn, chunk, device, stream));
    TWELL_RETURN_IF_ERROR(launch_list(ffn, chunk, device, stream));
    if (ffn.up != nullptr) TWELL_RETURN_IF_ERROR(launch_up_beside(ffn, chunk, device, stream));
    if (weights) TWELL_RETURN_IF_ERROR(launch_add_down(ffn, chunk, state, gradients, device, stream));
    TWELL_RETURN_IF_ERROR(launch_dh(ffn, chunk, training, gradients, device, stream));
    if (gradients.x != nullptr) TWELL_RETURN_IF_ERROR(launch_dx(ffn, chunk, gradients, device, stream));
    if (!weights) continue;
    TWELL_RETURN_IF_ERROR(launch_collect(ffn, chunk, state, b.sorted, device, stream));
    TWELL_RETURN_IF_ERROR(launch_add_gate_up(ffn, chunk, state, gradients, device, stream));
  }
  if (!weights) return cudaSuccess;
  return launch_weights(ffn, state, b.sorted, gradients, b.partials, blocks, device, stream);
}

}  // namespace twell
