"""`SparsityCallback`: the L1 term in Transformers' Trainer and everything derived from it (SFTTrainer among them)."""

import functools
import logging
import math
from pathlib import Path

from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from hf_twell.checkpoints import STATE_NAME, last_checkpoint, read_state, write_json
from hf_twell.penalty import L1Penalty

logger = logging.getLogger(__name__)

LAYER_PREFIX = "twell/layer_"
# The trainer's methods that a callback wraps.
WRAPPED = ("train", "get_batch_samples", "training_step", "log", "_save_checkpoint")
WARMUPS = {
    "linear": lambda progress: progress,
    "sine": lambda progress: math.sin(progress * math.pi / 2) ** 2,
}


class SparsityCallback(TrainerCallback):
    """Trains a sparsified model to few active neurons, and logs how few.

        trainer.add_callback(hf_twell.SparsityCallback(trainer, l1_weight=2e-4))

    The objective becomes the task loss plus `l1_weight` times the mean over layers of L1 (see `L1Penalty`), the same
    for any gradient accumulation, number of processes, padding or gradient checkpointing. The logged `loss` stays the
    task loss. Each training log also gets `twell/l0`, `twell/density`, `twell/l1`, `twell/dead`, `twell/l1_weight`, and
    `twell/layer_NN/...` of the first four for each layer (kept off the console), over all tokens since the log before
    (or since the run was resumed).

    Each checkpoint gets `twell_state.json`, written last: `trainer.train(resume_from_checkpoint=True)` passes over
    checkpoints that lack it, because their saving was interrupted.

    Args:
        trainer: the trainer; its model must be sparsified.
        l1_weight: the coefficient after the warm-up. 2e-4 gave about 100 and 1e-3 about 23 active neurons of 3,072 on a
            model of 88M parameters trained from scratch. 0 measures only.
        warmup_steps: optimizer steps over which the coefficient rises from 0; a float under 1 is a share of all steps.
        warmup: "linear", or "sine" (flat at both ends).
        log_layers: log the per-layer figures too.

    Raises:
        ValueError: a model without sparse blocks, or a trainer that would run torch's DataParallel.
    """

    def __init__(
        self,
        trainer: Trainer,
        l1_weight: float,
        *,
        warmup_steps: int | float = 0,
        warmup: str = "linear",
        log_layers: bool = True,
    ):
        if not hasattr(trainer, "callback_handler") or not hasattr(trainer, "args"):
            raise ValueError(f"SparsityCallback takes the trainer first, got {type(trainer).__name__}")
        if trainer.args.n_gpu > 1:
            raise ValueError(
                f"the trainer would run DataParallel on {trainer.args.n_gpu} GPUs, which cannot count tokens of the "
                "whole step; start the script with `accelerate launch` (one process a GPU) or show it one GPU"
            )
        if warmup not in WARMUPS:
            raise ValueError(f"warmup={warmup!r}; choose one of {', '.join(map(repr, WARMUPS))}")
        if warmup_steps < 0 or (isinstance(warmup_steps, float) and warmup_steps >= 1 and warmup_steps % 1):
            raise ValueError(f"warmup_steps={warmup_steps}; give a whole number of steps, or a share between 0 and 1")
        self.trainer = trainer
        self.penalty = L1Penalty(trainer.model, l1_weight)
        self.l1_weight = l1_weight
        self.warmup_steps = warmup_steps
        self.warmup = warmup
        self.log_layers = log_layers
        # No event carries the batches, or comes before the reporters and the saving: these methods of the trainer do.
        earlier = getattr(vars(trainer).get("train"), "func", None)
        if isinstance(getattr(earlier, "__self__", None), SparsityCallback):
            earlier.__self__.detach()
        for name in WRAPPED:
            method = getattr(self, f"_{name.lstrip('_')}")
            setattr(trainer, name, functools.partial(method, getattr(trainer, name)))

    def detach(self) -> None:
        """Give the trainer its own methods back and leave its callbacks; a new SparsityCallback does so to the last."""
        for name in WRAPPED:
            vars(self.trainer).pop(name, None)
        self.trainer.remove_callback(self)

    def weight_at(self, step: int) -> float:
        """The coefficient of the optimizer step that follows `step` finished ones."""
        steps = self.warmup_steps
        if isinstance(steps, float) and steps < 1:
            steps = math.ceil(steps * self.trainer.state.max_steps)
        return self.l1_weight * (WARMUPS[self.warmup](step / steps) if step < steps else 1.0)

    def on_train_begin(self, args, state, control, **kwargs):
        # Four figures for each layer are for log files and plots; on the console they would bury the loss.
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, ProgressCallback | PrinterCallback) and "on_log" not in vars(callback):
                callback.on_log = functools.partial(_log_without_layers, callback.on_log)

    def on_save(self, args, state, control, **kwargs):
        # Other processes may still be writing their part of the checkpoint.
        self.trainer.accelerator.wait_for_everyone()
        if state.is_world_process_zero:
            write_json(self._state_path(), {"step": state.global_step, **self._schedule()})

    def _save_checkpoint(self, save_checkpoint, *args, **kwargs):
        # The folder may hold the complete checkpoint of another run; it is not complete while it is written over.
        if self.trainer.is_world_process_zero():
            self._state_path().unlink(missing_ok=True)
        return save_checkpoint(*args, **kwargs)

    def _state_path(self) -> Path:
        folder = Path(self.trainer._get_output_dir(trial=None)) / f"checkpoint-{self.trainer.state.global_step}"
        return folder / STATE_NAME

    def _schedule(self) -> dict:
        return {"l1_weight": self.l1_weight, "warmup_steps": self.warmup_steps, "warmup": self.warmup}

    def _train(self, train, resume_from_checkpoint=None, *args, **kwargs):
        if self not in self.trainer.callback_handler.callbacks:
            raise ValueError(
                "a SparsityCallback was made for this trainer but is not among its callbacks; add it with "
                "trainer.add_callback(callback), or call callback.detach() to train without it"
            )
        if resume_from_checkpoint is True:
            output_dir = self.trainer.args.output_dir
            resume_from_checkpoint = last_checkpoint(output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"{output_dir} holds no complete checkpoint (one with {STATE_NAME}) to resume from")
        if resume_from_checkpoint:
            saved = read_state(resume_from_checkpoint)
            for key, value in self._schedule().items():
                if saved[key] != value:
                    logger.warning(
                        "%s was trained with %s=%s and goes on with %s", resume_from_checkpoint, key, saved[key], value
                    )
        return train(resume_from_checkpoint, *args, **kwargs)

    def _get_batch_samples(self, get_batch_samples, *args, **kwargs):
        batches, num_items_in_batch = get_batch_samples(*args, **kwargs)
        if batches:
            self.penalty.l1_weight = self.weight_at(self.trainer.state.global_step)
            self.penalty.begin_step(batches, scaler=self.trainer.accelerator.scaler)
        return batches, num_items_in_batch

    def _training_step(self, training_step, model, inputs, *args, **kwargs):
        with self.penalty.micro_batch(inputs):
            return training_step(model, inputs, *args, **kwargs)

    def _log(self, log, logs, *args, **kwargs):
        if "loss" in logs:
            report = self.penalty.report()
            if report is not None:
                logs = {**logs, **self._rows(report)}
        return log(logs, *args, **kwargs)

    def _rows(self, report: dict) -> dict[str, float]:
        keys = ("l0", "density", "l1", "dead")
        rows = {f"twell/{key}": report[key] for key in (*keys, "l1_weight")}
        if self.log_layers:
            for ffn, layer in zip(self.penalty.ffns, report["layers"], strict=True):
                rows |= {f"{LAYER_PREFIX}{ffn.twell.layer:02d}/{key}": layer[key] for key in keys}
        return rows


def _log_without_layers(on_log, args, state, control, logs=None, **kwargs):
    logs = {key: value for key, value in (logs or {}).items() if not key.startswith(LAYER_PREFIX)}
    return on_log(args, state, control, logs=logs, **kwargs)
