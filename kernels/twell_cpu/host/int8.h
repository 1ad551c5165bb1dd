// int8 weights of tensors: what the kernels take, and the whole weight again for calls that are dense.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "host/tensors.h"

namespace twell {

// The scales of a call whose weights are int8, one for each row of a weight: (F,), (D,) and, gated, (F,).
struct Scales {
  MaybeTensor up, down, gate;
};

inline bool is_int8(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::Char; }

// Throws unless all weights are int8 with as many float32 scales as rows, or none is and there are no scales.
inline void check_scales(const Tensor& w_up, const Tensor& w_down, const MaybeTensor& w_gate, const Scales& scales) {
  const auto check = [&](const char* name, const MaybeTensor& weight, const MaybeTensor& scale) {
    if (!weight && !scale) return;
    const bool quantized = weight && is_int8(*weight) && scale && scale->scalar_type() == ScalarType::Float &&
                           scale->numel() == weight->size(0);
    const bool plain = weight && !is_int8(*weight) && !scale;
    if (is_int8(w_up) ? quantized : plain) return;
    throw std::runtime_error(
        std::string("hf_twell's CPU kernels take int8 weights with one float32 scale for each row, for all "
                    "weights of a block or for none: look at w_") +
        name + " and s_" + name);
  };
  check("up", w_up, scales.up);
  check("down", w_down, scales.down);
  check("gate", w_gate, scales.gate);
}

// w * scales in the element type of `kernels` and `like`, rounded once; w (N, K) stored by rows or by columns.
inline Tensor dequantized(const Kernels& kernels, const Threads& threads, const Tensor& like, const Tensor& w,
                          const float* scales, DType dtype) {
  const bool by_column = w.stride(1) != 1;
  const int64_t rows = w.size(by_column ? 1 : 0), columns = w.size(by_column ? 0 : 1), ld = w.stride(by_column ? 1 : 0);
  Tensor wide = allocated(like, {rows, columns});
  const int8_t* from = static_cast<const int8_t*>(w.const_data_ptr());
  char* to = static_cast<char*>(wide.mutable_data_ptr());
  std::vector<std::vector<float>> scratch(static_cast<size_t>(threads.count));
  for_items(threads, rows, [&](int lane, int64_t row) {
    std::vector<float>& values = scratch[lane];
    values.assign(static_cast<size_t>(columns), 0.0f);
    const uint32_t first = 0;
    const float factor = by_column ? 1.0f : scales[row];
    kernels.gather_sum_int8(from + row * ld, 0, &first, &factor, 1, columns, values.data());
    for (int64_t i = 0; by_column && i < columns; ++i) values[i] *= scales[i];
    kernels.round(values.data(), columns, to + row * columns * element_bytes(dtype));
  });
  return by_column ? torch::stable::transpose(wide, 0, 1) : wide;
}

}  // namespace twell
