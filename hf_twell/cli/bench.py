"""Measure the sparse feed-forward block, or a whole model's decoding, against dense PyTorch on this machine.

Results are checked before they are timed; the variants take turns, and weights rotate so that no cache holds them.

examples:
  hf-twell bench ffn --tokens 1 16 128 1024 --l0 30 300 --output out/bench
  hf-twell bench ffn --backward --tokens 128 1024
  hf-twell bench generate --l0 30
"""

import argparse
import json
import sys

from hf_twell.cli.output import print_json, stdout_for_result, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["ffn", "generate"], help="one block over tokens x L0, or greedy decoding")
    parser.add_argument("--l0", type=float, nargs="+", default=[30.0], help="active neurons per token (default: 30)")
    parser.add_argument("--hidden", type=int, default=2048, metavar="D", help="hidden size (default: 2048)")
    parser.add_argument("--intermediate", type=int, default=5632, metavar="F", help="FFN width (default: 5632)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--repeats", type=int, help="timed turns of each variant (default: 11 for ffn, 3 for generate)")
    parser.add_argument("--threads", type=int, help="PyTorch threads (default: as PyTorch chooses)")
    parser.add_argument(
        "--output", metavar="FOLDER", help="append rows to bench.jsonl there, and draw bench.png from them"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    ffn = parser.add_argument_group("ffn")
    ffn.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 128, 1024])
    ffn.add_argument("--backward", action="store_true", help="forward and backward instead of forward alone")
    ffn.add_argument("--no-compile", action="store_true", help="leave the compiled dense block out")
    generate = parser.add_argument_group("generate")
    generate.add_argument("--new-tokens", type=int, default=128)
    generate.add_argument("--layers", type=int, default=8)
    generate.add_argument("--vocabulary", type=int, default=32000)


def run(args: argparse.Namespace) -> int:
    with stdout_for_result():
        rows = _measure(args)
    if args.json:
        print_json({"rows": rows})
        return 0
    if args.what == "ffn":
        names = [name for name in ("eager_ms", "compiled_ms", "sparse_ms") if name in rows[0]]
        cells = [[row["tokens"], row["l0"], *(row[n] for n in names), f"{row['speedup']:.2f}x"] for row in rows]
        print(table(["tokens", "L0", *(name.replace("_", " ") for name in names), "speed-up"], cells))
    else:
        cells = [
            [row["l0"], row["dense_tokens_per_s"], row["sparse_tokens_per_s"], f"{row['speedup']:.2f}x"] for row in rows
        ]
        print(table(["L0", "dense tokens/s", "sparse tokens/s", "speed-up"], cells))
    return 0


def _measure(args) -> list[dict]:
    from pathlib import Path

    import torch
    from tqdm.auto import tqdm

    from hf_twell import benchmark

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    shape = {"hidden": args.hidden, "intermediate": args.intermediate, "dtype": args.dtype}
    if args.what == "ffn":
        source = benchmark.bench_ffn(
            args.tokens,
            args.l0,
            backward=args.backward,
            repeats=args.repeats or 11,
            compile_dense=not args.no_compile,
            **shape,
        )
        total = len(args.tokens) * len(args.l0)
    else:
        more = {"layers": args.layers, "vocabulary": args.vocabulary, "new_tokens": args.new_tokens}
        source = (benchmark.bench_generate(l0=l0, repeats=args.repeats or 3, **more, **shape) for l0 in args.l0)
        total = len(args.l0)
    output = None
    if args.output:
        output = Path(args.output) / "bench.jsonl"
        output.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in tqdm(source, total=total, file=sys.stderr, unit="row"):
        rows.append(row)
        if output is not None:
            with output.open("a") as file:
                file.write(json.dumps(row) + "\n")
    if output is not None and args.what == "ffn":
        benchmark.plot_ffn(rows, output.with_suffix(".png"))
    return rows
