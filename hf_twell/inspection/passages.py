"""Text files as windows of token ids, read piece by piece, so that memory does not grow with the files."""

import io
import lzma
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_twell.files.text import END_OF_TEXT, END_OF_TEXT_LINE, check_plain

PIECE = 1 << 16  # characters tokenized at a time


def read_pieces(
    path: str | Path, *, size: int = PIECE, on_bytes: Callable[[int], object] = lambda count: None
) -> Iterator[tuple[str, bool]]:
    """(text, whether a document ends after it) of a UTF-8 file; `.xz` is unpacked on the way.

    Documents end at lines that hold `<|endoftext|>` alone, as in `hf_twell.files.text.read_documents`. Longer ones come
    in pieces of about `size` characters, cut before a newline, else before a space, else anywhere.

    Args:
        on_bytes: called with the bytes of the file read since the last call.

    Raises:
        ValueError: the file holds no text or rows, is no UTF-8, or is a damaged `.xz`.
        OSError: the file cannot be read.
    """
    check_plain(path)
    path, rest, seen, at = Path(path), "", False, 0
    fresh = True  # at the beginning of a document
    with path.open("rb") as raw, lzma.open(raw) if path.suffix == ".xz" else raw as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig")
        while True:
            chunk = _read(text, size, path)
            on_bytes(raw.tell() - at)
            at = raw.tell()
            rest += chunk
            if chunk and len(rest) < size:
                continue
            whole, rest = _cut(rest) if chunk else (rest, "")
            *ended, last = END_OF_TEXT_LINE.split(whole)
            for part, ends in [*((part, True) for part in ended), (last, not chunk)]:
                part = part.lstrip("\n") if fresh else part
                part = part.rstrip("\n") if ends else part
                if part.strip() or not fresh:
                    seen = True
                    yield part, ends
                    fresh = ends
            if not chunk:
                break
    if not seen:
        raise ValueError(f"{path} holds no text besides {END_OF_TEXT}; give a file that does")


def windows(
    tokenizer: PreTrainedTokenizerBase, files: Iterable[str | Path], length: int, **options: Any
) -> Iterator[list[int]]:
    """Windows of at most `length` token ids that hold every token of the files, read by `read_pieces` with `options`,
    once. A document is tokenized without special tokens and cut into full windows and a last one; if the tokenizer
    itself starts a text with BOS, each window does. A ValueError of windows of BOS alone."""
    added = tokenizer("")["input_ids"]
    start = added[:1] if added and added[0] == tokenizer.bos_token_id else []
    step = length - len(start)
    if step < 1:
        raise ValueError(f"context={length} leaves no token beside the one that starts each window; give 2 or more")
    for path in files:
        ids: list[int] = []
        for text, ends in read_pieces(path, **options):
            # verbose=False: that a document is longer than the model's context is what the windows are for.
            ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
            full = len(ids) // step * step
            for at in range(0, full, step):
                yield start + ids[at : at + step]
            ids = ids[full:]
            if ends and ids:
                yield start + ids
                ids = []


def first_tokens(source: Iterable[list[int]], tokens: int | None) -> Iterator[list[int]]:
    """The windows that hold the first `tokens` tokens; all of them for None."""
    if tokens is None:
        yield from source
        return
    for window in source:
        yield window[:tokens]
        tokens -= len(window)
        if tokens <= 0:
            break


def batches(source: Iterable[list[int]], size: int) -> Iterator[list[list[int]]]:
    """Windows of similar length together, longest first, out of a few batches read ahead."""
    ahead = []
    for window in source:
        ahead.append(window)
        if len(ahead) == 8 * size:
            yield from _sorted(ahead, size)
            ahead = []
    yield from _sorted(ahead, size)


def _read(text: io.TextIOWrapper, size: int, path: Path) -> str:
    try:
        chunk = text.read(size)
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path} is named .xz but cannot be unpacked ({error}); give an intact file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}); give a text file") from error
    if "\0" in chunk:
        raise ValueError(f"{path} holds NUL bytes, so it is no text; give a text file")
    return chunk


def _cut(text: str) -> tuple[str, str]:
    before_newline = len(text[: max(0, text.rfind("\n"))].rstrip("\n"))
    at = next(at for at in (before_newline, text.rfind(" "), len(text)) if at > 0)
    return text[:at], text[at:]


def _sorted(ahead, size):
    ahead.sort(key=len, reverse=True)
    return (ahead[at : at + size] for at in range(0, len(ahead), size))
