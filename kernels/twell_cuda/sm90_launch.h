// Host side of a launch: errors, and programmatic dependent launch.
#pragma once

#include <cuda_runtime.h>

#define TWELL_RETURN_IF_ERROR(...)                         \
  do {                                                     \
    const cudaError_t error_ = (__VA_ARGS__);              \
    if (error_ != cudaSuccess) return error_;              \
  } while (0)

namespace twell::sm90 {

// The kernel may start while the one before it finishes: it calls wait_for_previous() before it reads or writes anything
// that another kernel touches.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), int grid, int threads, int cluster, int shared_bytes,
                          cudaStream_t stream, const Arguments&... arguments) {
  TWELL_RETURN_IF_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace twell::sm90
