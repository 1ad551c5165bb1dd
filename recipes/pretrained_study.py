"""What sparsity costs a really pretrained model: a parent, its dense control, and conversions.

    python recipes/pretrained_study.py recipes/pretrained_study.yaml --model MODEL --text DIR --eval DIR --output DIR
    ... --smoke      # few steps on the demo's text, on a CPU, in minutes; any MODEL, --eval may be left out
    ... --list       # which rows are there and which are missing
    ... --score      # trains nothing: adds the tasks that rows lack, of models that are still in the folder
    ... --models-only --only averaged    # makes no row: only that model where it is missing, and what it begins with

MODEL is a folder, a Hub name or a GGUF file. Each run appends one row to `pretrained.jsonl` in the output folder, and
`study.md` and `study.png` are drawn from the rows alone. A run whose row is there is skipped, and one that was killed
goes on from its last checkpoint, so the same command goes on where it was stopped. The same command may be started
several times at once: the processes share the folder, and each takes a run that nobody has begun.

Tokenized text, the parent's own text and the tasks' rows are kept in the output folder: that folder, carried to another
machine, needs neither --text nor --eval there. Without lm-eval, LAMBADA is the only task that is scored; a row's
`unscored` names the others.
"""

import importlib.util
import json
import os
import time
from functools import partial
from pathlib import Path

import torch
import yaml
from pretrained_plan import folder_of, is_made, is_trained, missing_models, needs, plan
from pretrained_report import TASKS, report
from pretrained_runs import recipe_of, train
from pretrained_text import ROWS_FOLDER, heldout_chats, prepare
from study_loop import in_turns, list_runs, make_rows, merged, missing_runs, study_arguments
from study_measure import (
    METRICS,
    TASK_FILES,
    provenance,
    rows_file,
    sequence_losses,
    sparsity,
    standard_error,
    task_scores,
)
from study_sharing import Turn, alone, read_rows

from hf_twell.models.loading import load_model

ROWS = "pretrained.jsonl"
LOSS_BATCH = 8  # sequences; their logits in float32 are 1.6 GB for 1,024 tokens and 49,152 words


def load(run: dict, study: dict, model: str, output: Path):
    """A run's finished model in float32, its tokenizer, and the device on which they are scored."""
    device = "cuda" if torch.cuda.is_available() and not study["training"].get("use_cpu") else "cpu"
    path = folder_of(run["id"], output) / "final" if "start" in run else model
    return *load_model(path, dtype=torch.float32, device=device), device


def scores(model, tokenizer, study: dict, output: Path, tasks: list[str]) -> tuple[dict, list[str]]:
    """Of those `tasks` that can be scored here, and the names of the others."""
    folder, lm_eval = output / ROWS_FOLDER, importlib.util.find_spec("lm_eval")
    here = [task for task in tasks if rows_file(folder, TASK_FILES[task]) and (lm_eval or task not in METRICS)]
    found = task_scores(model, tokenizer, here, folder, study["eval_limit"])
    return found, [task for task in tasks if task not in found]


def run_one(run: dict, study: dict, model: str, output: Path, text: dict) -> dict:
    """Train what is to be trained and measure: one row."""
    facts = {"tokens_read": 0, "minutes": 0.0}
    if "start" in run:
        facts = train(run, study, model, output, text)
    finished, tokenizer, device = load(run, study, model, output)
    losses = {name: sequence_losses(finished, part, LOSS_BATCH) for name, part in text["texts"].items()}
    chats = heldout_chats(study, output)
    own = {} if chats is None else {"chats_loss": sequence_losses(finished, chats, LOSS_BATCH).double().mean().item()}
    tasks, unscored = scores(finished, tokenizer, study, output, list(TASKS))
    return {
        **run,
        "model": Path(model).name,
        "losses": {name: part.double().mean().item() for name, part in losses.items()},
        "loss_stderr": {name: standard_error(part) for name, part in losses.items()},
        "heldout_tokens": {name: part.numel() for name, part in text["texts"].items()},
        **own,
        **sparsity(finished, torch.cat(list(text["texts"].values()))),
        "tasks": tasks,
        "unscored": unscored,
        **facts,
        "parameters": sum(p.numel() for p in finished.parameters()),
        **provenance(device),
    }


def score_rows(runs: list[dict], study: dict, model: str, output: Path, *, ends: float) -> None:
    """Add the tasks that rows lack; a row whose model is gone, or under way elsewhere, is left as it is."""
    lacking = {row["id"]: row["unscored"] for row in read_rows(output / ROWS) if row["unscored"]}
    for run in (run for run in runs if run["id"] in lacking):
        folder = folder_of(run["id"], output)
        if "start" in run and not (folder / "final" / "config.json").is_file():
            print(f"{run['id']}: its model is no longer in {folder}; the row stays as it is")
            continue
        turn = Turn(f"score {run['id']}", None)
        if time.monotonic() > ends or not turn.take(output / "turns"):
            continue
        with turn:
            print(f"--- scoring {run['id']}", flush=True)
            finished, tokenizer, device = load(run, study, model, output)
            found, left = scores(finished, tokenizer, study, output, lacking[run["id"]])
            with alone(output / "rows.lock"):
                rows = read_rows(output / ROWS)
                for row in (row for row in rows if row["id"] == run["id"]):
                    row["tasks"] |= found
                    row |= {"unscored": left, "scored_later": provenance(device)}
                begun = output / f"{ROWS}.begun"
                begun.write_text("".join(json.dumps(row) + "\n" for row in rows))
                begun.rename(output / ROWS)
    report(read_rows(output / ROWS), output)


def main(argv: list[str] | None = None) -> list[dict]:
    parser = study_arguments(__doc__)
    parser.add_argument("--model", help="the pretrained parent: a folder, a Hub name or a GGUF file")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--score", action="store_true", help="train nothing; add the tasks that rows lack")
    instead.add_argument(
        "--models-only",
        action="store_true",
        help="make no row; train what --only names where its model is missing, whether its row is there or not",
    )
    args = parser.parse_args(argv)
    study, text, started = yaml.safe_load(args.study.read_text()), args.text, time.monotonic()
    if args.smoke:
        study = merged(study, study.pop("smoke"))
        text, study["sources"] = Path(__file__).parent / "demo" / "text", ["heldout"]
    output, runs = args.output, plan(study)
    output.mkdir(parents=True, exist_ok=True)
    rows = read_rows(output / ROWS)
    missing = missing_runs(runs, rows, args.only)
    if args.list:
        list_runs(rows, missing)
        return rows
    if args.model is None:
        parser.error("--model is needed: the pretrained parent, as a folder, a Hub name or a GGUF file")
    if not (output / "text.pt").is_file() and (text is None or (args.eval is None and not args.smoke)):
        parser.error(
            f"{output} holds no text.pt yet, so --text is needed, the folder with {', '.join(study['sources'])}, and "
            "--eval, the one with WikiText-2 and the tasks' rows"
        )
    if args.score and not importlib.util.find_spec("lm_eval"):
        parser.error("--score needs lm-eval: pip install 'hf_twell[eval]'")
    for run in (run for run in runs if is_trained(run)):
        recipe_of(run, study, args.model, output)  # what is wrong in the YAML is said before hours of work
    text = prepare(study, args.model, text, args.eval, output)
    if args.score:
        chosen = [run for run in runs if any(part in run["id"] for part in args.only)]
        score_rows(chosen, study, args.model, output, ends=started + 60 * args.minutes)
        return read_rows(output / ROWS)
    common = {
        "needs": lambda run: needs(run, study),
        "is_made": lambda id: is_made(id, output),
        "minutes": args.minutes,
        "started": started,
    }
    if args.models_only:
        in_turns(
            missing_models(runs, study, args.only, output),
            output,
            lambda run: train(run, study, args.model, output, text),
            done=lambda: {run["id"] for run in runs if is_made(run["id"], output)},
            **common,
        )
    else:
        make = partial(run_one, study=study, model=args.model, output=output, text=text)
        make_rows(missing, output / ROWS, make=make, report=report, **common)
    return read_rows(output / ROWS)


if __name__ == "__main__":
    # A deep model compiles layer by layer in a third of the time (docs/training.md). Of this process alone: who calls
    # `main` from another has a say in how its models compile.
    os.environ.setdefault("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    main()
