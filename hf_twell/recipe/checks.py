"""What is refused of a recipe's keys and values, at once: nothing here imports PyTorch or Transformers."""

import ast
import difflib
import functools
import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path

from hf_twell.recipe.sources import ROW_FILES, check_file, is_streamed
from hf_twell.train.schedule import LAYER_SHARES, REMOVED, TERMS, WARMUPS, check_steps, check_target

REFUSED = {  # keys of `training`, and what to do
    "output_dir": "which is a key of the recipe: write output_dir alone",
    "resume_from_checkpoint": "which Trainer passes over; leave it out and add --resume",
    "push_to_hub": "and a run publishes nothing; leave it out, and publish its final model: hf-twell push",
}
CHOICES = {
    "term": TERMS,
    "warmup": tuple(WARMUPS),
    "layer_shares": LAYER_SHARES,
    "trainable": ("all", "ffn", "ffn+lora"),
    "dtype": ("float32", "bfloat16"),
    "save_dtype": (None, "float32", "bfloat16", "float16"),
    "relu": (True, False),
    "assistant_only_loss": (True, False),
}


def check_recipe(recipe, path: Path) -> None:
    """Refuse what cannot be run.

    Raises:
        ValueError: naming the recipe's file and the key.
    """
    for key, what in (("model", "a folder or a Hub name, or a GGUF file"), ("output_dir", "a folder")):
        if not isinstance(getattr(recipe, key), str):
            raise ValueError(f"{path} has {key}: {getattr(recipe, key)!r}; give {what}")
    if recipe.dtype == "float16":  # a step of Adam is less than its weights can hold, or more
        raise ValueError(
            f"{path} has dtype: 'float16', in which weights do not train; write dtype: float32, and fp16: true in "
            "training to compute in it"
        )
    for key, choices in CHOICES.items():
        if getattr(recipe, key) not in choices:
            listed = ", ".join(map(repr, choices))
            raise ValueError(f"{path} has {key}: {getattr(recipe, key)!r}; choose one of {listed}")
    if not isinstance(recipe.sequence_length, int) or recipe.sequence_length < 2:
        raise ValueError(f"{path} has sequence_length: {recipe.sequence_length!r}; give a whole number of at least 2")
    for key in ("distill", "lora", "training"):
        value = getattr(recipe, key)
        if not isinstance(value, dict) and (value is not None or key != "distill"):
            raise ValueError(f"{path} has {key}: {value!r}; give a mapping")
    if not isinstance(recipe.freeze, list) or not all(isinstance(part, str) and part for part in recipe.freeze):
        raise ValueError(f"{path} has freeze: {recipe.freeze!r}; give a list of parts of weights' names")
    check_training(recipe.training)
    _check_text(recipe, path)
    _check_objective(recipe, path)
    for key in ("logits", "layers"):
        value = (recipe.distill or {}).get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{path}: distill has {key}: {value!r}; give a number")


def check_training(training: dict) -> None:
    """Refuse keys that Trainer's arguments do not have, or that a recipe cannot give.

    Raises:
        ValueError: naming the key.
    """
    known = [key for key in training_keys() if key not in REFUSED]
    check_keys([key for key in training if key not in REFUSED], known, "training")
    for key, why in REFUSED.items():
        if training.get(key):
            raise ValueError(f"training has {key}, {why}")
    if training.get("max_steps") == 0:  # of which Trainer makes one
        raise ValueError("training has max_steps: 0; give at least 1, or null for as many as num_train_epochs takes")
    for key in ("gradient_accumulation_steps", "per_device_train_batch_size", "per_device_eval_batch_size"):
        if isinstance(training.get(key), int | float) and training[key] < 1:
            raise ValueError(f"training has {key}: {training[key]!r}; give at least 1")


def _check_text(recipe, path: Path) -> None:
    for key in ("train", "heldout"):
        value = getattr(recipe, key)
        if isinstance(value, dict) and isinstance(value.get("hub"), str):
            skip, take = value.get("skip", 0), value.get("take")
            for rows, given, least in (("skip", skip, 0), ("take", 1 if take is None else take, 1)):
                if type(given) is not int or given < least:
                    raise ValueError(f"{path}: {key} has {rows}: {given!r}; give a whole number of at least {least}")
            continue
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{path} has {key}: {value!r}; give text files, or a Hub dataset (hub: its name)")
        for name in names:
            check_file(Path(name))
            if recipe.assistant_only_loss and Path(name).suffix not in ROW_FILES:
                raise ValueError(f"{path} has assistant_only_loss, and {name} holds no messages; give rows that do")
    steps, workers = (recipe.training.get(key) or 0 for key in ("max_steps", "dataloader_num_workers"))
    if is_streamed(recipe.train) and isinstance(steps, int | float) and steps <= 0:
        raise ValueError(f"{path} streams its training text, which has no known end; give max_steps in training")
    if (
        is_streamed(recipe.train)
        and isinstance(workers, int)
        and workers > 1
        and {"skip", "take"} & recipe.train.keys()
    ):
        # Each worker would do so with the shards that it reads.
        raise ValueError(f"{path} skips or takes rows of a stream; give at most one of dataloader_num_workers")
    if is_streamed(recipe.heldout) and recipe.heldout.get("take") is None:
        raise ValueError(f"{path} streams its held-out text; say how many rows to take, such as take: 200")


def _check_objective(recipe, path: Path) -> None:
    for key in ("l1_weight", "warmup_steps", "target_density", "revive_after"):
        value = getattr(recipe, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            raise ValueError(f"{path} has {key}: {value!r}; give a number of at least 0")
    try:
        if recipe.target_density is not None:
            check_target(recipe.target_density, layer_shares=recipe.layer_shares, l1_bounds=recipe.l1_bounds)
        check_steps("warmup_steps", recipe.warmup_steps or 0)
    except ValueError as error:
        raise ValueError(f"{path} has {error}") from error
    if recipe.revive_after is not None and (type(recipe.revive_after) is not int or recipe.revive_after < 1):
        raise ValueError(f"{path} has revive_after: {recipe.revive_after!r}; give a whole number of tokens")
    if recipe.l1_bounds is not None and recipe.target_density is None:
        raise ValueError(f"{path} has l1_bounds: {recipe.l1_bounds!r}, which go with target_density alone")
    if recipe.relu and recipe.l1_weight is None and recipe.target_density is None:
        raise ValueError(
            f"{path} has neither target_density nor l1_weight; give the share of active neurons to reach, such as "
            "target_density: 0.1, or l1_weight: 0 for the bare swap"
        )
    if recipe.term != "l1" and recipe.target_density is None:
        raise ValueError(f"{path} has term: {recipe.term!r}, which goes with target_density alone")
    if recipe.l1_weight is not None and recipe.target_density is not None:
        raise ValueError(f"{path} has l1_weight and target_density; give one of them, and null for the other")


def check_keys(data: Iterable[str], known: Sequence[str], where: str) -> None:
    """Refuse unknown keys.

    Raises:
        ValueError: naming the key, and the one that was meant or takes its place.
    """
    for key in data:
        if key in REMOVED:
            raise ValueError(f"{where} has {key}, and {REMOVED[key]}")
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            if key in training_keys():
                hint = f"it belongs to Trainer: write training.{key}"
            raise ValueError(f"{where} has an unknown key {key!r}; {hint}")


@functools.cache
def training_keys() -> tuple[str, ...]:
    """The fields of Transformers' TrainingArguments, read from its source, since its import takes seconds."""
    source = Path(importlib.util.find_spec("transformers").origin).with_name("training_args.py")
    classes = [node for node in ast.parse(source.read_bytes()).body if isinstance(node, ast.ClassDef)]
    fields = next(node.body for node in classes if node.name == "TrainingArguments")
    return tuple(item.target.id for item in fields if isinstance(item, ast.AnnAssign))
