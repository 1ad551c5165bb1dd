// One feed-forward call as raw pointers and sizes: all that device code and its launchers know of it.
//
// T tokens, D hidden size, F FFN width. h = relu(x Wg^T + bg) * (x Wu^T + bu), or relu(x Wu^T + bu) without a gate;
// y = h Wd^T + bd.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace twell {

enum class DType : int { kBFloat16, kFloat16 };

struct Ffn {
  DType dtype;
  int64_t tokens;  // T
  int hidden;      // D, a multiple of 8: rows start at 16-byte borders
  int width;       // F
  // Every matrix is row-major and contiguous, its base 16-byte aligned.
  const void* x;     // (T, D)
  const void* gate;  // (F, D): gate_proj, or up_proj where the block has no gate
  const void* up;    // (F, D): up_proj, or null where the block has no gate
  const void* down;  // (F, D): down_proj by columns, one row for each neuron
  // Of `dtype`, or null. b_gate goes with `gate`, b_up with `up`.
  const void* b_gate;  // (F)
  const void* b_up;    // (F)
  const void* b_down;  // (D)
  void* y;             // (T, D)
};

// What a path needs to know of the GPU; read once for each device.
struct Device {
  int sm_count;
  int major, minor;  // compute capability
};

}  // namespace twell
