"""The activity of a measured model, for the benchmark's inputs: density and unions of its layers."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hf_twell.convert.entry import mean_unions
from hf_twell.measure.activity import RUNS


class Wanted(NamedTuple):
    """What inputs are to have.

    Attributes:
        density: share of F that a token activates.
        unions: share of F that at least one of "16", "64" or "128" neighbouring tokens activates; None: as in models
            that were made sparse token by token.
        of: where it was measured, if it was.
    """

    density: float
    unions: Mapping[str, float] | None = None
    of: str | None = None


def measured_activity(path: str | Path, layers: Sequence[int] | None = None) -> list[Wanted]:
    """Of the mean layer, or of each of `layers`, in what `hf-twell inspect` wrote with --output, a sparse checkpoint's
    config.json, or its folder. A ValueError of another file, one without unions, or a layer that is not there."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"no file at {file}; give figures of `hf-twell inspect --output`, or a sparse model's folder")
    try:
        rows = _layers(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError):
        rows = []
    if not rows or not all(unions for _, unions in rows):
        raise ValueError(
            f"{file} holds no density and unions of layers; give figures of `hf-twell inspect --output`, or a sparse "
            "model that was measured (`hf-twell sparsify MODEL OUT --text FILE`): of 16, 64 or 128 neighbouring tokens"
        )
    if layers is None:
        density = statistics.fmean(density for density, _ in rows)
        unions = mean_unions({run: [each[run] for _, each in rows] for run in rows[0][1]})
        return [Wanted(density, unions, f"{path.name}, mean layer")]
    for layer in layers:
        if not 0 <= layer < len(rows):
            raise ValueError(f"{file} has no layer {layer}; its layers are 0 to {len(rows) - 1}")
    return [Wanted(*rows[layer], f"{path.name}, layer {layer}") for layer in layers]


def _layers(found: dict) -> list[tuple[float, dict[str, float]]]:
    """Density and unions of each layer, in figures of an inspection or in a config's entry."""
    if "twell" in found:
        density, unions = found["twell"]["density"], found["twell"]["unions"]
        of_layers = [(share, {run: of[index] for run, of in unions.items()}) for index, share in enumerate(density)]
    else:
        of_layers = [(layer["density"], layer["unions"]) for layer in found["layers"]]
    runs = [str(run) for run in RUNS]
    return [(share, {run: of[run] for run in runs if of.get(run) is not None}) for share, of in of_layers]
