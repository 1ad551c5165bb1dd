"""The table of `hf-twell bench`: which of a row's figures are shown for each mode."""

import statistics

from hf_twell.bench.serve_summary import overlap, pairs, ratio
from hf_twell.files.tables import UNIONS, percent, unions_cell


def _figures(rows: list[dict], *endings: str) -> list[str]:
    """The names of figures that end so, in the order of the endings; a variant may be absent from some rows."""
    found = dict.fromkeys(name for row in rows for name in row)
    return [name for ending in endings for name in found if name.endswith(ending)]


def _ffn_cells(rows):
    names = _figures(rows, "_ms", "_peak_mib", "_held_mib", "took", "_weights", "_plain", "_mj_per_token")
    held = any("weights" in row for row in rows)
    scaled = any("asked_l0" in row for row in rows)  # by --shape
    cells = [
        [
            f"{row['hidden']} x {row['intermediate']}" + (f" x {row['experts']}" if "experts" in row else ""),
            *([row.get("weights", row["dtype"])] if held else []),
            row["tokens"],
            *([f"{row['asked_l0']:g} of {row['asked_l0_of']:,} = {row['requested_l0']:.3g}"] if scaled else []),
            row["l0"],
            percent(row["density"]),
            unions_cell(row["unions"]),
            f"{row['error']:.2g} / {row['error_eager']:.2g}",
            *(row.get(n, "") for n in names),
            f"{row['speedup']:.2f}x",
        ]
        for row in rows
    ]
    head = [
        "D x F",
        *(["weights"] if held else []),
        "tokens",
        *(["L0 asked"] if scaled else []),
        "L0",
        "density",
        UNIONS,
    ]
    return [*head, "error / eager's", *(name.replace("_", " ") for name in names), "speed-up"], cells


def _model_cells(*endings):
    def cells(rows):
        names = _figures(rows, *endings, "_mj_per_token")
        activity = ["density", UNIONS] if "model" in rows[0] else ["distinct in 64 (workload)"]
        head = ["layers", "batch", "L0 of layers", *activity, *(name.replace("_", " ") for name in names)]
        return head, [
            [
                row["layers"],
                row["batch"],
                f"{min(row['layer_l0']):.3g} to {max(row['layer_l0']):.3g}",
                *_activity(row),
                *(row.get(name, "") for name in names),
            ]
            for row in rows
        ]

    return cells


def _activity(row) -> list[str]:
    """Besides L0: of a user's own model density and unions, of a random one how alike it is to the workload."""
    if "model" in row:
        return [percent(row["density"]), unions_cell(row["unions"])]
    distinct = row["layer_distinct_64"]
    return [f"{min(distinct):.0f} to {max(distinct):.0f} ({row['workload_distinct_64']:.0f})"]


def _serve_cells(rows):
    lines = pairs(rows)
    several = any(setting["round"] == "all" for setting, *_ in lines)
    head = ["measured", "at once", "prompt", "new", *(["round"] if several else [])]
    head += ["dense tokens/s", "sparse tokens/s", "sparse / dense", "ranges overlap"]
    times = ("ttft_ms", "tpot_ms")
    head += [f"{side} {name.replace('_', ' ')}" for name in times for side in ("dense", "sparse")]
    return head, [
        [
            setting["measured"],
            setting["concurrency"],
            setting["prompt_tokens"],
            setting["new_tokens"],
            *([setting["round"]] if several else []),
            *(_range(side, "tokens_per_s") for side in (dense, sparse)),
            *_compared(sparse, dense),
            *(side[name]["median"] if side and name in side else "" for name in times for side in (dense, sparse)),
        ]
        for setting, sparse, dense in lines
    ]


def _range(row, name) -> str:
    return f"{row[name]['median']:g} ({row[name]['min']:g} to {row[name]['max']:g})" if row else ""


def _compared(sparse, dense) -> list[str]:
    if not sparse or not dense:
        return ["", ""]
    rates = sparse["tokens_per_s"], dense["tokens_per_s"]
    return [f"{ratio(*rates):.2f}x", "yes" if overlap(*rates) else "no"]


def _vllm_cells(rows):
    """For each load the GPU's time and the tokens a second of both sides, and their ratios."""
    head = ["load", "dense, us on the GPU", "sparse", "speed-up", "dense, tokens/s", "sparse", "speed-up"]
    several = len({_llama(row) for row in rows}) > 1
    dense, sparse = ([row for row in rows if row["side"] == side] for side in ("dense", "sparse"))
    lines = []
    for theirs, ours in zip(dense, sparse, strict=True):
        steps = [row.get("step_us") for row in (theirs, ours)]
        rates = [row.get("tokens_per_s") for row in (theirs, ours)]
        medians = [statistics.median(rate) for rate in rates if rate]
        same = [a == b for a, b in zip(theirs.get("tokens", []), ours.get("tokens", []), strict=True)]
        lines.append(
            [
                f"{ours['measured']} {ours['batch']}{_llama(ours) if several else ''}",
                *steps,
                f"{steps[0] / steps[1]:.3f}x" if all(steps) else None,
                *(rate and f"{statistics.median(rate):.1f} ({min(rate):.1f} to {max(rate):.1f})" for rate in rates),
                f"{medians[1] / medians[0]:.3f}x" if len(medians) == 2 else None,
                f"{sum(same)} of {len(same)}" if same else None,
            ]
        )
    return [*head, "same answers"], lines


def _llama(row) -> str:
    return f", {row['layers']} layers, L0 {row['l0']:g}" if "layers" in row else ""


_TOKENS_PER_S = ("sparse_tokens_per_s", "sparse_compiled_tokens_per_s")
CELLS = {
    "ffn": _ffn_cells,
    "prefill": _model_cells("_ms", "_peak_mib", "speedup", "_on_kernels"),
    "generate": _model_cells("decoded_l0", "_ms", "_tokens_per_s", "speedup", "same_tokens", "_on_kernels"),
    "train": _model_cells("_on_kernels", "_ms", "speedup", *_TOKENS_PER_S, "_peak_mib"),
    "serve": _serve_cells,
    "vllm": _vllm_cells,
}
