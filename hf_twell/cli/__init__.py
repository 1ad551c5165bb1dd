"""The command `hf-twell`. Each subcommand is one module here with `add_arguments(parser)` and `run(args)`."""

import argparse
import importlib
import os
import sys

import hf_twell
from hf_twell.cli.endings import ending_in_one_line
from hf_twell.cli.output import quiet_others

COMMANDS = {
    "sparsify": "convert a pretrained model to ReLU feed-forward blocks and save it",
    "sample": "let a model write text of its own, to train its conversion on",
    "train": "fine-tune a model to few active neurons, as a recipe says",
    "quantize": "store a sparse model's feed-forward weights in int8 or fp8, as torchao does",
    "eval": "score a model on ARC, HellaSwag and other lm-eval tasks, and on text files",
    "inspect": "see how many neurons fire, by layer, position and token, and what time sparsity would save here",
    "bench": "measure the sparse feed-forward block, or decoding, against dense PyTorch on this machine",
    "serve": "answer requests in OpenAI's form with one model, by its sparse kernels or by vLLM",
    "push": "publish a sparse model on the Hub, with a model card of what was measured",
    "doctor": "say which backends work on this machine, and why the others do not",
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; an error ends in one line on stderr and exit code 1."""
    return ending_in_one_line("hf-twell", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="hf-twell", description=hf_twell.__doc__)
    parser.add_argument("--version", action="version", version=f"hf_twell {hf_twell.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"hf_twell.cli.{name}")
        subparser = subparsers.add_parser(
            name, help=summary, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run, parser=subparser)
    passed_on = []
    serves = argv[:1] == ["serve"] or argv[:2] == ["bench", "serve"]
    if serves and "--" in argv:  # which argparse would mix with what stands before it
        argv, passed_on = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    args, rest = parser.parse_known_args(argv)
    args.passed_on = passed_on
    if rest and hasattr(args, "changes") and not any(item.startswith("-") for item in rest):
        # argparse gives up positional arguments that follow an option.
        args.changes += rest
    elif rest:
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    quiet_others()
    _check_one_process(args.command)
    return args.run(args)


def _check_one_process(command: str) -> None:
    """Each process would do all of the work, on one device, and write the same files."""
    if command not in ("train", "doctor") and "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(f"{command} runs in one process; start it without torchrun or accelerate launch")
