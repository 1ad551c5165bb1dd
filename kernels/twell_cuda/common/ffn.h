// One feed-forward call as raw pointers and sizes: all that the kernels' launchers know of it.
//
// T tokens, D hidden size, F FFN width. h = relu(x Wg^T + bg) * (x Wu^T + bu), or relu(x Wu^T + bu) without a gate;
// y = h Wd^T + bd.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/operand.h"

namespace twell {

struct Ffn {
  DType dtype;
  int64_t tokens;  // T
  int hidden;      // D, a multiple of 8: rows start at 16-byte borders
  int width;       // F
  const void* x;  // (T, D); like all other pointers to contiguous rows, its base 16-byte aligned
  // One row of D for each of the F neurons, all in one of the two forms of is_readable.
  Operand gate;  // gate_proj, or up_proj where the block has no gate
  Operand up;    // up_proj, or no data where the block has no gate
  Operand down;  // down_proj by columns
  // Of `dtype`, or null. b_gate goes with `gate`, b_up with `up`.
  const void* b_gate;  // (F)
  const void* b_up;    // (F)
  const void* b_down;  // (D)
  void* y;             // (T, D)
  // Of e4m3 weights alone. Calls of more than kDecodeMaxTokens (decode/decode.h) quantize x too, a scale a token, and
  // multiply e4m3 by e4m3 in gate and up (sm90/prefill/prefill_fp8.h). In others x stays as it is.
  bool quantize_x = false;

  bool gated() const { return up.data != nullptr; }
  bool scaled() const { return is_scaled(gate.dtype); }
};

// The two forms that kernels read: contiguous rows at a 16-byte border, of the call's own type, or 8-bit with scales.
inline bool is_readable(const Operand& weight, const Ffn& ffn) {
  const bool scaled = is_scaled(weight.dtype);
  return (scaled || weight.dtype == ffn.dtype) && scaled == (weight.scales != nullptr) &&
         weight.row_stride == ffn.hidden && weight.column_stride == 1 &&
         reinterpret_cast<uintptr_t>(weight.data) % 16 == 0;
}

// What a path needs to know of the GPU; read once for each device.
struct Device {
  int sm_count;
  int major, minor;  // compute capability
};

}  // namespace twell
