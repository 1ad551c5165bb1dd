// How much shared memory a kernel may have.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <utility>

namespace twell {

// Lets a kernel have so many bytes of dynamic shared memory on the current device. The driver is told once for each
// kernel and device, and not at each launch.
inline cudaError_t allow_shared(const void* kernel, int bytes) {
  if (bytes == 0) return cudaSuccess;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, int> allowed;
  const std::lock_guard<std::mutex> lock(mutex);
  int& most = allowed[{kernel, device}];
  if (bytes <= most) return cudaSuccess;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) most = bytes;
  return error;
}

}  // namespace twell
