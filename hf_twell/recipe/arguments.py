"""The arguments of Trainer that a recipe gives, and the progress bar of its run."""

import dataclasses
import typing
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

from hf_twell.files.configs import one_line_errors
from hf_twell.recipe.schema import Recipe, check_keys, first_fault

REFUSED = {  # keys of `training`, and what to do
    "output_dir": "which is a key of the recipe: write output_dir alone",
    "resume_from_checkpoint": "which Trainer passes over; leave it out and add --resume",
    "push_to_hub": "and a run publishes nothing; leave it out, and publish its final model: hf-twell push",
}
# Reporters that Transformers has, and does not look for when it lists those that are installed.
UNLISTED_REPORTERS = ("azure_ml", "flyte")
UNION = "twell/union_"  # and how many tokens share it
_ANY_CLASS = ConfigDict(arbitrary_types_allowed=True)  # such as accelerate's ParallelismConfig


def training_arguments(recipe: Recipe) -> TrainingArguments:
    """Trainer's arguments as the recipe's `training` gives them. A ValueError of arguments that TrainingArguments does
    not have, of another type, or that the recipe itself gives; of bf16 or fp16 without a GPU for it, and of a reporter
    that is not installed."""
    _check_values(recipe.training)
    _check_precision(recipe.training)
    defaults = {"report_to": [], "logging_steps": 10, "disable_tqdm": False}
    given = {key: value for key, value in recipe.training.items() if value is not None}
    on_gpu = torch.accelerator.is_available() and not given.get("use_cpu")
    defaults["dataloader_pin_memory"] = on_gpu  # elsewhere PyTorch only warns of it
    if given.get("dataloader_pin_memory", on_gpu):
        defaults["accelerator_config"] = {"non_blocking": True}  # else each batch's copy waits for the step before it
    with one_line_errors("training makes no arguments of Trainer"):
        args = TrainingArguments(**{**defaults, **given, "output_dir": recipe.output_dir})
        args.get_process_log_level()  # which Trainer looks up later
    _check_reporters(args.report_to)
    return args


def with_learning_rate(recipe: Recipe, rate: float | None) -> Recipe:
    """The recipe with this learning rate, if it has none of its own."""
    if rate is None or recipe.training.get("learning_rate") is not None:
        return recipe
    return dataclasses.replace(recipe, training={**recipe.training, "learning_rate": rate})


def _check_values(training: dict) -> None:
    """Compare with the types that Trainer's arguments declare: Python takes any text for true, YAML's `no` too."""
    hints = typing.get_type_hints(TrainingArguments)
    given = {key: value for key, value in training.items() if value is not None and (value or key not in REFUSED)}
    for key in given.keys() & REFUSED.keys():
        raise ValueError(f"training has {key}, {REFUSED[key]}")
    check_keys(training.keys() - REFUSED.keys(), [key for key in hints if key not in REFUSED], "training")
    for key, value in given.items():
        try:
            TypeAdapter(hints[key], config=_ANY_CLASS).validate_python(value, strict=True)
        except ValidationError as error:
            raise ValueError(first_fault(error, "training", key)) from None
    if given.get("max_steps") == 0:  # of which Trainer makes one
        raise ValueError("training has max_steps: 0; give at least 1, or null for as many as num_train_epochs takes")
    for key in ("gradient_accumulation_steps", "per_device_train_batch_size", "per_device_eval_batch_size"):
        if given.get(key, 1) < 1:
            raise ValueError(f"training has {key}: {given[key]!r}; give at least 1")


def _check_precision(training: dict) -> None:
    if training.get("fp16") and (training.get("use_cpu") or not torch.accelerator.is_available()):
        raise ValueError(
            "training has fp16: true, which needs a GPU, and this run is on a CPU; write training.fp16=false for "
            "float32, or training.fp16=false training.bf16=true training.use_cpu=true for bfloat16"
        )
    if (
        training.get("bf16")
        and not training.get("use_cpu")
        and not (is_torch_bf16_gpu_available() or is_torch_xla_available())
    ):
        raise ValueError(
            "training has bf16: true, and PyTorch sees no GPU here that computes in it; write training.bf16=false for "
            "float32, or training.use_cpu=true for bfloat16 on the CPU"
        )


def _check_reporters(names: list[str]) -> None:
    with one_line_errors("training.report_to"):
        get_reporting_integration_callbacks(names)
    here = (*get_available_reporting_integrations(), *UNLISTED_REPORTERS)
    for name in names:
        if name not in here:
            raise ValueError(
                f"training has report_to: {name}, which is not installed: pip install {name}, or leave it out"
            )


class CompactProgress(ProgressCallback):
    """Trainer's progress bar with the last log's figures beside it, instead of a line for each log."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.training_bar is not None and logs is not None and "loss" in logs:
            figures = {"loss": f"{logs['loss']:.3f}"}
            if "twell/l0" in logs:
                figures["L0"] = f"{logs['twell/l0']:.1f}"
                figures |= {key.removeprefix("twell/"): f"{logs[key]:.1%}" for key in logs if key.startswith(UNION)}
                figures["l1_weight"] = f"{logs['twell/l1_weight']:.2g}"
            self.training_bar.set_postfix(figures)
