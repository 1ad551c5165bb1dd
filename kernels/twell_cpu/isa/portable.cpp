#include "isa/table.h"
#include "simd/portable.h"

const twell::Kernels* twell::kernels_portable(DType dtype) { return widening_table<Portable>(dtype); }
