"""Which way a block of a compiled model goes in evaluation on a GPU: by its layer's density, as the config stores it.

A compiled graph cannot sample. So a block keeps what `hf_twell.ops.policy` says of the stored density, for the numbers
of tokens at which the answer can change, and a trace takes it for a constant. Graphs are guarded by these answers, and
not by the density itself: layers that go the same way share their code.
"""

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from hf_twell.ops import policy, policy_cuda

MOST_TOKENS = tuple(most for most, *_ in policy_cuda.LIMITS)  # of each row


def store(ffns: Iterable[nn.Module], density: Sequence[float] | None) -> None:
    """Tell sparse blocks the density of every layer of their model; None: it is not known (any more)."""
    known = dict(enumerate(density or ()))
    for ffn in ffns:
        share, ffn.twell.pays = known.get(ffn.twell.layer), None
        if share is not None:
            up = getattr(ffn, ffn.twell.form.up)
            ffn.twell.pays = pays(share, up.in_features * up.out_features)


def pays(density: float, elements: int) -> dict[float, bool] | None:
    """Whether kernels pay for so many tokens or fewer, by the rows of `policy_cuda.LIMITS`; None where they always do.

    Args:
        elements: of one of the block's matrices, D x F.
    """
    # What the block computes in makes no difference on a GPU, and may change after this.
    answers = {most: policy.takes_kernels(most, elements, torch.bfloat16, "cuda", density) for most in MOST_TOKENS}
    return None if all(answers.values()) else answers


def takes_kernels(pays: dict[float, bool] | None, tokens: int) -> bool:
    """The answer for so many tokens, a number that a graph may leave open.

    Such a graph is guarded by the nearest numbers at which the answer changes, and by nothing where it never does.
    Where the number is fixed, the one answer is read. One that depends on data, which no guard may ask, counts as few.
    """
    if pays is None:
        return True
    from torch.fx.experimental.symbolic_shapes import guard_or_true, statically_known_true  # Dynamo has imported it

    for most, more in itertools.pairwise(MOST_TOKENS):
        if statically_known_true(tokens > most):
            continue
        if statically_known_true(tokens <= most) or (pays[most] != pays[more] and guard_or_true(tokens <= most)):
            return pays[most]
    return pays[MOST_TOKENS[-1]]
