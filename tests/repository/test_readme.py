"""The README's examples run as they stand, on a CPU and the demo model in place of models from the Hub."""

import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import hf_twell
from hf_twell.cli import main
from hf_twell.recipe.schema import load_recipe
from tests.conftest import shared_path
from tests.paths import ROOT
from tests.servers import serving

DEMO = ROOT / "recipes" / "demo"
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_first_screen():
    """Idea, picture, table and requirements; and a page that is read in ten minutes."""
    lines = README.splitlines()
    assert len(lines) <= 150
    assert len(README.split()) <= 1500
    screen = "\n".join(lines[:40])
    assert all(
        part in screen for part in ("docs/front.svg", "## Should I use this?", "not for you if", "## Requirements")
    )


def test_four_quickstarts():
    """Of at most ten lines, as they are read; each runs below."""
    names, *parts = README.partition("## Try it")[2].partition("\n## ")[0].split("\n**I ")
    assert not names.strip()
    assert len(parts) == 4
    for part in parts:
        (code,) = re.findall(r"```\w+\n(.*?)```", part, re.DOTALL)
        assert len([line for line in code.splitlines() if line.strip()]) <= 10, code
    assert README.index("## What ruins a model") < README.index("```python")


@pytest.mark.parametrize("code", blocks("python"), ids=["convert", "from scratch"])
def test_python_examples(code, tmp_path, monkeypatch):
    """With the demo's model for Qwen's, two steps, and no bfloat16, which the page says is for GPUs."""
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "notes.txt").write_text((DEMO / "text" / "heldout.txt").read_text()[:4000])
    code = code.replace("Qwen/Qwen2.5-0.5B", str(DEMO / "model"))
    code = code.replace("max_steps=1000", "max_steps=2, logging_steps=1").replace(
        "bf16=True", "use_cpu=True, bf16=False"
    )
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["trainer"].state.log_history[0]["twell/l0"] > 0
    names["trainer"].save_model("qwen-sparse")
    config = json.loads((tmp_path / "qwen-sparse" / "config.json").read_text())
    assert config["hidden_act"] == "relu"


@pytest.mark.slow
def test_commands(tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    lines = [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    (own_shape,) = re.findall("`(hf-twell bench [^`]*)`", README)
    lines.append(f"{own_shape} --hidden 64 --intermediate 256 --tokens 1 --l0 8 --no-compile --repeats 1")
    commands = [shlex.split(line)[1:] for line in lines if Path(line.split(" ")[0]).name == "hf-twell"]
    names = [command[0] for command in commands]
    assert names == ["doctor", "bench", "serve", "inspect", "sparsify", "train", "eval", "push", "bench"]
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
    commands.sort(key=lambda command: command[0] == "serve")  # what `train` writes
    for name, *arguments in commands:
        arguments = [argument.replace("Qwen/Qwen3-0.6B", str(DEMO / "model")) for argument in arguments]
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
    return list(dict.fromkeys(line for line in lines if line and Path(line.split(" ")[0]).name != "hf-twell"))


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
        arguments = ["--dry-run", *arguments]
    elif command == "pip install out/wheel/*.whl":  # test_prebuilt_wheel.py installs one
        assert "\nWHEELS ?= out/wheel\n" in (ROOT / "Makefile").read_text()
        return
    elif tool == "pip":  # whether the checkout has what the line asks for; nothing is fetched
        arguments = [*arguments[:1], "--dry-run", "--no-deps", "--no-build-isolation", "--no-index", *arguments[1:]]
        arguments = [argument for argument in arguments if argument != "trl"]
    elif "--config_file" in arguments:
        recipe = load_recipe(ROOT / arguments[-2], arguments[-1:])
        assert recipe.revive_after is None
        return
    else:
        arguments += small
    python = {"python": [], "pip": ["-m", "pip"], "accelerate": ["-m", "accelerate.commands.accelerate_cli"]}
    program = [sys.executable, *python[tool]] if tool in python else [tool]
    done = subprocess.run([*program, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "recipes/finetune.py" not in arguments or (tmp_path / "out").is_dir()


@pytest.mark.parametrize("name", ["LICENSE", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff"])
def test_the_files_that_people_look_for_are_there(name):
    assert (ROOT / name).is_file()


def test_every_public_name_is_documented():
    """In a line of its own, and by its docstring."""
    page, reference = ((ROOT / "docs" / name).read_text() for name in ("api.md", "reference.md"))
    assert not [name for name in hf_twell.__all__ if f"`{name}" not in page]
    shown = [pkgutil.resolve_name(name) for name in re.findall(r"^::: (\S+)$", reference, re.MULTILINE)]
    public = [getattr(hf_twell, name) for name in hf_twell.__all__ if name not in ("__version__", "ops")]
    assert not [each for each in [*public, hf_twell.ops.ffn] if each not in shown]


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == hf_twell.__version__
    assert cited["license"] == "MIT"


@pytest.mark.slow
def test_the_site_builds_without_a_broken_link(tmp_path):
    """As `make docs` does; what it warns of fails it."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    copied = re.search(r"ls-files (.*) \| grep", (ROOT / "Makefile").read_text())
    listed = subprocess.run(
        f"git ls-files {copied[1]}", shell=True, cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        (tmp_path / "pages" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "pages" / name)
    settings = (ROOT / "mkdocs.yml").read_text().replace("out/pages", str(tmp_path / "pages"))
    settings = settings.replace("out/site", str(tmp_path / "site")).replace("paths: [.]", f"paths: [{ROOT}]")
    (tmp_path / "mkdocs.yml").write_text(settings)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", tmp_path / "mkdocs.yml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "site" / "docs" / "reference.html").read_text()
    assert "target_density" in page
    assert ":::" not in page
