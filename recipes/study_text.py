"""The studies' text: documents held out, token ids cut into sequences, and both kept in the output folder."""

from collections.abc import Callable
from pathlib import Path

import torch
from pretrain import read_documents
from study_sharing import alone


def split_documents(text: Path, source: str, held_out_every: int) -> tuple[list[str], list[str]]:
    """Training and held-out documents of one source: the last of every so many is held out."""
    training, held = [], []
    for i, document in enumerate(read_documents(text, source)):
        (held if i % held_out_every == held_out_every - 1 else training).append(document)
    return training, held


def cut(stream_N: torch.Tensor, length: int) -> torch.Tensor:
    """A stream of N token ids in sequences, (N // length, length); what is left at the end goes."""
    return stream_N[: len(stream_N) // length * length].view(-1, length)


def spread(sequences: torch.Tensor, count: int) -> torch.Tensor:
    """At most so many of them, spread over all: those of one document lie one after another."""
    return sequences[:: max(1, len(sequences) // count)][:count].clone()


def kept_in(output: Path, make: Callable[[], dict]) -> dict:
    """What `make` returns, made once for all processes and kept in `text.pt`."""
    kept = output / "text.pt"
    with alone(output / "text.lock"):
        if not kept.is_file():
            torch.save(make(), kept.with_suffix(".begun"))
            kept.with_suffix(".begun").rename(kept)
    return torch.load(kept)
