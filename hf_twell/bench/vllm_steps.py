"""What the GPU itself takes for a step of vLLM, which tokens a second of a server hide: sparse against dense.

    python -m hf_twell.bench.vllm_steps MODEL --prompts ids.json --batch 1 16 64 --prefill 8 --output FOLDER

In vLLM's environment, on one GPU. First dense (the plugin's kernels off: vLLM's own matmuls and ReLU), then sparse,
each in two engines, one after the other: one whose steps the profiler sees, and one, left as vLLM starts it, for tokens
a second. A decode step is one CUDA graph; its time is the span from its first kernel's start to its last one's end, by
PyTorch's profiler, the median over the steps of an answer; rows tell its kernels, too. A prefill is all prompts at
once, answered by one token; its time is that in which at least one kernel runs, the median of three. ids.json holds
lists of token ids, which decide how many neurons are active.
"""

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from hf_twell.files.tables import text_table

SIDES = ("dense", "sparse")
PROFILED_TOKENS, PROFILED_PREFILLS, WARM_UP_TOKENS = 48, 3, 16
# Of each engine's process. The profiler sees its own process alone; vLLM's scheduler otherwise has one beside it.
PARTS = {"steps": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, "answers": {}}


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
    count, total = Counter(), Counter()
    for start, end, name in itertools.chain.from_iterable(steps):
        count[name] += 1
        total[name] += end - start
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


def measure(args, side: str, part: str) -> list[dict]:
    """Of one engine: what the part tells of each batch, and of the prefill."""
    import torch
    import vllm
    from vllm import LLM

    from hf_twell.bench.environment import commit

    prompts = json.loads(Path(args.prompts).read_text())
    settings = {"kernels": side == "sparse"}
    if args.density is not None:
        settings["density"] = args.density
    most = max([*args.batch, args.prefill])
    engine = LLM(
        args.model,
        dtype=args.dtype,
        skip_tokenizer_init=True,
        additional_config={"hf_twell": settings},
        max_model_len=args.context,
        max_num_seqs=most,
        max_num_batched_tokens=max(args.context, 16_384),
        gpu_memory_utilization=args.memory,
        enable_prefix_caching=False,
    )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    about = {"gpu": gpu, "vllm": vllm.__version__, "commit": commit()}
    measure_load = {"steps": _steps, "answers": _answers}[part]
    rows = []
    for kind, batch in [("decode", batch) for batch in args.batch] + [("prefill", args.prefill)] * bool(args.prefill):
        ids = [prompt[: args.prompt_tokens] if kind == "decode" else prompt for prompt in prompts[:batch]]
        given = [{"prompt_token_ids": each} for each in ids]
        _generate(engine, given, WARM_UP_TOKENS if kind == "decode" else 1)
        count = {"prompt_tokens": sum(map(len, ids))} if kind == "prefill" else {}
        row = {"side": side, "measured": kind, "batch": batch, **count}
        rows.append({**row, **measure_load(engine, given, kind, args), **about})
    return rows


def _steps(engine, given, kind: str, args) -> dict:
    if kind == "prefill":
        busy = [busy_us(_profiled(engine, given, 1)[1]) for _ in range(PROFILED_PREFILLS)]
        return {"step_us": round(statistics.median(busy), 2), "steps": len(busy)}
    tokens, trace = _profiled(engine, given, PROFILED_TOKENS)
    steps = graph_steps(trace)
    median = round(statistics.median(map(span_us, steps)), 2) if steps else None
    told = {"step_us": median, "steps": len(steps), "kernels": kernels_us(steps)}
    return {**told, "tokens": [list(ids) for ids in tokens[:4]]}


def _answers(engine, given, kind: str, args) -> dict:
    """Tokens a second: of the answers, and in a prefill of the prompts."""
    new_tokens = args.new_tokens if kind == "decode" else 1
    count = len(given) * new_tokens if kind == "decode" else sum(len(each["prompt_token_ids"]) for each in given)
    seconds = [_seconds(engine, given, new_tokens) for _ in range(args.repeats)]
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


HEAD = ["load", "dense, us on the GPU", "sparse", "speed-up", "dense, tokens/s", "sparse", "speed-up", "same answers"]


def cells(rows: list[dict]) -> list[list]:
    """Under `HEAD`, for each load: the GPU's time and the tokens a second of both sides, and their ratios."""
    lines = []
    dense, sparse = ([row for row in rows if row["side"] == side] for side in SIDES)
    for theirs, ours in zip(dense, sparse, strict=True):
        rates = [row.get("tokens_per_s") for row in (theirs, ours)]
        medians = [statistics.median(rate) for rate in rates if rate]
        same = [a == b for a, b in zip(theirs.get("tokens", []), ours.get("tokens", []), strict=True)]
        known = theirs["step_us"] and ours["step_us"]
        lines.append(
            [
                f"{ours['measured']} {ours['batch']}",
                *(row["step_us"] for row in (theirs, ours)),
                f"{theirs['step_us'] / ours['step_us']:.3f}x" if known else None,
                *(rate and f"{statistics.median(rate):.1f} ({min(rate):.1f} to {max(rate):.1f})" for rate in rates),
                f"{medians[1] / medians[0]:.3f}x" if len(medians) == 2 else None,
                f"{sum(same)} of {len(same)}" if same else None,
            ]
        )  # fmt: skip
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a sparse checkpoint's folder")
    parser.add_argument("--prompts", required=True, help="a JSON file of lists of token ids")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 128], help="sequences in a decode step")
    parser.add_argument("--prefill", type=int, default=8, help="whole prompts at once; 0: none (default: 8)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of a prompt in decoding (default: 128)")
    parser.add_argument("--new-tokens", type=int, default=512, help="of each timed answer (default: 512)")
    parser.add_argument("--repeats", type=int, default=7, help="timed answers, at least 1 (default: 7)")
    parser.add_argument("--steps-only", action="store_true", help="no tokens a second: two engines, not four")
    parser.add_argument("--density", type=float, help="of every layer, in place of the checkpoint's own")
    parser.add_argument("--dtype", default="auto", help="as vLLM takes it; auto: 16 bits of float32 models, too")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--memory", type=float, default=0.6, help="share of the GPU's (default: 0.6)")
    parser.add_argument("--output", help="append rows to vllm_steps.jsonl in this folder")
    # In an engine's own process: its side and part, and a file for what it tells.
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part:
        side, part, path = args.part
        Path(path).write_text(json.dumps(measure(args, side, part)))
        return
    if importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed in this Python; run it in vLLM's own environment")
    if not Path(args.model, "config.json").is_file() or not Path(args.prompts).is_file():
        parser.error(f"{args.model} must be a checkpoint's folder, and {args.prompts} a file of prompts")
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}; give at least 1")
    count, most = len(json.loads(Path(args.prompts).read_text())), max([*args.batch, args.prefill])
    if count < most:
        parser.error(f"{args.prompts} has {count} prompts; give {most}")
    parts = [part for part in PARTS if part == "steps" or not args.steps_only]
    rows = [row for side in SIDES for row in _rows_of(side, parts, sys.argv[1:] if argv is None else argv)]
    print(text_table(HEAD, cells(rows)))
    if args.output:
        Path(args.output).mkdir(parents=True, exist_ok=True)
        with (Path(args.output) / "vllm_steps.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def _rows_of(side: str, parts: list[str], arguments: list[str]) -> list[dict]:
    """What a side's engines, one for each part, tell of each load.

    Raises:
        SystemExit: an engine failed; what it said stands above.
    """
    told = []
    with tempfile.TemporaryDirectory(prefix="hf-twell-steps-") as folder:
        for part in parts:
            path = Path(folder) / f"{part}.json"
            command = [sys.executable, "-m", "hf_twell.bench.vllm_steps", *arguments, "--part", side, part, str(path)]
            # The key of vLLM's cache of compiled code sees no environment variables, so each side has its own.
            environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "VLLM_CACHE_ROOT": f"{folder}/vllm"} | PARTS[part]
            done = subprocess.run(command, env=environment, stdout=sys.stderr.fileno())  # vLLM logs to stdout
            if done.returncode or not path.is_file():
                raise SystemExit(f"the {side} engine ended with {done.returncode}; its last lines are above")
            told.append(json.loads(path.read_text()))
    return [{key: value for part in rows for key, value in part.items()} for rows in zip(*told, strict=True)]


if __name__ == "__main__":
    main()
