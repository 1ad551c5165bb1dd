"""The table of `hf-twell bench`: which of a row's figures are shown for each mode."""


def _ffn_cells(rows):
    names = ("eager_ms", "compiled_ms", "autotuned_ms", "sparse_ms", "eager_peak_mib", "compiled_peak_mib")
    names = [name for name in (*names, "sparse_peak_mib", "sparse_held_mib", "took") if name in rows[0]]
    names += [name for name in rows[0] if name.endswith("_mj_per_token")]
    cells = [
        [
            f"{row['hidden']} x {row['intermediate']}",
            row["tokens"],
            row["l0"],
            row["distinct_64"],
            f"{row['error']:.2g} / {row['error_eager']:.2g}",
            *(row[n] for n in names),
            f"{row['speedup']:.2f}x",
        ]
        for row in rows
    ]
    head = ["D x F", "tokens", "L0", "distinct in 64", "error / eager's", *(name.replace("_", " ") for name in names)]
    return [*head, "speed-up"], cells


def _model_cells(keys):
    def cells(rows):
        # A variant may be absent from some rows.
        found = dict.fromkeys(name for row in rows for name in row)
        names = [name for name in (*keys, *(n for n in found if n.endswith("_mj_per_token"))) if name in found]
        head = ["layers", "batch", "L0 of layers", "distinct in 64 (workload)", *(n.replace("_", " ") for n in names)]
        return head, [
            [
                row["layers"],
                row["batch"],
                f"{min(row['layer_l0']):.3g} to {max(row['layer_l0']):.3g}",
                f"{min(row['layer_distinct_64']):.0f} to {max(row['layer_distinct_64']):.0f} "
                f"({row['workload_distinct_64']:.0f})",
                *(row.get(name, "") for name in names),
            ]
            for row in rows
        ]

    return cells


_PREFILL = (
    "eager_ms",
    "compiled_ms",
    "sparse_ms",
    "sparse_compiled_ms",
    "eager_peak_mib",
    "sparse_peak_mib",
    "speedup",
)
_GENERATE = ("decoded_l0", "dense_step_ms", "sparse_step_ms", "step_speedup")
_GENERATE += ("dense_tokens_per_s", "sparse_tokens_per_s", "speedup", "same_tokens")
_VARIANTS = ("eager", "compiled", "liger", "sparse", "sparse_compiled")
_TRAIN = ("sparse_layers_on_kernels", *(f"{name}_ms" for name in _VARIANTS), "speedup")
_TRAIN += ("sparse_tokens_per_s", "sparse_compiled_tokens_per_s", *(f"{name}_peak_mib" for name in _VARIANTS))
CELLS = {
    "ffn": _ffn_cells,
    "prefill": _model_cells(_PREFILL),
    "generate": _model_cells(_GENERATE),
    "train": _model_cells(_TRAIN),
}
