// Which instruction sets this processor has, and which one runs.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "isa/kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace twell {
namespace {

// Whether the processor has AMX with bf16 and the kernel lets this process use its registers, which it must ask for.
[[maybe_unused]] bool amx_works() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBf16) == 0 || (d & kTile) == 0) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool processor_has(Isa isa) {
  if (isa == Isa::kPortable) return true;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (isa == Isa::kAvx2) return avx2;
  if (isa == Isa::kAvx512) return avx512;
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (isa == Isa::kAvx512Vnni) return vnni;
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  if (isa == Isa::kAvx512Bf16 || isa == Isa::kAvx512Bf16Wide) return bf16;
  static const bool amx = amx_works();
  return bf16 && amx;
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
    case Isa::kAvx512Vnni: return kernels_avx512_vnni(dtype);
    case Isa::kAvx512Bf16: return kernels_avx512_bf16(dtype);
    case Isa::kAvx512Bf16Wide: return kernels_avx512_bf16_wide(dtype);
    case Isa::kAmx: return kernels_amx(dtype);
  }
  return nullptr;
}

constexpr const char* kNames[] = {"portable",         "avx2", "avx512", "avx512_vnni", "avx512_bf16",
                                  "avx512_bf16_wide", "amx"};
constexpr int kSets = 7;

// Whether the set is one that processors like this one are slower with than with another.
bool left_to_others([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  // AMD's start a bf16 product of 512 bits each cycle; Intel's every other one, but two of fp32 in each.
  return isa == Isa::kAvx512Bf16Wide && !__builtin_cpu_is("intel");
#else
  return false;
#endif
}

}  // namespace

const Kernels& select_kernels(DType dtype) {
  const char* forced = std::getenv("HF_TWELL_CPU_ISA");
  if (forced == nullptr || *forced == '\0') {
    for (int isa = kSets - 1; isa > 0; --isa) {
      if (left_to_others(static_cast<Isa>(isa))) continue;
      if (const Kernels* found = table(static_cast<Isa>(isa), dtype)) return *found;
    }
    return *table(Isa::kPortable, dtype);
  }
  std::string works;
  for (int isa = 0; isa < kSets; ++isa) {
    const Kernels* found = table(static_cast<Isa>(isa), dtype);
    if (found != nullptr && std::string(forced) == kNames[isa]) return *found;
    if (found != nullptr) works += (works.empty() ? "" : ", ") + std::string(kNames[isa]);
  }
  throw std::runtime_error("HF_TWELL_CPU_ISA=" + std::string(forced) +
                           " cannot run here; this processor and build take " + works +
                           ". Unset it to use the best of them.");
}

}  // namespace twell
