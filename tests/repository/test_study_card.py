"""The example cards of studies: readable by the Hub, and their figures are those of their rows."""

import json
import re

import pytest
import yaml
from huggingface_hub import ModelCard

from hf_twell.models.card_scores import FAR_LESS
from hf_twell.recipe.schema import Recipe
from tests.paths import ROOT
from tests.study_cards import RUNS, card_of, of_study, path_of, rows_of

STUDY = ROOT / "model_cards" / "smollm2"
CARD = STUDY / "card.md"
ROW = next(row for row in map(json.loads, (STUDY / "pretrained.jsonl").open()) if row["id"] == "count/0.098/350M/seed0")


def test_figures_and_recipe_are_the_rows():
    row = ROW
    text = CARD.read_text()
    width = round(row["layers"][0]["l0"] / row["layers"][0]["density"])
    for layer in row["layers"]:
        assert f"| {layer['l0']:.1f} | {width} | {100 * layer['density']:.2f} % | {100 * layer['dead']:.2f} % |" in text
    scores = [(task["acc"], task["stderr"]) for task in row["tasks"].values()]
    losses = zip(row["losses"].values(), row["loss_stderr"].values(), strict=True)
    for value, error in [*scores, *losses]:
        assert f" | {value:.4f} ± {error:.4f} | " in text
    recipe = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
    Recipe(output_dir="out", train=[], heldout=[], **recipe)
    assert recipe["target_density"] == row["target_density"]
    training = recipe["training"]
    step = training["per_device_train_batch_size"] * training["gradient_accumulation_steps"] * recipe["sequence_length"]
    assert training["max_steps"] * step == pytest.approx(row["tokens"], rel=1e-4)


def test_the_hub_reads_the_metadata():
    row = ROW
    shown = {
        (found.dataset_name, found.metric_type): found.metric_value for found in ModelCard.load(CARD).data.eval_results
    }
    assert shown["HellaSwag", "acc_norm"] == pytest.approx(row["tasks"]["hellaswag"]["acc"], abs=1e-4)
    assert sum(kind == "loss" for _, kind in shown) == len(row["losses"])


@pytest.mark.parametrize("folder", RUNS)
def test_cards_are_what_the_package_makes_of_the_rows(folder):
    """Else: python -m tests.study_cards."""
    text, (row, parent) = path_of(folder).read_text(), rows_of(folder)
    assert text == card_of(folder)
    assert f"| tokens read, steps times their size | {row['training']['tokens']:,} |" in text
    (own, its) = (each["written"]["humaneval_instruct"]["pass@1,create_test"]["value"] for each in (row, parent))
    assert f"fewer rows than its dense parent: {100 * own / its:.0f} % as many in humaneval_instruct." in text
    data = ModelCard.load(path_of(folder)).data
    assert data.base_model.startswith("Qwen/Qwen2.5-Coder-")


def test_what_cards_say_of_written_answers_is_a_rows():
    row, parent = rows_of("qwen2.5-coder-1.5b")
    (own, its) = (each["written"]["humaneval_instruct"]["pass@1,create_test"]["value"] for each in (row, parent))
    kept = of_study("report").kept(row, [row, parent])
    told = [
        f"{100 * share:.{digits}f}" for share, digits in ((row["training"]["density"], 1), (own / its, 0), (kept, 0))
    ]
    assert re.findall(r"([\d.]+) %", FAR_LESS) == told
