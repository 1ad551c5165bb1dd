"""What `hf-twell bench ffn --weights` measures: the block in torchao's 8-bit weights, by our kernels and by torchao."""

import functools
from collections.abc import Iterator, Sequence

import torch

from hf_twell.bench import block, workload
from hf_twell.bench.check import check_block, wider_dtype
from hf_twell.bench.progress import Report, silent
from hf_twell.bench.sharing import unions_of
from hf_twell.bench.timing import Captured, interleaved_ms
from hf_twell.bench.wanted import Wanted
from hf_twell.blocks.calls import store_density
from hf_twell.dispatch.choose import choice_for
from hf_twell.dispatch.limits import limit
from hf_twell.models.quantizing import make_dynamic, quantize_block
from hf_twell.ops import reference

NAMES = ("gate_proj", "up_proj", "down_proj")


def bench_ffn_quantized(
    weights: str,
    tokens: list[int],
    activities: Sequence[Wanted],
    *,
    hidden: int = 2048,
    intermediate: int = 5632,
    dtype: str = "bfloat16",
    device: str = "cpu",
    neighbours: bool = False,
    repeats: int | None = None,
    compile_dense: bool = True,
    report: Report = silent,
) -> Iterator[dict]:
    """One row for each number of tokens and activity, forward under inference mode; all variants take turns.

    `eager` and `compiled` are dense in `dtype`, `torchao` and `torchao_compiled` dense in `weights` (one of
    `hf_twell.models.quantizing.CONFIGS`), `sparse` is our block in `weights` and `sparse_plain` our block in `dtype`.
    `speedup` is over the better of the first two, as in other rows, `speedup_same_weights` over the best of torchao's
    and `scaled_mm`, and `speedup_plain` over our own block in `dtype`. Blocks are timed as `bench_ffn` times them: on
    CUDA at 256 tokens or fewer, 28 in a captured graph. What is active is counted in `dtype`.

    In "fp8-dynamic", torchao's blocks quantize h, too, by which they save time, and ours do not. Beside them
    `scaled_mm` is the same dense block by PyTorch's own product of such rows, compiled, with x quantized only once.

    Where a block is too dense for kernels, `sparse_compiled` is ours compiled, its density being stored; the better of
    both is compared. `sparse_h_compiled` is one that torchao's own dynamic config quantized, h too, as in its blocks.

    Raises:
        ValueError: a result less accurate than DESIGN allows (twice the error of torchao's own, with h as it is; no
            speed is given then), or "fp8-dynamic" of a block that torchao does not take.
        ImportError: torchao is missing.
    """
    dynamic = weights == "fp8-dynamic"
    if dynamic and (dtype != "bfloat16" or hidden % 16 or intermediate % 16):
        raise ValueError(
            f"fp8-dynamic in {dtype} with D = {hidden}, F = {intermediate}; torchao takes bfloat16 and multiples of 16"
        )
    device = torch.device(device)
    report("making the workload")
    made = list(block.make_pools(activities, tokens, hidden, intermediate, dtype, device))
    for count in tokens:
        torch._dynamo.reset()  # recompiling for each shape would end at PyTorch's limit
        captured = device.type == "cuda" and count <= block.GRAPH_TOKENS
        for asked, (pool, *matrices) in zip(activities, made, strict=True):
            strangers = captured and count <= block.DECODE_TOKENS and not neighbours
            l0, inputs = asked.density * intermediate, block.GRAPH_BLOCKS if captured else 1
            xs, active = block.draw(pool, matrices[0], count, l0, inputs, strangers)
            plain = [matrices, *([w.clone() for w in matrices] for _ in range(block.copies(matrices, len(xs)) - 1))]
            ours = [workload.patched_block(*(w.clone() for w in some)) for some in plain]
            twice = plain if device.type == "cuda" else (*plain, *plain)  # half the bytes are cold after twice the sets
            quantized = [workload.patched_block(*(w.clone() for w in some)) for some in twice]
            stored = [workload.patched_block(*(w.clone() for w in some)) for some in twice]  # by rows
            for each in (*quantized, *stored):
                quantize_block(each, each.twell.form, weights)
            for each in stored if dynamic else ():
                make_dynamic(each.down_proj.weight)
            variants = {
                "eager": (block.dense, plain),
                "torchao": (block.dense, [_weights(each) for each in stored]),
                "sparse": (lambda x, ffn: ffn(x), [(each,) for each in quantized]),
                "sparse_plain": (lambda x, ffn: ffn(x), [(each,) for each in ours]),
            }
            if compile_dense:
                compiled = torch.compile(block.dense, dynamic=False)
                variants["compiled"] = compiled, variants["eager"][1]
                variants["torchao_compiled"] = compiled, variants["torchao"][1]
                some = workload.active_neurons(pool[:4096], matrices[0])
                known = [asked.density], {run: [share] for run, share in unions_of(some).items()}
                store_density(quantized, *known)
                choices = quantized[0].twell.choices
                if device.type == "cuda" and choices is not None and not choice_for(choices, count):
                    variants["sparse_compiled"] = variants["sparse"][0], _compiled(quantized)
                    if dynamic:
                        with_h = [workload.patched_block(*(w.clone() for w in some)) for some in twice]
                        for each in with_h:
                            quantize_block(each, each.twell.form, weights)
                            make_dynamic(each.down_proj.weight)
                        store_density(with_h, *known)
                        variants["sparse_h_compiled"] = variants["sparse"][0], _compiled(with_h)
            if dynamic:
                by_rows = torch.compile(_scaled_mm_block, dynamic=False) if compile_dense else _scaled_mm_block
                variants["scaled_mm"] = by_rows, [_values(each) for each in stored]
            with torch.inference_mode():
                row = _row(variants, xs, active, quantized, captured, weights, repeats, report)
                yield block.described(asked, xs[0], active, strangers) | row


def _row(variants, xs, active, quantized, captured, weights, repeats, report) -> dict:
    report("checking")
    device, count = xs[0].device, len(xs[0])

    def call(name, turn):
        function, sets = variants[name]
        return function(xs[turn % len(xs)], *sets[turn % len(sets)])

    for _ in range(2):  # a block's first call looks at its density, its next one finds what that saw
        for turn in range(len(quantized)):
            call("sparse", turn), call("sparse_plain", turn)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    calls = {name: functools.partial(call, name) for name in variants}
    if captured:
        graphs = {
            name: Captured(lambda one=one: [one(i) for i in range(len(xs))], device) for name, one in calls.items()
        }
        calls = {name: lambda turn, graph=graph: graph() for name, graph in graphs.items()}
    took = block.taken(quantized[0], xs[0])
    # Of fp8-dynamic, kernels leave few tokens as they are, where torchao's linears quantize all.
    quantizes = weights == "fp8-dynamic" and (took == "plain matmuls" or count > limit("kDecodeMaxTokens"))
    gate, up, down = ((weight.qdata, weight.scale) for weight in _weights(quantized[0]))
    values, scales = (up[0], down[0], gate[0]), {"s_up": up[1], "s_down": down[1], "s_gate": gate[1]}
    if weights != "fp8-dynamic":
        eager = call("torchao", 0)
    else:
        eager = block.dense(xs[0], *_weights(quantized[0])) if quantizes else reference.ffn(xs[0], *values, **scales)
    outputs = {"eager": {"y": eager}, "sparse": {"y": calls["sparse"](0)[0] if captured else call("sparse", 0)}}
    truth = torch.cat(
        [  # a whole h would take gigabytes
            reference.ffn(_wide(part, quantizes), *values, **scales) for part in xs[0].split(8192)
        ]
    )
    errors = check_block(outputs, {"y": truth}, xs[0].dtype, count, active.sum().item())
    if "sparse_h_compiled" in variants:
        with_h = {"eager": {"y": call("torchao", 0)}, "sparse": {"y": call("sparse_h_compiled", 0)}}
        check_block(with_h, {"y": truth}, xs[0].dtype, count, active.sum().item())
    turns = repeats or (25 if device.type == "cuda" else 11)
    # torchao's eager linears take the host milliseconds, others' single calls longer than the flush of L2.
    passed = interleaved_ms(calls, turns, device, _other_work(call, device), head_start=not captured, report=report)
    times = {name: time / len(xs) for name, time in passed.items()}

    def speedup(*names):
        ours = min(times["sparse"], times.get("sparse_compiled", float("inf")))
        return round(min(times[name] for name in names if name in times) / ours, 3)

    return {
        "weights": weights,
        "pass": "forward",
        "error": errors["y"]["sparse"],
        "error_eager": errors["y"]["eager"],
        **{f"{name}_ms": round(value, 5) for name, value in times.items()},
        "speedup": speedup("eager", "compiled"),
        "speedup_same_weights": speedup("torchao", "torchao_compiled", "scaled_mm"),
        "speedup_plain": speedup("sparse_plain"),
        "timed": f"captured graph of {len(xs)} blocks" if captured else "single calls",
        "took": took,
        "down_stored_by": "rows" if down[0].is_contiguous() else "columns",
    }


def _other_work(call, device):
    """What comes before each timed call.

    On a CPU, a dense block, as matmuls come before each block of a model. Else our second block would find the code of
    our first one in the caches, and no other would.
    """
    return (lambda name, turn: call("eager", turn + 1)) if device.type == "cpu" else (lambda name, turn: None)


def _compiled(ffns) -> list[tuple]:
    return [(torch.compile(ffn, dynamic=False),) for ffn in ffns]


def _weights(ffn) -> list[torch.Tensor]:
    return [getattr(ffn, name).weight for name in NAMES]


def _values(ffn) -> list[torch.Tensor]:
    return [part for weight in _weights(ffn) for part in (weight.qdata, weight.scale)]


def _wide(x, quantizes: bool) -> torch.Tensor:
    """x, or what its quantized rows stand for, in what the truth is computed in."""
    wide = wider_dtype(x.dtype)
    return reference.dequantized_rows(*reference.quantized_rows(x), wide) if quantizes else x.to(wide)


def _scaled_mm_block(x, w_gate, s_gate, w_up, s_up, w_down, s_down):
    """Dense, of e4m3 weights with a scale a row, (F, D), (F, 1) and so on; x and h quantized by token."""

    def product(rows, w, scale):
        values, scales = rows
        return torch._scaled_mm(values, w.t(), scales, scale.t(), out_dtype=x.dtype, use_fast_accum=True)

    rows = reference.quantized_rows(x)
    h = torch.relu(product(rows, w_gate, s_gate)) * product(rows, w_up, s_up)
    return product(reference.quantized_rows(h), w_down, s_down)
