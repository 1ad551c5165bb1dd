"""Fine-tune a pretrained model to sparse feed-forward blocks, as a recipe (YAML) says.

    python recipes/finetune.py recipes/demo.yaml
    python recipes/finetune.py recipes/demo.yaml target_density=0.05 training.max_steps=200
    accelerate launch recipes/finetune.py recipes/demo.yaml       # one process a GPU
    accelerate launch --config_file recipes/accelerate/fsdp2.yaml recipes/finetune.py RECIPE.yaml revive_after=null

`hf-twell train recipes/demo.yaml` runs this same file. Copy it to train in your own way: its five steps are all
there is to it.
"""

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import ProgressCallback, Trainer, TrainingArguments, default_data_collator, set_seed

import hf_twell
from hf_twell.blending import Blend
from hf_twell.distillation import Distillation
from hf_twell.inference import evaluation_mode
from hf_twell.loading import load_model
from hf_twell.packing import PackedText, StreamedText, check_length, is_streamed
from hf_twell.resuming import CompleteCheckpoints, method_of
from hf_twell.runs import FiniteWeights, NothingLeft, check_changes, check_run, only_run, settings
from hf_twell.training import CompactProgress, Distill, Recipe, load_recipe, training_arguments
from hf_twell.variants import Adapters, train_ffns_alone
from hf_twell.whole_folders import full_disks_as_os_errors, save_model


def finetune(recipe: Recipe, *, resume: bool = False, overwrite: bool = False, train=None, heldout=None) -> dict:
    """Run a recipe; the result holds held-out loss and sparsity before and after, and the log rows of each step.

    `train` and `heldout` may give the sequences of the recipe's texts where these are packed already.
    """
    args = training_arguments(recipe)
    with only_run(args, resume=resume):
        check_run(recipe.output_dir, args, resume=resume, overwrite=overwrite)
        if resume:
            check_changes(recipe, args)
        return five_steps(recipe, args, resume, train, heldout)


def five_steps(recipe: Recipe, args: TrainingArguments, resume: bool, train, heldout) -> dict:
    """What `finetune` returns."""
    # 1. A pretrained model whose feed-forward blocks become ReLU ones, at once or by and by.
    model, tokenizer = load_model(recipe.model, dtype=recipe.dtype, device="cpu")
    blend = adapters = None
    if recipe.relu and recipe.blend_steps:
        blend = Blend(model, layers=recipe.layers)
    elif recipe.relu:
        hf_twell.sparsify(model, layers=recipe.layers)
    if recipe.trainable == "ffn":
        train_ffns_alone(model)
    elif recipe.trainable == "ffn+lora":
        set_seed(args.seed)  # as Trainer will; adapters begin at random
        adapters = Adapters(model, recipe.lora)

    # 2. Text, packed into sequences of one length.
    length = recipe.sequence_length
    check_length(model, length)
    if train is None and is_streamed(recipe.train):
        train = StreamedText(tokenizer, recipe.train, length)
    elif train is None:
        train = PackedText(tokenizer, recipe.train, length, description="tokenizing training text")
    if heldout is None:
        heldout = PackedText(tokenizer, recipe.heldout, length, description="tokenizing held-out text")

    # 3. Transformers' own Trainer, with the L1 term as a callback, and the dense parent as a teacher.
    use_cache = getattr(model.config, "use_cache", True)  # Trainer turns it off
    # Trainer's own collator asks for a padding token, which packed sequences do not need.
    collator = default_data_collator if tokenizer.pad_token is None else None
    trainer = Trainer(model, args, collator, train_dataset=train, eval_dataset=heldout, processing_class=tokenizer)
    if recipe.relu:
        options = recipe.sparsity | ({} if blend is None else {"blend": blend, "blend_steps": recipe.blend_steps})
        callback = hf_twell.SparsityCallback(trainer, distillation=teacher(recipe, model), **options)
        trainer.add_callback(callback)
        checkpoints = callback.checkpoints
    else:
        checkpoints = CompleteCheckpoints(trainer, {"relu": False})
    checkpoints.state["settings"] = settings(recipe, args)
    trainer.add_callback(FiniteWeights)
    if resume:
        trainer.add_callback(NothingLeft(trainer))
    if not args.disable_tqdm:
        trainer.pop_callback(ProgressCallback)
        trainer.add_callback(CompactProgress)

    # 4. Training, from the start or from the last complete checkpoint.
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    before = None if sharded else measure(trainer, heldout)  # a model is sharded when its training begins
    with contextlib.suppress(NothingLeft.Finished), full_disks_as_os_errors(args.output_dir):
        trainer.train(resume_from_checkpoint=resume or None)
    if not trainer.state.global_step:
        raise ValueError("no step of training was made: the text has too few sequences for one")
    after = measure(trainer, heldout)

    # 5. The model in stock form: plain Transformers loads it, without this package.
    final = Path(recipe.output_dir) / "final"
    model.config.use_cache = use_cache
    if adapters is not None:
        adapters.merge()
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) if sharded else None
    if trainer.is_world_process_zero():
        whole, method = trainer.accelerator.unwrap_model(model), method_of(trainer)
        if recipe.save_dtype is not None:
            dtype = getattr(torch, recipe.save_dtype)
            whole = whole.to(dtype)
            weights = weights and {k: w.to(dtype) if w.is_floating_point() else w for k, w in weights.items()}
        save_model(whole, final, tokenizer, overwrite=True, state_dict=weights, method=method)
    logs = [row for row in trainer.state.log_history if "loss" in row]
    return {"model": str(final), "before": before, "after": after, "logs": logs}


def teacher(recipe: Recipe, model) -> Distillation | None:
    """The dense parent, frozen, as the recipe's `distill` says."""
    if recipe.distill is None:
        return None
    settings = Distill(**recipe.distill)
    # Its forward is outside the trainer's autocast, and in float32 would take as long as the whole step.
    dtype = settings.dtype or ("bfloat16" if recipe.training.get("bf16") else recipe.dtype)
    parent, _ = load_model(settings.parent or recipe.model, dtype=dtype, device="cpu")
    return Distillation(model, parent, logits=settings.logits, layers=settings.layers)


def measure(trainer: Trainer, heldout: PackedText) -> dict:
    """Held-out loss in nats per token, and the sparsity of every layer on the same text; every process reads all of it.

    Not by `trainer.evaluate()`: called before training under several processes, it marks the model as prepared, and
    `train` would then leave out the exchange of gradients.
    """
    model, total = trainer.model, 0.0
    batches = torch.split(heldout.sequences, trainer.args.per_device_eval_batch_size)
    with evaluation_mode(model), trainer.compute_loss_context_manager():
        for batch in batches:
            ids = batch.to(trainer.args.device)
            total += model(input_ids=ids, labels=ids, use_cache=False).loss.item() * len(batch)
    return {"loss": total / len(heldout), "sparsity": hf_twell.measure_sparsity(model, batches)}


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
        recipe = load_recipe(arguments.recipe, arguments.changes)
        result = finetune(recipe, resume=arguments.resume, overwrite=arguments.overwrite)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"finetune.py: error: {error}")
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps({key: result[key] for key in ("model", "before", "after")}, indent=2))
    processes = PartialState()
    processes.wait_for_everyone()  # the first one may still be saving
    processes.destroy_process_group()
