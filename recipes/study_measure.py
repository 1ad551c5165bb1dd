"""What the study measures of a model: held-out loss, sparsity, and tasks."""

import json
import math
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import hf_twell
from hf_twell.evaluation.tasks import DATA_FILES
from hf_twell.files.text import read_text
from hf_twell.measure.inference import evaluation_mode
from hf_twell.recipe.packing import PackedText

TASKS = ("arc_easy", "hellaswag")
TRAINING_TOKENS = 2**20  # as many as the paper's steps have, over which it says which neurons are dead


def sequence_losses(model, sequences: torch.Tensor, batch_size: int = 32) -> torch.Tensor:
    """Loss in nats per token of each sequence."""
    losses = []
    with evaluation_mode(model):
        for batch in tqdm(sequences.split(batch_size), desc="held-out loss"):
            ids = batch.to(model.device)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            losses.append(loss.view(len(ids), -1).mean(1).cpu())
    return torch.cat(losses)


def lambada(model, tokenizer, folder: Path, limit: int, batch_size: int = 32) -> dict:
    """Share of passages whose last word the model predicts greedily (lm-eval's lambada_openai), with standard error."""
    name = "lambada_openai-test.jsonl"
    text = read_text(folder / name if (folder / name).is_file() else folder / f"{name}.xz")
    passages = []  # token ids, and those of the last word
    for line in text.splitlines()[:limit]:
        context, _, word = json.loads(line)["text"].rpartition(" ")
        answer = tokenizer(" " + word, add_special_tokens=False)["input_ids"]
        passages.append(((tokenizer(context)["input_ids"] + answer)[-model.config.max_position_embeddings :], answer))
    passages.sort(key=lambda passage: len(passage[0]))
    hits = []
    with evaluation_mode(model):
        for start in tqdm(range(0, len(passages), batch_size), desc="lambada"):
            batch = passages[start : start + batch_size]
            # What fills a shorter row up stands after its text, where attention never looks back from.
            ids = pad_sequence([torch.tensor(ids) for ids, _ in batch], batch_first=True).to(model.device)
            guesses = model(input_ids=ids, use_cache=False).logits.argmax(-1).tolist()
            for guess, (ids, answer) in zip(guesses, batch, strict=True):
                hits.append(float(guess[len(ids) - len(answer) - 1 : len(ids) - 1] == answer))
    mean = sum(hits) / len(hits)
    return {"acc": mean, "stderr": math.sqrt(mean * (1 - mean) / max(1, len(hits) - 1)), "rows": len(hits)}


def measure(
    model, tokenizer, heldout: PackedText, eval_dir: Path | None, limit: int, *, training: PackedText | None = None
) -> dict:
    """Everything that a row says of a model; with `training`, also its sparsity on a million tokens of that."""
    losses = sequence_losses(model, heldout.sequences)
    sparsity = hf_twell.measure_sparsity(model, heldout.sequences.split(32))
    row = {
        "loss": losses.double().mean().item(),
        "loss_stderr": losses.double().std().item() / math.sqrt(len(losses)),
        "heldout_tokens": heldout.sequences.numel(),
        "density": sparsity["density"],
        "l0": sparsity["l0"],
        "dead": sparsity["dead"],
        "layers": _layers(sparsity),
        "tasks": {},
    }
    if training is not None:
        sample = evenly(training.sequences, TRAINING_TOKENS)
        sparsity = hf_twell.measure_sparsity(model, sample.split(32))
        row["training_text"] = {"tokens": sample.numel(), "density": sparsity["density"], "layers": _layers(sparsity)}
    if eval_dir is not None:
        row["tasks"]["lambada"] = lambada(model, tokenizer, eval_dir, limit)
        found = [task for task in TASKS if _has_rows(eval_dir, task)]
        if found:
            scores = hf_twell.evaluate(model, tokenizer, found, data_dir=eval_dir, limit=limit, batch_size=64)["tasks"]
            for task in found:
                metric = scores[task]["metrics"]["acc_norm" if task == "hellaswag" else "acc"]
                row["tasks"][task] = {
                    "acc": metric["value"],
                    "stderr": metric["stderr"],
                    "rows": scores[task]["n_samples"],
                }
    return row


def evenly(sequences: torch.Tensor, tokens: int) -> torch.Tensor:
    """So many tokens' sequences (all, if they are fewer), evenly from first to last."""
    count = min(len(sequences), math.ceil(tokens / sequences.shape[1]))
    return sequences[torch.linspace(0, len(sequences) - 1, count).long()]


def _layers(sparsity: dict) -> list[dict]:
    return [{key: layer[key] for key in ("l0", "density", "dead")} for layer in sparsity["layers"]]


def _has_rows(folder: Path, task: str) -> bool:
    name = next(iter(DATA_FILES[task].values()))
    return any((folder / file).is_file() for file in (name, f"{name}.xz"))
