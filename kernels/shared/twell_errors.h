// What operators throw where PyTorch's functions fail. Of the stable ABI these say only that they did. Out of memory is
// told in the words by which accelerate's find_executable_batch_size, and so Trainer's auto_find_batch_size, know it.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

// torch 2.13 has it, and the library loads in those before, too.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace twell {

// What tensors lie in: how it is told that this is full, and which other error its device has, "" where none.
struct HostMemory {
  static constexpr const char* kFull = "DefaultCPUAllocator: can't allocate memory.";
  static std::string other_error() { return ""; }
};

// PyTorch's own words for what failed last in this thread. Before torch 2.13, which writes them to standard error
// alone: the device's error, and without one that the memory is full, `about` that.
template <typename Memory>
std::string reason(const std::string& about) {
  if (torch_exception_get_what_without_backtrace != nullptr) return torch_exception_get_what_without_backtrace();
  const std::string other = Memory::other_error();
  return other.empty() ? Memory::kFull + about : other;
}

// Of a tensor of so many elements that could not be made.
template <typename Memory>
std::runtime_error no_tensor(int64_t elements, int32_t dtype) {
  const int64_t bytes = elements * static_cast<int64_t>(aoti_torch_dtype_element_size(dtype)), mebibytes = bytes >> 20;
  const std::string size = mebibytes > 0 ? std::to_string(mebibytes) + " MiB" : std::to_string(bytes) + " bytes";
  return std::runtime_error(reason<Memory>(" hf_twell tried to allocate " + size));
}

// TORCH_BOX(function), with errors of PyTorch's other functions and of the host's own memory told, too.
template <auto function, typename Memory>
void boxed(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  std::string text;
  try {
    return TORCH_BOX(function)(stack, inputs, outputs);
  } catch (const std::bad_alloc& error) {
    text = error.what();
  } catch (const std::runtime_error& error) {
    // Words of PyTorch's headers (TORCH_ERROR_CODE_CHECK) for a function that failed; other errors are our own.
    if (std::strstr(error.what(), " API call failed at ") == nullptr) throw;
    // All other arguments were checked before.
    text = reason<Memory>(std::string(" Most likely, as a function of PyTorch's failed; before version 2.13 PyTorch ") +
                          "writes why to standard error alone. (" + error.what() + ")");
  }
  // PyTorch's reason may be that, too: its functions have buffers beside tensors.
  if (text == std::bad_alloc().what()) {
    text = std::string(HostMemory::kFull) + " Buffers beside tensors found no room";
  }
  throw std::runtime_error(text);
}

}  // namespace twell
