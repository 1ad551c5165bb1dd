// Where PyTorch finds the operators: torch.ops.hf_twell, or, in a library that Hugging Face's kernel-builder makes, the
// name that it gives to that library alone.
#pragma once

#include <torch/csrc/stable/library.h>

#ifdef TORCH_EXTENSION_NAME
#define TWELL_NAMESPACE TORCH_EXTENSION_NAME
#else
#define TWELL_NAMESPACE hf_twell
#endif

// PyTorch's macros paste the name as it is written, so it is expanded one step before.
#define TWELL_OPERATORS_IN(name, library) STABLE_TORCH_LIBRARY(name, library)
#define TWELL_MORE_OPERATORS_IN(name, library) STABLE_TORCH_LIBRARY_FRAGMENT(name, library)
#define TWELL_IMPLEMENTATIONS_IN(name, key, library) STABLE_TORCH_LIBRARY_IMPL(name, key, library)
#define TWELL_OPERATORS(library) TWELL_OPERATORS_IN(TWELL_NAMESPACE, library)
#define TWELL_MORE_OPERATORS(library) TWELL_MORE_OPERATORS_IN(TWELL_NAMESPACE, library)  // of one backend alone
#define TWELL_IMPLEMENTATIONS(key, library) TWELL_IMPLEMENTATIONS_IN(TWELL_NAMESPACE, key, library)
