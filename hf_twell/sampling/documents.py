"""A model's own text: what it writes when nothing is asked, as documents to train on.

A conversion that learns from its dense parent on one kind of text forgets the others. What the parent writes by itself
is of every kind that it was pretrained on, and nothing has to be collected for it.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_twell.files.text import END_OF_TEXT
from hf_twell.sampling.conversations import sample_conversations
from hf_twell.sampling.draw import sample_after

# Every row begins so: by it a file is known that may be gone on with, down to a row that a kill has cut.
ROW_BEGINS = '{"written_by": "hf-twell sample", '
MOST_TRIED = 64  # samples without a row before a model is said to write none
TELL_EVERY_S = 0.5


def sample_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path,
    *,
    tokens: int,
    length: int = 512,
    batch_size: int = 64,
    start: str | None = None,
    chats: bool = False,
    seed: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> dict:
    """Write documents that the model samples, from all of its words, as rows of a .jsonl file.

    Each sample begins with `start` alone and has `length` tokens; where the model ends a document in it, another row
    begins. A file that this wrote is gone on with, to `tokens` in all; rows of one batch are written at once.
    What a chat model writes keeps the special tokens that begin and end its turns. With `chats` it is asked for
    nothing else: rows are conversations, {"messages": [...]}, of a question that it makes up and its answer.

    Args:
        tokens: of all rows, at least.
        length: tokens of a sample, with its start.
        batch_size: samples at a time. Each needs room for its keys and values, and for one row of logits in float32.
        start: a special token of the tokenizer; by default what stood between the documents of pretraining
            (`document_start`).
        chats: conversations through the tokenizer's chat template, instead of documents; needs no start.
        seed: batches of another seed differ.
        temperature: logits are divided by it. 1 is the model's own distribution; below, likelier words get likelier.
        top_p: of each next word's distribution only the likeliest ones that make up this share are drawn from.

    Returns:
        {"documents": rows in the file, "tokens": theirs, "start": what samples begin with, a token or "a question"}

    Raises:
        ValueError: sizes that cannot be, a start that is no token, a file that this did not write, chats of a model
            that has no chat template.
    """
    path = Path(path)
    check_options(tokens, length, batch_size, temperature, top_p)
    most = getattr(model.config.get_text_config(), "max_position_embeddings", length)
    if length > most:
        raise ValueError(f"length={length}, and the model reads at most {most} tokens; give a smaller length")
    if chats and start is not None:
        raise ValueError(f"start={start!r}, and conversations begin as the chat template does; leave one of them out")
    begin = None if chats else document_start(tokenizer, start)
    begun_after = "a question" if chats else tokenizer.convert_ids_to_tokens(begin)
    documents, done, batch, size = written_before(path, chats)
    tried = 0
    with path.open("ab") as file, tqdm(total=tokens, initial=done, unit=" tokens") as bar:
        file.truncate(size)
        drawn = {"temperature": temperature, "top_p": top_p, "tell": _teller(bar)}
        while done < tokens:
            drawn["seed"] = seed + batch
            if begin is None:
                rows = sample_conversations(model, tokenizer, length, batch_size, **drawn)
            else:
                rows = documents_in(sample_ids(model, begin, length, batch_size, **drawn), tokenizer, begin)
            file.write("".join(_line_of(row, batch) for row in rows).encode())
            file.flush()
            added, tried = sum(row["tokens"] for row in rows), tried + batch_size
            if not added and not documents and tried >= MOST_TRIED:
                raise ValueError(
                    "the model asked nothing that ends in time; give a greater length, or do without chats"
                    if chats
                    else f"the model wrote nothing after {begun_after!r}; give another start"
                )
            documents, done, batch = documents + len(rows), done + added, batch + 1
            bar.update(added)
    return {"documents": documents, "tokens": done, "start": begun_after}


def check_options(tokens: int, length: int, batch_size: int, temperature: float, top_p: float) -> None:
    """Refuse, by a ValueError, what of `sample_text`'s arguments cannot be, whatever the model is."""
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}; give a number above 0")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}; give a number above 0, and at most 1")
    for name, value, least in (("tokens", tokens, 1), ("length", length, 2), ("batch_size", batch_size, 1)):
        if value < least:
            raise ValueError(f"{name}={value}; give at least {least}")


def _teller(bar):
    """Says how far a batch is, as its rows come all at once and a large one takes minutes."""
    told = 0.0

    def tell(words: int, of: int) -> None:
        nonlocal told
        if time.monotonic() - told > TELL_EVERY_S:
            told = time.monotonic()
            bar.set_postfix_str(f"word {words} of {of} of each sample of a batch")

    return tell


def document_start(tokenizer: PreTrainedTokenizerBase, start: str | None = None) -> int:
    """The token that a document of pretraining began after: `start`, a special token, or <|endoftext|> where there is
    one, else BOS, else EOS; or a ValueError. A chat model's BOS and EOS are often those of its messages
    (SmolLM2-Instruct, Qwen), hence the order."""
    known = tokenizer.get_added_vocab()
    if start is not None:
        if start not in known:
            raise ValueError(f"start={start!r} is no special token of this tokenizer; it has {', '.join(known)}")
        return known[start]
    for token in (known.get(END_OF_TEXT), tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise ValueError("this tokenizer has no <|endoftext|>, BOS or EOS to begin a document with; give start")


def sample_ids(model: PreTrainedModel, begin: int, length: int, batch_size: int, **drawn: Any) -> torch.Tensor:
    """Token ids, (batch_size, length), that begin with `begin`; sampling goes on after an end of a document.

    `drawn` are options of `hf_twell.sampling.draw.sample_after`.
    """
    first_B1 = torch.full((batch_size, 1), begin, device=model.device)
    return sample_after(model, first_B1, torch.ones_like(first_B1), length - 1, **drawn)


def documents_in(ids_BL: torch.Tensor, tokenizer: PreTrainedTokenizerBase, begin: int) -> list[dict]:
    """Rows {"text", "tokens"} of what lies between the ends of documents, without blank ones.

    EOS ends a document, but in a chat model, where it ends a turn: turns stay together, with their special tokens.
    """
    eos, rows = tokenizer.eos_token_id, []
    chat = tokenizer.chat_template is not None and eos != begin
    ends = {begin} if chat else {begin, eos}
    for sample in ids_BL.tolist():
        cuts = [at for at, token in enumerate(sample) if token in ends]
        for left, right in zip(cuts, [*cuts[1:], len(sample)], strict=True):
            right -= chat and sample[right - 1] == eos  # which stands at the end of every packed document
            text = tokenizer.decode(
                sample[left + 1 : right], skip_special_tokens=not chat, clean_up_tokenization_spaces=False
            )
            if text.strip():
                rows.append({"text": text, "tokens": right - left - 1})
    return rows


def written_before(path: str | Path, chats: bool) -> tuple[int, int, int, int]:
    """(documents, tokens, next batch, bytes of whole rows) of a file that `sample_text` may go on with, or make. A
    ValueError where it holds what that did not write, or documents beside conversations, which no training reads."""
    path = Path(path)
    if not path.exists():
        return 0, 0, 0, 0
    begins = ROW_BEGINS.encode()
    *lines, cut = path.read_bytes().split(b"\n")  # bytes: a str would also be split at U+2028
    whole_rows = all(line.startswith(begins) for line in lines)
    if not whole_rows or not (cut.startswith(begins) or (begins.startswith(cut) and (lines or not cut))):
        raise ValueError(f"{path} holds what hf-twell sample did not write, and is left as it is; choose another file")
    try:
        rows = [json.loads(line) for line in lines]
        if not all(("messages" if chats else "text") in row for row in rows):
            raise KeyError
        figures = len(rows), sum(row["tokens"] for row in rows), max((row["batch"] + 1 for row in rows), default=0)
    except (ValueError, KeyError, TypeError) as error:
        kind = "conversations" if chats else "documents"
        raise ValueError(f"{path} holds other rows than sampled {kind}; choose another file") from error
    return *figures, sum(len(line) + 1 for line in lines)


def _line_of(row: dict, batch: int) -> str:
    return ROW_BEGINS + json.dumps({**row, "batch": batch}, ensure_ascii=False)[1:] + "\n"
