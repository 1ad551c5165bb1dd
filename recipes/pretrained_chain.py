"""Rows of pretrained_study.py from nothing but its text, on one or more GPUs, without anybody at hand.

    python recipes/pretrained_chain.py STUDY.yaml --model MODEL --output OUT --logs DIR --gpus 0,1 --rows ROW...

First the parent's own text and the models that the rows begin with, side by side; then all rows at once, each ROW in a
process of its own. What is in the output folder already is not made again: OUT needs text.pt, and eval/ for the tasks.
Each process has a log in DIR; what this one prints are the milestones. `experiments/study.sh chain` starts it.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import yaml
from pretrained_plan import missing_models, needs, plan
from study_sharing import read_rows

Step = tuple[str, str, list[str]]  # name, GPU, command
STUDY = Path(__file__).parent / "pretrained_study.py"
SEEDS_APART = 1000  # a process's batches have seeds one after another; 0 is that of a study that samples by itself


def stages(study: dict, args: argparse.Namespace) -> list[list[Step]]:
    """What runs side by side, stage by stage.

    Raises:
        SystemExit: a ROW that no run's id contains.
    """
    runs, output = plan(study), args.output
    unknown = [part for part in args.rows if not any(part in run["id"] for run in runs)]
    if unknown:
        raise SystemExit(f"no run's id contains {unknown[0]!r}; pretrained_study.py --list names them all")
    done = {row["id"] for row in read_rows(output / "pretrained.jsonl")}
    left = [run for run in runs if run["id"] not in done and any(part in run["id"] for part in args.rows)]
    begun_with = [id for id in {needs(run, study) for run in left} if id is not None]
    models = missing_models(runs, study, begun_with, output)
    command = [sys.executable, str(STUDY), str(args.study), "--model", args.model, "--output", str(output)]
    first, own = [], []
    if models:
        names = [run["id"] for run in models]
        first = [("models", args.gpus[0], [*command, "--models-only", "--only", *names])]
    if any(run.get("own_text") for run in [*models, *left]) and not (output / "own.pt").is_file():
        own = samplers(study["own_text"], args)
    # A model that reads the parent's own text waits for it; others are made meanwhile.
    before = [own, first] if any(run.get("own_text") for run in models) else [own + first]
    parts = [part for part in args.rows if any(part in run["id"] for run in left)]
    gpus = [args.gpus[number % len(args.gpus)] for number in range(len(parts))]
    rows = [(part, gpu, [*command, "--only", part]) for part, gpu in zip(parts, gpus, strict=True)]
    return [stage for stage in (*before, rows) if stage]


def samplers(settings: dict, args: argparse.Namespace) -> list[Step]:
    """Processes that write the parent's own text, on each GPU but the first; on that if it is the only one."""
    gpus = [gpu for gpu in args.gpus[1:] or args.gpus for _ in range(args.samplers)]
    settings = {key: value for key, value in settings.items() if key != "share"}
    tokens = -(-settings.pop("tokens") // len(gpus))
    settings["batch"] = max(1, settings.pop("batch_size") // 2)  # the YAML's is for one that is alone on its GPU
    options = [text for key, value in settings.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    steps = []
    for number, gpu in enumerate(gpus):
        command = [sys.executable, "-m", "hf_twell", "sample", args.model, str(args.output / f"own.{number}.jsonl")]
        command += ["--tokens", str(tokens), "--seed", str((number + 1) * SEEDS_APART), *options]
        steps.append((f"own.{number}", gpu, command))
    return steps


def tell(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def run_stage(stage: list[Step], logs: Path) -> list[str]:
    """Run all of it at once, tell when each ends, and return the names of those that failed."""
    begun, failed, start = {}, [], time.monotonic()
    for name, gpu, command in stage:
        with (logs / re.sub("[/ ]", "_", name)).open("w") as log:
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
            begun[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        tell(f"{name}: begun on GPU {gpu}")
    while begun:
        for name in [name for name, process in begun.items() if process.poll() is not None]:
            code = begun.pop(name).returncode
            ended = f"failed with {code}, as its log says," if code else "done"
            tell(f"{name}: {ended} after {time.monotonic() - start:.0f} s")
            failed += [name] if code else []
        time.sleep(0.2)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--gpus", type=lambda text: text.split(","), required=True, help="such as 0 or 0,1")
    parser.add_argument("--samplers", type=int, default=3, help="processes for the parent's own text on a GPU")
    parser.add_argument("--rows", nargs="+", required=True, help="as --only of pretrained_study.py, a process each")
    args = parser.parse_args()
    failed, start = [], time.monotonic()
    for stage in stages(yaml.safe_load(args.study.read_text()), args):
        # After one that failed the next ones go on: the study samples what is missing, and says which model is.
        failed += run_stage(stage, args.logs)
    tell(f"all have ended after {time.monotonic() - start:.0f} s{'; failed: ' * bool(failed)}{', '.join(failed)}")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
