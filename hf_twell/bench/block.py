"""What `hf-twell bench ffn` measures: correctness first, then interleaved medians against the dense alternatives."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hf_twell.bench import block_backward, workload
from hf_twell.bench.check import check_block, wider_dtype
from hf_twell.bench.environment import DTYPES, environment
from hf_twell.bench.progress import Report, silent
from hf_twell.bench.sharing import sliding_union, unions_of
from hf_twell.bench.timing import Captured, interleaved_ms, millijoules, peak_mib
from hf_twell.bench.wanted import Wanted
from hf_twell.blocks.calls import takes_kernels
from hf_twell.dispatch.limits import limit
from hf_twell.measure.activity import RUNS
from hf_twell.ops import api

COLD_BYTES = 256 << 20  # rotated weights take at least this much on a CPU, so that no cache holds the next call's
GRAPH_TOKENS, GRAPH_BLOCKS = 256, 28  # up to so many tokens, CUDA times a graph over so many blocks' own weights
DECODE_TOKENS, DECODE_POOL = 64, 16384  # up to so many tokens are strangers, drawn from so many workload tokens
MAX_AUTOTUNE = {"max_autotune": True, "coordinate_descent_tuning": True}


def bench_ffn(
    tokens: list[int],
    activities: Sequence[Wanted],
    *,
    hidden: int = 2048,
    intermediate: int = 5632,
    dtype: str = "bfloat16",
    device: str = "cpu",
    neighbours: bool = False,
    backward: bool = False,
    term: str = "l1",
    share: int | None = None,
    repeats: int | None = None,
    compile_dense: bool = True,
    max_autotune: bool = False,
    energy: bool = False,
    report: Report = silent,
) -> Iterator[dict]:
    """One row for each number of tokens and activity: times of eager, compiled and sparse FFNs, and the last's error.

    Forward on CUDA at 256 tokens or fewer: one captured graph over 28 blocks with weights of their own, each with its
    own tokens, and time per block; at 64 or fewer, the tokens are strangers to each other, as in a decode batch.
    Otherwise neighbours, and one call at a time: on a CPU the weights rotate, on CUDA the L2 is flushed before each.

    Args:
        neighbours: 64 tokens or fewer are neighbours everywhere, as the drafted tokens that a model verifies are.
        backward: forward and backward, `.grad` None before each; else forward alone under inference mode.
        term: what backward presses on, "l1" or "count". share: of the latter, runs of so many neighbouring tokens, too.
        max_autotune: also `torch.compile` with max-autotune and coordinate descent; reported beside, not in `speedup`.
        energy: also millijoules per token.
        report: told of what is being done.

    Raises:
        ValueError: a result less accurate than DESIGN allows (twice eager PyTorch's error); no speed is given then.
            An activity that no inputs have.
    """
    device = torch.device(device)
    report("making the workload")
    pools = list(make_pools(activities, tokens, hidden, intermediate, dtype, device))
    for count in tokens:
        function = block_backward.dense if backward else dense
        variants: dict[str, Callable] = {"eager": function}
        # Recompiling for each shape would end at PyTorch's limit.
        torch._dynamo.reset()
        if compile_dense:
            variants["compiled"] = torch.compile(function, dynamic=False)
        if max_autotune:
            variants["autotuned"] = torch.compile(function, dynamic=False, options=MAX_AUTOTUNE)
        for asked, (pool, *weights) in zip(activities, pools, strict=True):
            captured = device.type == "cuda" and count <= GRAPH_TOKENS and not backward
            strangers = captured and count <= DECODE_TOKENS and not neighbours
            l0 = asked.density * intermediate
            xs, active = draw(pool, weights[0], count, l0, GRAPH_BLOCKS if captured else 1, strangers)
            turns = repeats or (25 if device.type == "cuda" else 11)
            if backward:
                sets, pairs = copies(weights, 1), active.sum().item()
                result = block_backward.measure_backward(
                    variants, xs[0], weights, sets, turns, energy, pairs, report, term, share
                )
            else:
                result = _measure(variants, xs, weights, active, captured, turns, energy, report)
            errors, times = result.pop("errors"), result.pop("times")
            yield {
                **described(asked, xs[0], active, strangers),
                "pass": "forward+backward" if backward else "forward",
                "error": errors["y"]["sparse"],
                "error_eager": errors["y"]["eager"],
                **({"errors": errors} if backward else {}),
                **{f"{name}_ms": round(value, 5) for name, value in times.items()},
                "speedup": round(min(times[n] for n in ("eager", "compiled") if n in times) / times["sparse"], 3),
                **result,
            }


def copies(weights: Sequence[torch.Tensor], inputs: int) -> int:
    """Sets of weights that take turns."""
    if weights[0].is_cuda:
        return inputs
    return -(-COLD_BYTES // sum(weight.nbytes for weight in weights)) + 1


def make_pools(
    activities: Sequence[Wanted], tokens: Sequence[int], hidden: int, intermediate: int, dtype: str, device
) -> Iterator[tuple[torch.Tensor, ...]]:
    """What `workload.make_ffn` makes for each activity, with enough tokens to draw from."""
    count = max(DECODE_POOL if device.type == "cuda" else 1024, *tokens)
    for density, unions, _ in activities:
        options: dict[str, Any] = {"unions": unions, "dtype": DTYPES[dtype], "device": device}
        yield workload.make_ffn(count, hidden, intermediate, density * intermediate, **options)


def described(asked: Wanted, x: torch.Tensor, active: torch.Tensor, strangers: bool) -> dict:
    """What a row says of the machine, the block, and the activity that was asked for and that the inputs have."""
    (count, hidden), intermediate = x.shape, active.shape[1]
    return {
        "bench": "ffn",
        "tokens": count,
        "hidden": hidden,
        "intermediate": intermediate,
        "dtype": str(x.dtype).removeprefix("torch."),
        "backend": api.resolve("auto", x.device.type),
        "requested_l0": round(asked.density * intermediate, 3),
        "requested_union": asked.unions and asked.unions.get("64"),
        **({"activity": asked.of} if asked.of else {}),
        **activity(active, count, strangers),
        **environment(x.device),
    }


def activity(active: torch.Tensor, count: int, strangers: bool) -> dict:
    l0 = active.sum(1).double().mean().item()
    return {
        "l0": round(l0, 2),
        "density": round(l0 / active.shape[1], 5),
        "unions": {run: round(share, 5) for run, share in unions_of(active, count).items()},
        "neighbours": not strangers,
        "distinct_64": round(workload.distinct_neurons(active, min(DECODE_TOKENS, count)), 1),
    }


def _measure(variants, xs, weights, active, captured, repeats, energy, report) -> dict:
    """Times, errors and memory of the forward pass alone."""
    device, dtype, count = xs[0].device, xs[0].dtype, len(xs[0])
    density = active.double().mean().item()
    # As a patched module would keep down_proj.
    by_columns = device.type == "cuda" or density < limit("kCpuColumnsBelow")
    sets = copies(weights, len(xs))
    stock = [[w.clone() for w in weights] for _ in range(sets)]
    ours = [[gate, up, down.t().contiguous().t() if by_columns else down] for gate, up, down in stock]
    blocks = [workload.patched_block(*some) for some in ours]  # which follow their density
    names = [*variants, "sparse"]
    report("checking")

    @torch.inference_mode()
    def once(name, turn=0):
        x, index = xs[turn % len(xs)], turn % sets
        return blocks[index](x) if name == "sparse" else variants[name](x, *stock[index])

    def block_by_block(name):
        return [once(name, turn) for turn in range(len(xs))]

    calls = {name: Captured(lambda name=name: block_by_block(name), device) for name in names} if captured else {}
    outputs = {name: {"y": torch.cat(calls[name]() if captured else block_by_block(name))} for name in names}
    wide = [w.to(wider_dtype(dtype)) for w in stock[0]]
    # A whole fp32 h of the longest inputs would take gigabytes.
    truth = {"y": torch.cat([dense(part.to(wide[0].dtype), *wide) for x in xs for part in x.split(8192)])}
    errors = check_block(outputs, truth, dtype, count, active.sum().item() / len(xs))
    del outputs, truth, wide

    def timed(name):
        return (lambda turn: calls[name]()) if captured else (lambda turn: once(name, turn))

    for turn in range(0 if captured else sets):
        once("sparse", turn)  # a block's first call looks at its density
    times = interleaved_ms({name: timed(name) for name in names}, repeats, device, head_start=True, report=report)
    result: dict[str, Any] = {
        "timed": f"captured graph of {len(xs)} blocks" if captured else "single calls",
        "took": taken(blocks[0], xs[0]),
        "down_stored_by": "columns" if by_columns else "rows",
        "errors": errors,
        "times": {name: value / len(xs) for name, value in times.items()},
    }
    for name in names:
        if device.type == "cuda":
            report("memory and energy", name)
            result[f"{name}_peak_mib"] = peak_mib(lambda name=name: once(name), device)
        if energy:
            result[f"{name}_mj_per_token"] = millijoules(timed(name), device) / (len(xs) * count)
    return result


def taken(block: torch.nn.Module, x: torch.Tensor) -> str:
    """Which way a patched block goes with x, now that it has seen some calls."""
    with torch.inference_mode():
        return "kernels" if takes_kernels(block, x) else "plain matmuls"


def dense(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor) -> torch.Tensor:
    return F.linear(torch.relu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


def draw(
    pool: torch.Tensor, w_gate: torch.Tensor, count: int, l0: float, sets: int, strangers: bool
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """`sets` inputs of `count` tokens as typical of the pool as chance allows, and their active neurons.

    Strangers are those of 64 draws whose mean L0 is nearest to `l0`. Runs of neighbours are near in L0 and in the union
    of their tokens, too: one set is the nearest of all runs, several are the nearest of 64 draws.
    """
    g = torch.Generator().manual_seed(1)
    active = workload.active_neurons(pool, w_gate)
    if strangers:
        rows = torch.randint(DECODE_POOL, (64, sets, count), generator=g).to(pool.device)
        rows = rows[(active.sum(1).double()[rows].mean((1, 2)) - l0).abs().argmin()]
    else:
        off = _unlike(active, count, l0)
        draws = torch.arange(len(pool) - count + 1)[:, None]
        if sets > 1:
            draws = torch.randint(len(pool) - count + 1, (64, sets), generator=g)
        draws = draws.to(pool.device)
        starts = draws[sum(each[draws].mean(1).abs() for each in off).argmin()]
        rows = starts[:, None] + torch.arange(count, device=pool.device)
    return [pool[some].contiguous() for some in rows], active[rows.flatten()]


def _unlike(active_TF: torch.Tensor, count: int, l0: float) -> list[torch.Tensor]:
    """How far each run of `count` tokens is off in L0, and off the runs' mean in its union; as shares of these."""
    total = torch.nn.functional.pad(active_TF.sum(1).double().cumsum(0), (1, 0))
    off = [(total[count:] - total[:-count]) / count / l0 - 1]
    run = max((run for run in RUNS if run <= count), default=None)
    if run is not None:
        union = sliding_union(active_TF, run).double()
        starts = torch.arange(len(active_TF) - count + 1, device=active_TF.device)
        places = starts[:, None] + run * torch.arange(count // run, device=active_TF.device)
        off.append(union[places].mean(1) / union.mean() - 1)
    return off
