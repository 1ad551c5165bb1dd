"""Figures of several turns in a median and a range; sparse beside dense, and whether they differ by more than turns."""

import statistics
from collections.abc import Iterable, Sequence

SETTING = ("measured", "concurrency", "prompt_tokens", "new_tokens")  # what two rows to compare have in common


def summary(values: Iterable[float]) -> dict:
    """Of one figure in each turn, to four digits: its median, least and most, and the turns themselves."""
    turns = [float(f"{value:.4g}") for value in values]
    return {"median": float(f"{statistics.median(turns):.4g}"), "min": min(turns), "max": max(turns), "turns": turns}


def overlap(one: dict, other: dict) -> bool:
    """Whether the ranges of two summaries share a value: a ratio of their medians may then be chance."""
    return one["min"] <= other["max"] and other["min"] <= one["max"]


def ratio(sparse: dict, dense: dict) -> float:
    """Of their medians."""
    return sparse["median"] / dense["median"]


def pairs(rows: Sequence[dict]) -> list[tuple[dict, dict | None, dict | None]]:
    """(setting, sparse row, dense row) for each setting and round; a side that was not measured is None.

    After several rounds each setting has one more, of all their turns, whose setting's round is "all".
    """
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        found.setdefault((*(row[key] for key in SETTING), row["round"]), {})[row["side"]] = row
    lines = []
    for setting in dict.fromkeys(key[:-1] for key in found):
        rounds: dict[int | str, dict] = {key[-1]: sides for key, sides in found.items() if key[:-1] == setting}
        if len(rounds) > 1:
            names = dict.fromkeys(side for each in rounds.values() for side in each)
            rounds["all"] = {side: _pooled([each[side] for each in rounds.values() if side in each]) for side in names}
        for number, sides in rounds.items():
            named = dict(zip((*SETTING, "round"), (*setting, number), strict=True))
            lines.append((named, sides.get("sparse"), sides.get("dense")))
    return lines


def _pooled(rows: list[dict]) -> dict:
    """A row of the turns of several."""
    names = [name for name, value in rows[0].items() if isinstance(value, dict) and "turns" in value]
    return rows[0] | {name: summary([turn for row in rows for turn in row[name]["turns"]]) for name in names}
