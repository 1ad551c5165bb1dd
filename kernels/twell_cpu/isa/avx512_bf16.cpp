// AVX-512 with BF16 products; all else is that of AVX-512 with VNNI, which these processors have.
#include "isa/kernels.h"

#if defined(__AVX512BF16__)
#include "isa/table.h"
#include "simd/avx512.h"
#include "simd/gate_panel.h"
#include "simd/gate_panel_int8.h"
#include "simd/gate_wide.h"
#include "simd/rows_wide.h"

namespace {

// 32 products a step, summed pairwise into 16 fp32 lanes.
struct Bf16Dot {
  using Element = BFloat16;
  using Vector = __m512;
  using Operand = __m512i;
  static constexpr int kStep = 32;
  static inline Operand load(const BFloat16* from) { return _mm512_loadu_si512(from); }
  static inline Operand load(const BFloat16* from, int count) {
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << count) - 1u), from);
  }
  static inline Vector accumulate(Vector sum, Operand a, Operand b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

struct Bf16Unit {
  using Element = BFloat16;
  static inline __m512 accumulate(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

twell::Kernels with_fixed_point(twell::Kernels table) {
  table.fixed = twell::kernels_avx512_vnni(twell::DType::kBFloat16)->fixed;
  table.fixed_until = 45;
  table.screened_until = INT64_MAX;
  return table;
}

}  // namespace

const twell::Kernels* twell::kernels_avx512_bf16(DType dtype) {
  static const Kernels kBf16 =
      with_fixed_point(with_widened_panels<Bf16Unit>(with_panels<Bf16Unit>(make_table<Avx512, Bf16Dot>())));
  return dtype == DType::kBFloat16 ? &kBf16 : kernels_avx512_vnni(dtype);
}

const twell::Kernels* twell::kernels_avx512_bf16_wide(DType dtype) {
  static const Kernels kBf16 = with_fixed_point(
      with_wide_sums<Avx512, BFloat16>(with_wide_panels<Avx512, BFloat16>(make_table<Avx512, Bf16Dot>())));
  return dtype == DType::kBFloat16 ? &kBf16 : kernels_avx512_vnni(dtype);
}
#else
const twell::Kernels* twell::kernels_avx512_bf16(DType) { return nullptr; }
const twell::Kernels* twell::kernels_avx512_bf16_wide(DType) { return nullptr; }
#endif
