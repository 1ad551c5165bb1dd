"""What conversions of known parents have kept: the table is what the repository's rows say, and is said in words."""

import statistics

import pytest

from hf_twell.inspection.known_conversions import (
    AFTER_LITTLE,
    AFTER_MUCH,
    MUCH,
    NEAR,
    ORACLE_DENSITY,
    PARENTS,
    Known,
    in_words,
    known_conversions,
    nearest_parent,
)
from tests.quoted_figures import (
    EARLY,
    INSPECTED,
    QWEN,
    QWEN_LARGER,
    QWEN_OWN_TEXT,
    SHARED,
    SMOLLM2,
    STUDY,
    kept_of_better,
    qwen,
    smollm2,
    solved,
)
from tests.quoting import rows
from tests.study_rows import above_control

CONTROLS = {QWEN: ["dense-26M"], QWEN_OWN_TEXT: ["dense-29M"], QWEN_LARGER: []}


def conversions() -> list[tuple[str, dict, dict]]:
    """(parent, a row, what it kept) of each conversion by a count, of a parent pretrained for long, that has tasks."""
    dense, made = (smollm2("parent"), smollm2("dense/150M/seed0")), []
    for one in rows(SMOLLM2, term="count") + rows(SHARED, term="count"):
        if "hellaswag" in one.get("tasks", {}):
            made.append(("smollm2", one, {"tasks_kept": kept_of_better(one, *dense) / 100}))
    for path, controls in CONTROLS.items():
        parent = qwen("parent", QWEN if path == QWEN_OWN_TEXT else path)  # of both the same, and once its HumanEval
        better = [parent, *(qwen(run, path) for run in controls)]
        for run in {each["run"] for each in rows(path)} - {"parent", "books", *controls}:
            one = qwen(run, path)
            said = {"tasks_kept": kept_of_better(one, *better) / 100}
            if "humaneval_instruct" in one.get("written", {}):
                said["humaneval_kept"] = solved(one["written"]) / solved(parent["written"])
            made.append((path.split("/")[1], {**one, **one["training"]}, said))
    return made


def found(what: str, known: Known, most_tokens: int | None = None) -> list[tuple[str, int, float]]:
    """(parent, tokens, what was kept), rounded, of the rows whose density rounds to a percent that is in `known`."""
    least, most = (round(100 * density) for density in known.density)
    return [
        (parent, round(one["tokens"], -6), round(said[what], 2))
        for parent, one, said in conversions()
        if what in said
        and least <= round(100 * one["density"]) <= most
        and (most_tokens is None or round(one["tokens"], -6) <= most_tokens)
    ]


def of_rows(known: Known, most_tokens: int | None = None) -> Known:
    """`known` anew, from the rows."""
    parents, tokens, kept = zip(*found(known.what, known, most_tokens), strict=True)
    return known._replace(range=(min(kept), max(kept)), tokens=(min(tokens), max(tokens)), parents=len(set(parents)))


@pytest.mark.parametrize("known", AFTER_MUCH, ids=lambda known: f"{known.what}-{known.density[0]}")
def test_what_was_kept_is_as_the_rows(known):
    assert of_rows(known) == known


def test_the_parents_beside_each_other_are_as_the_rows():
    """Their conversions at equal density and tokens, and what the oracle added before any training."""
    assert of_rows(NEAR, NEAR.tokens[1]) == NEAR
    kept: dict[str, list[float]] = {}
    for parent, _, share in found("tasks_kept", NEAR, NEAR.tokens[1]):
        kept.setdefault(parent, []).append(share)
    added: dict[str, list[float]] = {}
    for one in rows(INSPECTED):
        (at,) = (each["increase"] for each in one["oracle"] if each["density"] == ORACLE_DENSITY)
        added.setdefault(one["model"].lower(), []).append(at)
    for parent in PARENTS:
        (ends,) = (shares for folder, shares in kept.items() if parent.name.lower().startswith(folder))
        assert parent.tasks_kept == (min(ends), max(ends))
        (oracle,) = (shares for model, shares in added.items() if model.startswith(parent.name.lower()))
        assert parent.oracle == round(statistics.mean(oracle), 2)
    assert len(PARENTS) == NEAR.parents == len(kept) == len(added)


def test_what_a_short_pretraining_costs_is_as_the_rows():
    (known,) = AFTER_LITTLE
    found = rows(STUDY, name=EARLY[0], target_density=EARLY[1])
    above = [round(above_control(each, rows(STUDY)) / 100, 3) for each in found]
    assert known.range == (min(above), max(above))
    assert {round(each["density"], 2) for each in found} == set(known.density)
    assert {round(each["tokens"], -6) for each in found} == set(known.tokens)
    assert len({each["family"] for each in found}) == known.parents


def test_the_limit_lies_between_the_known_parents():
    swapped = [each["loss_before"] / each["parent_loss"] - 1 for each in rows(STUDY, name=EARLY[0])]
    inspected = [each["relu"]["increase"] for each in rows(INSPECTED)]
    assert max(swapped) < MUCH < min(inspected)


def test_parents_that_lose_much_by_relu_and_others():
    """The table by its words and its fields."""
    said, fields = in_words(1.7, []), known_conversions(1.7)
    assert "70 to 84 % at 8 to 11 % active neurons after 25M to 350M tokens" in said
    assert [each["what"] for each in fields] == ["tasks_kept", "tasks_kept", "humaneval_kept"]
    assert fields[0]["range"] == AFTER_MUCH[0].range
    said = in_words(0.1, [])
    assert "1.2 to 1.5 % above the loss" in said
    assert "at 1 % active neurons, after 26M tokens" in said
    assert known_conversions(0.1) == [AFTER_LITTLE[0]._asdict()]
    assert known_conversions(None) == []


@pytest.mark.parametrize(("added", "index"), [(0.01, 0), (0.17, 0), (0.24, 1), (0.45, 2), (9.0, 2)])
def test_the_nearest_parent(added, index):
    oracle = [{"density": 0.2, "increase": 0.1}, {"density": 0.1, "increase": added}]
    near = nearest_parent(1.7, oracle)
    assert near == {**PARENTS[index]._asdict(), "density": NEAR.density, "tokens": NEAR.tokens}
    assert f"nearest to {PARENTS[index].name}, which kept" in in_words(1.7, oracle)


@pytest.mark.parametrize(
    ("swap", "oracle"),
    [
        (0.1, [{"density": 0.1, "increase": 0.2}]),
        (None, [{"density": 0.1, "increase": 0.2}]),
        (1.7, [{"density": 0.2, "increase": 0.2}]),
        (1.7, [{"density": 0.1, "increase": None}]),
        (1.7, [{"density": 0.1, "increase": -0.01}]),
    ],
)
def test_no_parent_is_near(swap, oracle):
    assert nearest_parent(swap, oracle) is None
    assert swap is None or "nearest" not in in_words(swap, oracle)
