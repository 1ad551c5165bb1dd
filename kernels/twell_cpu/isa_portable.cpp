#include "simd_portable.h"
#include "table.h"

const twell::Kernels* twell::kernels_portable(DType dtype) {
  return widening_table<Portable>(dtype);
}
