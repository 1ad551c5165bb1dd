"""KL(parent || model) of the logits beside a task loss; the gradient of the logits is made a few tokens at a time."""

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


class DistilledLoss(torch.autograd.Function):
    """The causal task loss; its gradient is that of (1 - share) * task loss + share * KL(parent || model).

    Formula: with p and q the model's and the parent's probabilities, a token's gradient is
    (1 - share) * grad_loss / count * (p - onehot(label)) + share * scale * weight * (p - q).

    Arguments: logits (B, S, V); `sums` (2), whose gradient grows by the KL and its tokens; `labels_T` (B * S), the word
    that each token is to predict; `count` (), what the sum over labels is divided by; `batch`, a micro-batch of
    `hf_twell.train.distillation`; `backend`, which compiles what is computed, or None.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, sums: Tensor, labels_T: Tensor, count: Tensor, batch: Any, backend: str | None
    ) -> Tensor:
        task_loss, logits_TV = _compiled(_task_loss, backend), logits.flatten(0, 1)
        parts = [task_loss(logits_TV[rows], labels_T[rows]) for rows in _parts(logits_TV)]
        loss_T, log_sum_T = (torch.cat(each) for each in zip(*parts, strict=True))
        ctx.save_for_backward(logits, log_sum_T, labels_T, count)
        ctx.batch, ctx.backend = batch, backend
        return loss_T.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sum_T, labels_T, count = ctx.saved_tensors
        of_tokens = [log_sum_T]
        if ctx.batch.share < 1:  # else labels ask for nothing, and what they take is spared
            of_tokens += [labels_T, (grad_loss / count).expand_as(labels_T)]
        grad, sums = _gradient(logits, ctx.batch, _compiled(_mixed_with_task, ctx.backend), *of_tokens)
        return grad, sums, None, None, None, None


class InjectKl(torch.autograd.Function):
    """Logits unchanged; backward mixes the gradient of KL(parent || model) into that of whatever loss they enter.

    Formula: (1 - share) * grad_logits + share * scale * weight * (p - q), as of `DistilledLoss`.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, sums: Tensor, batch: Any, backend: str | None) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.batch, ctx.backend = batch, backend
        return logits.view_as(logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        # A loss of transposed logits gives a gradient whose tokens are no rows, which `flatten` copies.
        grad, sums = _gradient(logits, ctx.batch, _compiled(_mixed, ctx.backend), grad_logits.flatten(0, 1))
        return grad, sums, None, None


def _parts(logits_TV: Tensor) -> Iterator[slice]:
    tokens = max(1, CHUNK // logits_TV.shape[-1], -(-len(logits_TV) // PARTS))
    return (slice(at, at + tokens) for at in range(0, len(logits_TV), tokens))


def _gradient(logits: Tensor, batch: Any, mixed: Callable, *of_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """By `mixed`, which also gets the rows of `of_tokens`: the gradient of all logits, and of `sums`."""
    logits_TV, hidden_TD, weight_T = logits.flatten(0, 1), batch.hidden.flatten(0, 1), batch.weight.flatten()
    grad, kl = torch.empty_like(logits, memory_format=torch.contiguous_format), torch.zeros((), device=logits.device)
    for rows in _parts(logits_TV):
        given = (logits_TV[rows], batch.head(hidden_TD[rows]), weight_T[rows], batch.share, batch.scale)
        some_kl, grad.flatten(0, 1)[rows] = mixed(*given, *(each[rows] for each in of_tokens))
        kl += some_kl
    return grad, torch.stack([kl, weight_T.sum()])


def _task_loss(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
    """-log p(label) of each of T tokens, and the logarithm of its summed exponentials."""
    logits_TV, asks_T = logits_TV.float(), labels_T != IGNORED
    log_sum_T = logits_TV.logsumexp(-1)
    logit_T = logits_TV.gather(1, torch.where(asks_T, labels_T, 0).unsqueeze(1)).squeeze(1)
    return torch.where(asks_T, log_sum_T - logit_T, 0), log_sum_T


def _mixed_with_task(
    logits_TV: Tensor,
    parent_TV: Tensor,
    weight_T: Tensor,
    share: float,
    scale: Tensor,
    log_sum_T: Tensor,
    labels_T: Tensor | None = None,
    task_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The KL of T tokens, and their gradient; `task_T` is what multiplies p - onehot(label), None with a share of 1."""
    mine_TV = logits_TV - log_sum_T.unsqueeze(1)  # in float32, by the sums
    kl, grad_TV = _divergence(mine_TV, parent_TV, weight_T, share * scale)
    if labels_T is not None and task_T is not None:
        one_hot_TV = labels_T.unsqueeze(1) == torch.arange(logits_TV.shape[1], device=logits_TV.device)
        task_TV = ((1 - share) * task_T).unsqueeze(1) * (mine_TV.exp() - one_hot_TV.float())
        grad_TV = grad_TV + torch.where(labels_T.unsqueeze(1) != IGNORED, task_TV, 0)
    return kl, grad_TV.to(logits_TV.dtype)


def _mixed(
    logits_TV: Tensor, parent_TV: Tensor, weight_T: Tensor, share: float, scale: Tensor, task_TV: Tensor
) -> tuple[Tensor, Tensor]:
    """The KL of T tokens, and their gradient; `task_TV` is that of the task loss."""
    kl, grad_TV = _divergence(F.log_softmax(logits_TV.float(), -1), parent_TV, weight_T, share * scale)
    return kl, ((1 - share) * task_TV + grad_TV).to(logits_TV.dtype)


def _divergence(mine_TV: Tensor, parent_TV: Tensor, weight_T: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Of T tokens, by the model's log-probabilities and the parent's logits: the sum of weight * KL(parent || model),
    and `factor` times its gradient, (T, V)."""
    theirs_TV = F.log_softmax(parent_TV.float(), -1)
    q_TV, is_token_T = theirs_TV.exp(), weight_T > 0  # some attention makes NaN of what has no token
    kl_T = (q_TV * (theirs_TV - mine_TV)).sum(-1)
    grad_TV = (factor * weight_T).unsqueeze(1) * (mine_TV.exp() - q_TV)
    return torch.where(is_token_T, weight_T * kl_T, 0).sum(), torch.where(is_token_T.unsqueeze(1), grad_TV, 0)


@functools.cache
def _compiled(function: Callable, backend: str | None) -> Callable:
    return function if backend is None else torch.compile(function, backend=backend)
