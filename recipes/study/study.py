"""What conversions cost a pretrained model: each run is a recipe that is trained and scored, and one line of JSON.

    python recipes/study/study.py recipes/study/qwen2.5-coder-0.5b.yaml --model MODEL --eval DIR --output DIR
    ... --only parent books     # these runs alone; commands of other runs, each with a GPU, may share the folder

MODEL is the dense parent: a folder, a Hub name or a GGUF file. DIR of --eval holds the tasks' rows, as for `hf-twell
eval --data-dir`. A run whose row is in OUTPUT/rows.jsonl is skipped; one that was killed goes on from its last
checkpoint. `report.py` makes a table of the rows.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import yaml

import hf_twell
from hf_twell.bench.environment import environment
from hf_twell.files.checkpoints import last_checkpoint
from hf_twell.models.loading import load_model
from hf_twell.recipe.finetune import finetune
from hf_twell.recipe.schema import Recipe, load_recipe

ROWS = "rows.jsonl"


def recipe_of(name: str, study: dict, folder: Path, model: str, output: Path) -> Recipe:
    """What a run trains; `{OTHER}` in its changes stands for the final model of the run OTHER.

    Raises:
        ValueError: keys or values that a recipe cannot have, or a run OTHER whose model is not there.
    """
    changes = [
        f"model={model}",
        f"output_dir={output / 'runs' / name}",
        *study.get("changes", []),
        *study["runs"][name],
    ]
    for other in study["runs"]:
        final = output / "runs" / other / "final"
        if any(f"{{{other}}}" in change for change in changes) and not (final / "config.json").is_file():
            raise ValueError(f"{name} needs the model of {other}, and {final} is not there: run {other} first")
        changes = [change.replace(f"{{{other}}}", str(final)) for change in changes]
    return load_recipe(folder / study["recipe"], changes)


def trained(recipe: Recipe) -> dict:
    """Train as the recipe says, or go on from its last checkpoint; what a row says of the training."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    started, resumed = time.perf_counter(), last_checkpoint(recipe.output_dir) is not None
    result = finetune(recipe, resume=resumed, overwrite=not resumed)
    training = recipe.training
    step = training["per_device_train_batch_size"] * training.get("gradient_accumulation_steps", 1)
    sparsity = result["after"]["sparsity"]
    unions = [union_of(layer) for layer in sparsity["layers"]]
    return {
        "tokens": training["max_steps"] * step * recipe.sequence_length,
        "tokens_per_step": step * recipe.sequence_length,
        "learning_rate": training["learning_rate"],
        "resumed": resumed,
        "minutes": round((time.perf_counter() - started) / 60, 2),
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20) if torch.cuda.is_available() else None,
        "density": sparsity["density"],
        "union": {run: statistics.mean(union[run] for union in unions) for run in unions[0]},
        "dead": sparsity["dead"],
        "layers": [
            {"density": round(layer["density"], 4), "union": union, "dead": round(layer["dead"], 4)}
            for layer, union in zip(sparsity["layers"], unions, strict=True)
        ],
        "log": [{key: row[key] for key in ("step", "loss", "twell/kl") if key in row} for row in result["logs"][::10]],
    }


def union_of(layer: dict) -> dict[str, float]:
    """The share of a layer's neurons that at least one of 16, 64 and 128 neighbouring tokens activates."""
    return {run: round(found["neurons"] / layer["intermediate_size"], 4) for run, found in layer["distinct"].items()}


def scores(model: str | Path, texts: list[str], study: dict, eval_dir: Path, batch_size: int) -> dict:
    """Losses in nats per token and tasks' accuracies; of tasks, all rows."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else None
    loaded, tokenizer = load_model(model, dtype=dtype)
    options = {"text": texts, "batch_size": batch_size, "limit": study.get("limit"), "context": study["context"]}
    found = hf_twell.evaluate(loaded, tokenizer, study["tasks"], data_dir=eval_dir, **options)
    return {
        "losses": {Path(path).stem: text["nats_per_token"] for path, text in found["text"].items()},
        "heldout_tokens": {Path(path).stem: text["tokens"] for path, text in found["text"].items()},
        "tasks": {name: {"rows": task["n_samples"], **task["metrics"]} for name, task in found["tasks"].items()},
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--eval", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="names of runs; by default all, one after another")
    parser.add_argument("--batch", type=int, default=32, help="requests scored at a time (default: 32)")
    args = parser.parse_args(argv)
    study, folder = yaml.safe_load(args.study.read_text()), args.study.parent
    unknown = set(args.only or ()) - study["runs"].keys()
    if unknown:
        parser.error(f"{args.study} has no run {', '.join(unknown)}; it has {', '.join(study['runs'])}")
    args.output.mkdir(parents=True, exist_ok=True)
    rows_path = args.output / ROWS
    rows_path.touch()
    done = {json.loads(line)["run"] for line in rows_path.read_text().splitlines()}
    for name in args.only or study["runs"]:
        if name in done:
            print(f"{name}: its row is there", file=sys.stderr)
            continue
        row = {"run": name, "changes": study["runs"][name], "parent": Path(args.model).name}
        if study["runs"][name] is None:
            texts, model = load_recipe(folder / study["recipe"]).heldout, args.model
        else:
            recipe = recipe_of(name, study, folder, args.model, args.output)
            row["training"] = trained(recipe)
            texts, model = recipe.heldout, Path(recipe.output_dir, "final")
        row |= scores(model, texts, study, args.eval, args.batch)
        row["environment"] = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        with rows_path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps({key: row[key] for key in ("run", "losses", "tasks")}), file=sys.stderr)


if __name__ == "__main__":
    main()
