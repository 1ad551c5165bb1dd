#include "isa/table.h"
#include "simd/portable.h"

const twell::Kernels* twell::kernels_portable(DType dtype) {
  static constexpr Kernels kTables[] = {
      make_table<Portable, WideningDot<Portable, float>>(),
      make_table<Portable, WideningDot<Portable, BFloat16>>(),
      make_table<Portable, WideningDot<Portable, Half>>(),
  };
  return &kTables[static_cast<int>(dtype)];
}
