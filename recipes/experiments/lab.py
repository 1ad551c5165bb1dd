"""Workers that take jobs from a queue, several on one GPU, and what is read of them; see README.md.

lab.py prepare | work NUMBER | add JOB... | wait SECONDS | report
"""

import dataclasses
import fcntl
import json
import lzma
import os
import sys
import time
import traceback
from pathlib import Path

import numpy as np
from batches import sources
from jobs import find_job
from prepare import WINDOW
from scoring import TASKS, TEXTS, excess_and_kept

FOLDER = Path(os.environ.get("LAB", "/tmp/lab"))


def prepare(folder: Path) -> None:
    """The parent dequantized by Transformers, and the tokens as a plain array."""
    import torch
    from model import Shape
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "in", gguf_file="parent.gguf", dtype=torch.float32)
    names = {name: name.removeprefix("model.") for name in model.state_dict() if name != "lm_head.weight"}
    state = {name: model.state_dict()[old].contiguous() for old, name in names.items()}
    windows = np.frombuffer(lzma.decompress((folder / "in" / "tokens.u16.xz").read_bytes()), np.uint16)
    np.save(folder / "windows.npy", windows.reshape(-1, WINDOW))
    shape = dataclasses.asdict(Shape.of(model.config))
    torch.save({"shape": shape, "state": state}, folder / "parent.part")
    (folder / "parent.part").rename(folder / "parent")
    print(f"{shape}, {len(windows) / 1e6:.1f}M tokens")


def load_context(folder: Path):
    import torch
    from model import Shape
    from training import Context

    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # by setting of a job, not by layer
    torch._dynamo.config.accumulated_recompile_limit = 4096
    parent = torch.load(folder / "parent", map_location="cuda")
    windows = torch.from_numpy(np.load(folder / "windows.npy").astype(np.int32)).cuda()
    evaluation = dict(np.load(folder / "in" / "eval.npz"))
    return Context(Shape(**parent["shape"]), parent["state"], windows, evaluation, folder)


def is_ready(job: dict, folder: Path) -> bool:
    """Whether the jobs that this one builds on have left their files."""
    models = [job.get(key) for key in ("start_from", "teacher")]
    texts = sources(job["self_text"]) if job.get("self_text") else []
    files = [f"{name}.pt" for name in models if name] + [f"{name}.npy" for name in texts]
    return all((folder / file).exists() for file in files)


def claim(folder: Path) -> dict | None:
    """The first job of the queue that can run; renaming it makes it this worker's alone."""
    for path in sorted((folder / "queue").glob("*.json")):
        try:
            job = json.loads(path.read_text())
            if is_ready(job, folder):
                path.rename(folder / "taken" / path.name)
                return job
        except FileNotFoundError:
            continue
    return None


def append_row(folder: Path, row: dict) -> None:
    with (folder / "rows.jsonl").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(row) + "\n")


def work(folder: Path, number: str) -> None:
    import gc

    import torch
    from training import run_job

    context, status = load_context(folder), folder / "status" / number
    while True:
        job = claim(folder)
        if job is None:
            time.sleep(0.5)
            continue
        try:
            status.write_text(f"{job['name']} starts\n")
            row = run_job(job, context, lambda line: status.write_text(line + "\n"))
        except Exception:
            row = {"job": job, "error": traceback.format_exc()[-1500:]}
        append_row(folder, row)
        status.unlink()
        del row
        gc.collect()
        torch.cuda.empty_cache()


def add(folder: Path, texts: list[str]) -> None:
    for text in texts:
        job = find_job(text)
        path = folder / "queue" / f"{time.time_ns()}-{job['name']}.json"
        path.with_suffix(".part").write_text(json.dumps(job))
        path.with_suffix(".part").rename(path)


def read_rows(folder: Path) -> list[dict]:
    path = folder / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def describe(row: dict, rows: list[dict]) -> str:
    name = row["job"]["name"]
    if "error" in row:
        return f"{name}: FAILED {row['error'].strip().splitlines()[-1][:300]}"
    if "sampled" in row:
        return f"{name}: {row['sampled'] / 1e6:.1f}M tokens sampled in {row['seconds']:.0f} s"
    losses = " ".join(f"{row['losses'][text]:.3f}" for text in TEXTS)
    tasks = " ".join(f"{row['tasks'][task]:.3f}" for task in TASKS)
    line = f"{name}: density {row['density']:.4f} losses {losses} tasks {tasks}"
    known = {found["job"]["name"]: found for found in rows if "losses" in found}
    if {"parent", "control"} <= set(known):
        excess, kept = excess_and_kept(row, known["parent"], known["control"])
        line += f" excess {excess:+.2%} kept {kept:.1%}"
    last = row["curve"][-1] if row["curve"] else {}
    coefficient = f" coef {last['coefficient']:.3g}" if "coefficient" in last else ""
    return f"{line} kl {last.get('kl', 0):.3f}{coefficient} {row['tokens'] / 1e6:.0f}M {row['seconds']:.0f} s"


def wait(folder: Path, seconds: float) -> None:
    """Until a row arrives that was not printed, nothing is left to do, or time is up."""
    printed, end = folder / "printed", time.time() + seconds
    seen = int(printed.read_text()) if printed.exists() else 0
    while len(read_rows(folder)) == seen and time.time() < end:
        if not list((folder / "queue").glob("*.json")) and not list((folder / "status").iterdir()):
            break
        time.sleep(0.5)
    rows = read_rows(folder)
    for row in rows[seen:]:
        print(describe(row, rows))
    printed.write_text(str(len(rows)))
    for path in sorted((folder / "status").iterdir()):
        print("  running:", path.read_text().strip()[:160])
    print("  queued:", *[path.stem.split("-", 1)[1] for path in sorted((folder / "queue").glob("*.json"))])


def report(folder: Path) -> None:
    rows = read_rows(folder)
    for row in rows:
        print(describe(row, rows))


if __name__ == "__main__":
    command, *arguments = sys.argv[1:] or ["help"]
    commands = {
        "prepare": lambda: prepare(FOLDER),
        "work": lambda: work(FOLDER, arguments[0]),
        "add": lambda: add(FOLDER, arguments),
        "wait": lambda: wait(FOLDER, float(arguments[0])),
        "report": lambda: report(FOLDER),
    }
    commands.get(command, lambda: sys.exit(__doc__))()
