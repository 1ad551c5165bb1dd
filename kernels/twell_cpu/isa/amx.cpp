// AVX-512 with AMX tiles for products of many bf16 tokens; all else is that of AVX-512 with BF16.
#include "isa/kernels.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include "simd/amx.h"

const twell::Kernels* twell::kernels_amx(DType dtype) {
  if (dtype != DType::kBFloat16) return kernels_avx512_bf16(dtype);
  static const Kernels kBf16 = [] {
    Kernels table = *kernels_avx512_bf16(DType::kBFloat16);
    table.gate_panels = gate_amx;
    table.pair_rows = pair_rows_amx;
    table.matmul_pairs = matmul_pairs_amx;
    table.matrix_unit = true;
    table.scale_element = 2;
    table.sums_from = 8;
    table.pair_cells = 24;
    table.gate_panels_widened = nullptr;
    table.panels_from = table.int8_panels_from = table.fixed_until = table.screened_until = 8;
    table.tile_neurons = table.few_tile_neurons = 192;
    table.block_bytes = 1 << 20;
    return table;
  }();
  return &kBf16;
}
#else
const twell::Kernels* twell::kernels_amx(DType) { return nullptr; }
#endif
