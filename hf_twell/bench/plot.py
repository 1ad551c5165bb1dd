"""The figure of `hf-twell bench`, drawn from its rows alone."""

import statistics
from pathlib import Path

import matplotlib

# For each kind of row: the horizontal axis, what tells lines apart, and the ratios that are drawn.
AXES = {
    "ffn": (
        "tokens",
        (
            *("hidden", "intermediate", "dtype", "weights", "pass", "term", "share"),
            *("requested_l0", "requested_union", "activity"),
        ),
        ("speedup",),
    ),
    "prefill": ("layers", ("batch", "length", "dtype", "l0"), ("speedup",)),
    "generate": ("batch", ("layers", "dtype", "l0", "inductor_pdl"), ("step_speedup",)),
    "train": ("layers", ("batch", "length", "dtype", "l0"), ("speedup", "peak_share")),
    "vllm": ("batch", ("side", "model", "layers", "l0", "weights"), ("step_us", "tokens_per_s")),
    "serve": ("concurrency", ("side", "round", "engine", "dtype", "prompt_tokens", "new_tokens"), ("tokens_per_s",)),
}
LABELS = {
    "speedup": "speed-up over dense (the best of its variants)",
    "step_speedup": "speed-up over dense (the best of its variants)",
    "peak_share": "peak memory, share of dense (the best of its variants)",
    "tokens_per_s": "tokens/s: median, least and most",
    "step_us": "time of a decode step on the GPU (us)",
}


def plot(rows: list[dict], path: Path) -> None:
    """Each ratio to the better dense variant, or of a server each side, one line for each setting; rows of one kind."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row.get("measured") != "prefill"] or rows  # tokens of prompts are no decoded ones
    horizontal, settings, ratios = AXES[rows[0]["bench"]]
    ratios = [ratio for ratio in ratios if all(ratio in row for row in rows)]
    # What is the same everywhere goes into the title.
    varying = [key for key in settings if len({row.get(key) for row in rows}) > 1]  # older rows may lack one
    figure, panels = plt.subplots(1, len(ratios), figsize=(6 * len(ratios), 4), squeeze=False)
    for axes, ratio in zip(panels[0], ratios, strict=True):
        lines: dict[tuple, list] = {}
        for row in rows:
            lines.setdefault(tuple(row.get(key) for key in varying), []).append((row[horizontal], row[ratio]))
        for values, points in sorted(lines.items(), key=str):
            label = ", ".join(f"{key} {value}" for key, value in zip(varying, values, strict=True) if value is not None)
            _line(axes, sorted(points, key=lambda point: point[0]), label or "hf_twell")
        if "speedup" in ratio or "share" in ratio:
            axes.axhline(1, color="gray", linewidth=1)
        axes.set(xlabel=horizontal, ylabel=LABELS[ratio])
        axes.set_xscale("log", base=2)
        axes.legend(fontsize=8)
    same = ", ".join(f"{key} {rows[0][key]}" for key in settings if key not in varying and key in rows[0])
    figure.suptitle(f"{rows[0]['bench']}, {same}\n{rows[0]['processor']}", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _line(axes, points: list[tuple], label: str) -> None:
    """Of values, or of medians with their ranges."""
    places, values = zip(*points, strict=True)
    if isinstance(values[0], list):
        values = [{"median": statistics.median(each), "min": min(each), "max": max(each)} for each in values]
    if not isinstance(values[0], dict):
        axes.plot(places, values, marker="o", label=label)
        return
    medians = [value["median"] for value in values]
    below = [value["median"] - value["min"] for value in values]
    above = [value["max"] - value["median"] for value in values]
    axes.errorbar(places, medians, (below, above), marker="o", capsize=3, label=label)
