"""The arguments of Trainer that a recipe gives, and the progress bar of its run."""

import types
import typing

import torch
from transformers import ProgressCallback, TrainingArguments
from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

from hf_twell.files.configs import one_line_errors
from hf_twell.recipe.checks import check_training
from hf_twell.recipe.schema import Recipe

WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
}
# Reporters that Transformers has, and does not look for when it lists those that are installed.
UNLISTED_REPORTERS = ("azure_ml", "flyte")


def training_arguments(recipe: Recipe) -> TrainingArguments:
    """Trainer's arguments as the recipe's `training` gives them.

    Raises:
        ValueError: arguments that TrainingArguments does not have, of another type, or that the recipe itself gives;
            bf16 or fp16 without a GPU for it; a reporter that is not installed.
    """
    check_training(recipe.training)
    _check_types(recipe.training)
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


def _check_types(training: dict) -> None:
    """Compare with the types that Trainer's arguments declare: Python takes any text for true, YAML's `no` too."""
    for key, hint in typing.get_type_hints(TrainingArguments).items():
        value, kinds = training.get(key), _yaml_types(hint)
        if value is not None and type(value) not in kinds and not (type(value) is int and float in kinds):
            wanted = " or ".join(words for kind, words in WORDS.items() if kind in kinds) or "null"
            raise ValueError(f"training has {key}: {value!r}; give {wanted}")


def _yaml_types(hint) -> set:
    """Those that a declared type takes, such as {str, list} of `str | list[str] | None`."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return {typing.get_origin(part) or part for part in (typing.get_args(hint) if is_union else (hint,))}


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

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and "loss" in (logs or {}):
            figures = {"loss": f"{logs['loss']:.3f}"}
            if "twell/l0" in logs:
                figures |= {"L0": f"{logs['twell/l0']:.1f}", "l1_weight": f"{logs['twell/l1_weight']:.2g}"}
            self.training_bar.set_postfix(figures)
