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

namespace twell {
namespace {

enum class Gpu { kAny, kHopper };  // compute capability 8.0 or later; 9.0 alone

enum class Kernels { kFused, kBulk, kFew, kFewPieces, kMma, kMidHalf, kMid, kPrefill, kPrefillFp8, kPortable };

// What kernels multiply: weights of the call's own type; 8-bit ones with scales, as they lie; or e4m3 ones by
// quantized x.
enum class Weights { kPlain, kScaled, kFp8 };

Weights weights_of(const Ffn& ffn) {
  if (!ffn.scaled()) return Weights::kPlain;
  return ffn.quantize_x && ffn.tokens > kDecodeMaxTokens ? Weights::kFp8 : Weights::kScaled;
}

bool fused(const Ffn& ffn, const Device& device, sm90::MidPlan*) { return decoding::takes_fused(ffn, device); }
bool mid_half(const Ffn& ffn, const Device& device, sm90::MidPlan* plan) {
  return sm90::plan_mid_half(ffn, device, plan);
}
bool mid(const Ffn& ffn, const Device& device, sm90::MidPlan* plan) { return sm90::plan_mid(ffn, device, plan); }
bool always(const Ffn&, const Device&, sm90::MidPlan*) { return true; }
bool sixteens(const Ffn& ffn, const Device&, sm90::MidPlan*) { return ffn.hidden % 16 == 0; }  // 16 bytes of 8-bit ones
bool fused_sixteens(const Ffn& ffn, const Device& device, sm90::MidPlan*) {
  return ffn.hidden % 16 == 0 && decoding::takes_fused(ffn, device);
}

struct Row {
  const char* path;  // its name in HF_TWELL_CUDA_PATH
  Gpu gpu;
  int64_t least_tokens, most_tokens;
  double millions;                                           // of elements of one matrix, D x F / 2^20, at least
  bool (*fits)(const Ffn&, const Device&, sm90::MidPlan*);   // whether D and F suit how these kernels share out work
  Kernels kernels;
  Weights weights = Weights::kPlain;
};

constexpr int64_t kMany = std::numeric_limits<int64_t>::max();

// Up to so many tokens 8-bit weights are read as they lie, by the kernels for few, at most 64 tokens at a time: these
// take 21 us, where a call that dequantizes first takes about 80 (LOG.md).
constexpr int64_t kAboveDecode = kDecodeMaxTokens + 1, kPiecesMaxTokens = 3 * kDecodeMaxTokens;

// The first row that takes a call computes it. Where one gives way to the next was measured on an H200 (DESIGN.md): few
// tokens are bound by the weights' traffic, many by arithmetic.
constexpr Row kTable[] = {
    // path      GPU           tokens                          D x F  fits       kernels
    {"decode",   Gpu::kHopper, 1, 2,                           2,     fused,     Kernels::kFused},
    {"decode",   Gpu::kHopper, 1, 2,                           4,     always,    Kernels::kBulk},
    {"decode",   Gpu::kHopper, 3, 8,                           6,     fused,     Kernels::kFused},
    {"decode",   Gpu::kHopper, 3, 8,                           32,    always,    Kernels::kBulk},
    {"decode",   Gpu::kHopper, 3, 8,                           2,     always,    Kernels::kFew},
    {"decode",   Gpu::kHopper, 9, kDecodeMaxTokens,            0,     always,    Kernels::kFew},
    {"decode",   Gpu::kAny,    1, kDecodeMaxTokens,            0,     always,    Kernels::kMma},
    {"decode",   Gpu::kHopper, 1, 2,                           2,    fused_sixteens, Kernels::kFused, Weights::kScaled},
    {"decode",   Gpu::kHopper, 3, 8,                           2,     sixteens,  Kernels::kFew,      Weights::kScaled},
    {"decode",   Gpu::kHopper, 9, kDecodeMaxTokens,            0,     sixteens,  Kernels::kFew,      Weights::kScaled},
    {"decode",   Gpu::kHopper, kAboveDecode, kPiecesMaxTokens, 0,     sixteens,  Kernels::kFewPieces, Weights::kScaled},
    {"decode",   Gpu::kAny,    1, kDecodeMaxTokens,            0,     sixteens,  Kernels::kMma,      Weights::kScaled},
    {"sm90",     Gpu::kHopper, kAboveDecode, kMany,            0,     sixteens,  Kernels::kPrefillFp8, Weights::kFp8},
    {"sm90",     Gpu::kHopper, 1, sm90::kMidMaxHalfTokens,     0,     mid_half,  Kernels::kMidHalf},
    {"sm90",     Gpu::kHopper, 1, sm90::kMidMaxTokens,         0,     mid,       Kernels::kMid},
    {"sm90",     Gpu::kHopper, 1, kMany,                       0,     always,    Kernels::kPrefill},
    {"portable", Gpu::kAny,    1, kMany,                       0,     always,    Kernels::kPortable},
};

bool is_hopper(const Device& device) { return device.major == 9 && device.minor == 0; }

bool takes(const Row& row, const Ffn& ffn, const Device& device, sm90::MidPlan* plan) {
  return row.weights == weights_of(ffn) && (row.gpu == Gpu::kAny || is_hopper(device)) &&
         row.least_tokens <= ffn.tokens && ffn.tokens <= row.most_tokens &&
         static_cast<double>(ffn.hidden) * ffn.width >= row.millions * (1 << 20) && row.fits(ffn, device, plan);
}

// From `row` on, of `path` if one is given; null where there is none.
const Row* first_row(const Row* row, const char* path, const Ffn& ffn, const Device& device, sm90::MidPlan* plan) {
  for (; row != std::end(kTable); ++row) {
    if ((path == nullptr || std::strcmp(row->path, path) == 0) && takes(*row, ffn, device, plan)) return row;
  }
  return nullptr;
}

// A decode row's kernels. The fused one also knows the next row's, for the rare call that it gives back.
decoding::Kernels kernels_of(const Row& row, const Ffn& ffn, const Device& device) {
  decoding::Kernels kernels{};
  kernels.overlap = device.major >= 9;
  kernels.fused.use = row.kernels == Kernels::kFused;
  kernels.fused.warm = ffn.tokens <= 2;  // as a model's other weights pass through L2 between two calls
  if (ffn.tokens <= 2) kernels.fused.window_bytes = 48 << 10;  // for more 64 KiB, as nothing else was timed there
  const Row* two = &row;
  if (kernels.fused.use) {
    do {
      two = first_row(two + 1, row.path, ffn, device, nullptr);
    } while (two->kernels == Kernels::kFused);
  }
  kernels.bulk_gate = two->kernels == Kernels::kBulk;
  kernels.few = two->kernels == Kernels::kFew || two->kernels == Kernels::kFewPieces;
  return kernels;
}

cudaError_t run_portable(const Ffn& ffn, const Device& device, cudaStream_t stream, const Services& services) {
  void* workspace = services.workspace(portable_workspace_bytes(ffn));
  const int64_t chunk = portable_chunk_tokens(ffn);
  for (int64_t first = 0; first < ffn.tokens; first += chunk) {
    const int64_t count = std::min(chunk, ffn.tokens - first);
    const cudaError_t error =
        portable_chunk(ffn, first, count, services.dense_gate(first, count), workspace, device, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t run(const Row& row, const sm90::MidPlan& plan, const Ffn& ffn, const Device& device, cudaStream_t stream,
                const Services& services) {
  switch (row.kernels) {
    case Kernels::kFused:
    case Kernels::kBulk:
    case Kernels::kFew:
    case Kernels::kMma:
      return decode(ffn, kernels_of(row, ffn, device), device, services.workspace(decode_workspace_bytes(ffn)), stream);
    case Kernels::kFewPieces:
      return decode_pieces(ffn, kernels_of(row, ffn, device), device, services.workspace(pieces_workspace_bytes(ffn)),
                           stream);
    case Kernels::kMidHalf:
    case Kernels::kMid:
      return sm90::mid_forward(ffn, plan, device, services.workspace(sm90::prefill_workspace_bytes(ffn, device)), stream);
    case Kernels::kPrefill:
      return sm90::prefill_forward(ffn, device, services.workspace(sm90::prefill_workspace_bytes(ffn, device)), stream);
    case Kernels::kPrefillFp8:
      return sm90::prefill_fp8_forward(ffn, device, services.workspace(sm90::prefill_fp8_workspace_bytes(ffn, device)),
                                       stream);
    case Kernels::kPortable: return run_portable(ffn, device, stream, services);
  }
  return cudaErrorInvalidValue;
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

// What HF_TWELL_CUDA_PATH asks for; null where it does not.
const char* wanted_path() {
  const char* wanted = std::getenv("HF_TWELL_CUDA_PATH");
  return wanted && *wanted ? wanted : nullptr;
}

}  // namespace

bool has_kernels(DType dtype) { return dtype != DType::kFloat32; }

bool has_row(const Ffn& ffn, const Device& device) {
  sm90::MidPlan plan{};
  return first_row(kTable, wanted_path(), ffn, device, &plan) != nullptr;
}

void check_quantize_x(const Ffn& ffn, const Device& device) {
  if (!ffn.quantize_x) return;
  if (ffn.gate.dtype != DType::kE4m3) {
    throw std::runtime_error("quantize_x is for float8_e4m3fn weights with scales; leave it out for others");
  }
  if (ffn.tokens <= kDecodeMaxTokens || (has_kernels(ffn.dtype) && has_row(ffn, device))) return;
  const char* const wanted = wanted_path();
  throw std::runtime_error(
      "hf_twell's CUDA kernels quantize x on compute capability 9.0, in bfloat16 and float16, with D a multiple of 16" +
      std::string(wanted ? ", by HF_TWELL_CUDA_PATH=sm90 and not " + std::string(wanted) : "") + "; here D is " +
      std::to_string(ffn.hidden) + ", on " + std::to_string(device.major) + "." + std::to_string(device.minor) +
      "; use backend='reference'");
}

void forward(const Ffn& ffn, const Device& device, cudaStream_t stream, const Services& services) {
  check_weights(ffn);
  check_quantize_x(ffn, device);
  const char* const wanted = wanted_path();
  sm90::MidPlan plan{};
  const Row* const row = first_row(kTable, wanted, ffn, device, &plan);
  if (row == nullptr) {
    throw std::runtime_error("HF_TWELL_CUDA_PATH=" + std::string(wanted ? wanted : "") + " cannot compute " +
                             std::to_string(ffn.tokens) + " tokens on a GPU of compute capability " +
                             std::to_string(device.major) + "." + std::to_string(device.minor) + "; allowed here: " +
                             allowed_paths(ffn, device) + " (decode takes up to " + std::to_string(kDecodeMaxTokens) +
                             " tokens, of 8-bit weights " + std::to_string(kPiecesMaxTokens) + "; sm90 needs 9.0)");
  }
  const cudaError_t error = run(*row, plan, ffn, device, stream, services);
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("hf_twell's CUDA path '") + row->path + "' failed: " + cudaGetErrorString(error));
  }
}

void check_training(const Device& device, DType dtype, int64_t tokens, int64_t capacity) {
  if (!is_hopper(device)) {
    throw std::runtime_error("hf_twell's CUDA kernels train on compute capability 9.0, not " +
                             std::to_string(device.major) + "." + std::to_string(device.minor) +
                             "; use backend='reference'");
  }
  if (!has_kernels(dtype)) {
    throw std::runtime_error("hf_twell's CUDA kernels train in bfloat16 and float16; use backend='reference'");
  }
  if (capacity < 1 || capacity > std::numeric_limits<uint32_t>::max() / (tokens + 128)) {
    throw std::runtime_error("capacity is " + std::to_string(capacity) + " for " + std::to_string(tokens) +
                             " tokens; it must be at least 1, and less than 2^32 pairs in all");
  }
}

namespace decoding {

Kernels choose_kernels(const Ffn& ffn, const Device& device) {
  const Row* const row = first_row(kTable, "decode", ffn, device, nullptr);
  return row != nullptr ? kernels_of(*row, ffn, device) : Kernels{};
}

}  // namespace decoding

namespace sm90 {

bool choose_mid(const Ffn& ffn, const Device& device, MidPlan* plan) {
  const Row* const row = first_row(kTable, "sm90", ffn, device, plan);
  return row != nullptr && (row->kernels == twell::Kernels::kMid || row->kernels == twell::Kernels::kMidHalf);
}

cudaError_t forward(const Ffn& ffn, const Device& device, void* workspace, cudaStream_t stream) {
  MidPlan plan{};
  return choose_mid(ffn, device, &plan) ? mid_forward(ffn, plan, device, workspace, stream)
                                        : prefill_forward(ffn, device, workspace, stream);
}

}  // namespace sm90
}  // namespace twell
