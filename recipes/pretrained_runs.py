"""The runs of pretrained_study.py: the recipe of each, and its training."""

import dataclasses
import json
import shutil
import time
from pathlib import Path

import torch
from average import average
from pretrained_plan import FACTS, folder_of, is_made, named, needs
from pretrained_text import with_own_text
from study_text import spread

from hf_twell.files.checkpoints import finished_checkpoints, last_checkpoint
from hf_twell.files.folders import save_model
from hf_twell.models.gguf_files import is_gguf
from hf_twell.recipe.checks import check_keys, check_recipe
from hf_twell.recipe.finetune import finetune
from hf_twell.recipe.packing import PackedText
from hf_twell.recipe.schema import Recipe

# Of a run, and not of its recipe.
APART = ("id", "name", "start", "average", "own_text", "chats", "seed", "tokens", "tokens_per_step", "training")
MEASURED_SEQUENCES = 64  # of each held-out text, on which a training itself measures


def recipe_of(run: dict, study: dict, model: str, output: Path) -> Recipe:
    """What a run trains, but for its text.

    Raises:
        ValueError: keys that a recipe does not have, values that it cannot run, tokens that make no whole steps.
    """
    where = f"run {run['id']}"
    settings = {**study["training"], **run.get("training", {}), "seed": run["seed"], "report_to": []}
    step = run.get("tokens_per_step", study["tokens_per_step"])
    batch = settings["per_device_train_batch_size"] * study["sequence_length"]
    if step % batch or not isinstance(run["tokens"], int) or run["tokens"] < step:
        raise ValueError(
            f"{where} has tokens: {run['tokens']!r} and tokens_per_step: {step!r}; give tokens of one step at least, "
            f"and a multiple of {batch} a step (per_device_train_batch_size x sequence_length)"
        )
    settings |= {"gradient_accumulation_steps": step // batch, "max_steps": run["tokens"] // step}
    keys = {key: value for key, value in run.items() if key not in APART}
    check_keys(keys, [field.name for field in dataclasses.fields(Recipe)], where)
    if is_gguf(model):  # whose weights are quantized, as SmolLM2's are: models of the study lose nothing when saved
        keys.setdefault("save_dtype", keys.get("dtype", "float32"))
    if run.get("distill"):
        keys["distill"] = {
            **run["distill"],
            "parent": _model(run["distill"].get("parent", "parent"), study, model, output),
        }
    recipe = Recipe(
        model=_model(run["start"], study, model, output),
        output_dir=str(folder_of(run["id"], output)),
        train=[],
        heldout=[],
        sequence_length=study["sequence_length"],
        training=settings,
        **keys,
    )
    check_recipe(recipe, where)
    return recipe


def train(run: dict, study: dict, model: str, output: Path, text: dict) -> dict:
    """Train, or go on from the last checkpoint, or nothing where it is done; what the training itself tells.

    `tokens_read` of it is of all phases: with what the model that it begins with had read.
    """
    folder = folder_of(run["id"], output)
    done = folder / FACTS
    if is_made(run["id"], output):
        return json.loads(done.read_text())
    needed, begin = needs(run, study), _model(run["start"], study, model, output)
    if needed is not None and not is_made(needed, output):
        raise FileNotFoundError(
            f"{run['id']} begins with the model of {needed}, and {begin} is not there; bring it, or make it with "
            f"--models-only --only {needed}"
        )
    read = 0 if needed is None else json.loads((folder_of(needed, output) / FACTS).read_text())["tokens_read"]
    if "average" in run:
        return _average(begin, model, run["average"], folder, read)
    recipe = recipe_of(run, study, model, output)
    resumed = last_checkpoint(recipe.output_dir) is not None
    if resumed:  # with all steps done, it is made from the last checkpoint
        shutil.rmtree(folder / "final", ignore_errors=True)
    if run.get("own_text"):
        text = {**text, "train": with_own_text(text["train"], study, model, output, run.get("chats", 0.0))}
    heldout = torch.cat([spread(sequences, MEASURED_SEQUENCES) for sequences in text["texts"].values()])
    packed = {"train": PackedText.of(text["train"]), "heldout": PackedText.of(heldout)}
    torch.compiler.reset()  # what earlier runs compiled would count towards the limit of compilations
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    result = finetune(recipe, resume=resumed, overwrite=not resumed, **packed)
    settings = recipe.training
    batch = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
    facts = {
        "sequence_length": recipe.sequence_length,
        "settings": settings,
        "tokens_read": read + settings["max_steps"] * batch * recipe.sequence_length,
        "minutes": round((time.perf_counter() - started) / 60, 2),  # since the last start
        "resumed": resumed,
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20) if torch.cuda.is_available() else None,
        "loss_before": result["before"]["loss"],
        "last_log": {key: value for row in result["logs"][-1:] for key, value in row.items() if "layer_" not in key},
    }
    done.write_text(json.dumps(facts))
    for checkpoint in finished_checkpoints(recipe.output_dir):
        shutil.rmtree(checkpoint)
    return facts


def _average(begin: str, model: str, share: float, folder: Path, read: int) -> dict:
    """The mean of a run's model and the parent, whose share is given, as the final model; what `train` returns."""
    started = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    mean, tokenizer = average(begin, model, share)
    save_model(mean, folder / "final", tokenizer, overwrite=True)
    facts = {"tokens_read": read, "minutes": round((time.perf_counter() - started) / 60, 2)}
    (folder / FACTS).write_text(json.dumps(facts))
    return facts


def _model(start: str, study: dict, model: str, output: Path) -> str:
    """The folder of a run's final model, or the parent."""
    return model if start == "parent" else str(folder_of(named(start, study)["id"], output) / "final")
