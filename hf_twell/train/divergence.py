"""KL(parent || model) of the logits, beside a task loss or alone; its gradient is made a few tokens at a time."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 2**24  # logits computed at a time: 64 MiB in float32, of which a few such tensors exist at once
# At most, as each costs the host half of what a layer's forward does. In float32 such a part of the logits takes a
# sixteenth of what all of them and their gradient take in bfloat16.
PARTS = 16
IGNORED = -100  # a label that asks for nothing, as Transformers' losses have it


class InjectKl(torch.autograd.Function):
    """Logits unchanged; backward mixes in the gradient of KL(parent || model), softmax(model) - softmax(parent).

    Arguments: logits (B, S, V); `sums` (2), whose gradient grows by the KL and its tokens; `batch`, a micro-batch of
    `hf_twell.train.distillation`; `divergence` as `divergence_of` gives it.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, sums: Tensor, batch: Any, divergence: Callable) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.batch, ctx.divergence = batch, divergence
        return logits.view_as(logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        # Not in place: the gradient that comes in belongs to autograd. A loss of transposed logits gives one whose
        # tokens are no rows, which `flatten` would copy.
        grad = (grad_logits * (1 - ctx.batch.share)).contiguous()
        kl = torch.zeros((), device=logits.device)
        for rows, some_kl, _, step in _chunks(logits, None, ctx.batch, ctx.divergence):
            kl += some_kl
            grad.flatten(0, 1)[rows] += step
        return grad, torch.stack([kl, ctx.batch.weight.sum()]), None, None


class KlAlone(torch.autograd.Function):
    """The task loss, for the log; its gradient is that of the divergence, made together with it.

    Arguments: as of `InjectKl`, and `labels` (B, S), of which each token's successor is its own; `count`, the labels of
    the whole step, or None for the mean over those of this batch.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        sums: Tensor,
        labels: Tensor,
        count: Tensor | int | None,
        batch: Any,
        divergence: Callable,
    ) -> Tensor:
        labels_T = F.pad(labels, (0, 1), value=IGNORED)[..., 1:].flatten().to(logits.device)
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        kl, loss = torch.zeros((2,), device=logits.device).unbind()
        for rows, some_kl, some_loss, step in _chunks(logits, labels_T, batch, divergence):
            kl, loss = kl + some_kl, loss + some_loss
            grad.flatten(0, 1)[rows] = step
        ctx.save_for_backward(grad, torch.stack([kl, batch.weight.sum()]))
        return loss / ((labels_T != IGNORED).sum() if count is None else count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.saved_tensors, None, None, None, None


def _chunks(logits: Tensor, labels_T: Tensor | None, batch: Any, divergence: Callable) -> Iterator[tuple]:
    """For some rows at a time: which, their KL, their task loss (0 without labels), the gradient of their logits."""
    logits_TV, hidden_TD, weight_T = logits.flatten(0, 1), batch.hidden.flatten(0, 1), batch.weight.flatten()
    tokens = max(1, CHUNK // logits.shape[-1], -(-len(logits_TV) // PARTS))
    for at in range(0, len(logits_TV), tokens):
        rows = slice(at, at + tokens)
        some = None if labels_T is None else labels_T[rows]
        parent_TV = batch.head(hidden_TD[rows])
        yield rows, *divergence(logits_TV[rows], parent_TV, weight_T[rows], batch.share * batch.scale, some)


def divergence_of(backend: str | None) -> Callable:
    """What `_divergence` does, compiled by that backend; None: as it stands."""
    return _divergence if backend is None else _compiled(backend)


def _divergence(
    logits_TV: Tensor, parent_TV: Tensor, weight_T: Tensor, factor: Tensor, labels_T: Tensor | None = None
) -> tuple[Tensor, Tensor | float, Tensor]:
    """Of T tokens: the sum of weight * KL(parent || model), that of the task loss, `factor` * the KL's gradient.

    The gradient is in the logits' dtype where it is alone, which is with labels; else it is added to another first.
    """
    mine, theirs = F.log_softmax(logits_TV.float(), -1), F.log_softmax(parent_TV.float(), -1)
    weight = weight_T.unsqueeze(1)
    kl = torch.where(weight > 0, weight * theirs.exp() * (theirs - mine), 0).sum()
    grad = torch.where(weight > 0, factor * weight * (mine.exp() - theirs.exp()), 0)
    if labels_T is None:
        return kl, 0.0, grad
    return kl, F.nll_loss(mine, labels_T, ignore_index=IGNORED, reduction="sum"), grad.to(logits_TV.dtype)


@functools.cache
def _compiled(backend: str) -> Callable:
    return torch.compile(_divergence, backend=backend)
