"""What `hf-twell bench ffn` measures: correctness first, then interleaved medians against the dense alternatives."""

import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

import hf_twell
from hf_twell import build, ops, workload
from hf_twell._layout import SPARSE
from hf_twell.timing import Captured, interleaved_ms, millijoules, peak_mib

COLD_BYTES = 256 << 20  # rotated weights take at least this much on a CPU, so that no cache holds the next call's
GRAPH_TOKENS, GRAPH_BLOCKS = 256, 28  # up to so many tokens, CUDA times a graph over so many blocks' own weights
DECODE_TOKENS, DECODE_POOL = 64, 16384  # up to so many tokens are strangers, drawn from so many workload tokens
FEW_PAIRS = 64
FEW_PAIRS_LIMIT = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_AUTOTUNE = {"max_autotune": True, "coordinate_descent_tuning": True}


def bench_ffn(
    tokens: list[int],
    l0s: list[float],
    *,
    hidden: int = 2048,
    intermediate: int = 5632,
    dtype: str = "bfloat16",
    device: str = "cpu",
    backward: bool = False,
    repeats: int | None = None,
    compile_dense: bool = True,
    max_autotune: bool = False,
    energy: bool = False,
) -> Iterator[dict]:
    """One row for each number of tokens and L0: times of eager, compiled and sparse FFNs, and the sparse one's error.

    Forward on CUDA at 256 tokens or fewer: one captured graph over 28 blocks with weights of their own, each with its
    own tokens, and time per block; at 64 or fewer, the tokens are strangers to each other, as in a decode batch.
    Otherwise neighbours, and one call at a time: on a CPU the weights rotate, on CUDA the L2 is flushed before each.

    Args:
        backward: forward and backward, `.grad` None before each; else forward alone under inference mode.
        max_autotune: also `torch.compile` with max-autotune and coordinate descent; reported beside, not in `speedup`.
        energy: also millijoules per token.

    Raises:
        ValueError: a result less accurate than DESIGN allows (twice eager PyTorch's error); no speed is given then.
    """
    device = torch.device(device)
    pools = {}
    for l0 in l0s:
        count = max(DECODE_POOL if device.type == "cuda" else 1024, *tokens)
        x, *weights = workload.make_ffn(count, hidden, intermediate, l0, dtype=DTYPES[dtype], device=device)
        pools[l0] = x, weights
    for count in tokens:
        dense: dict[str, Callable] = {"eager": _dense}
        # Recompiling for each shape would end at PyTorch's limit.
        torch._dynamo.reset()
        if compile_dense:
            dense["compiled"] = torch.compile(_dense, dynamic=False)
        if max_autotune:
            dense["autotuned"] = torch.compile(_dense, dynamic=False, options=MAX_AUTOTUNE)
        for l0, (pool, weights) in pools.items():
            captured = device.type == "cuda" and count <= GRAPH_TOKENS and not backward
            xs, active = _draw(pool, weights[0], count, l0, GRAPH_BLOCKS if captured else 1)
            result = _measure(dense, xs, weights, active, backward, captured, repeats, energy)
            wanted = {"tokens": count, "hidden": hidden, "intermediate": intermediate, "dtype": dtype}
            yield {"bench": "ffn", **wanted, "requested_l0": round(l0, 3), **result, **environment(device)}


def _measure(dense, xs, weights, active, backward, captured, repeats, energy) -> dict:
    device, (count, _), intermediate = xs[0].device, xs[0].shape, len(weights[0])
    l0 = active.sum(1).double().mean().item()
    # As a patched module would keep down_proj.
    by_columns = not backward and (device.type == "cuda" or l0 < SPARSE * intermediate)
    copies = len(xs) if device.type == "cuda" else -(-COLD_BYTES // sum(w.nbytes for w in weights)) + 1
    stock = [[w.clone() for w in weights] for _ in range(copies)]
    ours = [[gate, up, down.t().contiguous().t() if by_columns else down] for gate, up, down in stock]
    variants = {name: (function, stock) for name, function in dense.items()}
    blocks = {}  # as a patched model has them, which follow their density

    def sparse(x, gate, up, down):
        if backward:
            return ops.ffn(x, up, down, gate)
        if gate not in blocks:
            blocks[gate] = workload.patched_block(gate, up, down)
        return blocks[gate](x)

    variants["sparse"] = (sparse, ours)
    grad_y = torch.randn_like(xs[0])
    if backward:
        for tensor in (*xs, *(w for some in (*stock, *ours) for w in some)):
            tensor.requires_grad_()

    def clear():
        for tensor in (*xs, *(w for some in (*stock, *ours) for w in some)):
            tensor.grad = None

    def once(name, turn=0):
        function, sets = variants[name]
        x, some = xs[turn % len(xs)], sets[turn % len(sets)]
        if not backward:
            with torch.inference_mode():
                return function(x, *some)
        return function(x, *some).backward(grad_y)

    def block_by_block(name):
        return [once(name, turn) for turn in range(len(xs))]

    calls = {name: Captured(lambda name=name: block_by_block(name), device) for name in variants} if captured else {}
    outputs = {name: calls[name]() if captured else block_by_block(name) for name in variants if not backward}
    if backward:
        outputs = {name: [_with_gradients(f, xs[0], sets[0], grad_y)] for name, (f, sets) in variants.items()}
        clear()
    errors = _check(outputs, xs, stock[0], grad_y if backward else None, active.sum().item() / len(xs))
    outputs.clear()

    def timed(name):
        if captured:
            return lambda turn: calls[name]()
        return lambda turn: once(name, turn)

    for turn in range(copies if not (backward or captured) else 0):
        once("sparse", turn)  # a block's first call looks at its density
    repeats = repeats or (25 if device.type == "cuda" else 11)
    times = interleaved_ms({name: timed(name) for name in variants}, repeats, device, clear if backward else _nothing)
    times = {name: value / len(xs) for name, value in times.items()}
    clear()
    row = {
        "pass": "forward+backward" if backward else "forward",
        "timed": f"captured graph of {len(xs)} blocks" if captured else "single calls",
        "backend": ops.resolve("auto", device.type),
        "took": "kernels" if backward else _taken(next(iter(blocks.values())), xs[0]),
        "l0": round(l0, 2),
        "density": round(l0 / intermediate, 5),
        "neighbours": not (captured and count <= DECODE_TOKENS),
        "distinct_64": round(workload.distinct_neurons(active, min(DECODE_TOKENS, count)), 1),
        "down_stored_by": "columns" if by_columns else "rows",
        "error": errors["sparse"],
        "error_eager": errors["eager"],
        **{f"{name}_ms": round(value, 5) for name, value in times.items()},
        "speedup": round(min(times[name] for name in ("eager", "compiled") if name in times) / times["sparse"], 3),
    }
    for name in variants:
        if device.type == "cuda":
            row[f"{name}_peak_mib"] = peak_mib(lambda name=name: once(name), device)
            clear()
        if energy:
            row[f"{name}_mj_per_token"] = millijoules(timed(name), device) / (len(xs) * count)
    return row


def _taken(block, x) -> str:
    """Which way a patched block goes with x, now that it has seen some calls."""
    with torch.inference_mode():
        too_dense = block._too_dense(x, block.gate_proj)
    return "plain matmuls" if too_dense else "kernels"


def _nothing():
    pass


def _dense(x, w_gate, w_up, w_down):
    return F.linear(torch.relu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


def _with_gradients(function, x, weights, grad_y) -> tuple:
    y = function(x, *weights)
    return y.detach(), *torch.autograd.grad(y, (x, *weights), grad_y)


def _draw(pool, w_gate, count, l0, sets) -> tuple[list, torch.Tensor]:
    """`sets` inputs of `count` tokens whose mean L0 is as near to `l0` as chance allows, and their active neurons.

    Several sets: strangers, or runs of neighbours above 64 tokens; the nearest of 64 draws. One set: the run of
    neighbours that is nearest, because few tokens vary widely.
    """
    per_token = torch.cat([workload.active_neurons(part, w_gate).sum(1) for part in pool.split(8192)]).double()
    total = torch.cat([per_token.new_zeros(1), per_token.cumsum(0)])
    if sets == 1:
        starts = ((total[count:] - total[:-count]) / count - l0).abs().argmin().view(1)
        rows = starts[:, None] + torch.arange(count, device=pool.device)
    else:
        g = torch.Generator().manual_seed(1)
        if count <= DECODE_TOKENS:
            draws = torch.randint(DECODE_POOL, (64, sets, count), generator=g).to(pool.device)
        else:
            starts = torch.randint(len(pool) - count + 1, (64, sets, 1), generator=g).to(pool.device)
            draws = starts + torch.arange(count, device=pool.device)
        rows = draws[(per_token[draws].mean((1, 2)) - l0).abs().argmin()]
    xs = [pool[some].contiguous() for some in rows]
    return xs, torch.cat([workload.active_neurons(x, w_gate) for x in xs])


@torch.no_grad()
def _check(outputs, xs, weights, grad_y, pairs) -> dict[str, float]:
    """Each variant's relative RMS error of y over all inputs.

    Raises:
        ValueError: where the sparse result, or one of its gradients, is off by more than `limit` allows.
    """
    dtype = xs[0].dtype
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    wide_weights = [w.to(wide) for w in weights]
    if grad_y is None:
        # A whole fp32 h of the longest inputs would take gigabytes.
        truths = [[torch.cat([_dense(part.to(wide), *wide_weights) for part in x.split(8192)])] for x in xs]
        outputs = {name: [[y] for y in ys] for name, ys in outputs.items()}
    else:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (xs[0].to(wide), *wide_weights)]
            truths = [_with_gradients(_dense, leaves[0], leaves[1:], grad_y.to(wide))]
    results = {}
    for index, name in enumerate(("y", "gradient of x", "of w_gate", "of w_up", "of w_down")[: len(truths[0])]):
        truth = torch.cat([some[index] for some in truths])
        error = {key: relative_error(torch.cat([some[index] for some in ys]), truth) for key, ys in outputs.items()}
        allowed = 2 * error["eager"]
        if pairs < FEW_PAIRS:
            allowed = max(allowed, FEW_PAIRS_LIMIT.get(dtype, 0.0))
        if not error["sparse"] <= allowed:
            raise ValueError(
                f"{name} of the sparse block is off by {error['sparse']:.3g} (relative RMS) at {tuple(xs[0].shape)}, "
                f"{pairs / len(xs[0]):.4g} active neurons a token; allowed is {allowed:.3g}, eager's own error being "
                f"{error['eager']:.3g}. A wrong result has no speed; please report it."
            )
        results = results or error
    return results


def relative_error(value, truth) -> float:
    """||value - truth|| / ||truth||; infinite where the truth is all zero and the value is not."""
    size = truth.double().norm().item()
    difference = (value.double() - truth.double()).norm().item()
    if size:
        return difference / size
    return difference if difference == 0 else float("inf")


def environment(device: torch.device) -> dict:
    """What a row must name to be compared with another."""
    cuda = device.type == "cuda"
    return {
        "device": device.type,
        "processor": torch.cuda.get_device_name(device) if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **({"cuda": torch.version.cuda, "path": os.environ.get("HF_TWELL_CUDA_PATH", "auto")} if cuda else {}),
        **({} if cuda else {"isa": os.environ.get("HF_TWELL_CPU_ISA") or _widest_isa()}),
        "hf_twell": hf_twell.__version__,
        "commit": _commit(),
    }


def _widest_isa() -> str:
    features = build.processor_features()
    return next((name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in features), "portable")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    folder = Path(__file__).resolve().parents[1]
    run = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return run.stdout.strip() or None
