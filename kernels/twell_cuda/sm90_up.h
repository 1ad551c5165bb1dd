// How launch_up() computes; prefill_check.cu times every way at every size.
#pragma once

#include "sm90_call.h"

namespace twell::sm90 {

struct UpWay {
  bool lines;   // h is stored by lines of 128 bytes, and stages of relu(gate) are given back one by one
  bool turned;  // each block's tiles begin with another one
};

// With few tiles for each thread block both cost more than they save (NOTES.md).
constexpr int kUpManyBlocks = 64;
inline UpWay up_way(int blocks) { return {blocks >= kUpManyBlocks, blocks >= kUpManyBlocks}; }

cudaError_t launch_up_as(const Ffn&, const Chunk&, const Device&, cudaStream_t, UpWay);

}  // namespace twell::sm90
