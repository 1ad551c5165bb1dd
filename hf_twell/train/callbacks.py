"""`SparsityCallback`: the L1 term in Transformers' Trainer and everything derived from it (SFTTrainer among them)."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_twell.blocks.modeling import sparse_ffns
from hf_twell.convert.entry import record_density
from hf_twell.files.checkpoints import read_state
from hf_twell.models.adapters import record_base
from hf_twell.train.controller import DensityController, smoothed
from hf_twell.train.distillation import Distillation
from hf_twell.train.learning_rates import proposal
from hf_twell.train.logs import (
    hide_layers,
    rows_of_report,
    show_layers,
    warn_of_bounds,
    warn_of_few_tokens,
    warn_of_loss,
    warn_of_miss,
    warn_of_rate,
)
from hf_twell.train.parent_loss import parent_loss
from hf_twell.train.penalty import L1Penalty
from hf_twell.train.resuming import CompleteCheckpoints, detach_earlier, steps_of, unwrap, wrap
from hf_twell.train.revival import Revival, check_optimizer
from hf_twell.train.schedule import REMOVED, WARMUPS, check_schedule, whole_steps
from hf_twell.train.trainer_card import use_model_card
from hf_twell.train.trainers import check_batches, check_trainer

IDLE_NAME = "twell_idle.safetensors"
WHOLE_RUNS = 0.8  # share of the tokens in runs of `share`, for their union to be stored: in shorter ones it is smaller
REVIVE_UNTIL = 0.8  # of a run: what revives later is not trained any more, and only makes the model denser


class _MicroBatches(list):
    """Those of a step. Whoever goes through them gets one after the other from `switched_on`, a generator's function.

    A loop that an exception or a `break` ends lets go of the generator, and so ends the micro-batch that it was in.
    """

    def __init__(self, batches: list, switched_on: Callable[[Iterator], Iterator]) -> None:
        super().__init__(batches)
        self._switched_on = switched_on

    def __iter__(self) -> Iterator:
        return self._switched_on(super().__iter__())


class SparsityCallback(TrainerCallback):
    """Trains a sparsified model to few active neurons, and logs how few.

        trainer.add_callback(hf_twell.SparsityCallback(trainer, target_density=0.01))
        trainer.add_callback(hf_twell.SparsityCallback(trainer, l1_weight=2e-4))

    The objective becomes the task loss plus `l1_weight` times the mean over layers of L1 (see `L1Penalty`), the same
    for any gradient accumulation, number of processes, padding or gradient checkpointing. The logged `loss` stays the
    task loss. Each training log also gets `twell/l0`, `twell/density`, `twell/l1`, `twell/dead`, `twell/l1_weight`, and
    `twell/layer_NN/...` of these for each layer (kept off the console), over all tokens since the log before
    (or since the run was resumed); on a GPU whose kernels train, `twell/layers_on_kernels`, how many layers they take
    now (the others are still too dense; those of a compiled model move all at once); with the matching arguments,
    `twell/target` (the density or union that the controller steers to now), `twell/union_64` (the union, with
    `share=64`), `twell/revived`, `twell/kl` and `twell/layer_error`.

    When training ends, the model's config gets each layer's density, and with `share` the union of so many tokens, both
    smoothed over the last 2 % of the steps: engines that choose kernels before they see a token go by them. It gets
    none where the term acts on some layers alone, or the best checkpoint's weights are loaded, and no union where more
    than a fifth of the tokens stood in shorter runs.

    Its `CompleteCheckpoints` marks the trainer's checkpoints: `trainer.train(resume_from_checkpoint=True)` passes over
    those whose saving was interrupted.

    It works at the trainer's events, as the first of its callbacks: reporters get its rows too. For what has no event,
    it replaces four public methods of this trainer, until `detach`:

    - `get_batch_samples`: the term needs the tokens of a whole step before its first backward. The list that comes back
      switches the term on for each micro-batch that the trainer takes out of it;
    - `train` and `save_model`: `CompleteCheckpoints` does so, and says why;
    - `create_model_card`: `use_model_card` does so, unless the user has replaced it already.

    Args:
        trainer: the trainer; its model must be sparsified.
        l1_weight: the coefficient after the warm-up. 2e-4 gave about 100 and 1e-3 about 23 active neurons of 3,072 on a
            model of 88M parameters trained from scratch. 0 measures only.
        target_density: in place of `l1_weight`: the share of active neurons that is wanted, such as 0.01; a
            `DensityController` finds each layer's coefficient.
        target_union: in place of `target_density`, with `share`: the share of neurons that is wanted active in at least
            one of `share` neighbouring tokens, such as 0.25.
        term: "l1", or with a target also "count", a smooth count of active neurons (see `L1Penalty`).
        share: with "count", how many neighbouring tokens are pressed to share their neurons, such as 64.
        warmup_steps: optimizer steps over which the coefficient rises from 0 (default 0), or the density falls to its
            target (default 0.1; 0.4 is better for a hundred steps to 1 %); a float under 1 is a share of all steps.
        warmup: "linear", or "sine" (flat at both ends).
        layer_shares: "equal": every layer reaches the target; "free": their mean does, with one coefficient for all.
        l1_bounds: lowest and highest coefficient that the controller may choose; a layer that comes to one, by default
            (see `DensityController`) or as given, is named once in a warning.
        revive_after: tokens without an activation after which a neuron is dead, and is revived (see `Revival`), in the
            first 80 % of the run.
        distillation: a `Distillation` from the dense parent.
        parent_loss: the dense parent's on such text (default: of the first step, if the model was converted now).
            Warnings tell where the loss stays far above it, many neurons die, or a run is short for its target; and
            of a learning rate far from the one proposed for a pretrained model of this size (`learning_rates.py`).
        log_layers: log the per-layer figures too.

    Raises:
        ValueError: a model without sparse blocks, a trainer in which the L1 term could not be right (`trainers.py` says
            which), or arguments that do not go together.
    """

    def __init__(
        self,
        trainer: Trainer,
        l1_weight: float | None = None,
        *,
        target_density: float | None = None,
        target_union: float | None = None,
        term: str = "l1",
        share: int | None = None,
        warmup_steps: int | float | None = None,
        warmup: str = "linear",
        layer_shares: str = "equal",
        l1_bounds: Sequence[float] | None = None,
        revive_after: int | None = None,
        distillation: Distillation | None = None,
        parent_loss: float | None = None,
        log_layers: bool = True,
        **removed: Any,
    ) -> None:
        for name in removed:
            if name in REMOVED:
                raise ValueError(f"{name}: {REMOVED[name]}")
            raise TypeError(f"SparsityCallback() got an unexpected keyword argument {name!r}")
        check_trainer(trainer)
        if warmup_steps is None:
            warmup_steps = 0 if l1_weight is not None else 0.1
        check_schedule(
            l1_weight=l1_weight,
            target_density=target_density,
            target_union=target_union,
            term=term,
            share=share,
            warmup_steps=warmup_steps,
            warmup=warmup,
            layer_shares=layer_shares,
            l1_bounds=l1_bounds,
        )
        if revive_after is not None and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            raise ValueError("revive_after: under FSDP or DeepSpeed the rows' optimizer state is sharded; leave it out")
        detach_earlier(trainer, SparsityCallback)  # else it would take off what follows
        self.trainer, self._begun = trainer, 0  # the step at which the run began
        self.penalty = L1Penalty(trainer.model, 0.0 if l1_weight is None else l1_weight, term=term, share=share)
        self.l1_weight, self.target_density, self.target_union = l1_weight, target_density, target_union
        self.term, self.share = term, share
        self.warmup_steps, self.warmup = warmup_steps, warmup
        self.layer_shares = layer_shares
        self.l1_bounds = list(l1_bounds) if isinstance(l1_bounds, tuple) else l1_bounds  # as a checkpoint gives them
        self.revive_after = revive_after
        self.distillation, self.parent_loss, self.log_layers = distillation, parent_loss, log_layers
        if distillation is not None:
            distillation.join(trainer)
        self.controller: DensityController | None = None  # made when a run begins, whose steps it needs
        self.revival: Revival | None = None
        self._density: torch.Tensor | None = None  # of each layer, smoothed
        self._union: torch.Tensor | None = None  # the same of runs of `share` tokens
        self._revived = 0.0  # share of neurons, in the last step
        if revive_after is not None:
            sigma = getattr(trainer.model.config.get_text_config(), "initializer_range", 0.02)
            self.revival = Revival(self.penalty.ffns, revive_after, sigma=sigma, seed=trainer.args.seed)
        # Until it is told, once. An optimizer that the user made, or how to make it, has rates of its own.
        own = trainer.optimizer or trainer.optimizer_cls_and_kwargs
        own = own or type(trainer).create_optimizer is not Trainer.create_optimizer
        self.proposal = None if own else proposal(trainer.model, trainer.args.optim)
        self._told: set = set()
        self._term = contextlib.ExitStack()  # what a micro-batch switches on
        wrap(trainer, self, ["get_batch_samples"])
        self.checkpoints = CompleteCheckpoints(trainer, self.schedule())
        self._card = None
        if "create_model_card" not in vars(trainer):
            use_model_card(trainer)
            self._card = trainer.create_model_card

    def detach(self) -> None:
        """Give the trainer its own methods back and leave its callbacks; a new SparsityCallback does so to the last."""
        if vars(self.trainer).get("create_model_card") is self._card:  # and not one that the user asked for
            vars(self.trainer).pop("create_model_card", None)
        show_layers(self.trainer.callback_handler.callbacks)
        self.penalty.detach()
        self.checkpoints.detach()
        unwrap(self.trainer, self)

    @property
    def target(self) -> str | None:
        """The name of the argument that gave the target; None where `l1_weight` was given."""
        names = ("target_density", "target_union")
        return next((name for name in names if getattr(self, name) is not None), None)

    def progress(self, step: int) -> float:
        """How far the warm-up is, from 0 to 1, when `step` optimizer steps are finished."""
        steps = whole_steps(self.warmup_steps, self.trainer.state.max_steps)
        return WARMUPS[self.warmup](step / steps) if step < steps else 1.0

    def weight_at(self, step: int) -> float:
        """The coefficient of the optimizer step that follows `step` finished ones, where `l1_weight` was given."""
        if self.l1_weight is None:
            return 0.0
        return self.l1_weight * self.progress(step)

    def schedule(self) -> dict:
        """The arguments that a checkpoint records, and a model card tells."""
        names = ["l1_weight"] if self.target is None else [self.target, "layer_shares", "l1_bounds"]
        names += ["term"] if self.term != "l1" else []
        names += ["share"] if self.share is not None else []
        names += ["warmup_steps", "warmup"]
        names += ["revive_after"] if self.revival is not None else []
        return {name: getattr(self, name) for name in names}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state is not self.trainer.state:
            raise ValueError(
                "this SparsityCallback was made for another trainer, so this one would train without the L1 term; make "
                "one for it: trainer.add_callback(SparsityCallback(trainer, ...))"
            )
        if sparse_ffns(self.trainer.model) != self.penalty.ffns:
            raise ValueError(
                "the trainer's model has other sparse blocks than this SparsityCallback was made for (a Trainer with "
                "model_init makes a new model for each run; sparsify, unpatch and copies of blocks change them): give "
                "Trainer the model itself, and make the callback last"
            )
        handler = self.trainer.callback_handler
        hide_layers(handler.callbacks)
        # Before the reporters: what `on_log` adds is for them, too.
        handler.callbacks = [self] + [callback for callback in handler.callbacks if callback is not self]
        self._begin_run(state.global_step)

    def _begin_run(self, step: int) -> None:
        resumed = self.checkpoints.resumed
        saved = read_state(resumed) if resumed else {}
        self._told, self._begun, self._density, self._union = set(), step, None, None
        self.penalty.report()  # what a run that broke off left uncounted
        if self.parent_loss is None:
            self.parent_loss = saved.get("parent_loss")
        if self.target is not None:
            self.controller = DensityController(
                getattr(self, self.target),
                steps=self.trainer.state.max_steps,
                layer_shares=self.layer_shares,
                is_union=self.target == "target_union",
                l1_bounds=self.l1_bounds,
            )
            self.penalty.layer_weights = None
            now = self.schedule()
            same = self.target in saved and all(saved.get(key) == now.get(key) for key in ("term", "share"))
            if saved.get("controller") and same:  # else it has others' weights
                self.controller.load_state(saved["controller"], self.penalty.device)
                self.penalty.layer_weights = self.controller.weights()
        if self.revival is not None:
            check_optimizer(self.trainer.optimizer, self.revival)
            idle = resumed / IDLE_NAME if resumed else None
            self.revival.load_state(load_file(idle) if idle and idle.is_file() else {}, self.penalty.device)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._term.close()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self.penalty.is_on:
            raise ValueError(
                f"{type(self.trainer).__name__} takes a step's micro-batches out of the list of `get_batch_samples` "
                "before it trains on them, so the L1 term was not on; loop over that list itself"
            )
        self._term.close()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        counts, step = self.penalty.end_step(), state.global_step
        if counts is None:
            return
        density, union, valid = counts.density(), counts.union(), counts.l1().isfinite().all()
        if self.controller is not None:
            measured = density if self.target == "target_density" else union
            progress = self.progress(step + 1)
            self.penalty.layer_weights = self.controller.update(measured, counts.size(self.term), progress)
        self._density = self._smoothed("target_density", self._density, density, valid)
        if union is not None:
            self._union = self._smoothed("target_union", self._union, union, valid)
        if self.revival is not None:
            self.revival.count(counts.tokens, counts.active)
            revives = step < REVIVE_UNTIL * state.max_steps
            self._revived = self.revival.revive(self.trainer.optimizer, step) if revives else 0.0

    def _smoothed(
        self, target: str, before: torch.Tensor | None, share: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor | None:
        """Over the last steps; the controller has done so to what it steers by."""
        if self.controller is not None and self.target == target:
            return self.controller.density
        return smoothed(share if before is None else before, share, self.trainer.state.max_steps, valid=valid)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.controller is not None and state.is_world_process_zero:
            warn_of_miss(self.controller, self.penalty.ffns, target=self.target)
        whole = (getattr(self.penalty.config, "twell", None) or {}).get("layers") is None
        if whole and steps_of(self.trainer) == state.global_step and self._density is not None:
            unions = None
            if self._union is not None and self.penalty.in_whole_runs >= WHOLE_RUNS:
                unions = {str(self.share): self._union.tolist()}
            record_density(self.penalty.config, self.penalty.ffns, self._density.tolist(), unions)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not args.should_save:
            return
        folder = self.checkpoints.folder
        record_base(self.trainer.accelerator.unwrap_model(self.trainer.model), folder)
        if self.revival is not None:
            save_file(self.revival.state(), folder / IDLE_NAME)
        if self.parent_loss is not None:
            self.checkpoints.state["parent_loss"] = self.parent_loss
        if self.controller is not None:
            self.checkpoints.state["controller"] = self.controller.state()

    def _get_batch_samples(self, get_batch_samples: Callable, *args: Any, **kwargs: Any) -> tuple:
        if self not in self.trainer.callback_handler.callbacks:
            raise ValueError(
                "a SparsityCallback was made for this trainer but is not among its callbacks; add it with "
                "trainer.add_callback(callback), or call callback.detach() to train without it"
            )
        batches, num_items_in_batch = get_batch_samples(*args, **kwargs)
        if batches:
            check_batches(self.trainer, batches)
            if self.parent_loss is None and self.l1_weight != 0 and not self.trainer.state.global_step:
                self.parent_loss = parent_loss(self.trainer, batches)
            if self.proposal is not None:
                warn_of_rate(self.trainer, self.proposal, self.parent_loss)
                self.proposal = None
            if self.target is None:
                self.penalty.l1_weight = self.weight_at(self.trainer.state.global_step)
            self.penalty.begin_step(batches, scaler=self.trainer.accelerator.scaler)
        return _MicroBatches(batches, self._with_term), num_items_in_batch

    def _with_term(self, batches: Iterator[Mapping]) -> Iterator[Mapping]:
        for batch in batches:
            with self._term:
                self._term.enter_context(self.penalty.micro_batch(batch))
                if self.distillation is not None:
                    scale, steps = self.penalty.token_scale, self.trainer.current_gradient_accumulation_steps
                    self._term.enter_context(self.distillation.micro_batch(batch, scale, steps, self.trainer))
                yield batch

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict, **kwargs: Any
    ) -> None:
        if "loss" not in logs:
            return
        report = self.penalty.report()
        if report is not None:
            rows = self._rows(report)
            logs.update(rows)
            state.log_history[-1].update(rows)
            if state.is_world_process_zero and self.l1_weight != 0:
                self._warn(logs, report)

    def _warn(self, logs: dict, report: dict) -> None:
        state = self.trainer.state
        if self.target is not None and "tokens" not in self._told:
            self._told.add("tokens")
            tokens = report["tokens"] / (state.global_step - self._begun) * state.max_steps
            warn_of_few_tokens(tokens, self.target, getattr(self, self.target))
        if "loss" not in self._told and warn_of_loss(
            self.trainer, logs, report, parent_loss=self.parent_loss, target=self.target, layer_shares=self.layer_shares
        ):
            self._told.add("loss")

    def _rows(self, report: dict) -> dict[str, float]:
        controller = self.controller if self.controller is not None and self.controller.started else None
        rows = rows_of_report(report, self.penalty.ffns, layer_weights=controller is not None, layers=self.log_layers)
        if controller is not None:
            setpoint = controller.setpoint(self.progress(self.trainer.state.global_step))
            rows["twell/target"] = setpoint.mean().item()
            if self.trainer.is_world_process_zero():
                step = self.trainer.state.global_step
                warn_of_bounds(controller, self._told, self.penalty.ffns, step, target=self.target)
        if self.revival is not None:
            rows["twell/revived"] = self._revived
        if self.distillation is not None:
            rows |= self.distillation.report()
        return rows
