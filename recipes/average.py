"""The mean of two dense models' weights: a model that was trained further, and the one it came from.

    python recipes/average.py TRAINED PARENT OUTPUT [--share 0.5] [--overwrite]     # the share is PARENT's

Training on one kind of text makes a model better there and worse elsewhere; the mean of before and after keeps most of
what was gained and loses little ("Robust fine-tuning of zero-shot models", arXiv 2109.01903). So it teaches a
conversion better than either. Each model is a folder, a Hub name or a GGUF file; both have the same weights by name.
"""

import argparse
import sys

from hf_twell.cli.output import quiet_others

quiet_others()  # before the imports that would warn

import torch

from hf_twell.blocks.architectures import other_activations
from hf_twell.cli.endings import ending_in_one_line
from hf_twell.files.folders import check_target, save_model
from hf_twell.models.loading import load_model


def average(trained: str, parent: str, share: float = 0.5):
    """(model, tokenizer): (1 - share) * trained + share * parent, in float32. A ValueError of a share outside 0 to 1, a
    sparse model, or activations, names or shapes of weights that differ; an OSError where a model does not load."""
    if not 0 <= share <= 1:
        raise ValueError(f"share={share}; give the parent's share, from 0 to 1")
    model, tokenizer = load_model(trained, dtype=torch.float32, device="cpu")
    other, _ = load_model(parent, False, dtype=torch.float32, device="cpu")
    for path, each in ((trained, model), (parent, other)):
        if getattr(each.config, "twell", None) is not None:
            raise ValueError(
                f"{path} is sparse (its config has a twell entry); give dense models, and convert the mean"
            )
    activations = [", ".join(sorted(other_activations(each.config))) or "relu" for each in (model, other)]
    if activations[0] != activations[1]:
        raise ValueError(
            f"{trained} computes {activations[0]}, {parent} {activations[1]}; give two models with the same activation"
        )
    mine, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    shapes = [{name: tuple(weight.shape) for name, weight in each.items()} for each in (mine, theirs)]
    if shapes[0] != shapes[1]:
        unlike = sorted(name for name, _ in set(shapes[0].items()) ^ set(shapes[1].items()))
        raise ValueError(f"{trained} and {parent} are unlike models: {', '.join(unlike[:3])} differ; average two alike")
    with torch.no_grad():
        for name, weight in mine.items():
            weight.lerp_(theirs[name], share)
    return model, tokenizer


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("trained", "parent", "output"):
        parser.add_argument(name)
    parser.add_argument("--share", type=float, default=0.5, help="the parent's share (default: 0.5)")
    parser.add_argument("--overwrite", action="store_true", help="replace the model in OUTPUT")
    args = parser.parse_args(argv)

    def run() -> int:
        check_target(args.output, overwrite=args.overwrite, inputs=[args.trained, args.parent])
        model, tokenizer = average(args.trained, args.parent, args.share)
        save_model(model, args.output, tokenizer, overwrite=args.overwrite)
        return 0

    if code := ending_in_one_line("average.py", run):
        sys.exit(code)


if __name__ == "__main__":
    main()
