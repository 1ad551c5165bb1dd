"""The README's examples run as they stand, on a CPU and the demo model in place of models from the Hub."""

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hf_twell.recipe.schema import load_recipe
from tests.conftest import COMMAND, shared_path
from tests.servers import serving

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "recipes" / "demo"
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python_examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code = "\n".join(blocks("python"))
    assert "SparsityCallback" in code
    code = code.replace("meta-llama/Llama-3.2-1B", str(DEMO / "model")).replace(
        "max_steps=1000", "max_steps=2, logging_steps=1"
    )
    code = code.replace("bf16=True)", "use_cpu=True)")  # as the example says
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    ids = tokenizer((DEMO / "text" / "heldout.txt").read_text()[:4000], return_tensors="pt")["input_ids"][0]
    rows = [{"input_ids": row, "labels": row} for row in ids[: len(ids) // 32 * 32].view(-1, 32)]
    names = {"dataset": rows}
    exec(compile(code, "README.md", "exec"), names)
    assert names["trainer"].state.log_history[0]["twell/l0"] > 0
    assert (tmp_path / "llama-3.2-1b-relu" / "config.json").is_file()


@pytest.mark.slow
def test_commands(tmp_path):
    pytest.importorskip("lm_eval")
    commands = [line.split("#")[0] for block in blocks("bash") for line in block.splitlines() if "hf-twell" in line]
    assert [shlex.split(command)[1] for command in commands] == [
        "sparsify",
        "train",
        "inspect",
        "eval",
        "serve",
        "push",
        "bench",
        "doctor",
    ]
    (tmp_path / "notes.txt").write_text((DEMO / "text" / "heldout.txt").read_text()[:8000])
    extra = {
        "push": ["--dry-run"],
        "train": [
            f"output_dir={tmp_path / 'out' / 'demo'}",
            f"heldout={tmp_path / 'notes.txt'}",
            "training.max_steps=1",
        ],
        "eval": ["--data-dir", str(shared_path("data/eval")), "--limit", "2", "--split", "validation"],
    }
    for command in commands:
        name, *arguments = shlex.split(command.replace("Qwen/Qwen3-0.6B", str(DEMO / "model")))[1:]
        arguments = [str(ROOT / a) if a.startswith("recipes/") else a for a in arguments]
        if name == "eval":  # ARC's answers stand in two splits, HellaSwag's in one
            arguments = [argument for argument in arguments if argument != "hellaswag"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        if name == "serve":
            with serving(tmp_path, tmp_path / arguments[0], "--port", "0", CUDA_VISIBLE_DEVICES="") as server:
                assert any("is sparse" in line for line in server.lines)
            continue
        done = subprocess.run(
            [*COMMAND, name, *arguments, *extra.get(name, [])],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr[-2000:]


def other_commands() -> list[str]:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = re.findall(r"```bash\n(.*?)```", "\n".join(page.read_text() for page in pages), re.DOTALL)
    lines = [line.split("#")[0].strip() for block in found for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if line and not line.startswith("hf-twell")))


@pytest.mark.slow
@pytest.mark.parametrize("command", other_commands())
def test_scripts(command, tmp_path):
    """As they stand, but small: `make` says what it would do, FSDP2 (which needs GPUs) reads its files alone."""
    tool, *arguments = shlex.split(command)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    text, model = DEMO / "text" / "heldout.txt", DEMO / "model"
    small = [f"output_dir={tmp_path / 'out'}", f"model={model}", f"train={text}", f"heldout={tmp_path / 'text.txt'}"]
    small += ["sequence_length=32", "training.max_steps=1", "training.use_cpu=true", "training.bf16=false"]
    small += ["training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=1"]
    (tmp_path / "text.txt").write_text(text.read_text()[:2000])
    if tool == "make":
        tool, arguments = "make", ["--dry-run", *arguments]
    elif any(name in arguments for name in ("recipes/study.py", "recipes/pretrained_study.py")):
        (tmp_path / "DIR").mkdir()
        arguments = [str(tmp_path / a) if a == "DIR" or a.startswith("out/") else a for a in arguments] + ["--list"]
    elif "--config_file" in arguments:
        recipe = load_recipe(ROOT / arguments[-2], arguments[-1:])
        assert recipe.revive_after is None
        return
    else:
        arguments += small
    program = {"python": [sys.executable], "make": ["make"]}.get(tool)
    program = program or [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
    done = subprocess.run([*program, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "recipes/finetune.py" not in arguments or (tmp_path / "out").is_dir()


MODEL = {"layers": 28, "length": 2048}
QUOTED = [  # for each line of the table: its rows, the figure, how many of the quoted unit one is
    *(({"bench": "ffn", "tokens": tokens}, "ms", 1e3) for tokens in (1, 16, 64)),
    *(({"bench": "ffn", "tokens": tokens}, "ms", 1) for tokens in (1024, 16384, 65536)),
    *(({"bench": "ffn", "tokens": 16384, "pass": "forward+backward"}, key, 1) for key in ("ms", "peak_mib")),
    *(({"bench": "prefill", **MODEL, "batch": 64}, key, 1) for key in ("ms", "mj_per_token")),
    *(({"bench": "generate", "layers": 28, "batch": 1}, key, 1) for key in ("step_ms", "tokens_per_s")),
    *(
        ({"bench": "train", **MODEL, "batch": 8}, key, unit)
        for key, unit in (("ms", 1), ("peak_mib", 1 / 1024), ("mj_per_token", 1))
    ),
    ({"bench": "generate", "layers": 8, "dtype": "bfloat16", "threads": 2}, "tokens_per_s", 1),
]


def test_the_table_quotes_rows():
    table = README.split("| | dense | sparse |\n|---|---|---|\n")[1].split("\n\n")[0].splitlines()
    for line, (settings, key, unit) in zip(table, QUOTED, strict=True):
        quoted = re.findall(r"\| \**([\d.]+) ", line)[-2:]
        rows = bench_rows("twell_cpu" if "CPU" in line else "twell_cuda", settings)
        assert quoted in [best(row, key, unit, quoted) for row in rows], line


SPEEDUPS = [  # for each column of the table of densities after the losses: the backend, and its rows
    ("twell_cuda", {"tokens": 1}),
    ("twell_cuda", {"tokens": 16}),
    ("twell_cuda", {"tokens": 16384}),
    ("twell_cuda", {"tokens": 16384, "pass": "forward+backward"}),
    ("twell_cpu", {"tokens": 1, "dtype": "bfloat16"}),
]


def test_the_table_of_densities_quotes_rows():
    lines = README.split("| density | loss of SmolLM2 |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(lines) == 6
    for line in lines:
        density, _, _, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for cell, (backend, settings) in zip(cells, SPEEDUPS, strict=True):
            rows = bench_rows(backend, {"bench": "ffn", "requested_l0": None, **settings})
            rows = [row for row in rows if f"{100 * row['density']:.{1 if '.' in density else 0}f} %" == density]
            assert (cell == "\u2013" and not rows) or cell in [f"{row['speedup']:.2f}" for row in rows], (line, cell)


def test_the_table_of_densities_quotes_conversions():
    """Loss above the better of parent and control, mean of three texts; and what is kept of the tasks above chance."""

    def quoted(row: dict, parent: dict, control: dict) -> tuple[str, str, str]:
        best = {text: min(parent["losses"][text], control["losses"][text]) for text in row["losses"]}
        excess = statistics.mean(loss / best[text] - 1 for text, loss in row["losses"].items())
        scores = [
            [score["acc"] if isinstance(score, dict) else score for score in each["tasks"].values()]
            for each in (row, control)
        ]
        mean, ceiling = (statistics.mean(of_one) - 0.1875 for of_one in scores)
        density = f"{100 * row['density']:.0f} %"
        return f"+{excess:.1%}".replace("%", " %"), density, f"{mean / ceiling:.0%}".replace("%", " %")

    def read(*path: str) -> list[dict]:
        return [json.loads(line) for line in ROOT.joinpath(*path).read_text().splitlines()]

    study = {row["id"]: row for row in read("model_cards", "smollm2", "pretrained.jsonl")}
    sources = study["parent"], study["dense/150M/seed0"]
    shown = ("0.345/350M", "0.194/350M", "0.098/350M", "0.0475/310M", "0.0195/120M")
    expected = [quoted(study[f"count/{run}/seed0"], *sources) for run in shown]
    table = README.split("| density | loss of SmolLM2 |")[1].split("\n\n")[0].splitlines()[2:]
    for line, run, figures in zip(table, shown, expected, strict=False):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[1].endswith("*") == run.endswith("/120M"), line
        excess, density = cells[1].strip(")*").split(" (")
        assert (excess, density, cells[2]) == figures, line
    few = quoted(study["count/0.098/120M/seed0"], *sources)[0]
    fewer = quoted(study["count/0.098/25M/seed0"], study["parent"], study["books/30M/seed0"])[0]
    assert f"at 10 % it was {few} with 120M" in README
    assert f"\nand {fewer} with 25M." in README


def test_what_vllm_gains_stands_in_rows():
    def ratios(folder: str) -> list[str]:
        path = ROOT / "kernels" / "twell_cuda" / "bench" / "h200-vllm-2026-11-27" / folder / "vllm_steps.jsonl"
        rows = map(json.loads, path.open(encoding="utf-8"))
        times = {(row["side"], row["measured"], row["batch"]): row["step_us"] for row in rows}
        loads = ("decode", 1), ("decode", 16), ("prefill", 8)
        return [f"{times['dense', *load] / times['sparse', *load]:.2f}" for load in loads]

    one, sixteen, prefill = ratios("bf16")
    assert f"{one} times as fast for one sequence, {sixteen} for 16, and prefill {prefill}; " in README
    one, sixteen, prefill = ratios("8b")
    assert f"of a Llama of 8B's shape {one}, {sixteen} and {prefill} (" in README


ROWS = {  # quoted, of blocks the last of those that were measured alike
    "twell_cpu": ("epyc-2026-11-21",),
    "twell_cuda": ("h200-2026-11-23", "h200-density-2026-11-27", "h200-few-2026-11-27"),
}


def bench_rows(backend: str, settings: dict) -> list[dict]:
    if settings["bench"] == "ffn":
        settings = {"requested_l0": 30, "pass": "forward", **settings}
    bench = ROOT / "kernels" / backend / "bench"
    lines = [line for folder in ROWS[backend] for line in (bench / folder / "bench.jsonl").read_text().splitlines()]
    settings = {name: value for name, value in settings.items() if value is not None}  # None: any
    rows = [row for row in map(json.loads, lines) if all(row.get(name) == value for name, value in settings.items())]
    if settings["bench"] == "ffn" and len(ROWS[backend]) > 1:
        alike = ("tokens", "hidden", "intermediate", "dtype", "requested_l0", "pass", "neighbours")
        rows = list({tuple(row.get(name) for name in alike): row for row in rows}.values())
    return rows


def best(row: dict, key: str, unit: float, quoted: list[str]) -> list[str]:
    """Of dense and of sparse variants the least time, memory or energy, written as in the table."""
    variants = (("dense", "eager", "compiled"), ("sparse", "sparse_compiled"))
    least = (min(row.get(f"{name}_{key}", float("inf")) for name in names) for names in variants)
    return [f"{value * unit:.{len(text.partition('.')[2])}f}" for value, text in zip(least, quoted, strict=True)]


@pytest.mark.parametrize("name", ["LICENSE", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_the_files_that_people_look_for_are_there(name):
    assert (ROOT / name).is_file()


def test_every_public_name_is_documented():
    import hf_twell

    page = (ROOT / "docs" / "api.md").read_text()
    missing = [name for name in hf_twell.__all__ if f"`{name}" not in page]
    assert not missing
    assert all(hasattr(hf_twell, name) for name in hf_twell.__all__)
