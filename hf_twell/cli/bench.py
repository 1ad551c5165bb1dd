"""Measure the sparse feed-forward block, or a whole model in prefill, decoding, training or served, against dense.

Results are checked before they are timed; the variants take turns, and no cache holds one call's weights for the next.

examples:
  hf-twell bench ffn --tokens 1 16 128 1024 --l0 30 300 --output out/bench
  hf-twell bench ffn --shape llama-3.2-1b qwen2.5-7b --tokens 1 16384
  hf-twell bench ffn --backward --tokens 128 1024
  hf-twell bench ffn --backward --term count --share 64 --l0 203 --union 0.15 --tokens 16384
  hf-twell bench ffn --weights int8 --tokens 1 16
  hf-twell bench ffn --l0 535 327 203 --union 0.40 0.25 0.15 --tokens 1024 16384
  hf-twell bench ffn --activity ./my-sparse-model --layer 3 9 --neighbours --tokens 16
  hf-twell bench ffn --weights bf16 fp8 fp8-dynamic --tokens 1 16 4096
  hf-twell bench ffn --experts 128 --top-k 8 --intermediate 768 --l0 614 --tokens 1 8 64
  hf-twell bench prefill --layers 28 --batch 64 --length 2048 --energy
  hf-twell bench generate --layers 28 --batch 1 16 64
  hf-twell bench generate ./my-sparse-model --text notes.txt
  hf-twell bench serve ./my-sparse-model --text notes.txt --concurrency 1 16 --rounds 2
  hf-twell bench vllm --layers 28 --weights fp8 --batch 1 16 64
  hf-twell bench train --layers 8 28 --batch 8 --length 2048 --energy --output out/bench
"""

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hf_twell.cli.bench_checkpoint import add_checkpoint, check_options, default_of, load_checkpoint
from hf_twell.cli.bench_serve import add_serve_options, prepare_serve
from hf_twell.cli.bench_table import CELLS
from hf_twell.cli.bench_vllm import add_vllm_options, prepare_vllm
from hf_twell.cli.output import print_json, stdout_for_result, writing
from hf_twell.files.tables import text_table

SHAPES = {  # D, F
    "smollm2-135m": (576, 1536),
    "qwen2.5-0.5b": (896, 4864),
    "qwen3-0.6b": (1024, 3072),
    "llama-3.2-1b": (2048, 8192),
    "qwen2.5-7b": (3584, 18944),
    "llama-3.1-8b": (4096, 14336),
    "llama-70b": (8192, 28672),
}
SHAPE_L0_OF = 5632  # neurons for which --l0 is given when --shape scales it
BATCH = {"prefill": 64, "generate": 1, "train": 8}  # of random models; of the user's own, 1
LENGTH = 2048
ENGINES = ("serve", "vllm")  # modes that another engine computes
CPU_TOKENS = [1, 4, 16, 128, 1024]
CUDA_TOKENS = [1, 16, 64, 256, 1024, 4096, 16384, 65536]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number, 1 or more")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    modes = parser.add_subparsers(dest="what", required=True, metavar="MODE")
    for name, (summary, add_options) in _MODES.items():
        mode = modes.add_parser(name, help=summary, description=f"Measure {summary}, against dense.")
        add_options(mode)
        if name not in ENGINES:
            _add_common_options(mode, name)
        _add_output_options(mode)
        mode.set_defaults(parser=mode)


def _add_ffn_options(parser):
    parser.add_argument("--tokens", type=_count, nargs="+", help="default: from 1 to 1,024, on CUDA to 65,536")
    parser.add_argument(
        "--shape",
        nargs="+",
        choices=sorted(SHAPES),
        metavar="MODEL",
        help=f"D and F of {', '.join(SHAPES)}; --l0 then means that many of {SHAPE_L0_OF} and scales with F",
    )
    parser.add_argument(
        "--union",
        type=float,
        nargs="+",
        metavar="U",
        help="share of neurons active in at least one of 64 neighbouring tokens, from 0 to 1: one for all --l0, or one "
        "for each (default: as in models that were made sparse token by token)",
    )
    parser.add_argument(
        "--activity",
        metavar="FILE",
        help="density and unions of a measured model, in place of --l0 and --union: figures of `hf-twell inspect "
        "--output`, or a sparse model's folder",
    )
    parser.add_argument(
        "--layer", type=int, nargs="+", metavar="N", help="of --activity, layers from 0 on (default: their mean)"
    )
    parser.add_argument(
        "--neighbours",
        action="store_true",
        help="64 tokens or fewer are of one sequence, as drafted tokens that are verified, not of as many (CUDA; on a "
        "CPU they always are)",
    )
    parser.add_argument("--backward", action="store_true", help="forward and backward, in training, with --term")
    parser.add_argument("--term", choices=["l1", "count"], help="of --backward, what training presses on (default: l1)")
    parser.add_argument(
        "--share",
        type=_count,
        metavar="N",
        help="with --term count, also on what each run of N tokens activates together, as `share` does; all --tokens "
        "are then of one sequence",
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        choices=["bf16", "int8", "fp8", "fp8-dynamic"],
        help="the block in torchao's int8 or fp8 (e4m3), also with x quantized in each call (fp8-dynamic), beside "
        "--dtype's own and torchao's; bf16: as without this option",
    )
    parser.add_argument(
        "--experts",
        type=_count,
        metavar="E",
        help="a layer of so many routed experts, against Transformers' own; --intermediate is one expert's, --l0 a "
        "token's over all of its experts",
    )
    parser.add_argument("--top-k", type=_count, metavar="K", help="experts that each token goes through (default: 8)")
    parser.add_argument("--max-autotune", action="store_true", help="also max-autotune with coordinate descent (slow)")
    parser.add_argument("--repeats", type=_count, help="timed turns (default: 11, on CUDA 25)")


def _add_generate_options(parser):
    add_checkpoint(parser)
    _add_model_options(parser, "generate", repeats=3)
    parser.add_argument("--new-tokens", type=_count, default=128, help="tokens of each sequence (default: 128)")
    parser.add_argument("--steps-only", action="store_true", help="time decoding steps, not `generate` itself")


def _add_prefill_options(parser):
    add_checkpoint(parser)
    _add_sequence_options(parser, "prefill")


def _add_sequence_options(parser, what):
    _add_model_options(parser, what, repeats=5)
    default = default_of(what, LENGTH, "its context")
    parser.add_argument("--length", type=_count, help=f"tokens of each sequence ({default})")


def _add_vllm_mode(parser):
    add_checkpoint(parser)
    _add_model_sizes(parser)
    _add_workload_sizes(parser)
    parser.add_argument("--batch", type=_count, nargs="+", help="sequences in a decode step (default: 1 16 64 128)")
    parser.add_argument("--repeats", type=_count, default=7, help="timed answers (default: 7)")
    add_vllm_options(parser, _count)


def _add_model_options(parser, what, repeats):
    _add_model_sizes(parser)
    parser.add_argument("--batch", type=_count, nargs="+", help=f"sequences ({default_of(what, BATCH[what], 1)})")
    parser.add_argument("--repeats", type=_count, default=repeats, help=f"timed turns (default: {repeats})")


def _add_model_sizes(parser):
    parser.add_argument("--layers", type=_count, nargs="+", default=[8], help="default: 8; also 18, 28, 38: 0.5B to 2B")
    parser.add_argument("--heads", type=_count, help="attention heads (default: D / 64)")
    parser.add_argument("--kv-heads", type=_count, help="key-value heads (default: as many as heads)")
    parser.add_argument("--vocabulary", type=_count, default=32768, help="default: 32768")


def _add_common_options(parser, what):
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda where there is one")
    _add_workload_sizes(parser)
    dtypes = ["bfloat16", "float16", "float32"]
    parser.add_argument("--dtype", choices=dtypes, help=default_of(what, "bfloat16", "as stored"))
    parser.add_argument("--threads", type=_count, help="PyTorch threads (default: as PyTorch chooses)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--energy", action="store_true", help="CUDA: also energy per token, 2 s more for each variant")


def _add_workload_sizes(parser):
    parser.add_argument("--l0", type=float, nargs="+", default=[30.0], help="active neurons per token (default: 30)")
    parser.add_argument("--hidden", type=_count, default=2048, metavar="D", help="hidden size (default: 2048)")
    parser.add_argument("--intermediate", type=_count, default=5632, metavar="F", help="FFN width (default: 5632)")


def _add_output_options(parser):
    parser.add_argument(
        "--output", metavar="FOLDER", help="append rows to bench.jsonl there, and draw a figure from this run's rows"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


# What each measures, and the options that it alone reads.
_MODES: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "ffn": ("one block over tokens and L0", _add_ffn_options),
    "prefill": ("one forward pass of a random Llama, calibrated to the workload, or of MODEL", _add_prefill_options),
    "generate": ("decoding by a random Llama, calibrated to the workload, or by MODEL", _add_generate_options),
    "train": ("training of a random Llama, calibrated to the workload", partial(_add_sequence_options, what="train")),
    "serve": ("MODEL behind OpenAI's API, under requests at once", partial(add_serve_options, count=_count)),
    "vllm": ("the GPU's time of vLLM's steps, of a random Llama or of MODEL", _add_vllm_mode),
}


def run(args: argparse.Namespace) -> int:
    rows: list[dict] = []
    try:
        with stdout_for_result():
            _measure(args, rows)
    finally:  # what was measured is shown even where Ctrl-C or a full disk ends it
        if rows:
            _show(rows, args)
    return 0


def _show(rows: list[dict], args) -> None:
    if args.json:
        print_json({"rows": rows})
    else:
        print(text_table(*CELLS[args.what](rows)))
        for name, reason in {item for row in rows for item in row.get("absent", {}).items()}:
            print(f"{name} was not measured: {reason}")


def _measure(args, rows: list[dict]) -> None:
    """Append to `rows` what is measured, one by one."""
    from tqdm.auto import tqdm

    from hf_twell.bench.progress import shown_on

    prepare: dict[str, Callable] = {"serve": prepare_serve, "vllm": partial(prepare_vllm, check_sizes=_check_sizes)}
    make_rows, common = prepare.get(args.what, _prepare)(args)
    output = None
    if args.output:
        from hf_twell.bench.plot import plot

        output = Path(args.output) / "bench.jsonl"
        figure = output.with_name("bench.png" if args.what == "ffn" else f"{args.what}.png")
        output.parent.mkdir(parents=True, exist_ok=True)
        _check_folder(output, figure)
    with tqdm(file=sys.stderr, unit="row") as bar:
        common |= {"report": shown_on(bar)}
        if args.what == "serve":
            common |= {"tell": partial(bar.write, file=sys.stderr)}
        source, bar.total = make_rows(args, common)
        with contextlib.closing(source):
            for row in source:
                bar.update()
                rows.append(row)
                if output is not None:
                    with writing(output), output.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    if output is not None:
        with writing(figure):
            plot(rows, figure)


def _check_folder(output: Path, figure: Path) -> None:
    """Refuse, by a ValueError before anything is measured, a folder whose rows and figure are none of `hf-twell
    bench`."""
    from hf_twell.files.rows import read_rows

    if output.exists() and output.stat().st_size:
        for row in read_rows(output):
            if "bench" not in row.values:
                raise ValueError(f"{row.place} is no row of hf-twell bench; name another folder for --output")
        if not output.read_bytes().endswith(b"\n"):
            raise ValueError(f"{output} ends within a line, as after a kill; mend it, or name another --output")
    elif figure.exists():
        raise ValueError(f"{figure} lies there without rows, so it is another's; name another folder for --output")


def _prepare(args):
    """What makes the rows of the other modes, and what it takes, checked."""
    import torch

    from hf_twell.bench.timing import check_energy

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but PyTorch sees no GPU here; take --device cpu")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    given = getattr(args, "model", None) is not None
    (check_options if given else _check_sizes)(args)
    if args.energy:
        check_energy(torch.device(device))
    common = {"dtype": args.dtype, "device": device, "repeats": args.repeats, "energy": args.energy}
    if not given:
        common["dtype"] = args.dtype or "bfloat16"
    return _ffn_rows if args.what == "ffn" else _model_rows, common


def _check_sizes(args) -> None:
    """Refuse, by a ValueError that names the option, what neither the workload nor a Llama can be made of."""
    if getattr(args, "text", None):
        raise ValueError("--text goes with a MODEL; random models make their own")
    shaped = args.what == "ffn" and args.shape
    width = SHAPE_L0_OF if shaped else args.intermediate
    if args.what == "ffn":
        width *= _check_experts(args)
    for l0 in args.l0:
        if not 0 < l0 <= width:
            raise ValueError(f"--l0 {l0:g} of {width:,} neurons; give more than 0 and at most {width:,}")
    if args.what == "ffn":
        _check_weights(args)
        _check_activity(args, width)
        _check_term(args)
        if args.hidden < 2:
            raise ValueError(f"--hidden {args.hidden}; give at least 2, the workload's thresholds take two columns")
        return
    heads = args.heads or max(1, args.hidden // 64)
    if args.hidden % (2 * heads):
        raise ValueError(
            f"--hidden {args.hidden} with attention heads: {heads}; give a multiple of {2 * heads} (each head needs an "
            "even number of columns), or other --heads"
        )
    if args.kv_heads and heads % args.kv_heads:
        raise ValueError(f"--kv-heads {args.kv_heads} with attention heads: {heads}; give a divisor of {heads}")


def _check_experts(args) -> int:
    """How many experts a token goes through, 1 of a dense block; a ValueError that names an option which does not go
    with experts."""
    if args.experts is None:
        if args.top_k is not None:
            raise ValueError("--top-k is of routed experts; give --experts, too")
        return 1
    of_training = ("backward", "term", "share")
    for name in ("shape", "union", "activity", "neighbours", *of_training, "weights", "max_autotune", "energy"):
        if getattr(args, name):
            option = name.replace("_", "-")
            raise ValueError(f"--experts measures plain weights forward alone; leave --{option} out")
    top_k = args.top_k or 8
    if top_k > args.experts:
        raise ValueError(f"--top-k {top_k} of --experts {args.experts}; give at most as many")
    return top_k


def _check_activity(args, width: int) -> None:
    """Refuse, by a ValueError that names the option, what says twice or nowhere how active blocks are."""
    if args.layer is not None and args.activity is None:
        raise ValueError("--layer is of a measured model; name it with --activity")
    if args.activity is not None and (args.union is not None or args.l0 != args.parser.get_default("l0")):
        raise ValueError("--activity gives density and unions; leave --l0 and --union out")
    if args.union is not None and len(args.union) not in (1, len(args.l0)):
        raise ValueError(f"--union has {len(args.union)} shares for {len(args.l0)} of --l0; give one, or one for each")
    for l0, union in _l0s_and_unions(args):
        if union is not None and not l0 / width < union < 1:
            raise ValueError(
                f"--union {union:g} where --l0 {l0:g} of {width:,} neurons are active for a token; give a share from "
                f"{l0 / width:.2g} to 1"
            )


def _l0s_and_unions(args) -> list[tuple[float, float | None]]:
    unions = args.union or [None]
    return list(zip(args.l0, unions * len(args.l0) if len(unions) == 1 else unions, strict=True))


def _check_weights(args) -> None:
    """Refuse, by a ValueError that names the option, what blocks in 8 bits are not measured in."""
    if args.weights is None:
        return
    named = f"--weights {' '.join(args.weights)}"
    if args.backward or args.max_autotune or args.energy:
        raise ValueError(f"{named} measures forward alone; leave --backward, --max-autotune and --energy out")
    if "bf16" in args.weights and args.dtype not in (None, "bfloat16"):
        raise ValueError(f"{named} with --dtype {args.dtype}; leave one of the two out")


def _check_term(args) -> None:
    """Refuse, by a ValueError that names the option, a term without a backward, and runs that no count has."""
    if args.term is not None and not args.backward:
        raise ValueError(f"--term {args.term} is of training; give --backward, too")
    if args.share is None:
        return
    if args.term != "count":
        raise ValueError(f"--share {args.share} goes with --term count alone; give that, too")
    fewest = min(args.tokens or CPU_TOKENS)  # CUDA_TOKENS begin with as many
    if not 2 <= args.share <= fewest:
        raise ValueError(f"--share {args.share} of --tokens {fewest:,}; give 2 or more, and at least as many --tokens")


def _ffn_rows(args, common):
    from hf_twell.bench.block import bench_ffn
    from hf_twell.bench.block_quantized import bench_ffn_quantized
    from hf_twell.bench.wanted import Wanted, measured_activity

    tokens = args.tokens or (CUDA_TOKENS if common["device"] == "cuda" else CPU_TOKENS)
    if args.experts:
        from hf_twell.bench.experts import bench_experts

        of_experts = {"experts": args.experts, "top_k": args.top_k or 8, "hidden": args.hidden}
        of_experts |= {name: common[name] for name in ("dtype", "device", "repeats", "report")}
        width = args.intermediate * of_experts["top_k"]
        wanted = [Wanted(l0 / width, None) for l0 in args.l0]
        source = bench_experts(tokens, wanted, intermediate=args.intermediate, **of_experts)
        return source, len(tokens) * len(wanted)
    sizes = [SHAPES[name] for name in args.shape or ()] or [(args.hidden, args.intermediate)]
    common |= {"compile_dense": not args.no_compile, "neighbours": args.neighbours}
    measured = measured_activity(args.activity, args.layer) if args.activity else None
    width = SHAPE_L0_OF if args.shape else args.intermediate
    activities = measured or [
        Wanted(l0 / width, None if union is None else {"64": union}) for l0, union in _l0s_and_unions(args)
    ]
    training = {"backward": args.backward, "term": args.term or "l1", "share": args.share}
    plain = common | training | {"max_autotune": args.max_autotune}
    del common["energy"]
    benches = {
        kind: partial(bench_ffn, **plain) if kind == "bf16" else partial(bench_ffn_quantized, kind, **common)
        for kind in args.weights or ["bf16"]
    }

    def rows():
        for (hidden, intermediate), bench in itertools.product(sizes, benches.values()):
            asked = itertools.cycle(args.l0)  # each number of tokens with every L0
            scaled = args.shape and not measured
            for row in bench(tokens, activities, hidden=hidden, intermediate=intermediate):
                yield row | ({"asked_l0": next(asked), "asked_l0_of": SHAPE_L0_OF} if scaled else {})

    return rows(), len(tokens) * len(activities) * len(sizes) * len(benches)


def _model_rows(args, common):
    from hf_twell.bench.generate import bench_generate
    from hf_twell.bench.models import How, RandomLlama, bench_prefill
    from hf_twell.bench.train import bench_train

    bench = {"prefill": bench_prefill, "generate": bench_generate, "train": bench_train}[args.what]
    more = ("new_tokens", "steps_only") if args.what == "generate" else ("length",)
    options = {name: getattr(args, name) for name in more}
    options["how"] = How(args.repeats, not args.no_compile, args.energy, common["report"])
    if getattr(args, "model", None) is not None:
        subjects, count, batches = iter([load_checkpoint(args, common)]), 1, args.batch or [1]
    else:
        made = {name: getattr(args, name) for name in ("hidden", "intermediate", "vocabulary", "heads", "kv_heads")}
        made |= {name: common[name] for name in ("dtype", "device", "report")}
        settings = list(itertools.product(args.layers, args.l0))
        subjects = (RandomLlama(l0, layers=layers, **made) for layers, l0 in settings)
        count, batches = len(settings), args.batch or [BATCH[args.what]]

    def rows():
        for subject in subjects:
            for batch in batches:
                yield bench(subject, batch=batch, **options)
            del subject  # before the next one takes its room

    return rows(), count * len(batches)
