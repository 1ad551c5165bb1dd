"""Losses on three held-out texts, density by layer, and four tasks scored as lm-eval scores them."""

import numpy as np
import torch
import torch.nn.functional as F

TEXTS = ("openstax", "gutenberg", "wikitext")
TASKS = ("lambada", "arc_easy", "arc_challenge", "hellaswag")
NORMED = ("arc_challenge", "hellaswag")
CHANCE = (0.0 + 0.25 + 0.25 + 0.25) / 4


@torch.no_grad()
def score_texts(model, evaluation: dict, batch: int = 16) -> dict:
    device = model.embed_tokens.weight.device
    losses, densities = {}, []
    for text in TEXTS:
        windows = torch.from_numpy(evaluation[text].astype(np.int64)).to(device)
        total = 0.0
        for part in windows.split(batch):
            hidden, figures, _ = model(part, fast=False)
            densities.append(figures[:, 0] * len(part))
            for states, targets in zip(hidden[:, :-1], part[:, 1:], strict=True):
                total += F.cross_entropy(model.logits(states).float(), targets, reduction="sum")
        losses[text] = float(total / windows[:, 1:].numel())
    by_layer = torch.stack(densities).sum(0) / sum(len(evaluation[text]) for text in TEXTS)
    return {
        "losses": {text: round(loss, 5) for text, loss in losses.items()},
        "density": round(float(by_layer.mean()), 5),
        "density_by_layer": [round(float(value), 4) for value in by_layer],
    }


@torch.no_grad()
def score_tasks(model, evaluation: dict, batch_tokens: int = 65536) -> dict[str, float]:
    device = model.embed_tokens.weight.device
    sizes, starts = evaluation["task_sizes"], evaluation["task_starts"]
    flat = torch.from_numpy(evaluation["task_tokens"].astype(np.int64))
    begins = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    order = np.argsort(-sizes, kind="stable")
    scores, greedy = np.zeros(len(sizes)), np.zeros(len(sizes), bool)
    position = 0
    while position < len(order):
        length = -(-int(sizes[order[position]]) // 32) * 32
        rows = order[position : position + max(1, batch_tokens // length)]
        position += len(rows)
        tokens = torch.zeros(len(rows), length, dtype=torch.long)
        where, index, targets = [], [], []
        for i, row in enumerate(rows):
            text = flat[begins[row] : begins[row] + sizes[row]]
            tokens[i, : sizes[row]] = text
            count = int(sizes[row] - starts[row])
            where.append(i * length + torch.arange(starts[row] - 1, sizes[row] - 1))
            index.append(torch.full((count,), i))
            targets.append(text[starts[row] :])
        where, index, targets = (torch.cat(parts).to(device) for parts in (where, index, targets))
        hidden = model(tokens.to(device), fast=False)[0].flatten(0, 1)[where]
        sums, misses = torch.zeros(len(rows), device=device), torch.zeros(len(rows), device=device)
        for part in torch.arange(len(where), device=device).split(16384):
            logits = model.logits(hidden[part]).float()
            wanted = targets[part]
            sums.index_add_(0, index[part], -F.cross_entropy(logits, wanted, reduction="none"))
            misses.index_add_(0, index[part], (logits.argmax(-1) != wanted).float())
        scores[rows], greedy[rows] = sums.cpu().numpy(), (misses == 0).cpu().numpy()
    return {task: round(accuracy(task, evaluation, scores, greedy), 4) for task in TASKS}


def accuracy(task: str, evaluation: dict, scores: np.ndarray, greedy: np.ndarray) -> float:
    chosen = evaluation["task_ids"] == TASKS.index(task)
    if not chosen.any():
        return float("nan")
    if task == "lambada":
        return float(greedy[chosen].mean())
    scores, rows, right = scores[chosen], evaluation["task_rows"][chosen], evaluation["task_right"][chosen]
    if task in NORMED:
        scores = scores / evaluation["task_characters"][chosen]
    hits = [bool(right[rows == row][scores[rows == row].argmax()]) for row in np.unique(rows)]
    return float(np.mean(hits))


def score(model, evaluation: dict) -> dict:
    return {**score_texts(model, evaluation), "tasks": score_tasks(model, evaluation)}


def excess_and_kept(row: dict, parent: dict, control: dict) -> tuple[float, float]:
    """Issue's figures: the mean relative loss above the better of parent and control, and the share of tasks kept."""
    best = {text: min(parent["losses"][text], control["losses"][text]) for text in TEXTS}
    excess = sum(row["losses"][text] / best[text] - 1 for text in TEXTS) / len(TEXTS)
    mean, ceiling = (sum(found["tasks"].values()) / len(TASKS) for found in (row, control))
    return excess, (mean - CHANCE) / (ceiling - CHANCE)
