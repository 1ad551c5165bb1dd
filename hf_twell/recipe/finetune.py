"""Fine-tune a pretrained model to sparse feed-forward blocks, as a recipe says."""

import contextlib
import sys
from pathlib import Path

import torch
from transformers import PreTrainedModel, ProgressCallback, TrainingArguments, default_data_collator, set_seed

from hf_twell.convert.sparsify import sparsify
from hf_twell.files.checkpoints import last_checkpoint
from hf_twell.files.folders import full_disks_as_os_errors, save_model
from hf_twell.models.attention import without_masks
from hf_twell.models.loading import load_model, load_tokenizer, stored_dtype
from hf_twell.recipe.arguments import CompactProgress, training_arguments, with_learning_rate
from hf_twell.recipe.estimate import count_steps, estimate, estimate_time, sequences_of_step
from hf_twell.recipe.measured import forward_seconds, measure, measure_start, names_of, parent_activations
from hf_twell.recipe.packing import PackedText, StreamedText, check_length
from hf_twell.recipe.runs import (
    FiniteWeights,
    NothingLeft,
    check_changes,
    check_run,
    identity,
    interruptible,
    kept_learning_rate,
    model_identity,
    only_run,
    settings,
)
from hf_twell.recipe.schema import Recipe, is_streamed
from hf_twell.recipe.trainer import PackedTrainer
from hf_twell.recipe.variants import LoraOutsideFfns, freeze, train_ffns_alone
from hf_twell.train.callbacks import SparsityCallback
from hf_twell.train.distillation import Distillation
from hf_twell.train.learning_rates import proposal, rate_warning
from hf_twell.train.resuming import CompleteCheckpoints, method_of


def finetune(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    train: PackedText | StreamedText | None = None,
    heldout: PackedText | None = None,
) -> dict:
    """Run a recipe; the result holds held-out loss and sparsity before and after, and the log rows of each step.

    "dense" of it is the dense parent's held-out loss; None of a model that had ReLU, or that is sharded.

    `train` and `heldout` may give the sequences of the recipe's texts where these are packed already.
    """
    args = training_arguments(recipe)
    with interruptible(recipe.output_dir), only_run(args, resume=resume):
        inputs = [recipe.model, (recipe.distill or {}).get("parent")]
        for source in (recipe.train, recipe.heldout):
            inputs += [source] if isinstance(source, str) else source if isinstance(source, list) else []
        check_run(recipe.output_dir, args, resume=resume, overwrite=overwrite, inputs=inputs)
        if resume:
            recipe = with_learning_rate(recipe, kept_learning_rate(recipe.output_dir))
            args = training_arguments(recipe)
            check_changes(recipe, args)
        return five_steps(recipe, args, resume, train, heldout)


def five_steps(
    recipe: Recipe,
    args: TrainingArguments,
    resume: bool,
    train: PackedText | StreamedText | None,
    heldout: PackedText | None,
) -> dict:
    """What `finetune` returns."""
    # 1. A pretrained model whose feed-forward blocks become ReLU ones.
    model, _ = load_model(recipe.model, False, dtype=recipe.dtype, device="cpu")
    dtype, parent = final_dtype(recipe), parent_activations(model)
    adapters = None
    if recipe.relu:
        sparsify(model, layers=recipe.layers)
    if recipe.trainable == "ffn":
        train_ffns_alone(model)
    elif recipe.trainable == "ffn+lora":
        set_seed(args.seed)  # as Trainer will; adapters begin at random
        adapters = LoraOutsideFfns(model, recipe.lora)
    freeze(model, recipe.freeze)
    about_rate = None
    # A control takes other rates, and a resumed run keeps its own.
    if recipe.relu and not resume and (proposed := proposal(model, args.optim)) is not None:
        if recipe.training.get("learning_rate") is None:
            recipe = with_learning_rate(recipe, proposed.rate)
            args = training_arguments(recipe)
            about_rate = f"training has no learning_rate; this run takes {proposed.rate:g}, proposed {proposed.why}"
        else:
            about_rate = rate_warning(args.learning_rate, proposed, "training.learning_rate")
    elif not resume and recipe.training.get("learning_rate") is None:
        about_rate = f"training has no learning_rate, so it is {args.learning_rate:g}; none is proposed for such a run"

    # 2. Text, packed into sequences of one length.
    tokenizer = load_tokenizer(recipe.model)
    length = recipe.sequence_length
    check_length(model, length)
    only = recipe.assistant_only_loss
    if train is None and is_streamed(recipe.train):
        train = StreamedText(tokenizer, recipe.train, length, assistant_only=only)
    elif train is None:
        what = "tokenizing training text"
        train = PackedText(tokenizer, recipe.train, length, assistant_only=only, description=what)
    if args.torch_compile and isinstance(train, PackedText):
        # A smaller batch, an epoch's last, would be compiled by itself. Several processes have a step's size alike.
        train = train.in_whole_steps(sequences_of_step(args))
    if heldout is None:
        what = "tokenizing held-out text"
        heldout = PackedText(tokenizer, recipe.heldout, length, assistant_only=only, description=what)

    # 3. Transformers' own Trainer, with the L1 term as a callback, and the dense parent as a teacher.
    use_cache = getattr(model.config, "use_cache", True)  # Trainer turns it off
    # Trainer's own collator asks for a padding token and makes masks, neither of which packed sequences need.
    options = {"train_dataset": train, "eval_dataset": heldout, "processing_class": tokenizer}
    trainer = PackedTrainer(model, args, default_data_collator, **options)
    callback = None
    if recipe.relu:
        callback = SparsityCallback(trainer, distillation=teacher(recipe, model), **recipe.sparsity)
        callback.proposal = None  # it is told below
        trainer.add_callback(callback)
        checkpoints = callback.checkpoints
    else:
        checkpoints = CompleteCheckpoints(trainer, {"relu": False})
    checkpoints.state["settings"] = settings(recipe, args)
    if callback is not None and callback.distillation is not None:
        given = {"logits": callback.distillation.logits, "layers": callback.distillation.layers}
        source = (recipe.distill or {}).get("parent") or recipe.model
        checkpoints.state["settings"]["teacher"] = {"model": model_identity(source), **given}
    trainer.add_callback(FiniteWeights)
    if resume:
        trainer.add_callback(NothingLeft(trainer))
    if not args.disable_tqdm:
        trainer.pop_callback(ProgressCallback)
        trainer.add_callback(CompactProgress)

    # 4. Training, from the start or from the last complete checkpoint.
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    count = None if isinstance(train, StreamedText) else len(train)
    if trainer.is_world_process_zero():
        print(estimate(args, model, sequences=count, length=length, dtype=dtype), file=sys.stderr)
        if about_rate is not None:
            print(about_rate, file=sys.stderr)
    start = {"dense": None, "before": None}
    if not sharded:  # which a model becomes when its training begins
        text = {"heldout": identity(recipe.heldout), "sequence_length": length}
        text["assistant_only_loss"] = recipe.assistant_only_loss
        start = measure_start(trainer, heldout, parent, text, last_checkpoint(recipe.output_dir) if resume else None)
        checkpoints.state["measured"] = start
        if not resume and trainer.is_world_process_zero():
            tokens = count_steps(args, count) * sequences_of_step(args) * length
            print(estimate_time(args, recipe, tokens, forward_seconds(trainer, heldout)), file=sys.stderr)
    if callback is not None and start["dense"] is not None:
        callback.parent_loss = start["dense"]["loss"]
    models = [model] if callback is None or callback.distillation is None else [model, callback.distillation.parent]
    with contextlib.suppress(NothingLeft.Finished), full_disks_as_os_errors(args.output_dir), without_masks(*models):
        trainer.train(resume_from_checkpoint=resume or None)
    if not trainer.state.global_step:
        raise ValueError("no step of training was made: the text has too few sequences for one")
    measured = {"dense": start["dense"], "before": start["before"], "after": measure(trainer, heldout)}

    # 5. The model in stock form: plain Transformers loads it, without this package.
    final = Path(recipe.output_dir) / "final"
    model.config.use_cache = use_cache
    if adapters is not None:
        adapters.merge()
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) if sharded else None
    if trainer.is_world_process_zero():
        whole = trainer.accelerator.unwrap_model(model)
        method = {**method_of(trainer), "settings": checkpoints.state["settings"]}
        if dtype != getattr(torch, recipe.dtype):
            whole = whole.to(dtype)
            weights = weights and {k: w.to(dtype) if w.is_floating_point() else w for k, w in weights.items()}
        figures = {"heldout": names_of(recipe.heldout), **measured}
        save_model(whole, final, tokenizer, overwrite=True, state_dict=weights, method=method, measured=figures)
    logs = [row for row in trainer.state.log_history if "loss" in row]
    return {"model": str(final), **measured, "logs": logs}


def final_dtype(recipe: Recipe) -> torch.dtype:
    """What `save_dtype` says; by default the parent's own, if that takes less space than the one of the training."""
    if recipe.save_dtype is not None:
        return getattr(torch, recipe.save_dtype)
    dtype = getattr(torch, recipe.dtype)
    return min(dtype, stored_dtype(recipe.model) or dtype, key=lambda dtype: dtype.itemsize)


def teacher(recipe: Recipe, model: PreTrainedModel) -> Distillation | None:
    """The dense parent, frozen, as the recipe's `distill` says."""
    if recipe.distill is None:
        return None
    given = recipe.distill
    # Its forward is outside the trainer's autocast, and in float32 would take as long as the whole step.
    dtype = given.get("dtype") or ("bfloat16" if recipe.training.get("bf16") else recipe.dtype)
    parent, _ = load_model(given.get("parent") or recipe.model, False, dtype=dtype, device="cpu")
    return Distillation(model, parent, logits=given.get("logits", 0.5), layers=given.get("layers", 0.0))
