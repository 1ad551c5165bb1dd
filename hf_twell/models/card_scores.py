"""What a card says of quality: scores, beside the dense parent's where these are given, and what was not scored."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hf_twell.files.tables import markdown_table

ALIKE = {  # what the scores of a model and of its parent must have in common
    "tasks": ("split", "num_fewshot", "n_samples", "chat_template"),
    "text": ("tokens", "context"),
}
RIGHT = ("acc", "acc_norm", "exact_match", "pass@1")  # metrics that are the share of rows with a right answer
ABOVE_GUESSING = 2  # standard errors, from which on a parent's score is one that can be kept
WRITES = 0.7  # of its dense parent's right answers, in tasks that it writes in: a card warns of a model that keeps less
UNWRITTEN = """Written answers (chat, programs, worked sums) were not scored. Score them before you rely on them:
> `hf-twell eval MODEL --tasks humaneval_instruct gsm8k_cot --chat-template --run-code`."""
ALONE = "What the dense parent scores in the tasks that it writes in is not given here."
FAR_LESS = """Conversions have kept far less of
> such answers than of tasks without writing: Qwen2.5-Coder-1.5B at 10.5 % active neurons kept 31 % of its parent's
> HumanEval, and 74 % of four others (`model_cards/qwen2.5-coder-1.5b` in the checkout of `hf_twell`)."""

Scores = Mapping | Sequence[Mapping] | None  # what `evaluate` returned, once or of several calls


def results_of(scores: Scores) -> list[Mapping]:
    """Scores as a list of results; a ValueError of what is none."""
    results = [scores] if isinstance(scores, Mapping) and scores else list(scores or ())
    for result in results:
        if not all(isinstance(result.get(part), dict) for part in ("tasks", "text")):
            raise ValueError("these are no scores: give what evaluate or `hf-twell eval` returned")
    return results


def evaluation_section(scores: Scores, parent_scores: Scores, *, chat: bool) -> str:
    """Tables of scores, and what they leave out; `chat` says whether the model's tokenizer has a chat template.

    Raises:
        ValueError: no scores; a parent's that were made in another way, or that have nothing of the model's.
    """
    results, parents = results_of(scores), results_of(parent_scores)
    parts = [part for result in results for part in _tables(result, parents)]
    found = [
        (entry, _of_parent(kind, name, entry, parents))
        for result in results
        for kind in ALIKE
        for name, entry in _entries(result, kind).items()
    ]
    if parents and all(parent is None for _, parent in found):
        raise ValueError("the parent's scores have no task and no text that the model's have; score both on the same")
    written = [parent for entry, parent in found if entry.get("written")]
    known = all("written" in entry for result in results for entry in result["tasks"].values())
    notes = []
    if not written and known and (chat or parts):
        notes.append(f"> {UNWRITTEN} {FAR_LESS}\n")
    elif written and not any(written):
        notes.append(f"> {ALONE} {FAR_LESS}\n")
    if parents and any(result["tasks"] for result in results):
        notes.append(
            "*Kept* is the share of the parent's score above guessing. It is empty where the parent is less than "
            f"{ABOVE_GUESSING} standard errors above it.\n"
        )
    return "\n".join(["## Evaluation\n", *notes, *parts]) + "\n" if notes or parts else ""


def lost_writing(scores: Scores, parent_scores: Scores) -> str | None:
    """What says that a conversion took much of what its parent writes, or None; a ValueError as above."""
    parents, lost = results_of(parent_scores), []
    for result in results_of(scores):
        for name, entry in _entries(result, "tasks").items():
            parent = _of_parent("tasks", name, entry, parents) if entry.get("written") else None
            shares = [kept(entry, parent, metric) for metric in entry["metrics"]] if parent else []
            best = max((share for share in shares if share is not None), default=None)
            if best is not None and best < WRITES:
                lost.append(f"{100 * best:.0f} % as many in {name}")
    return f"It solves fewer rows than its dense parent: {' and '.join(lost)}." if lost else None


def kept(entry: Mapping, parent: Mapping, metric: str) -> float | None:
    """(score - guessing) / (parent's score - guessing) of a task, at least 0. None where the metric is no share of
    rows, or the parent's score may be guessing's."""
    own, its = (found["metrics"].get(metric) or {} for found in (entry, parent))
    chance = entry.get("chance")
    if metric.partition(",")[0] not in RIGHT or None in (own.get("value"), its.get("value"), chance):
        return None
    above = its["value"] - chance
    if above <= ABOVE_GUESSING * (its.get("stderr") or 0):
        return None
    return max(0.0, (own["value"] - chance) / above)


def score(figure: Mapping | None) -> str | None:
    """Its value ± its stderr; None where there is none."""
    if not figure or figure.get("value") is None:
        return None
    return f"{figure['value']:.4f}" + (f" ± {figure['stderr']:.4f}" if figure.get("stderr") is not None else "")


def _entries(result: Mapping, kind: str) -> dict[str, dict]:
    """Its tasks, or its texts by their files' names."""
    if kind == "text":
        return {Path(name).name: entry for name, entry in result["text"].items()}
    chat = bool(result.get("chat_template"))
    return {name: {**entry, "chat_template": chat} for name, entry in result["tasks"].items()}


def _of_parent(kind: str, name: str, entry: Mapping, parents: Sequence[Mapping]) -> dict | None:
    """What a parent's results have of a task or text; a ValueError where it was scored in another way there."""
    others = [entries[name] for parent in parents if name in (entries := _entries(parent, kind))]
    alike = [other for other in others if all(other.get(key) == entry.get(key) for key in ALIKE[kind])]
    if others and not alike:
        key = next(key for key in ALIKE[kind] if others[0].get(key) != entry.get(key))
        raise ValueError(
            f"the parent's scores of {name} have {key}={others[0].get(key)}, and the model's {key}={entry.get(key)}; "
            "score both alike"
        )
    return alike[0] if alike else None


def _tables(result: Mapping, parents: Sequence[Mapping]) -> list[str]:
    """How a result was made, its tasks and its texts; nothing where no figure is finite."""
    tables = [table for table in (_tasks(result, parents), _texts(result, parents)) if table]
    if not tables:
        return []
    batch = f", batch size {result['batch_size']}" if result.get("batch_size") else ""
    limit = f"; only the first {result['limit']} rows or documents of each" if result.get("limit") else ""
    chat = ", tasks' prompts through the chat template" if result.get("chat_template") and result["tasks"] else ""
    return [f"In {result['dtype']}{batch}{chat}{limit}.\n", *tables]


def _tasks(result: Mapping, parents: Sequence[Mapping]) -> str:
    rows = []
    for name, entry in _entries(result, "tasks").items():
        parent = _of_parent("tasks", name, entry, parents)
        for metric, figure in entry["metrics"].items():
            if figure["value"] is None:
                continue
            figures = [score(figure)]
            if parents:
                share = kept(entry, parent, metric) if parent else None
                its = parent["metrics"].get(metric) if parent else None
                figures = [score(its), *figures, None if share is None else f"{100 * share:.0f} %"]
            rows.append([name, entry.get("split"), entry.get("num_fewshot"), entry.get("n_samples"), metric, *figures])
    heads = ["parent", "this model", "kept"] if parents else ["value"]
    return markdown_table(["task", "split", "shots", "rows", "metric", *heads], rows) if rows else ""


def _texts(result: Mapping, parents: Sequence[Mapping]) -> str:
    rows, texts = [], _entries(result, "text")
    heads = {"nats_per_token": "loss (nats per token)", "perplexity": "perplexity", "bits_per_byte": "bits per byte"}
    keys = [key for key in heads if all(key in entry for entry in texts.values())]
    for name, entry in texts.items():
        if None in [entry[key] for key in keys]:
            continue
        parent = _of_parent("text", name, entry, parents)
        its = parent["nats_per_token"] if parent else None
        beside = ["", ""] if its is None else [f"{its:.4g}", f"{100 * (entry['nats_per_token'] / its - 1):+.1f} %"]
        figures = [f"{entry[key]:.4g}" for key in keys]
        rows.append([name, f"{entry['tokens']:,}", *figures, *(beside if parents else [])])
    columns = ["text", "tokens", *(heads[key] for key in keys)]
    columns += ["parent's loss", "above it"] if parents else []
    return markdown_table(columns, rows) if rows else ""
