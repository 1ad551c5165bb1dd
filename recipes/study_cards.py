"""A Hugging Face model card for each of the study's best rows, from its rows and study.yaml alone.

`python recipes/study_report.py DIR` writes them into DIR/cards. What a row lacks is absent from its card.
"""

import dataclasses
import re
import shlex
from pathlib import Path

import yaml
from study import run_folder
from study_report import against, control_of
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_twell.files.tables import markdown_table, percent
from hf_twell.models.cards import CLAUSES, fill, loading, score, sparsity_section
from hf_twell.recipe.schema import Recipe

TARGETS = (0.01, 0.005)
NEEDED = {"id", "family", "name", "start", "seed", "tokens", "density", "loss"}
OUTPUT = Path("out/study")
# Of each task: its name, the metric in words and in lm-eval's, and its data set on the Hub.
TASKS = {
    "lambada": ("LAMBADA", "accuracy (last word)", "acc", ("EleutherAI/lambada_openai", "default", "test")),
    "arc_easy": ("ARC-Easy", "accuracy", "acc", ("allenai/ai2_arc", "ARC-Easy", "test")),
    "hellaswag": ("HellaSwag", "length-normalized accuracy", "acc_norm", ("Rowan/hellaswag", "default", "validation")),
}
SOURCES = {
    "gutenberg": "books of Project Gutenberg (public domain in the United States)",
    "openstax": "OpenStax textbooks (CC BY 4.0, Rice University)",
    "tinystories": "stories of TinyStories (CDLA-Sharing-1.0)",
}
RECIPE = """## Recipe

The keys are those of `hf_twell/recipe/schema.py`; `recipes/study.py` adds the text.

```yaml
{recipe}```
"""
LIMITS = """## Intended use and limits

For research on sparse feed-forward blocks: to compare ways of conversion, and to try kernels on activations that
training made sparse. For nothing that relies on what it writes: a model of this size, trained on so few tokens, knows
no facts, and the books bring the views of their time. English alone; sequences of at most {length} tokens.

ARC-Easy and HellaSwag let a model choose among (nearly always) four answers: such scores begin at the quarter that
chance gives, and tell methods apart less well than the loss does. This row was chosen as the best by the held-out loss
that stands here, so new text may be less kind to it. Nothing here says how larger models behave.
"""


def best_rows(rows: list[dict]) -> list[tuple[dict, dict]]:
    """The best row and its control for each family, start and target density.

    Best is the lowest loss against the dense control of the same tokens, among rows that are no more than a tenth above
    their target. Rows from random weights and rows from a parent have controls of their own, so each has its best.
    """
    best = {}
    for row in rows:
        target = row.get("target_density")
        control = control_of(row, rows)
        if row.get("relu") is False or target not in TARGETS or row["density"] > 1.1 * target or control is None:
            continue
        key = (row["family"], row["start"], target)
        best[key] = min(best.get(key, (row, control)), (row, control), key=lambda pair: against(*pair))
    return list(best.values())


def card_name(row: dict) -> str:
    """<family>-<method>-<density>"""
    return "-".join([row["family"], re.sub(r"[^a-z0-9]+", "-", row["name"].lower()), f"{row['target_density']:g}"])


def study_card(row: dict, control: dict, rows: list[dict], study: dict) -> str:
    """The card of one row, in the form of `hf_twell.models.cards.model_card`."""
    family = study["families"].get(row["family"], {})
    kind = family.get("model_type", row["family"])
    metadata = {"license": "mit", "language": "en", "model-index": _model_index(row)}
    sections = [
        _evaluation(row, control),
        RECIPE.format(recipe=_recipe(row, study)),
        LIMITS.format(length=study["sequence_length"]),
        _again(row, control),
    ]
    return fill(
        "model.md",
        _folder(row),
        metadata,
        _facts(row, control, rows, study),
        name=card_name(row),
        architecture=MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, kind),
        method_clause=CLAUSES["l1"] + ", so that few of a block's neurons are active for a token",
        warning="",
        sparsity=_sparsity(row, family.get("intermediate_size")),
        evaluation="\n".join(sections) + "\n",
        **loading(),
    )


def write_cards(rows: list[dict], folder: Path) -> list[Path]:
    """Write the cards of the best rows into a folder of their own; cards of rows that are no longer best go."""
    study = yaml.safe_load(Path(__file__).with_name("study.yaml").read_text())
    rows = [{key: value for key, value in row.items() if value is not None} for row in rows]
    rows = [row for row in rows if row.keys() >= NEEDED]
    return keep_cards(
        {card_name(row): study_card(row, control, rows, study) for row, control in best_rows(rows)}, folder
    )


def keep_cards(cards: dict[str, str], folder: Path) -> list[Path]:
    """Write texts by their names, and take away those of other names; the paths of what is there then."""
    files = {folder / f"{name}.md": text for name, text in cards.items()}
    for path in set(folder.glob("*.md")) - files.keys():
        path.unlink()
    for path, text in files.items():
        folder.mkdir(exist_ok=True)
        path.write_text(text)
    return list(files)


def _facts(row: dict, control: dict, rows: list[dict], study: dict) -> dict:
    family = study["families"].get(row["family"], {})
    sizes = [family.get(key) for key in ("num_hidden_layers", "hidden_size", "intermediate_size")]
    alike = ("family", "name", "start", "target_density", "parent_loss", "tokens")
    seeds = [r for r in rows if r is not row and all(r.get(key) == row.get(key) for key in alike)]
    seeds = [(r, control_of(r, rows)) for r in seeds]
    versions = ", ".join(f"{name} {version}" for name, version in row.get("versions", {}).items())
    commit = f", commit {row['commit']}" if row.get("commit") else ""
    minutes = "minutes of this run" if row.get("hardware") == "CPU" else "GPU-minutes of this run"
    layers = [layer["dead"] for layer in row.get("layers", []) if "dead" in layer]
    worst = f"; {percent(max(layers))} in the worst layer" if layers else ""
    return {
        "parameters": f"{row['parameters'] / 1e6:.0f}M" if row.get("parameters") else None,
        "shape": None if None in sizes else "{} layers, D={:,}, F={:,}".format(*sizes),
        "base model": _base(row, rows),
        "method": f"{row['name']}: {_method(row)}",
        "text": "; ".join(SOURCES.get(source, source) for source in study["sources"]),
        "tokens of this run": f"{row['tokens']:,}",
        minutes: f"{row['minutes']:.1f}; other runs may have shared the device" if row.get("minutes") else None,
        "hardware": row.get("hardware"),
        "versions": versions + commit or None,
        "seed": row["seed"],
        "held-out loss against the dense control": f"**{100 * against(row, control):+.2f} %**",
        "the same with other seeds": ", ".join(f"{100 * against(*pair):+.2f} %" for pair in seeds) or None,
        "density on held-out text": f"{percent(row['density'])} (target {100 * row['target_density']:g} %)",
        "active neurons per token (L0), mean of layers": f"{row['l0']:.1f}" if "l0" in row else None,
        "dead neurons": f"{percent(row['dead'])}{worst}" if "dead" in row else None,
    }


def _base(row: dict, rows: list[dict]) -> str:
    if row["start"] != "parent":
        return "none: trained from random weights"
    parents = [r for r in rows if (r["family"], r["loss"]) == (row["family"], row.get("parent_loss"))]
    figures = "".join(f", loss {r['loss']:.4f} after {r['tokens']:,} tokens" for r in parents[:1])
    return f"a dense SiLU model of the study{figures}; not on the Hub"


def _method(row: dict) -> str:
    swap = "SiLU swapped for ReLU at once" if row["start"] == "parent" else "ReLU from the first step"
    trained = {"ffn": "feed-forward blocks alone trained", "ffn+lora": "feed-forward blocks and LoRA on the attention"}
    words = [
        "SiLU blended into ReLU" if row.get("blend_steps") else swap,
        "an L1 term whose coefficient a controller finds for the target density",
        "the dense parent as a teacher" if row.get("distill") else None,
        trained.get(row.get("trainable")),
    ]
    return ", ".join(word for word in words if word)


def _folder(row: dict) -> str:
    return (run_folder(row, OUTPUT) / "final").as_posix()


def _recipe(row: dict, study: dict) -> str:
    """What `recipes/study.py` trains a row with."""
    start = "dense/final" if row["start"] == "parent" else f"init{row['seed']}"
    stage = study.get(row.get("stage") or ("convert" if row["start"] == "parent" else "pretrain"), {})
    # A row's `layers` are its figures, not the recipe's key.
    names = [field.name for field in dataclasses.fields(Recipe) if field.name != "layers"]
    own = {name: row[name] for name in names if name in row}
    keys = {
        "model": (OUTPUT / row["family"] / start).as_posix(),
        "sequence_length": study["sequence_length"],
        **own,
        "training": {**study["training"], **stage, **row.get("training", {}), "seed": row["seed"]},
    }
    return yaml.safe_dump(keys, sort_keys=False, default_flow_style=None, width=100)


def _sparsity(row: dict, intermediate_size: int | None) -> str:
    layers = [layer | {"intermediate_size": intermediate_size} for layer in row.get("layers", [])]
    if not layers or not all({"l0", "density", "dead"} <= figures.keys() for figures in [row, *layers]):
        return ""
    tokens = f"the {row['heldout_tokens']:,} tokens of " if row.get("heldout_tokens") else ""
    return sparsity_section(row | {"layers": layers, "where": f"Measured on {tokens}held-out text."}, None)


def _evaluation(row: dict, control: dict) -> str:
    figures = [("held-out loss (nats per token)", None, _loss(row), _loss(control))]
    for task, (name, metric, *_) in TASKS.items():
        mine, other = (task_figure(r, task) for r in (row, control))
        if mine:
            figures.append((f"{name}, {metric}", row["tasks"][task].get("rows"), score(mine), other and score(other)))
    what = markdown_table(["", "rows", "this model", "dense control"], figures)
    return f"""## Evaluation

The control is the row `{control["id"]}`: SiLU, the same start and the same {control["tokens"]:,} tokens. Tasks
are zero-shot, on the first rows of each; ± is the standard error over sequences or rows, not over training runs.

{what}"""


def _loss(row: dict) -> str:
    return score({"value": row["loss"], "stderr": row.get("loss_stderr")})


def task_figure(row: dict, task: str) -> dict | None:
    found = row.get("tasks", {}).get(task) or {}
    return {"value": found["acc"], "stderr": found.get("stderr")} if found.get("acc") is not None else None


def _model_index(row: dict) -> list[dict]:
    own = {"name": "held-out books, textbooks and stories of the study", "type": "text"}
    loss = {"value": row["loss"], "stderr": row.get("loss_stderr")}
    results = [index_result(own, "loss", "held-out loss (nats per token)", loss)]
    for task, (name, words, metric, (repo, config, split)) in TASKS.items():
        figure = task_figure(row, task)
        if figure:
            dataset = {"name": name, "type": repo, "config": config, "split": split, "args": {"num_few_shot": 0}}
            if row["tasks"][task].get("rows"):
                dataset["args"]["rows"] = row["tasks"][task]["rows"]
            results.append(index_result(dataset, metric, words, figure))
    return [{"name": card_name(row), "results": results}]


def index_result(dataset: dict, metric: str, words: str, figure: dict) -> dict:
    # A model index has no place for a standard error; as a metric of its own, named as lm-eval does, the Hub shows it.
    metrics = [{"type": metric, "name": words, "value": round(figure["value"], 4)}]
    if figure["stderr"] is not None:
        stderr = {"type": f"{metric}_stderr", "name": f"{words}, standard error", "value": round(figure["stderr"], 4)}
        metrics.append(stderr)
    return {"task": {"type": "text-generation", "name": "Text generation"}, "dataset": dataset, "metrics": metrics}


def _again(row: dict, control: dict) -> str:
    parent = [f"{row['family']}/dense/seed0"] if row["start"] == "parent" else []
    runs = dict.fromkeys([*parent, control["id"], row["id"]])
    command = f"python recipes/study.py recipes/study.yaml --text DIR --eval DIR --output {OUTPUT.as_posix()} --only"
    return f"""## To make it again

These weights are not on the Hub. One command, from hf_twell's repository, trains and measures the model, what it starts
from and its control; `recipes/study.yaml` says what the two folders hold:

```bash
{command} {shlex.join(runs)}
```

The model is then in `{_folder(row)}`.
A model trained again on another machine differs a little: compare it with the control made beside it.
"""
