// A layer of routed experts for few tokens, on any GPU from sm_80: two kernels, whatever the routing is.
//
// T tokens, each through K of E experts; D hidden size, F width of an expert. y_t = sum over k of
// share_tk * down_e (relu(gate_e x_t) * (up_e x_t)), where e = index_tk. A *visit* is a token and one of its experts.
// An expert's visits form *groups* of up to 8 * octets, the columns of tensor-core products.
//
// The first kernel (experts/gate_up.cu) finds the groups, and leaves h in the form of decode/plan.h, group by group.
// The second (experts/down.cu) leaves each visit's result in fp32; the last thread block that comes to a token adds up
// its K results in their order.
#pragma once

#include "common/ffn.h"
#include "decode/plan.h"
#include "twell_limits.h"

namespace twell {

// Rows of D, one a neuron, of all experts.
struct ExpertRows {
  const char* data;
  int64_t expert_bytes, row_bytes;  // from one to the next, multiples of 16
};

struct Experts {
  DType dtype;  // of x, the weights and y: 16 bits
  int tokens, top_k, experts, hidden, width;
  const void* x;      // (T, D); D a multiple of 8, the base at a 16-byte border
  const void* index;  // (T, K); an expert that is none adds nothing
  bool index_is_64_bit;
  const void* share;  // (T, K), 16 bits or fp32
  DType share_dtype;
  ExpertRows gate, up;
  ExpertRows down;  // whose rows lie without gaps
  void* y;          // (T, D)
};

inline bool takes_experts(const Experts& e) {
  return e.tokens >= 1 && e.top_k >= 1 && int64_t{e.tokens} * e.top_k <= kCudaExpertPairs && e.experts >= 1 &&
         e.experts <= kCudaExperts && e.hidden >= 8 && e.hidden <= kMaxHidden && e.hidden % 8 == 0 && e.width >= 1 &&
         e.width <= kMaxWidth && (e.dtype == DType::kBFloat16 || e.dtype == DType::kFloat16);
}

int64_t experts_workspace_bytes(const Experts&, const Device&);
cudaError_t experts_forward(const Experts&, const Device&, void* workspace, cudaStream_t);

namespace experts {

constexpr int kMaxVisits = kCudaExpertPairs;
// Visits of no expert stand behind the last one's. Not every expert's last group is full.
constexpr int kMaxGroups = kCudaExperts + 1 + kMaxVisits / 8;

// Which visits go to which expert. The second kernel reads what the first has found.
struct Routing {
  int groups, routed;          // the first `routed` groups are of experts, the others of none
  uint32_t group[kMaxGroups];  // its expert, the place of its first visit in `order` (15 bits), visits less one (5)
  uint16_t order[kMaxVisits];  // visits by expert, those of one in ascending order: token * K + k
};
static_assert(kCudaExperts < 1024 && kMaxVisits <= 1 << 15);

struct Group {
  int expert, first, visits;
};
__host__ __device__ constexpr uint32_t pack_group(int expert, int first, int visits) {
  return static_cast<uint32_t>(expert << 20 | first << 5 | (visits - 1));
}
__host__ __device__ inline Group unpack_group(uint32_t word) {
  return {static_cast<int>(word >> 20), static_cast<int>(word >> 5 & 32767), static_cast<int>(word & 31) + 1};
}

struct Plan {
  int octets;        // of a group's visits: 1 to 4
  int tiles;         // of 16 neurons, that share x of a group in the first kernel: 1 or 2
  int lane_columns;  // of y, for each lane of the second kernel (a warp has 8 times as many): 4 or 8
  int split;         // warps that share these columns' neurons, of a thread block's eight: 2 or 8
  int blocks;        // ceil(F / 16)
  int slices;        // of y's columns, one for each thread block: ceil(D / (64 / split * lane_columns))
  int groups;        // at most
  // Byte offsets in the workspace, which may hold anything.
  int64_t arrivals;  // uint32 (slices, T): visits whose result is there; the first kernel sets 0
  int64_t masks;     // uint16 (groups, blocks rounded up to even)
  int64_t products;  // h: (groups, blocks, 4 quads, 8 * octets visits, 4 neurons)
  int64_t partials;  // float (T, K, D)
  int64_t bytes;     // Routing comes first
};

inline Plan plan_experts(const Experts& e, int sm_count) {
  Plan p{};
  const int visits = e.tokens * e.top_k;
  // A group has room for some more visits than an expert gets on average: more room costs registers, and less makes
  // further groups read the same weights.
  p.octets = e.tokens <= 8 || visits <= 2 * e.experts ? 1
             : visits <= 8 * e.experts                ? 2
             : visits <= 16 * e.experts               ? 3
                                                      : 4;
  // Of few visits x is few bytes: to share it pays less than a third thread block on each multiprocessor.
  p.tiles = p.octets >= 3 || (p.octets == 2 && visits > 4 * e.experts) ? 2 : 1;
  p.lane_columns = p.octets >= 3 ? 4 : 8;
  p.blocks = (e.width + decoding::kBlockNeurons - 1) / decoding::kBlockNeurons;
  p.groups = (visits < e.experts + 1 ? visits : e.experts + 1) + visits / (8 * p.octets);
  // Two warps to the same columns make a thread block's work last longer than what comes before and after it; eight
  // leave no multiprocessor idle where groups are few, and give even shares where each has many neurons.
  const int64_t narrow = int64_t{p.groups} * (e.hidden / (8 * p.lane_columns));
  p.split = narrow <= 4 * int64_t{sm_count} || e.width > 2048 ? 8 : 2;
  const int columns = 64 / p.split * p.lane_columns;
  p.slices = (e.hidden + columns - 1) / columns;
  p.arrivals = round_up(sizeof(Routing), 256);
  p.masks = round_up(p.arrivals + int64_t{4} * p.slices * e.tokens, 256);
  p.products = round_up(p.masks + 2 * round_up(p.blocks, 2) * p.groups, 256);
  p.partials = round_up(p.products + int64_t{2} * p.groups * p.blocks * decoding::kBlockNeurons * 8 * p.octets, 256);
  p.bytes = p.partials + int64_t{4} * visits * e.hidden;
  return p;
}

// What both kernels are given.
struct Params {
  Experts call;
  int groups, blocks, slices, mask_pairs;
  int prefetch_max_active;  // active neurons of a block up to which all of down's active rows can wait in L2 together
  Routing* routing;
  uint32_t* arrivals;
  uint16_t* masks;
  uint2* products;
  float* partials;
};

inline decoding::Kernels kernels_of(const Plan& plan, const Device& device) {
  decoding::Kernels kernels{};
  kernels.overlap = device.major >= 9;
  if (plan.octets >= 3) kernels.carveout = 40;  // so that L1 has room for x of a large group
  return kernels;
}

cudaError_t launch_gate_up(const Plan&, const Params&, const Device&, cudaStream_t);
cudaError_t launch_down(const Plan&, const Params&, const Device&, cudaStream_t);

}  // namespace experts
}  // namespace twell
