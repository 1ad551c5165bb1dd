"""How many neurons an input switches on, estimated from a part of its tokens and of the neurons."""

import math

import torch

from hf_twell.ops import reference

CPU_TOKENS, CPU_NEURONS = 16, 256  # of a sample on a CPU, where the call waits for it


@torch.no_grad()
def active_share(x, w_gate, b_gate, tokens: int, neurons: int, s_gate=None) -> torch.Tensor:
    """Share of active pairs, (), among at most `tokens` of x's tokens and about `neurons` neurons.

    Shapes:
        x (..., D); w_gate (F, D); b_gate (F,) or None; s_gate (F, 1), the scales of an 8-bit w_gate, or None.
    """
    x_TD = x.reshape(-1, x.shape[-1])
    # Spread by the golden ratio: an even stride can meet one position of every sequence, and first ones are densest.
    total = len(x_TD)
    stride = next(n for n in range(max(1, round(0.618 * total)), 2 * total + 1) if math.gcd(n, total) == 1)
    some = x_TD[torch.arange(1, min(tokens, total) + 1, device=x.device) * stride % total]
    kept = slice(None, None, max(1, len(w_gate) // neurons))
    scale, bias = (None if tensor is None else tensor[kept] for tensor in (s_gate, b_gate))
    gate = reference.linear(some, w_gate[kept], scale, bias)
    return (gate > 0).float().mean()


def sampled_density(x, w_gate, b_gate=None, s_gate=None) -> float:
    """`active_share` of a small sample, as a number: tens of microseconds on a CPU; a GPU is waited for."""
    return active_share(x, w_gate, b_gate, CPU_TOKENS, CPU_NEURONS, s_gate).item()
