#include "experts/experts.h"

namespace twell {

int64_t experts_workspace_bytes(const Experts& e, const Device& device) {
  return experts::plan_experts(e, device.sm_count).bytes;
}

cudaError_t experts_forward(const Experts& e, const Device& device, void* workspace, cudaStream_t stream) {
  if (!takes_experts(e)) return cudaErrorInvalidValue;
  const experts::Plan plan = experts::plan_experts(e, device.sm_count);
  char* const base = static_cast<char*>(workspace);
  experts::Params p{};
  p.call = e;
  p.groups = plan.groups, p.blocks = plan.blocks, p.slices = plan.slices, p.mask_pairs = (plan.blocks + 1) / 2;
  // About half of the smallest L2 among GPUs for data centres, shared by all experts that the call may reach.
  constexpr int64_t kPrefetchBytes = 24 << 20;
  const int64_t reached = e.tokens * e.top_k < e.experts ? e.tokens * e.top_k : e.experts;
  const int64_t most = kPrefetchBytes / (2 * int64_t{e.hidden} * p.blocks * reached);
  p.prefetch_max_active = static_cast<int>(most < decoding::kBlockNeurons ? most : decoding::kBlockNeurons);
  p.routing = reinterpret_cast<experts::Routing*>(base);
  p.arrivals = reinterpret_cast<uint32_t*>(base + plan.arrivals);
  p.masks = reinterpret_cast<uint16_t*>(base + plan.masks);
  p.products = reinterpret_cast<uint2*>(base + plan.products);
  p.partials = reinterpret_cast<float*>(base + plan.partials);
  const cudaError_t error = experts::launch_gate_up(plan, p, device, stream);
  return error != cudaSuccess ? error : experts::launch_down(plan, p, device, stream);
}

}  // namespace twell
