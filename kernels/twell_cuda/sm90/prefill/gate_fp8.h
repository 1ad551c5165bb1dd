// The gate by e4m3 products: x is quantized in each call, a scale a token; Wg was before, a scale a neuron (torchao's
// Float8DynamicActivationFloat8WeightConfig with PerRow). Up and down stay 16-bit, over the active neurons.
#pragma once

#include "common/round_up.h"
#include "sm90/common/chunk.h"

namespace twell::sm90 {

// Whether sums leave the tensor cores every 128 products, to be added up in fp32.
//
// Hopper adds e4m3 products to about 14 bits: each instruction (32 products) aligns them and the sum so far to the
// largest of them, and cuts off what lies below about 2^-13 of that. So a sum over D is off by at most D / 32 x 2^-13 of
// the largest sum on the way, 0.8 % at D = 2048, and by about a quarter of that as a rule. With parts of 128 it would be
// 4 x 2^-13 of each part, 0.05 %. But e4m3 itself, with 4 bits a value, moves a sum of products by 3.7 % of the root of
// their squares' sum; and torch._scaled_mm, as torchao calls it (use_fast_accum), does not promote either, so with false
// the gate has the errors of the dense block that it takes the place of. Promoting also needs two sets of sums, so tiles
// of 128 neurons at most, whose products read and write 1.25 times as many bytes of shared memory.
constexpr bool kPromoteSums = false;

// The bulk copies' unit: rows of e4m3 start at multiples of it.
constexpr int kE4m3Border = 16;

// e4m3 rows, of which each stands for its values times a scale.
struct QuantizedRows {
  uint8_t* values;  // (rows, stride); from the columns' end on zeros
  float* scales;    // (rows)
  int64_t stride;   // a multiple of kE4m3Border
};

inline int64_t quantized_stride(int columns) { return round_up(columns, kE4m3Border); }

constexpr int kQuantizeMaxColumns = 16384;

// Quantizes (rows, columns) of bf16 or fp16, contiguous, columns a multiple of 8. A row's values and scale are those of
// torchao 0.18 in eager mode on CUDA, bit by bit, but for zero rows:
//   max   = the largest |x|                                       NaN if one is
//   scale = max * (1 / 448), in fp32, rounded to x's type         no epsilon, no clamp; fp32 where that would be 0
//   value = x / scale in fp32, rounded to nearest even, of at most +-448: as a rounded scale may be too small
// A row of zeros has scale 0 and values 0 (0 / 0 in torchao: NaN). A row that holds NaN: scale and values are NaN. One
// that holds infinity, but no NaN: scale infinity, NaN where x is infinite and 0 elsewhere. So all of such a token's
// gates are NaN, and active, as in torchao's product.
cudaError_t launch_quantize_rows(DType, const void* x, int64_t rows, int columns, const QuantizedRows& to,
                                 cudaStream_t stream);

// As launch_gate. `x` is the chunk's tokens; ffn.gate is e4m3, its rows ffn.gate.row_stride apart, a multiple of
// kE4m3Border, with ffn.gate.scales (F). Sums times both scales, then bias, ReLU, packing.
cudaError_t launch_gate_fp8(const Ffn& ffn, const QuantizedRows& x, const Chunk& chunk, const Device& device,
                            cudaStream_t stream);

// As prefill_forward, with ffn.gate as launch_gate_fp8 takes it and ffn.up and ffn.down of the call's type.
int64_t prefill_fp8_workspace_bytes(const Ffn& ffn, const Device& device);
cudaError_t prefill_fp8_forward(const Ffn& ffn, const Device& device, void* workspace, cudaStream_t stream);

}  // namespace twell::sm90
