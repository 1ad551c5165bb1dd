"""Files of rows, read by their own names, and where in them a row stands.

Libraries that take patterns in place of names would read `books1.jsonl` for `books[1].jsonl`.
"""

import codecs
import json
import lzma
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple

from hf_twell.files.configs import one_line
from hf_twell.files.packages import how_to_install

_KINDS = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}


class Row(NamedTuple):
    """One row of a file or a dataset, and its place: "FILE, line 3" or "FILE, row 3"."""

    place: str
    values: dict


def read_rows(path: str | Path) -> Iterator[Row]:
    """The rows of a file: JSON lines (also packed, .jsonl.xz), one JSON list, or Parquet (.parquet), of which only the
    columns "text" and "messages" are read, where it has one of them. A ValueError names the file, the row and what is
    wrong: it cannot be read, or the file holds none."""
    path = Path(path)
    count = 0
    for row in _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path):
        count += 1
        yield row
    if not count:
        raise ValueError(f"{path} holds no rows; give a file that does")


def kind_of(value: object) -> str:
    """What a value of a row is, in JSON's words."""
    return "null" if value is None else _KINDS.get(type(value), f"a {type(value).__name__}")


def _json_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as raw, lzma.open(raw) if path.suffix == ".xz" else raw as file:
        try:
            if _is_list(file.peek(64)):
                yield from _listed_rows(path, file)
            else:
                yield from _lines(path, file)
        except (lzma.LZMAError, EOFError) as error:
            raise ValueError(f"{path} is named .xz but cannot be unpacked ({error}); give an intact file") from error


def _is_list(begin: bytes) -> bool:
    return begin.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _listed_rows(path: Path, file: BufferedIOBase) -> Iterator[Row]:
    for number, values in enumerate(_parsed(file.read(), str(path)), start=1):
        yield _row(f"{path}, row {number}", values)


def _lines(path: Path, file: BufferedIOBase) -> Iterator[Row]:
    for number, line in enumerate(file, start=1):  # bytes: a text would also be cut at U+2028
        if line.strip():
            place = f"{path}, line {number}"
            yield _row(place, _parsed(line, place, "" if line.endswith(b"\n") else "; the file ends here, cut off"))


def _parsed(raw: bytes, place: str, unended: str = "") -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is not UTF-8 ({_encoding(error)}); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        if "\0" in error.doc:
            raise ValueError(f"{place} holds NUL bytes, as UTF-16 does; save the file as UTF-8") from error
        at = f"line {error.lineno}, character {error.colno}" if error.lineno > 1 else f"character {error.colno}"
        raise ValueError(f"{place} is no JSON ({error.msg}: {at}{unended}); mend it, or leave it out") from error
    except (ValueError, RecursionError) as error:  # numbers of too many digits, and lists of lists without end
        raise ValueError(f"{place} is no JSON that can be read ({one_line(error)}); leave it out") from error


def _encoding(error: UnicodeDecodeError) -> str:
    if error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "it begins as UTF-16 does"
    return f"byte {error.start + 1} of it is 0x{error.object[error.start]:02x}"


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import datasets
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"reading {path} needs the package datasets: {how_to_install('datasets')}") from None
    number = 0
    with path.open("rb") as file:
        try:
            parquet = pyarrow.parquet.ParquetFile(file)
            columns = [name for name in ("text", "messages") if name in parquet.schema_arrow.names] or None
            for batch in parquet.iter_batches(1024, columns=columns):
                table = pyarrow.Table.from_batches([batch])
                # Not batch.to_pylist(): what `datasets` wrote may hold columns that only it decodes, such as JSON.
                for values in datasets.Dataset(table, fingerprint="rows"):
                    number += 1
                    yield Row(f"{path}, row {number}", values)
        except Exception as error:  # whatever Arrow makes of a damaged file
            where = f", row {number + 1} and after it," if number else ""
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise ValueError(f"{path}{where} cannot be read as Parquet ({reason}); fetch the file again") from error


def _row(place: str, values: object) -> Row:
    if not isinstance(values, dict):
        raise ValueError(f"{place} is {kind_of(values)}, and must be an object, such as " + '{"text": ...}')
    return Row(place, values)
