// Descriptions of matrices for bulk tensor copies, made by the driver.

#include <cuda.h>

#include "sm90/common/chunk.h"

namespace twell::sm90 {

namespace {

struct Matrix {
  CUtensorMapDataType type;
  const void* base;
  int64_t rows, stride;  // stride in bytes
  int columns;
};

// The driver's calls need a context, and a thread whose first work on a GPU this is has none: autograd's own, where
// nothing of PyTorch's ran in backward before.
cudaError_t bind_context() {
  thread_local bool bound = false;
  if (bound) return cudaSuccess;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaSetDevice(device);
  bound = error == cudaSuccess;
  return error;
}

cudaError_t encode(CUtensorMap* map, const Matrix& m, int box_rows, int box_columns, CUtensorMapSwizzle swizzle) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  // The driver is not linked against: its library is there only where a GPU is.
  static const Encode function = [] {
    void* found_function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found_function, 12000, cudaEnableDefault, &found);
    return found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found_function) : nullptr;
  }();
  if (function == nullptr) return cudaErrorInsufficientDriver;
  const cudaError_t error = bind_context();
  if (error != cudaSuccess) return error;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(m.columns), static_cast<cuuint64_t>(m.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(m.stride)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      function(map, m.type, 2, const_cast<void*>(m.base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t make_tensor_map(CUtensorMap* map, DType dtype, const void* base, int64_t rows, int columns, int box_rows) {
  const bool narrow = bytes_of(dtype) == 1;
  const CUtensorMapDataType type = narrow                      ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                               : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode(map, {type, base, rows, int64_t{columns} * bytes_of(dtype), columns}, box_rows, 64,
                narrow ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B);
}

cudaError_t make_byte_map(CUtensorMap* map, const void* base, int64_t rows, int columns, int64_t stride, int box_rows) {
  return encode(map, {CU_TENSOR_MAP_DATA_TYPE_UINT8, base, rows, stride, columns}, box_rows, 128,
                CU_TENSOR_MAP_SWIZZLE_128B);
}

}  // namespace twell::sm90
