// How launch_up() computes; prefill_check.cu times every way at every size.
#pragma once

#include "sm90_call.h"

namespace twell::sm90 {

// Thread blocks take tiles in turns. Those that both halves of a block of tokens activate take longest.
enum class UpOrder {
  kPlain,
  kTurned,  // each block begins with another of its tiles
  kDealt,   // those that take longest are counted off apart from the others
};

struct UpWay {
  bool lines;  // h is stored by lines of 128 bytes, and stages of relu(gate) are given back one by one
  UpOrder order;
  bool halves;  // of x only the half blocks that activate any of a tile's neurons are fetched
};

// With few tiles for each thread block, lines and turns cost more than they save (NOTES.md).
constexpr int kUpManyBlocks = 64;
inline UpWay up_way(int blocks) {
  const bool many = blocks >= kUpManyBlocks;
  return {many, many ? UpOrder::kTurned : UpOrder::kPlain, false};
}

cudaError_t launch_up_as(const Ffn&, const Chunk&, const Device&, cudaStream_t, UpWay);

}  // namespace twell::sm90
