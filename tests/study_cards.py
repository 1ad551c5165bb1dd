"""Example cards of two conversions of Qwen2.5-Coder, of their rows: as `hf-twell push` would write them.

    python -m tests.study_cards     # writes model_cards/qwen2.5-coder-*/card.md

The weights are not in the repository. So the config, the training's record and the scores are laid out here as a model
folder and `hf-twell eval` would have them, and the package makes the card.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import yaml
from transformers import Qwen2Config

from hf_twell.evaluation.tasks import DATA_FILES
from hf_twell.models.cards import model_card
from hf_twell.recipe.schema import Recipe
from tests.paths import ROOT

RUNS = {  # by folder: file of rows, run, shape
    "qwen2.5-coder-0.5b": (
        "rows_own_text.jsonl",
        "ten-half-57M",
        {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24},
    ),
    "qwen2.5-coder-1.5b": (
        "rows.jsonl",
        "ten",
        {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28},
    ),
}
SHOTS = {"gsm8k_cot": 8}  # of lm-eval's definitions; the others have none
WHERE = (
    "Measured on the held-out texts when training ended. The run's row has densities to four decimals, so L0 is exact "
    "to half a neuron."
)


def path_of(folder: str) -> Path:
    return ROOT / "model_cards" / folder / "card.md"


def of_study(name: str) -> ModuleType:
    """A program of recipes/study, which import each other by their names alone."""
    sys.path.insert(0, str(ROOT / "recipes" / "study"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def rows_of(folder: str) -> tuple[dict, dict]:
    """The row of a folder's run, and its parent's."""
    file, run, _ = RUNS[folder]
    rows = of_study("study").rows_of
    return rows(ROOT / "model_cards" / folder / file)[run], rows(ROOT / "model_cards" / folder / "rows.jsonl")["parent"]


def card_of(folder: str) -> str:
    """The whole card."""
    row, parent = rows_of(folder)
    _, run, shape = RUNS[folder]
    recipe = yaml.safe_load((ROOT / "recipes" / f"{folder}.yaml").read_text())
    for key, _, value in (change.partition("=") for change in row["changes"]):
        recipe[key] = yaml.safe_load(value)
    texts = of_study("report").texts_alike(row, [parent])  # the others' text of that name is another one
    return model_card(
        f"me/{folder}-{run}",
        config_of(row, shape),
        base_model=recipe["model"],
        method=method_of(row, recipe),
        measured=measured_of(row, recipe, shape["intermediate_size"]),
        scores=scores_of(row, list(row["losses"])),
        parent_scores=scores_of(parent, texts),
        chat=True,
    )


def config_of(row: dict, shape: dict) -> dict:
    """config.json."""
    layers = row["training"]["layers"]
    unions = {run: [layer["union"][run] for layer in layers] for run in layers[0]["union"]}
    entry = {"version": 1, "layers": None, "density": [layer["density"] for layer in layers], "unions": unions}
    config = Qwen2Config(**shape, hidden_act="relu").to_dict()
    return config | {"architectures": ["Qwen2ForCausalLM"], "twell": entry}


def method_of(row: dict, recipe: dict) -> dict:
    """twell_state.json. Rows do not say which files were read."""
    trained, length = row["training"], recipe["sequence_length"]
    return {
        "step": trained["tokens"] // trained["tokens_per_step"],
        **{key: recipe[key] for key in ("target_density", "term", "layer_shares", "warmup_steps")},
        "warmup": Recipe.warmup,
        "settings": {
            "kept": {"model": row["parent"], "training.learning_rate": trained["learning_rate"]},
            "order": {"sequence_length": length, "sequences a step": trained["tokens_per_step"] // length},
            "teacher": {"model": row["parent"], "layers": 0.0, **recipe["distill"]},
        },
    }


def measured_of(row: dict, recipe: dict, width: int) -> dict:
    """twell_measured.json."""
    trained = row["training"]

    def told(share: dict) -> dict:
        figures = {key: share[key] for key in ("density", "dead")}
        return {**figures, "l0": share["density"] * width, "unions": share["union"], "intermediate_size": width}

    sparsity = {**told(trained), "where": WHERE, "layers": [told(layer) for layer in trained["layers"]]}
    return {"heldout": recipe["heldout"], "after": {"loss": trained["loss"], "sparsity": sparsity}}


def scores_of(row: dict, texts: list[str]) -> list[dict]:
    """What `hf_twell.evaluate` returned to study.py: once without the chat template, once with it."""
    assert row["environment"]["device"] == "cuda", "there study.py loads models in bfloat16"
    report = of_study("report")

    def result(scored: dict, losses: dict, **how) -> dict:
        tasks = {
            name: {
                "split": next(iter(DATA_FILES[name])),
                "num_fewshot": SHOTS.get(name, 0),
                "n_samples": entry["rows"],
                "metrics": {metric: figure for metric, figure in entry.items() if metric != "rows"},
                "written": name in report.WRITTEN,
                "chance": report.CHANCE.get(name, 0.0),
            }
            for name, entry in scored.items()
        }
        return {"dtype": "bfloat16", "limit": row["limit"], "tasks": tasks, "text": losses, **how}

    tokens = row["heldout_tokens"]
    losses = {f"{text}.txt": {"tokens": tokens[text], "nats_per_token": row["losses"][text]} for text in texts}
    return [result(row["tasks"], losses), result(row["written"], {}, chat_template=True)]


def main() -> None:
    for folder in RUNS:
        path_of(folder).write_text(card_of(folder), encoding="utf-8")


if __name__ == "__main__":
    main()
