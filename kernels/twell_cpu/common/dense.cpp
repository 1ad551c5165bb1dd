#include "common/dense.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace twell {
namespace {

constexpr int64_t kChunk = 4096;  // elements of one work item

// body(begin, count) over [0, count) in chunks.
template <class Body>
void for_chunks(const Threads& threads, int64_t count, const Body& body) {
  for_items(threads, (count + kChunk - 1) / kChunk,
            [&](int, int64_t item) { body(item * kChunk, std::min(kChunk, count - item * kChunk)); });
}

}  // namespace

void activation(const Kernels& kernels, const Threads& threads, const Activation& a, void* h) {
  const int64_t element = element_bytes(a.dtype);
  for_chunks(threads, a.tokens * a.width, [&](int64_t begin, int64_t count) {
    const char* up = static_cast<const char*>(a.up);
    kernels.activation(static_cast<const char*>(a.gate) + begin * element, up ? up + begin * element : nullptr, count,
                       static_cast<char*>(h) + begin * element);
  });
}

void activation_backward(const Kernels& kernels, const Threads& threads, const Activation& a, const void* grad_h,
                         const Terms& terms, void* grad_gate, void* grad_up, void* h) {
  // Tokens of one work item, which sums in fp32; the sums are added up in fp64, in an order that threads do not change.
  const int64_t rows = std::clamp<int64_t>(a.tokens / 128, 8, 64), blocks = (a.tokens + rows - 1) / rows;
  std::vector<double> sums(terms.report ? static_cast<size_t>(blocks) : 0);
  std::vector<float> active(sums.size() * static_cast<size_t>(a.width));
  for_items(threads, blocks, [&](int, int64_t block) {
    for (int64_t token = block * rows; token < std::min(a.tokens, (block + 1) * rows); ++token) {
      const int64_t offset = token * a.width * element_bytes(a.dtype);
      const auto in = [&](const void* p) { return p ? static_cast<const char*>(p) + offset : nullptr; };
      const auto out = [&](void* p) { return p ? static_cast<char*>(p) + offset : nullptr; };
      const float weight = terms.token_weight ? terms.token_weight[token] : 1.0f;
      // Padding may hold NaN, and 0 * NaN would count it.
      const bool counts = terms.report != nullptr && weight > 0;
      const float sum = kernels.activation_backward(
          {in(a.gate), in(a.up), in(grad_h), out(grad_gate), out(grad_up), out(h), terms.l1_scale * weight,
           terms.count_scale * weight, weight, counts ? active.data() + block * a.width : nullptr},
          a.width);
      if (counts) sums[block] += static_cast<double>(weight) * sum;
    }
  });
  if (terms.report == nullptr) return;
  terms.report[0] = static_cast<float>(std::accumulate(sums.begin(), sums.end(), 0.0));
  for_chunks(threads, a.width, [&](int64_t begin, int64_t count) {
    double total[kChunk] = {};
    for (int64_t block = 0; block < blocks; ++block) {
      const float* from = active.data() + block * a.width + begin;
      for (int64_t i = 0; i < count; ++i) total[i] += from[i];
    }
    std::copy_n(total, count, terms.report + 1 + begin);
  });
}

void dense_count(const Kernels& kernels, DType dtype, int64_t tokens, int64_t width, const void* h,
                 const float* token_weight, double* l1, double* active) {
  std::vector<float> row(static_cast<size_t>(width));
  for (int64_t token = 0; token < tokens; ++token) {
    const float weight = token_weight ? token_weight[token] : 1.0f;
    if (!(weight > 0)) continue;  // padding may hold NaN, and 0 * NaN would count it
    kernels.widen(static_cast<const char*>(h) + token * width * element_bytes(dtype), width, row.data());
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
  for_chunks(threads, count, [&](int64_t begin, int64_t n) {
    float a[kChunk], b[kChunk];
    kernels.widen(static_cast<const char*>(terms) + begin * element, n, a);
    kernels.widen(static_cast<char*>(sums) + begin * element, n, b);
    for (int64_t i = 0; i < n; ++i) b[i] += a[i];
    kernels.round(b, n, static_cast<char*>(sums) + begin * element);
  });
}

}  // namespace twell
