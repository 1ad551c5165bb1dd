#include "common/shared_rows.h"

#include <algorithm>
#include <cstring>

namespace twell {
namespace {

constexpr int64_t kBlock = 4 * kPanel;  // tokens that share the rows of one product
constexpr int64_t kBlocksAtOnce = 4;    // between two barriers
constexpr int64_t kRowsAtOnce = 512;    // of a product, so that their pairs stay in the second-level cache
constexpr uint32_t kAlone = 0xffffffffu;

int64_t rounded_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// A term's factors in one block of tokens.
struct Factors {
  Bytes shared;              // [neurons / 32][tokens, padded to 16][32] of kernels.scale_element bytes
  std::vector<float> alone;  // each token's from where its pairs begin in the block
};

struct SharedBlock {
  int64_t first, tokens;             // among the pairs' tokens
  int64_t pairs;                     // of the shared neurons
  std::vector<uint32_t> neurons;     // that enough tokens share, ascending
  std::vector<uint32_t> place;       // (F,) among `neurons`, or kAlone
  std::vector<uint32_t> alone;       // the other pairs' neurons, by token
  std::vector<int64_t> alone_count;  // (tokens,)
  std::vector<Factors> factors;
};

void find_shared(const TokenPairs& pairs, const Kernels& kernels, int64_t width, SharedBlock* out) {
  out->neurons.clear();
  out->place.assign(static_cast<size_t>(width), 0);
  const int64_t begin = pairs.begin[out->first], end = pairs.begin[out->first + out->tokens];
  for (int64_t i = begin; i < end; ++i) ++out->place[pairs.neuron[i]];
  out->pairs = 0;
  for (int64_t f = 0; f < width; ++f) {
    if (worth_a_row(kernels, out->place[f], out->tokens)) {
      out->pairs += out->place[f];
      out->place[f] = static_cast<uint32_t>(out->neurons.size());
      out->neurons.push_back(static_cast<uint32_t>(f));
    } else {
      out->place[f] = kAlone;
    }
  }
  out->alone.resize(static_cast<size_t>(end - begin));
  out->alone_count.resize(static_cast<size_t>(out->tokens));
  for (Factors& factors : out->factors) {
    factors.shared.reserve(rounded_up(out->tokens, 16) * rounded_up(static_cast<int64_t>(out->neurons.size()), 32) *
                           kernels.scale_element);
    factors.alone.resize(static_cast<size_t>(end - begin));
  }
}

// Factors of 16 tokens from `t0` on.
void place_pairs(const TokenPairs& pairs, const Kernels& kernels, const std::vector<ScaledRows>& terms, int64_t t0,
                 std::vector<float>& row, SharedBlock* block) {
  const int64_t columns = rounded_up(static_cast<int64_t>(block->neurons.size()), 32),
                padded = rounded_up(block->tokens, 16);
  for (size_t term = 0; term < terms.size(); ++term) {
    Factors& factors = block->factors[term];
    for (int64_t t = t0; t < t0 + 16; ++t) {
      row.assign(static_cast<size_t>(columns), 0.0f);
      if (t < block->tokens) {
        const int64_t begin = pairs.begin[block->first + t], end = pairs.begin[block->first + t + 1];
        const int64_t alone_first = begin - pairs.begin[block->first];
        int64_t alone = alone_first;
        for (int64_t p = begin; p < end; ++p) {
          const uint32_t place = block->place[pairs.neuron[p]];
          if (place != kAlone) {
            row[place] = terms[term].scale[p];
          } else {
            block->alone[alone] = pairs.neuron[p];
            factors.alone[alone++] = terms[term].scale[p];
          }
        }
        block->alone_count[t] = alone - alone_first;
      }
      for (int64_t c = 0; c < columns; c += 32) {
        char* to = factors.shared.data() + (c * padded + t * 32) * kernels.scale_element;
        if (kernels.scale_element == 4) {
          std::memcpy(to, row.data() + c, 32 * sizeof(float));
        } else {
          kernels.round(row.data() + c, 32, to);
        }
      }
    }
  }
}

// Columns [d, d + width) of the block's sums.
void sum_slice(const Block& block, const Kernels& kernels, const TokenPairs& pairs,
               const std::vector<ScaledRows>& terms, const SharedBlock& shared, int64_t d, int64_t width, Bytes* placed,
               float* sums, int64_t ld_sums) {
  const int64_t rows = static_cast<int64_t>(shared.neurons.size()), padded = rounded_up(shared.tokens, 16);
  placed->reserve(kRowsAtOnce * kPairColumns * kernels.scale_element);
  for (size_t term = 0; term < terms.size(); ++term) {
    for (int64_t i = 0; i < rows; i += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, rows - i);
      for (int64_t c = 0; c < width; c += kPairColumns) {
        const int64_t columns = std::min(kPairColumns, width - c);
        kernels.pair_rows(at(terms[term].rows, d + c, block.dtype), terms[term].ld, shared.neurons.data() + i, count,
                          columns, placed->data());
        kernels.matmul_pairs(placed->data(), count, columns,
                             shared.factors[term].shared.data() + i * padded * kernels.scale_element,
                             static_cast<int>(shared.tokens), sums + c, ld_sums);
      }
    }
    const auto fetch = [&](int64_t t) {  // lone rows come from far away
      const uint32_t* neuron = shared.alone.data() + pairs.begin[shared.first + t] - pairs.begin[shared.first];
      for (int64_t i = 0; i < shared.alone_count[t]; ++i) {
        const char* row = at(terms[term].rows, neuron[i] * terms[term].ld + d, block.dtype);
        for (int64_t b = 0; b < width * element_bytes(block.dtype); b += 64) __builtin_prefetch(row + b);
      }
    };
    for (int64_t t = 0; t < shared.tokens; ++t) {
      if (t + 1 < shared.tokens) fetch(t + 1);
      if (shared.alone_count[t] == 0) continue;
      const int64_t begin = pairs.begin[shared.first + t] - pairs.begin[shared.first];
      kernels.gather_sum(at(terms[term].rows, d, block.dtype), terms[term].ld, shared.alone.data() + begin,
                         shared.factors[term].alone.data() + begin, shared.alone_count[t], width, sums + t * ld_sums);
    }
  }
}

}  // namespace

bool sum_shared_rows(const Block& block, const Kernels& kernels, const Threads& threads, const TokenPairs& pairs,
                     const std::vector<ScaledRows>& terms, const float* bias, void* out) {
  const int64_t tokens = static_cast<int64_t>(pairs.begin.size()) - 1, hidden = block.hidden;
  const int64_t slice = std::clamp<int64_t>(rounded_up(hidden / (2 * threads.count), 64), 64, 256);
  const int64_t slices = (hidden + slice - 1) / slice;
  std::vector<std::vector<float>> scratch(static_cast<size_t>(threads.count));
  std::vector<Bytes> placed(scratch.size());
  std::vector<SharedBlock> some(kBlocksAtOnce);
  for (SharedBlock& shared : some) shared.factors.resize(terms.size());
  for (int64_t first = 0; first < tokens; first += kBlocksAtOnce * kBlock) {
    const int64_t last = std::min(tokens, first + kBlocksAtOnce * kBlock),
                  blocks = (last - first + kBlock - 1) / kBlock;
    for_items(threads, blocks, [&](int, int64_t b) {
      some[b].first = first + b * kBlock;
      some[b].tokens = std::min(kBlock, last - some[b].first);
      find_shared(pairs, kernels, block.width, &some[b]);
    });
    int64_t shared_pairs = 0;
    for (int64_t b = 0; b < blocks; ++b) shared_pairs += some[b].pairs;
    // Lone pairs are slower here, where each slice of a row is read on its own.
    if (first == 0 && 2 * shared_pairs < pairs.begin[last]) return false;
    constexpr int64_t kGroups = kBlock / 16;
    for_items(threads, (last - first + 15) / 16, [&](int lane, int64_t item) {
      place_pairs(pairs, kernels, terms, 16 * (item % kGroups), scratch[lane], &some[item / kGroups]);
    });
    for_items(threads, blocks * slices, [&](int lane, int64_t item) {
      const SharedBlock& shared = some[item / slices];
      const int64_t d = item % slices * slice, width = std::min(slice, hidden - d);
      const int64_t padded = rounded_up(shared.tokens, 16);
      auto& sums = scratch[lane];
      sums.assign(static_cast<size_t>(padded * slice), 0.0f);
      for (int64_t t = 0; bias && t < padded; ++t) std::copy_n(bias + d, width, sums.data() + t * slice);
      sum_slice(block, kernels, pairs, terms, shared, d, width, &placed[lane], sums.data(), slice);
      for (int64_t t = 0; t < shared.tokens; ++t) {
        kernels.round(sums.data() + t * slice, width, at(out, (shared.first + t) * hidden + d, block.dtype));
      }
    });
  }
  return true;
}

}  // namespace twell
