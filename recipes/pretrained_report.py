"""The table and plots of pretrained_study.py, drawn from its rows and nothing else.

python recipes/pretrained_report.py DIR      # DIR holds pretrained.jsonl; writes study.md and study.png
"""

import json
import sys
from pathlib import Path

import matplotlib
from study_report import finish_density_axis, styles_of

from hf_twell.files.tables import markdown_table, percent

TASKS = ("lambada", "arc_easy", "arc_challenge", "hellaswag")
CHANCE = (0 + 0.25 + 0.25 + 0.25) / 4  # what guessing comes to in the mean of the four


def parent_of(rows: list[dict]) -> dict | None:
    """The row that was only scored."""
    return next((row for row in rows if "start" not in row), None)


def control_of(rows: list[dict]) -> dict | None:
    """The parent trained on as it is."""
    return next((row for row in rows if row.get("relu") is False), None)


def excess(row: dict, rows: list[dict]) -> float | None:
    """Mean over the texts of loss / (the lower of the parent's and the control's) - 1; None before both are there."""
    parent, control = parent_of(rows), control_of(rows)
    if parent is None or control is None:
        return None
    shares = [loss / min(parent["losses"][text], control["losses"][text]) - 1 for text, loss in row["losses"].items()]
    return sum(shares) / len(shares)


def kept(row: dict, rows: list[dict]) -> float | None:
    """(mean of the four tasks - 0.1875) / (the control's mean - 0.1875).

    None before both are scored, and where they were scored on other numbers of rows.
    """
    control = control_of(rows)
    if control is None or any(_rows_of(row, task) is None for task in TASKS):
        return None
    if any(_rows_of(row, task) != _rows_of(control, task) for task in TASKS):
        return None
    mean, ceiling = (sum(each["tasks"][task]["acc"] for task in TASKS) / len(TASKS) for each in (row, control))
    return (mean - CHANCE) / (ceiling - CHANCE)


def table(rows: list[dict]) -> str:
    """A Markdown table, one line a row."""
    texts = list(dict.fromkeys(text for row in rows for text in row["losses"]))
    head = ["run", "target", "seed", "Mtokens in all phases", "density", "density of the layers"]
    head += [*(f"loss: {text}" for text in texts), "excess", *TASKS, "kept", "minutes"]
    lines = []
    for row in rows:
        above, share = excess(row, rows), kept(row, rows)
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
                *(score and f"{100 * score['acc']:.1f} ± {100 * score['stderr']:.1f}" for score in scores),
                None if share is None else f"{100 * share:.1f} %",
                f"{row['minutes']:.1f}",
            ]
        )
    return markdown_table(head, lines)


def draw(rows: list[dict], path: Path) -> None:
    """Excess and kept, in percent, against density; the control is a line in each panel."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    sparse = [row for row in rows if "start" in row and "average" not in row and row.get("relu") is not False]
    names = list(dict.fromkeys(_label(row) for row in sparse))
    styles = styles_of(names)
    figure, axes = plt.subplots(1, 2, figsize=(13, 4.6), layout="constrained")
    control = control_of(rows)
    panels = (
        (excess, "loss above the better of parent and control (%)"),
        (kept, "task accuracy kept above chance (%)"),
    )
    for axis, (figure_of, words) in zip(axes, panels, strict=True):
        if control is not None and (level := figure_of(control, rows)) is not None:
            axis.axhline(100 * level, color="gray", linewidth=0.8, linestyle=":", label="dense control")
        for name in names:
            found = [(row["density"], figure_of(row, rows)) for row in sparse if _label(row) == name]
            points = [(100 * density, 100 * value) for density, value in sorted(found) if value is not None]
            if points:
                axis.errorbar(*zip(*points, strict=True), markersize=5, linewidth=1, label=name, **styles[name])
        finish_density_axis(axis, "no row to compare with parent and control yet")
        axis.set(ylabel=words)
        if axis.containers:
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_minor_formatter(NullFormatter())
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(rows: list[dict], folder: Path) -> None:
    """Write study.md and study.png."""
    (folder / "study.md").write_text(table(rows))
    draw(rows, folder / "study.png")


def _label(row: dict) -> str:
    return f"{row['name']}, {row['tokens_read'] / 1e6:.3g}M tokens"


def _rows_of(row: dict, task: str) -> int | None:
    return row["tasks"].get(task, {}).get("rows")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    report([json.loads(line) for line in (folder / "pretrained.jsonl").read_text().splitlines()], folder)
