"""Convert a pretrained model to ReLU feed-forward blocks and save it as its stock architecture.

The activation alone changes, so the model needs fine-tuning after (hf-twell train). The folder appears whole or not
at all.

examples:
  hf-twell sparsify meta-llama/Llama-3.2-1B llama-3.2-1b-relu --dtype bfloat16 --text notes.txt
  hf-twell sparsify llama-3.2-1b-q8_0.gguf llama-3.2-1b-relu
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from hf_twell.cli.output import DTYPES, print_json, sparsity_table, stdout_for_result
from hf_twell.files.tables import percent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a model folder, a GGUF file or a Hub name")
    parser.add_argument("output", help="the folder to write; it must not exist")
    parser.add_argument(
        "--layers", type=int, nargs="+", help="for kernels and the L1 term (default: as saved, else all)"
    )
    parser.add_argument(
        "--dtype", default="auto", choices=DTYPES, help="default: as stored; of a quantized GGUF bfloat16"
    )
    parser.add_argument("--text", nargs="+", default=[], metavar="FILE", help="measure sparsity on this text too")
    parser.add_argument("--tokens", type=int, default=16384, help="measure on so many tokens at most (default: 16384)")
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder, if it holds a model alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    with stdout_for_result():
        result = _convert(args)
    if args.json:
        print_json(result)
        return 0
    use = "used ReLU already" if result["already_sparse"] else "now use ReLU"
    print(f"{result['class']}: {result['blocks']} feed-forward blocks {use}; saved to {result['output']}")
    if result["quantized"]:
        print(f"weights in {result['dtype']}, as those of {args.model} are quantized (--dtype chooses)")
    chosen = result["config"]["twell"]["layers"]
    if chosen is not None:
        print(f"kernels and the L1 term act on {len(chosen)} of them: layers {', '.join(map(str, chosen))}")
    if result["sparsity"]:
        print(
            f"on {result['sparsity']['tokens']} tokens, {percent(result['sparsity']['density'])} of neurons active:\n"
        )
        print(sparsity_table(result["sparsity"]))
    if not result["already_sparse"]:
        print("\nThe swap alone costs quality: fine-tune with `hf-twell train` (recipes/ of a checkout has examples).")
    return 0


def _convert(args) -> dict:
    import torch

    import hf_twell
    from hf_twell.blocks.architectures import activation_keys, find_ffns
    from hf_twell.files.folders import check_target, save_model, training_record
    from hf_twell.files.text import check_file
    from hf_twell.measure.inference import check_ids
    from hf_twell.models.gguf_files import is_gguf, read_gguf
    from hf_twell.models.loading import has_tokenizer, load_model
    from hf_twell.recipe.packing import token_ids

    check_target(args.output, overwrite=args.overwrite, inputs=[args.model, *args.text])
    if args.tokens < 1:
        raise ValueError(f"--tokens {args.tokens}; give at least 1")
    for path in args.text:
        check_file(Path(path))
    _check_unquantized(args.model)
    tokenizer = None
    if not args.text and not has_tokenizer(args.model):
        tokenizer = False
    file = read_gguf(args.model) if is_gguf(args.model) else None
    dtype = file.saved_dtype if file and args.dtype == "auto" else args.dtype
    model, tokenizer = load_model(args.model, tokenizer, dtype=dtype, device="cpu")
    swapped = not all(isinstance(site.activation, torch.nn.ReLU) for site in find_ffns(model))
    hf_twell.sparsify(model, layers=args.layers)
    if tokenizer is None:
        print(f"{args.model} holds no tokenizer (tokenizer.json, say); the converted model gets none", file=sys.stderr)
    sparsity = None
    if args.text:
        length = min(512, getattr(model.config.get_text_config(), "max_position_embeddings", 512))
        ids = torch.tensor(token_ids(tokenizer, args.text)[: args.tokens])
        check_ids(model, tokenizer, ids)
        sparsity = hf_twell.measure_sparsity(model, [part[None] for part in ids.split(length)], progress=True)
    # What was recorded of a model that had another activation does not hold of this one.
    record: dict[str, Any] = {"method": {"step": 0}, "measured": None} if swapped else training_record(args.model)
    if sparsity:
        measured = record["measured"] or {}
        last = "after" if measured.get("after") else "before"
        figures = {
            "heldout": [Path(name).name for name in args.text],
            last: {**(measured.get(last) or {}), "sparsity": sparsity},
        }
        record["measured"] = measured | figures
    save_model(model, args.output, tokenizer, overwrite=args.overwrite, **record)
    return {
        "class": type(model).__name__,
        "blocks": len(find_ffns(model)),
        "already_sparse": not swapped,
        "output": args.output,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantized": file.quantized if file else [],
        "config": {**dict.fromkeys(activation_keys(model.config)[1], "relu"), "twell": model.config.twell},
        "sparsity": sparsity,
    }


def _check_unquantized(path: str) -> None:
    """Refuse, by a ValueError and before weights are loaded, what Transformers could not save again."""
    from hf_twell.files.configs import read_config
    from hf_twell.models.gguf_files import is_gguf

    if is_gguf(path) or (Path(path).is_dir() and not Path(path, "config.json").is_file()):
        return  # which has no such entry, or is refused in other words
    if read_config(path).get("quantization_config") is not None:
        raise ValueError(
            f"{path} is quantized already, and can be neither converted nor saved again; copy the folder if it is a "
            "sparse model's, else give the model that it was made from"
        )
