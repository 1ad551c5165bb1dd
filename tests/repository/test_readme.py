"""The README's examples run as they stand, on a CPU and the demo model in place of models from the Hub."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from hf_twell.cli import main
from hf_twell.recipe.schema import load_recipe
from tests.conftest import shared_path
from tests.paths import ROOT
from tests.servers import serving

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
def test_commands(tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
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
        if name == "serve":
            with serving(tmp_path, tmp_path / arguments[0], "--port", "0", CUDA_VISIBLE_DEVICES="") as server:
                assert any("is sparse" in line for line in server.lines)
            continue
        capsys.readouterr()
        assert main([name, *arguments, *extra.get(name, [])]) == 0, (name, capsys.readouterr().err)


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
    small += ["training.torch_compile=false"]  # of recipes that compile; test_recipes.py does
    (tmp_path / "text.txt").write_text(text.read_text()[:2000])
    if tool == "make":
        tool, arguments = "make", ["--dry-run", *arguments]
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


@pytest.mark.parametrize("name", ["LICENSE", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_the_files_that_people_look_for_are_there(name):
    assert (ROOT / name).is_file()


def test_every_public_name_is_documented():
    import hf_twell

    page = (ROOT / "docs" / "api.md").read_text()
    missing = [name for name in hf_twell.__all__ if f"`{name}" not in page]
    assert not missing
    assert all(hasattr(hf_twell, name) for name in hf_twell.__all__)
