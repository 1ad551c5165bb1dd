"""Where a recipe's text comes from, told without reading it."""

from pathlib import Path

ROW_FILES = (".jsonl", ".json", ".parquet")
KINDS = (".txt", ".txt.xz", *ROW_FILES)


def is_streamed(source: list | dict | str) -> bool:
    """Whether the source is a Hub dataset that is read as training goes on."""
    return isinstance(source, dict) and bool(source.get("streaming"))


def check_file(path: Path) -> None:
    """Refuse what is not a text file that can be read.

    Raises:
        ValueError: a missing file, or an unknown kind of file.
    """
    if not path.is_file():
        raise ValueError(f"no text file at {path}; give the path of one ({', '.join(KINDS)})")
    if not path.name.endswith(KINDS):
        raise ValueError(f"{path} is not one of {', '.join(KINDS)}; write its text into such a file")
