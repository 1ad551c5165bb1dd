// Which visits go to which expert, found by each thread block for itself.
#pragma once

#include "decode/plan.h"
#include "experts/experts.h"

namespace twell::experts {

// In shared memory, as `route` works.
struct Routed {
  Routing to;
  uint16_t expert[kMaxVisits], rank[kMaxVisits];  // of each visit; its place among its expert's
  int first[kCudaExperts + 1];                    // each expert's visits, then the place of its first one
};

// Of an expert that there is not: the number of experts.
__device__ __forceinline__ int expert_of(const Experts& call, int visit) {
  const int64_t expert = call.index_is_64_bit ? static_cast<const int64_t*>(call.index)[visit]
                                              : static_cast<const int32_t*>(call.index)[visit];
  return expert >= 0 && expert < call.experts ? static_cast<int>(expert) : call.experts;
}

// By all threads of the block. Ends with a barrier.
__device__ __forceinline__ void route(Routed& r, const Experts& call, int room) {
  constexpr uint32_t kAll = 0xffffffffu;
  const int thread = threadIdx.x, lane = thread % 32, visits = call.tokens * call.top_k;
  for (int i = thread; i <= call.experts; i += decoding::kDecodeThreads) r.first[i] = 0;
  for (int i = thread; i < visits; i += decoding::kDecodeThreads) {
    r.expert[i] = static_cast<uint16_t>(expert_of(call, i));
  }
  __syncthreads();
  if (thread < 32) {
    // Ranks, 32 visits at a time: those before in the same 32, and those that were counted.
    for (int base = 0; base < visits; base += 32) {
      const int visit = base + lane;
      const bool inside = visit < visits;
      const int expert = inside ? r.expert[visit] : call.experts + 1;
      const uint32_t same = __match_any_sync(kAll, expert);
      const int before = __popc(same & ((1u << lane) - 1)), counted = inside ? r.first[expert] : 0;
      __syncwarp();
      if (inside) {
        r.rank[visit] = static_cast<uint16_t>(counted + before);
        if (before == 0) r.first[expert] = counted + __popc(same);
      }
      __syncwarp();
    }
    // Groups and first places, 32 experts at a time: two sums in one number, of 16 bits each.
    int carried = 0;
    for (int base = 0; base <= call.experts; base += 32) {
      const int expert = base + lane;
      const int count = expert <= call.experts ? r.first[expert] : 0, groups = (count + room - 1) / room;
      int until = groups << 16 | count;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(kAll, until, d);
        if (lane >= d) until += other;
      }
      const int before = carried + until - (groups << 16 | count);
      const int first = before & 0xffff, first_group = before >> 16;
      if (expert <= call.experts) r.first[expert] = first;
      for (int g = 0; g < groups; ++g) {
        const int at = g * room, rest = count - at;
        r.to.group[first_group + g] = pack_group(expert, first + at, rest < room ? rest : room);
      }
      if (expert == call.experts) r.to.routed = first_group;
      carried += __shfl_sync(kAll, until, 31);
    }
    if (lane == 0) r.to.groups = carried >> 16;
  }
  __syncthreads();
  for (int i = thread; i < visits; i += decoding::kDecodeThreads) {
    r.to.order[r.first[r.expert[i]] + r.rank[i]] = static_cast<uint16_t>(i);
  }
  __syncthreads();
}

}  // namespace twell::experts
