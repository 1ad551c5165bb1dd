// How launch_up() computes; prefill_check.cu times every way at every size.
#pragma once

#include "sm90_call.h"

namespace twell::sm90 {

struct UpWay {
  bool lines;   // h is stored by lines of 128 bytes, and stages of relu(gate) are given back one by one
  bool turned;  // each block's tiles begin with another one
  bool halves;  // of x only the half blocks that activate any of a tile's neurons are fetched
  bool ahead;   // Wu is brought into the L2 cache before the lists are there
};

// With few tiles for each thread block both cost more than they save (NOTES.md).
constexpr int kUpManyBlocks = 64;
inline UpWay up_way(int blocks) {
  const bool many = blocks >= kUpManyBlocks;
  return {many, many, false, false};
}

cudaError_t launch_up_as(const Ffn&, const Chunk&, const Device&, cudaStream_t, UpWay);

}  // namespace twell::sm90
