"""The folder of a training run: one run at a time, no mixing with an earlier one, nothing to do where all is done."""

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_twell.files.checkpoints import STATE_NAME, TRAINER_STATE_NAME, finished_checkpoints, last_checkpoint, read_state
from hf_twell.files.folders import check_target, clear_dead_savings
from hf_twell.recipe.schema import Recipe
from hf_twell.train.schedule import REMOVED

logger = logging.getLogger(__name__)

# What a checkpoint's weights, blocks and optimizer are made of: Trainer keeps the optimizer's figures without a word.
KEPT = ("relu", "layers", "trainable", "freeze", "lora")
KEPT_BY_OPTIMIZER = (
    "optim", "optim_args", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"
)  # fmt: skip
LOCK_NAME = "_twell.lock"  # of an output_dir; `trainer.push_to_hub` leaves out names that begin so


@contextlib.contextmanager
def only_run(args: TrainingArguments, *, resume: bool) -> Iterator[None]:
    """Hold the run's folder for one training; the lock ends with the process, however that ends. A ValueError where
    another run is training into it, or it cannot be made."""
    mistyped = resume and not Path(args.output_dir).is_dir()  # `check_run` says so, and it is not made
    if mistyped or args.process_index != 0:  # of a run's processes the first one holds it for all
        yield
        return
    folder = Path(args.output_dir)
    is_new = not folder.exists()
    make_output_dir(args.output_dir)
    with contextlib.ExitStack() as stack:
        if is_new:
            stack.callback(_remove_if_empty, folder)
        file = stack.enter_context(Path(folder, LOCK_NAME).open("a"))
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, workers do not inherit it
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):  # else: some network file systems have no locks
                raise ValueError(
                    f"another run is training into {args.output_dir}; wait until it ends, or choose another output_dir"
                ) from error
        yield


def _remove_if_empty(folder: Path) -> None:
    """Remove what a run made and left nothing in but its lock, as one that fails before its first step does."""
    if [path.name for path in folder.iterdir()] == [LOCK_NAME]:
        (folder / LOCK_NAME).unlink()
        folder.rmdir()


def check_run(
    output_dir: str, args: TrainingArguments, *, resume: bool, overwrite: bool, inputs: Iterable[str | None] = ()
) -> None:
    """Refuse, before any work, a run that would mix with an earlier one in its folder, or that has nothing to do.

    A run that ended between its last step and its final model may be resumed: `NothingLeft` makes the model then.

    Args:
        inputs: what the run reads; see `check_target`.

    Raises:
        ValueError: an earlier run's checkpoints or final model without `resume` or `overwrite`; checkpoints of another
            training; nothing to resume from; a folder that cannot be made or written to; a final model with other
            things beside it, or that is an input.
    """
    final = Path(output_dir, "final")
    if args.process_index == 0:
        clear_dead_savings(final)  # what a run left that was killed while it saved its model
    if final.exists():
        check_target(final, overwrite=True, inputs=inputs)
    if not resume:
        make_output_dir(output_dir)
        if earlier := finished_checkpoints(output_dir):
            raise ValueError(
                f"{earlier[0]} is from an earlier run; go on with --resume, or choose another output_dir (--overwrite "
                "replaces the final model of a run without checkpoints)"
            )
        for folder in Path(output_dir).glob("checkpoint-[0-9]*"):
            if (folder / TRAINER_STATE_NAME).is_file():
                raise ValueError(
                    f"{folder} is from another training, or its saving was interrupted; this one would write over it "
                    "or remove it: move it, or choose another output_dir"
                )
        if final.exists() and not overwrite:
            raise ValueError(f"{output_dir} holds the final model of an earlier run; replace it with --overwrite")
    else:
        checkpoint = last_checkpoint(output_dir)
        if checkpoint is None:
            raise ValueError(f"{output_dir} holds no complete checkpoint to resume from; leave --resume out")
        state = json.loads(Path(checkpoint, "trainer_state.json").read_text())
        same_epochs = state["num_train_epochs"] == args.num_train_epochs
        steps = args.max_steps if args.max_steps > 0 else state["max_steps"] if same_epochs else math.inf
        made = final.exists() and final.stat().st_mtime >= Path(checkpoint, STATE_NAME).stat().st_mtime
        if state["global_step"] >= steps and made:  # an older one is what the run, or an earlier one, made before
            raise ValueError(
                f"the run in {output_dir} is finished: {state['global_step']} of {steps} steps are done; give it more "
                "steps, or choose another output_dir"
            )


def settings(recipe: Recipe, args: TrainingArguments) -> dict[str, dict]:
    """What a run's checkpoints record for `check_changes` and for cards: what a resumed run keeps, and what decides its
    text's order.

    Text files and models are told by name and size, so that folders may move.
    """
    kept = {"model": model_identity(recipe.model), **{key: getattr(recipe, key) for key in KEPT}}
    kept |= {f"training.{key}": getattr(args, key) for key in KEPT_BY_OPTIMIZER}
    order = {
        "train": identity(recipe.train),
        "sequence_length": recipe.sequence_length,
        "sequences a step": args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "training.seed": args.seed,
        "training.data_seed": args.data_seed,
    }
    return {"kept": kept, "order": order}


def identity(source: list | dict | str) -> list | dict:
    """What tells one text of a recipe from another."""
    if isinstance(source, dict):
        return source
    return [[Path(name).name, Path(name).stat().st_size] for name in ([source] if isinstance(source, str) else source)]


def model_identity(path: str) -> str:
    """What tells models apart: the name of a folder or GGUF file and its bytes of weights, or the name on the Hub."""
    if not Path(path).exists():
        return path
    files = [Path(path)] if Path(path).is_file() else Path(path).glob("*.safetensors")
    return f"{Path(path).resolve().name} ({sum(file.stat().st_size for file in files):,} bytes)"


def kept_learning_rate(output_dir: str) -> float | None:
    """That of the run which a resumed one goes on with; None where its checkpoint does not say."""
    checkpoint = last_checkpoint(output_dir)
    assert checkpoint is not None  # `check_run` found it
    return read_state(checkpoint).get("settings", {}).get("kept", {}).get("training.learning_rate")


def check_changes(recipe: Recipe, args: TrainingArguments) -> None:
    """Tell a resumed run that another order of the text follows, and refuse, by a ValueError, a change of what the
    checkpoint keeps."""
    checkpoint = last_checkpoint(recipe.output_dir)
    assert checkpoint is not None  # `check_run` found it
    saved, now = read_state(checkpoint).get("settings", {}), settings(recipe, args)
    for key, value in saved.get("kept", {}).items():
        if now["kept"].get(key) != value:
            if key in REMOVED:
                raise ValueError(f"{checkpoint} was trained with {key}={value!r}, and {REMOVED[key]}; start a new run")
            raise ValueError(
                f"{checkpoint} was trained with {key}={value!r}, which a resumed run keeps, and not "
                f"{now['kept'][key]!r}; leave it so, or start a new run in another output_dir"
            )
    for key, value in saved.get("order", {}).items():
        if now["order"].get(key) != value and args.process_index == 0:
            logger.warning(
                "%s was trained with %s=%s and goes on with %s: what it has read of the text may come again",
                checkpoint, key, value, now["order"].get(key),
            )  # fmt: skip


def make_output_dir(output_dir: str) -> None:
    """Make the run's folder, which has to take checkpoints; a ValueError where nothing can be written there."""
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output_dir {output_dir} cannot be made ({error.strerror}); name another folder") from error
    if not os.access(output_dir, os.W_OK):
        raise ValueError(f"output_dir {output_dir} cannot be written to; name another folder")


@contextlib.contextmanager
def interruptible(output_dir: str) -> Iterator[None]:
    """Let Ctrl-C say how the run goes on, or that it has no checkpoint yet."""
    try:
        yield
    except KeyboardInterrupt as error:
        checkpoints = finished_checkpoints(output_dir)
        how = [f"go on from {path} with --resume" for path in checkpoints[:1]]
        raise KeyboardInterrupt(*how or ["it had no complete checkpoint yet (training.save_steps)"]) from error


class NothingLeft(TrainerCallback):
    """Ends a resumed run that has all its steps done, which Trainer would give one more, by raising `Finished`."""

    class Finished(Exception):
        pass

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step >= state.max_steps:
            if args.load_best_model_at_end and state.best_model_checkpoint is not None:
                self.trainer._load_best_model()
            self.trainer.is_in_train = False  # as at the end of training
            raise self.Finished


class FiniteWeights(TrainerCallback):
    """Ends a run that has diverged at its next log or saving: what it saved before stays its last complete checkpoint.

    Trainer goes on with weights of NaN to the end, and logs a loss that leaves the NaN out.
    """

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel,
        **kwargs: Any,
    ) -> None:
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        parts = [w.to_local() if hasattr(w, "to_local") else w for w in trained.values()]  # of this process
        # Stacked, so that the host waits for the device once, and not for each weight.
        finite = torch.stack([part.isfinite().all().to(parts[0].device) for part in parts]).tolist()
        for name, good in zip(trained, finite, strict=True):
            if not good:
                raise ValueError(
                    f"training diverged: at step {state.global_step}, {name} holds values that are NaN or infinite; "
                    "start a new run with a lower training.learning_rate"
                )

    on_save = on_log
