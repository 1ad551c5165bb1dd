// A matrix of 2-byte elements the other way round.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace twell {

// to (columns, rows) = from (rows, columns) transposed; both row-major, rows and columns multiples of 8, 16-byte aligned.
cudaError_t transpose(const void* from, int64_t rows, int64_t columns, void* to, cudaStream_t stream);

}  // namespace twell
