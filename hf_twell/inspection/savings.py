"""What sparsity buys in the feed-forward blocks on this machine: a model's own blocks on its own activations."""

import itertools
import statistics
import time
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from hf_twell.bench.block import bench_ffn
from hf_twell.bench.environment import DTYPES, environment
from hf_twell.bench.wanted import Wanted
from hf_twell.blocks.architectures import activation_keys, dense_ffns
from hf_twell.convert.sparsify import chosen_layers, sparsify, unpatch
from hf_twell.dispatch.activity import Activity, union_of_neighbours
from hf_twell.dispatch.choose import faster, max_density
from hf_twell.dispatch.key import CallKey, device_class
from hf_twell.models.modes import evaluation_mode
from hf_twell.ops import api

IF_DENSITIES = (0.10, 0.05, 0.02, 0.01, 0.005)
PASSES = ("decode", "prefill")
DECODED_TOKENS = 8
# A sparse block's time = first * (the first matrix's share of the dense time) + rest * density * (the others' share).
# Fitted to rows of kernels/twell_cpu/bench/epyc-2026-11-21 (D = 2048, F = 5632, bfloat16, 1 and 1,024 tokens).
_CPU_COST = {"decode": (0.72, 0.98), "prefill": (1.08, 7.5)}
_CPU_CALL_MS = 0.025  # what a call of a sparse block takes beside that: Python and dispatch
_BASIS = {
    "cpu": "the time of the dense block here, how the sparse one compared with it on another machine (AMD EPYC, "
    "D = 2,048, F = 5,632, bfloat16), and 0.025 ms a call, which do not shrink where blocks are small",
    "cuda": "the time of the dense block here, and the share of its work that sparsity leaves; a bound, no estimate",
}


@torch.no_grad()
def ffn_savings(
    model: PreTrainedModel, ids: torch.Tensor, layers: list[dict], *, measure: bool = False, rounds: int = 7
) -> dict:
    """Milliseconds of every block, dense and sparse, for one token (decode) and for all of `ids` at once (prefill).

    The blocks run one after another on the hidden states that they get for `ids`, with the model's weights, so caches
    are as warm or cold as in use. The model must not be sparsified, and is not afterwards.

    Args:
        ids: (1, S) a passage.
        layers: those of `hf_twell.measure_sparsity`, for their densities.
        measure: time the sparse blocks too, in turns with the dense ones; else their time is predicted.
        rounds: turns.

    Returns:
        {"measured", "basis" (of predictions), "too_small" (the passes in which blocks of this size take plain matmuls,
        whatever their density), "backend", "relu", "device", "threads", "tokens": {"decode": 1, "prefill": S},
        "layers": [{"name", "density", "decode", "prefill": {"path", "dense_ms", "sparse_ms"}}],
        "total": {"decode", "prefill": {"dense_ms", "sparse_ms", "speedup"}},
        "if_density": [{"density", "measured", "decode", "prefill": speed-up over dense}]}. Where they were measured
        layers also have "difference", the relative RMS difference between both outputs.
    """
    sites = dense_ffns(model, "this timing")
    device = next(model.parameters()).device
    backend = api.resolve("auto", device.type)
    config, keys = activation_keys(model.config)
    relu = getattr(config, keys[0]) == "relu"
    tokens = {"decode": 1, "prefill": ids.shape[1]}
    down = sites[0].linear("down").weight
    calls = {which: _key(count, down) for which, count in tokens.items()}
    # Density up to which "auto" takes the kernels; below 0 where it never does.
    limits = {which: -1.0 if backend == "reference" else max_density(key) or -1.0 for which, key in calls.items()}
    chosen = chosen_layers(model.config, None, len(sites)) if relu and backend != "reference" else []
    paths = [_paths(index in chosen, layer, calls) for index, layer in enumerate(layers)]

    measured = measure and relu and backend != "reference"
    with evaluation_mode(model):
        inputs = _block_inputs(model, sites, ids)
        dense, sparse, difference = _times(model, sites, inputs, device, rounds if measure else 3, measured)
    if not measured:
        sparse = _predicted(dense, paths, layers, backend, sites[0].form.matrices)

    rows = []
    for index, (site, layer) in enumerate(zip(sites, layers, strict=True)):
        row = {"name": site.name, "density": layer["density"]}
        for which in PASSES:
            times = {"dense_ms": dense[which][index], "sparse_ms": sparse[which][index]}
            row[which] = {"path": paths[index][which], **times}
        rows.append(row | ({"difference": difference[index]} if measured else {}))
    total = {which: _total([row[which] for row in rows]) for which in PASSES}
    return {
        # Where every layer is dense there is nothing to predict.
        "measured": measured or all(path == "dense" for row in paths for path in row.values()),
        "basis": _BASIS.get(backend, ""),
        "too_small": [which for which in PASSES if limits[which] < 0],
        "backend": backend,
        "relu": relu,
        "device": environment(device)["processor"],
        "threads": torch.get_num_threads(),
        "tokens": tokens,
        "layers": rows,
        "total": total,
        "if_density": _if_density(sites, model, ids.shape[1], backend, measure, limits, total),
    }


def predicted_share(which: str, density: float, backend: str, matrices: int = 3) -> float:
    """The sparse block's time as a share of the dense one's, at most 1, for "decode" or "prefill"."""
    first, rest = _CPU_COST[which] if backend == "cpu" else (1.0, 1.0)
    return min(1.0, (first + rest * (matrices - 1) * density) / matrices)


def _predicted_ms(which: str, dense_ms: float, density: float, backend: str, matrices: int) -> float:
    call_ms = _CPU_CALL_MS if backend == "cpu" else 0.0
    return min(dense_ms, dense_ms * predicted_share(which, density, backend, matrices) + call_ms)


def _predicted(dense, paths, layers, backend, matrices) -> dict[str, list[float]]:
    """Milliseconds of every layer's block, by pass, as `_times` has them for the sparse ones."""
    return {
        which: [
            ms if path[which] == "dense" else _predicted_ms(which, ms, layer["density"], backend, matrices)
            for ms, path, layer in zip(dense[which], paths, layers, strict=True)
        ]
        for which in PASSES
    }


def _key(tokens: int, down: torch.Tensor) -> CallKey:
    (device, capability), (hidden, width) = device_class(down.device.type, down.device.index), down.shape
    return CallKey(device, capability, down.dtype, down.dtype, tokens, hidden, width)


def _paths(chosen: bool, layer: Mapping, keys: Mapping[str, CallKey]) -> dict[str, str]:
    """How a layer is computed, by pass."""
    activity = Activity(layer["density"], union=union_of_neighbours(layer["density"], layer.get("unions", {})))
    return {which: "sparse" if chosen and faster(key, activity) else "dense" for which, key in keys.items()}


def _block_inputs(model, sites, ids) -> list[torch.Tensor]:
    inputs: list[torch.Tensor] = []
    handles = [site.module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].clone())) for site in sites]
    try:
        model.get_decoder()(input_ids=ids.to(next(model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return inputs


def _times(model, sites, inputs, device, rounds, measure_blocks):
    """Medians over turns; the dense turns find the weights in the stock memory order, the sparse ones in theirs."""

    def no_times() -> dict[str, list[list[float]]]:
        return {which: [[] for _ in sites] for which in PASSES}

    warm_up, dense, sparse = no_times(), no_times(), no_times()
    difference = None
    _turn(sites, inputs, device, warm_up)
    if measure_blocks:
        truth = [site.module(x) for site, x in zip(sites, inputs, strict=True)]
    for turn in range(rounds):
        _turn(sites, inputs, device, dense)
        if not measure_blocks:
            continue
        sparsify(model)
        try:
            outputs = [site.module(x) for site, x in zip(sites, inputs, strict=True)]
            if turn == 0:
                difference = [_difference(y, z) for y, z in zip(outputs, truth, strict=True)]
            _turn(sites, inputs, device, sparse)
        finally:
            unpatch(model)
        # The first call after a change of memory order pays for it.
        for site, x in zip(sites, inputs, strict=True):
            site.module(x)
    median = [
        {which: [statistics.median(values) for values in times[which] if values] for which in PASSES}
        for times in (dense, sparse)
    ]
    return *median, difference


def _turn(sites, inputs, device, times) -> None:
    step = max(1, inputs[0].shape[1] // DECODED_TOKENS)
    for token in range(0, inputs[0].shape[1], step):
        for index, (site, x) in enumerate(zip(sites, inputs, strict=True)):
            times["decode"][index].append(_milliseconds(site.module, x[:, token : token + 1], device))
    for _ in range(2):
        for index, (site, x) in enumerate(zip(sites, inputs, strict=True)):
            times["prefill"][index].append(_milliseconds(site.module, x, device))


def _milliseconds(module, x, device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    module(x)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3


def _difference(y, truth) -> float:
    return ((y.float() - truth.float()).norm() / truth.float().norm().clamp_min(1e-30)).item()


def _total(rows: list[dict]) -> dict[str, float]:
    dense, sparse = (sum(row[key] for row in rows) for key in ("dense_ms", "sparse_ms"))
    return {"dense_ms": dense, "sparse_ms": sparse, "speedup": dense / sparse}


def _if_density(sites, model, tokens, backend, measure, limits, total) -> list[dict]:
    """Speed-ups if the model's blocks were this sparse: measured on synthetic activations, else predicted."""
    down, dtype = sites[0].linear("down"), str(model.dtype).removeprefix("torch.")
    matrices = sites[0].form.matrices
    measured = measure and backend != "reference" and matrices == 3 and dtype in DTYPES
    speedups = {}
    if measured:
        sizes = {"hidden": down.out_features, "intermediate": sites[0].intermediate_size}
        shape = {**sizes, "dtype": dtype, "device": str(model.device)}
        wanted = [Wanted(density) for density in IF_DENSITIES]
        times = iter(bench_ffn([1, tokens], wanted, compile_dense=False, **shape))
        speedups = {(which, density): next(times)["speedup"] for which in PASSES for density in IF_DENSITIES}
    else:
        for which, density in itertools.product(PASSES, IF_DENSITIES):
            dense_ms = total[which]["dense_ms"] / len(sites)
            pays = density <= limits[which]
            sparse_ms = _predicted_ms(which, dense_ms, density, backend, matrices) if pays else dense_ms
            speedups[which, density] = dense_ms / sparse_ms
    return [
        {"density": density, "measured": measured, **{which: speedups[which, density] for which in PASSES}}
        for density in IF_DENSITIES
    ]
