"""Whether a block on a CPU is too dense for its kernels to pay: by a sample, whose answer costs no waiting there."""

import functools

import torch

from hf_twell import build
from hf_twell._density import active_share

MAX_DENSITY = 0.18  # as in kernels/twell_cpu/forward.cpp
# In bfloat16 where dense matmuls have matrix units: in training, and in evaluation of up to 64 and of more tokens.
MAX_DENSITY_AMX = {"training": 0.03, "few": 0.075, "many": 0.035}  # kernels/twell_cpu/NOTES.md
# In float32, a matrix (D x F) of fewer elements lies in a cache, and plain matmuls take tens of microseconds. There
# kernels pay up to this density, but at none in matrices, or in tokens x elements, of fewer than the smallest.
CACHED_ELEMENTS, MAX_DENSITY_CACHED = 1 << 19, 0.1
SMALLEST_ELEMENTS, SMALLEST_WORK = 1 << 15, {"few": 1 << 17, "many": 1 << 20}
# Where autocast keeps its casts of float32 weights for plain matmuls, kernels cast them in each call: they save more
# than that from so many tokens on.
MIN_TOKENS_CAST, MIN_TOKENS_CAST_AMX = 48, 640
SAMPLE_TOKENS, SAMPLE_NEURONS = 16, 256


def max_density(tokens: int, elements: int, dtype: torch.dtype) -> float:
    """Density up to which the CPU kernels are faster in evaluation than plain matmuls, as measured; 0: at none.

    `elements` are those of one matrix, D x F.
    """
    few = tokens <= 2
    if dtype == torch.float32 and elements < CACHED_ELEMENTS:
        work = SMALLEST_WORK["few" if few else "many"]
        return 0.0 if elements < SMALLEST_ELEMENTS or tokens * elements < work else MAX_DENSITY_CACHED
    if few:  # bound by the weights' traffic, of which kernels always have less
        return 1.0
    if dtype == torch.bfloat16 and _has_amx():
        return MAX_DENSITY_AMX["few" if tokens <= 64 else "many"]
    return MAX_DENSITY


def min_tokens_cast(dtype: torch.dtype) -> int:
    """Tokens from which on kernels save more than casts of float32 weights to `dtype` in each call take."""
    return MIN_TOKENS_CAST_AMX if dtype == torch.bfloat16 and _has_amx() else MIN_TOKENS_CAST


@functools.cache
def _has_amx() -> bool:
    return "amx_bf16" in build.processor_features()


def sampled_density(x, w_gate, b_gate=None) -> float:
    """Share of active pairs in a sample of x's tokens and of the neurons; tens of microseconds."""
    return active_share(x, w_gate, b_gate, SAMPLE_TOKENS, SAMPLE_NEURONS).item()


def too_dense_to_train(x, w_gate, b_gate=None) -> bool:
    """Whether plain matmuls train faster. Equal inputs get equal answers, so recomputation repeats the choice."""
    if torch.compiler.is_compiling() or x.numel() == 0:
        return False
    limit = MAX_DENSITY_AMX["training"] if x.dtype == torch.bfloat16 and _has_amx() else MAX_DENSITY
    return sampled_density(x, w_gate, b_gate) > limit
