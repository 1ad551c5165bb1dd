"""The L1 term of sparse training: what it adds to each gradient, and what it sees of the model's sparsity."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from hf_twell.modeling import L1Inputs, sparse_ffns


class L1Penalty:
    """Adds `l1_weight` times the mean over layers of L1 to the objective, by its gradient alone.

    Formula: L1 of a layer = sum over neurons of |h|, averaged over all non-padding tokens of the optimizer step, that
    is over all its micro-batches and ranks. The gradient enters in the blocks' own backward, never through a returned
    loss, so it is exact whatever the trainer does with losses, and under gradient checkpointing.

    A hand-written loop needs two lines of it:

        penalty = L1Penalty(model, l1_weight=2e-4)
        for batches in optimizer_steps:
            for batch in penalty.micro_batches(batches):
                (model(**batch).loss / len(batches)).backward()
            optimizer.step()

    Under DistributedDataParallel every rank calls it alike: gradients are taken to be averaged over ranks.

    Args:
        model: a sparsified model.
        l1_weight: the coefficient; may be changed between optimizer steps. 0 only measures.

    Raises:
        ValueError: a model without sparse blocks.

    Source: arXiv 2603.23198, section 2 (the sum over neurons instead of their mean).
    """

    def __init__(self, model: nn.Module, l1_weight: float):
        self.ffns = sparse_ffns(model)
        if not self.ffns:
            raise ValueError(f"{type(model).__name__} has no sparse blocks; call hf_twell.sparsify(model) first")
        if not isinstance(l1_weight, int | float) or not l1_weight >= 0:
            raise ValueError(f"l1_weight={l1_weight!r}; give a number of at least 0")
        self.l1_weight = l1_weight
        self._scale = None
        self._tallies = None
        self._window_tokens = None

    def begin_step(self, batches: Iterable[Mapping], *, scaler: torch.amp.GradScaler | None = None) -> None:
        """Count the tokens of an optimizer step: all micro-batches of this rank, and of the others.

        Args:
            batches: the micro-batches as the model receives them (`attention_mask` marks padding by 0).
            scaler: the fp16 gradient scaler, where one is used; its factor is divided out again by the optimizer step.
        """
        device = self._device(self.ffns[0])
        tokens = torch.zeros((), device=device)
        for batch in batches:
            weight = token_weight(batch)
            tokens += batch_size_tokens(batch) if weight is None else weight.sum().to(device)
        world_size = 1
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(tokens)
            world_size = dist.get_world_size()
        self._window_tokens = tokens if self._window_tokens is None else self._window_tokens + tokens
        factor = self.l1_weight * world_size / len(self.ffns)
        self._scale = factor / tokens.clamp(min=1)
        if scaler is not None:
            self._scale = scaler.scale(self._scale)
        if self._tallies is None:
            self._tallies = [self._new_tally(ffn) for ffn in self.ffns]

    @contextmanager
    def micro_batch(self, batch: Mapping) -> Iterator[None]:
        """Forward and backward of one micro-batch of the step run inside; outside, the model is as if untouched."""
        if self._scale is None:
            raise ValueError(
                "begin_step(batches) must come before micro_batch(batch): the step's tokens are not counted"
            )
        weight = token_weight(batch)
        for ffn, tally in zip(self.ffns, self._tallies, strict=True):
            ffn.twell.l1 = L1Inputs(
                self._scale.to(tally.device),
                None if weight is None else weight.to(tally.device, torch.float32, non_blocking=True),
                tally,
            )
        try:
            yield
        finally:
            for ffn in self.ffns:
                ffn.twell.l1 = None

    def micro_batches(self, batches: Iterable[Mapping], *, scaler=None) -> Iterator[Mapping]:
        """Yield the micro-batches of one optimizer step, each with the L1 term switched on."""
        if isinstance(batches, Mapping):
            raise ValueError("micro_batches takes the micro-batches of an optimizer step; put a single one into a list")
        batches = list(batches)
        self.begin_step(batches, scaler=scaler)
        for batch in batches:
            with self.micro_batch(batch):
                yield batch

    def report(self) -> dict | None:
        """Sparsity of all tokens since the last report, over all ranks (each must call it); None if there were none.

        Returns:
            l0, density, l1 (means over layers), dead (share of neurons that no token activated), tokens, l1_weight,
            and `layers`: the same four figures for each sparse layer.
        """
        if self._tallies is None or self._window_tokens is None:
            return None
        tokens = max(self._window_tokens.item(), 1.0)
        layers = []
        for tally in self._tallies:
            counts = torch.zeros_like(tally) if tally.grad is None else tally.grad
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(counts)
            l1, active = counts[0].item() / tokens, counts[1:]
            l0 = active.sum().item() / tokens
            dead = (active == 0).float().mean().item()
            layers.append({"l0": l0, "density": l0 / len(active), "l1": l1, "dead": dead})
            tally.grad = None
        mean = {key: sum(layer[key] for layer in layers) / len(layers) for key in layers[0]}
        self._window_tokens = None
        return {**mean, "tokens": int(tokens), "l1_weight": self.l1_weight, "layers": layers}

    def _new_tally(self, ffn) -> torch.Tensor:
        width = getattr(ffn, ffn.twell.form.up).out_features
        return torch.zeros(1 + width, device=self._device(ffn), requires_grad=True)

    @staticmethod
    def _device(ffn) -> torch.device:
        return next(ffn.parameters()).device


def token_weight(batch: Mapping) -> torch.Tensor | None:
    """1 for each token that counts and 0 for padding, fp32, shaped like the mask; None where every position counts."""
    mask = batch.get("attention_mask")
    if mask is None:
        return None
    if mask.ndim != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; the L1 term needs (batch, sequence) to know padding. "
            "Leave the mask out where no position is padding."
        )
    return (mask != 0).float()


def batch_size_tokens(batch: Mapping) -> int:
    """Positions in a batch, padding included."""
    for key in ("input_ids", "inputs_embeds"):
        if batch.get(key) is not None:
            return batch[key].shape[0] * batch[key].shape[1]
    raise ValueError(f"the batch has keys {sorted(batch)}; expected input_ids or inputs_embeds to count tokens")
