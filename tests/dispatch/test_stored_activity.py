"""What a config's `twell` entry tells the choice: its density, and the union of 128 tokens, known or estimated."""

import functools
import json
import math

import pytest

from hf_twell.dispatch.activity import Activity, stored_activity, union_of_neighbours
from hf_twell.dispatch.limits import limit
from hf_twell.serving.vllm_plugin.density import known_activity
from tests.paths import ROOT

CARDS = ROOT / "model_cards"


@functools.cache
def conversions() -> list[dict]:
    """The layers of every conversion whose unions were measured; those of dense parents are all active."""
    files = [*CARDS.glob("qwen*/rows.jsonl"), CARDS / "smollm2" / "shared.jsonl"]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    trained = [row.get("training", row) for row in rows]
    converted = [row for row in trained if row.get("layers") and row["density"] < 0.99]
    assert len(converted) == 8
    return [layer for row in converted for layer in row["layers"]]


def errors(layers: list[dict], run: str, unions: str = "union") -> list[float]:
    """Of the estimate by one run's union alone, in points."""
    estimates = [union_of_neighbours(layer["density"], {run: layer[unions][run]}) for layer in layers]
    assert None not in estimates
    return [100 * (found - layer[unions]["128"]) for found, layer in zip(estimates, layers, strict=True)]


@pytest.mark.parametrize(
    ("run", "told"), [("64", "1.0 point (root mean square) and at most 2.8"), ("16", "2.9 and at most 8.3")]
)
def test_the_estimate_is_as_near_as_its_docstring_says(run, told):
    found = errors(conversions(), run)
    assert len(found) == 220
    away = math.sqrt(sum(error**2 for error in found) / len(found))
    words = " ".join((union_of_neighbours.__doc__ or "").split())
    assert told in words
    assert [f"{away:.1f}", f"{max(map(abs, found)):.1f}"] == [word for word in told.split() if "." in word]


def test_of_routed_experts_it_is_too_low():
    rows = [json.loads(line) for line in (CARDS / "experts" / "rows.jsonl").read_text().splitlines()]
    layers = [layer for row in rows if row["sparsity"]["density"] < 1 for layer in row["sparsity"]["layers"]]
    found = errors(layers, "64", "unions")
    assert sum(found) < 0
    words = " ".join((union_of_neighbours.__doc__ or "").split())
    assert f"too low, by up to {-min(found):.1f} points by the union of 64" in words


def test_one_that_is_known_stays_and_the_longest_run_tells_most():
    assert union_of_neighbours(0.05, {"16": 0.2, "64": 0.3, "128": 0.36}) == 0.36
    of_64 = union_of_neighbours(0.05, {"64": 0.3})
    assert union_of_neighbours(0.05, {"16": 0.2, "64": 0.3, "128": None}) == of_64
    assert 0.3 < of_64 < 0.4
    assert union_of_neighbours(0.05, {"512": 0.4}) < 0.4, "of fewer tokens it is smaller"


@pytest.mark.parametrize("unions", [{}, {"128": None}, {"8": 0.2}, {"11": 0.2}])
def test_nothing_is_made_of_runs_that_say_too_little(unions):
    assert union_of_neighbours(0.05, unions) is None


@pytest.mark.parametrize(("density", "union"), [(0.0, 0.0), (0.0, 0.1), (0.1, 0.1), (0.2, 1.0), (1.0, 1.0)])
def test_where_odds_say_nothing_the_run_speaks_for_itself(density, union):
    assert union_of_neighbours(density, {"64": union}) == union


def test_each_block_gets_its_own():
    unions = {"64": [0.3, 0.15]}
    assert stored_activity([0.05, 0.02], unions) == [
        Activity(0.05, union=union_of_neighbours(0.05, {"64": 0.3})),
        Activity(0.02, union=union_of_neighbours(0.02, {"64": 0.15})),
    ]
    assert stored_activity([0.05, 0.02], None) == [Activity(0.05), Activity(0.02)]


def test_vllm_gets_the_same_and_no_unions_beside_a_density_that_is_given():
    entry = {"density": [0.05, 0.02], "unions": {"64": [0.3, 0.15]}}
    assert str(limit("kNeighbours")) not in entry["unions"]
    known, _ = known_activity(None, entry, 2)
    assert known == stored_activity(entry["density"], entry["unions"])
    given, source = known_activity({"hf_twell": {"density": 0.01}}, entry, 2)
    assert (given, source) == ([Activity(0.01)] * 2, "additional_config['hf_twell']['density']")
