// launch_gate_fp8 with either way to sum; gate_fp8.cu has the one that runs, the check program both.
#pragma once

#include "sm90/common/wgmma_e4m3.cuh"
#include "sm90/prefill/prefill_fp8.h"
#include "sm90/prefill/gate_launch.cuh"

namespace twell::sm90::gate {

template <bool kPromote>
cudaError_t launch_fp8(const Ffn& ffn, const QuantizedRows& x, const Chunk& chunk, const Device& device,
                       cudaStream_t stream) {
  const Factors factors{x.values, ffn.gate.data, x.stride, ffn.gate.row_stride, {x.scales, ffn.gate.scales}};
  return ffn.dtype == DType::kBFloat16
             ? launch_type<__nv_bfloat16, __nv_fp8_e4m3, kPromote>(ffn, factors, chunk, device, stream)
             : launch_type<__half, __nv_fp8_e4m3, kPromote>(ffn, factors, chunk, device, stream);
}

}  // namespace twell::sm90::gate
