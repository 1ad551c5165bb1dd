"""The text of pretrained_study.py, as the parent's tokens, and the tasks' rows; kept in the output folder."""

import json
import shutil
from pathlib import Path

import torch
from pretrain import pack
from study_measure import TASK_FILES, rows_file
from study_sharing import alone, read_rows
from study_text import cut, kept_in, split_documents, spread

from hf_twell.files.text import read_text
from hf_twell.models.loading import load_model, load_tokenizer
from hf_twell.recipe.chat import chat_tokens
from hf_twell.recipe.own_text import sample_text

ROWS_FOLDER = "eval"
WIKITEXT = "wikitext2_raw_test_documents.jsonl"
HELD_OUT = 50  # one of so many sequences of conversations


def prepare(study: dict, model: str, text: Path | None, eval_dir: Path | None, output: Path) -> dict:
    """Training sequences ("train") and, by name, those of the held-out texts ("texts"); made once.

    Held-out documents of each source and, where `eval_dir` is given, WikiText-2's test documents.

    Shapes: (sequences, sequence_length) each, int64.
    """
    if eval_dir is not None:
        with alone(output / "text.lock"):
            _keep_rows(eval_dir, output / ROWS_FOLDER)

    def make() -> dict:
        tokenizer, length = load_tokenizer(model), study["sequence_length"]
        training, texts = [], {}
        for source in study["sources"]:
            read, held = split_documents(text, source, study["held_out_every"])
            training.append(pack(tokenizer, read))
            texts[source] = pack(tokenizer, held)
        if eval_dir is not None:
            found = rows_file(eval_dir, WIKITEXT)
            if found is None:
                raise FileNotFoundError(f"{eval_dir} has no {WIKITEXT} (or .xz); --eval must hold WikiText-2's test")
            lines = read_text(found).split("\n")
            texts["wikitext"] = pack(tokenizer, [json.loads(line)["page"] for line in lines if line])
        texts = {name: spread(cut(stream, length), study["heldout_sequences"]) for name, stream in texts.items()}
        for name, sequences in texts.items():
            if not len(sequences):
                raise ValueError(f"{name} has not one held-out sequence of {length} tokens; lower held_out_every")
        return {
            "train": _narrow(cut(torch.cat(training), length), tokenizer),
            "texts": {name: _narrow(sequences, tokenizer) for name, sequences in texts.items()},
        }

    kept = kept_in(output, make)
    texts = {name: sequences.long() for name, sequences in kept["texts"].items()}
    return {"train": kept["train"].long(), "texts": texts}


def with_own_text(train: torch.Tensor, study: dict, model: str, output: Path, chats: float = 0.0) -> torch.Tensor:
    """`train` and the parent's own text, which is repeated until it is `share` of all sequences.

    `chats` is the part of that share which is conversations: but for those that `heldout_chats` returns.

    Shapes: `train` and what is returned (sequences, sequence_length).
    """
    share, length = study["own_text"]["share"], train.shape[1]
    count = round(len(train) * share / (1 - share))
    parts = [train]
    for kind, wanted in (("own", count - round(chats * count)), ("chats", round(chats * count))):
        if wanted:
            own = _own(kind, study, model, output, length)
            own = own[_heldout(own) :] if kind == "chats" else own
            parts.append(own.repeat(-(-wanted // len(own)), 1)[:wanted])
    return torch.cat(parts)


def heldout_chats(study: dict, output: Path) -> torch.Tensor | None:
    """Conversations of the parent that nothing is trained on, or None where none have been sampled."""
    if not (output / "chats.pt").is_file():
        return None
    own = torch.load(output / "chats.pt").long()
    return spread(own[: _heldout(own)], study["heldout_sequences"])


def _heldout(sequences: torch.Tensor) -> int:
    return -(-len(sequences) // HELD_OUT)


def _own(kind: str, study: dict, model: str, output: Path, length: int) -> torch.Tensor:
    """What the parent writes, its documents ("own") or conversations ("chats"), (sequences, length); made once.

    The text is sampled by the first process that needs it, and kept in the output folder. What `hf-twell sample` has
    written there before (own.0.jsonl, own.1.jsonl and so on, by several processes, with seeds far apart) counts.
    """
    settings = dict(study["own_text" if kind == "own" else "chats"])
    settings.pop("share", None)
    wanted, kept = settings.pop("tokens"), output / f"{kind}.pt"
    with alone(output / f"{kind}.lock"):
        if not kept.is_file():
            rows = [row for other in sorted(output.glob(f"{kind}.[0-9]*.jsonl")) for row in read_rows(other)]
            wanted -= sum(row["tokens"] for row in rows)
            if wanted > 0:
                on_cuda = torch.cuda.is_available() and not study["training"].get("use_cpu")
                device, dtype = ("cuda", "bfloat16") if on_cuda else ("cpu", "float32")
                parent, tokenizer = load_model(model, dtype=dtype, device=device)
                file = output / f"{kind}.jsonl"
                said = sample_text(parent, tokenizer, file, tokens=wanted, chats=kind == "chats", **settings)
                print(f"{model} writes text of its own: {said}", flush=True)
                del parent
                if on_cuda:
                    torch.cuda.empty_cache()  # other processes share the device
                rows += read_rows(file)
            tokenizer = load_tokenizer(model)
            if kind == "chats":
                tokens = torch.tensor([token for row in rows for token in chat_tokens(tokenizer, row["messages"])[0]])
            else:
                tokens = pack(tokenizer, [row["text"] for row in rows])
            _save(_narrow(cut(tokens, length), tokenizer), kept)
    return torch.load(kept).long()


def _narrow(sequences: torch.Tensor, tokenizer) -> torch.Tensor:
    """In half the room or less, for carrying; no vocabulary of today has more words than 32 bits count."""
    return sequences.to(torch.uint16 if len(tokenizer) <= 2**16 else torch.int32)


def _save(sequences: torch.Tensor, kept: Path) -> None:
    torch.save(sequences, kept.with_suffix(".begun"))
    kept.with_suffix(".begun").rename(kept)


def _keep_rows(eval_dir: Path, folder: Path) -> None:
    """Copy the tasks' files that are in `eval_dir` and not yet in `folder`."""
    folder.mkdir(exist_ok=True)
    for name in TASK_FILES.values():
        found = rows_file(eval_dir, name)
        if found is not None and rows_file(folder, name) is None:
            shutil.copyfile(found, folder / found.name)
