// A layer of routed experts for tensors.

#include "experts/experts.h"
#include "host/tensors.h"

namespace twell {
namespace {

// Of weights (E, F, D) with whatever strides, each row in one piece at a 16-byte border, D padded; `dense`: the rows of
// an expert without gaps. A copy only where they do not lie so.
Tensor expert_rows(const Tensor& weights, int64_t padded, bool dense) {
  const bool readable = weights.size(2) == padded && weights.stride(2) == 1 && weights.stride(0) % kRow == 0 &&
                        weights.stride(1) % kRow == 0 && (!dense || weights.stride(1) == padded) && aligned(weights);
  return readable ? weights : prepared(weights, padded);
}

ExpertRows pointers(const Tensor& rows) {
  return {static_cast<const char*>(rows.const_data_ptr()), 2 * rows.stride(0), 2 * rows.stride(1)};
}

void check_experts(const Tensor& x, const Tensor& index, const Tensor& share, const Tensor& w_gate, const Tensor& w_up,
                   const Tensor& w_down) {
  const ScalarType type = x.scalar_type(), ids = index.scalar_type(), shares = share.scalar_type();
  const auto is_16_bit = [](ScalarType t) { return t == ScalarType::BFloat16 || t == ScalarType::Half; };
  if (!is_16_bit(type) || w_gate.scalar_type() != type || w_up.scalar_type() != type || w_down.scalar_type() != type ||
      (ids != ScalarType::Long && ids != ScalarType::Int) || !(is_16_bit(shares) || shares == ScalarType::Float)) {
    throw std::runtime_error(
        "hf_twell::experts takes x and weights all bfloat16, or all float16, an index in int32 or int64, and shares in "
        "bfloat16, float16 or float32");
  }
  const bool fit = x.dim() == 2 && index.dim() == 2 && share.dim() == 2 && w_gate.dim() == 3 && w_up.dim() == 3 &&
                   w_down.dim() == 3 && index.size(0) == x.size(0) && share.size(0) == x.size(0) &&
                   share.size(1) == index.size(1) && w_gate.size(2) == x.size(1) && w_down.size(1) == x.size(1) &&
                   w_down.size(0) == w_gate.size(0) && w_down.size(2) == w_gate.size(1) &&
                   w_up.size(0) == w_gate.size(0) && w_up.size(1) == w_gate.size(1) && w_up.size(2) == w_gate.size(2);
  if (!fit) {
    throw std::runtime_error(
        "hf_twell::experts takes x (T, D), index and share (T, K), w_gate and w_up (E, F, D) and w_down (E, D, F)");
  }
  for (const Tensor* each : {&index, &share, &w_gate, &w_up, &w_down}) {
    if (each->get_device_index() != x.get_device_index()) {
      throw std::runtime_error("hf_twell::experts takes tensors of one GPU");
    }
  }
  if (x.size(0) * index.size(1) > kCudaExpertPairs || w_gate.size(0) > kCudaExperts) {
    throw std::runtime_error("hf_twell::experts takes up to " + std::to_string(kCudaExpertPairs) +
                             " pairs of a token and an expert and " + std::to_string(kCudaExperts) + " experts, not " +
                             std::to_string(x.size(0) * index.size(1)) + " and " + std::to_string(w_gate.size(0)));
  }
}

Tensor compute(Tensor x, Tensor index, Tensor share, Tensor w_gate, Tensor w_up, Tensor w_down) {
  check_experts(x, index, share, w_gate, w_up, w_down);
  const int device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const int64_t tokens = x.size(0), hidden = x.size(1), padded = (hidden + kRow - 1) / kRow * kRow;
  if (x.numel() == 0 || index.numel() == 0 || w_gate.numel() == 0) return torch::stable::new_zeros(x, x.sizes());
  const Tensor from = prepared(x, padded), ids = as_contiguous(index), shares = as_contiguous(share);
  const Tensor gate = expert_rows(w_gate, padded, false), up = expert_rows(w_up, padded, false);
  const Tensor down = expert_rows(torch::stable::transpose(w_down, 1, 2), padded, true);
  Tensor y = allocated(x, {tokens, padded});
  Experts e{};
  e.dtype = dtype_of(x);
  e.tokens = static_cast<int>(tokens), e.top_k = static_cast<int>(index.size(1));
  e.experts = static_cast<int>(w_gate.size(0));
  e.hidden = static_cast<int>(padded), e.width = static_cast<int>(w_gate.size(1));
  e.x = from.const_data_ptr();
  e.index = ids.const_data_ptr(), e.index_is_64_bit = ids.scalar_type() == ScalarType::Long;
  e.share = shares.const_data_ptr(), e.share_dtype = dtype_of(shares);
  e.gate = pointers(gate), e.up = pointers(up), e.down = pointers(down);
  e.y = y.mutable_data_ptr();
  // The allocator gives freed memory to later work of the same stream only.
  Tensor workspace = bytes_like(x, experts_workspace_bytes(e, device_of(device)));
  check_launch(experts_forward(e, device_of(device), workspace.mutable_data_ptr(), current_stream(device)), "experts");
  return padded == hidden ? y : torch::stable::contiguous(torch::stable::narrow(y, 1, 0, hidden));
}

}  // namespace
}  // namespace twell

TWELL_IMPLEMENTATIONS(CUDA, m) { m.impl("experts", TWELL_BOX(twell::compute)); }
