"""`hf-twell bench vllm`: its options, and the checkpoints and prompts whose steps are timed."""

import argparse
import importlib.util
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hf_twell.cli.bench_checkpoint import check_options, load_ids
from hf_twell.cli.output import DTYPES

if TYPE_CHECKING:
    from hf_twell.bench.progress import Report

BATCHES = [1, 16, 64, 128]


def add_vllm_options(parser: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """`count` is the type of options that are whole numbers."""
    parser.add_argument("--weights", choices=("int8", "fp8"), help="of the random model's linears (default: bfloat16)")
    parser.add_argument("--prefill", type=int, default=8, help="whole prompts at once; 0: none (default: 8)")
    parser.add_argument("--length", type=count, default=2048, help="tokens of a whole prompt (default: 2048)")
    parser.add_argument("--prompt-tokens", type=count, default=128, help="of a prompt in decoding (default: 128)")
    parser.add_argument("--new-tokens", type=count, default=512, help="of each timed answer (default: 512)")
    parser.add_argument("--steps-only", action="store_true", help="no tokens a second: two engines, not four")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="as vLLM takes it (default: auto)")
    parser.add_argument("--memory", type=float, default=0.6, help="share of the GPU's memory (default: 0.6)")


def prepare_vllm(args: argparse.Namespace, check_sizes: Callable) -> tuple[Callable, dict]:
    """`vllm_rows` and what it takes, after what needs no engine has been checked; errors are of one line."""
    import torch

    from hf_twell.bench.vllm_steps import context_of
    from hf_twell.files.configs import read_config

    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vLLM is not installed in this Python; run bench vllm in vLLM's own environment")
    if args.steps_only and not torch.cuda.is_available():
        raise ValueError("--steps-only times the GPU, and PyTorch sees none here; leave it out")
    if args.prefill < 0:
        raise ValueError(f"--prefill {args.prefill}; give 0 or more")
    if args.prompt_tokens > args.length:
        raise ValueError(f"--prompt-tokens {args.prompt_tokens} of prompts of {args.length}; give at most --length")
    if args.model is None:
        check_sizes(args)
        return vllm_rows, {}
    check_options(args)
    if args.weights:
        raise ValueError(f"--weights is for random models; leave it out for {args.model}")
    config = read_config(args.model)
    if config.get("twell") is None:
        raise ValueError(f"{args.model} is not sparse (no `twell` entry in its config); convert it: hf-twell sparsify")
    needed = context_of(args.length, args.prompt_tokens, args.new_tokens)
    if needed > (context := config.get("max_position_embeddings") or needed):
        raise ValueError(f"{args.model} takes {context} tokens, and these are {needed}; lower --length or --new-tokens")
    return vllm_rows, {}


def vllm_rows(args: argparse.Namespace, common: dict) -> tuple[Iterator[dict], int]:
    """An iterator of rows, and how many there will be."""
    batches = args.batch or BATCHES
    settings = [(None, None)] if args.model else list(itertools.product(args.layers, args.l0))
    return _rows(args, common, settings, batches), 2 * len(settings) * (len(batches) + bool(args.prefill))


def _rows(args, common, settings, batches) -> Iterator[dict]:
    from hf_twell.bench.models import passages
    from hf_twell.bench.vllm_steps import Loads, bench_vllm
    from hf_twell.models.loading import load_tokenizer

    names = ("prefill", "prompt_tokens", "new_tokens", "repeats", "dtype", "memory")
    options = {name: getattr(args, name) for name in names} | {"batches": batches}
    count = max([*batches, args.prefill])
    for layers, l0 in settings:
        with tempfile.TemporaryDirectory(prefix="hf-twell-vllm-") as folder:
            if args.model:
                described = {"model": args.model}
                ids = load_ids(load_tokenizer(args.model), args.text)
                model, prompts = args.model, passages(ids, count, args.length).tolist()
            else:
                model = str(Path(folder, "model"))
                described, prompts = save_llama(model, args, layers, l0, count, common["report"])
            rows = bench_vllm(Loads(model, prompts, **options), steps_only=args.steps_only, report=common["report"])
            yield from (row | described for row in rows)


def save_llama(
    folder: str, args: argparse.Namespace, layers: int, l0: float, count: int, report: "Report"
) -> tuple[dict, list[list[int]]]:
    """Save the random Llama of the other modes; what rows tell of it, and `count` prompts as token ids.

    In stock form, with each layer's density in the config and without a tokenizer.
    """
    import torch

    from hf_twell.bench.compressed import quantize_folder
    from hf_twell.bench.workload_llama import make_llama, make_text
    from hf_twell.files.folders import save_model
    from hf_twell.measure.sparsity import measure_sparsity

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {key: getattr(args, key) for key in ("hidden", "intermediate", "vocabulary", "heads", "kv_heads")}
    model, _ = make_llama(l0, **sizes, layers=layers, device=device, report=report)
    text = make_text(args.vocabulary, count, args.length)
    found = measure_sparsity(model, text[:4].to(device).split(1))  # which keeps each layer's density in the config
    save_model(model, folder, None)
    if args.weights:
        quantize_folder(model, folder, args.weights)
    described = {"layers": layers, "hidden": args.hidden, "intermediate": args.intermediate}
    unions = {run: share and round(share, 5) for run, share in found["unions"].items()}
    described |= {"l0": round(found["l0"], 2), "unions": unions, "weights": args.weights or "bfloat16"}
    del model
    if device == "cuda":
        torch.cuda.empty_cache()  # the engines need the room
    return described, text.tolist()
