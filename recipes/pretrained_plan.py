"""What is planned in pretrained_study.py, and which models are there: without PyTorch, which takes seconds to load."""

from itertools import product
from pathlib import Path

FACTS = "trained.json"  # in a run's folder, written last


def plan(study: dict) -> list[dict]:
    """Every run, each with a unique `id` (name/target/tokens/seed), in the order in which they run."""
    runs = []
    for entry in study["runs"]:
        many = [_listed(entry.get(key)) for key in ("tokens", "target_density")]
        for tokens, target, seed in product(*many, entry.get("seeds", [0])):
            run = {key: value for key, value in entry.items() if key != "seeds"}
            if is_trained(entry):
                run |= {"tokens": tokens, "seed": seed}
            if target is not None:
                run["target_density"] = target
            millions = None if tokens is None else f"{tokens / 1e6:g}M"
            shown = [None if target is None else f"{target:g}", millions, f"seed{seed}" if is_trained(run) else None]
            runs.append({**run, "id": "/".join([run["name"], *filter(None, shown)])})
    return runs


def is_trained(run: dict) -> bool:
    """Neither only scored, nor the mean of two models."""
    return "start" in run and "average" not in run


def needs(run: dict, study: dict) -> str | None:
    """The id of the run whose model this one begins with; None for the parent's.

    Raises:
        ValueError: no run has the name that `start` gives.
    """
    return None if run.get("start", "parent") == "parent" else named(run["start"], study)["id"]


def folder_of(id: str, output: Path) -> Path:
    """Where the checkpoints and the final model of the run with that id lie."""
    return output / "runs" / id.replace(" ", "_").replace("/", "_")


def is_made(id: str, output: Path) -> bool:
    """Whether its final model is there, and what its training told."""
    folder = folder_of(id, output)
    return (folder / FACTS).is_file() and (folder / "final" / "config.json").is_file()


def missing_models(runs: list[dict], study: dict, only: list[str], output: Path) -> list[dict]:
    """Runs with a model that is not there: whose id contains one of `only`, or which such a one begins with."""
    missing = {run["id"]: needs(run, study) for run in runs if "start" in run and not is_made(run["id"], output)}
    wanted = {id for id in missing if any(part in id for part in only)}
    while more := {missing[id] for id in wanted} & missing.keys() - wanted:
        wanted |= more
    return [run for run in runs if run["id"] in wanted]


def named(name: str, study: dict) -> dict:
    """The run of that name that has a model.

    Raises:
        ValueError: there is none.
    """
    run = next((run for run in plan(study) if run["name"] == name and "start" in run), None)
    if run is None:
        raise ValueError(
            f"no run with a model has the name {name!r}, which another one begins with; write parent or one of `runs`"
        )
    return run


def _listed(value) -> list:
    return value if isinstance(value, list) else [value]
