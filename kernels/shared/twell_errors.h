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

// Of a tensor of so many elements that found no room, in 2.13 in PyTorch's words.
inline std::runtime_error no_room(Memory memory, int64_t elements, int32_t dtype) {
  const int64_t mebibytes = elements * static_cast<int64_t>(aoti_torch_dtype_element_size(dtype)) >> 20;
  return std::runtime_error(
      reason_or(out_of_memory(memory) + " hf_twell tried to allocate " + std::to_string(mebibytes) + " MiB"));
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
