"""Fine-tune a pretrained model to sparse feed-forward blocks, as a recipe (YAML) says.

    python recipes/finetune.py recipes/demo.yaml
    python recipes/finetune.py recipes/demo.yaml target_density=0.05 training.max_steps=200
    accelerate launch recipes/finetune.py recipes/demo.yaml       # one process a GPU
    accelerate launch --config_file recipes/accelerate/fsdp2.yaml recipes/finetune.py RECIPE.yaml revive_after=null

It is `hf-twell train`, also for several processes. What a run does is in hf_twell/recipe/finetune.py: `five_steps` is
all there is to it. To train in your own way, copy that file beside this script, as my_loop.py, say, change it there,
and below, in place of `train.run(arguments)`, call its `finetune(load_recipe(arguments.recipe, arguments.changes))`;
`load_recipe` is of hf_twell.recipe.schema.
"""

import argparse
import sys

from hf_twell.cli import train
from hf_twell.cli.endings import ending_in_one_line
from hf_twell.cli.output import quiet_others

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    train.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    quiet_others()
    code = ending_in_one_line("finetune.py", lambda: train.run(arguments))
    if code:
        sys.exit(code)
    from accelerate import PartialState

    processes = PartialState()
    processes.wait_for_everyone()  # the first one may still be saving
    processes.destroy_process_group()
