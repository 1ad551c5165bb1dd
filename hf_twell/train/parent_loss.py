"""The dense parent's loss: computed before the first step by the activations that ReLU took the place of."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from torch import nn
from transformers import Trainer

from hf_twell.blocks.architectures import FfnSite, find_ffns
from hf_twell.models.modes import evaluation_mode


@contextlib.contextmanager
def with_activations(chosen: Sequence[tuple[FfnSite, nn.Module]]) -> Iterator[None]:
    """A block that has another activation than ReLU computes through its submodules, like the dense one it was."""
    present = [(site, site.activation) for site, _ in chosen]
    try:
        for site, activation in chosen:
            setattr(site.module, site.form.activation, activation)
        yield
    finally:
        for site, activation in present:
            setattr(site.module, site.form.activation, activation)


def parent_loss(trainer: Trainer, batches: Sequence[Mapping]) -> float | None:
    """Mean loss of the micro-batches by the weights that a training begins with and its parent's activations.

    Nats per token. None where that is not to be had: the model came with ReLU or was trained since, is sharded or was
    compiled in place, or its batches have no labels.
    """
    model = trainer.model
    sites = find_ffns(model)
    dense = [(site, *getattr(site.activation, "replaces", ())) for site in sites]
    if (
        any(len(pair) == 1 for pair in dense)
        or trainer.is_fsdp_enabled
        or trainer.is_deepspeed_enabled
        or model._compiled_call_impl is not None
    ):
        return None
    losses = []
    with with_activations(dense), evaluation_mode(model), trainer.compute_loss_context_manager():
        for batch in batches:
            loss = getattr(model(**trainer._prepare_inputs(batch)), "loss", None)
            if loss is None:
                return None
            losses.append(loss.mean().item())
    return sum(losses) / len(losses)
