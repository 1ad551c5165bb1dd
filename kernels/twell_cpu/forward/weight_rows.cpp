#include "forward/weight_rows.h"

#include <algorithm>

namespace twell {
namespace {

constexpr int kFewTokens = 3;         // for more it pays to widen int8 rows first
constexpr int kRowsAtOnce = 4;        // that are widened and used while they are in the first-level cache
constexpr int kPanelRowsAtOnce = 48;  // the same for panels and the second-level one

}  // namespace

void widen_rows(const WeightRows& w, DType dtype, const Kernels& kernels, int64_t first, int64_t count, char* out,
                int64_t ld) {
  for (int64_t n = 0; n < count; ++n) {
    const int8_t* row = reinterpret_cast<const int8_t*>(w.row(first + n, dtype));
    kernels.widen_int8(row, w.columns, at(out, n * ld, dtype), kRowsAtOnce * w.ld);
  }
}

void rows_product(const WeightRows& w, DType dtype, const Kernels& kernels, const TokenRows& x, int64_t first,
                  int neurons, int64_t next, Bytes* scratch, float* out) {
  const int64_t count = x.count, columns = w.columns;
  const void* ahead = w.scales ? nullptr : w.row(next, dtype);
  const auto product = [&](const void* rows, int64_t ld, int some, const float* bias, float* to) {
    if (x.panels && w.scales && kernels.gate_panels_widened) {
      const int8_t* narrow = reinterpret_cast<const int8_t*>(w.row(next, dtype));
      kernels.gate_panels_widened(x.panels, x.count, rows, ld, some, columns, narrow, w.ld, to, count);
    } else if (x.panels) {
      kernels.gate_panels(x.panels, x.count, rows, ld, some, columns, bias, ahead, to, count);
    } else {
      kernels.gate(x.rows, columns, x.count, rows, ld, some, columns, bias, ahead, to, count);
    }
  };
  if (w.scales == nullptr) return product(w.row(first, dtype), w.ld, neurons, w.bias ? w.bias + first : nullptr, out);

  if (x.fixed.digits) {
    const int8_t* rows = reinterpret_cast<const int8_t*>(w.row(first, dtype));
    const int8_t* ahead = reinterpret_cast<const int8_t*>(w.row(next, dtype));
    if (x.screened) {
      kernels.fixed->screened_gate(x.fixed, x.count, rows, w.ld, neurons, columns, ahead, out, count);
    } else {
      kernels.fixed->gate(x.fixed, x.count, rows, w.ld, neurons, columns, ahead, out, count);
    }
  } else if (x.panels == nullptr && count <= kFewTokens) {
    const int8_t* rows = reinterpret_cast<const int8_t*>(w.row(first, dtype));
    kernels.gate_int8(x.rows, columns, x.count, rows, w.ld, neurons, columns, out, count);
  } else {
    const int64_t ld = columns + 32;  // rows in different cache sets
    const int64_t step = x.panels ? std::min<int64_t>(neurons, kPanelRowsAtOnce) : kRowsAtOnce;
    scratch->reserve(step * ld * element_bytes(dtype));
    for (int64_t n = 0; n < neurons; n += step) {
      const int64_t some = neurons - n < step ? neurons - n : step;
      widen_rows(w, dtype, kernels, first + n, some, scratch->data(), ld);
      product(scratch->data(), ld, static_cast<int>(some), nullptr, out + n * count);
    }
  }
  for (int64_t n = 0; n < neurons; ++n) {
    const float scale = w.scales[first + n], bias = w.bias ? w.bias[first + n] : 0.0f;
    for (int64_t t = 0; t < count; ++t) out[n * count + t] = out[n * count + t] * scale + bias;
  }
}

}  // namespace twell
