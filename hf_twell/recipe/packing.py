"""Text as training sequences of one length: from files, Hub datasets, and streams read as they go."""

import glob
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_twell.files.configs import one_line
from hf_twell.files.packages import how_to_install
from hf_twell.files.rows import Row, read_rows
from hf_twell.files.text import ROW_FILES, check_file, read_documents
from hf_twell.recipe.chat import chat_fault, chat_tokens, text_fault
from hf_twell.train.divergence import IGNORED


class Document(NamedTuple):
    """A text, or a conversation as a list of messages; and where it stands, for errors."""

    content: str | list[dict]
    place: str


def documents_of(source: list | dict | str) -> Iterator[Document]:
    """The documents of text files or of a Hub dataset.

    A .txt file's documents end with a line `<|endoftext|>`; .jsonl and .parquet rows, and those of a Hub dataset
    ({"hub": name, "config": ..., "split": "train", "column": "text", "skip": rows left out at the start, "take": rows
    read at most, and any option of `datasets.load_dataset`, such as "streaming": true), are one document each. Rows
    without a column "text" that have "messages" are conversations.

    Raises:
        ValueError: a missing file, an unknown kind of file, a file that is not text, or, by its place, a row that is
            none or holds no document.
    """
    if isinstance(source, dict):
        source = dict(source)
        column = source.pop("column", None)
        yield from (_document(row, column, "name one beside hub: column") for row in _hub_rows(**source))
        return
    for name in [source] if isinstance(source, str) else source:
        path = Path(name)
        check_file(path)
        if path.suffix in ROW_FILES:
            yield from (_document(row) for row in read_rows(path))
        else:
            yield from (Document(text, str(path)) for text in read_documents(path))


def token_ids(
    tokenizer: PreTrainedTokenizerBase, source: list | dict | str, *, description: str = "tokenizing"
) -> list[int]:
    """The token ids of all documents, each ended by the end-of-sequence token, or as the chat template ends it."""
    return _tokens_and_labels(tokenizer, source, False, description)[0]


def _tokens_and_labels(tokenizer, source, assistant_only, description) -> tuple[list[int], list[int]]:
    ids: list[int] = []
    labels = [] if assistant_only else ids  # else a large text would be in memory twice
    documents = tqdm(documents_of(source), desc=description, unit=" documents")
    for batch in _batches(documents):
        for more, their_labels in _batch_tokens(tokenizer, batch, assistant_only):
            ids += more
            if assistant_only:
                labels += their_labels
    return ids, labels


class PackedText(torch.utils.data.Dataset):
    """Documents as token ids, each ended by the end-of-sequence token, cut into sequences of one length.

    With `assistant_only` the documents are conversations, and the labels of all but the assistant's tokens are -100.

    Raises:
        ValueError: less text than one sequence, or with `assistant_only` no conversations.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source: list | dict | str,
        sequence_length: int,
        *,
        assistant_only: bool = False,
        description: str = "tokenizing",
    ) -> None:
        ids, labels = _tokens_and_labels(tokenizer, source, assistant_only, description)
        count = len(ids) // sequence_length
        if not count:
            raise ValueError(f"{source} has {len(ids)} tokens, less than one sequence of {sequence_length}")
        self.sequences = self.labels = torch.tensor(ids[: count * sequence_length]).view(count, sequence_length)
        if assistant_only:
            labels = torch.tensor(labels[: count * sequence_length]).view(count, sequence_length)
            taught = [_has_labels(row) for row in labels]
            self.sequences, self.labels = self.sequences[taught], labels[taught]
        if not len(self.sequences):
            raise ValueError(f"{source} has no sequence of {sequence_length} tokens in which the assistant speaks")

    @classmethod
    def of(cls, sequences: torch.Tensor) -> "PackedText":
        """The same from token ids that are cut already, (sequences, tokens) int64."""
        packed = cls.__new__(cls)
        packed.sequences = packed.labels = sequences
        return packed

    def in_whole_steps(self, size: int) -> "PackedText":
        """Without the last sequences that do not fill a step of so many; itself where there is no whole one."""
        whole = PackedText.of(self.sequences[: len(self) // size * size])
        whole.labels = self.labels[: len(whole)]
        return whole if len(whole) else self

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.sequences[index], "labels": self.labels[index]}


class StreamedText(torch.utils.data.IterableDataset):
    """The same sequences as `PackedText`, from documents that are read and tokenized when they are asked for.

    A resumed run reads on from the start and leaves out what was trained on. Under several processes, the first one
    reads and hands each its part.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, source: dict, sequence_length: int, *, assistant_only: bool = False
    ) -> None:
        self.tokenizer, self.source, self.sequence_length = tokenizer, source, sequence_length
        self.assistant_only = assistant_only

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        ids: list[int] = []
        labels: list[int] = []
        length = self.sequence_length
        for document in documents_of(self.source):
            ((more, their_labels),) = _batch_tokens(self.tokenizer, [document], self.assistant_only)
            ids, labels = ids + more, labels + their_labels
            end = len(ids) - len(ids) % length
            for start in range(0, end, length):  # the rest is copied once, as a document may be a whole book
                part = slice(start, start + length)
                sequence = {"input_ids": torch.tensor(ids[part]), "labels": torch.tensor(labels[part])}
                if _has_labels(sequence["labels"]):
                    yield sequence
            ids, labels = ids[end:], labels[end:]


def check_length(model: PreTrainedModel, sequence_length: int) -> None:
    """Refuse, by a ValueError, sequences with positions that the model has never seen."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most and sequence_length > most:
        raise ValueError(
            f"sequence_length: {sequence_length} is more than the {most} positions of the model; give at most that (or "
            "more max_position_embeddings in its config.json)"
        )


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents that are tokenized together: not too many, as an encoding takes many times the room of its ids."""
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document.content) if isinstance(document.content, str) else 0
        if len(batch) == 256 or characters > 1 << 20:
            yield batch
            batch, characters = [], 0
    yield batch


def _batch_tokens(tokenizer, documents: list[Document], assistant_only: bool) -> Iterator[tuple[list[int], list[int]]]:
    """Token ids and labels of each. A fast tokenizer spreads texts that it gets together over all cores."""
    texts = [document for document in documents if isinstance(document.content, str)]
    if texts and assistant_only:
        raise ValueError(
            f"{texts[0].place}: assistant_only_loss needs rows of messages, and this is text; leave it out, or give "
            "such rows"
        )
    encoded = iter(tokenizer([text.content for text in texts], verbose=False)["input_ids"] if texts else ())
    end = tokenizer.eos_token_id
    for document in documents:
        if not isinstance(document.content, str):
            try:
                tokens = chat_tokens(tokenizer, document.content, assistant_only=assistant_only)
            except ValueError as error:
                raise ValueError(f"{document.place}: {error}") from error
            yield tokens
            continue
        ids = next(encoded)
        if end is not None and (not ids or ids[-1] != end):
            ids = [*ids, end]
        yield ids, ids


def _has_labels(labels: torch.Tensor) -> bool:
    """Whether a sequence has a token to predict; the mean loss over none is NaN."""
    return bool((labels[1:] != IGNORED).any())


def _document(row: Row, column: str | None = None, advice: str = "rename one") -> Document:
    """The document in a row's `column`, or in its text, or in its messages."""
    chosen = column or ("messages" if "messages" in row.values and "text" not in row.values else "text")
    if chosen not in row.values:
        wanted = f"no column {column!r}" if column else "neither a column 'text' nor 'messages'"
        raise ValueError(f"{row.place} has {wanted}; it has {', '.join(row.values) or 'none'}; {advice}")
    value = row.values[chosen]
    is_chat = isinstance(value, list) or (chosen == "messages" and not column)  # which may be JSON in a text
    if fault := chat_fault(value) if is_chat else text_fault(value):
        raise ValueError(f"{row.place}: {chosen}{fault}; leave such rows out")
    return Document(value, row.place)


def _hub_rows(hub: str, config: str | None = None, split: str = "train", skip=0, take=None, **options) -> Iterator[Row]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f"reading datasets needs the package datasets: {how_to_install('datasets')}") from None
    for folder in (hub, options.get("data_dir")):
        _check_no_pattern(folder)
    inside = options.get("data_dir")
    if isinstance(inside, str) and Path(hub).is_dir():
        _check_no_pattern(str(Path(hub, inside)))
    files = options.get("data_files")
    if isinstance(files, str) and Path(files).is_file() and (glob.has_magic(files) or "::" in files):
        raise ValueError(f"data_files: {files} is a pattern for datasets; name the file itself in place of hub: {hub}")
    name, number = options.get("data_files", hub), skip
    try:
        rows = load_dataset(hub, config, split=split, **options)
        # A stream may learn its columns from its first row only.
        for number, row in enumerate(itertools.islice(rows, skip, None if take is None else skip + take), skip + 1):
            yield Row(f"{name}, row {number}", row)
    except (OSError, ImportError):
        raise
    except Exception as error:
        cause = error.__cause__ or error  # else only that "an error occurred while generating the dataset"
        missing = isinstance(cause, StopIteration)
        reason = "no file is called so" if missing else f"{type(cause).__name__}: {one_line(cause)}"
        where = f" after row {number}" if number > skip else ""
        raise ValueError(f"{name} cannot be read as rows{where} ({reason})") from error


def _check_no_pattern(folder) -> None:
    """Refuse, by a ValueError, a folder of this machine that `datasets` would take for a pattern, and read others
    for."""
    if isinstance(folder, str) and Path(folder).is_dir():
        path = str(Path(folder).resolve())
        if glob.has_magic(path) or "::" in path:
            raise ValueError(f"hub: {folder} is the folder {path}, whose name is a pattern for datasets; rename it")
