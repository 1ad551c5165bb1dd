"""Serve one model behind OpenAI's API: streaming, chat template, concurrent requests. Ctrl-C stops it.

Where vLLM is installed, its server is started. Elsewhere Transformers' own handlers answer, on a CPU or a GPU, one
request after the other, and the model runs on its sparse kernels. A dense model is served as it is. Whoever reaches
--host may use the server: there is no password.

examples:
  hf-twell serve ./my-model
  hf-twell serve ./my-model --port 8080 --dtype bfloat16
  hf-twell serve ./my-model --engine vllm -- --max-model-len 4096
"""

import argparse
import importlib
import json
import logging
import os
import shlex
import sys
from functools import partial

from hf_twell.cli.output import DTYPES, stdout_for_result

PACKAGES = ("fastapi", "openai", "uvicorn")  # of the extra `serve`, which Transformers' handlers import when they load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model's folder, an adapter's, a GGUF file or a Hub name")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1, this machine)")
    parser.add_argument("--port", type=_port, default=8000, help="default: 8000; 0 takes a free one")
    parser.add_argument(
        "--engine",
        choices=("auto", "vllm", "transformers"),
        default="auto",
        help="auto takes vLLM where it is installed and runs the model, else Transformers (default: auto)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: as stored")
    parser.add_argument("--device", help="of Transformers: cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument(
        "--backend", default="auto", help="of Transformers: backend of a sparse model's kernels (default: auto)"
    )
    parser.epilog = "arguments after -- go to vLLM's server as they are"


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text}: give a number from 0 to 65535")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C; errors say in one line what was given and what is wrong with it."""
    from hf_twell.serving import vllm_engine

    asked = "transformers" if args.engine == "auto" and _for_transformers(args) else args.engine
    with stdout_for_result():
        missing = vllm_engine.why_not(asked, args.model, args.passed_on)
    if missing is None:
        return _run_vllm(args)
    if args.passed_on:
        raise ValueError(f"arguments after -- are for vLLM, and the engine is Transformers ({missing}); leave them out")
    print(f"engine: Transformers ({missing})", flush=True)
    return _run_transformers(args)


def _for_transformers(args) -> bool:
    return args.device is not None or args.backend != "auto"


def _run_vllm(args) -> int:
    from hf_twell.serving import server, vllm_engine

    if _for_transformers(args):
        raise ValueError("--device and --backend are for --engine transformers; vLLM's own options follow after --")
    with server.bind(args.host, args.port) as listener:
        url, port = server.url(listener), listener.getsockname()[1]
    with stdout_for_result():
        kind = vllm_engine.describe(args.model, args.passed_on)
    print(f"engine: vLLM\n{args.model} {kind}", flush=True)
    memory = vllm_engine.memory_options(args.passed_on)
    if memory:
        print(f"little memory is free, so vLLM gets {' '.join(memory)}; other values go after --", flush=True)
    body = {"prompt": "Once upon a time", "max_tokens": 32}
    print(f"when vLLM says that its startup is complete, try\n{_curl(url, 'completions', body)}", flush=True)
    command = vllm_engine.command(args.model, args.host, port, args.dtype, [*memory, *args.passed_on])
    os.execv(command[0], command)


def _run_transformers(args) -> int:
    for package in PACKAGES:
        importlib.import_module(package)
    from hf_twell.serving import server

    listener = server.bind(args.host, args.port)  # which fails at once, and PyTorch's import takes seconds
    with stdout_for_result():
        from hf_twell.models.adapters import load_with_adapter
        from hf_twell.models.loading import load_model
        from hf_twell.serving.app import build_app, stop_answers
        from hf_twell.serving.sparse import prepare

        logging.getLogger("transformers.cli.serving").setLevel(logging.ERROR)  # they warn of each request
        model, tokenizer = load_model(args.model, dtype=args.dtype, device=args.device, load=load_with_adapter)
        model.eval()
        computes = prepare(args.model, model, tokenizer, args.backend)
        app = build_app(args.model, model, tokenizer)
    ready = f"{computes}\n{_ready(server.url(listener), args.model, tokenizer)}"
    server.serve(app, listener, on_ready=partial(print, ready, flush=True), on_stop=partial(stop_answers, model))
    print("hf-twell: stopped", file=sys.stderr)
    return 0


def _ready(url: str, model: str, tokenizer) -> str:
    """Where it is, and a request to try."""
    route, body = "completions", {"model": model, "prompt": "Once upon a time", "max_tokens": 32}
    notes = "its tokenizer has no chat template, so /v1/chat/completions refuses and /v1/completions answers\n"
    if tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": "Tell me a story."}]
        route, body = "chat/completions", {"model": model, "messages": messages, "max_tokens": 32}
        notes = ""
    return f"{notes}ready at {url}/v1 (Ctrl-C stops it); try\n{_curl(url, route, body)}"


def _curl(url: str, route: str, body: dict) -> str:
    return f"  curl {url}/v1/{route} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
