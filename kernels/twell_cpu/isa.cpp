// Which instruction sets this processor has, and which one runs.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace twell {
namespace {

bool processor_has(Isa isa) {
  if (isa == Isa::kPortable) return true;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (isa == Isa::kAvx2) return avx2;
  if (isa == Isa::kAvx512) return avx512;
  return avx512 && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

const Kernels* table(Isa isa, DType dtype) {
  if (!processor_has(isa)) return nullptr;
  switch (isa) {
    case Isa::kPortable: return kernels_portable(dtype);
    case Isa::kAvx2: return kernels_avx2(dtype);
    case Isa::kAvx512: return kernels_avx512(dtype);
    case Isa::kAvx512Bf16: return kernels_avx512_bf16(dtype);
  }
  return nullptr;
}

constexpr const char* kNames[] = {"portable", "avx2", "avx512", "avx512_bf16"};

}  // namespace

const Kernels& select_kernels(DType dtype) {
  const char* forced = std::getenv("HF_TWELL_CPU_ISA");
  if (forced == nullptr || *forced == '\0') {
    for (int isa = 3; isa > 0; --isa) {
      if (const Kernels* found = table(static_cast<Isa>(isa), dtype)) return *found;
    }
    return *table(Isa::kPortable, dtype);
  }
  std::string works;
  for (int isa = 0; isa < 4; ++isa) {
    const Kernels* found = table(static_cast<Isa>(isa), dtype);
    if (found != nullptr && std::string(forced) == kNames[isa]) return *found;
    if (found != nullptr) works += (works.empty() ? "" : ", ") + std::string(kNames[isa]);
  }
  throw std::invalid_argument("HF_TWELL_CPU_ISA=" + std::string(forced) + " cannot run here; this processor and build take " +
                              works + ". Unset it to use the best of them.");
}

}  // namespace twell
