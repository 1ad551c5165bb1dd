// A matrix of 2-byte elements the other way round.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace twell {

// to (columns, rows) = from (rows, columns) transposed; both row-major, rows and columns multiples of 8, 16-byte
// aligned.
struct Transposition {
  const void* from;
  int64_t rows, columns;
  void* to;
};

// How it follows the launch before it; all but the first on compute capability 9.0 alone.
enum class Start {
  kAlone,
  kAfter,   // it is launched while that one ends, then waits for it
  kBeside,  // it needs nothing of what has not ended when that one lets others start, and lets others start at once
};

cudaError_t transpose(const Transposition& matrix, Start start, cudaStream_t stream);

}  // namespace twell
