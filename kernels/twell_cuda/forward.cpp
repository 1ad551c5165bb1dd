#include "forward.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "decode.h"
#include "portable.h"
#include "sm90.h"

namespace twell {
namespace {

enum class Path { kDecode, kSm90, kPortable };

constexpr const char* kNames[] = {"decode", "sm90", "portable"};

bool takes(Path path, const Ffn& ffn, const Device& device) {
  switch (path) {
    case Path::kDecode: return ffn.tokens <= kDecodeMaxTokens;
    case Path::kSm90: return device.major == 9 && device.minor == 0;
    case Path::kPortable: return true;
  }
  return false;
}

// The paths in order of preference: for few tokens the weights' traffic decides, for many the arithmetic.
constexpr Path kPaths[] = {Path::kDecode, Path::kSm90, Path::kPortable};

Path choose(const Ffn& ffn, const Device& device) {
  const char* wanted = std::getenv("HF_TWELL_CUDA_PATH");
  if (wanted && !*wanted) wanted = nullptr;
  std::string allowed;
  for (const Path path : kPaths) {
    if (!takes(path, ffn, device)) continue;
    const std::string name = kNames[static_cast<int>(path)];
    if (!wanted || name == wanted) return path;
    allowed += (allowed.empty() ? "" : ", ") + name;
  }
  throw std::runtime_error("HF_TWELL_CUDA_PATH=" + std::string(wanted) + " cannot compute " +
                              std::to_string(ffn.tokens) + " tokens on a GPU of compute capability " +
                              std::to_string(device.major) + "." + std::to_string(device.minor) + "; allowed here: " +
                              allowed + " (decode takes up to " + std::to_string(kDecodeMaxTokens) +
                              " tokens, sm90 needs 9.0)");
}

cudaError_t portable(const Ffn& ffn, const Device& device, cudaStream_t stream, const Services& services) {
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

cudaError_t run(Path path, const Ffn& ffn, const Device& device, cudaStream_t stream, const Services& services) {
  switch (path) {
    case Path::kDecode: return decode(ffn, device, services.workspace(decode_workspace_bytes(ffn)), stream);
    case Path::kSm90: return sm90_forward(ffn, device, services.workspace(sm90_workspace_bytes(ffn, device)), stream);
    case Path::kPortable: return portable(ffn, device, stream, services);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

void forward(const Ffn& ffn, const Device& device, cudaStream_t stream, const Services& services) {
  const Path path = choose(ffn, device);
  const cudaError_t error = run(path, ffn, device, stream, services);
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("hf_twell's CUDA path '") + kNames[static_cast<int>(path)] +
                             "' failed: " + cudaGetErrorString(error));
  }
}

}  // namespace twell
