"""What rows of a conversion study mean: beside which control one stands, and what more tokens would buy."""

import math
import statistics


def control_of(row: dict, rows: list[dict]) -> dict:
    """The best dense row of the same family and start that saw the same tokens; of the same seed where there is one."""
    alike = ("family", "start", "parent_loss", "tokens")
    same = [r for r in rows if r.get("relu") is False and all(r.get(key) == row.get(key) for key in alike)]
    same = [r for r in same if r["seed"] == row["seed"]] or same
    return min(same, key=lambda r: r["loss"])


def above_control(row: dict, rows: list[dict]) -> float:
    """By how much the loss is above its control's, in percent."""
    return 100 * (row["loss"] / control_of(row, rows)["loss"] - 1)


def power_of(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(power, log of factor) of excess = factor * T ** power through (T, excess), by least squares."""
    logarithms = [[math.log(value) for value in axis] for axis in zip(*points, strict=True)]
    return tuple(statistics.linear_regression(*logarithms))


def tokens_for(excess: float, points: list[tuple[float, float]]) -> float:
    """The tokens T of that excess, by the power of `points`."""
    power, factor = power_of(points)
    return math.exp((math.log(excess) - factor) / power)
