"""Training checkpoints that say they are complete."""

import json
import os
import re
import warnings
from pathlib import Path

STATE_NAME = "twell_state.json"
TRAINER_STATE_NAME = "trainer_state.json"  # Trainer's own; people edit it, to save at other steps, say


def write_json(path: Path, data: dict) -> None:
    """Write a JSON file that other processes see whole or not at all."""
    aside = _aside(path)
    with open(aside, "w") as file:
        try:
            json.dump(data, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            aside.unlink()
            raise
    aside.rename(path)


def write_state(checkpoint: Path, state: dict) -> None:
    """Mark a Trainer checkpoint as complete, with the size of each file that it holds."""
    state_path = checkpoint / STATE_NAME
    # What a killed process left of the state itself is written over below, and gone.
    others = (TRAINER_STATE_NAME, STATE_NAME, _aside(state_path).name)
    paths = [path for path in checkpoint.rglob("*") if path.is_file() and path.name not in others]
    files = {str(path.relative_to(checkpoint)): path.stat().st_size for path in paths}
    write_json(state_path, {**state, "files": files})


def clear_state(checkpoint: Path) -> None:
    """Mark a checkpoint as incomplete, before it is written over."""
    for path in (checkpoint / STATE_NAME, _aside(checkpoint / STATE_NAME)):
        path.unlink(missing_ok=True)


def _aside(path: Path) -> Path:
    """Where a file is written before it gets its name; a killed process leaves it there."""
    return path.with_name(f".{path.name}.partial")


def read_state(checkpoint: str | Path) -> dict:
    """The state that `SparsityCallback` (or a recipe without it) wrote last into a Trainer checkpoint.

    Raises:
        ValueError: the folder has none, so its saving was interrupted, or it is from another kind of training; or one
            of its files is shorter than it was, or missing; or Trainer's own state is no JSON.
    """
    path = Path(checkpoint) / STATE_NAME
    if not path.is_file():
        raise ValueError(
            f"{checkpoint} has no {STATE_NAME}: its saving was interrupted, or it was trained without "
            "SparsityCallback. Resume from another checkpoint, or start a new run from its weights."
        )
    try:
        state = json.loads(path.read_text())
        files = state.pop("files", {})
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} holds no JSON object; resume from another checkpoint") from error
    for name, size in files.items():
        file = Path(checkpoint, name)
        left = file.stat().st_size if file.is_file() else 0
        if left < size:
            raise ValueError(
                f"{file} has {left:,} of {size:,} bytes; copy it again, resume from another checkpoint, or, if that is "
                f"meant, remove its line from {path}"
            )
    own = Path(checkpoint) / TRAINER_STATE_NAME
    try:
        json.loads(own.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{own} is missing or holds no JSON; copy it again, or resume from another checkpoint"
        ) from error
    return state


def finished_checkpoints(output_dir: str | Path) -> list[Path]:
    """Those of a run whose saving was finished, newest first; damaged ones too."""
    steps = {}
    if Path(output_dir).is_dir():
        for folder in Path(output_dir).iterdir():
            step = re.fullmatch(r"checkpoint-(\d+)", folder.name)
            if step and (folder / STATE_NAME).is_file():
                steps[int(step[1])] = folder
    return [steps[step] for step in sorted(steps, reverse=True)]


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest complete checkpoint of a run, or None; torn ones are passed over, damaged ones with a warning."""
    for folder in finished_checkpoints(output_dir):
        try:
            read_state(folder)
            return str(folder)
        except ValueError as error:
            warnings.warn(f"{folder} is passed over: {error}", stacklevel=1)  # one place, so each is said once
    return None
