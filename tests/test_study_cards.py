"""The study's model cards: drawn from the committed rows, readable by the Hub, and every figure in them in a row."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import hf_twell
from hf_twell.recipe.schema import Recipe

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "recipes" / "demo" / "model"
COMMITTED = ROOT / "model_cards" / "study"
ROWS = [json.loads(line) for line in (COMMITTED / "study.jsonl").read_text().splitlines()]
STUDY = yaml.safe_load((ROOT / "recipes" / "study.yaml").read_text())
CARDS = sorted((COMMITTED / "cards").glob("*.md"))


@pytest.fixture
def cards(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    yield runpy.run_path(str(ROOT / "recipes" / "study_cards.py"))
    for name in ("pretrain", "study", "study_report"):
        sys.modules.pop(name, None)


@pytest.fixture
def pairs(cards) -> dict:
    """Each committed card's row and control."""
    return {f"{cards['card_name'](row)}.md": (row, control) for row, control in cards["best_rows"](ROWS)}


def leaves(data) -> list:
    if isinstance(data, dict | list):
        return [leaf for value in (data.values() if isinstance(data, dict) else data) for leaf in leaves(value)]
    return [data]


def block(text: str, language: str) -> str:
    return "\n".join(re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL))


def unfounded(text: str, figures: list, words: list[str]) -> list[str]:
    """Numbers of a text that are no figure, rounded to the digits shown, nor part of one of the words."""
    for word in sorted(words, key=len, reverse=True):
        text = text.replace(word, "")
    found = re.finditer(r"(?<![\w.])([-+]?\d[\d,]*(?:\.(\d+))?)( %|M)?(?![\w])", text)
    wrong = []
    for match in found:
        shown, digits = float(match[1].replace(",", "")), len(match[2] or "")
        scale = {" %": 100, "M": 1e-6, None: 1}[match[3]]
        if not any(abs(figure * scale - shown) <= 0.5000001 * 10**-digits for figure in figures):
            wrong.append(match[0])
    return wrong


def known(row: dict, control: dict) -> tuple[list, list[str]]:
    """The figures and words that may stand in a row's card."""
    stage = STUDY[row.get("stage") or ("pretrain" if row["start"] == "init" else "convert")]
    parent = [[r["loss"], r["tokens"]] for r in ROWS if r["loss"] == row["parent_loss"]]
    alike = [r for r in ROWS if all(r.get(key) == row.get(key) for key in ("family", "start", "parent_loss", "tokens"))]
    seeds = [r for r in alike if (r["name"], r["target_density"]) == (row["name"], row["target_density"])]
    ratios = [a["loss"] / b["loss"] - 1 for a in seeds for b in alike if b.get("relu") is False]
    found = [row, [control[key] for key in ("id", "loss", "loss_stderr", "tasks", "tokens")], parent, ratios, stage]
    found += [STUDY["training"], STUDY["sequence_length"], STUDY["families"][row["family"]]]
    found = leaves([*found, list(range(len(row["layers"])))])
    words = ["CC BY 4.0", "CDLA-Sharing-1.0", "arxiv.org/abs/2603.23198"]
    figures = [leaf for leaf in found if isinstance(leaf, int | float) and not isinstance(leaf, bool)]
    return figures, words + [leaf for leaf in found if isinstance(leaf, str)]


def test_they_are_drawn_from_the_committed_rows(cards, tmp_path):
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards" / "llama-no-longer-best-0.01.md").write_text("old")
    drawn = cards["write_cards"](ROWS, tmp_path / "cards")
    assert sorted(path.name for path in drawn) == [path.name for path in CARDS]
    assert sorted((tmp_path / "cards").iterdir()) == sorted(drawn)
    for path in CARDS:
        assert (tmp_path / "cards" / path.name).read_text() == path.read_text(), "run `make figures`"


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_every_figure_stands_in_a_row(path, pairs):
    row, control = pairs[path.name]
    text = path.read_text()
    assert f"| **{100 * (row['loss'] / control['loss'] - 1):+.2f} %** |" in text
    for figure in (row["loss"], row["loss_stderr"], control["loss"], control["loss_stderr"]):
        assert f"{figure:.4f}" in text
    width = STUDY["families"][row["family"]]["intermediate_size"]
    for layer in row["layers"]:
        assert f"| {layer['l0']:.1f} | {width} | {100 * layer['density']:.2f} % | {100 * layer['dead']:.2f} % |" in text
    for task, figures in row["tasks"].items():
        other = control["tasks"][task]
        mine = f"{figures['acc']:.4f} ± {figures['stderr']:.4f}"
        assert f"| {mine} | {other['acc']:.4f} ± {other['stderr']:.4f} |" in text

    figures, words = known(row, control)
    assert not unfounded(text, figures, [*words, path.stem])
    altered = text.replace(f"{row['loss']:.4f}", f"{row['loss'] + 0.5:.4f}")
    assert unfounded(altered, figures, [*words, path.stem])
    for other in (pair for name, pair in pairs.items() if name != path.name):
        assert unfounded(text, known(*other)[0], [*words, path.stem])


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_the_hub_reads_the_metadata(path, pairs):
    row, _ = pairs[path.name]
    card = ModelCard.load(path)
    assert (card.data.license, card.data.language, card.data.get("library_name")) == ("mit", "en", "transformers")
    assert set(card.data.tags) == {"hf_twell", "sparse", "relu"}
    assert card.data.model_name == path.stem
    shown = {(result.dataset_name, result.metric_type): result.metric_value for result in card.data.eval_results}
    tasks = row["tasks"]
    expected = {
        ("LAMBADA", "acc"): tasks["lambada"]["acc"],
        ("LAMBADA", "acc_stderr"): tasks["lambada"]["stderr"],
        ("ARC-Easy", "acc"): tasks["arc_easy"]["acc"],
        ("ARC-Easy", "acc_stderr"): tasks["arc_easy"]["stderr"],
        ("HellaSwag", "acc_norm"): tasks["hellaswag"]["acc"],
        ("HellaSwag", "acc_norm_stderr"): tasks["hellaswag"]["stderr"],
    }
    own = {kind: value for (name, kind), value in shown.items() if name.startswith("held-out")}
    assert own == pytest.approx({"loss": row["loss"], "loss_stderr": row["loss_stderr"]}, abs=1e-4)
    assert {key: value for key, value in shown.items() if key in expected} == pytest.approx(expected, abs=1e-4)
    assert len(shown) == len(expected) + len(own)


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_recipe_and_command(path, pairs):
    row, control = pairs[path.name]
    text = path.read_text()
    recipe = Recipe(output_dir="out", train=[], heldout=[], **yaml.safe_load(block(text, "yaml")))
    assert {key: getattr(recipe, key) for key in ("target_density", "trainable")} == {
        "target_density": row["target_density"],
        "trainable": row.get("trainable", "all"),
    }
    training = recipe.training
    assert set(training) <= TrainingArguments.__dataclass_fields__.keys()
    batch = training["per_device_train_batch_size"] * training["gradient_accumulation_steps"]
    assert training["max_steps"] * batch * recipe.sequence_length == row["tokens"]
    assert training["max_steps"] == row["last_log"]["step"]

    study = runpy.run_path(str(ROOT / "recipes" / "study.py"))
    command = shlex.split(block(text, "bash"))
    parts = command[command.index("--only") + 1 :]
    chosen = [run["id"] for run in study["plan"](STUDY) if any(part in run["id"] for part in parts)]
    assert {row["id"], control["id"]} <= set(chosen)
    assert sorted(chosen) == sorted(parts)
    assert f"{row['family']}/dense/seed0" in chosen  # the parent, or the control of what starts from nothing


def test_it_loads_as_it_says(tmp_path, monkeypatch):
    code = block(CARDS[0].read_text(), "python")
    folder = tmp_path / re.search(r'AutoModelForCausalLM.from_pretrained\("(.*?)"\)', code)[1]
    hf_twell.sparsify(AutoModelForCausalLM.from_pretrained(DEMO)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code, CARDS[0].name, "exec"), names)
    assert names["model"].config.hidden_act == "relu"


def test_the_best_row_is_the_nearest_to_its_own_control(cards):
    """Of those that met their target; a row of another kind, or without a control, is none."""
    chosen = {row["id"] for row, _ in cards["best_rows"](ROWS)}
    for row in ROWS:
        if row.get("target_density") not in (0.01, 0.005):
            assert row["id"] not in chosen

    best = next(
        row for row in ROWS if row["id"] in chosen and row["start"] == "parent" and row["target_density"] == 0.01
    )
    dense = [row for row in ROWS if row.get("relu") is False]

    def winners(*rows):
        return [row["name"] for row, _ in cards["best_rows"]([*dense, *rows])]

    worse = {**best, "name": "worse", "loss": best["loss"] + 0.001}
    assert winners(worse, best) == winners(best, worse) == [best["name"]]
    assert winners({**best, "density": 0.01101}, worse) == ["worse"]
    assert winners({**best, "density": 0.01099}, worse) == [best["name"]]
    assert winners({**best, "density": 0.002}, worse) == [best["name"]]
    assert winners({**best, "tokens": 1}) == winners({**best, "parent_loss": 1.0}) == []
    assert winners({**best, "name": "other", "loss": best["loss"] - 0.01}, best) == ["other"]
    assert winners({**best, "family": "other"}) == []


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"start": "parent"}, "SiLU swapped for ReLU at once, {}"),
        ({"start": "init"}, "ReLU from the first step, {}"),
        ({"start": "parent", "blend_steps": 0.5}, "SiLU blended into ReLU, {}"),
        (
            {"start": "parent", "distill": {"logits": 1.0}, "trainable": "ffn+lora"},
            "SiLU swapped for ReLU at once, {}, the dense parent as a teacher, feed-forward blocks and LoRA on the "
            "attention",
        ),
        (
            {"start": "parent", "trainable": "ffn"},
            "SiLU swapped for ReLU at once, {}, feed-forward blocks alone trained",
        ),
    ],
)
def test_the_method_in_words(cards, row, words):
    controlled = "an L1 term whose coefficient a controller finds for the target density"
    assert cards["_method"](row) == words.format(controlled)


@pytest.mark.slow
def test_a_missing_field_is_absent_from_the_card(cards, tmp_path):
    needed = cards["NEEDED"]
    for key in dict.fromkeys(key for row in ROWS for key in row):
        lacking = [{name: value for name, value in row.items() if name != key} for row in ROWS]
        nothing = [{**row, key: None} for row in ROWS]
        for rows in (lacking, nothing):
            drawn = cards["write_cards"](rows, tmp_path / "cards")
            assert bool(drawn) == (key not in needed | {"target_density", "relu"}), key
            for path in drawn:
                assert "None" not in path.read_text(), key
                assert ModelCard.load(path).data.eval_results
    bare = [{name: row[name] for name in (*needed, "target_density", "relu") if name in row} for row in ROWS]
    drawn = cards["write_cards"](bare, tmp_path / "cards")
    assert drawn
    for path in drawn:
        text = path.read_text()
        assert not any(word in text for word in ("## Sparsity", "LAMBADA,", "dead neurons", "GPU", "None"))
