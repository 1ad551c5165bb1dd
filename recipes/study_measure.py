"""What the study measures of a model: held-out loss, sparsity, and tasks."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import hf_twell
from hf_twell.bench.environment import commit
from hf_twell.evaluation.tasks import DATA_FILES
from hf_twell.files.text import read_text
from hf_twell.models.modes import evaluation_mode
from hf_twell.recipe.packing import PackedText

TASKS = ("lambada", "arc_easy", "hellaswag")
TASK_FILES = {task: next(iter(files.values())) for task, files in DATA_FILES.items()}
TASK_FILES["lambada"] = "lambada_openai-test.jsonl"
METRICS = {"arc_easy": "acc", "arc_challenge": "acc_norm", "hellaswag": "acc_norm"}  # of lm-eval
FIRST_ROWS = 2000  # of a task; HellaSwag's first 3,000 or so are captions of videos, the others are how-to articles
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


def lambada(model, tokenizer, folder: Path, limit: int | None, batch_size: int = 32) -> dict:
    """Share of passages whose last word the model predicts greedily (lm-eval's lambada_openai), with standard error."""
    name = TASK_FILES["lambada"]
    text = read_text(rows_file(folder, name) or folder / name)
    passages = []  # token ids, and those of the last word
    for line in text.splitlines()[:limit]:
        context, _, word = json.loads(line)["text"].rpartition(" ")
        answer = tokenizer(" " + word, add_special_tokens=False)["input_ids"]
        passages.append(((tokenizer(context)["input_ids"] + answer)[-model.config.max_position_embeddings :], answer))
    order = sorted(range(len(passages)), key=lambda i: len(passages[i][0]))
    passages = [passages[i] for i in order]
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
    score = {"acc": mean, "stderr": math.sqrt(mean * (1 - mean) / max(1, len(hits) - 1)), "rows": len(hits)}
    return {**score, **_first([hit for _, hit in sorted(zip(order, hits, strict=True))])}


def measure(
    model, tokenizer, heldout: PackedText, eval_dir: Path | None, limit: int, *, training: PackedText | None = None
) -> dict:
    """Everything that a row says of a model; with `training`, also its sparsity on a million tokens of that."""
    losses = sequence_losses(model, heldout.sequences)
    row = {
        "loss": losses.double().mean().item(),
        "loss_stderr": standard_error(losses),
        "heldout_tokens": heldout.sequences.numel(),
        **sparsity(model, heldout.sequences),
        "tasks": {},
    }
    if training is not None:
        sample = evenly(training.sequences, TRAINING_TOKENS)
        found = sparsity(model, sample)
        row["training_text"] = {"tokens": sample.numel(), "density": found["density"], "layers": found["layers"]}
    if eval_dir is not None:
        row["tasks"] = task_scores(model, tokenizer, TASKS, eval_dir, limit)
    return row


def standard_error(losses: torch.Tensor) -> float:
    """Of their mean, over sequences."""
    return losses.double().std().item() / math.sqrt(len(losses))


def sparsity(model, sequences: torch.Tensor) -> dict:
    """Density, L0 and dead neurons: means of the layers, and of each layer."""
    found = hf_twell.measure_sparsity(model, sequences.split(32))
    layers = [{key: layer[key] for key in ("l0", "density", "dead")} for layer in found["layers"]]
    return {"density": found["density"], "l0": found["l0"], "dead": found["dead"], "layers": layers}


def task_scores(model, tokenizer, tasks: Sequence[str], eval_dir: Path, limit: int | None) -> dict:
    """Zero-shot accuracy with standard error in each task whose rows are there, on its first `limit` rows.

    With more than `FIRST_ROWS` rows also "first_acc", that on the first of them.
    Whole words in LAMBADA; of the choices, the likeliest (for `METRICS` "acc_norm": by character) elsewhere.
    """
    scores = {"lambada": lambada(model, tokenizer, eval_dir, limit)} if "lambada" in tasks else {}
    found = [task for task in tasks if task in METRICS and rows_file(eval_dir, TASK_FILES[task])]
    if found:
        options = {"data_dir": eval_dir, "limit": limit, "batch_size": 64, "log_samples": True}
        measured = hf_twell.evaluate(model, tokenizer, found, **options)["tasks"]
        for task in found:
            metric, rows = measured[task]["metrics"][METRICS[task]], measured[task]["n_samples"]
            first = _first([sample["metrics"][METRICS[task]] for sample in measured[task]["samples"]])
            scores[task] = {"acc": metric["value"], "stderr": metric["stderr"], "rows": rows, **first}
    return scores


def _first(hits: list[float]) -> dict:
    """Of a task with more rows than `FIRST_ROWS`, the accuracy on these alone."""
    return {"first_acc": sum(hits[:FIRST_ROWS]) / FIRST_ROWS} if len(hits) > FIRST_ROWS else {}


def provenance(device: str) -> dict:
    """On what, and with what, a row was made."""
    return {
        "hardware": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "versions": {"torch": torch.__version__, "hf_twell": hf_twell.__version__},
        "commit": commit(),
    }


def evenly(sequences: torch.Tensor, tokens: int) -> torch.Tensor:
    """So many tokens' sequences (all, if they are fewer), evenly from first to last."""
    count = min(len(sequences), math.ceil(tokens / sequences.shape[1]))
    return sequences[torch.linspace(0, len(sequences) - 1, count).long()]


def rows_file(folder: Path, name: str) -> Path | None:
    """The file of that name in a folder, packed by xz or not; None where it is not there."""
    return next((path for path in (folder / name, folder / f"{name}.xz") if path.is_file()), None)
