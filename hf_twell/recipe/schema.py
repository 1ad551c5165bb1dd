"""What a fine-tuning recipe needs: its YAML, read and checked before PyTorch and Transformers are imported."""

import dataclasses
import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, TypeGuard

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator, model_validator
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict

from hf_twell.files.text import ROW_FILES, check_file
from hf_twell.recipe.yaml12 import read_yaml
from hf_twell.train.schedule import REMOVED, check_schedule

# What is allowed, by the kind of pydantic's error.
ALLOWED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
}
ALLOWED_OF = {  # keys whose type says too little
    "model": "a folder or a Hub name, or a GGUF file",
    "output_dir": "a folder",
    "l1_bounds": "the lowest and the highest weight, two rising numbers above 0",
    "sequence_length": "a whole number of at least 2",
    "freeze": "a list of parts of weights' names",
    "revive_after": "a whole number of tokens",
    # A step of Adam is less than float16 weights can hold, or more.
    "dtype": "'float32', with training.fp16=true to compute in float16, or 'bfloat16'",
}


def _text(value):
    """Text files that are there, or a Hub dataset."""
    if isinstance(value, dict) and isinstance(value.get("hub"), str):
        skip, take = value.get("skip", 0), value.get("take")
        for rows, given, least in (("skip", skip, 0), ("take", 1 if take is None else take, 1)):
            if type(given) is not int or given < least:
                raise ValueError(f"{rows}: {given!r}; give a whole number of at least {least}")
        return value
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("give text files, or a Hub dataset (hub: its name)")
    for name in names:
        check_file(Path(name))
    return value


def _as_given(value, check):
    """4 steps do not become 4.0."""
    check(value)
    return value


Text = Annotated[list | dict | str, BeforeValidator(_text)]
Number = Annotated[float, WrapValidator(_as_given)]
Positive = Annotated[Number, Field(ge=0, allow_inf_nan=False)]


class Distill(TypedDict, total=False):
    """The keys of a recipe's `distill`."""

    logits: Number
    layers: Number
    parent: str | None
    dtype: str | None


@dataclass(frozen=True, config=ConfigDict(strict=True))
class Recipe:
    """One run of `finetune`; each field is a key of the YAML.

    Attributes:
        model: a folder, a GGUF file or a Hub name.
        output_dir: where checkpoints and the final model (`final/`) go.
        train: text to train on: files (.txt, .txt.xz, .jsonl, .json, .parquet) or one Hub dataset (`hub: name`; with
            `streaming: true` it is read as training goes on, and `max_steps` must be given). Rows have a `text`, or
            `messages`, which go through the tokenizer's chat template.
        heldout: text to measure loss and sparsity on, in the same form.
        sequence_length: tokens of a packed training sequence.
        assistant_only_loss: true trains on what the assistant says in rows of `messages`, false on all of their tokens;
            the L1 term and `distill` act on all tokens.
        relu: false trains the dense parent as it is, as a control; the keys from here to `distill` then have no effect.
        target_density: share of active neurons to reach; this, `target_union` or `l1_weight` must be given.
        target_union: share of neurons to reach that are active in at least one of `share` neighbouring tokens.
        term: "l1", or with a target also "count": what is pressed on, the size of what active neurons add or how many
            they are.
        share: with "count", how many neighbouring tokens are pressed to share their active neurons, such as 64; null
            presses on each token alone. The runs of so many begin at each sequence's start, whatever documents are in
            it.
        l1_weight: coefficient of the L1 term; 0 trains the ReLU model without it.
        warmup_steps: optimizer steps (or share of them, under 1) over which the coefficient rises, or the density
            falls to its target.
        warmup: "linear" or "sine".
        layer_shares: "equal" or "free": whether every layer reaches the target, or their mean.
        l1_bounds: lowest and highest coefficient that `target_density` may lead to; null for those of the controller.
        revive_after: tokens after which a neuron that was never active is revived; null leaves dead ones alone.
        distill: what the dense parent teaches: `logits` (share in the objective, 0.5 if left out), `layers` (weight of
            its blocks' outputs, 0), `parent` (default: `model`), `dtype` of the parent (default: bfloat16 if `training`
            has `bf16`, else `dtype`).
        layers: layers on which the L1 term and kernels act; null for all.
        trainable: "all", "ffn" (feed-forward blocks alone) or "ffn+lora" (LoRA on the attention besides).
        freeze: parts of the names of weights that are left as they are, such as [embed_tokens, norm].
        lora: arguments of `peft.LoraConfig` for "ffn+lora"; merged into the final model.
        dtype: of the weights that are trained, "float32" or "bfloat16". Use float32 with `bf16: true` (or `fp16: true`)
            in `training` on a GPU.
        save_dtype: of the final model's weights; null for that of `model` itself (bfloat16 for a quantized GGUF file),
            or for `dtype` if that takes less space. Figures are measured in `dtype`.
        training: arguments of `transformers.TrainingArguments`; null is as if one were left out. Without
            `learning_rate` a pretrained model takes the one that is proposed for its size (`train/learning_rates.py`).

    Raises:
        pydantic.ValidationError: values that cannot be run; `load_recipe` says them in one line.
    """

    model: str
    output_dir: str
    train: Text
    heldout: Text
    sequence_length: Annotated[int, Field(ge=2)] = 512
    assistant_only_loss: bool = False
    relu: bool = True
    target_density: Positive | None = None
    target_union: Positive | None = None
    term: Literal["l1", "count"] = "l1"
    share: Annotated[int, Field(ge=2)] | None = None
    l1_weight: Positive | None = None
    warmup_steps: Positive | None = None
    warmup: Literal["linear", "sine"] = "linear"
    layer_shares: Literal["equal", "free"] = "equal"
    l1_bounds: list[Number] | None = None
    revive_after: Annotated[int, Field(ge=1)] | None = None
    distill: Distill | None = None
    layers: list[int] | None = None
    trainable: Literal["all", "ffn", "ffn+lora"] = "all"
    freeze: list[Annotated[str, Field(min_length=1)]] = dataclasses.field(default_factory=list)
    lora: dict = dataclasses.field(default_factory=dict)
    dtype: Literal["float32", "bfloat16"] = "float32"
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    training: dict = dataclasses.field(default_factory=dict)

    @property
    def sparsity(self) -> dict:
        """Arguments of `SparsityCallback`."""
        names = ("l1_weight", "target_density", "target_union", "term", "share", "warmup_steps", "warmup")
        return {name: getattr(self, name) for name in (*names, "layer_shares", "l1_bounds", "revive_after")}

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Refuse values that each may be, and that no run can have together."""
        if self.relu or any(value is not None for value in (self.l1_weight, self.target_density, self.target_union)):
            schedule = {key: value for key, value in self.sparsity.items() if key != "revive_after"}
            check_schedule(**{**schedule, "warmup_steps": self.warmup_steps or 0})
        if self.share is not None and self.share > self.sequence_length:
            raise ValueError(
                f"share is {self.share}, more tokens than a sequence has; give at most sequence_length, "
                f"{self.sequence_length}"
            )
        if self.assistant_only_loss:
            for name in (name for text in (self.train, self.heldout) for name in _names_in(text)):
                if Path(name).suffix not in ROW_FILES:
                    raise ValueError(f"assistant_only_loss: true, and {name} holds no messages; give rows that do")
        if is_streamed(self.train):
            steps, workers = (self.training.get(key) or 0 for key in ("max_steps", "dataloader_num_workers"))
            if isinstance(steps, int | float) and steps <= 0:
                raise ValueError("the training text is a stream, which has no known end; give max_steps in training")
            if isinstance(workers, int) and workers > 1 and {"skip", "take"} & self.train.keys():
                # Each worker would do so with the shards that it reads.
                raise ValueError(
                    "the training text is a stream with skip or take; give at most one dataloader_num_workers"
                )
        if is_streamed(self.heldout) and self.heldout.get("take") is None:
            raise ValueError("the held-out text is a stream; say how many rows to take, such as take: 200")
        return self


def load_recipe(path: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe; relative paths in it start from its own folder, those of `changes` from the working directory.

    Args:
        path: the YAML file.
        changes: `key=value` in place of the file's, the value in YAML; `training.max_steps=20` reaches inside.

    Raises:
        ValueError: in one line, no such file, text that is no YAML mapping, keys that a recipe does not have or lacks,
            or values that cannot be run.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no recipe at {path}; give the path of a YAML file, such as recipes/demo.yaml of a checkout")
    data = read_yaml(path.read_bytes(), str(path))
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no mapping of recipe keys")
    data = {key: _from_folder(key, value, path.parent) for key, value in data.items()}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"{change!r} is no change to a recipe; write key=value, such as l1_weight=1e-3")
        key, _, inner = key.partition(".")
        value = read_yaml(value, change)
        if inner and not isinstance(data.get(key) or {}, dict):
            raise ValueError(f"{change!r}: {key} holds no keys in {path}, but {data[key]!r}; write {key}={{...}}")
        data[key] = {**(data.get(key) or {}), inner: value} if inner else value
    other = " (if it is one of Trainer's, write training.{key})"
    check_keys(data, [field.name for field in dataclasses.fields(Recipe)], str(path), other)
    if isinstance(data.get("distill"), dict):
        check_keys(data["distill"], list(Distill.__annotations__), f"{path}: distill")
    try:
        return Recipe(**data)
    except ValidationError as error:
        raise ValueError(first_fault(error, str(path))) from None


def is_streamed(source: list | dict | str) -> TypeGuard[dict]:
    """Whether a recipe's text is a Hub dataset that is read as training goes on."""
    return isinstance(source, dict) and bool(source.get("streaming"))


def check_keys(data: Iterable, known: Sequence[str], where: str, other: str = "") -> None:
    """Refuse unknown keys, by a ValueError that names the one that was meant or takes its place; `other` is what else
    is said."""
    for key in data:
        if key in REMOVED:
            raise ValueError(f"{where} has {key}, and {REMOVED[key]}")
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise ValueError(f"{where} has an unknown key {key!r}; {hint}{other.format(key=key)}")


def first_fault(error: ValidationError, where: str, key: str | None = None) -> str:
    """The first of pydantic's errors in one line, such as "demo.yaml has l1_weight: -1; give at least 0". `key` is that
    of the value, where no mapping was read."""
    faults = error.errors(include_url=False)
    if missing := [str(fault["loc"][0]) for fault in faults if fault["type"] == "missing"]:
        return f"{where} lacks {', '.join(missing)}"
    loc, given = faults[0]["loc"], faults[0]["input"]
    if not loc and key is None:
        return f"{where}: {faults[0]['ctx']['error']}"
    name = key if key is not None else ".".join(str(part) for part in loc if not isinstance(part, int))
    same = {fault["type"]: fault for fault in faults if fault["input"] is given}  # one for each type that may be given
    words = [text.format(**same[kind].get("ctx", {})) for kind, text in ALLOWED.items() if kind in same]
    if "value_error" in same:
        return f"{where} has {name}: {given!r}; {same['value_error']['ctx']['error']}"
    return f"{where} has {name}: {given!r}; give {ALLOWED_OF.get(name) or ' or '.join(words) or faults[0]['msg']}"


def _names_in(text: list | dict | str) -> list[str]:
    return [] if isinstance(text, dict) else [text] if isinstance(text, str) else text


def _from_folder(key: str, value, folder: Path):
    """Make a path in the YAML relative to the YAML; a model that is neither there nor a GGUF file is a Hub name."""
    if key in ("train", "heldout") and isinstance(value, str | list):
        return [os.path.normpath(folder / name) if isinstance(name, str) else name for name in _names_in(value)]
    if key == "output_dir" and isinstance(value, str):
        return os.path.normpath(folder / value)
    if key in ("model", "parent") and isinstance(value, str):
        here = (folder / value).exists() or value.startswith(".") or value.endswith(".gguf")
        return os.path.normpath(folder / value) if here else value
    if key == "distill" and isinstance(value, dict):
        return {inner: _from_folder(inner, path, folder) for inner, path in value.items()}
    return value
