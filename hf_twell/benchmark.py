"""What `hf-twell bench` measures: correctness first, then interleaved medians against the dense alternatives."""

import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

import hf_twell
from hf_twell import ops, workload
from hf_twell._layout import SPARSE

COLD_BYTES = 256 << 20  # rotated weights take at least this much, so that no cache holds the next call's
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def bench_ffn(
    tokens: list[int],
    l0s: list[float],
    *,
    hidden: int = 2048,
    intermediate: int = 5632,
    dtype: str = "bfloat16",
    backward: bool = False,
    repeats: int = 11,
    compile_dense: bool = True,
) -> Iterator[dict]:
    """One row for each number of tokens and L0: times of eager, compiled and sparse FFNs, and the sparse one's error.

    Args:
        backward: forward and backward, `.grad` None before each; else forward alone under inference mode.
    """
    for count, l0 in ((t, value) for value in l0s for t in tokens):
        x_all, *weights = workload.make_ffn(max(count, 1024), hidden, intermediate, l0, dtype=DTYPES[dtype])
        x = _typical_run(x_all, weights[0], count, l0)
        active = (x.float() @ weights[0].float().T > 0).sum(1).float().mean().item()
        # As a patched module would keep down_proj.
        stored_by = "columns" if not backward and active < SPARSE * intermediate else "rows"
        copies = -(-COLD_BYTES // (3 * hidden * intermediate * x.element_size())) + 1
        stock = [[w.clone() for w in weights] for _ in range(copies)]
        ours = [[gate, up, down.t().contiguous().t() if stored_by == "columns" else down] for gate, up, down in stock]
        variants: dict[str, tuple[Callable, list]] = {"eager": (_dense, stock)}
        if compile_dense:
            torch._dynamo.reset()
            variants["compiled"] = (torch.compile(_dense), stock)
        variants["sparse"] = (lambda x, gate, up, down: ops.ffn(x, up, down, gate), ours)
        error = _relative_error(x, stock[0], ours[0])
        times = _interleaved(variants, x, repeats, backward)
        dense_ms = min(value for name, value in times.items() if name != "sparse")
        yield {
            "bench": "ffn",
            "tokens": count,
            "hidden": hidden,
            "intermediate": intermediate,
            "dtype": dtype,
            "pass": "forward+backward" if backward else "forward",
            "requested_l0": l0,
            "l0": round(active, 2),
            "density": round(active / intermediate, 5),
            "down_stored_by": stored_by,
            "error": error["sparse"],
            "error_eager": error["eager"],
            **{f"{name}_ms": round(value, 4) for name, value in times.items()},
            "speedup": round(dense_ms / times["sparse"], 3),
            **environment(),
        }


def bench_generate(
    *, l0: float = 30.0, new_tokens: int = 128, dtype: str = "bfloat16", repeats: int = 3, **shape
) -> dict:
    """Greedy decoding of one sequence by the same random Llama, dense and sparse, in turns; tokens per second."""
    model = workload.make_llama(l0, dtype=DTYPES[dtype], **shape)
    prompt = torch.randint(model.config.vocab_size, (1, 16), generator=torch.Generator().manual_seed(1))
    blocks = hf_twell.modeling.sparse_ffns(model)

    def use(backend):
        for block in blocks:
            block.twell.backend = backend

    seconds: dict[str, list[float]] = {"reference": [], "auto": []}
    logits, outputs = {}, {}
    with torch.inference_mode():
        for name in seconds:
            use(name)
            logits[name] = model(prompt).logits.float()
        for _ in range(repeats):
            for name, spent in seconds.items():
                use(name)
                start = time.perf_counter()
                outputs[name] = model.generate(
                    prompt, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0
                )
                spent.append(time.perf_counter() - start)
    dense, sparse = (new_tokens / statistics.median(seconds[name]) for name in ("reference", "auto"))
    difference = (logits["auto"] - logits["reference"]).norm() / logits["reference"].norm()
    return {
        "bench": "generate",
        "new_tokens": new_tokens,
        "layers": len(blocks),
        "hidden": model.config.hidden_size,
        "intermediate": model.config.intermediate_size,
        "vocabulary": model.config.vocab_size,
        "dtype": dtype,
        "l0": l0,
        "dense_tokens_per_s": round(dense, 3),
        "sparse_tokens_per_s": round(sparse, 3),
        "speedup": round(sparse / dense, 3),
        "logits_difference": difference.item(),
        "same_tokens": torch.equal(outputs["auto"], outputs["reference"]),
        **environment(),
    }


def plot_ffn(rows: list[dict], path: Path) -> None:
    """Speed-up over the better dense FFN against tokens, one line for each requested L0; drawn from the rows alone."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    lines: dict[tuple, list] = {}
    for row in rows:
        lines.setdefault((row["dtype"], row["pass"], row["requested_l0"]), []).append((row["tokens"], row["speedup"]))
    for (dtype, what, l0), points in sorted(lines.items()):
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=f"L0 = {l0:g}, {dtype}, {what}")
    axes.axhline(1, color="gray", linewidth=1)
    axes.set(xscale="log", xlabel="tokens", ylabel="speed-up over dense (better of eager and compiled)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def environment() -> dict:
    """What a row must name to be compared with another."""
    return {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "hf_twell": hf_twell.__version__,
        "commit": _commit(),
    }


def _typical_run(x, w_gate, count, l0) -> torch.Tensor:
    """`count` consecutive tokens whose own mean L0 is nearest to `l0`: few tokens vary widely."""
    if count >= len(x):
        return x
    active = (x.float() @ w_gate.float().T > 0).sum(1).double()
    total = torch.cat([active.new_zeros(1), active.cumsum(0)])
    start = ((total[count:] - total[:-count]) / count - l0).abs().argmin().item()
    return x[start : start + count].contiguous()


def _dense(x, w_gate, w_up, w_down):
    return F.linear(torch.relu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


@torch.inference_mode()
def _relative_error(x, stock, ours) -> dict:
    truth = _dense(x.float(), *(w.float() for w in stock))
    gate, up, down = ours
    results = {"eager": _dense(x, *stock), "sparse": ops.ffn(x, up, down, gate)}
    return {name: ((y.float() - truth).norm() / truth.norm().clamp_min(1e-30)).item() for name, y in results.items()}


def _interleaved(variants, x, repeats, backward) -> dict[str, float]:
    """Median milliseconds of each variant, all taking turns, after two turns of warming up."""
    grad_y = torch.randn(x.shape).to(x.dtype)
    if backward:
        x = x.detach().requires_grad_()
        for weights in next(iter(variants.values()))[1]:
            for w in weights:
                w.requires_grad_()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(repeats + 2):
        for name, (function, sets) in variants.items():
            weights = sets[turn % len(sets)]
            for w in (x, *(w for some in sets for w in some)):
                w.grad = None
            start = time.perf_counter()
            if backward:
                function(x, *weights).backward(grad_y)
            else:
                with torch.inference_mode():
                    function(x, *weights)
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


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
