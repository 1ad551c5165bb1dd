"""Which trainers `SparsityCallback` is right in: those whose batches are what the model receives, token for token."""

import warnings
from collections.abc import Iterable, Mapping

from transformers import PreTrainedConfig, PreTrainedModel, Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_twell.blocks.architectures import other_activations


def check_trainer(trainer: Trainer) -> None:
    """Refuse, by a ValueError that says what to do, what is no trainer, and those in which the L1 term could not be
    right."""
    if not hasattr(trainer, "callback_handler") or not hasattr(trainer, "args"):
        raise ValueError(f"SparsityCallback takes the trainer first, got {type(trainer).__name__}")
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"the trainer would run DataParallel on {trainer.args.n_gpu} GPUs, which cannot count tokens of the "
            "whole step; start the script with `accelerate launch` (one process a GPU) or show it one GPU"
        )
    if trainer.accelerator.mixed_precision == "fp16" and trainer.accelerator.scaler is None:
        if trainer.is_deepspeed_enabled:
            raise ValueError(
                "fp16 without accelerate's gradient scaler: DeepSpeed scales the loss itself, and would divide the L1 "
                "term, which is no part of it, by a factor that it never had; train in bf16"
            )
        raise ValueError(f"fp16 needs a GPU, and this trainer is on {trainer.args.device}; train in float32 or bf16")
    collator = trainer.data_collator
    multiple = getattr(collator, "pad_to_multiple_of", None)
    if getattr(collator, "padding_free", False) and multiple:
        raise ValueError(
            f"padding_free or packing with pad_to_multiple_of={multiple}: this padding comes without an "
            "attention_mask, and the L1 term would count it as tokens; leave pad_to_multiple_of out"
        )
    _warn_of_dense_reference(trainer)


def check_batches(trainer: Trainer, batches: Iterable) -> None:
    """Refuse, by a ValueError, batches of which the trainer makes the model's inputs only later, such as prompts to be
    completed."""
    for batch in batches:
        if isinstance(batch, Mapping) and any(batch.get(key) is not None for key in ("input_ids", "inputs_embeds")):
            continue
        given = f"with keys {sorted(batch)}" if isinstance(batch, Mapping) else f"of type {type(batch).__name__}"
        raise ValueError(
            f"{type(trainer).__name__} hands out batches {given} and makes the model's inputs of them later, so the L1 "
            "term cannot count their tokens before the step. Make the model sparse first, in Trainer, SFTTrainer, "
            f"DPOTrainer, KTOTrainer or RewardTrainer, and use {type(trainer).__name__} without SparsityCallback"
        )


def computes_causal_loss(trainer: Trainer) -> bool:
    """Whether a trainer's loss is Transformers' causal one of the model's logits, and nothing besides."""
    if "compute_loss" in vars(trainer) or type(trainer).compute_loss is not Trainer.compute_loss:
        return False
    if not trainer.model_accepts_loss_kwargs:
        return False
    if trainer.compute_loss_func is not None or trainer.label_smoother is not None:
        return False
    model = trainer.accelerator.unwrap_model(trainer.model)
    if getattr(model, "loss_type", None) != "ForCausalLM" or model.loss_function is not ForCausalLMLoss:
        return False
    whole = next(each for each in model.modules() if isinstance(each, PreTrainedModel))  # inside an adapter's model
    if not type(whole).forward.__module__.startswith("transformers."):  # another one may add to the loss
        return False
    config = model.config.get_text_config()  # which may ask for a loss of routers, or of the logits' size
    return not any(getattr(config, key, None) for key in ("output_router_logits", "z_loss_coefficient"))


def _warn_of_dense_reference(trainer: Trainer) -> None:
    """trl loads the reference model from disk, where the model is still dense if `sparsify` came after loading."""
    reference = getattr(trainer, "ref_model", None)
    config = None if reference is None else getattr(trainer.accelerator.unwrap_model(reference), "config", None)
    if not isinstance(config, PreTrainedConfig):
        return
    others = other_activations(config)
    if others:
        warnings.warn(
            f"ref_model computes {', '.join(map(repr, sorted(others)))}, the trainer's model ReLU; without ref_model, "
            f"trl loads one from {config._name_or_path or 'disk'!r}. To begin at the reference, as is usual, give "
            "ref_model=copy.deepcopy(model) after sparsify",
            stacklevel=4,
        )
