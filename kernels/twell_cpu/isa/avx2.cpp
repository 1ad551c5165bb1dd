// Compiled with this set's flags where the target knows them; empty elsewhere.
#include "isa/kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "isa/table.h"
#include "simd/avx2.h"

const twell::Kernels* twell::kernels_avx2(DType dtype) { return widening_table<Avx2>(dtype); }
#else
const twell::Kernels* twell::kernels_avx2(DType) { return nullptr; }
#endif
