"""What conversions of known parents have kept, and which of these parents another one is nearest to.

Source: the rows beside model_cards/smollm2, qwen2.5-coder-0.5b, qwen2.5-coder-1.5b and study, and those of
model_cards/inspected.jsonl. A test compares.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

# Of the loss, by the untrained swap to ReLU: between the demo model (15 %), which a short fine-tuning converts, and
# SmolLM2-135M-Instruct (171 %), which one of tens of millions of tokens does not (docs/converting.md).
MUCH = 0.5
ORACLE_DENSITY = 0.10  # at which the oracle's loss tells which known parent is nearest


class Known(NamedTuple):
    """What some conversions ended with: the least and the most of each figure.

    "tasks_kept": accuracy above chance in LAMBADA, ARC-Easy, ARC-Challenge and HellaSwag (their mean), over the better
    dense model's: the parent's, or that of one that was trained on, where there was one. "humaneval_kept": the share of
    the problems solved, over the parent's. "loss_added": the loss over that of a dense model which was trained on as
    long, minus 1.
    """

    what: str
    range: tuple[float, float]
    density: tuple[float, float]
    tokens: tuple[int, int]  # that the conversion read
    parents: int


class Parent(NamedTuple):
    """A parent that lost much by the swap: what the oracle adds to its loss, and its tasks kept at `NEAR`."""

    name: str
    oracle: float
    tasks_kept: tuple[float, float]


AFTER_MUCH = (
    Known("tasks_kept", (0.70, 0.84), (0.08, 0.11), (25_000_000, 350_000_000), 3),
    Known("tasks_kept", (0.61, 0.78), (0.04, 0.06), (26_000_000, 310_000_000), 3),
    Known("humaneval_kept", (0.00, 0.31), (0.04, 0.11), (29_000_000, 57_000_000), 2),
)
AFTER_LITTLE = (Known("loss_added", (0.012, 0.015), (0.01, 0.01), (26_000_000, 26_000_000), 2),)

# At about equal density and tokens.
NEAR = Known("tasks_kept", (0.70, 0.83), (0.10, 0.11), (25_000_000, 31_000_000), 3)
PARENTS = (
    Parent("Qwen2.5-Coder-0.5B-Instruct", 0.19, (0.79, 0.83)),
    Parent("Qwen2.5-Coder-1.5B-Instruct", 0.25, (0.74, 0.74)),
    Parent("SmolLM2-135M-Instruct", 0.56, (0.70, 0.70)),
)


def known_conversions(increase: float | None) -> list[dict[str, Any]]:
    """The known conversions of parents to whose loss the untrained swap adds as much, or as little, as `increase`.

    Args:
        increase: the loss with ReLU over the dense one, minus 1; None where it is not finite.

    Returns:
        The fields of `Known`, as dictionaries; none for None.
    """
    if increase is None:
        return []
    return [known._asdict() for known in (AFTER_MUCH if increase >= MUCH else AFTER_LITTLE)]


def nearest_parent(increase: float | None, oracle: Iterable[dict[str, float | None]]) -> dict[str, Any] | None:
    """The known parent whose oracle's loss at 10 % of the neurons is nearest, by ratio; of those that lose much alone.

    Args:
        increase: as in `known_conversions`.
        oracle: {"density", "increase"} of each density, as `hf_twell.inspection.conversion_cost` has them.

    Returns:
        The fields of `Parent`, and "density" and "tokens" of its conversions; None where the swap adds little, or the
        oracle was not asked at that density, or adds nothing that is finite.
    """
    added = next((row["increase"] for row in oracle if row["density"] == ORACLE_DENSITY), None)
    if increase is None or increase < MUCH or added is None or added <= 0:
        return None
    nearest = min(PARENTS, key=lambda parent: abs(math.log(added / parent.oracle)))
    return {**nearest._asdict(), "density": NEAR.density, "tokens": NEAR.tokens}


def in_words(increase: float, oracle: Iterable[dict[str, float | None]]) -> str:
    """What `known_conversions` and `nearest_parent` have, in a few sentences."""
    if increase < MUCH:
        (known,) = AFTER_LITTLE
        return (
            f"Conversions of {_COUNTS[known.parents]} such parents ended {_percent(known.range)} above the loss of a "
            f"dense model trained as long, at {_percent(known.density)} active neurons, after {_tokens(known.tokens)}."
        )
    *tasks, code = AFTER_MUCH
    kept = ", and ".join(
        f"{_percent(known.range)} at {_percent(known.density)} active neurons after {_tokens(known.tokens)}"
        for known in tasks
    )
    said = (
        f"Conversions of {_COUNTS[tasks[0].parents]} such parents kept, of four text tasks, {kept}. Of HumanEval those "
        f"of {_COUNTS[code.parents]} coders kept {_percent(code.range)}."
    )
    near = nearest_parent(increase, oracle)
    if near:
        said += (
            f" By the loss of its strongest {100 * ORACLE_DENSITY:g} % of neurons alone this model is nearest to "
            f"{near['name']}, which kept {_percent(near['tasks_kept'])} at {_percent(near['density'])} active neurons "
            f"after {_tokens(near['tokens'])}; an order of three parents is little evidence (docs/inspect.md)."
        )
    return said


_COUNTS = {2: "two", 3: "three"}


def _percent(shares: tuple[float, float]) -> str:
    return _span(f"{100 * share:.3g}" for share in shares) + " %"


def _tokens(tokens: tuple[int, int]) -> str:
    return _span(f"{count / 1e6:.0f}M" for count in tokens) + " tokens"


def _span(limits: Iterable[str]) -> str:
    return " to ".join(dict.fromkeys(limits))
