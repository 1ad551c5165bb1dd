"""Table and figure of the rows of `python -m hf_twell.bench.vllm_steps`."""

from pathlib import Path

import matplotlib
from bench_tables import commits

from hf_twell.bench.vllm_steps import HEAD, SIDES, cells
from hf_twell.files.tables import markdown_table

COLORS = {"dense": "0.6", "sparse": "C0"}


def draw_steps(rows: list[dict], folder: Path) -> list[Path]:
    """Write vllm_steps.md, and vllm_steps.png: the GPU's time of a decode step at each batch, a bar a side."""
    found = (" and ".join(sorted({str(row[key]) for row in rows})) for key in ("vllm", "gpu"))
    text = "# Steps of vLLM {}, {}\n\nWritten by `make figures` from the rows of `vllm_steps.jsonl` beside it. ".format(
        *found
    )
    text += f"In brackets the least and the most of several answers. Commits: {commits(rows)}.\n\n"
    table, picture = folder / "vllm_steps.md", folder / "vllm_steps.png"
    table.write_text(text + markdown_table(HEAD, cells(rows)))

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    steps = [row for row in rows if row["measured"] == "decode" and row["step_us"]]
    batches = sorted({row["batch"] for row in steps})
    for place, side in enumerate(SIDES):
        times = [
            next(row["step_us"] for row in steps if (row["side"], row["batch"]) == (side, batch)) for batch in batches
        ]
        ends = [index + 0.4 * (place - 0.5) for index in range(len(batches))]
        axis.bar(ends, [time / 1000 for time in times], width=0.38, color=COLORS[side], label=side)
    axis.set(
        xticks=range(len(batches)), xticklabels=batches, xlabel="sequences", ylabel="GPU time of a decode step (ms)"
    )
    axis.legend(frameon=False)
    figure.savefig(picture, dpi=120)
    plt.close(figure)
    return [table, picture]
