"""What the GPU itself takes for a step of vLLM, which tokens a second of a server hide: sparse against dense.

On one GPU: first dense (the plugin's kernels off: vLLM's own matmuls and ReLU), then sparse, each in two engines, one
after the other: one whose steps the profiler sees, and one, left as vLLM starts it, for tokens a second. A decode step
is one CUDA graph; its time is the span from its first kernel's start to its last one's end, by PyTorch's profiler, the
median over the steps of an answer; rows tell its kernels, too. A prefill is all prompts at once, answered by one token;
its time is that in which at least one kernel runs, the median of three. Prompts decide how many neurons are active.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hf_twell.bench.progress import Report, silent

SIDES = ("dense", "sparse")
PROFILED_TOKENS, PROFILED_PREFILLS, WARM_UP_TOKENS = 48, 3, 16
# Of each engine's process. The profiler sees its own process alone; vLLM's scheduler otherwise has one beside it.
PARTS = {"steps": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, "answers": {}}
ENGINE = "import sys; from hf_twell.bench.vllm_steps import run_part; run_part(sys.argv[1])"


@dataclass
class Loads:
    """What engines are given.

    Attributes:
        model: a sparse checkpoint's folder or Hub name.
        prompts: lists of token ids; decoding takes the first `prompt_tokens` of each.
        batches: sequences in a decode step. prefill: whole prompts at once; 0: none.
        new_tokens: of each timed answer, of which there are `repeats`.
        dtype: as vLLM takes it. memory: share of the GPU's.
    """

    model: str
    prompts: list[list[int]]
    batches: list[int]
    prefill: int
    prompt_tokens: int
    new_tokens: int
    repeats: int
    dtype: str
    memory: float


def context_of(length: int, prompt_tokens: int, new_tokens: int) -> int:
    """How many tokens the longest sequence comes to, of whole prompts and of answers."""
    return max(length, prompt_tokens + max(new_tokens, PROFILED_TOKENS)) + 1


def bench_vllm(loads: Loads, *, steps_only: bool = False, report: Report = silent) -> Iterator[dict]:
    """A row of each side for each load, dense ones first; a ValueError where an engine failed, whose own words stand
    above."""
    parts = [part for part in PARTS if part == "steps" or not steps_only]
    sides = []
    for side in SIDES:
        told = []
        for part in parts:
            report(f"{side} engine, {part}")
            told.append(_in_a_process(loads, side, part))
        sides += [{key: value for part in rows for key, value in part.items()} for rows in zip(*told, strict=True)]
    yield from sides


def _in_a_process(loads: Loads, side: str, part: str) -> list[dict]:
    with tempfile.TemporaryDirectory(prefix="hf-twell-steps-") as folder:
        Path(folder, "part.json").write_text(json.dumps({"side": side, "part": part, "loads": asdict(loads)}))
        # The key of vLLM's cache of compiled code sees no environment variables, so each side has its own.
        environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "VLLM_CACHE_ROOT": f"{folder}/vllm"} | PARTS[part]
        command = [sys.executable, "-c", ENGINE, folder]
        done = subprocess.run(command, env=environment, stdout=sys.stderr.fileno())  # vLLM logs to stdout
        if done.returncode:
            raise ValueError(f"vLLM's {side} engine ended with {done.returncode}; its last lines are above")
        return json.loads(Path(folder, "rows.json").read_text())


def run_part(folder: str) -> None:
    """In the engine's own process: measure what `part.json` in the folder says, and write `rows.json`."""
    told = json.loads(Path(folder, "part.json").read_text())
    rows = measure(Loads(**told["loads"]), told["side"], told["part"])
    Path(folder, "rows.json").write_text(json.dumps(rows))


def measure(loads: Loads, side: str, part: str) -> list[dict]:
    """Of one engine: what the part tells of each batch, and of the prefill."""
    import torch
    import vllm
    from vllm import LLM

    from hf_twell.bench.environment import environment

    context = context_of(max(map(len, loads.prompts)), loads.prompt_tokens, loads.new_tokens)
    engine = LLM(
        loads.model,
        dtype=loads.dtype,
        skip_tokenizer_init=True,
        additional_config={"hf_twell": {"kernels": side == "sparse"}},
        max_model_len=context,
        max_num_seqs=max([*loads.batches, loads.prefill]),
        max_num_batched_tokens=max(context, 16_384),
        gpu_memory_utilization=loads.memory,
        enable_prefix_caching=False,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = {"vllm": vllm.__version__, **environment(device)}
    measure_load = {"steps": _steps, "answers": _answers}[part]
    rows = []
    kinds = [("decode", batch) for batch in loads.batches] + [("prefill", loads.prefill)] * bool(loads.prefill)
    for kind, batch in kinds:
        ids = [prompt[: loads.prompt_tokens] if kind == "decode" else prompt for prompt in loads.prompts[:batch]]
        given = [{"prompt_token_ids": each} for each in ids]
        _generate(engine, given, WARM_UP_TOKENS if kind == "decode" else 1)
        count = {"prompt_tokens": sum(map(len, ids))} if kind == "prefill" else {}
        row = {"bench": "vllm", "side": side, "measured": kind, "batch": batch, **count}
        rows.append({**row, **measure_load(engine, given, kind, loads), **about})
    return rows


def _steps(engine, given, kind: str, loads: Loads) -> dict:
    """Without a GPU, which has no kernels to time, the greedy tokens alone."""
    if kind == "prefill":
        busy = [busy_us(_profiled(engine, given, 1)[1]) for _ in range(PROFILED_PREFILLS)]
        return {"step_us": round(statistics.median(busy), 2), "steps": len(busy)} if any(busy) else {}
    tokens, trace = _profiled(engine, given, PROFILED_TOKENS)
    steps = graph_steps(trace)
    told = {"tokens": [list(ids) for ids in tokens[:4]]}
    if not steps:
        return told
    return {
        "step_us": round(statistics.median(map(span_us, steps)), 2),
        "steps": len(steps),
        "kernels": kernels_us(steps),
        **told,
    }


def _answers(engine, given, kind: str, loads: Loads) -> dict:
    """Tokens a second: of the answers, and in a prefill of the prompts."""
    new_tokens = loads.new_tokens if kind == "decode" else 1
    count = len(given) * new_tokens if kind == "decode" else sum(len(each["prompt_token_ids"]) for each in given)
    seconds = [_seconds(engine, given, new_tokens) for _ in range(loads.repeats)]
    return {"tokens_per_s": [round(count / each, 2) for each in seconds]}


def _generate(engine, prompts, new_tokens: int) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    return [list(answer.outputs[0].token_ids) for answer in engine.generate(prompts, params, use_tqdm=False)]


def _seconds(engine, prompts, new_tokens: int) -> float:
    started = time.perf_counter()
    _generate(engine, prompts, new_tokens)
    return time.perf_counter() - started


def _profiled(engine, prompts, new_tokens: int) -> tuple[list[list[int]], dict]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        tokens = _generate(engine, prompts, new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        return tokens, json.loads(Path(folder, "trace.json").read_text())


def graph_steps(trace: dict) -> list[list[tuple[float, float, str]]]:
    """(start, end, name) of the kernels of each CUDA graph launch that was a decode step of all sequences, in us.

    Those run one graph, so as many kernels each. Steps of fewer sequences, as an answer begins or ends, run
    another one, which may have more kernels, but seldomer; a sampler's graphs and pieces of a model have far fewer.
    """
    events = trace["traceEvents"]
    launches = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") == "cuda_runtime" and event["name"].startswith("cudaGraphLaunch")
    }
    graphs = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and event["args"].get("correlation") in launches:
            graphs[event["args"]["correlation"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    most = max(map(len, graphs.values()), default=0)
    counts = Counter(len(kernels) for kernels in graphs.values() if 2 * len(kernels) >= most)
    chosen = max(counts, key=lambda count: (counts[count], count), default=0)
    return [kernels for kernels in graphs.values() if len(kernels) == chosen]


def span_us(kernels: list[tuple[float, float, str]]) -> float:
    """From the first kernel's start to the last one's end."""
    return max(end for _, end, _ in kernels) - min(start for start, _, _ in kernels)


def kernels_us(steps: list[list[tuple[float, float, str]]], most: int = 24) -> list[dict]:
    """Which kernels run in a step: how often, and for how long in all; the longest first.

    One that starts beside the kernel ahead counts its wait for that one, so their sum may exceed the step.
    """
    count: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for start, end, name in itertools.chain.from_iterable(steps):
        count[name] += 1
        total[name] += end - start  # type: ignore[assignment]
    return [
        {"kernel": name[:120], "count": round(count[name] / len(steps), 2), "us": round(us / len(steps), 2)}
        for name, us in total.most_common(most)
    ]


def busy_us(trace: dict) -> float:
    """For how long at least one kernel ran."""
    total, until = 0.0, float("-inf")
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in trace["traceEvents"] if e.get("cat") == "kernel"]
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
