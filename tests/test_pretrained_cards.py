"""The cards of SmolLM2's conversions: drawn from the committed rows, readable by the Hub, every figure in a row."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import TrainingArguments

from hf_twell.recipe.schema import Recipe
from tests.test_study_cards import block, leaves, unfounded

ROOT = Path(__file__).parents[1]
COMMITTED = ROOT / "model_cards" / "smollm2"
ROWS = [json.loads(line) for line in (COMMITTED / "pretrained.jsonl").read_text().splitlines()]
CARDS = sorted((COMMITTED / "cards").glob("*.md"))


@pytest.fixture
def cards(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    before = set(sys.modules)
    yield runpy.run_path(str(ROOT / "recipes" / "pretrained_cards.py"))
    for name in set(sys.modules) - before:
        if (ROOT / "recipes" / f"{name}.py").is_file():
            sys.modules.pop(name)


def row_of(path: Path) -> dict:
    target = path.stem.rpartition("-")[2]
    rows = [row for row in ROWS if f"{row.get('target_density')}" == target and not row["unscored"]]
    return max(rows, key=lambda row: row["tokens_read"])


def test_they_are_drawn_from_the_committed_rows(cards, tmp_path):
    drawn = cards["write_cards"](ROWS, tmp_path / "cards")
    assert sorted(path.name for path in drawn) == [path.name for path in CARDS]
    for path in drawn:
        assert path.read_text() == (COMMITTED / "cards" / path.name).read_text(), "run `make figures`"


def test_of_each_target_the_row_that_read_most_is_shown(cards):
    rows = {row["id"]: row for row in ROWS}
    best = cards["best_rows"]([*ROWS, {**rows["count/0.098/25M/seed0"], "losses": rows["parent"]["losses"]}])
    assert [row["id"] for row in best if row["target_density"] == 0.098] == ["count/0.098/350M/seed0"]
    better = {text: loss - 0.1 for text, loss in rows["count/0.098/350M/seed0"]["losses"].items()}
    seed = {**rows["count/0.098/350M/seed0"], "id": "count/0.098/350M/seed1", "losses": better}
    assert seed in cards["best_rows"]([*ROWS, seed]), "of two seeds the one of less loss"
    assert rows["count/0.335/210M/seed0"]["unscored"] == ["hellaswag"]
    assert rows["count/0.335/120M/seed0"] in best, "scored in all tasks"


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_every_figure_stands_in_a_row(path):
    row, parent = row_of(path), ROWS[0]
    control = next(each for each in ROWS if each["id"] == "dense/150M/seed0")
    text = path.read_text()
    best = {name: min(parent["losses"][name], control["losses"][name]) for name in row["losses"]}
    excess = sum(loss / best[name] - 1 for name, loss in row["losses"].items()) / 3
    means = [sum(task["acc"] for task in each["tasks"].values()) / 4 - 0.1875 for each in (row, control)]
    for name in row["losses"]:
        cells = [f"{each['losses'][name]:.4f} ± {each['loss_stderr'][name]:.4f}" for each in (row, parent, control)]
        assert f" | {' | '.join(cells)} |" in text
    for task in row["tasks"]:
        scores = [each["tasks"][task] for each in (row, parent, control)]
        cells = [f"{each['acc']:.4f} ± {each['stderr']:.4f}" for each in scores]
        assert f" | {' | '.join(cells)} |" in text
    kept = means[0] / means[1]
    found = [row, [control[key] for key in ("id", "losses", "loss_stderr", "tasks", "tokens_read")]]
    found += [
        [parent[key] for key in ("losses", "loss_stderr", "tasks")],
        excess,
        kept,
        sum(row["heldout_tokens"].values()),
    ]
    found = leaves([*found, 1536, list(range(len(row["layers"])))])
    figures = [leaf for leaf in found if isinstance(leaf, int | float) and not isinstance(leaf, bool)]
    words = [
        "CC BY 4.0",
        "arxiv.org/abs/2603.23198",
        "SmolLM2-135M-Instruct",
        "WikiText-2",
        "books/30M/seed0",
        path.stem,
    ]
    words += [leaf for leaf in found if isinstance(leaf, str)]
    assert not unfounded(text, figures, words)
    altered = text.replace(f"{100 * excess:+.2f} %", f"{100 * excess + 1:+.2f} %")
    assert unfounded(altered, figures, words)


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_the_hub_reads_the_metadata(path):
    card, row = ModelCard.load(path), row_of(path)
    assert (card.data.license, card.data.base_model) == ("apache-2.0", "HuggingFaceTB/SmolLM2-135M-Instruct")
    shown = {(result.dataset_name, result.metric_type): result.metric_value for result in card.data.eval_results}
    assert shown["HellaSwag", "acc_norm"] == pytest.approx(row["tasks"]["hellaswag"]["acc"], abs=1e-4)
    assert shown["held-out text: WikiText-2, test", "loss"] == pytest.approx(row["losses"]["wikitext"], abs=1e-4)
    assert len(shown) == 2 * (len(row["losses"]) + len(row["tasks"]))


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_recipe_and_command(path, cards):
    row, text = row_of(path), path.read_text()
    recipe = Recipe(output_dir="out", train=[], heldout=[], **yaml.safe_load(block(text, "yaml")))
    assert (recipe.target_density, recipe.term, recipe.freeze) == (row["target_density"], "count", row["freeze"])
    assert recipe.model == recipe.distill["parent"]
    TrainingArguments(output_dir="out", **{**recipe.training, "bf16": False, "torch_compile": False})
    command = shlex.split(re.search(r"python recipes/.*?(?=\n```)", text, re.DOTALL)[0].replace("\\\n", " "))
    study = yaml.safe_load((ROOT / "recipes" / "pretrained_study.yaml").read_text())
    asked, planned = command[command.index("--only") + 1 :], [run["id"] for run in cards["plan"](study)]
    assert asked == ["parent", "books/30M/seed0", "averaged", "dense/150M/seed0", row["id"]]
    assert set(asked) <= set(planned)
