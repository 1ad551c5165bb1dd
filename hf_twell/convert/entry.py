"""The `twell` entry of a model's config: what this package knows of a sparse model, and saves with it."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hf_twell.blocks.architectures import other_activations
from hf_twell.blocks.calls import ACTIVITY, store_density, without_activity

FORMAT_VERSION = 1


def new_entry(config: PreTrainedConfig, layers: list[int] | None, blocks: int) -> dict:
    """The entry of a model that kernels and the L1 term act on in `layers` (None: all); activity recorded stays.

    Except that of another number than its `blocks`: some were cut off, and it does not say which.
    """
    recorded = getattr(config, "twell", None) or {}
    density, unions = (recorded.get(key) for key in ACTIVITY)
    entry: dict[str, Any] = {"version": FORMAT_VERSION, "layers": layers}
    if density is None or blocks != len(density):
        return entry
    return entry | {"density": density} | ({"unions": unions} if unions else {})


def check_entry(config: PreTrainedConfig) -> dict | None:
    """The config's `twell` entry, or None. A ValueError of one that is none of ours, of a newer version, of an
    unfinished conversion, or beside another activation than ReLU."""
    entry = getattr(config, "twell", None)
    if entry is None:
        return None
    version = entry.get("version") if isinstance(entry, dict) else None
    if not isinstance(version, int) or version is True or version < 1:
        raise ValueError(f"the config's twell entry is {entry!r}; this package writes {{'version': 1, 'layers': ...}}")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"the config's twell entry has version {version}, this package knows {FORMAT_VERSION}; upgrade it"
        )
    _check_activity(entry, config)
    if "unfinished" in entry:
        reasons = entry["unfinished"]
        if isinstance(reasons, dict) and "activation" in reasons:  # which blending wrote, by and by from SiLU to ReLU
            raise ValueError(
                f"this {config.model_type} model was saved in the midst of blending ({reasons['activation']}), which "
                "is gone; convert its dense parent at once, best with the parent as a teacher (docs/converting.md)"
            )
        reasons = "; ".join(map(str, reasons.values())) if isinstance(reasons, dict) else reasons
        raise ValueError(
            f"the conversion of this {config.model_type} model is unfinished: {reasons}. Go on with the "
            "training that saved it (`hf-twell train RECIPE --resume`)."
        )
    others = other_activations(config)
    if others:
        raise ValueError(
            f"the config's twell entry says that the model is sparse, but its activation is {others.pop()!r} and not "
            "'relu'; correct the config, or remove its twell entry to convert the model"
        )
    return entry


def mark_unfinished(config: PreTrainedConfig, part: str, reason: str | None) -> None:
    """Say in the config's `twell` entry why a part of the conversion is not done; with None, that it is.

    `check_entry` refuses a model until every part is.
    """
    entry = dict(config.twell)
    reasons = {key: value for key, value in entry.pop("unfinished", {}).items() if key != part}
    if reason is not None:
        reasons[part] = reason
    config.twell = entry | ({"unfinished": reasons} if reasons else {})


def record_density(
    config: PreTrainedConfig | None,
    ffns: Iterable[nn.Module],
    density: Sequence[float] | None,
    unions: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Keep each layer's measured density in a sparse model's config, and beside it the unions of so many neighbouring
    tokens: {"16": ..., "64": ..., "128": ...}, or {"64": ...} after training with `share=64`; None: it is not known
    (any more). An engine that must choose between kernels and matmuls before it sees a token reads it there, and the
    model's sparse blocks, `ffns`, go by it where they are compiled. The first of these that trains drops it again. A
    config without an entry gets none."""
    entry = getattr(config, "twell", None)
    if config is None or not isinstance(entry, dict):
        return
    entry = without_activity(entry)
    if density is not None:
        entry["density"] = _rounded(density)
        if unions:
            entry["unions"] = {run: _rounded(shares) for run, shares in unions.items()}
    if entry != config.twell:
        config.twell = entry
    store_density(ffns, entry.get("density"), entry.get("unions"), config)


def mean_unions(of_layers: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Of the unions of every layer, as a config's `twell` entry holds them, the mean layer's."""
    return {run: round(statistics.fmean(shares), 6) for run, shares in of_layers.items()}


def _rounded(shares: Sequence[float]) -> list[float]:
    return [round(share, 6) for share in shares]


def _check_activity(entry: dict, config: PreTrainedConfig) -> None:
    density, unions = (entry.get(key) for key in ACTIVITY)
    # Of another number of layers it may be: layers were cut off since, and it decides nothing but speed.
    if density is not None and not _are_shares(density):
        raise ValueError(
            f"the density in the config's twell entry is {density!r}; expected a number from 0 to 1 for each of "
            f"{_layers_of(config)} layers. Remove it, or measure it anew (hf_twell.measure_sparsity)"
        )
    length = len(density or ())
    if unions is not None and not (
        isinstance(unions, dict)
        and all(str(run).isdecimal() and _are_shares(of) and len(of) == length for run, of in unions.items())
    ):
        raise ValueError(
            f"the unions in the config's twell entry are {unions!r}; expected, for each number of neighbouring tokens, "
            f"as many numbers from 0 to 1 as the density has ({length}). Remove them, or measure them anew "
            "(hf_twell.measure_sparsity)"
        )


def _are_shares(values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(share, int | float) and not isinstance(share, bool) and 0 <= share <= 1 for share in values
    )


def _layers_of(config: PreTrainedConfig) -> int | None:
    return getattr(config.get_text_config(), "num_hidden_layers", None)
