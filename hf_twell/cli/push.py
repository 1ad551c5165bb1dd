"""Publish a sparse model's folder on the Hub: stock-form weights and config, tokenizer, and a model card.

The card says what was measured and nothing else: give it figures with --sparsity and --scores, and the dense parent's
scores with --parent-scores, so that it says what the conversion kept. The token is $HF_TOKEN or the one of
`hf auth login`. The folder is only read, and the repository gets all files in one commit or none.

examples:
  hf-twell inspect my-model --text notes.txt --output sparsity.json
  hf-twell eval my-model --output scores.json
  hf-twell push my-model me/my-model --base-model meta-llama/Llama-3.2-1B --sparsity sparsity.json --scores scores.json
  hf-twell eval meta-llama/Llama-3.2-1B --output parent.json
  hf-twell push my-model me/my-model --scores scores.json --parent-scores parent.json --dry-run
"""

import argparse
from pathlib import Path

from hf_twell.cli.output import print_json, stdout_for_result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="the folder of a sparse model, or of an adapter that save_adapter wrote")
    parser.add_argument("repo", metavar="USER/NAME", help="repository on the Hub; created if it does not exist")
    parser.add_argument(
        "--base-model", metavar="USER/NAME", help="the dense model it was made from, or an adapter's base"
    )
    parser.add_argument("--sparsity", metavar="FILE", help="what `hf-twell inspect --output` wrote")
    parser.add_argument(
        "--scores",
        action="append",
        metavar="FILE",
        help="what `hf-twell eval --output` wrote; again for another one, as with --chat-template",
    )
    parser.add_argument(
        "--parent-scores", action="append", metavar="FILE", help="likewise of the dense parent, to stand beside them"
    )
    parser.add_argument("--card", metavar="FILE", help="a README.md to publish in place of the generated one")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to commit to (default: main)")
    parser.add_argument("--message", help="of the commit (default: Upload sparse model)")
    parser.add_argument("--dry-run", action="store_true", help="print the card and publish nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    with stdout_for_result():
        from hf_twell.models.cards import read_result
        from hf_twell.models.hub import folder_card, push_folder

        figures = {
            "base_model": args.base_model,
            "sparsity": read_result(args.sparsity) if args.sparsity else None,
            "scores": [read_result(path) for path in args.scores or ()],
            "parent_scores": [read_result(path) for path in args.parent_scores or ()],
        }
        if args.dry_run:
            card = folder_card(args.folder, args.repo, **figures)
            result = {"repo_id": args.repo, "card": Path(args.card).read_text(encoding="utf-8") if args.card else card}
        else:
            options = {"private": args.private, "revision": args.revision, "commit_message": args.message}
            result = push_folder(args.folder, args.repo, card=args.card, **options, **figures)
    if args.json:
        print_json(result)
    elif args.dry_run:
        print(result["card"], end="")
    else:
        print(f"{result['url']}: {len(result['files'])} files, commit {result['commit'][:8]}")
    return 0
