// What operators throw where PyTorch's functions fail. Of the stable ABI these say only that they did. Out of memory is
// told in the words by which accelerate's find_executable_batch_size, and so Trainer's auto_find_batch_size, know it.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

// torch 2.13 has it, and the library loads in those before, too.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace twell {

enum class Memory { kHost, kCuda };

inline std::string out_of_memory(Memory memory) {
  return memory == Memory::kCuda ? "CUDA out of memory." : "DefaultCPUAllocator: can't allocate memory.";
}

// PyTorch's own words for what failed last in this thread; `otherwise` before torch 2.13, which writes them to standard
// error alone.
inline std::string reason_or(const std::string& otherwise) {
  if (torch_exception_get_what_without_backtrace == nullptr) return otherwise;
  return torch_exception_get_what_without_backtrace();
}

// A new contiguous tensor where `like` is. torch::stable::new_empty looks its operator up by name and boxes its
// arguments in each call, which takes the host as long as a launch.
inline torch::stable::Tensor allocated(const torch::stable::Tensor& like,
                                       torch::headeronly::IntHeaderOnlyArrayRef sizes,
                                       std::optional<torch::headeronly::ScalarType> type = std::nullopt) {
  const auto check = [](AOTITorchError error, const std::string& what) {
    if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error(reason_or(what));
  };
  int32_t device_type = 0, dtype = 0;
  check(aoti_torch_get_device_type(like.get(), &device_type), "hf_twell cannot read a tensor's device");
  check(aoti_torch_get_dtype(like.get(), &dtype), "hf_twell cannot read a tensor's dtype");
  if (type) dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(*type));
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= std::max<int64_t>(sizes[i], 1)) strides[i] = stride;
  AtenTensorHandle out = nullptr;
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype, device_type,
                               like.get_device_index(), &out) != AOTI_TORCH_SUCCESS) {
    const int64_t mebibytes = stride * static_cast<int64_t>(aoti_torch_dtype_element_size(dtype)) >> 20;
    throw std::runtime_error(
        reason_or(out_of_memory(device_type == aoti_torch_device_type_cuda() ? Memory::kCuda : Memory::kHost) +
                  " hf_twell tried to allocate " + std::to_string(mebibytes) + " MiB"));
  }
  return torch::stable::Tensor(out);
}

// TORCH_BOX(function), with errors of PyTorch's other functions and of the host's own memory told, too. `memory`: of
// tensors.
template <auto function, Memory memory>
void boxed(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  std::string text;
  try {
    return TORCH_BOX(function)(stack, inputs, outputs);
  } catch (const std::bad_alloc& error) {
    text = error.what();
  } catch (const std::runtime_error& error) {
    if (std::strstr(error.what(), " API call failed at ") == nullptr) throw;
    // All other arguments were checked before.
    text = reason_or(out_of_memory(memory) + " Most likely, as a function of PyTorch's failed; before version 2.13 " +
                     "PyTorch writes why to standard error alone. (" + error.what() + ")");
  }
  if (text == std::bad_alloc().what()) text = out_of_memory(Memory::kHost) + " hf_twell's own buffers found no room";
  throw std::runtime_error(text);
}

}  // namespace twell
