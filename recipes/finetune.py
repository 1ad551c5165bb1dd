"""Fine-tune a pretrained model to sparse feed-forward blocks, as a recipe (YAML) says.

    python recipes/finetune.py recipes/demo.yaml
    python recipes/finetune.py recipes/demo.yaml target_density=0.05 training.max_steps=200
    accelerate launch recipes/finetune.py recipes/demo.yaml       # one process a GPU
    accelerate launch --config_file recipes/accelerate/fsdp2.yaml recipes/finetune.py RECIPE.yaml revive_after=null

`hf-twell train recipes/demo.yaml` does the same. What a run does is in hf_twell/recipe/finetune.py: `five_steps` is all
there is to it. To train in your own way, copy that file beside this script, as my_loop.py, say, change it there, and
write `from my_loop import finetune` below.
"""

import argparse
import json
import os
import sys

from hf_twell.recipe.schema import load_recipe

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a YAML file")
    parser.add_argument(
        "changes", nargs="*", default=[], metavar="KEY=VALUE", help="in place of the recipe's own values"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last complete checkpoint in output_dir")
    parser.add_argument("--overwrite", action="store_true", help="replace the final model of a run without checkpoints")
    arguments = parser.parse_intermixed_args()
    try:
        recipe = load_recipe(arguments.recipe, arguments.changes)  # its mistakes are told before the long imports
        from hf_twell.recipe.finetune import finetune

        result = finetune(recipe, resume=arguments.resume, overwrite=arguments.overwrite)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"finetune.py: error: {error}")
    except KeyboardInterrupt as interrupted:
        print("; ".join(["\nfinetune.py: interrupted", *map(str, interrupted.args)]), file=sys.stderr)
        sys.exit(130)
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps({key: result[key] for key in ("model", "dense", "before", "after")}, indent=2))
    from accelerate import PartialState

    processes = PartialState()
    processes.wait_for_everyone()  # the first one may still be saving
    processes.destroy_process_group()
