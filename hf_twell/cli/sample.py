"""Let a model write text of its own, to train its conversion on beside real text.

A conversion forgets what its training text lacks. What the dense parent writes when nothing is asked is of every kind
that it was pretrained on: name the file in a recipe's `train`. A chat model loses most where it answers: give it its
own conversations, too (--chats). An interrupted command goes on where it stopped; a file that it did not write is
refused.

examples:
  hf-twell sample Qwen/Qwen3-0.6B own.jsonl --tokens 10_000_000 --batch 512
  hf-twell sample Qwen/Qwen3-0.6B chats.jsonl --tokens 10_000_000 --batch 512 --chats
  hf-twell sample smollm2.gguf own.jsonl --tokens 100_000
"""

import argparse
from pathlib import Path

from hf_twell.cli.output import DTYPES, check_output, print_json, stdout_for_result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a model folder, a GGUF file or a Hub name: the dense parent")
    parser.add_argument("output", help="the .jsonl file to write, or to go on with")
    parser.add_argument("--tokens", type=int, required=True, help="how many to have in all, such as 10_000_000")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample (default: 512)")
    parser.add_argument(
        "--batch", type=int, help="samples at a time (default: as many as --tokens needs, up to 16, on CUDA 256)"
    )
    parser.add_argument(
        "--start", help="the special token that a sample begins with (default: <|endoftext|>, else BOS, else EOS)"
    )
    parser.add_argument(
        "--chats",
        action="store_true",
        help="conversations: questions that it makes up, and its answers, by its template",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--temperature", type=float, default=1.0, help="default: 1, the model's own distribution")
    parser.add_argument("--top-p", type=float, default=1.0, help="share of each distribution to draw from (default: 1)")
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--dtype", choices=DTYPES, help="default: as stored, on CUDA bfloat16")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if Path(args.output).suffix != ".jsonl":  # by which `train` knows rows
        raise ValueError(f"{args.output} does not end in .jsonl; name the file so, as rows are written")
    check_output("output", args.output)
    with stdout_for_result():
        result = _sample(args)
    if args.json:
        print_json({**result, "output": args.output})
        return 0
    rows = "conversations" if args.chats else "documents"
    counts = f"{result['documents']:,} {rows}, {result['tokens']:,} tokens in all"
    print(f"{counts}, begun after {result['start']}: {args.output}")
    return 0


def _sample(args) -> dict:
    import torch

    from hf_twell.models.loading import load_model
    from hf_twell.sampling.documents import check_options, sample_text, written_before

    drawn = {"temperature": args.temperature, "top_p": args.top_p}
    check_options(args.tokens, args.length, args.batch or 1, **drawn)  # before a model is loaded
    written_before(args.output, args.chats)
    on_cuda = torch.cuda.is_available() if args.device is None else args.device.startswith("cuda")
    dtype = args.dtype or ("bfloat16" if on_cuda else "auto")
    model, tokenizer = load_model(args.model, dtype=dtype, device=args.device)
    batch_size = args.batch or min(-(-args.tokens // args.length), 256 if on_cuda else 16)
    sizes = {"tokens": args.tokens, "length": args.length, "batch_size": batch_size}
    options = {"start": args.start, "chats": args.chats, "seed": args.seed}
    return sample_text(model, tokenizer, args.output, **sizes, **options, **drawn)
