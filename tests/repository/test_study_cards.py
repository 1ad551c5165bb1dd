"""The example card of each study: readable by the Hub, and its figures are its row's."""

import json
import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from hf_twell.recipe.schema import Recipe
from tests.paths import ROOT

STUDIES = ROOT / "model_cards"
ROWS = {
    "smollm2/pretrained.jsonl": "count/0.098/350M/seed0",
    "study/study.jsonl": "llama/swap + L1 early long/0.01/seed0",
}


@pytest.fixture(params=ROWS.items(), ids=ROWS)
def card_and_row(request) -> tuple[Path, dict]:
    rows, id_ = request.param
    (row,) = (row for row in map(json.loads, (STUDIES / rows).open()) if row["id"] == id_)
    return (STUDIES / rows).with_name("card.md"), row


def test_figures_and_recipe_are_the_rows(card_and_row):
    path, row = card_and_row
    text = path.read_text()
    width = round(row["layers"][0]["l0"] / row["layers"][0]["density"])
    for layer in row["layers"]:
        assert f"| {layer['l0']:.1f} | {width} | {100 * layer['density']:.2f} % | {100 * layer['dead']:.2f} % |" in text
    scores = [(task["acc"], task["stderr"]) for task in row["tasks"].values()]
    losses = [row["losses"], row["loss_stderr"]] if "losses" in row else [{0: row["loss"]}, {0: row["loss_stderr"]}]
    for value, error in [*scores, *zip(*(each.values() for each in losses), strict=True)]:
        assert f" | {value:.4f} ± {error:.4f} | " in text
    recipe = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
    Recipe(output_dir="out", train=[], heldout=[], **recipe)
    assert recipe["target_density"] == row["target_density"]
    training = recipe["training"]
    step = training["per_device_train_batch_size"] * training["gradient_accumulation_steps"] * recipe["sequence_length"]
    assert training["max_steps"] * step == pytest.approx(row["tokens"], rel=1e-4)


def test_the_hub_reads_the_metadata(card_and_row):
    path, row = card_and_row
    shown = {
        (found.dataset_name, found.metric_type): found.metric_value for found in ModelCard.load(path).data.eval_results
    }
    assert shown["HellaSwag", "acc_norm"] == pytest.approx(row["tasks"]["hellaswag"]["acc"], abs=1e-4)
    assert sum(kind == "loss" for _, kind in shown) == len(row.get("losses", [1]))
