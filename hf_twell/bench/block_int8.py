"""What `hf-twell bench ffn --weights int8` measures: the block in torchao's int8, by our kernels and by torchao."""

from collections.abc import Iterator

import torch

from hf_twell.bench import block, workload
from hf_twell.bench.check import check_block, wider_dtype
from hf_twell.bench.environment import DTYPES, environment
from hf_twell.bench.progress import Report, silent
from hf_twell.bench.timing import interleaved_ms
from hf_twell.blocks.operands import int8_values
from hf_twell.ops import api, reference

NAMES = ("gate_proj", "up_proj", "down_proj")


def bench_ffn_int8(
    tokens: list[int],
    l0s: list[float],
    *,
    hidden: int = 2048,
    intermediate: int = 5632,
    dtype: str = "bfloat16",
    repeats: int | None = None,
    compile_dense: bool = True,
    report: Report = silent,
) -> Iterator[dict]:
    """One row for each number of tokens and L0, on a CPU, forward under inference mode; all variants take turns.

    `eager` and `compiled` are dense in `dtype`, `torchao` and `torchao_compiled` dense in int8, `sparse` is our block
    in int8 and `sparse_plain` our block in `dtype`. `speedup` is over the better of the first two, as in other rows,
    `speedup_same_weights` over the better of torchao's, and `speedup_plain` over our own block in `dtype`.

    Raises:
        ValueError: a result less accurate than DESIGN allows (twice torchao's own error); no speed is given then.
        ImportError: torchao is missing.
    """
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    config = Int8WeightOnlyConfig(set_inductor_config=False)
    report("making the workload")
    made = [workload.make_ffn(max(1024, *tokens), hidden, intermediate, l0, dtype=DTYPES[dtype]) for l0 in l0s]
    for count in tokens:
        torch._dynamo.reset()  # recompiling for each shape would end at PyTorch's limit
        for l0, (pool, *weights) in zip(l0s, made, strict=True):
            (x,), active = block.draw(pool, weights[0], count, l0, 1)
            plain = [weights, *([w.clone() for w in weights] for _ in range(block.copies(weights, 1) - 1))]
            ours = [workload.patched_block(*(w.clone() for w in some)) for some in plain]
            quantized = [workload.patched_block(*(w.clone() for w in some)) for some in (*plain, *plain)]
            stored = [workload.patched_block(*(w.clone() for w in some)) for some in (*plain, *plain)]  # by rows
            for each in (*quantized, *stored):
                quantize_(each, config)
            calls = {
                "eager": lambda turn, x=x, sets=plain: block.dense(x, *sets[turn % len(sets)]),
                "torchao": lambda turn, x=x, sets=stored: block.dense(x, *_weights(sets[turn % len(sets)])),
                "sparse": lambda turn, x=x, sets=quantized: sets[turn % len(sets)](x),
                "sparse_plain": lambda turn, x=x, sets=ours: sets[turn % len(sets)](x),
            }
            if compile_dense:
                compiled = torch.compile(block.dense, dynamic=False)
                calls["compiled"] = lambda turn, x=x, f=compiled, sets=plain: f(x, *sets[turn % len(sets)])
                calls["torchao_compiled"] = lambda turn, x=x, f=compiled, sets=stored: f(
                    x, *_weights(sets[turn % len(sets)])
                )
            with torch.inference_mode():
                yield _row(calls, x, active, quantized, count, l0, dtype, repeats or 11, report)


def _row(calls, x, active, quantized, count, l0, dtype, repeats, report) -> dict:
    report("checking")
    for turn in range(len(quantized)):
        calls["sparse"](turn), calls["sparse_plain"](turn)  # a block's first call looks at its density
    outputs = {"eager": {"y": calls["torchao"](0)}, "sparse": {"y": calls["sparse"](0)}}
    gate, up, down = (int8_values(weight) for weight in _weights(quantized[0]))
    scales = {"s_up": up[1], "s_down": down[1], "s_gate": gate[1]}
    truth = reference.ffn(x.to(wider_dtype(x.dtype)), up[0], down[0], gate[0], **scales)
    errors = check_block(outputs, {"y": truth}, x.dtype, count, active.sum().item())
    times = interleaved_ms(calls, repeats, x.device, report=report)

    def speedup(*names):
        return round(min(times[name] for name in names if name in times) / times["sparse"], 3)

    intermediate, hidden = gate[0].shape
    return {
        "bench": "ffn",
        "tokens": count,
        "hidden": hidden,
        "intermediate": intermediate,
        "dtype": dtype,
        "weights": "int8",
        "requested_l0": round(l0, 3),
        "pass": "forward",
        "backend": api.resolve("auto", "cpu"),
        **block.activity(active, count, False),
        "error": errors["y"]["sparse"],
        "error_eager": errors["y"]["eager"],
        **{f"{name}_ms": round(value, 5) for name, value in times.items()},
        "speedup": speedup("eager", "compiled"),
        "speedup_same_weights": speedup("torchao", "torchao_compiled"),
        "speedup_plain": speedup("sparse_plain"),
        "timed": "single calls",
        "took": block.taken(quantized[0], x),
        "down_stored_by": "rows" if down[0].is_contiguous() else "columns",
        **environment(x.device),
    }


def _weights(ffn) -> list[torch.Tensor]:
    return [getattr(ffn, name).weight for name in NAMES]
