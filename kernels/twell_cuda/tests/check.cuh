// What the check programs share.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                          \
  do {                                                                                       \
    const cudaError_t status = (call);                                                       \
    if (status != cudaSuccess) {                                                             \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status)); \
      std::exit(1);                                                                          \
    }                                                                                        \
  } while (0)

namespace checks {

// Device memory that starts as NaN.
template <typename T>
struct Buffer {
  T* data = nullptr;
  size_t bytes = 0;
  explicit Buffer(size_t count) : bytes(std::max<size_t>(count, 1) * sizeof(T)) {
    CHECK(cudaMalloc(reinterpret_cast<void**>(&data), bytes));
    poison();
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) { put(values); }
  ~Buffer() { cudaFree(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void poison() { CHECK(cudaMemset(data, 0xff, bytes)); }
  void put(const std::vector<T>& values) {
    CHECK(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> get(size_t count) const {
    std::vector<T> values(count);
    CHECK(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }
  std::vector<T> get() const { return get(bytes / sizeof(T)); }
};

__host__ __device__ inline uint64_t hash(uint64_t value) {
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

// Threshold z with P(normal > z) = share.
inline double quantile(double share) {
  double low = -9, high = 9;
  for (int i = 0; i < 80; ++i) {
    const double mid = (low + high) / 2;
    (0.5 * std::erfc(mid / std::sqrt(2.0)) > share ? low : high) = mid;
  }
  return low;
}

}  // namespace checks
