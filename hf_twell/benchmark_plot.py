"""The figure of `hf-twell bench`, drawn from its rows alone."""

from pathlib import Path

# For each kind of row: the horizontal axis, what tells lines apart, and the ratio that is drawn.
AXES = {
    "ffn": ("tokens", ("hidden", "intermediate", "dtype", "pass", "requested_l0"), "speedup"),
    "prefill": ("layers", ("batch", "length", "dtype", "l0"), "speedup"),
    "generate": ("batch", ("layers", "dtype", "l0"), "step_speedup"),
}


def plot(rows: list[dict], path: Path) -> None:
    """Speed-up over the better dense variant, one line for each setting; rows of one kind."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    horizontal, settings, ratio = AXES[rows[0]["bench"]]
    # What is the same everywhere goes into the title.
    varying = [key for key in settings if len({row[key] for row in rows}) > 1]
    figure, axes = plt.subplots(figsize=(6, 4))
    lines: dict[tuple, list] = {}
    for row in rows:
        lines.setdefault(tuple(row[key] for key in varying), []).append((row[horizontal], row[ratio]))
    for values, points in sorted(lines.items()):
        label = ", ".join(f"{key} {value}" for key, value in zip(varying, values, strict=True))
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label or "hf_twell")
    axes.axhline(1, color="gray", linewidth=1)
    same = ", ".join(f"{key} {rows[0][key]}" for key in settings if key not in varying)
    axes.set_title(f"{rows[0]['bench']}, {same}\n{rows[0]['processor']}", fontsize=8)
    axes.set(xlabel=horizontal, ylabel="speed-up over dense (the better of eager and compiled)")
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
