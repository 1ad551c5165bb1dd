"""The study's table and plot, drawn from its rows and nothing else.

python recipes/study_report.py DIR      # DIR holds study.jsonl; writes study.md, study.png and cards/
"""

import json
import sys
from pathlib import Path

import matplotlib

from hf_twell.files.tables import markdown_table, percent

TASKS = ("lambada", "arc_easy", "hellaswag")


def control_of(row: dict, rows: list[dict]) -> dict | None:
    """The best dense row of the same family and start that saw the same tokens; of the same seed where there is one."""
    alike = ("family", "start", "parent_loss", "tokens")
    same = [r for r in rows if r.get("relu") is False and all(r.get(key) == row.get(key) for key in alike)]
    same = [r for r in same if r["seed"] == row["seed"]] or same
    return min(same, key=lambda r: r["loss"], default=None)


def against(row: dict, control: dict) -> float:
    """Loss above the control's, as a share of it."""
    return row["loss"] / control["loss"] - 1


def table(rows: list[dict]) -> str:
    """A Markdown table, one line a row; a parent is named by its loss."""
    head = ["family", "parent", "method", "seed", "target", "density", "L0 of the layers", "loss", "against dense"]
    head += ["dead (worst layer)", "on 1M training tokens: density", "dead (worst layer)", *TASKS]
    head += ["Mtokens", "minutes (up to 4 runs share a GPU)"]
    lines = []
    for row in sorted(rows, key=lambda r: (r["family"], r.get("parent_loss") or 0)):
        control = control_of(row, rows)
        compared = control is not None and row.get("relu") is not False
        target = row.get("target_density") or row.get("threshold")
        layers = [layer["l0"] for layer in row["layers"]]
        scores = [row["tasks"].get(task) for task in TASKS]
        cells = [
            row["family"],
            None if row.get("parent_loss") is None else f"{row['parent_loss']:.4f}",
            row["name"],
            row["seed"],
            None if target is None else f"{target:g}",
            percent(row["density"]),
            f"{min(layers):.0f} to {max(layers):.0f}",
            f"{row['loss']:.4f} ± {row['loss_stderr']:.4f}",
            f"{100 * against(row, control):+.2f} %" if compared else None,
            f"{100 * max(layer['dead'] for layer in row['layers']):.1f} %",
            *_on_training_text(row),
            *(score and f"{100 * score['acc']:.1f} ± {100 * score['stderr']:.1f}" for score in scores),
            f"{row['tokens'] / 1e6:.1f}",
            f"{row['minutes']:.1f}",
        ]
        lines.append(cells)
    return markdown_table(head, lines)


def _on_training_text(row: dict) -> tuple[str | None, str | None]:
    if (figures := row.get("training_text")) is None:
        return None, None
    return percent(figures["density"]), f"{100 * max(layer['dead'] for layer in figures['layers']):.1f} %"


def draw(rows: list[dict], path: Path) -> None:
    """Held-out loss above the control's, in percent of it, against density; a panel for each family.

    Above the control's, because rows of other parents and other numbers of tokens are comparable in nothing else.
    """
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    families = list(dict.fromkeys(row["family"] for row in rows))
    names = list(dict.fromkeys(row["name"] for row in rows if row.get("relu") is not False))
    styles = styles_of(names)
    figure, axes = plt.subplots(
        1, len(families), figsize=(6.5 * len(families), 4.6), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, family in zip(axes[0], families, strict=True):
        axis.axhline(0, color="gray", linewidth=0.8, linestyle=":")
        for name in names:
            points = []
            for row in (r for r in rows if (r["family"], r["name"]) == (family, name)):
                if (control := control_of(row, rows)) is not None:
                    shares = (against(row, control), row["loss_stderr"] / control["loss"])
                    points.append((100 * row["density"], *(100 * share for share in shares)))
            if points:
                x, y, error = zip(*sorted(points), strict=True)
                axis.errorbar(x, y, yerr=error, markersize=5, linewidth=1, label=name, **styles[name])
        finish_density_axis(axis, "no row with a dense control yet")
        axis.set(title=family)
    axes[0][0].set_ylabel("held-out loss above the dense control's (%)")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def styles_of(names: list[str]) -> dict[str, dict]:
    """A colour and a marker for each line of a plot."""
    return {name: {"color": f"C{i % 10}", "marker": "os^Dv*PX<>"[i // 10 + i % 5]} for i, name in enumerate(names)}


def finish_density_axis(axis, without_rows: str) -> None:
    """Densities in percent on a logarithmic axis and a legend, or words where no row was drawn."""
    if axis.containers or axis.collections:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.legend(fontsize=7, ncols=2)
    else:
        axis.text(0.5, 0.5, without_rows, ha="center", transform=axis.transAxes)
    axis.set(xlabel="density on held-out text (%)")


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
