"""What a fine-tuning recipe needs: its YAML, and text packed into training sequences."""

import dataclasses
import difflib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import yaml
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainingArguments

from hf_twell.callbacks import WARMUPS
from hf_twell.checkpoints import last_checkpoint
from hf_twell.text import read_documents

ROW_FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: 2e-4 is a number though it lacks a dot, and `no` is a string."""


_BOOL = "tag:yaml.org,2002:bool"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One run of `recipes/finetune.py`; each field is a key of the YAML.

    Attributes:
        model: a folder or a Hub name.
        output_dir: where checkpoints and the final model (`final/`) go.
        train: text to train on: files (.txt, .txt.xz, .jsonl, .parquet) or one Hub dataset (`hub: name`).
        heldout: text to measure loss and sparsity on, in the same form.
        sequence_length: tokens of a packed training sequence.
        l1_weight: coefficient of the L1 term; 0 trains the ReLU model without it.
        warmup_steps: optimizer steps (or share of them, under 1) over which the coefficient rises.
        warmup: "linear" or "sine".
        layers: layers on which the L1 term and kernels act; null for all.
        dtype: of the weights that are trained. Use float32 with `bf16: true` in `training` on a GPU.
        training: arguments of `transformers.TrainingArguments`.
    """

    model: str
    output_dir: str
    train: list | dict | str
    heldout: list | dict | str
    sequence_length: int = 512
    l1_weight: float = 2e-4
    warmup_steps: float = 0
    warmup: str = "linear"
    layers: list | None = None
    dtype: str = "float32"
    training: dict = dataclasses.field(default_factory=dict)


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
        raise ValueError(f"no recipe at {path}; give the path of a YAML file such as recipes/demo.yaml")
    data = _read_yaml(path.read_bytes(), str(path))
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no mapping of recipe keys")
    data = {key: _from_folder(key, value, path.parent) for key, value in data.items()}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"{change!r} is no change to a recipe; write key=value, such as l1_weight=1e-3")
        key, _, inner = key.partition(".")
        value = _read_yaml(value, change)
        data[key] = {**data.get(key, {}), inner: value} if inner else value
    return _checked(data, path)


def documents_of(source: list | dict | str) -> Iterator[str]:
    """The documents of text files or of a Hub dataset.

    A .txt file's documents end with a line `<|endoftext|>`; .jsonl and .parquet rows, and those of a Hub dataset
    ({"hub": name, "config": ..., "split": "train", "column": "text"}), are one document each.

    Raises:
        ValueError: a missing file, an unknown kind of file, or a file that is not text.
    """
    if isinstance(source, dict):
        yield from _rows(**source)
        return
    for name in [source] if isinstance(source, str) else source:
        path = Path(name)
        _check_file(path)
        if path.suffix in ROW_FILES:
            yield from _rows(ROW_FILES[path.suffix], data_files=str(path.absolute()))
        else:
            yield from read_documents(path)


def token_ids(tokenizer, source: list | dict | str, *, description: str = "tokenizing") -> list[int]:
    """The token ids of all documents, each ended by the end-of-sequence token."""
    ids = []
    for document in tqdm(documents_of(source), desc=description, unit=" documents"):
        ids += tokenizer(document, verbose=False)["input_ids"]
        if tokenizer.eos_token_id is not None and ids and ids[-1] != tokenizer.eos_token_id:
            ids.append(tokenizer.eos_token_id)
    return ids


class PackedText(torch.utils.data.Dataset):
    """Documents as token ids, each ended by the end-of-sequence token, cut into sequences of one length.

    Raises:
        ValueError: less text than one sequence.
    """

    def __init__(self, tokenizer, source: list | dict | str, sequence_length: int, *, description: str = "tokenizing"):
        ids = token_ids(tokenizer, source, description=description)
        count = len(ids) // sequence_length
        if not count:
            raise ValueError(f"{source} has {len(ids)} tokens, less than one sequence of {sequence_length}")
        self.sequences = torch.tensor(ids[: count * sequence_length]).view(count, sequence_length)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.sequences[index], "labels": self.sequences[index]}


def training_arguments(recipe: Recipe) -> TrainingArguments:
    """Trainer's arguments as the recipe's `training` gives them.

    Raises:
        ValueError: an argument that TrainingArguments does not have.
    """
    if not isinstance(recipe.training, dict):
        raise ValueError(f"training: {recipe.training!r}; give a mapping of TrainingArguments")
    _check_keys(recipe.training, TrainingArguments, "training")
    for field in dataclasses.fields(TrainingArguments):
        value = recipe.training.get(field.name)
        if isinstance(value, str) and type(field.default) in (int, float):
            raise ValueError(f"training has {field.name}: {value!r}; give a number")
    defaults = {"report_to": [], "logging_steps": 10, "disable_tqdm": False}
    try:
        return TrainingArguments(**{**defaults, **recipe.training, "output_dir": recipe.output_dir})
    except TypeError as error:
        raise ValueError(f"training: {error}") from error


def check_run(output_dir: str, args: TrainingArguments, *, resume: bool, overwrite: bool) -> None:
    """Refuse, before any work, a run that would mix with an earlier one in its folder, or that has nothing to do.

    Raises:
        ValueError: an earlier run's checkpoints or final model without `resume` or `overwrite`; nothing to resume from.
    """
    checkpoint = last_checkpoint(output_dir)
    if not resume:
        if checkpoint:
            raise ValueError(f"{checkpoint} is from an earlier run; go on with --resume, or choose another output_dir")
        if Path(output_dir, "final").exists() and not overwrite:
            raise ValueError(f"{output_dir} holds the final model of an earlier run; replace it with --overwrite")
        return
    if checkpoint is None:
        raise ValueError(f"{output_dir} holds no complete checkpoint to resume from; leave --resume out")
    state = json.loads(Path(checkpoint, "trainer_state.json").read_text())
    same_epochs = state["num_train_epochs"] == args.num_train_epochs
    steps = args.max_steps if args.max_steps > 0 else state["max_steps"] if same_epochs else math.inf
    if state["global_step"] >= steps:
        raise ValueError(f"the run in {output_dir} is finished: {state['global_step']} of {steps} steps are done")


class CompactProgress(ProgressCallback):
    """Trainer's progress bar with the last log's figures beside it, instead of a line for each log."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and "loss" in (logs or {}):
            figures = {"loss": f"{logs['loss']:.3f}"}
            if "twell/l0" in logs:
                figures |= {"L0": f"{logs['twell/l0']:.1f}", "l1_weight": f"{logs['twell/l1_weight']:.2g}"}
            self.training_bar.set_postfix(figures)


def _checked(data: dict, path: Path) -> Recipe:
    _check_keys(data, Recipe, str(path))
    missing = [
        field.name
        for field in dataclasses.fields(Recipe)
        if field.name not in data and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    recipe = Recipe(**data)
    if recipe.warmup not in WARMUPS:
        raise ValueError(f"{path} has warmup: {recipe.warmup!r}; choose one of {', '.join(map(repr, WARMUPS))}")
    if recipe.dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"{path} has dtype: {recipe.dtype!r}; choose float32, bfloat16 or float16")
    if not isinstance(recipe.sequence_length, int) or recipe.sequence_length < 2:
        raise ValueError(f"{path} has sequence_length: {recipe.sequence_length!r}; give a whole number of at least 2")
    for source in (recipe.train, recipe.heldout):
        if not isinstance(source, dict):
            for name in [source] if isinstance(source, str) else source:
                _check_file(Path(name))
    for key in ("l1_weight", "warmup_steps"):
        value = getattr(recipe, key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ValueError(f"{path} has {key}: {value!r}; give a number of at least 0")
    return recipe


def _check_keys(data: dict, cls: type, where: str) -> None:
    known = [field.name for field in dataclasses.fields(cls)]
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise ValueError(f"{where} has an unknown key {key!r}; {hint}")


def _read_yaml(text: str | bytes, where: str):
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} is not readable as YAML: {' '.join(str(error).split())}") from error


def _from_folder(key: str, value, folder: Path):
    """Make a path in the YAML relative to the YAML; a model that is no folder there is a Hub name."""
    if key in ("train", "heldout") and isinstance(value, str | list):
        return [os.path.normpath(folder / name) for name in ([value] if isinstance(value, str) else value)]
    if key == "output_dir" and isinstance(value, str):
        return os.path.normpath(folder / value)
    if key == "model" and isinstance(value, str) and ((folder / value).exists() or value.startswith(".")):
        return os.path.normpath(folder / value)
    return value


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"no text file at {path}")
    if not (path.suffix in ROW_FILES or path.name.endswith((".txt", ".txt.xz"))):
        raise ValueError(f"{path} is not one of .txt, .txt.xz, .jsonl, .parquet")


def _rows(hub: str, config: str | None = None, split: str = "train", column: str = "text", **options):
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError("reading datasets needs the package datasets: pip install 'hf_twell[train]'") from None
    rows = load_dataset(hub, config, split=split, **options)
    if column not in rows.column_names:
        raise ValueError(f"{hub} has no column {column!r}; it has {', '.join(rows.column_names)}")
    for row in rows:
        yield row[column]
