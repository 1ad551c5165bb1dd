// How the decode kernels are launched, the portable ones and Hopper's.
#pragma once

#include "common/shared_memory.h"
#include "decode/plan.h"

namespace twell::decoding {

// How a kernel is launched. With `overlap` it may start before the kernel ahead of it has ended.
struct Launch {
  dim3 grid;
  int threads = kDecodeThreads;
  int shared_bytes = 0;
  int cluster = 1;
};

template <typename Params>
cudaError_t launch_decode_kernel(void (*kernel)(Params), const Launch& launch, const Params& params,
                                 const Kernels& kernels, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (launch.shared_bytes > 40 * 1024) {  // the rest of 48 may be static
    error = allow_shared(reinterpret_cast<const void*>(kernel), launch.shared_bytes);
  }
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[3]{};
  int count = 1;
  attributes[0].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  attributes[0].val.sharedMemCarveout = kernels.carveout;
  if (kernels.overlap) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  if (launch.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim = {static_cast<unsigned>(launch.cluster), 1, 1};
    ++count;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = launch.grid;
  config.blockDim = dim3(static_cast<unsigned>(launch.threads));
  config.dynamicSmemBytes = static_cast<size_t>(launch.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = static_cast<unsigned>(count);
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace twell::decoding
