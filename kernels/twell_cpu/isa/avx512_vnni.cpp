// AVX-512 with VNNI, whose integer products serve int8 weights; all else is that of plain AVX-512.
#include "isa/kernels.h"

#if defined(__AVX512VNNI__)
#include "simd/fixed_point.h"
#include "simd/gate_fixed.h"
#include "simd/gate_screened.h"

namespace {

template <class T>
twell::Kernels with_fixed_point(twell::Kernels table) {
  static constexpr twell::FixedPointKernels kFixed{fixed_point<T>, gate_fixed, screened_gate};
  table.fixed = &kFixed;
  table.fixed_until = table.screened_until = INT64_MAX;
  return table;
}

}  // namespace

const twell::Kernels* twell::kernels_avx512_vnni(DType dtype) {
  static const Kernels kBf16 = with_fixed_point<BFloat16>(*kernels_avx512(DType::kBFloat16));
  static const Kernels kFp16 = with_fixed_point<Half>(*kernels_avx512(DType::kFloat16));
  if (dtype == DType::kFloat32) return kernels_avx512(dtype);  // 16 bits are too few for it
  return dtype == DType::kBFloat16 ? &kBf16 : &kFp16;
}
#else
const twell::Kernels* twell::kernels_avx512_vnni(DType) { return nullptr; }
#endif
