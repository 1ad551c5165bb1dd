"""Up to which density the CUDA kernels pay: functions of numbers, measured on an H200 (kernels/twell_cuda/LOG.md)."""

import math

# Evaluation. A row holds for so many tokens or fewer; it gives the density up to which the kernels are faster than
# plain matmuls for small, medium and large matrices. A medium one has SIZES[0] elements or more, a large one SIZES[1].
SIZES = (12 << 20, 20 << 20)
LIMITS = (
    (2, 1.0, 1.0, 0.55),
    (4, 1.0, 0.3, 0.4),
    (8, 1.0, 0.18, 0.2),
    (16, 1.0, 1.0, 0.09),
    (32, 1.0, 1.0, 0.06),
    (64, 1.0, 1.0, 0.035),
    *((most, limit, limit, limit) for most, limit in ((512, 0.012), (1024, 0.018), (2048, 0.04), (math.inf, 0.06))),
)
# Forward and backward, for matrices of every size; 0: never.
LIMITS_TRAINING = ((1024, 0.0), (2048, 0.008), (8192, 0.018), (math.inf, 0.025))
BACK = 1.1  # times the limit in training: above it, a block that trains by kernels goes back to plain matmuls


def max_density(tokens: int, elements: int) -> float:
    """Density up to which the kernels are faster than plain matmuls in evaluation.

    Args:
        elements: of one of the block's matrices, D x F.
    """
    size = sum(elements >= least for least in SIZES)
    return next(limits[size] for most, *limits in LIMITS if tokens <= most)


def max_density_training(tokens: float, by_kernels: bool) -> float:
    """Density up to which kernels are faster in training, which is higher for a block that trains by them already."""
    limit = next(limit for most, limit in LIMITS_TRAINING if tokens <= most)
    return limit * (BACK if by_kernels else 1.0)


def saved_capacity(intermediate: int) -> int:
    """By default, how many active neurons per token forward keeps for backward: whole groups of the kernels' lists."""
    return min(intermediate, max(64, (intermediate // 44 + 31) // 32 * 32))


def needed_capacity(density: float, intermediate: int) -> int:
    """The power of two from 64 on, or F, that holds one and a half times the active neurons per token."""
    needed = max(64, round(1.5 * density * intermediate))
    return min(intermediate, 1 << (needed - 1).bit_length())
