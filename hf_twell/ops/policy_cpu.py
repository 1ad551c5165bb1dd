"""Up to which density the CPU kernels pay: functions of numbers, as measured (kernels/twell_cpu/LOG.md).

They depend on the machine in one thing: whether its processor multiplies bfloat16 matrices by AMX.
"""

import functools

import torch

from hf_twell.ops import build
from hf_twell.ops.limits import limit

# In bfloat16 on a processor with AMX: in training, and in evaluation of up to 64 ("few") and of more tokens.
MAX_DENSITY_AMX = {"training": 0.03, "few": 0.075, "many": 0.035}
# Float32 matrices (D x F) of fewer elements lie in a cache, where plain matmuls take tens of microseconds. Kernels pay
# there up to this density, but at none where a matrix, or tokens times its elements, is smaller still.
CACHED_ELEMENTS, MAX_DENSITY_CACHED = 1 << 19, 0.1
SMALLEST_ELEMENTS, SMALLEST_WORK = 1 << 15, {"few": 1 << 17, "many": 1 << 20}
# Under autocast plain matmuls find their float32 weights cast already, and kernels cast them in each call. From so many
# tokens on kernels save more than that.
MIN_TOKENS_CAST, MIN_TOKENS_CAST_AMX = 48, 640


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
    return limit("kCpuMaxDensity")


def max_density_training(dtype: torch.dtype) -> float:
    """Density up to which the CPU kernels are faster than plain matmuls in forward and backward."""
    return MAX_DENSITY_AMX["training"] if dtype == torch.bfloat16 and _has_amx() else limit("kCpuMaxDensity")


def saved_capacity(intermediate: int) -> int:
    """By default, how many active neurons per token, on average, forward keeps for backward."""
    return min(intermediate, max(32, intermediate // 16))


def min_tokens_cast(dtype: torch.dtype) -> int:
    """Tokens from which on kernels save more than casts of float32 weights to `dtype` in each call take."""
    return MIN_TOKENS_CAST_AMX if dtype == torch.bfloat16 and _has_amx() else MIN_TOKENS_CAST


@functools.cache
def _has_amx() -> bool:
    return "amx_bf16" in build.processor_features()
