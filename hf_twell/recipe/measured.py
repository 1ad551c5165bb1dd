"""What a run measures on held-out text: its dense parent, the model that it begins with, and the result."""

import time
from pathlib import Path

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import Trainer

from hf_twell.blocks.architectures import Site, find_ffns
from hf_twell.files.checkpoints import read_state
from hf_twell.measure.sparsity import measure_sparsity
from hf_twell.models.modes import evaluation_mode
from hf_twell.recipe.packing import PackedText
from hf_twell.train.divergence import IGNORED
from hf_twell.train.parent_loss import with_activations


def measure(trainer: Trainer, heldout: PackedText) -> dict:
    """Held-out loss in nats per token, and the sparsity of every layer on the same text; every process reads all of it.

    Not by `trainer.evaluate()`: called before training under several processes, it marks the model as prepared, and
    `train` would then leave out the exchange of gradients.
    """
    loss = _loss(trainer, heldout, "measuring held-out loss")
    batches = torch.split(heldout.sequences, trainer.args.per_device_eval_batch_size)
    return {"loss": loss, "sparsity": measure_sparsity(trainer.model, batches, progress=_shows_bars(trainer))}


def measure_start(trainer: Trainer, heldout: PackedText, parent: list, text: dict, checkpoint: str | None) -> dict:
    """Held-out figures of the dense parent ("dense": its loss), by what `parent_activations` returned, and of the model
    that the run begins with ("before"). Those that `checkpoint`, from which a run goes on, has of the same `text`, what
    tells one held-out text from another, are taken from there."""
    saved = read_state(checkpoint).get("measured") if checkpoint else None
    if saved is not None and saved["text"] == text:
        return saved
    dense = None
    if any(activation is not site.activation for site, activation in parent):
        with with_activations(parent):
            dense = {"loss": _loss(trainer, heldout, "measuring the dense parent's loss")}
    return {"text": text, "dense": dense, "before": measure(trainer, heldout)}


def forward_seconds(trainer: Trainer, heldout: PackedText) -> float:
    """What a forward pass with its loss takes for each token, by the second pass of one batch in the precision of
    training. The first one loads that precision's kernels and takes the memory: ten times as long on a GPU."""
    batch = heldout.sequences[: trainer.args.per_device_eval_batch_size].to(trainer.args.device)
    # A context of Trainer's own would do nothing here: it leaves autocast to the model, once that is prepared.
    with evaluation_mode(trainer.model), trainer.accelerator.autocast():
        for _ in range(2):
            began = time.perf_counter()
            trainer.model(input_ids=batch, labels=batch, use_cache=False).loss.item()
        return (time.perf_counter() - began) / batch.numel()


def parent_activations(model: nn.Module) -> list[tuple[Site, nn.Module]]:
    """The blocks of a model and their activations, for `measure_start` once others have taken their place."""
    return [(site, site.activation) for site in find_ffns(model)]


def names_of(source: list | dict | str) -> list[str]:
    """What to call a text where others read it: files without their folders, which tell of this machine."""
    if isinstance(source, dict):
        return [source["hub"]]
    return [Path(name).name for name in ([source] if isinstance(source, str) else source)]


def _loss(trainer, heldout: PackedText, description: str) -> float:
    model, total, tokens = trainer.model, 0.0, 0
    batches, labels = (
        torch.split(part, trainer.args.per_device_eval_batch_size) for part in (heldout.sequences, heldout.labels)
    )
    pairs = tqdm(zip(batches, labels, strict=True), description, len(batches), disable=not _shows_bars(trainer))
    with evaluation_mode(model), trainer.compute_loss_context_manager():
        for batch, wanted in pairs:
            inputs = {"input_ids": batch.to(trainer.args.device), "labels": wanted.to(trainer.args.device)}
            count = int((wanted[:, 1:] != IGNORED).sum())
            total += model(**inputs, use_cache=False).loss.item() * count
            tokens += count
    return total / tokens


def _shows_bars(trainer) -> bool:
    return trainer.is_world_process_zero() and not trainer.args.disable_tqdm
