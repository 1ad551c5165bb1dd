"""The arguments of Trainer that a recipe gives, and the progress bar of its run."""

import dataclasses

import torch
from transformers import ProgressCallback, TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

from hf_twell.recipe.checks import check_training
from hf_twell.recipe.schema import Recipe


def training_arguments(recipe: Recipe) -> TrainingArguments:
    """Trainer's arguments as the recipe's `training` gives them.

    Raises:
        ValueError: arguments that TrainingArguments does not have, of another type, or that the recipe itself gives; or
            bf16 without a GPU for it.
    """
    check_training(recipe.training)
    _check_types(recipe.training)
    if (
        recipe.training.get("bf16")
        and not recipe.training.get("use_cpu")
        and not (is_torch_bf16_gpu_available() or is_torch_xla_available())
    ):
        raise ValueError(
            "training has bf16: true, and PyTorch sees no GPU here that computes in it; write training.bf16=false for "
            "float32, or training.use_cpu=true for bfloat16 on the CPU"
        )
    defaults = {"report_to": [], "logging_steps": 10, "disable_tqdm": False}
    given = {key: value for key, value in recipe.training.items() if value is not None}
    on_gpu = torch.accelerator.is_available() and not given.get("use_cpu")
    defaults["dataloader_pin_memory"] = on_gpu  # elsewhere PyTorch only warns of it
    if given.get("dataloader_pin_memory", on_gpu):
        defaults["accelerator_config"] = {"non_blocking": True}  # else each batch's copy waits for the step before it
    try:
        return TrainingArguments(**{**defaults, **given, "output_dir": recipe.output_dir})
    except TypeError as error:
        raise ValueError(f"training: {error}") from error


def _check_types(training: dict) -> None:
    for field in dataclasses.fields(TrainingArguments):
        value = training.get(field.name)
        if isinstance(value, float) and field.type is int:
            raise ValueError(f"training has {field.name}: {value!r}; give a whole number")
        if isinstance(value, str | list | dict) and type(field.default) in (int, float):
            raise ValueError(f"training has {field.name}: {value!r}; give a number")
        # YAML's `no` is a text here, and Python takes any text for true.
        if isinstance(value, str) and "bool" in str(field.type) and "str" not in str(field.type):
            raise ValueError(f"training has {field.name}: {value!r}; give true or false")


class CompactProgress(ProgressCallback):
    """Trainer's progress bar with the last log's figures beside it, instead of a line for each log."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and "loss" in (logs or {}):
            figures = {"loss": f"{logs['loss']:.3f}"}
            if "twell/l0" in logs:
                figures |= {"L0": f"{logs['twell/l0']:.1f}", "l1_weight": f"{logs['twell/l1_weight']:.2g}"}
            self.training_bar.set_postfix(figures)
