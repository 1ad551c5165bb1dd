"""Fine-tune a model to few active neurons, as a recipe (YAML) says. The loop is in hf_twell/recipe/finetune.py.

Any key of the recipe can be changed on the command line. An interrupted run goes on with --resume, from its last
complete checkpoint. Paths in a recipe start from its folder, those of KEY=VALUE from the working directory. Example
recipes are in a checkout of the repository; an installed package has none.

examples (in a checkout):
  hf-twell train recipes/demo.yaml
  hf-twell train recipes/demo.yaml output_dir=out/short l1_weight=1e-3 training.max_steps=20
"""

import argparse
import os

from hf_twell.cli.output import print_json, sparsity_table, stdout_for_result
from hf_twell.files.tables import percent, text_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file; its keys are the fields of hf_twell.recipe.schema.Recipe")
    parser.add_argument(
        "changes", nargs="*", default=[], metavar="KEY=VALUE", help="in place of the recipe's own values"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last complete checkpoint in output_dir")
    parser.add_argument("--overwrite", action="store_true", help="replace the final model of a run without checkpoints")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    with stdout_for_result():
        from hf_twell.recipe.schema import load_recipe

        recipe = load_recipe(args.recipe, args.changes)  # its mistakes are told before the long imports
        from hf_twell.recipe.finetune import finetune

        result = finetune(recipe, resume=args.resume, overwrite=args.overwrite)
    if int(os.environ.get("RANK", 0)) != 0:  # of several processes the first one prints
        return 0
    if args.json:
        print_json(result)
    else:
        print(result_tables(result))
    return 0


def result_tables(result: dict) -> str:
    """What `finetune` measured before and after, and each layer's sparsity after."""
    rows = [
        [name, stage["loss"], stage["sparsity"]["l0"], percent(stage["sparsity"]["density"])]
        for name, stage in (("before", result["before"]), ("fine-tuned", result["after"]))
        if stage is not None  # "before" is, of a model that is sharded
    ]
    if result["dense"] is not None:
        rows.insert(0, ["dense parent", result["dense"]["loss"], "", ""])
    losses = text_table(["", "held-out loss", "active per token (L0)", "density"], rows)
    return f"{losses}\n\n{sparsity_table(result['after']['sparsity'])}\n\nsaved to {result['model']}"
