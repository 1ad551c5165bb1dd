// Products over the hidden size whose results are columns of the activations: those that the results need come at the
// end of a tile, through the same ring of stages. The results take their place there, and go to global memory.
#pragma once

#include "sm90/training/tile_product.cuh"

namespace twell::sm90::tiles {

struct Place {
  const uint16_t* neurons;  // of the tile
  int last;                 // of these
  int token;                // of the chunk
};

// The Epilogue has
//   Element   bf16 or fp16
//   Given     what it needs to know, from the host
//   kBuffers  how many kinds of columns each neuron has here
//   kRead     how many of these, the first ones, are read; the others are only written
//   Epilogue(Given, Chunk, Place), for each tile
//   apply(words, sum, column, row): each of `words` is two neurons' values in one kind of columns (0 if that is not
//     read), to be replaced; they are neurons `column` and column + 1 of the tile, and `row` is 0 for Place's token, 1
//     for the eighth after it
template <typename Epilogue>
struct Columns {
  using Element = typename Epilogue::Element;
  using T = Element;
  struct Given {
    // (block, F, 2 halves, 64): kRead that are read and kBuffers that are written, in the same place or elsewhere.
    const void* from[2];
    void* to[3];
    typename Epilogue::Given epilogue;
  };
  struct Own {};
  static constexpr int kBuffers = Epilogue::kBuffers, kRead = Epilogue::kRead, kLow = 16;
  static constexpr bool kAside = false;
  // A stage has all kinds of columns of so many neurons, 256 bytes each, whatever the tile: so several are under way.
  static constexpr int kTurnNeurons = kBuffers == 1 ? 64 : 32, kTurnBytes = kTurnNeurons * kBlockTokens * 2;
  static_assert(kBuffers * kTurnBytes <= kTokenBytes + 64 * kDepth * 2);

  const Given& given;
  const Arguments& a;

  __device__ __forceinline__ Columns(const Given& from, const Arguments& arguments, Own&) : given(from), a(arguments) {}
  static __device__ __forceinline__ void init(Own&) {}
  __device__ __forceinline__ bool idle() const { return a.chunk.skipped(); }
  __device__ __forceinline__ void count(Control& c) const {
    for (int b = threadIdx.x; b < a.chunk.active.blocks; b += kThreads) c.counts[b] = a.chunk.active.counts[b];
  }
  __device__ __forceinline__ const uint16_t* list(int block) const {
    return a.chunk.active.neurons + static_cast<int64_t>(block) * a.chunk.active.row;
  }

  // Columns of which only the active halves exist.
  __device__ __forceinline__ void fetch_end(const Item& item, Control& c, const int (&neurons)[kFetchShare],
                                            uint32_t stages, Ring& ring) const {
    const int thread = threadIdx.x, row = thread / 8, chunk = thread % 8, bytes = stage_bytes(c.tile);
    const int64_t first_column = static_cast<int64_t>(item.block) * a.width * kBlockTokens + chunk * 8;
    const Counts counts = c.counts[item.block];
    const int first_end = min(item.count, counts.first_only + counts.both - item.first);
    const int second_begin = counts.first_only - item.first;
#pragma unroll
    for (int start = 0; start < kMaxNeurons; start += kTurnNeurons) {
      if (start >= item.count) break;
      ring.wait_empty();
      const uint32_t to = stages + ring.stage * bytes + row * 256 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
      for (int i = 0; i < kTurnNeurons / kFetchRows; ++i) {
        const int n = start + row + kFetchRows * i;
        const int64_t column = first_column + static_cast<int64_t>(neurons[start / kFetchRows + i]) * kBlockTokens;
#pragma unroll
        for (int b = 0; b < kRead; ++b) {
          const T* from = static_cast<const T*>(given.from[b]) + column;
          const uint32_t place = to + b * kTurnBytes + i * kFetchRows * 256;
          if (n < first_end) copy_16(place, from);
          if (n >= second_begin && n < item.count) copy_16(place + 128, from + kHalfTokens);
        }
      }
      if (thread == 0) barrier_arrive(ring.full + ring.stage);
      barrier_arrive_on_copies(ring.full + ring.stage);
      ring.advance();
    }
  }

  struct End {
    const Columns& job;
    const Item& item;
    const Part part;
    Control& c;
    const int tiles;
    const uint32_t stages;

    __device__ __forceinline__ End(const Columns& of, const Item& tile, const Part& own, Control& control, int number,
                                   uint32_t ring_stages)
        : job(of), item(tile), part(own), c(control), tiles(number), stages(ring_stages) {}
    __device__ __forceinline__ void prepare() {}
    __device__ __forceinline__ void apply(const float* sum, Ring& ring) {
      const int warp = part.warp, lane = part.lane, bytes = stage_bytes(c.tile);
      barrier_wait(c.listed + tiles % kLists, tiles / kLists & 1);
      const uint16_t* neurons = c.neurons[tiles % kLists];
      const Epilogue epilogue(job.given.epilogue, job.a.chunk,
                              {neurons, item.count - 1, item.block * kBlockTokens + warp * 16 + lane / 4});
      const int64_t first_column =
          static_cast<int64_t>(item.block) * job.a.width * kBlockTokens + warp * 16 + (lane & 1) * 8;
      for (int first = 0; first < item.count; first += kTurnNeurons) {
        ring.wait_full();
        const uint32_t turn = stages + ring.stage * bytes;
        const auto turn_at = [&](int n, int eighth) { return n * 256 + ((eighth ^ (n & 7)) << 4); };
        const int limit = min(kTurnNeurons, part.end - first);
#pragma unroll
        for (int j = 0; j < kMaxNeurons / 8; j += 2) {  // 16 neurons
          const int n = part.low + 8 * j - first;
          if (n >= 0 && n < limit) {
            const uint32_t at = turn_at(n + lane / 16 * 8 + lane % 8, 2 * warp + (lane / 8 & 1));
            uint32_t values[kBuffers][4]{};
#pragma unroll
            for (int b = 0; b < kRead; ++b) load_matrices_transposed(values[b], turn + b * kTurnBytes + at);
#pragma unroll
            for (int m = 0; m < 4; ++m) {
              const int i = 4 * (j + m / 2) + m % 2 * 2;
              uint32_t words[kBuffers];
#pragma unroll
              for (int b = 0; b < kBuffers; ++b) words[b] = values[b][m];
              epilogue.apply(words, {sum[i], sum[i + 1]}, part.low + 8 * (j + m / 2) + lane % 4 * 2, m % 2);
#pragma unroll
              for (int b = 0; b < kBuffers; ++b) values[b][m] = words[b];
            }
#pragma unroll
            for (int b = 0; b < kBuffers; ++b) store_matrices_transposed(turn + b * kTurnBytes + at, values[b]);
          }
        }
        __syncwarp();
        const int start = max(part.begin - first, 0) + lane / 2;
#pragma unroll
        for (int i = 0; i < kTurnNeurons / 16; ++i) {
          const int n = start + 16 * i;
          if (n < limit) {
            const int64_t column = first_column + static_cast<int64_t>(neurons[first + n]) * kBlockTokens;
#pragma unroll
            for (int b = 0; b < kBuffers; ++b) {
              *reinterpret_cast<uint4*>(static_cast<T*>(job.given.to[b]) + column) =
                  load_shared_16(turn + b * kTurnBytes + turn_at(n, 2 * warp + (lane & 1)));
            }
          }
        }
        fence_async_proxy();  // ordinary stores here, bulk copies next
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.empty + ring.stage);
        ring.advance();
      }
    }
  };
};

}  // namespace twell::sm90::tiles
