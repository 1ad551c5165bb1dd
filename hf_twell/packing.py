"""Text as training sequences of one length: from files, Hub datasets, and streams read as they go."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm.auto import tqdm

from hf_twell.config_files import one_line_errors
from hf_twell.text import read_documents

ROW_FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
KINDS = (".txt", ".txt.xz", *ROW_FILES)


def documents_of(source: list | dict | str) -> Iterator[str]:
    """The documents of text files or of a Hub dataset.

    A .txt file's documents end with a line `<|endoftext|>`; .jsonl and .parquet rows, and those of a Hub dataset
    ({"hub": name, "config": ..., "split": "train", "column": "text", "skip": rows left out at the start, "take": rows
    read at most, and any option of `datasets.load_dataset`, such as "streaming": true), are one document each.

    Raises:
        ValueError: a missing file, an unknown kind of file, or a file that is not text.
    """
    if isinstance(source, dict):
        yield from _rows(**source)
        return
    for name in [source] if isinstance(source, str) else source:
        path = Path(name)
        check_file(path)
        if path.suffix in ROW_FILES:
            yield from _rows(ROW_FILES[path.suffix], data_files=str(path.absolute()))
        else:
            yield from read_documents(path)


def token_ids(tokenizer, source: list | dict | str, *, description: str = "tokenizing") -> list[int]:
    """The token ids of all documents, each ended by the end-of-sequence token."""
    documents = tqdm(documents_of(source), desc=description, unit=" documents")
    return [token for document in documents for token in _document_ids(tokenizer, document)]


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

    @classmethod
    def of(cls, sequences: torch.Tensor) -> "PackedText":
        """The same from token ids that are cut already, (sequences, tokens) int64."""
        packed = cls.__new__(cls)
        packed.sequences = sequences
        return packed

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.sequences[index], "labels": self.sequences[index]}


class StreamedText(torch.utils.data.IterableDataset):
    """The same sequences as `PackedText`, from documents that are read and tokenized when they are asked for.

    A resumed run reads on from the start and leaves out what was trained on. Under several processes, the first one
    reads and hands each its part.
    """

    def __init__(self, tokenizer, source: dict, sequence_length: int):
        self.tokenizer, self.source, self.sequence_length = tokenizer, source, sequence_length

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        ids = []
        for document in documents_of(self.source):
            ids += _document_ids(self.tokenizer, document)
            while len(ids) >= self.sequence_length:
                sequence, ids = torch.tensor(ids[: self.sequence_length]), ids[self.sequence_length :]
                yield {"input_ids": sequence, "labels": sequence}


def is_streamed(source: list | dict | str) -> bool:
    """Whether the source is a Hub dataset that is read as training goes on."""
    return isinstance(source, dict) and bool(source.get("streaming"))


def check_length(model, sequence_length: int) -> None:
    """Refuse sequences with positions that the model has never seen.

    Raises:
        ValueError: naming its own length.
    """
    own = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if own and sequence_length > own:
        raise ValueError(
            f"sequence_length: {sequence_length} is more than the {own} positions of the model; give at most that (or "
            "more max_position_embeddings in its config.json)"
        )


def check_file(path: Path) -> None:
    """Refuse what is not a text file that can be read.

    Raises:
        ValueError: a missing file, or an unknown kind of file.
    """
    if not path.is_file():
        raise ValueError(f"no text file at {path}; give the path of one ({', '.join(KINDS)})")
    if not path.name.endswith(KINDS):
        raise ValueError(f"{path} is not one of {', '.join(KINDS)}; write its text into such a file")


def _document_ids(tokenizer, document: str) -> list[int]:
    ids = tokenizer(document, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    return [*ids, end] if end is not None and (not ids or ids[-1] != end) else ids


def _rows(
    hub: str, config: str | None = None, split: str = "train", column: str = "text", skip=0, take=None, **options
):
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError("reading datasets needs the package datasets: pip install 'hf_twell[train]'") from None
    name = options.get("data_files", hub)
    with one_line_errors(f"{name} cannot be read as rows"):
        rows = load_dataset(hub, config, split=split, **options)
    # A stream may learn its columns from its first row only.
    for row in itertools.islice(rows, skip, None if take is None else skip + take):
        if column not in row:
            raise ValueError(f"{name} has no column {column!r}; it has {', '.join(row)}")
        if not isinstance(row[column], str):
            raise ValueError(
                f"{name}: column {column!r} holds {row[column]!r:.40}, which is no text; leave such rows out"
            )
        yield row[column]
