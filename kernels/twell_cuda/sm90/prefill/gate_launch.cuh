// How the gate's tiles are cut, and its launches.
#pragma once

#include <type_traits>

#include "sm90/common/launch.h"
#include "sm90/prefill/gate_kernel.cuh"

namespace twell::sm90::gate {

constexpr int64_t kLaunchCost = 160;  // of a second launch, in units of tile_cost, where a step is 64 of D
constexpr int kMostPromoted = 128;     // neurons of a tile for which registers hold sums and parts of them

// What the gate multiplies: x (chunk's tokens, D) and Wg (F, D), rows so many elements apart.
struct Factors {
  const void* x;
  const void* gate;
  int64_t x_stride, gate_stride;
  RowScales scales;
};

// What shared memory takes for a step: 32 KiB of x, written once and read once, and 3 x 128 bytes a neuron.
constexpr int64_t tile_cost(int neurons) { return 256 + 3 * neurons; }

// The tile width of least time. Tiles of 256 that would make a poorly filled last round are cut into parts of `last`,
// but for launches that mostly end at once.
struct Cut {
  int neurons, last;  // last == neurons: nothing is cut
};

inline Cut best_cut(const Ffn& ffn, int groups, int clusters, bool whole, int most, int64_t launch_cost) {
  const auto rounds = [&](int64_t items) { return (items + clusters - 1) / clusters; };
  Cut best{};
  int64_t best_cost = INT64_MAX;
  const auto consider = [&](Cut cut, int64_t cost) {
    if (cost < best_cost) best = cut, best_cost = cost;
  };
  for (const int neurons : {256, 192, 128, 96, 64}) {
    if (neurons > most) continue;
    const int64_t items = int64_t{groups} * ((ffn.width + neurons - 1) / neurons);
    consider({neurons, neurons}, rounds(items) * tile_cost(neurons));
    if (whole || neurons != 256 || items < clusters) continue;
    for (const int last : {128, 96, 64}) {
      const int64_t parts = items % clusters * ((256 + last - 1) / last);
      consider({256, last}, items / clusters * tile_cost(256) + rounds(parts) * tile_cost(last) + launch_cost);
    }
  }
  return best;
}

// Of the tiles of `unit` neurons those from `begin` to `end`, each in parts of kNeurons.
template <typename T, typename E, int kNeurons, int kCluster, bool kPromote>
cudaError_t launch(const Ffn& ffn, const Factors& f, const Chunk& chunk, const Device& device, cudaStream_t stream,
                   int unit, int begin, int end) {
  CUtensorMap x_map, gate_map;
  constexpr int kPart = kNeurons / kCluster;
  if constexpr (sizeof(E) == 1) {
    TWELL_RETURN_IF_ERROR(make_byte_map(&x_map, f.x, chunk.tokens, ffn.hidden, f.x_stride, kBlockTokens));
    TWELL_RETURN_IF_ERROR(make_byte_map(&gate_map, f.gate, ffn.width, ffn.hidden, f.gate_stride, kPart));
  } else {
    TWELL_RETURN_IF_ERROR(make_tensor_map(&x_map, ffn.dtype, f.x, chunk.tokens, ffn.hidden, kBlockTokens));
    TWELL_RETURN_IF_ERROR(make_tensor_map(&gate_map, ffn.dtype, f.gate, ffn.width, ffn.hidden, kPart));
  }
  const int groups = (chunk.active.blocks + kCluster - 1) / kCluster, tiles = (ffn.width + unit - 1) / unit;
  const int parts = (unit + kNeurons - 1) / kNeurons, items = (end - begin) * parts;
  const Arguments arguments{ffn.b_gate, chunk, ffn.hidden, ffn.width, tiles,     groups,
                            begin,      items, unit,       parts,     begin > 0, f.scales};
  const int grid = min(device.sm_count / kCluster, items) * kCluster;
  return launch_kernel(gate_kernel<T, E, kNeurons, kCluster, kPromote>, grid, kThreads, kCluster,
                       Shape<kNeurons>::kShared, stream, x_map, gate_map, arguments);
}

template <typename T, typename E, int kCluster, bool kPromote>
cudaError_t launch_width(int neurons, const Ffn& ffn, const Factors& f, const Chunk& chunk, const Device& device,
                         cudaStream_t stream, int unit, int begin, int end) {
  const auto run = [&](auto width) {
    return launch<T, E, decltype(width)::value, kCluster, kPromote>(ffn, f, chunk, device, stream, unit, begin, end);
  };
  switch (neurons) {
    case 64: return run(std::integral_constant<int, 64>());
    case 96: return run(std::integral_constant<int, 96>());
    case 128: return run(std::integral_constant<int, 128>());
    default: break;
  }
  if constexpr (kPromote) {
    return cudaErrorInvalidValue;
  } else {
    return neurons == 192 ? run(std::integral_constant<int, 192>()) : run(std::integral_constant<int, 256>());
  }
}

template <typename T, typename E, int kCluster, bool kPromote>
cudaError_t launch_cluster(const Ffn& ffn, const Factors& f, const Chunk& chunk, const Device& device,
                           cudaStream_t stream) {
  const int groups = (chunk.active.blocks + kCluster - 1) / kCluster, clusters = device.sm_count / kCluster;
  // A step of fewer bytes an element is more of D, and a launch so many times as long beside it.
  const int64_t launch_cost = kLaunchCost * 2 / static_cast<int64_t>(sizeof(E));
  const Cut cut = best_cut(ffn, groups, clusters, chunk.kept != nullptr, kPromote ? kMostPromoted : 256, launch_cost);
  const int tiles = groups * ((ffn.width + cut.neurons - 1) / cut.neurons);
  const int whole = cut.last == cut.neurons ? tiles : tiles / clusters * clusters;
  const auto run = [&](int neurons, int begin, int end) {
    return launch_width<T, E, kCluster, kPromote>(neurons, ffn, f, chunk, device, stream, cut.neurons, begin, end);
  };
  TWELL_RETURN_IF_ERROR(run(cut.neurons, 0, whole));
  return whole == tiles ? cudaSuccess : run(cut.last, whole, tiles);
}

template <typename T, typename E, bool kPromote>
cudaError_t launch_type(const Ffn& ffn, const Factors& f, const Chunk& chunk, const Device& device,
                        cudaStream_t stream) {
  return chunk.active.blocks > 1 ? launch_cluster<T, E, 2, kPromote>(ffn, f, chunk, device, stream)
                                 : launch_cluster<T, E, 1, kPromote>(ffn, f, chunk, device, stream);
}

}  // namespace twell::sm90::gate
