"""The dense parent's loss: computed before the first step by the activations that ReLU took the place of."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from torch import nn
from transformers import Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_twell.blocks.architectures import Site, find_ffns
from hf_twell.models.modes import evaluation_mode
from hf_twell.train.divergence import IGNORED


@contextlib.contextmanager
def with_activations(chosen: Sequence[tuple[Site, nn.Module]]) -> Iterator[None]:
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
    """Loss of the step whose micro-batches these are, by the model's weights and its parent's activations.

    Nats per label. None where that is not to be had: the model came with ReLU, has begun a step of an `L1Penalty`
    since, is sharded or was compiled in place, or the batches have no labels. A training
    without an `L1Penalty` is not noticed: after one, it is the loss of the weights as trained.
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
    total, count = 0.0, 0
    with with_activations(dense), evaluation_mode(model), trainer.compute_loss_context_manager():
        for batch in batches:
            inputs = trainer._prepare_inputs(batch)
            labels = _count_labels(model, inputs)
            if not labels:  # the mean over none is NaN
                continue
            loss = getattr(model(**inputs), "loss", None)
            if loss is None:
                return None
            total, count = total + loss.mean().item() * labels, count + labels
    return total / count if count else None


def _count_labels(model: nn.Module, batch: Mapping) -> int:
    """How many labels the model's loss of a batch is the mean over; the first of a sequence is no word to predict."""
    labels = batch.get("shift_labels")
    if labels is None:
        labels = batch.get("labels")
        loss = getattr(model, "loss_function", None)
        if labels is not None and getattr(loss, "_torchdynamo_orig_callable", loss) is ForCausalLMLoss:  # or compiled
            labels = labels[..., 1:]
    return 0 if labels is None else int((labels != IGNORED).sum())
