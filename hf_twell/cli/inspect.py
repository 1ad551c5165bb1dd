"""See how many neurons fire, by layer, position and token, and what time sparsity would save here.

Works on dense and sparse models; of a dense one, it also says what a conversion would cost before any training. Prints
a summary; --html writes one page that needs no network, --output the figures as JSON. Ctrl-C stops reading and reports
what has been seen, marked partial; a second one ends at once.

examples:
  hf-twell inspect qwen3-relu --text notes.txt --html qwen3.html
  hf-twell inspect meta-llama/Llama-3.2-1B --text book.txt.xz --tokens 100000 --measure --json > llama.json
"""

import argparse
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from hf_twell.cli.output import DTYPES, check_output, print_json, stdout_for_result, write_json, writing
from hf_twell.files.tables import UNIONS, text_table, unions_cell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model's folder, an adapter's, a GGUF file or a Hub name")
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help="text files (.txt, .xz) to read")
    parser.add_argument("--html", metavar="FILE", help="write the page to FILE")
    parser.add_argument("--output", metavar="FILE", help="write the JSON to FILE")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else on standard output")
    parser.add_argument("--measure", action="store_true", help="time the sparse blocks here; else they are predicted")
    parser.add_argument("--tokens", type=int, metavar="N", help="read N tokens at most (default: all)")
    parser.add_argument("--context", type=int, metavar="N", help="window in tokens (default: the model's, <= 2048)")
    parser.add_argument("--batch-tokens", type=int, default=4096, metavar="N", help="per forward pass (default: 4096)")
    parser.add_argument("--tokenizer", metavar="MODEL", help="folder or Hub name of the tokenizer (default: MODEL's)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is one)")


def run(args: argparse.Namespace) -> int:
    """Inspect, write the files, then print a summary or JSON; 130 where Ctrl-C cut it short."""
    for name in ("html", "output"):
        check_output(f"--{name}", getattr(args, name), [args.model, args.tokenizer, *args.text])
    if args.html and args.output and Path(args.html).resolve() == Path(args.output).resolve():
        raise ValueError(f"--html and --output name the same file, {args.output}; give each its own")
    with stdout_for_result():
        result = _inspect(args)
        from hf_twell.inspection.report.page import render
    try:
        if args.output:
            write_json(result, args.output)
        if args.html:
            with writing(args.html):
                # A file's name need not be UTF-8.
                Path(args.html).write_text(render(result), encoding="utf-8", errors="replace")
    finally:  # shown even where a full disk does not take it
        if args.json:
            print_json(result)
        else:
            print(summary(result))
    if args.html and not args.json:
        print(f"\nThe page is in {args.html}")
    return 130 if result["partial"] else 0


def _inspect(args) -> dict:
    _check_texts(args.text)
    from hf_twell.inspection.inspecting import inspect_text, passage_ids
    from hf_twell.inspection.savings import ffn_savings
    from hf_twell.models.adapters import load_with_adapter
    from hf_twell.models.loading import load_model, load_tokenizer

    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    model, tokenizer = load_model(args.model, tokenizer, dtype=args.dtype, device=args.device, load=load_with_adapter)
    with _asked_to_stop() as stop:
        result = inspect_text(
            model,
            tokenizer,
            args.text,
            context=args.context,
            max_tokens=args.tokens,
            batch_tokens=args.batch_tokens,
            progress=True,
            stop=stop,
        )
    result["conversion"] = result["savings"] = None
    if not result["partial"]:
        ids = passage_ids(tokenizer, args.text, result["context"])
        try:
            if any("experts" in layer for layer in result["layers"]):
                result["warnings"].append("What sparsity saves, or costs, in routed experts is not estimated.")
                return result
            result["savings"] = ffn_savings(model, ids, result["layers"], measure=args.measure)
            if result["activation"] != "relu":
                result["conversion"] = _cost(model, tokenizer, args, result["warnings"])
        except KeyboardInterrupt:
            result["partial"] = True
    return result


def _cost(model, tokenizer, args, warnings: list[str]) -> dict | None:
    """What a conversion would cost a dense model; None, and a warning that says why, where there can be none."""
    from hf_twell.inspection.conversion_cost import conversion_cost

    limits = {"context": args.context, "max_tokens": args.tokens}
    try:
        return conversion_cost(model, tokenizer, args.text, **limits, progress=True)
    except ValueError as error:
        warnings.append(f"What a conversion would cost is not known: {error}")
        return None


def _check_texts(files: list[str]) -> None:
    """What can be wrong with them at first sight, before a model is loaded."""
    from hf_twell.inspection.passages import read_pieces

    for path in files:
        if not Path(path).is_file():
            raise ValueError(f"no text file at {path}; give the path of one (.txt, .xz)")
        next(read_pieces(path))


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C only asks, so that no batch is counted in some layers alone; the next one interrupts."""
    asked = []

    def ask(signum, frame):
        asked.append(signum)
        signal.signal(signal.SIGINT, before)
        with contextlib.suppress(OSError):  # past sys.stderr, to which the progress bar may be writing just now
            os.write(2, b"\nstopping after this batch; press Ctrl-C again to end at once\n")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


def summary(result: dict) -> str:
    """The inspection for a terminal: headline, a line a layer, what stands out, what it would buy."""
    from hf_twell.inspection.report.findings import findings, headline, number, percent, savings_sentence

    rows = []
    for layer in result["layers"]:
        quantiles = [layer["l0_quantiles"][name] for name in ("p10", "p50", "p90")]
        row = [layer["label"], number(layer["l0"]), percent(layer["density"]), unions_cell(layer["unions"]), *quantiles]
        rows.append([*row, layer["dead_neurons"], layer["always_on_neurons"]])
        rows[-1].append(percent(layer["magnitude_share"]["10%"]))
        if result.get("conversion"):
            rows[-1].append(percent(layer["negative_share"]))
    headers = ["layer", "L0", "density", UNIONS, "p10", "p50", "p90", "dead", "always on", "top 10 % carry"]
    headers += ["negative gates carry"] if result.get("conversion") else []
    parts = [headline(result)]
    if result["partial"]:
        parts.insert(0, "PARTIAL: interrupted; the figures are for what has been read.")
    parts += [f"Warning: {warning}" for warning in result["warnings"]]
    parts.append(f"{result['tokens']:,} tokens, windows of {result['context']:,}:\n{text_table(headers, rows)}")
    parts.append("\n".join(f"- {found['title']}. {found['text']}" for found in findings(result)))
    if result.get("conversion"):
        parts.append(_conversion(result))
    if result["savings"]:
        parts.append(savings_sentence(result["savings"]))
        if not result["savings"]["relu"]:
            parts.append(_if_sparse(result["savings"]))
    return "\n\n".join(parts)


def _conversion(result: dict) -> str:
    """What a dense model loses by the swap to ReLU, and by fewer neurons, before any training."""
    from hf_twell.inspection.report.findings import changes, conversion_sentence, increase

    cost = result["conversion"]
    rows = [["all, dense", cost["loss"], ""]]
    for name, row in changes(cost):
        rows.append([name, "n/a" if row["loss"] is None else row["loss"], increase(row["increase"])])
    where = f"Loss before any training, on the first {cost['tokens']:,} tokens"
    return f"{where}:\n{text_table(['neurons', 'loss', 'change'], rows)}\n\n{conversion_sentence(result)}"


def _if_sparse(savings: dict) -> str:
    """What a dense model's blocks would gain at lower densities."""
    from hf_twell.inspection.report.findings import percent

    how = "measured on synthetic activations" if savings["if_density"][0]["measured"] else "predicted, not measured"
    headers = ["density", "decode, 1 token", f"prefill of {savings['tokens']['prefill']:,} tokens"]
    rows = [
        [percent(row["density"]), f"{row['decode']:.2f}x", f"{row['prefill']:.2f}x"] for row in savings["if_density"]
    ]
    return f"Speed-up at other densities ({how}):\n{text_table(headers, rows)}"
