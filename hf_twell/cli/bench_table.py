"""The table of `hf-twell bench`: which of a row's figures are shown for each mode."""

import statistics

from hf_twell.bench.serve_summary import overlap, pairs, ratio
from hf_twell.files.tables import UNIONS, percent, unions_cell


def _ffn_cells(rows):
    names = (
        "grouped_mm_ms",
        "batched_mm_ms",
        "eager_ms",
        "compiled_ms",
        "autotuned_ms",
        "torchao_ms",
        "torchao_compiled_ms",
        "scaled_mm_ms",
    )
    names += (
        "sparse_plain_ms",
        "sparse_ms",
        "sparse_compiled_ms",
        "sparse_h_compiled_ms",
        "eager_peak_mib",
        "compiled_peak_mib",
        "sparse_peak_mib",
        "sparse_held_mib",
        "took",
    )
    names = [name for name in (*names, "speedup_same_weights", "speedup_plain") if any(name in row for row in rows)]
    names += [name for name in rows[0] if name.endswith("_mj_per_token")]
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
        "error / eager's",
        *(name.replace("_", " ") for name in names),
    ]
    return [*head, "speed-up"], cells


def _model_cells(keys):
    def cells(rows):
        # A variant may be absent from some rows.
        found = dict.fromkeys(name for row in rows for name in row)
        names = [name for name in (*keys, *(n for n in found if n.endswith("_mj_per_token"))) if name in found]
        activity = ["density", UNIONS] if "model" in found else ["distinct in 64 (workload)"]
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


_PREFILL = (
    "eager_ms",
    "compiled_ms",
    "sparse_ms",
    "sparse_compiled_ms",
    "eager_peak_mib",
    "sparse_peak_mib",
    "speedup",
    "sparse_layers_on_kernels",
)
_GENERATE = ("decoded_l0", "dense_step_ms", "sparse_step_ms", "step_speedup")
_GENERATE += ("dense_tokens_per_s", "sparse_tokens_per_s", "speedup", "same_tokens", "sparse_layers_on_kernels")
_VARIANTS = ("eager", "compiled", "liger", "sparse", "sparse_compiled")
_TRAIN = ("sparse_layers_on_kernels", *(f"{name}_ms" for name in _VARIANTS), "speedup")
_TRAIN += ("sparse_tokens_per_s", "sparse_compiled_tokens_per_s", *(f"{name}_peak_mib" for name in _VARIANTS))
CELLS = {
    "ffn": _ffn_cells,
    "prefill": _model_cells(_PREFILL),
    "generate": _model_cells(_GENERATE),
    "train": _model_cells(_TRAIN),
    "serve": _serve_cells,
    "vllm": _vllm_cells,
}
