// Prefill by e4m3 products: x is quantized in each call, a scale a token; Wg and Wu were before, a scale a neuron
// (torchao's Float8DynamicActivationFloat8WeightConfig with PerRow). Activations between the kernels are of the call's
// 16-bit type, and so are down's products, over the active neurons: Wd's values become such as they are multiplied.
#pragma once

#include "sm90/common/chunk.h"

namespace twell::sm90 {

// Sums stay in the tensor cores. Hopper adds e4m3 products to about 14 bits: each instruction aligns its 32 products
// and the sum so far to the largest of them, and cuts off what lies below about 2^-13 of that. Over D = 2048 a sum is
// off by about 0.1 % of the root of its products' squares' sum, while e4m3 itself, with 4 bits a value, is worth 3.7 %
// of that root. torch._scaled_mm, as torchao calls it (use_fast_accum), does the same, so the gate has the errors of
// the dense block that it takes the place of. Sums added up in fp32 every 128 products took 28 % longer (LOG.md).

// The bulk copies' unit: rows of e4m3 start at multiples of it.
constexpr int kE4m3Border = 16;

// e4m3 rows, of which each stands for its values times a scale.
struct QuantizedRows {
  uint8_t* values;  // (rows, stride); from the columns' end on zeros
  float* scales;    // (rows)
  int64_t stride;   // a multiple of kE4m3Border
};

inline int64_t quantized_stride(int columns) { return round_up(columns, kE4m3Border); }

constexpr int kQuantizeMaxColumns = 16384;  // and the longest stride

// Quantizes (rows, columns) of bf16 or fp16, contiguous, columns a multiple of 8. A row's values and scale are those of
// torchao 0.18 in eager mode (Float8Tensor.from_hp by its torch path, which runs where MSLK is not installed), bit by
// bit, but for zero rows:
//   max   = the largest |x|                                       NaN if one is
//   scale = max * (1 / 448) in fp32, rounded to x's type          no epsilon, no clamp; not rounded where it would be 0
//   value = x / scale in fp32, clamped to +-448, rounded to nearest even; a rounded scale may be too small by 0.2 %,
//           and by more in fp16 where it is subnormal (largest |x| below 0.027)
// A row of zeros has scale 0 and values 0 (0 / 0 in torchao: NaN). A row that holds NaN: scale and values are NaN. One
// that holds infinity, but no NaN: scale infinity, NaN where x is infinite and 0 elsewhere. So all of such a token's
// gates are NaN, and active, as in torchao's product.
cudaError_t launch_quantize_rows(DType, const void* x, int64_t rows, int columns, const QuantizedRows& to,
                                 cudaStream_t stream);

// As launch_gate. `x` is the chunk's tokens; ffn.gate is e4m3, its rows ffn.gate.row_stride apart, a multiple of
// kE4m3Border, with ffn.gate.scales (F). Sums times both scales, then bias, ReLU, packing.
cudaError_t launch_gate_fp8(const Ffn& ffn, const QuantizedRows& x, const Chunk& chunk, const Device& device,
                            cudaStream_t stream);

// As launch_up, for D a multiple of kE4m3Border. ffn.up is e4m3 as ffn.gate is for the gate. Sums times both scales,
// then bias, then times relu(gate): a scale that is infinite or NaN reaches h as it would in plain arithmetic, and a
// token or neuron of zeros has its bias alone.
cudaError_t launch_up_fp8(const Ffn& ffn, const QuantizedRows& x, const Chunk& chunk, const Device& device,
                          cudaStream_t stream);

// As launch_down, for D a multiple of kE4m3Border. ffn.down is e4m3, its rows D apart, with a scale for each column of
// y: sums times scales, then bias, rounded once. So a column whose scale is NaN or infinite is NaN, or infinite.
cudaError_t launch_down_fp8(const Ffn& ffn, const Chunk& chunk, const Device& device, cudaStream_t stream);

// As prefill_forward, of e4m3 weights.
int64_t prefill_fp8_workspace_bytes(const Ffn& ffn, const Device& device);
cudaError_t prefill_fp8_forward(const Ffn& ffn, const Device& device, void* workspace, cudaStream_t stream);

}  // namespace twell::sm90
