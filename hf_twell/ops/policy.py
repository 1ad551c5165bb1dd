"""Whether a block is better computed by the sparse kernels or by plain matmuls: a question about numbers alone.

`hf_twell`'s own blocks ask here, and so can an engine that has no such blocks.
"""

import math

import torch

from hf_twell.ops import policy_cpu, policy_cuda


def max_density(
    tokens: int,
    elements: int,
    dtype: torch.dtype,
    device_type: str,
    *,
    training: bool = False,
    by_kernels: bool = False,
) -> float:
    """Density up to which kernels are faster than plain matmuls, as measured; 0: at none. See `takes_kernels`."""
    if device_type == "cuda":
        if training:
            return policy_cuda.max_density_training(tokens, by_kernels)
        return policy_cuda.max_density(tokens, elements)
    if device_type == "cpu":
        return policy_cpu.max_density_training(dtype) if training else policy_cpu.max_density(tokens, elements, dtype)
    return 0.0


def takes_kernels(
    tokens: int,
    elements: int,
    dtype: torch.dtype,
    device_type: str,
    density: float,
    *,
    training: bool = False,
    by_kernels: bool = False,
) -> bool:
    """Whether kernels are the faster way to compute a block; which blocks they can compute, `hf_twell.ops.ffn` says.

    Formula: limit > 0 and density <= limit, the limit being `max_density` of the other arguments.

    Args:
        tokens: T, the rows of x in one call: those of all sequences together.
        elements: D x F, those of one of the block's matrices.
        dtype: what the block computes in.
        device_type: "cpu" or "cuda"; no kernels are known for others.
        density: share of (token, neuron) pairs that are active; 0 asks whether kernels pay at any density.
        training: forward and backward, not forward alone.
        by_kernels: whether the block trains by kernels already, which it then does up to a somewhat higher density.

    Source: the tables of kernels/twell_cpu/LOG.md and kernels/twell_cuda/LOG.md.
    """
    limit = max_density(tokens, elements, dtype, device_type, training=training, by_kernels=by_kernels)
    return limit > 0 and density <= limit


def same_answers(density: float, elements: int, dtype: torch.dtype, device_type: str) -> float:
    """The highest density to which `takes_kernels` gives the same answers in evaluation, at every number of tokens.

    It is one of the limits, or infinite where kernels pay at no number of tokens. For an engine that writes the density
    into compiled code: layers of different densities then mostly share their code.
    """
    # Limits change at powers of two alone.
    limits = {max_density(1 << power, elements, dtype, device_type) for power in range(24)}
    return min((limit for limit in limits if density <= limit > 0), default=math.inf)
