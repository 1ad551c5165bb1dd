"""What the commands share: tables for people, JSON for machines, and the files that both are written to."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from hf_twell.files.folders import ADAPTER_FILES, KNOWN_FILES
from hf_twell.files.tables import UNIONS, percent, text_table, unions_cell

DTYPES = ("auto", "bfloat16", "float16", "float32")  # of --dtype, how a model is loaded


@contextlib.contextmanager
def stdout_for_result() -> Iterator[None]:
    """Send everything that libraries print inside to stderr, so that stdout carries the result alone."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def check_output(option: str, path: str | None, inputs: Sequence[str | None] = ()) -> None:
    """Refuse, before long work, a file that could not be written after it, or would be in the place of what is read.

    Args:
        inputs: files and folders that are read; other names and None are passed over. A file that is in such a folder
            may be a result of before if its name ends in .json or .html, and it is no file of a model's.

    Raises:
        ValueError: `path` is a folder, lies in none, may not be written, or is an input.
    """
    if not path:
        return
    if Path(path).is_dir():
        raise ValueError(f"{option} {path} is a folder; name a file")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: its folder does not exist; create it first")
    if not os.access(path if Path(path).exists() else Path(path).absolute().parent, os.W_OK):
        raise ValueError(f"{option} {path} cannot be written to; name another file")
    for item in filter(None, inputs):
        if Path(path).exists() and Path(item).exists() and _is_read(Path(path), Path(item)):
            raise ValueError(f"{option} {path} is read itself, and would be lost; name another file")


def _is_read(path: Path, item: Path) -> bool:
    if not item.is_dir():
        return path.samefile(item)
    if not path.resolve().is_relative_to(item.resolve()):
        return False
    return path.suffix in (".jsonl", ".xz", ".gguf", ".safetensors") or any(
        fnmatch(path.name, pattern) for pattern in (*KNOWN_FILES, *ADAPTER_FILES)
    )


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Name the file that a full disk does not take, in an OSError of one line: the system's own message does not."""
    try:
        yield
    except OSError as error:
        raise OSError(f"could not write {path}: {error.strerror or error}") from error


def print_json(result: dict) -> None:
    print(json.dumps(result, indent=2))


def write_json(result: dict, path: str | Path) -> None:
    """The JSON in a file; an OSError of one line where a full disk does not take it, a ValueError of NaN and infinite
    figures."""
    with writing(path):
        Path(path).write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def sparsity_table(sparsity: dict) -> str:
    """The result of `hf_twell.measure_sparsity`, a line a layer and their mean."""
    mean = {**sparsity, "name": "mean", "intermediate_size": ""}
    rows = [
        [
            *(row["name"], row["intermediate_size"], row["l0"]),
            *(percent(row["density"]), unions_cell(row.get("unions")), percent(row["dead"])),
        ]
        for row in (*sparsity["layers"], mean)
    ]
    return text_table(["feed-forward block", "neurons", "active per token (L0)", "density", UNIONS, "dead"], rows)


def _lacks(words: str, record: logging.LogRecord) -> bool:
    return words not in record.getMessage()


def quiet_others() -> None:
    """Leave out what DeepSpeed and torchao, where installed, warn every program of, which asks nothing of them."""
    for name, words in (
        ("DeepSpeed", "Setting accelerator to"),
        ("torchao", "Failed to load"),
        ("torch.utils._pytree", "Enum subclass"),
    ):
        logging.getLogger(name).addFilter(partial(_lacks, words))
