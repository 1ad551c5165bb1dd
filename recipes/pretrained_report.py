"""The table and plots of pretrained_study.py, drawn from its rows and nothing else.

python recipes/pretrained_report.py DIR      # DIR holds pretrained.jsonl; writes study.md and study.png
"""

import json
import math
import statistics
import sys
from pathlib import Path

import matplotlib
from study_report import finish_density_axis, styles_of

from hf_twell.files.tables import markdown_table, percent

TASKS = ("lambada", "arc_easy", "arc_challenge", "hellaswag")
ASKED = 0.02  # the excess for which a fit over tokens says how many it would take
CHANCE = (0 + 0.25 + 0.25 + 0.25) / 4  # what guessing comes to in the mean of the four


def parent_of(rows: list[dict]) -> dict | None:
    """The row that was only scored."""
    return next((row for row in rows if "start" not in row), None)


def control_of(rows: list[dict], row: dict | None = None) -> dict | None:
    """The parent trained on as it is: of several, the one that read the number of tokens nearest to `row`'s.

    One that a shorter one beats in the mean of the losses does not count: whoever trains would have stopped there.
    Without a row, or with one that read nothing, the one that read most of those that count.
    """
    controls, lowest = [], math.inf
    for each in sorted((each for each in rows if each.get("relu") is False), key=lambda each: each["tokens_read"]):
        mean = statistics.mean(each["losses"].values())
        if mean <= lowest:
            controls, lowest = [*controls, each], mean
    if row is None or not row["tokens_read"]:
        return controls[-1] if controls else None
    return min(controls, key=lambda each: abs(math.log(each["tokens_read"] / row["tokens_read"])), default=None)


def excess(row: dict, rows: list[dict]) -> float | None:
    """Mean over the texts of loss / (the lower of the parent's and the control's) - 1; None before both are there."""
    parent, control = parent_of(rows), control_of(rows, row)
    if parent is None or control is None:
        return None
    shares = [loss / min(parent["losses"][text], control["losses"][text]) - 1 for text, loss in row["losses"].items()]
    return sum(shares) / len(shares)


def kept(row: dict, rows: list[dict], accuracy: str = "acc") -> float | None:
    """(mean of the four tasks - 0.1875) / (the control's mean - 0.1875).

    With "first_acc" on the first rows of each task alone (`study_measure.FIRST_ROWS`), or all that it has.
    None before both are scored, and where they were scored on other numbers of rows.
    """
    control = control_of(rows, row)
    if control is None or any(_rows_of(row, task) is None for task in TASKS):
        return None
    if any(_rows_of(row, task) != _rows_of(control, task) for task in TASKS):
        return None
    scores = [[each["tasks"][task] for task in TASKS] for each in (row, control)]
    if accuracy != "acc" and not all(any(accuracy in score for score in of_one) for of_one in scores):
        return None
    mean, ceiling = (sum(score.get(accuracy, score["acc"]) for score in of_one) / len(TASKS) for of_one in scores)
    return (mean - CHANCE) / (ceiling - CHANCE)


def table(rows: list[dict]) -> str:
    """A Markdown table, one line a row."""
    texts = list(dict.fromkeys(text for row in rows for text in row["losses"]))
    head = ["run", "target", "seed", "Mtokens in all phases", "density", "density of the layers"]
    chats = any("chats_loss" in row for row in rows)  # of which `excess` knows nothing
    head += [*(f"loss: {text}" for text in texts), "excess", *(["loss: the parent's conversations"] if chats else [])]
    head += [*TASKS, "kept", "kept, first rows", "minutes"]
    lines = []
    for row in rows:
        above, shares = excess(row, rows), (kept(row, rows), kept(row, rows, "first_acc"))
        layers = [layer["density"] for layer in row["layers"]]
        scores = [row["tasks"].get(task) for task in TASKS]
        lines.append(
            [
                row["name"],
                f"{row['target_density']:g}" if "target_density" in row else None,
                row.get("seed"),
                f"{row['tokens_read'] / 1e6:.1f}",
                percent(row["density"]),
                f"{percent(min(layers))} to {percent(max(layers))}",
                *(f"{row['losses'][text]:.4f}" if text in row["losses"] else None for text in texts),
                None if above is None else f"{100 * above:+.2f} %",
                *([f"{row['chats_loss']:.4f}" if "chats_loss" in row else None] if chats else []),
                *(score and f"{100 * score['acc']:.1f} ± {100 * score['stderr']:.1f}" for score in scores),
                *(None if share is None else f"{100 * share:.1f} %" for share in shares),
                f"{row['minutes']:.1f}",
            ]
        )
    return markdown_table(head, lines)


def token_fits(rows: list[dict]) -> list[dict]:
    """How a method's excess falls with the tokens T of its conversion, excess = factor * (T / 1M) ** power.

    Least squares in logarithms, for each name and held-out density, to one digit (0.098 and 0.104 are 0.1), of which
    three different T were run; `needed` is the T of an excess of `ASKED`, and None where it does not fall.
    """
    found: dict[tuple, list] = {}
    for row in (row for row in rows if row.get("target_density") is not None and row.get("tokens")):
        above = excess(row, rows)
        if above is not None and above > 0:
            density = float(f"{row['density']:.1g}")
            found.setdefault((row["name"], density), []).append((row["tokens"] / 1e6, above, row["density"]))
    fits = []
    for (name, _), of_density in found.items():
        points, densities = [each[:2] for each in of_density], [each[2] for each in of_density]
        if len({tokens for tokens, _ in points}) < 3:
            continue
        power, log = statistics.linear_regression(
            *([math.log(value) for value in axis] for axis in zip(*points, strict=True))
        )
        needed = 1e6 * math.exp((math.log(ASKED) - log) / power) if power < 0 else None
        fits.append(
            {
                "name": name,
                "density": statistics.mean(densities),
                "points": sorted(points),
                "factor": math.exp(log),
                "power": power,
            }
            | {"needed": needed}
        )
    return fits


def fit_lines(rows: list[dict]) -> str:
    """The fits in words, a line each."""
    lines = []
    for fit in token_fits(rows):
        tokens = ", ".join(f"{tokens:g}" for tokens in sorted({tokens for tokens, _ in fit["points"]}))
        needed = (
            "does not fall" if fit["needed"] is None else f"{100 * ASKED:g} % would take {fit['needed'] / 1e6:,.0f}M"
        )
        lines.append(
            f"- {fit['name']} at about {fit['density']:.0%}, {tokens} million tokens of its own: excess "
            f"{100 * fit['factor']:.1f} % x (T / 1M)^{fit['power']:.2f}; {needed}\n"
        )
    return "\n" + "".join(lines) if lines else ""


def draw(rows: list[dict], path: Path) -> None:
    """Excess and kept, in percent, against density, with control and parent as lines; with fits, excess over T besides.

    A marker for each method, and a colour for how many tokens were read in all phases.
    """
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import LogLocator, NullFormatter

    sparse = [row for row in rows if "start" in row and "average" not in row and row.get("relu") is not False]
    names = list(dict.fromkeys(row["name"] for row in sparse))
    styles = styles_of(names)
    fits = token_fits(rows)
    count = 3 if fits else 2
    figure, axes = plt.subplots(1, count, figsize=(6.5 * count, 4.6), layout="constrained")
    control = control_of(rows)
    panels = (
        (excess, "loss above the better of parent and control (%)"),
        (kept, "task accuracy kept above chance (%)"),
    )
    read = [row["tokens_read"] / 1e6 for row in sparse]
    colors = LogNorm(min(read), max(read)) if read else None
    points = None
    for axis, (figure_of, words) in zip(axes, panels, strict=False):
        for dense, label, style in ((control, "dense control", ":"), (parent_of(rows), "parent", "--")):
            if dense is not None and (level := figure_of(dense, rows)) is not None:
                axis.axhline(100 * level, color="gray", linewidth=0.8, linestyle=style, label=label)
        for name in names:
            found = [(row, figure_of(row, rows)) for row in sparse if row["name"] == name]
            found = [(100 * row["density"], 100 * of, row["tokens_read"] / 1e6) for row, of in found if of is not None]
            if found:
                densities, values, tokens = zip(*found, strict=True)
                marker = {"marker": styles[name]["marker"], "label": name, "cmap": "viridis_r", "norm": colors}
                points = axis.scatter(densities, values, c=tokens, s=28, edgecolors="black", linewidths=0.4, **marker)
        finish_density_axis(axis, "no row to compare with parent and control yet")
        axis.set(ylabel=words)
        if axis.collections:
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_minor_formatter(NullFormatter())
    if points is not None:
        bar = figure.colorbar(points, ax=axes[1], label="tokens read in all phases (millions)", format="{x:g}")
        bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        bar.ax.yaxis.set_minor_formatter(NullFormatter())
    if fits:
        _draw_fits(axes[2], fits)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_fits(axis, fits: list[dict]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    for number, fit in enumerate(fits):
        tokens, values = zip(*fit["points"], strict=True)
        axis.loglog(tokens, [100 * value for value in values], "o", color=f"C{number}")
        ends = [min(tokens), max(tokens)]
        line = [100 * fit["factor"] * end ** fit["power"] for end in ends]
        axis.loglog(
            ends,
            line,
            color=f"C{number}",
            linewidth=1,
            label=f"{fit['name']} at about {fit['density']:.0%}: T^{fit['power']:.2f}",
        )
    axis.set(xlabel="tokens T of the conversion (millions)", ylabel="loss above the better of parent and control (%)")
    for side in (axis.xaxis, axis.yaxis):  # plain numbers, as a fit spans less than a decade
        side.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        side.set_major_formatter("{x:g}")
        side.set_minor_formatter(NullFormatter())
    axis.legend(fontsize=7)


def report(rows: list[dict], folder: Path) -> None:
    """Write study.md and study.png."""
    (folder / "study.md").write_text(table(rows) + fit_lines(rows))
    draw(rows, folder / "study.png")


def _rows_of(row: dict, task: str) -> int | None:
    return row["tasks"].get(task, {}).get("rows")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    report([json.loads(line) for line in (folder / "pretrained.jsonl").read_text().split("\n") if line], folder)
