// Host side of a launch: errors, and programmatic dependent launch.
#pragma once

#include <cuda_runtime.h>

#include "common/shared_memory.h"

#define TWELL_RETURN_IF_ERROR(...)            \
  do {                                        \
    const cudaError_t error_ = (__VA_ARGS__); \
    if (error_ != cudaSuccess) return error_; \
  } while (0)

namespace twell::sm90 {

// The kernel may start while the one before it finishes: it calls wait_for_previous() before it reads or writes
// anything that another kernel touches. Two kernels share a multiprocessor only where they agree on how it divides its
// memory: `carveout` is the percentage that shared memory gets, or -1 for what the driver chooses.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_with_carveout(int carveout, void (*kernel)(Parameters...), int grid, int threads, int cluster,
                                 int shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  TWELL_RETURN_IF_ERROR(allow_shared(reinterpret_cast<const void*>(kernel), shared_bytes));
  cudaLaunchAttribute attributes[3]{};
  int count = 1;
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  if (carveout >= 0) {
    attributes[count].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attributes[count++].val.sharedMemCarveout = static_cast<unsigned>(carveout);
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = static_cast<unsigned>(count);
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), int grid, int threads, int cluster, int shared_bytes,
                          cudaStream_t stream, const Arguments&... arguments) {
  return launch_with_carveout(-1, kernel, grid, threads, cluster, shared_bytes, stream, arguments...);
}

}  // namespace twell::sm90
