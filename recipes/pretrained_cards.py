"""A Hugging Face model card for each conversion of the pretrained parent's study, from its rows and YAML alone.

`make figures` writes them beside the rows. What a row lacks is absent from its card.
"""

import dataclasses
from pathlib import Path

import yaml
from pretrained_plan import folder_of, needs, plan
from pretrained_report import TASKS, control_of, excess, kept, parent_of
from pretrained_runs import APART
from study_cards import SOURCES, index_result, keep_cards, task_figure

from hf_twell.files.tables import markdown_table, percent
from hf_twell.models.cards import CLAUSES, fill, loading, score, sparsity_section
from hf_twell.recipe.schema import Recipe

OUTPUT = Path("out/pretrained")
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"  # whose GGUF the rows' parent is; Apache-2.0
# Of each task: its name, the metric in words and in lm-eval's, and its data set on the Hub.
SETS = {
    "lambada": ("LAMBADA", "accuracy (last word)", "acc", ("EleutherAI/lambada_openai", "default", "test")),
    "arc_easy": ("ARC-Easy", "accuracy", "acc", ("allenai/ai2_arc", "ARC-Easy", "test")),
    "arc_challenge": (
        "ARC-Challenge",
        "length-normalized accuracy",
        "acc_norm",
        ("allenai/ai2_arc", "ARC-Challenge", "test"),
    ),
    "hellaswag": ("HellaSwag", "length-normalized accuracy", "acc_norm", ("Rowan/hellaswag", "default", "validation")),
}
TEXTS = {"openstax": "OpenStax textbooks", "gutenberg": "Project Gutenberg books", "wikitext": "WikiText-2, test"}
TAIL = """## Recipe

The keys are those of `hf_twell/recipe/schema.py`; `recipes/pretrained_study.py` adds the text.

```yaml
{recipe}```

## Intended use and limits

For research on sparse feed-forward blocks. A model of this size is often wrong, and a conversion more often than its
parent: the scores above say by how much on what was measured, and nothing was measured in conversations, in other
languages than English, or on sequences longer than {length:,} tokens. The books bring the views of their time.

## To make it again

These weights are not on the Hub. One command, from hf_twell's repository, trains and measures the model, what it starts
from and its control; `recipes/pretrained_study.yaml` says what the folders hold:

```bash
python recipes/pretrained_study.py recipes/pretrained_study.yaml --model SmolLM2-135M-Instruct.Q4_1.gguf \\
  --text DIR --eval DIR --output {output} --only parent {runs}
```

The model is then in `{folder}`.
A model trained again on another machine differs a little: compare it with the control made beside it.

"""


def best_rows(rows: list[dict]) -> list[dict]:
    """Of each target those that read most, of all that every task scored; of these the one with the least loss.

    What begins with the parent itself is there to compare with.
    """
    best = {}
    for row in rows:
        if row.get("target_density") is None or row["start"] == "parent":
            continue
        if excess(row, rows) is not None and not row["unscored"]:
            rank = (-row["tokens_read"], excess(row, rows))
            if row["target_density"] not in best or rank < best[row["target_density"]][0]:
                best[row["target_density"]] = rank, row
    return [row for _, row in best.values()]


def card_name(row: dict) -> str:
    return f"{BASE.rpartition('/')[2].lower()}-{row['name'].replace(' ', '-')}-{row['target_density']:g}"


def pretrained_card(row: dict, rows: list[dict], study: dict) -> str:
    """The card of one row, in the form of `hf_twell.models.cards.model_card`."""
    control, folder = control_of(rows, row), (folder_of(row["id"], OUTPUT) / "final").as_posix()
    begun = next(run for run in plan(study) if run["id"] == needs(row, study))
    runs = [run for run in (needs(begun, study), begun["id"], control["id"], row["id"]) if run]
    tail = TAIL.format(
        recipe=_recipe(row, study),
        length=row["sequence_length"],
        output=OUTPUT.as_posix(),
        runs=" ".join(runs),
        folder=folder,
    )
    layers = [layer | {"intermediate_size": round(layer["l0"] / layer["density"])} for layer in row["layers"]]
    measured = {
        **row,
        "layers": layers,
        "where": f"Measured on {sum(row['heldout_tokens'].values()):,} held-out tokens.",
    }
    return fill(
        "model.md",
        folder,
        {"license": "apache-2.0", "language": "en", "base_model": BASE, "model-index": _model_index(row)},
        _facts(row, rows, study),
        name=card_name(row),
        architecture="LlamaForCausalLM",
        method_clause=CLAUSES[row["term"]] + ", so that few of a block's neurons are active for a token",
        warning="",
        sparsity=sparsity_section(measured, len(layers)),
        evaluation="\n".join([_evaluation(row, rows), tail]),
        **loading(),
    )


def write_cards(rows: list[dict], folder: Path) -> list[Path]:
    """Write the cards of the best rows into a folder of their own; cards of rows that are no longer best go."""
    study = yaml.safe_load(Path(__file__).with_name("pretrained_study.yaml").read_text())
    return keep_cards({card_name(row): pretrained_card(row, rows, study) for row in best_rows(rows)}, folder)


def _facts(row: dict, rows: list[dict], study: dict) -> dict:
    worst = max(layer["dead"] for layer in row["layers"])
    text = [SOURCES.get(source, source) for source in study["sources"]]
    return {
        "parameters": f"{row['parameters'] / 1e6:.0f}M",
        "base model": f"[{BASE}](https://huggingface.co/{BASE}), dequantized from {row['model']}",
        "method": "a count of active neurons as penalty, whose coefficient a controller finds for the target density; "
        "the mean of the parent and a dense model that read the books begins and teaches",
        "text": "; ".join([*text, "what the parent writes by itself"]),
        "tokens of this run": f"{row['tokens']:,}",
        "tokens in all phases": f"{row['tokens_read']:,}",
        "GPU-minutes of this run": f"{row['minutes']:.1f}; other runs may have shared the device",
        "hardware": row["hardware"],
        "versions": ", ".join(f"{name} {version}" for name, version in row["versions"].items()),
        "seed": row["seed"],
        "loss above the better of parent and control, mean of three texts": f"**{100 * excess(row, rows):+.2f} %**",
        "accuracy above chance, of the control's, mean of four tasks": f"**{100 * kept(row, rows):.1f} %**",
        "density on held-out text": f"{percent(row['density'])} (target {100 * row['target_density']:g} %)",
        "active neurons per token (L0), mean of layers": f"{row['l0']:.1f}",
        "dead neurons": f"{percent(row['dead'])}; {percent(worst)} in the worst layer",
    }


def _recipe(row: dict, study: dict) -> str:
    """What `recipes/pretrained_study.py` trains a row with."""
    names = {field.name for field in dataclasses.fields(Recipe)} - {"layers"}  # a row's are its figures
    own = {name: row[name] for name in row if name in names - {"model", "distill"} and name not in APART}
    keys = {
        "model": (folder_of(needs(row, study), OUTPUT) / "final").as_posix(),
        "sequence_length": row["sequence_length"],
        "distill": {**row["distill"], "parent": (folder_of(row["distill"]["parent"], OUTPUT) / "final").as_posix()},
        **own,
        "training": row["settings"],
    }
    return yaml.safe_dump(keys, sort_keys=False, default_flow_style=None, width=100)


def _evaluation(row: dict, rows: list[dict]) -> str:
    parent, control = parent_of(rows), control_of(rows, row)
    three = (row, parent, control)
    lines = [
        [f"loss on {TEXTS.get(text, text)} (nats per token)", f"{row['heldout_tokens'][text]:,} tokens"]
        + [score({"value": each["losses"][text], "stderr": each["loss_stderr"][text]}) for each in three]
        for text in row["losses"]
    ]
    for task in TASKS:
        figures = [task_figure(each, task) for each in three]
        if all(figures):
            name, metric = SETS[task][:2]
            lines.append([f"{name}, {metric}", f"{row['tasks'][task]['rows']:,} rows", *map(score, figures)])
    return f"""## Evaluation

The control is the row `{control["id"]}`: the parent trained on as it is, {control["tokens_read"]:,} tokens. Tasks are
zero-shot; ± is the standard error over sequences or rows, not over training runs.

{markdown_table(["", "", "this model", "parent", "dense control"], lines)}"""


def _model_index(row: dict) -> list[dict]:
    results = []
    for text, loss in row["losses"].items():
        own = {"name": f"held-out text: {TEXTS.get(text, text)}", "type": "text"}
        figure = {"value": loss, "stderr": row["loss_stderr"][text]}
        results.append(index_result(own, "loss", "held-out loss (nats per token)", figure))
    for task, (name, words, metric, (repo, config, split)) in SETS.items():
        if figure := task_figure(row, task):
            args = {"num_few_shot": 0, "rows": row["tasks"][task]["rows"]}
            dataset = {"name": name, "type": repo, "config": config, "split": split, "args": args}
            results.append(index_result(dataset, metric, words, figure))
    return [{"name": card_name(row), "results": results}]
