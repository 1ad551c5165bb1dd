"""Store a sparse model's feed-forward weights in int8 or fp8, as torchao does through Transformers.

Plain Transformers with torchao loads the result and computes it densely. hf_twell's kernels read int8 as it lies, and
fp8 on a GPU; on a CPU fp8 saves memory alone. fp8-dynamic quantizes what the weights are multiplied with, too, for the
e4m3 tensor cores of GPUs. vLLM does not load such a folder: of 8-bit checkpoints it takes those of compressed-tensors
(docs/serving.md). The folder appears whole or not at all.

example:
  hf-twell quantize my-sparse-model my-sparse-model-int8 --weights int8
"""

import argparse

from hf_twell.cli.output import print_json, stdout_for_result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="the folder of a sparse model")
    parser.add_argument("output", help="the folder to write; it must not exist")
    parser.add_argument(
        "--weights",
        required=True,
        choices=["int8", "fp8", "fp8-dynamic"],
        help="one scale for each row; fp8: e4m3; x stays as it is, but with fp8-dynamic gets a scale for each token",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder, if it holds a model alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    with stdout_for_result():
        result = _quantize(args)
    if args.json:
        print_json(result)
        return 0
    print(
        f"{result['class']}: {result['blocks']} feed-forward blocks in {args.weights}, {result['block_bytes']:,} bytes "
        f"of weights where there were {result['block_bytes_before']:,}; saved to {args.output}"
    )
    return 0


def _quantize(args) -> dict:
    from hf_twell.blocks.architectures import dense_ffns
    from hf_twell.files.folders import check_target, save_model, training_record
    from hf_twell.models.quantizing import quantize

    check_target(args.output, overwrite=args.overwrite, inputs=[args.model])
    record = training_record(args.model)
    model, tokenizer = quantize(args.model, args.weights)
    sites = dense_ffns(model, "quantizing")
    linears = [getattr(site.module, name) for site in sites for name in site.form.linears]
    save_model(model, args.output, tokenizer, overwrite=args.overwrite, **record)
    return {
        "class": type(model).__name__,
        "weights": args.weights,
        "blocks": len(sites),
        "block_bytes": sum(part.nbytes for linear in linears for part in (linear.weight.qdata, linear.weight.scale)),
        "block_bytes_before": sum(linear.weight.numel() * linear.weight.element_size() for linear in linears),
        "output": args.output,
    }
