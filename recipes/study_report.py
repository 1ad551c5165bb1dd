"""The study's table and plot, drawn from its rows and nothing else.

python recipes/study_report.py DIR      # DIR holds study.jsonl; writes study.md, study.png and cards/
"""

import json
import sys
from pathlib import Path

import matplotlib

TASKS = ("lambada", "arc_easy", "hellaswag")


def control_of(row: dict, rows: list[dict]) -> dict | None:
    """The best dense row of the same family and start that saw the same tokens; of the same seed where there is one."""
    alike = ("family", "start", "parent_loss", "tokens")
    same = [r for r in rows if r.get("relu") is False and all(r.get(key) == row.get(key) for key in alike)]
    same = [r for r in same if r["seed"] == row["seed"]] or same
    return min(same, key=lambda r: r["loss"], default=None)


def table(rows: list[dict]) -> str:
    """A Markdown table, one line a row."""
    head = ["family", "method", "seed", "target", "density", "loss", "against dense", "dead (worst layer)"]
    head += [*TASKS, "Mtokens", "minutes"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        control = control_of(row, rows)
        against = (
            "" if control is None or row.get("relu") is False else f"{100 * (row['loss'] / control['loss'] - 1):+.2f} %"
        )
        target = row.get("target_density") or row.get("threshold")
        scores = [row["tasks"].get(task) for task in TASKS]
        cells = [
            row["family"],
            row["name"],
            row["seed"],
            "" if target is None else f"{target:g}",
            f"{100 * row['density']:.2f} %",
            f"{row['loss']:.4f} ± {row['loss_stderr']:.4f}",
            against,
            f"{100 * max(layer['dead'] for layer in row['layers']):.1f} %",
            *("" if score is None else f"{100 * score['acc']:.1f} ± {100 * score['stderr']:.1f}" for score in scores),
            f"{row['tokens'] / 1e6:.1f}",
            f"{row['minutes']:.1f}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def draw(rows: list[dict], path: Path) -> None:
    """Held-out loss against density, a panel for each family."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    families = list(dict.fromkeys(row["family"] for row in rows))
    figure, axes = plt.subplots(1, len(families), figsize=(6 * len(families), 4.2), squeeze=False, layout="constrained")
    for axis, family in zip(axes[0], families, strict=True):
        mine = [row for row in rows if row["family"] == family]
        for name in dict.fromkeys(row["name"] for row in mine):
            points = sorted((100 * r["density"], r["loss"], r["loss_stderr"]) for r in mine if r["name"] == name)
            x, y, error = zip(*points, strict=True)
            axis.errorbar(x, y, yerr=error, marker="o", markersize=4, linewidth=1, label=name)
        for tokens in {row["tokens"] for row in mine if row.get("relu") is False}:
            dense = min(r["loss"] for r in mine if r.get("relu") is False and r["tokens"] == tokens)
            axis.axhline(dense, color="gray", linewidth=0.8, linestyle=":")
        axis.set(xscale="log", xlabel="density (%)", ylabel="held-out loss (nats per token)", title=family)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(rows: list[dict], folder: Path) -> None:
    """Write study.md and study.png."""
    (folder / "study.md").write_text(table(rows))
    draw(rows, folder / "study.png")


if __name__ == "__main__":
    from study_cards import write_cards

    folder = Path(sys.argv[1])
    rows = [json.loads(line) for line in (folder / "study.jsonl").read_text().splitlines()]
    report(rows, folder)
    write_cards(rows, folder / "cards")
