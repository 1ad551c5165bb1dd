"""What the commands share: tables for people, JSON for machines, models from a folder or the Hub."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def stdout_for_result() -> Iterator[None]:
    """Send everything that libraries print inside to stderr, so that stdout carries the result alone."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def check_output(option: str, path: str | None, inputs: Sequence[str] = ()) -> None:
    """Refuse, before long work, a file that could not be written after it.

    Raises:
        ValueError: `path` is a folder, lies in none, or is one of the files to read.
    """
    if path and Path(path).is_dir():
        raise ValueError(f"{option} {path} is a folder; name a file")
    if path and not Path(path).absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: its folder does not exist; create it first")
    if path and Path(path).exists() and any(Path(file).exists() and Path(path).samefile(file) for file in inputs):
        raise ValueError(f"{option} {path} is the text itself, which would be lost; name another file")


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Name the file that a full disk does not take: the system's own message does not.

    Raises:
        OSError: in one line.
    """
    try:
        yield
    except OSError as error:
        raise OSError(f"could not write {path}: {error.strerror or error}") from error


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of text; columns of figures are right-aligned."""
    cells = [[_cell(value) for value in row] for row in [headers, *rows]]
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [any(cell[:1].isdigit() for cell in column[1:]) for column in columns]

    def line(row):
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * width for width in widths), *map(line, cells[1:])])


def print_json(result: dict) -> None:
    print(json.dumps(result, indent=2))


def sparsity_table(sparsity: dict) -> str:
    """The result of `hf_twell.measure_sparsity`, a line a layer and their mean."""
    rows = [
        [layer["name"], layer["intermediate_size"], layer["l0"], percent(layer["density"]), percent(layer["dead"])]
        for layer in sparsity["layers"]
    ]
    rows.append(["mean", "", sparsity["l0"], percent(sparsity["density"]), percent(sparsity["dead"])])
    return table(["feed-forward block", "neurons", "active per token (L0)", "density", "dead"], rows)


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
