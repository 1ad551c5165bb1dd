"""`CompleteCheckpoints`: which of a trainer's checkpoints are whole, so that training goes on from one of them."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput, rotate_checkpoints

from hf_twell.files.checkpoints import STATE_NAME, clear_state, last_checkpoint, read_state, write_state

logger = logging.getLogger(__name__)


class CompleteCheckpoints(TrainerCallback):
    """Each checkpoint of a trainer gets `twell_state.json`, after everything else that is written into it.

    `trainer.train(resume_from_checkpoint=True)` passes over checkpoints that lack it, because their saving was
    interrupted, and those of which a file is shorter than the size that it records. The object adds itself to the
    trainer's callbacks; another one made for the same trainer replaces it.

    It puts itself around two public methods of the trainer, for which there is no event:

    - `train`, because the trainer looks for the checkpoint to go on from before its first event;
    - `save_model`, because that is how the saving of each checkpoint begins. The folder may hold another run's
      complete checkpoint, which is not complete any more from then on.

    Args:
        trainer: the trainer.
        method: how the run trains, which the file records; a resume with another is told.

    Attributes:
        state: what the file records besides, as it stands at the next saving.
        resumed: the checkpoint that the run goes on from, or None.
        folder: the checkpoint that is being saved, or was saved last, if there was one.
    """

    folder: Path

    def __init__(self, trainer: Trainer, method: Mapping) -> None:
        detach_earlier(trainer, CompleteCheckpoints)
        self.trainer = trainer
        self.method = dict(method)
        self.state: dict = {}
        self.resumed: Path | None = None
        self._saving = contextlib.ExitStack()  # what is undone when a checkpoint is complete
        wrap(trainer, self, ("train", "save_model"))
        trainer.add_callback(self)

    def detach(self) -> None:
        """Give the trainer its methods back and leave its callbacks."""
        unwrap(self.trainer, self)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Other processes may still be writing their part of the checkpoint.
        self.trainer.accelerator.wait_for_everyone()
        self._saving.close()
        if args.should_save:
            write_state(self.folder, {**method_of(self.trainer), **self.state})
            rotate_checkpoints(
                str(self.folder.parent), args.save_total_limit, state.best_model_checkpoint, use_mtime=True
            )

    def _save_model(self, save_model: Callable, output_dir: str | None = None, _internal_call: bool = False) -> None:
        checkpoint = f"{PREFIX_CHECKPOINT_DIR}-{self.trainer.state.global_step}"
        if not _internal_call or output_dir is None or Path(output_dir).name != checkpoint:  # others' own folders
            save_model(output_dir, _internal_call)
            return
        self.folder, args = Path(output_dir), self.trainer.args
        if args.should_save:
            clear_state(self.folder)
        save_model(output_dir, _internal_call)
        # The trainer would delete the last complete checkpoint before this one is complete: `on_save` does it after.
        self._saving.callback(setattr, args, "save_total_limit", args.save_total_limit)
        args.save_total_limit = None

    def _train(
        self, train: Callable, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        handler = self.trainer.callback_handler
        handler.callbacks = [callback for callback in handler.callbacks if callback is not self] + [self]  # saves last
        if resume_from_checkpoint is True:
            output_dir = self.trainer.args.output_dir
            resume_from_checkpoint = last_checkpoint(output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"{output_dir} holds no complete checkpoint (one with {STATE_NAME}) to resume from")
        self.resumed = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        if self.resumed:
            saved = read_state(self.resumed)
            for key, value in self.method.items():
                if saved.get(key) != value:
                    logger.warning(
                        "%s was trained with %s=%s and goes on with %s", self.resumed, key, saved.get(key), value
                    )
        with _tied_weights_known(self.trainer.model), self._saving:
            return train(resume_from_checkpoint, *args, **kwargs)


@contextlib.contextmanager
def _tied_weights_known(model: nn.Module) -> Iterator[None]:
    """Weights that are tied are saved once: the others are not missing when a trainer loads them."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    pairs = getattr(model, "all_tied_weights_keys", {}).items()
    tied = {name for name, source in pairs if name in weights and weights[name] is weights.get(source)}
    ignored = getattr(model, "_keys_to_ignore_on_save", None)
    model._keys_to_ignore_on_save = tied.union(ignored or ())
    try:
        yield
    finally:
        model._keys_to_ignore_on_save = ignored


def method_of(trainer: Trainer) -> dict:
    """How a trainer's model came to be, for its card: its steps, and what `CompleteCheckpoints` was told."""
    callbacks = trainer.callback_handler.callbacks
    ours = next((callback for callback in callbacks if isinstance(callback, CompleteCheckpoints)), None)
    return {"step": steps_of(trainer), **(ours.method if ours else {})}


def steps_of(trainer: Trainer) -> int:
    """Optimizer steps behind the weights that the model has now: at the end perhaps those of the best checkpoint."""
    best = trainer.state.best_global_step if trainer.args.load_best_model_at_end and not trainer.is_in_train else None
    return trainer.state.global_step if best is None else best


def wrap(trainer: Trainer, owner: TrainerCallback, names: Sequence[str]) -> None:
    """Put `owner`'s methods of these names around the trainer's.

    For what no event tells: events carry no batches, and come after the reporters and the saving.
    """
    for name in names:
        method = getattr(owner, f"_{name.lstrip('_')}")
        setattr(trainer, name, functools.partial(method, getattr(trainer, name)))


def unwrap(trainer: Trainer, owner: TrainerCallback) -> None:
    """Take `owner` and its methods off the trainer."""
    for name, method in list(vars(trainer).items()):
        if _owner(method) is owner:
            delattr(trainer, name)
            (wrapped,) = method.args
            if getattr(trainer, name) != wrapped:  # one that the user had set on this trainer
                setattr(trainer, name, wrapped)
    if owner in trainer.callback_handler.callbacks:
        trainer.remove_callback(owner)


def detach_earlier(trainer: Trainer, kind: type[TrainerCallback]) -> None:
    """Detach the callback of this class that has methods around the trainer's, before another takes its place."""
    for method in list(vars(trainer).values()):
        if isinstance(_owner(method), kind):
            _owner(method).detach()
            return


def _owner(method: Any) -> Any:
    return getattr(getattr(method, "func", None), "__self__", None)
