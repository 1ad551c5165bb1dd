"""Text files as documents: UTF-8, packed by xz or not, documents ended by lines of `<|endoftext|>`."""

import lzma
import re
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
ROW_FILES = (".jsonl", ".json", ".parquet")
KINDS = (".txt", ".txt.xz", *ROW_FILES)
_ROWS = re.compile(r"\.(jsonl?|parquet)(\.xz)?$")
END_OF_TEXT_LINE = re.compile(rf"^{re.escape(END_OF_TEXT)}[ \t]*(?:\n|\Z)", re.MULTILINE)


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, its lines ended by newlines alone as `open` gives them; `.xz` is unpacked. A ValueError
    where it is empty, no UTF-8 text, or a damaged `.xz`."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no text file at {path}; give the path of one (.txt, .xz)")
    raw = path.read_bytes()
    try:
        text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode("utf-8-sig")
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path} is named .xz but cannot be unpacked ({error}); give an intact file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); give a text file") from error
    if "\0" in text:
        raise ValueError(f"{path} holds NUL bytes, so it is no text; give a text file")
    if not text.strip():
        raise ValueError(f"{path} holds no text; give a file that does")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_file(path: Path) -> None:
    """Refuse, by a ValueError, what is not a file of text or rows that can be read."""
    if not path.is_file():
        raise ValueError(f"no text file at {path}; give the path of one ({', '.join(KINDS)})")
    if not path.name.endswith(KINDS):
        raise ValueError(f"{path} is not one of {', '.join(KINDS)}; write its text into such a file")


def check_plain(path: str | Path) -> None:
    """Refuse, by a ValueError, files of rows by their names: their braces and keys would be read as text."""
    if _ROWS.search(Path(path).name):
        raise ValueError(f"{path} holds rows, and only plain text is read here; write their text to a .txt file")


def read_documents(path: str | Path) -> list[str]:
    """The documents of a text file (see `read_text`), split at lines that hold `<|endoftext|>` alone.

    Newlines around a document and blank documents are dropped; a file without such lines is one document.
    """
    check_plain(path)
    documents = [document.strip("\n") for document in END_OF_TEXT_LINE.split(read_text(path))]
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise ValueError(f"{path} holds no text besides {END_OF_TEXT}; give a file that does")
    return documents
