// Compiled with this set's flags where the target knows them; empty elsewhere.
#include "isa/kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "isa/table.h"
#include "simd/avx512.h"
#include "simd/gate_panel.h"
#include "simd/gate_panel_int8.h"
#include "simd/gate_wide.h"
#include "simd/rows_wide.h"

namespace {

struct Fp32Unit {
  using Element = float;
  static inline __m512 accumulate(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
};

}  // namespace

const twell::Kernels* twell::kernels_avx512(DType dtype) {
  static constexpr Kernels kTables[] = {
      with_wide_sums<Avx512, float>(
          with_widened_panels<Fp32Unit>(with_panels<Fp32Unit>(make_table<Avx512, WideningDot<Avx512, float>>()))),
      with_wide_sums<Avx512, BFloat16>(
          with_wide_panels<Avx512, BFloat16>(make_table<Avx512, WideningDot<Avx512, BFloat16>>())),
      with_wide_sums<Avx512, Half>(with_wide_panels<Avx512, Half>(make_table<Avx512, WideningDot<Avx512, Half>>())),
  };
  return &kTables[static_cast<int>(dtype)];
}
#else
const twell::Kernels* twell::kernels_avx512(DType) { return nullptr; }
#endif
