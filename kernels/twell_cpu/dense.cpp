#include "dense.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace twell {
namespace {

constexpr int64_t kChunk = 4096;

// body(offset, count, a, b, c) over [0, count) in chunks, with three fp32 buffers of kChunk.
template <class Body>
void for_chunks(const Threads& threads, int64_t count, const Body& body) {
  std::vector<std::vector<float>> buffers(static_cast<size_t>(threads.count));
  for_items(threads, (count + kChunk - 1) / kChunk, [&](int lane, int64_t item) {
    auto& buffer = buffers[lane];
    buffer.resize(3 * kChunk);
    body(item * kChunk, std::min(kChunk, count - item * kChunk), buffer.data(), buffer.data() + kChunk,
         buffer.data() + 2 * kChunk);
  });
}

inline float relu(float value) {
  return value <= 0.0f ? 0.0f : value;  // a NaN stays
}

inline float sign(float value) {
  return static_cast<float>((value > 0.0f) - (value < 0.0f));
}

}  // namespace

void dense_activation(const Kernels& kernels, const Threads& threads, DType dtype, int64_t tokens, int64_t width,
                      const void* gate, const void* up, void* h) {
  const int64_t element = element_bytes(dtype);
  for_chunks(threads, tokens * width, [&](int64_t offset, int64_t count, float* g, float* u, float*) {
    kernels.widen(static_cast<const char*>(gate) + offset * element, count, g);
    if (up) {
      kernels.widen(static_cast<const char*>(up) + offset * element, count, u);
      for (int64_t i = 0; i < count; ++i) g[i] = relu(g[i]) * u[i];
    } else {
      for (int64_t i = 0; i < count; ++i) g[i] = relu(g[i]);
    }
    kernels.round(g, count, static_cast<char*>(h) + offset * element);
  });
}

void dense_activation_backward(const Kernels& kernels, const Threads& threads, DType dtype, int64_t tokens,
                               int64_t width, void* gate, const void* up, const float* token_scale, void* grad_h,
                               void* h) {
  const int64_t element = element_bytes(dtype);
  std::vector<std::vector<float>> buffers(static_cast<size_t>(threads.count));
  for_items(threads, tokens, [&](int lane, int64_t token) {
    auto& buffer = buffers[lane];
    buffer.resize(static_cast<size_t>(4 * width));
    float *g = buffer.data(), *u = g + width, *grad = u + width, *value = grad + width;
    const int64_t offset = token * width * element;
    kernels.widen(static_cast<char*>(gate) + offset, width, g);
    kernels.widen(static_cast<char*>(grad_h) + offset, width, grad);
    if (up) {
      kernels.widen(static_cast<const char*>(up) + offset, width, u);
    } else {
      std::fill_n(u, width, 1.0f);
    }
    const float scale = token_scale ? token_scale[token] : 0.0f;
    for (int64_t i = 0; i < width; ++i) {
      const float r = relu(g[i]);
      value[i] = r * u[i];
      const float grad_value = token_scale ? grad[i] + scale * sign(value[i]) : grad[i];
      grad[i] = grad_value * r;
      g[i] = g[i] <= 0.0f ? 0.0f : grad_value * u[i];
    }
    kernels.round(value, width, static_cast<char*>(h) + offset);
    kernels.round(g, width, static_cast<char*>(gate) + offset);
    kernels.round(up ? grad : g, width, static_cast<char*>(grad_h) + offset);
  });
}

void dense_count(const Kernels& kernels, DType dtype, int64_t tokens, int64_t width, const void* h,
                 const float* token_weight, double* l1, double* active) {
  std::vector<float> row(static_cast<size_t>(width));
  for (int64_t token = 0; token < tokens; ++token) {
    kernels.widen(static_cast<const char*>(h) + token * width * element_bytes(dtype), width, row.data());
    const float weight = token_weight ? token_weight[token] : 1.0f;
    float sum = 0;
    for (int64_t i = 0; i < width; ++i) {
      sum += std::fabs(row[i]);
      active[i] += row[i] != 0.0f ? weight : 0.0f;
    }
    *l1 += static_cast<double>(weight) * sum;
  }
}

void add_in_place(const Kernels& kernels, const Threads& threads, DType dtype, int64_t count, const void* terms,
                  void* sums) {
  const int64_t element = element_bytes(dtype);
  for_chunks(threads, count, [&](int64_t offset, int64_t n, float* a, float* b, float*) {
    kernels.widen(static_cast<const char*>(terms) + offset * element, n, a);
    kernels.widen(static_cast<char*>(sums) + offset * element, n, b);
    for (int64_t i = 0; i < n; ++i) b[i] += a[i];
    kernels.round(b, n, static_cast<char*>(sums) + offset * element);
  });
}

}  // namespace twell
