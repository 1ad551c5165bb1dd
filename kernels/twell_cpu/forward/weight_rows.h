// Rows of a weight matrix against tokens, whether the weights are of the tokens' type or int8 with a scale for each
// row.
#pragma once

#include "forward/fixed_tokens.h"
#include "forward/forward.h"

namespace twell {

// (N, columns) stored by rows; without `scales` its elements are of the block's type, else int8. Both may be null.
struct WeightRows {
  const void* data;
  int64_t ld, columns;
  const float* scales;  // (N,)
  const float* bias;    // (N,)

  const char* row(int64_t index, DType dtype) const {
    return static_cast<const char*>(data) + index * ld * element(dtype);
  }
  int64_t element(DType dtype) const { return scales ? 1 : element_bytes(dtype); }
  int64_t row_bytes(DType dtype) const { return columns * element(dtype); }
};

inline WeightRows gate_rows(const Block& block) {
  return {block.gate, block.hidden, block.hidden, block.s_gate, block.b_gate};
}
inline WeightRows up_rows(const Block& block) { return {block.up, block.hidden, block.hidden, block.s_up, block.b_up}; }
// Of a `down` that lies by rows.
inline WeightRows down_rows(const Block& block) {
  return {block.down, block.down_row, block.width, block.s_down, block.b_down};
}

// Some tokens: rows of `columns` elements behind one another and, or else null, the same as panels, or in fixed point.
struct TokenRows {
  const void* rows;
  const char* panels;
  int count;
  FixedRows fixed = {};
  bool screened = false;  // in fixed point, and what relu surely does not keep need only be negative
};

// out[n * count + t] = bias[first + n] + scale[first + n] * sum over c of w[first + n, c] * x[t, c], for n < neurons.
// `next`: the row from which this thread is likely to go on.
void rows_product(const WeightRows& w, DType dtype, const Kernels& kernels, const TokenRows& x, int64_t first,
                  int neurons, int64_t next, Bytes* scratch, float* out);

// int8 rows [first, first + count) in the block's type, without their scales, `ld` elements from one to the next.
void widen_rows(const WeightRows& w, DType dtype, const Kernels& kernels, int64_t first, int64_t count, char* out,
                int64_t ld);

}  // namespace twell
