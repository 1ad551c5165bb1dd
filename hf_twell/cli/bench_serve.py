"""`hf-twell bench serve MODEL`: its options, the commands that serve both sides, and the order in which they run."""

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hf_twell.cli.output import DTYPES

if TYPE_CHECKING:
    from hf_twell.bench.serve import Prompts

CONCURRENCY = {"vllm": [1, 16, 64, 128], "transformers": [1]}  # whose requests wait for each other
PREFILL_TOKENS, PREFILL_PROMPTS = 1024, 4
SIDES = ("dense", "sparse")  # the baseline first: the sparse server's answers are compared before it is timed


def add_serve_options(parser: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """`count` is the type of options that are whole numbers."""
    parser.add_argument("model", metavar="MODEL", help="a sparse model's folder or Hub name")
    parser.add_argument(
        "--engine",
        choices=("auto", "vllm", "transformers"),
        default="auto",
        help="what serves it; auto takes vLLM where it is installed and runs the model, else Transformers",
    )
    parser.add_argument(
        "--concurrency",
        type=count,
        nargs="+",
        metavar="N",
        help="requests at once (default: 1 16 64 128; of Transformers, which answers one after the other, 1)",
    )
    parser.add_argument("--prompt-tokens", type=count, default=128, help="of each request (default: 128)")
    parser.add_argument("--new-tokens", type=count, default=128, help="of each answer (default: 128)")
    parser.add_argument(
        "--prefill-tokens", type=count, help=f"of the long prompts (default: {PREFILL_TOKENS:,}, or what MODEL takes)"
    )
    parser.add_argument(
        "--prefill-prompts",
        type=int,
        default=PREFILL_PROMPTS,
        metavar="N",
        help=f"long prompts at once, answered by one token (default: {PREFILL_PROMPTS}; 0 leaves that row out)",
    )
    parser.add_argument(
        "--text", nargs="+", metavar="FILE", help="text files (.txt, .xz) of prompts (default: random words)"
    )
    parser.add_argument("--repeats", type=count, default=7, help="timed turns (default: 7)")
    parser.add_argument("--rounds", type=count, default=1, help="times each server is started (default: 1)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: as stored, or as vLLM chooses")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="of Transformers (default: cuda where there is one)")
    parser.epilog = "arguments after -- go to vLLM's server as they are; --text decides the activity"


def prepare_serve(args: argparse.Namespace) -> tuple[Callable, dict]:
    """`serve_rows` and what it takes, after what needs no server has been checked; errors are of one line."""
    from hf_twell.files.configs import read_config
    from hf_twell.serving import vllm_engine

    on_transformers = args.engine == "auto" and args.device is not None
    missing = vllm_engine.why_not("transformers" if on_transformers else args.engine, args.model, args.passed_on)
    config = read_config(args.model)
    if config.get("twell") is None:
        raise ValueError(f"{args.model} is not sparse (no `twell` entry in its config); convert it: hf-twell sparsify")
    if missing is None:
        if args.device:
            raise ValueError("--device is for --engine transformers; vLLM's own options follow after --")
        _, others = vllm_engine.additional_config(args.passed_on)
        for argument in others:
            if argument.replace("_", "-").startswith("--additional-config."):
                raise ValueError(f"{argument}: give --additional-config as one JSON object")
    elif args.passed_on:
        raise ValueError(f"arguments after -- are for vLLM, and the engine is Transformers ({missing}); leave them out")
    return serve_rows, {"engine": "transformers" if missing else "vllm", "config": config}


def serve_rows(args: argparse.Namespace, common: dict) -> tuple[Iterator[dict], int]:
    """An iterator of rows, and how many there will be."""
    loads = _loads(args, common["engine"], common["config"].get("max_position_embeddings"))
    return _all_servers(args, common, prompts_of(args)), args.rounds * len(SIDES) * len(loads)


def prompts_of(args: argparse.Namespace) -> "Prompts":
    """Passages of --text, or random words; a ValueError or OSError of files that hold no plain text."""
    from hf_twell.bench.serve import Prompts
    from hf_twell.files.text import read_documents
    from hf_twell.models.loading import load_tokenizer

    text = "\n".join(itertools.chain(*map(read_documents, args.text))) if args.text else None
    return Prompts(load_tokenizer(args.model), text)


def _loads(args, engine: str, context: int | None) -> list:
    """What is sent to each server; a ValueError where that is more tokens than the context has."""
    from hf_twell.bench.serve import Load, check_load

    counts = args.concurrency or CONCURRENCY[engine]
    loads = [Load("decode", n, args.prompt_tokens, args.new_tokens) for n in dict.fromkeys(counts)]
    if args.prefill_prompts > 0:
        tokens = args.prefill_tokens or min(PREFILL_TOKENS, (context or PREFILL_TOKENS + 1) - 1)
        loads.append(Load("prefill", args.prefill_prompts, tokens, 1))
    for load in loads:
        check_load(load, context)
    return loads


def _all_servers(args, common, prompts) -> Iterator[dict]:
    from hf_twell.bench.serve import Side
    from hf_twell.bench.serve_process import free_port, serving

    engine = common["engine"]
    baseline: list[str] = []  # the first server's answers
    with tempfile.TemporaryDirectory(prefix="hf-twell-bench-") as folder:
        for number, name in itertools.product(range(1, args.rounds + 1), SIDES):
            port, log = free_port(), Path(folder) / f"{name}-{number}.log"
            arguments = command(args, engine, name, port)
            with serving(name, arguments, port, log, common["report"], common["tell"]) as server:
                yield from _one_server(args, common, Side(name, engine, server), number, prompts, baseline)


def _one_server(args, common, side, number: int, prompts, baseline: list[str]) -> Iterator[dict]:
    from hf_twell.bench.serve import compare_texts, in_bursts, measure, server_environment, write_texts
    from hf_twell.convert.entry import mean_unions

    report, tell, server = common["report"], common["tell"], side.server
    loads = _loads(args, side.engine, server.context or common["config"].get("max_position_embeddings"))
    described = side.describe()
    tell(f"{side.name} server, {side.engine}: {described['computes'] or 'ready'}")
    if side.name == "sparse" and described["kernels"] is False:
        tell("warning: the sparse server uses no sparse kernels either, so both sides compute the same")
    write_texts(side, prompts, loads[0], report)
    if baseline:
        described |= compare_texts(side.texts, baseline, prompts.tokenizer, side.dtype())
        tell(f"its greedy answers agree in {described['same_tokens']} of {described['checked_tokens']} tokens")
    else:
        baseline += side.texts
    described = {
        "bench": "serve",
        "side": side.name,
        "engine": side.engine,
        "engine_version": _version(side.engine, server),
        "model": args.model,
        "density": density(common["config"], args.passed_on),
        "unions": mean_unions(common["config"]["twell"].get("unions") or {}) or None,
        "dtype": side.dtype(),
        "round": number,
        "repeats": args.repeats,
        "options": args.passed_on,
        "text": args.text or "random words",
        **described,
    }
    around = server_environment(side.engine, server, args.device)
    for row in measure(side, loads, prompts, args.repeats, number, report):
        if in_bursts(row):
            tell(
                f"warning: text came in {row['pieces']:.0f} pieces for {row['new_tokens']} tokens, as processors were "
                "busy: times to and between tokens say little here"
            )
        yield described | row | around


def command(args: argparse.Namespace, engine: str, side: str, port: int) -> list[str]:
    """What serves the checkpoint at `port`, with its kernels or with the engine's own matmuls and ReLU."""
    from hf_twell.serving import vllm_engine
    from hf_twell.serving.vllm_plugin.density import known_settings

    options = ["--engine", engine, "--host", "127.0.0.1", "--port", str(port), "--dtype", args.dtype]
    if engine == "transformers":
        options += ["--device", args.device] if args.device else []
        options += ["--backend", "reference"] if side == "dense" else []
    else:
        settings, others = vllm_engine.additional_config(args.passed_on)
        if side == "dense":
            settings = settings | {"hf_twell": {**known_settings(settings), "kernels": False}}
        options += ["--", *others, *(["--additional-config", json.dumps(settings)] if settings else [])]
    return [sys.executable, "-m", "hf_twell", "serve", args.model, *options]


def density(config: dict, passed_on: list[str]) -> float | None:
    """The mean of layers that vLLM would go by, or None where nothing says it."""
    from hf_twell.serving import vllm_engine
    from hf_twell.serving.vllm_plugin.density import known_densities

    settings, _ = vllm_engine.additional_config(passed_on)
    known, _ = known_densities(settings, config["twell"], config["num_hidden_layers"])
    return None if known is None else sum(known) / len(known)


def _version(engine: str, server) -> str | None:
    import importlib.metadata

    if engine == "transformers":
        return importlib.metadata.version("transformers")
    answer = server.get("/version")
    return json.loads(answer)["version"] if answer else None
