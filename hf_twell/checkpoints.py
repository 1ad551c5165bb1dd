"""Folders that are whole or absent: models saved aside and renamed, training checkpoints that say they are complete."""

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

STATE_NAME = "twell_state.json"


def check_target(path: str | Path, *, overwrite: bool = False) -> Path:
    """The real path of a folder that may be written; call it before long work, whose result needs a place.

    Raises:
        ValueError: `path` exists and `overwrite` is false or it is no model folder, or its parent is not a folder.
    """
    path = Path(path).resolve()
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder; create it, or choose another place to save to")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists; choose another name, or allow it to be overwritten (--overwrite)")
    if path.exists() and not _may_be_replaced(path):
        raise ValueError(f"{path} is no model folder (or holds the working directory); only those are overwritten")
    return path


@contextmanager
def whole_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its name if the body ends well, and is removed if it does not.

    Raises:
        ValueError: `path` exists and `overwrite` is false, or its parent is not a folder.
    """
    path = check_target(path, overwrite=overwrite)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    old = aside.with_suffix(".old")
    aside.mkdir()
    try:
        yield aside
        if path.exists():
            path.rename(old)
        aside.rename(path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    if old.is_dir():
        shutil.rmtree(old)
    else:
        old.unlink(missing_ok=True)


def save_model(
    model,
    path: str | Path,
    tokenizer=None,
    *,
    overwrite: bool = False,
    state_dict=None,
    method: dict | None = None,
    **options,
) -> None:
    """`model.save_pretrained` and the tokenizer's, into a folder that is whole or absent.

    `state_dict` holds the weights of a model that is sharded over processes, gathered by all of them; `method` is what
    `hf_twell.resuming.method_of` says of the model's training, for its card; `options` are further ones of
    `save_pretrained`.
    """
    from hf_twell.config_files import one_line_errors  # imports torch, which the command line's start does without

    if state_dict is not None:  # its copies of tied weights share no memory, by which Transformers would know them
        tied = getattr(model, "all_tied_weights_keys", {})
        state_dict = {name: weights for name, weights in state_dict.items() if name not in tied}
    with whole_folder(path, overwrite=overwrite) as folder:
        with one_line_errors(f"could not write {path}"):
            try:
                model.save_pretrained(folder, state_dict=state_dict, **options)
            except SafetensorError as error:
                # It is what a full disk raises here, and it is no OSError.
                raise OSError(f"could not write {path}: {error}") from error
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if method is not None:
            write_json(folder / STATE_NAME, method)


def write_json(path: Path, data: dict) -> None:
    """Write a JSON file that other processes see whole or not at all."""
    aside = path.with_name(f".{path.name}.partial")
    with open(aside, "w") as file:
        try:
            json.dump(data, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            aside.unlink()
            raise
    aside.rename(path)


def read_state(checkpoint: str | Path) -> dict:
    """The state that `SparsityCallback` (or a recipe without it) wrote last into a Trainer checkpoint.

    Raises:
        ValueError: the folder has none, so its saving was interrupted, or it is from another kind of training.
    """
    path = Path(checkpoint) / STATE_NAME
    if not path.is_file():
        raise ValueError(
            f"{checkpoint} has no {STATE_NAME}: its saving was interrupted, or it was trained without "
            "SparsityCallback. Resume from another checkpoint, or start a new run from its weights."
        )
    return json.loads(path.read_text())


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest complete checkpoint of a run, or None; torn ones are passed over."""
    found = {}
    if Path(output_dir).is_dir():
        for folder in Path(output_dir).iterdir():
            step = re.fullmatch(r"checkpoint-(\d+)", folder.name)
            if step and (folder / STATE_NAME).is_file():
                found[int(step[1])] = str(folder)
    return found[max(found)] if found else None


def _may_be_replaced(path: Path) -> bool:
    if not path.is_dir() or Path.cwd().is_relative_to(path):
        return False
    names = ("config.json", "adapter_config.json")
    return any((path / name).is_file() for name in names) or not any(path.iterdir())
