"""Model folders that are whole or absent: written aside, and renamed."""

import errno
import fcntl
import glob
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from hf_twell.files.checkpoints import STATE_NAME, write_json

if TYPE_CHECKING:  # commands that only look at folders do not wait for them
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MEASURED_NAME = "twell_measured.json"

# What `save_pretrained` and this package write into a model's folder; --overwrite replaces a folder of these alone.
TOKENIZER_FILES = (
    "tokenizer*.json", "tokenizer.model*", "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken",
    "tekken.json", "*_tokens*.json",
)  # fmt: skip
MODEL_FILES = (
    "config.json", "generation_config.json", "modeling_twell.py", "*processor_config.json", STATE_NAME, MEASURED_NAME,
)  # fmt: skip
WEIGHT_FILES = (
    "model*.safetensors", "model*.safetensors.index.json", "shard-*-model-*.safetensors", "adapter_model.safetensors",
    "pytorch_model*.bin", "pytorch_model*.bin.index.json",
)  # fmt: skip
TRAINER_FILES = ("training_args.bin", ".gitattributes")  # of Trainer.save_model, of the Hub
KNOWN_FILES = (*MODEL_FILES, *WEIGHT_FILES, *TRAINER_FILES, *TOKENIZER_FILES, "chat_template.*")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "README.md")
CHAT_TEMPLATES = "additional_chat_templates"


def check_target(path: str | Path, *, overwrite: bool = False, inputs: Iterable[str | Path | None] = ()) -> Path:
    """The real path of a folder that may be written; call it before long work, whose result needs a place.

    Args:
        inputs: what the work reads, where that lies on this machine; other names and None are passed over.

    Raises:
        ValueError: `path` exists and `overwrite` is false, it is no model folder, holds other things too, is the place
            of another file system or holds an input; or its parent is not a folder, or not one that can be written to.
    """
    path = Path(path).resolve()
    if _is_mount_point(path):
        raise ValueError(
            f"{path} is a mount point, which a whole folder cannot take the place of; name a folder in it, such as "
            f"{path / 'model'}"
        )
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder; create it, or choose another place to save to")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path.parent} cannot be written to; choose another place to save to")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists; choose another name, or allow it to be overwritten (--overwrite)")
    for item in inputs:
        if path.exists() and item and Path(item).exists() and Path(item).resolve().is_relative_to(path):
            what = "the model itself" if Path(item).resolve() == path else f"where {item} lies"
            raise ValueError(f"{path} is {what}, which would be lost; choose another output")
    if path.exists() and not _may_be_replaced(path):
        raise ValueError(f"{path} is no model folder (or holds the working directory); only those are overwritten")
    if path.exists() and (others := _others(path)):
        named = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise ValueError(f"{path} holds more than a model, and would lose {named}; move that, or choose another name")
    return path


@contextmanager
def whole_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its name if the body ends well, and is removed if it does not. A
    ValueError as of `check_target`; after the body it names the folder in which its result is kept."""
    path = check_target(path, overwrite=overwrite)
    clear_dead_savings(path)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    old = aside.with_suffix(".old")
    aside.mkdir()
    with ExitStack() as locks:
        try:
            _lock(aside, locks)
            yield aside
            try:
                check_target(path, overwrite=overwrite)  # something may have come to be there since
            except ValueError as error:
                raise _kept(aside, path, error) from error
            try:
                if overwrite and path.exists():
                    _lock(path, locks)
                    path.rename(old)
                aside.rename(path)
            except OSError as error:
                made = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
                why = f"{path} was made by others meanwhile" if made else f"{path} cannot be replaced: {error.strerror}"
                raise _kept(aside, path, why) from error
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            if old.exists() and not path.exists():
                old.rename(path)
            raise
        if old.exists():
            shutil.rmtree(old)


def clear_dead_savings(path: str | Path) -> None:
    """Remove what killed processes left of `whole_folder(path)`; the model that one was about to replace comes back.

    Folders of living processes are locked. Where the file system has no locks, and where a folder is empty (its process
    may be about to lock it), it is left alone.
    """
    path = Path(path).resolve()
    for kind in ("old", "partial"):
        for rest in path.parent.glob(f".{glob.escape(path.name)}.{8 * '[0-9a-f]'}.{kind}"):
            with ExitStack() as locks, suppress(OSError):
                _lock(rest, locks, wait=False)
                if kind == "old" and not path.exists():
                    rest.rename(path)
                elif any(rest.iterdir()):
                    shutil.rmtree(rest)


def _lock(folder: Path, locks: ExitStack, *, wait: bool = True) -> None:
    """Lock a folder, which keeps the lock under another name too, until `locks` is closed or the process ends. Without
    `wait`, an OSError where another process has the lock, or the file system has none."""
    descriptor = os.open(folder, os.O_RDONLY)
    locks.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        if not wait:
            raise


def save_model(
    model: "PreTrainedModel",
    path: str | Path,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    *,
    overwrite: bool = False,
    state_dict: "dict[str, torch.Tensor] | None" = None,
    method: dict | None = None,
    measured: dict | None = None,
    **options: Any,
) -> None:
    """`model.save_pretrained` and the tokenizer's, into a folder that is whole or absent.

    `state_dict` holds the weights of a model that is sharded over processes, gathered by all of them; `method` is what
    `hf_twell.train.resuming.method_of` says of the model's training, and `measured` the figures that
    `hf_twell.recipe.finetune.finetune` returns ("dense", "before", "after"; "heldout": names of the text), for its
    card; `options` are further ones of `save_pretrained`.

    Raises:
        ValueError: as `whole_folder`, or what the model cannot be saved for, in one line.
        OSError: the disk is full.
    """
    from hf_twell.files.configs import one_line_errors  # imports torch, which the command line's start does without

    if state_dict is not None:  # its copies of tied weights share no memory, by which Transformers would know them
        tied = getattr(model, "all_tied_weights_keys", {})
        state_dict = {name: weights for name, weights in state_dict.items() if name not in tied}
    with whole_folder(path, overwrite=overwrite) as folder:
        with one_line_errors(f"could not write {path}"), full_disks_as_os_errors(path):
            model.save_pretrained(folder, state_dict=state_dict, **options)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if method is not None:
            write_json(folder / STATE_NAME, method)
        if measured is not None:
            write_json(folder / MEASURED_NAME, measured)


def training_record(path: str | Path) -> dict[str, dict | None]:
    """What a model's folder says of its training: "method" and "measured", as `save_model` takes them; None: nothing. A
    ValueError where one of its files holds no JSON object."""
    record = {}
    for key, name in (("method", STATE_NAME), ("measured", MEASURED_NAME)):
        file = Path(path, name)
        try:
            record[key] = json.loads(file.read_text()) if file.is_file() else None
        except ValueError as error:
            raise ValueError(f"{file} is no JSON ({error}); copy it again, or remove it") from error
        if not isinstance(record[key], dict | None):
            raise ValueError(f"{file} holds no JSON object; copy it again, or remove it")
    if record["method"]:
        record["method"].pop("files", None)  # the sizes of a checkpoint's own files
    return record


def has_chat_template(path: str | Path) -> bool:
    """Whether the tokenizer in a model's folder has a chat template: in a file of its own, or in its config."""
    if any(Path(path).glob("chat_template.*")) or any(Path(path, CHAT_TEMPLATES).glob("*.jinja")):
        return True
    file = Path(path, "tokenizer_config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{file} is no JSON ({error}); copy it again") from error
    return isinstance(config, dict) and bool(config.get("chat_template"))


@contextmanager
def full_disks_as_os_errors(path: str | Path) -> Iterator[None]:
    """An OSError of one line for what safetensors and `torch.save` raise where they cannot write."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        if not any(sign in reason for sign in ("Error while serializing", "PytorchStreamWriter", "unexpected pos")):
            raise
        raise OSError(f"could not write {path}; is the disk full? ({reason})") from error


def _kept(aside: Path, path: Path, why: object) -> ValueError:
    """Work that is done outlasts its name's being taken."""
    kept = aside.rename(path.with_name(f"{path.name}-{secrets.token_hex(2)}"))
    return ValueError(f"{why}. What was to lie there is in {kept}")


def _is_mount_point(path: Path) -> bool:
    """Also of a part of the same file system, which `os.path.ismount` does not know."""
    mounts = Path("/proc/self/mountinfo")  # of Linux
    if not mounts.is_file():
        return path.is_mount()
    name = re.sub(rb"[ \t\n\\]", lambda found: b"\\%03o" % ord(found[0]), os.fsencode(path))  # as it is written there
    return any(line.split(b" ")[4] == name for line in mounts.read_bytes().splitlines())


def _may_be_replaced(path: Path) -> bool:
    if not path.is_dir() or Path.cwd().is_relative_to(path):
        return False
    config = any((path / name).is_file() for name in ("config.json", "adapter_config.json"))
    weights = any(next(path.glob(pattern), None) for pattern in WEIGHT_FILES)
    return (config and weights) or not any(path.iterdir())


def _others(path: Path) -> list[str]:
    """What a model's folder holds besides the model, its tokenizer and its adapters."""
    known: tuple[str, ...] = ("*.jinja",) if path.name == CHAT_TEMPLATES else KNOWN_FILES
    known += ADAPTER_FILES if (path / "adapter_config.json").is_file() else ()
    others = []
    for item in sorted(path.iterdir()):
        if item.is_dir() and (item.name == CHAT_TEMPLATES or (item / "adapter_config.json").is_file()):
            others += [f"{item.name}/{name}" for name in _others(item)]
        elif item.is_dir() or not any(fnmatch(item.name, pattern) for pattern in known):
            others.append(item.name)
    return others
