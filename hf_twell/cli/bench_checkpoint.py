"""`hf-twell bench prefill`, `generate` and `vllm` of MODEL: a sparse checkpoint of the user's, not a random one."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from hf_twell.bench.models import Checkpoint

CHECKPOINT_MODES = ("prefill", "generate")
RANDOM_ONLY = ("layers", "heads", "kv_heads", "vocabulary", "l0", "hidden", "intermediate")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a sparse model's folder or Hub name; needs --text")
    parser.add_argument("--text", nargs="+", default=[], metavar="FILE", help="text files that MODEL reads")


def default_of(what: str, default: object, of_model: object) -> str:
    """What help says of an option's default, which is another for a MODEL, where the mode takes one."""
    return f"default: {default}" + (f"; of MODEL: {of_model}" if what in CHECKPOINT_MODES else "")


def check_options(args: argparse.Namespace) -> None:
    """Refuse, by a ValueError that names the option, what goes with random models alone, and a model without text."""
    for name in RANDOM_ONLY:
        if getattr(args, name) != args.parser.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} is for random models; leave it out for {args.model}")
    if not args.text:
        raise ValueError(f"{args.model} needs --text FILE: what it reads decides its activity, and so its speed")


def load_checkpoint(args: argparse.Namespace, common: dict) -> "Checkpoint":
    """MODEL, and the text that it reads."""
    from hf_twell.bench.models import Checkpoint
    from hf_twell.blocks.architectures import other_activations
    from hf_twell.convert.sparsify import sparsify
    from hf_twell.files.text import check_file
    from hf_twell.measure.inference import check_ids
    from hf_twell.models.loading import load_model

    for path in args.text:
        check_file(Path(path))
    common["report"]("loading", args.model)
    model, tokenizer = load_model(args.model, dtype=common["dtype"], device=common["device"])
    if others := other_activations(model.config):
        raise ValueError(f"{args.model} is not sparse (activation: {others.pop()}); convert it with hf-twell sparsify")
    ids = load_ids(tokenizer, args.text)
    check_ids(model, tokenizer, ids)
    return Checkpoint(sparsify(model.eval()), ids)


def load_ids(tokenizer: "PreTrainedTokenizerBase", files: list[str]) -> "torch.Tensor":
    """The token ids of text files, (tokens,)."""
    import torch

    from hf_twell.recipe.packing import token_ids

    return torch.tensor(token_ids(tokenizer, files))
