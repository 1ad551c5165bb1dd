"""What conversions cost a pretrained model: each run is a recipe that is trained and scored, and lines of JSON.

    python recipes/study/study.py recipes/study/qwen2.5-coder-0.5b.yaml --model MODEL --eval DIR --output DIR
    ... --only parent books     # these runs alone

MODEL is the dense parent: a folder, a Hub name or a GGUF file. DIR of --eval holds the tasks' rows, as for `hf-twell
eval --data-dir`. What a run lacks in OUTPUT/rows.jsonl is made: its training, its scores, and with --run-code those of
tasks in which it writes (`written_tasks`). Several commands, each with a GPU, may share OUTPUT: a run that another one
works on is passed over. On several GPUs a run trains by

    torchrun --nproc-per-node 4 recipes/study/study.py ... --only RUN

which ends with its training; the same command by itself then scores the model. `report.py` makes a table of the rows.
"""

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import yaml
from filelock import FileLock, Timeout

import hf_twell
from hf_twell.bench.environment import environment
from hf_twell.files.checkpoints import last_checkpoint
from hf_twell.models.loading import load_model, load_tokenizer
from hf_twell.recipe.finetune import finetune
from hf_twell.recipe.packing import PackedText, token_ids
from hf_twell.recipe.schema import Recipe, load_recipe

AVERAGE = Path(__file__).parents[1] / "average.py"
RANK, PROCESSES = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))


def rows_of(path: Path) -> dict[str, dict]:
    """What is known of each run, by its name: its lines in one. A line that a kill has cut is named and left out."""
    runs: dict[str, dict] = {}
    for number, line in enumerate(path.read_text().splitlines() if path.is_file() else [], 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            print(f"{path}, line {number} is no whole row, and is left out", file=sys.stderr)
            continue
        runs.setdefault(row["run"], {}).update(row)
    return runs


def add_row(path: Path, row: dict) -> None:
    """Append a line, in one write; after a line that was cut, on one of its own."""
    path.touch()
    begun = path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a") as file:
        file.write("\n" * begun + json.dumps(row) + "\n")


def changes_of(name: str, study: dict, model: str, output: Path) -> list[str]:
    """A run's changes to the recipe, with `{OUTPUT}`, and `{OTHER}` for the final model of the run OTHER, filled in; a
    ValueError where that model is not there."""
    changes = [f"model={model}", f"output_dir={output / 'runs' / name}"]
    changes += [f"heldout={json.dumps(study['heldout'])}", *study.get("changes", []), *study["runs"][name]]
    changes = [change.replace("{OUTPUT}", str(output)) for change in changes]
    for other in study["runs"]:
        if any(f"{{{other}}}" in change for change in changes):
            final = final_of(other, output)
            if not (final / "config.json").is_file():
                raise ValueError(f"{name} needs the model of {other}, and {final} is not there: run {other} first")
            changes = [change.replace(f"{{{other}}}", str(final)) for change in changes]
    return changes


def final_of(name: str, output: Path) -> Path:
    return output / "runs" / name / "final"


def packed(texts: list[str], tokenizer, length: int, output: Path) -> PackedText:
    """Text files in sequences; each file is tokenized once, or once by each of two commands that begin together."""
    parts = []
    for text in texts:
        about = Path(text).stat()
        key = hashlib.sha256(repr((text, about.st_size, about.st_mtime_ns, tokenizer.eos_token)).encode()).hexdigest()
        path = output / "packed" / f"{Path(text).stem}-{key[:12]}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            own = path.with_suffix(f".{os.getpid()}")
            torch.save(torch.tensor(token_ids(tokenizer, [text]), dtype=torch.int32), own)
            own.rename(path)
        parts.append(torch.load(path))
    ids = torch.cat(parts).long()
    return PackedText.of(ids[: len(ids) // length * length].view(-1, length))


def trained(recipe: Recipe, output: Path) -> dict:
    """Train as the recipe says, or go on from its last checkpoint; what a row says of the training."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    started, resumed = time.perf_counter(), last_checkpoint(recipe.output_dir) is not None
    tokenizer, length = load_tokenizer(recipe.model), recipe.sequence_length
    text = {name: packed(getattr(recipe, name), tokenizer, length, output) for name in ("train", "heldout")}
    result = finetune(recipe, resume=resumed, overwrite=not resumed, **text)
    training = recipe.training
    step = training["per_device_train_batch_size"] * training.get("gradient_accumulation_steps", 1) * PROCESSES
    sparsity = result["after"]["sparsity"]
    unions = [union_of(layer) for layer in sparsity["layers"]]
    return {
        "tokens": training["max_steps"] * step * length,
        "tokens_of_text": text["train"].sequences.numel(),
        "tokens_per_step": step * length,
        "learning_rate": training["learning_rate"],
        "resumed": resumed,
        "processes": PROCESSES,
        "minutes": round((time.perf_counter() - started) / 60, 2),
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20) if torch.cuda.is_available() else None,
        "loss": result["after"]["loss"],
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


def scores(model: str | Path, tasks: list[str], texts_to: Path | None = None, **options) -> dict:
    """Losses in nats per token and tasks' accuracies, with `hf_twell.evaluate`'s options. What the model wrote goes
    to the file `texts_to`."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else None
    loaded, tokenizer = load_model(model, dtype=dtype)
    found = hf_twell.evaluate(loaded, tokenizer, tasks, log_samples=texts_to is not None, **options)
    if texts_to is not None:
        texts_to.parent.mkdir(exist_ok=True)
        texts_to.write_text(json.dumps({name: task["samples"] for name, task in found["tasks"].items()}))
    return {
        "losses": {Path(path).stem: text["nats_per_token"] for path, text in found["text"].items()},
        "heldout_tokens": {Path(path).stem: text["tokens"] for path, text in found["text"].items()},
        "tasks": {name: {"rows": task["n_samples"], **task["metrics"]} for name, task in found["tasks"].items()},
    }


def make(name: str, study: dict, folder: Path, args) -> None:
    """Make what a run lacks, and add each part to the rows as soon as it is there."""
    rows, output = args.output / "rows.jsonl", args.output
    known, how = rows_of(rows).get(name, {}), study["runs"][name]
    model = args.model if how is None else final_of(name, output)

    def add(**part) -> None:
        if RANK != 0:
            return
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        row = {"run": name, "changes": how, "parent": Path(args.model).name, "environment": environment(device), **part}
        add_row(rows, row)
        print(json.dumps(row), file=sys.stderr)

    if isinstance(how, dict) and not (model / "config.json").is_file():  # the mean of a run's model and the parent
        command = [AVERAGE, final_of(how["mean_of"], output), args.model, model, "--share", str(how["share"])]
        subprocess.run([sys.executable, *command], check=True)
    if isinstance(how, list) and "training" not in known:
        recipe = load_recipe(folder / study["recipe"], changes_of(name, study, args.model, output))
        add(training=trained(recipe, output))
    if PROCESSES > 1:  # one process scores
        return
    options = {"data_dir": args.eval, "limit": args.limit}
    if "losses" not in known:
        texts = [text.replace("{OUTPUT}", str(output)) for text in study["heldout"]]
        options_of_text = {"text": texts, "context": study["context"], "batch_size": args.batch}
        add(limit=args.limit, **scores(model, study["tasks"], **options, **options_of_text))
    wanted = study.get("written_tasks")
    if wanted and args.run_code and "written" not in known:
        texts_to = output / "written" / f"{name}.json"
        options |= {"chat_template": True, "run_code": True, "batch_size": args.batch_written}
        written = scores(model, wanted, texts_to, **options)
        add(written=written["tasks"])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--eval", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="names of runs; by default all, one after another")
    parser.add_argument("--batch", type=int, default=32, help="requests scored at a time (default: 32)")
    parser.add_argument("--batch-written", type=int, default=128, help="rows written at a time (default: 128)")
    parser.add_argument("--limit", type=int, help="only the first rows of each task; by default all")
    parser.add_argument("--run-code", action="store_true", help="also the tasks that run programs of the model")
    args = parser.parse_args(argv)
    study = yaml.safe_load(args.study.read_text())
    unknown = set(args.only or ()) - study["runs"].keys()
    if unknown:
        parser.error(f"{args.study} has no run {', '.join(unknown)}; it has {', '.join(study['runs'])}")
    for name in args.only or study["runs"]:
        try:
            # A killed command gives its claim back. The first of several processes claims for all.
            claim = FileLock(args.output / "claims" / name, blocking=False) if RANK == 0 else contextlib.nullcontext()
            with claim:
                make(name, study, args.study.parent, args)
        except Timeout:
            print(f"{name}: another command works on it", file=sys.stderr)


if __name__ == "__main__":
    main()
