// Which calls the fused decode kernel takes, and how it cuts them up. Host code reads it too.
#pragma once

#include "common/ffn.h"

namespace twell::decoding {

// The fused kernel: its thread blocks all run at once, two calls' on a multiprocessor; a block's gate rows find room in
// registers (16) and shared memory, and their shares of y stay in L2.
constexpr int kFusedMaxBlocks = 144, kFusedMaxTokens = 4, kFusedMaxHidden = 2048, kFusedMaxRows = 48;
constexpr int kFusedMaxNarrowTokens = 2;  // of 8-bit weights
constexpr int kFusedWarmMaxTokens = 2;    // how it works, and not whether it does
// Gate rows come in runs of neighbours, one bulk copy each; the first ones go on into registers.
constexpr int kFusedRunRows = 4, kFusedHeldRows = 16;
// A thread block's shared memory: barriers and the like; sums of up to two tokens; gate rows.
constexpr int kFusedControlBytes = 1280, kFusedSharedBytes = 113 * 1024 - kFusedControlBytes;
constexpr int kFusedSumsBytes = 3456, kFusedGateBytes = kFusedSharedBytes - kFusedSumsBytes;
inline bool has_fused_shares(const Ffn& ffn) { return ffn.tokens <= kFusedMaxTokens && ffn.hidden <= kFusedMaxHidden; }
inline int fused_blocks(const Ffn& ffn, int most) {
  most = most < kFusedMaxBlocks ? most : kFusedMaxBlocks;
  return ffn.width < most ? ffn.width : most;
}
inline int64_t fused_row_bytes(const Ffn& ffn) { return int64_t{bytes_of(ffn.gate.dtype)} * ffn.hidden; }
// From run to run: 64 modulo 128, so that 16-byte reads of two runs' rows meet no bank twice.
inline int64_t fused_run_stride(const Ffn& ffn) { return round_up(fused_row_bytes(ffn) * kFusedRunRows, 128) + 64; }
// What this many gate rows take in shared memory.
inline int64_t fused_gate_bytes(const Ffn& ffn, int rows) {
  return rows / kFusedRunRows * fused_run_stride(ffn) + rows % kFusedRunRows * fused_row_bytes(ffn);
}
// Pairs of columns that a thread block adds up: a power of two.
inline int fused_units(const Ffn& ffn, int blocks) {
  int units = 8;
  while (int64_t{units} * blocks < ffn.tokens * int64_t{ffn.hidden / 2}) units *= 2;
  return units;
}
inline bool takes_fused(const Ffn& ffn, const Device& device) {
  const int blocks = fused_blocks(ffn, device.sm_count);
  if (!has_fused_shares(ffn) || blocks == 0) return false;
  // Above 2 tokens a warp must have pairs of one token.
  if (ffn.tokens > 2 && (fused_units(ffn, blocks) < 32 || ffn.hidden % 64 != 0)) return false;
  if (ffn.scaled() && ffn.tokens > kFusedMaxNarrowTokens) return false;
  const int rows = (ffn.width + blocks - 1) / blocks;
  const int beside = rows > kFusedHeldRows ? rows - kFusedHeldRows : 0;
  return rows <= kFusedMaxRows && fused_gate_bytes(ffn, beside) <= kFusedGateBytes;
}

}  // namespace twell::decoding
