// What a graph leaves, compared on the device after each replay, so that no wrong value of an earlier one goes unseen.
#pragma once

#include "tests/check.cuh"

namespace checks {

struct Mismatch {
  int wrong;                    // values, of all calls
  int call, in_call;            // the first call with wrong values, and how many it has
  int low_column, high_column;  // of these
  int of_token[4];              // of these; tokens modulo 4
};

// One thread block. Compares (calls, values) with `want`, notes what it finds in records[*replay], and poisons the
// values, so that what a later replay does not write is seen.
__global__ void compare_kernel(uint16_t* got, const uint16_t* want, int calls, int values, int columns,
                               Mismatch* records, int* replay) {
  __shared__ int wrong, call;
  __shared__ Mismatch m;
  if (threadIdx.x == 0) wrong = 0, call = calls, m = Mismatch{0, calls, 0, columns, -1, {}};
  __syncthreads();
  for (int i = threadIdx.x; i < calls * values; i += blockDim.x) {
    if (got[i] != want[i]) atomicAdd(&wrong, 1), atomicMin(&call, i / values);
  }
  __syncthreads();
  for (int i = threadIdx.x; call < calls && i < values; i += blockDim.x) {
    const int at = call * values + i, column = i % columns;
    if (got[at] == want[at]) continue;
    atomicAdd(&m.in_call, 1), atomicAdd(&m.of_token[i / columns % 4], 1);
    atomicMin(&m.low_column, column), atomicMax(&m.high_column, column);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < calls * values; i += blockDim.x) got[i] = 0xffff;
  if (threadIdx.x == 0) {
    m.wrong = wrong, m.call = call;
    records[*replay] = m;
    ++*replay;
  }
}

}  // namespace checks
