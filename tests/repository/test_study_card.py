"""The example card of a study: readable by the Hub, and its figures are its row's."""

import json
import re

import pytest
import yaml
from huggingface_hub import ModelCard

from hf_twell.recipe.schema import Recipe
from tests.paths import ROOT

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
