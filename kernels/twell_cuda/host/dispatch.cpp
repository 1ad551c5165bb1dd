#include "host/dispatch.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>

#include "decode/decode.h"
#include "portable/portable.h"
#include "sm90/prefill/prefill.h"
#include "sm90/prefill/prefill_fp8.h"
#include "twell_limits.h"
#include "twell_state.h"

namespace twell {
namespace {

// A call on its way to kernels.
struct Call {
  const Ffn& ffn;
  const sm90::MidPlan& plan;
  const Device& device;
  cudaStream_t stream;
  const Services& services;
};

enum class Gpu { kAny, kHopper };  // compute capability 8.0 or later; 9.0 alone

// What kernels multiply: weights of the call's own type; 8-bit ones with scales, as they lie; or e4m3 ones by
// quantized x.
enum class Weights { kPlain, kScaled, kFp8 };

Weights weights_of(const Ffn& ffn) {
  if (!ffn.scaled()) return Weights::kPlain;
  return ffn.quantize_x && ffn.tokens > kDecodeMaxTokens ? Weights::kFp8 : Weights::kScaled;
}

// ---- Whether D and F suit how kernels share out work

bool fits_fused(const Ffn& ffn, const Device& device, sm90::MidPlan*) { return decoding::takes_fused(ffn, device); }
bool fits_mid_half(const Ffn& ffn, const Device& device, sm90::MidPlan* plan) {
  return sm90::plan_mid_half(ffn, device, plan);
}
bool fits_mid(const Ffn& ffn, const Device& device, sm90::MidPlan* plan) { return sm90::plan_mid(ffn, device, plan); }
bool always(const Ffn&, const Device&, sm90::MidPlan*) { return true; }
bool sixteens(const Ffn& ffn, const Device&, sm90::MidPlan*) { return ffn.hidden % 16 == 0; }  // 16 bytes of 8-bit ones
bool fused_sixteens(const Ffn& ffn, const Device& device, sm90::MidPlan*) {
  return ffn.hidden % 16 == 0 && decoding::takes_fused(ffn, device);
}

// ---- What computes a call

cudaError_t run_decode(const Call& call, const decoding::Launchers& launchers, decoding::Kernels kernels) {
  kernels.overlap = call.device.major >= 9;
  void* const workspace = call.services.workspace(decode_workspace_bytes(call.ffn));
  return decode(call.ffn, launchers, kernels, call.device, workspace, call.stream);
}

// Of Hopper's decode kernels, all alike, as those of neighbouring calls overlap.
decoding::Kernels hopper_kernels() {
  decoding::Kernels kernels{};
  kernels.carveout = 100;
  return kernels;
}

cudaError_t fused(const Call& call) {
  decoding::Kernels kernels = hopper_kernels();
  if (call.ffn.tokens <= decoding::kFusedWarmMaxTokens) {
    kernels.fused.warm = true;              // as a model's other weights pass through L2 between two calls
    kernels.fused.window_bytes = 48 << 10;  // for more tokens 64 KiB: nothing else was timed there
  }
  return run_decode(call, decoding::fused_launchers(), kernels);
}

cudaError_t bulk(const Call& call) {
  return run_decode(call, decoding::bulk_launchers(call.ffn.gate.dtype), hopper_kernels());
}

cudaError_t few(const Call& call) {
  return run_decode(call, decoding::few_launchers(call.ffn.gate.dtype), hopper_kernels());
}

cudaError_t few_pieces(const Call& call) {
  decoding::Kernels kernels = hopper_kernels();
  kernels.overlap = true;
  return decode_pieces(call.ffn, decoding::few_launchers(call.ffn.gate.dtype), kernels, call.device,
                       call.services.workspace(pieces_workspace_bytes(call.ffn)), call.stream);
}

cudaError_t mma(const Call& call) { return run_decode(call, decoding::mma_launchers(call.ffn.gate.dtype), {}); }

cudaError_t mid(const Call& call) {
  void* const workspace = call.services.workspace(sm90::prefill_workspace_bytes(call.ffn, call.device));
  return sm90::mid_forward(call.ffn, call.plan, call.device, workspace, call.stream);
}

cudaError_t prefill(const Call& call) {
  void* const workspace = call.services.workspace(sm90::prefill_workspace_bytes(call.ffn, call.device));
  return sm90::prefill_forward(call.ffn, call.device, workspace, call.stream);
}

cudaError_t prefill_fp8(const Call& call) {
  void* const workspace = call.services.workspace(sm90::prefill_fp8_workspace_bytes(call.ffn, call.device));
  return sm90::prefill_fp8_forward(call.ffn, call.device, workspace, call.stream);
}

cudaError_t portable(const Call& call) {
  const Ffn& ffn = call.ffn;
  void* const workspace = call.services.workspace(portable_workspace_bytes(ffn));
  const int64_t chunk = portable_chunk_tokens(ffn);
  for (int64_t first = 0; first < ffn.tokens; first += chunk) {
    const int64_t count = std::min(chunk, ffn.tokens - first);
    const void* const gate = call.services.dense_gate(first, count);
    const cudaError_t error = portable_chunk(ffn, first, count, gate, workspace, call.device, call.stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

struct Row {
  const char* path;  // its name in HF_TWELL_CUDA_PATH
  Gpu gpu;
  int64_t least_tokens, most_tokens;
  double millions;                                          // of elements of one matrix, D x F / 2^20, at least
  bool (*fits)(const Ffn&, const Device&, sm90::MidPlan*);  // whether D and F suit how these kernels share out work
  cudaError_t (*run)(const Call&);
  Weights weights = Weights::kPlain;
};

namespace {

// Up to so many tokens 8-bit weights are read as they lie, by the kernels for few, at most 64 tokens at a time: these
// take 21 us, where a call that dequantizes first takes about 80 (LOG.md).
constexpr int64_t kAboveDecode = kDecodeMaxTokens + 1, kPiecesMaxTokens = 3 * kDecodeMaxTokens;

// The first row that takes a call computes it. Where one gives way to the next was measured on an H200 (DESIGN.md): few
// tokens are bound by the weights' traffic, many by arithmetic.
// clang-format off
constexpr Row kTable[] = {
    // path      GPU           tokens                          D x F  fits            run
    {"decode",   Gpu::kHopper, 1, 2,                           2,     fits_fused,     fused},
    {"decode",   Gpu::kHopper, 1, 2,                           4,     always,         bulk},
    {"decode",   Gpu::kHopper, 3, 8,                           6,     fits_fused,     fused},
    {"decode",   Gpu::kHopper, 3, 8,                           32,    always,         bulk},
    {"decode",   Gpu::kHopper, 3, 8,                           2,     always,         few},
    {"decode",   Gpu::kHopper, 9, kDecodeMaxTokens,            0,     always,         few},
    {"decode",   Gpu::kAny,    1, kDecodeMaxTokens,            0,     always,         mma},
    {"decode",   Gpu::kHopper, 1, 2,                           2,     fused_sixteens, fused,       Weights::kScaled},
    {"decode",   Gpu::kHopper, 1, 2,                           4,     sixteens,       bulk,        Weights::kScaled},
    {"decode",   Gpu::kHopper, 3, 8,                           2,     sixteens,       few,         Weights::kScaled},
    {"decode",   Gpu::kHopper, 9, kDecodeMaxTokens,            0,     sixteens,       few,         Weights::kScaled},
    {"decode",   Gpu::kHopper, kAboveDecode, kPiecesMaxTokens, 0,     sixteens,       few_pieces,  Weights::kScaled},
    {"decode",   Gpu::kAny,    1, kDecodeMaxTokens,            0,     sixteens,       mma,         Weights::kScaled},
    {"sm90",     Gpu::kHopper, kAboveDecode, kMany,            0,     sixteens,       prefill_fp8, Weights::kFp8},
    {"sm90",     Gpu::kHopper, 1, sm90::kMidMaxHalfTokens,     0,     fits_mid_half,  mid},
    {"sm90",     Gpu::kHopper, 1, sm90::kMidMaxTokens,         0,     fits_mid,       mid},
    {"sm90",     Gpu::kHopper, 1, kMany,                       0,     always,         prefill},
    {"portable", Gpu::kAny,    1, kMany,                       0,     always,         portable},
};
// clang-format on

bool is_hopper(const Device& device) { return device.major == 9 && device.minor == 0; }

bool takes(const Row& row, const Ffn& ffn, const Device& device, sm90::MidPlan* plan) {
  return row.weights == weights_of(ffn) && (row.gpu == Gpu::kAny || is_hopper(device)) &&
         row.least_tokens <= ffn.tokens && ffn.tokens <= row.most_tokens &&
         static_cast<double>(ffn.hidden) * ffn.width >= row.millions * (1 << 20) && row.fits(ffn, device, plan);
}

// What HF_TWELL_CUDA_PATH asks for; null where it does not.
const char* wanted_path() {
  const char* wanted = std::getenv("HF_TWELL_CUDA_PATH");
  return wanted && *wanted ? wanted : nullptr;
}

// The first of the rows from `row` on that takes the call, of the path that is asked for.
Selection first_from(const Row* row, const Ffn& ffn, const Device& device) {
  const char* const path = wanted_path();
  Selection selected;
  for (; row != std::end(kTable); ++row) {
    if (path != nullptr && std::strcmp(row->path, path) != 0) continue;
    if (!takes(*row, ffn, device, &selected.plan)) continue;
    selected.row = row;
    break;
  }
  return selected;
}

std::string capability_of(const Device& device) {
  return std::to_string(device.major) + "." + std::to_string(device.minor);
}

std::string allowed_paths(const Ffn& ffn, const Device& device) {
  std::string names, last;
  sm90::MidPlan plan;
  for (const Row& row : kTable) {
    if (row.path == last || !takes(row, ffn, device, &plan)) continue;
    last = row.path;
    names += (names.empty() ? "" : ", ") + last;
  }
  return names;
}

void check_weights(const Ffn& ffn) {
  const auto readable = [&](const Operand& weight) {
    return is_readable(weight, ffn) && weight.dtype == ffn.gate.dtype;
  };
  if (!readable(ffn.gate) || !readable(ffn.down) || (ffn.gated() && !readable(ffn.up))) {
    throw std::runtime_error(
        "hf_twell's CUDA kernels read weights in contiguous rows, all of the activations' type, or all int8 or all "
        "float8_e4m3fn with scales");
  }
}

}  // namespace

bool has_kernels(DType dtype) { return dtype != DType::kFloat32; }

Selection select_row(const Ffn& ffn, const Device& device) {
  if (ffn.quantize_x && ffn.gate.dtype != DType::kE4m3) {
    throw std::runtime_error("quantize_x is for float8_e4m3fn weights with scales; leave it out for others");
  }
  const Selection selected = has_kernels(ffn.dtype) ? first_from(kTable, ffn, device) : Selection{};
  if (selected.row != nullptr) return selected;
  const char* const path = wanted_path();
  const std::string wanted = path ? path : "";
  if (weights_of(ffn) == Weights::kFp8) {
    throw std::runtime_error(
        "hf_twell's CUDA kernels quantize x on compute capability 9.0, in bfloat16 and float16, with D a multiple of "
        "16" +
        std::string(path ? ", by HF_TWELL_CUDA_PATH=sm90 and not " + wanted : "") + "; here D is " +
        std::to_string(ffn.hidden) + ", on " + capability_of(device) + "; use backend='reference'");
  }
  if (ffn.scaled()) return selected;
  throw std::runtime_error("HF_TWELL_CUDA_PATH=" + wanted + " cannot compute " + std::to_string(ffn.tokens) +
                           " tokens on a GPU of compute capability " + capability_of(device) + "; allowed here: " +
                           allowed_paths(ffn, device) + " (decode takes up to " + std::to_string(kDecodeMaxTokens) +
                           " tokens, of 8-bit weights " + std::to_string(kPiecesMaxTokens) + "; sm90 needs 9.0)");
}

void forward(const Ffn& ffn, Selection selected, const Device& device, cudaStream_t stream, const Services& services) {
  check_weights(ffn);
  cudaError_t error = selected.row->run({ffn, selected.plan, device, stream, services});
  if (error == cudaErrorNotSupported) {  // it gave the call back
    selected = first_from(selected.row + 1, ffn, device);
    error = selected.row->run({ffn, selected.plan, device, stream, services});
  }
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("hf_twell's CUDA path '") + selected.row->path +
                             "' failed: " + error_text(error));
  }
}

void check_training(const Device& device, DType dtype, int64_t tokens, int64_t width, int64_t capacity) {
  if (!is_hopper(device)) {
    throw std::runtime_error("hf_twell's CUDA kernels train on compute capability 9.0, not " + capability_of(device) +
                             "; use backend='reference'");
  }
  if (!has_kernels(dtype)) {
    throw std::runtime_error("hf_twell's CUDA kernels train in bfloat16 and float16; use backend='reference'");
  }
  const int64_t most = std::numeric_limits<uint32_t>::max() / (tokens + 128);
  if (capacity < 1 || (capacity > most && !keeps_columns(width, capacity))) {
    throw std::runtime_error("capacity is " + std::to_string(capacity) + " for " + std::to_string(tokens) +
                             " tokens; it must be at least 1, and less than 2^32 pairs in all, or F");
  }
}

}  // namespace twell
