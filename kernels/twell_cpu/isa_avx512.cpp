// Compiled with this set's flags where the target knows them; empty elsewhere.
#include "kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "simd_avx512.h"
#include "table.h"

const twell::Kernels* twell::kernels_avx512(DType dtype) {
  return widening_table<Avx512>(dtype);
}
#else
const twell::Kernels* twell::kernels_avx512(DType) {
  return nullptr;
}
#endif
