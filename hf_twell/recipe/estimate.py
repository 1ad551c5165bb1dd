"""What a run will take, told before it starts."""

import math
import shutil

import torch
from torch import nn
from transformers import TrainingArguments

from hf_twell.recipe.schema import Recipe

OPTIMIZER_VALUES = 2  # of Adam, for each trained weight and in its dtype
PASSES = 3  # eager forward passes that an eager step takes as long as
COMPILED = 0.7  # of an eager step's time, that of a compiled one (kernels/twell_cuda/bench/h200-2026-11-23)


def estimate(
    args: TrainingArguments, model: nn.Module, *, sequences: int | None, length: int, dtype: torch.dtype
) -> str:
    """One line of steps, tokens and room on disk for so many sequences (None: streamed) of `length` tokens, and a final
    model in `dtype`."""
    steps, tokens = count_steps(args, sequences), sequences_of_step(args) * length
    sizes = [(weight.numel(), weight.nbytes, weight.requires_grad) for weight in model.parameters()]
    checkpoint = sum(nbytes for _, nbytes, _ in sizes)
    if not args.save_only_model:
        checkpoint += OPTIMIZER_VALUES * sum(nbytes for _, nbytes, trained in sizes if trained)
    kept, final = count_checkpoints(args, steps), dtype.itemsize * sum(count for count, _, _ in sizes)
    saved = f"{kept} checkpoint{'s' if kept > 1 else ''} of {_size(checkpoint)} and " if kept else ""
    return (
        f"{steps:,} steps of {tokens:,} tokens, {steps * tokens:,} in all; on disk {saved}a final model of "
        f"{_size(final)}: {_size(kept * checkpoint + final)}, where {_size(shutil.disk_usage(args.output_dir).free)} "
        "are free"
    )


def estimate_time(args: TrainingArguments, recipe: Recipe, tokens: int, forward_seconds: float) -> str:
    """One line of how long a run of so many `tokens` will take, by what an eager forward pass takes for each token.

    Of compiled runs on an H200 (model_cards), with a third of an eager step for the forward pass, which rows lack:
    steps of Qwen2.5-Coder-1.5B took 1.03 times as long as this says, by a Llama of 1.57B, and those of the 0.5B 0.93
    times. The minutes of all eleven rows of the 0.5B are 1.2 to 2.1 times as many. They also hold loading, measuring,
    compiling and saving. Of other models that have minutes no row has an eager step.
    """
    passes = PASSES + (recipe.distill is not None) + bool(args.gradient_checkpointing)
    took = forward_seconds * passes * (COMPILED if args.torch_compile else 1) * tokens / args.world_size
    beside = "compiling and saving" if args.torch_compile else "saving"
    return f"by the time of a forward pass, training takes about {_duration(took)}, beside {beside}"


def sequences_of_step(args: TrainingArguments) -> int:
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size


def count_steps(args: TrainingArguments, sequences: int | None) -> int:
    """Trainer's own count, which it makes when training has begun."""
    if args.max_steps > 0:
        return args.max_steps
    batches = sequences / (args.train_batch_size * args.world_size)
    batches = math.floor(batches) if args.dataloader_drop_last else math.ceil(batches)
    return math.ceil(args.num_train_epochs * max(1, math.ceil(batches / args.gradient_accumulation_steps)))


def count_checkpoints(args: TrainingArguments, steps: int) -> int:
    """How many checkpoints lie on disk at most: one is deleted when a newer one is complete."""
    every = math.ceil(args.save_steps * steps) if args.save_steps < 1 else args.save_steps
    made = {"no": 0, "steps": math.ceil(steps / every), "epoch": math.ceil(args.num_train_epochs)}
    count = made.get(str(args.save_strategy.value), 2)  # "best": the last one and it
    return count if args.save_total_limit is None else min(count, args.save_total_limit + 1)


def _duration(seconds: float) -> str:
    for name, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {name}"
    return f"{max(1.0, seconds):.0f} seconds"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
