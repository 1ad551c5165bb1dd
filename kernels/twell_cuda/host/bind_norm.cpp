// The norm ahead of a block for tensors.

#include "common/add_rms_norm.h"
#include "host/tensors.h"

namespace twell {
namespace {

std::tuple<Tensor, Tensor> add_and_norm(Tensor x, Tensor residual, Tensor weight, double epsilon) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const int64_t columns = weight.numel(), rows = columns == 0 ? 0 : x.numel() / columns;
  const ScalarType type = x.scalar_type();
  const bool halves = type == ScalarType::BFloat16 || type == ScalarType::Half;
  if (!halves || residual.scalar_type() != type || weight.scalar_type() != type) {
    throw std::runtime_error("hf_twell::add_rms_norm takes x, residual and weight all bfloat16, or all float16");
  }
  const auto has_rows = [&](const Tensor& tensor) {
    return tensor.dim() > 0 && tensor.size(tensor.dim() - 1) == columns && tensor.numel() == x.numel();
  };
  const bool columns_fit = columns % kRow == 0 && columns >= 1 && columns <= kMaxHidden;
  if (weight.dim() != 1 || !columns_fit || !has_rows(x) || !has_rows(residual)) {
    throw std::runtime_error(
        "hf_twell::add_rms_norm takes x and residual (..., D), alike, and weight (D), "
        "D a multiple of 8 up to " +
        std::to_string(kMaxHidden));
  }
  if (residual.get_device_index() != x.get_device_index() || weight.get_device_index() != x.get_device_index()) {
    throw std::runtime_error("hf_twell::add_rms_norm takes tensors of one GPU");
  }
  const Tensor from = prepared(x, columns), added = prepared(residual, columns), scale = prepared(weight, columns);
  Tensor y = allocated(x, x.sizes()), sum = allocated(x, x.sizes());
  const AddRmsNorm norm{dtype_of(from),
                        rows,
                        static_cast<int>(columns),
                        from.const_data_ptr(),
                        added.const_data_ptr(),
                        scale.const_data_ptr(),
                        static_cast<float>(epsilon)};
  const int device = x.get_device_index();
  check_launch(
      add_rms_norm(norm, y.mutable_data_ptr(), sum.mutable_data_ptr(), device_of(device), current_stream(device)),
      "norm");
  return {y, sum};
}

}  // namespace
}  // namespace twell

TWELL_IMPLEMENTATIONS(CUDA, m) { m.impl("add_rms_norm", TWELL_BOX(twell::add_and_norm)); }
