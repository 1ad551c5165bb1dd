"""What a fine-tuning recipe needs: its YAML, read and checked before PyTorch and Transformers are imported."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from hf_twell.recipe.checks import check_keys, check_recipe
from hf_twell.recipe.yaml12 import read_yaml


@dataclasses.dataclass(frozen=True)
class Distill:
    """The keys of a recipe's `distill`."""

    logits: float = 0.5
    layers: float = 0.0
    parent: str | None = None
    dtype: str | None = None


@dataclasses.dataclass(frozen=True)
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
        target_density: share of active neurons to reach; this or `l1_weight` must be given.
        term: "l1", or with `target_density` also "count": what is pressed on, the size of what active neurons add or
            how many they are.
        l1_weight: coefficient of the L1 term; 0 trains the ReLU model without it.
        warmup_steps: optimizer steps (or share of them, under 1) over which the coefficient rises, or the density
            falls to its target.
        warmup: "linear" or "sine".
        layer_shares: "equal" or "free": whether every layer reaches the target, or their mean.
        l1_bounds: lowest and highest coefficient that `target_density` may lead to; null for those of the controller.
        revive_after: tokens after which a neuron that was never active is revived; null leaves dead ones alone.
        distill: what the dense parent teaches: `logits` (share in the objective), `layers` (weight of its blocks'
            outputs), `parent` (default: `model`), `dtype` of the parent (default: bfloat16 if `training`
            has `bf16`, else `dtype`).
        layers: layers on which the L1 term and kernels act; null for all.
        trainable: "all", "ffn" (feed-forward blocks alone) or "ffn+lora" (LoRA on the attention besides).
        freeze: parts of the names of weights that are left as they are, such as [embed_tokens, norm].
        lora: arguments of `peft.LoraConfig` for "ffn+lora"; merged into the final model.
        dtype: of the weights that are trained, "float32" or "bfloat16". Use float32 with `bf16: true` (or `fp16: true`)
            in `training` on a GPU.
        save_dtype: of the final model's weights; null for that of `model` itself (bfloat16 for a quantized GGUF file),
            or for `dtype` if that takes less space. Figures are measured in `dtype`.
        training: arguments of `transformers.TrainingArguments`; null is as if one were left out.
    """

    model: str
    output_dir: str
    train: list | dict | str
    heldout: list | dict | str
    sequence_length: int = 512
    assistant_only_loss: bool = False
    relu: bool = True
    target_density: float | None = None
    term: str = "l1"
    l1_weight: float | None = None
    warmup_steps: float | None = None
    warmup: str = "linear"
    layer_shares: str = "equal"
    l1_bounds: list | None = None
    revive_after: int | None = None
    distill: dict | None = None
    layers: list | None = None
    trainable: str = "all"
    freeze: list = dataclasses.field(default_factory=list)
    lora: dict = dataclasses.field(default_factory=dict)
    dtype: str = "float32"
    save_dtype: str | None = None
    training: dict = dataclasses.field(default_factory=dict)

    @property
    def sparsity(self) -> dict:
        """Arguments of `SparsityCallback`."""
        names = ("target_density", "term", "warmup_steps", "warmup", "layer_shares", "l1_bounds", "revive_after")
        return {name: getattr(self, name) for name in ("l1_weight", *names)}


def load_recipe(path: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe; relative paths in it start from its own folder, those of `changes` from the working directory.

    Args:
        path: the YAML file.
        changes: `key=value` in place of the file's, the value in YAML; `training.max_steps=20` reaches inside.

    Raises:
        ValueError: no such file, text that is no YAML mapping, or keys that a recipe does not have or lacks.
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
    return _checked(data, path)


def _checked(data: dict, path: Path) -> Recipe:
    check_keys(data, _fields(Recipe), str(path))
    missing = [
        field.name
        for field in dataclasses.fields(Recipe)
        if field.name not in data and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    recipe = Recipe(**data)
    check_recipe(recipe, path)
    check_keys(recipe.distill or {}, _fields(Distill), f"{path}: distill")
    return recipe


def _fields(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _from_folder(key: str, value, folder: Path):
    """Make a path in the YAML relative to the YAML; a model that is neither there nor a GGUF file is a Hub name."""
    if key in ("train", "heldout") and isinstance(value, str | list):
        names = [value] if isinstance(value, str) else value
        return [os.path.normpath(folder / name) if isinstance(name, str) else name for name in names]
    if key == "output_dir" and isinstance(value, str):
        return os.path.normpath(folder / value)
    if key in ("model", "parent") and isinstance(value, str):
        here = (folder / value).exists() or value.startswith(".") or value.endswith(".gguf")
        return os.path.normpath(folder / value) if here else value
    if key == "distill" and isinstance(value, dict):
        return {inner: _from_folder(inner, path, folder) for inner, path in value.items()}
    return value
