"""What an inspection says in words, from figures written by hand: each effect, its opposite and its absence."""

import copy
import re

import pytest

from hf_twell.inspection.report.findings import findings, headline, savings_sentence


def layer(l0: float, dead: int = 10, always: int = 1) -> dict:
    return {
        "intermediate_size": 1000,
        "l0": l0,
        "effective_neurons": 2 * l0,
        "density": l0 / 1000,
        "unions": {"16": 4 * l0 / 1000, "64": 10 * l0 / 1000, "128": 12 * l0 / 1000},
        "dead": dead / 1000,
        "dead_neurons": dead,
        "always_on_neurons": always,
        "distinct": {"64": {"neurons": 10 * l0, "if_independent": 20 * l0, "runs": 3}},
        "hottest_share": {"10%": 0.6},
        "magnitude_share": {"1%": 0.3, "5%": 0.5, "10%": 0.8},
    }


def labelled(*layers: dict) -> list[dict]:
    return [{**layer, "layer": index, "label": str(index)} for index, layer in enumerate(layers)]


def place(first: int, last: int, tokens: int, l0: float) -> dict:
    return {"first": first, "last": last, "tokens": tokens, "l0": [l0 - 5, l0 + 5], "effective_neurons": [1.0, 3.0]}


@pytest.fixture
def result() -> dict:
    seen = [(1, 2, 60, 40.0), (3, 9, 50, 20.0), (10, 29, 49, 400.0)]
    return {
        "sparse": True,
        "l0": 25.0,
        "density": 0.025,
        "unions": {"16": 0.1, "64": 0.25, "128": 0.3},
        "tokens": 5000,
        "layers": labelled(layer(10, 620), layer(20), layer(40, 501, always=4), layer(30, 500)),
        "positions": [
            *(place(at, at, 10, 45.0) for at in range(4)),
            place(4, 63, 600, 500.0),
            *(place(64, 95, 30, 20.0), place(96, 127, 10, 30.0)),
        ],
        "vocabulary": {
            "by_count": [
                {"first": first, "last": last, "tokens": tokens, "l0": l0, "effective_neurons": l0}
                for first, last, tokens, l0 in seen
            ]
        },
    }


def titles(result) -> list[str]:
    return [found["title"] for found in findings(result)]


def test_what_stands_out(result):
    """The effects and their figures."""
    assert headline(result).startswith("25 of 1,000 neurons (2.5 %) fire for a token; layer 2 is densest (4.0 %)")
    found = {found["title"]: re.findall(r"\d[\d,.]*\d|\d", found["text"]) for found in findings(result)}
    assert found == {
        "First tokens are busier": ["4", "45", "64", "22.5", "2.00"],
        "Layer 2 is busiest": ["2", "4.0", "0", "1.0"],
        "2 of 4 layers are mostly dead": ["0", "2", "5,000", "7"],
        "Rare tokens are busier": ["1", "2", "40", "3", "9", "20", "2.0"],
        "Neighbouring tokens share neurons": ["64", "250", "25", "64", "500", "1,600"],
        "Few neurons do most of the firing": ["60"],
        "A few neurons carry most of a token": ["1", "5", "10", "30", "50", "80"],
    }


def test_the_opposite_is_said(result):
    for row in result["positions"][:4]:
        row["l0"] = [10.0, 10.0]
    result["layers"] = labelled(layer(30, 120), layer(20), layer(25), layer(24))
    for one in result["layers"]:
        one["distinct"]["64"]["neurons"] = 0.96 * one["distinct"]["64"]["if_independent"]
        one["hottest_share"]["10%"], one["magnitude_share"]["10%"] = 0.49, 0.74
    result["vocabulary"]["by_count"][0]["l0"] = 10.0
    assert titles(result) == [
        "First tokens are quieter",
        "Layer 0 is busiest",
        "No layer is mostly dead",
        "Rare tokens are quieter",
        "Neighbouring tokens share hardly more neurons than strangers",
        "Firing is spread over many neurons",
        "A token's activity is spread widely",
    ]
    assert findings(result)[2]["text"].startswith("Most dead neurons: 120 in layer 0 (12 %), on 5,000 tokens")


def test_an_effect_that_is_absent_is_said_to_be(result):
    for row in result["positions"]:
        row["l0"] = [22.0, 24.0]
    result["layers"] = labelled(layer(30), layer(28), layer(27), layer(26))
    for row in result["vocabulary"]["by_count"]:
        row["l0"] = 20.0
    assert titles(result)[:4] == [
        "First tokens are like later ones",
        "Layers are about equally busy",
        "No layer is mostly dead",
        "Rare tokens are like common ones",
    ]


def test_what_cannot_be_known_is_left_out(result):
    short = {**copy.deepcopy(result), "positions": result["positions"][:5], "layers": result["layers"][:1]}
    short["layers"][0]["distinct"]["64"] = {"neurons": None, "if_independent": 3.0, "runs": 0}
    short["unions"] = {"16": 0.1, "64": None, "128": None}
    short["vocabulary"]["by_count"] = short["vocabulary"]["by_count"][:1]
    assert [title.split()[0] for title in titles(short)] == ["1", "Few", "A"]
    assert headline(short) == "25 of 1,000 neurons (2.5 %) fire for a token."


def test_a_dense_model_is_told_by_effective_neurons(result):
    dense = {**result, "sparse": False, "l0": 1000.0}
    assert headline(dense).startswith("This model is dense: 1,000 of 1,000 neurons")
    assert "have 2 effective neurons" in findings(dense)[0]["text"]
    assert not any("firing" in title or "Neighbouring" in title for title in titles(dense))


def test_the_busiest_layer_may_lie_beside_the_quietest(result):
    result["layers"] = labelled(layer(190), layer(360), layer(300), layer(290))
    assert findings(result)[1]["text"].endswith("(36 % of its neurons), layer 0 fewest (19 %).")


def test_what_sparsity_buys():
    total = {
        "decode": {"dense_ms": 4.0, "sparse_ms": 1.0, "speedup": 4.0},
        "prefill": {"dense_ms": 250.0, "sparse_ms": 125.0, "speedup": 2.0},
    }
    savings = {"relu": True, "backend": "cpu", "measured": False, "total": total, "too_small": []}
    savings["tokens"] = {"decode": 1, "prefill": 1024}
    for measured, how in ((False, "predicted, not measured"), (True, "measured")):
        said = savings_sentence({**savings, "measured": measured})
        assert f"({how}): 1 ms instead of 4 ms (4.00x) in decode" in said
        assert "125 ms instead of 250 ms (2.00x) in prefill (1,024 tokens)" in said
    assert "keep plain matmuls in decode at any density" in savings_sentence({**savings, "too_small": ["decode"]})
    assert savings_sentence({**savings, "backend": "reference"}).startswith("Nothing here: no compiled backend")
    assert savings_sentence({**savings, "relu": False}).startswith("Nothing yet: the activation is zero nowhere")
