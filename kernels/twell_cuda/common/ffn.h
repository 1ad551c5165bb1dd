// One feed-forward call as raw pointers and sizes: all that the kernels' launchers know of it.
//
// T tokens, D hidden size, F FFN width. h = relu(x Wg^T + bg) * (x Wu^T + bu), or relu(x Wu^T + bu) without a gate;
// y = h Wd^T + bd.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace twell {

// `n` or the next larger multiple of `to`.
constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// kFloat32 has no kernels here: PyTorch's matmuls take it (host/dispatch.h). kInt8 and kE4m3 are of weights alone.
enum class DType : int { kBFloat16, kFloat16, kFloat32, kInt8, kE4m3 };

// Whether such numbers mean themselves times scales.
constexpr bool is_scaled(DType dtype) { return dtype == DType::kInt8 || dtype == DType::kE4m3; }

constexpr int bytes_of(DType dtype) { return is_scaled(dtype) ? 1 : dtype == DType::kFloat32 ? 4 : 2; }

// A weight matrix as it lies in memory. Launchers take weights in this form alone, so that a weight in another number
// format is another kind of operand and not another operator.
struct Operand {
  const void* data = nullptr;  // null: the call has no such weight
  DType dtype = DType::kBFloat16;
  int64_t row_stride = 0, column_stride = 1;  // in elements
  // Null: elements are the weights themselves. Else one for each row of the stock weight: of down, for each of D.
  const float* scales = nullptr;
};

struct Ffn {
  DType dtype;
  int64_t tokens;  // T
  int hidden;      // D, a multiple of 8: rows start at 16-byte borders
  int width;       // F
  const void* x;   // (T, D); like all other pointers to contiguous rows, its base 16-byte aligned
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
