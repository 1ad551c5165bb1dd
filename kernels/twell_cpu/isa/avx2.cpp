// Compiled with this set's flags where the target knows them; empty elsewhere.
#include "isa/kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "isa/table.h"
#include "simd/avx2.h"
#include "simd/gate_wide.h"
#include "simd/rows_wide.h"

const twell::Kernels* twell::kernels_avx2(DType dtype) {
  static constexpr Kernels kTables[] = {
      with_wide_sums<Avx2, float>(with_wide_panels<Avx2, float>(make_table<Avx2, WideningDot<Avx2, float>>())),
      with_wide_sums<Avx2, BFloat16>(with_wide_panels<Avx2, BFloat16>(make_table<Avx2, WideningDot<Avx2, BFloat16>>())),
      with_wide_sums<Avx2, Half>(with_wide_panels<Avx2, Half>(make_table<Avx2, WideningDot<Avx2, Half>>())),
  };
  return &kTables[static_cast<int>(dtype)];
}
#else
const twell::Kernels* twell::kernels_avx2(DType) { return nullptr; }
#endif
