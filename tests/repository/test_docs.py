"""Every code block of these pages runs as it stands, on the demo model in place of models from the Hub."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_twell.cli import main
from hf_twell.models.cards import CLAUSES
from tests.conftest import shared_path
from tests.hub_server import HubServer
from tests.paths import ROOT
from tests.servers import serving

DEMO = ROOT / "recipes" / "demo"
PAGES = sorted((ROOT / "docs").glob("*.md"))
LINKED = [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("kernels/*/*.md"), *ROOT.glob("model_cards/**/README.md")]
LINKED += ROOT.glob("recipes/demo/*/README.md")
# What a page may leave to its reader: a model folder, text, lm-eval's rows, an optimizer.
PREAMBLE = """
import sys, torch
sys.path.insert(0, {root!r})
from transformers import AutoTokenizer
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
tokenizer = AutoTokenizer.from_pretrained({model!r})
ids = tokenizer(open({text!r}).read()[:3000], return_tensors="pt")["input_ids"][0]
dataset = [dict(input_ids=row, labels=row) for row in ids[: len(ids) // 32 * 32].view(-1, 32)]
batches = [row["input_ids"][None] for row in dataset[:2]]
optimizer_steps = [[dict(input_ids=rows, labels=rows) for rows in batches]] * 2
"""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """Those of `hf-twell`; test_readme.py runs the others."""
    lines = [line.split("#")[0].strip() for block in blocks(page, "bash") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("hf-twell")]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_no_block_of_another_kind(page):
    """None that the tests here and in test_readme.py would pass over."""
    fences = re.findall(r"^\s*```(.*)$", page.read_text(), re.MULTILINE)
    assert set(fences[::2]) <= {"python", "bash"}
    assert set(fences[1::2]) <= {""}
    assert len(fences) == 2 * (len(blocks(page, "python")) + len(blocks(page, "bash")))


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    """And to headings of pages."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, heading = link.partition("#")
        if not link.startswith("http"):
            target = page.parent / name if name else page
            assert target.exists(), link
            assert not heading or heading in headings(target), link


def headings(page: Path) -> list[str]:
    """As GitHub writes them in addresses."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines]


def with_python() -> list:
    """Pages; that of the Hub needs a process of its own. tests/kernels/test_hub_kernel.py runs that of the kernel."""
    pages = [page for page in PAGES if blocks(page, "python") and page.stem != "kernel"]
    return [pytest.param(page, marks=pytest.mark.slow if page.stem == "hub" else (), id=page.stem) for page in pages]


@pytest.mark.parametrize("page", with_python())
def test_python(page, tmp_path, monkeypatch):
    for needed in ("peft", "evaluate", "accelerate"):
        pytest.importorskip(needed)
    code = PREAMBLE.format(root=str(ROOT), model=str(DEMO / "model"), text=str(DEMO / "text" / "heldout.txt"))
    code += "\n".join(blocks(page, "python"))
    assert page.stem != "training" or ("SparsityCallback" in code and "L1Penalty" in code)
    code = re.sub('"(meta-llama/Llama-3.2-1B|HuggingFaceTB/SmolLM2-135M-Instruct)"', repr(str(DEMO / "model")), code)
    code = code.replace("max_steps=1000", "max_steps=1, use_cpu=True, report_to=[], save_strategy='no'")
    monkeypatch.chdir(tmp_path)
    if page.stem != "hub":
        monkeypatch.setattr(sys, "path", [*sys.path])
        exec(compile(code, page.name, "exec"), {})
        return
    with HubServer() as hub:  # huggingface_hub reads its address when it is imported
        env = hub.client_environment(tmp_path / "home")
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "model.safetensors" in hub.repos["me/llama-relu"]
        card = hub.repos["me/llama-relu"]["README.md"].decode()
        assert CLAUSES["count"] in card, "what the page's last training was told"
        assert "| density aimed at | 10.00 % after" in card


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_trainings_that_are_copied_have_a_learning_rate(page):
    """With Trainer's default, 5e-5, a pretrained model neither becomes sparse nor keeps what it knows."""
    for code in blocks(page, "python"):
        if "SparsityCallback(" in code:
            assert "learning_rate=" in code
            assert "target_density=" in code


def with_commands() -> list:
    """Pages; one that starts a server takes its time."""
    starts = {page: [command[1] for command in commands(page)] for page in PAGES if commands(page)}
    return [
        pytest.param(page, marks=pytest.mark.slow if "serve" in names else (), id=page.stem)
        for page, names in starts.items()
    ]


# What a command of a page gets besides, which comes last and so holds.
SHORTER = {
    "sample": ["--tokens", "100", "--length", "16", "--batch", "4"],
    "train": ["output_dir=trained", "heldout=[notes.txt]", "training={max_steps: 1, use_cpu: true}"],
}


def make_chat_model(folder: str) -> None:
    """The demo's model with a template, and room for eight examples in its words."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model")
    model.config.max_position_embeddings = 8192
    model.save_pretrained(folder)


@pytest.mark.parametrize("page", with_commands())
def test_commands(page, tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("notes.txt").write_text((DEMO / "text" / "heldout.txt").read_text()[:4000])
    assert main(["sparsify", str(DEMO / "model"), "my-model"]) == 0
    if any("eval-data" in command for command in commands(page)):
        os.symlink(shared_path("data/eval"), "eval-data")
    if any("my-chat-model" in command for command in commands(page)):
        make_chat_model("my-chat-model")
    if any(command[1] == "quantize" for command in commands(page)):
        pytest.importorskip("torchao")
    for name in {argument for command in commands(page) for argument in command if argument.endswith(".gguf")}:
        pytest.importorskip("gguf")
        from tests.gguf_files import write_gguf

        model = AutoModelForCausalLM.from_pretrained(DEMO / "model")
        write_gguf(name, model, AutoTokenizer.from_pretrained(DEMO / "model"), kind="Q8_0")
    for command in commands(page):
        names = {"MODEL": "my-model", "FILE...": "notes.txt", "RECIPE": str(DEMO.parent / "demo.yaml")}
        command = [names.get(argument, argument) for argument in command] + SHORTER.get(command[1], [])
        if "--tasks" in command:
            command += ["--limit", "4"]
        if command[1] == "serve":
            with serving(tmp_path, *command[2:], "--port", "0") as server:
                assert server.ask("/v1/completions", {"prompt": "The cell is", "max_tokens": 4})["choices"]
            continue
        if "--chats" in command:  # to a model that is none: a sentence is its question, and a full stop is special
            tokenizer = AutoTokenizer.from_pretrained("my-model")
            tokenizer.add_special_tokens({"additional_special_tokens": ["."]})
            tokenizer.chat_template = "{% for m in messages %}On: {{ m.content }}. And{% endfor %}"
            tokenizer.save_pretrained("my-model")
            command += ["--length", "96", "--batch", "64"]
        if command[1:3] == ["bench", "serve"]:
            command += ["--repeats", "1", "--new-tokens", "4", "--prefill-tokens", "200"]
        capsys.readouterr()
        assert main(command[1:]) == 0, (command, capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda page: page.stem)
def test_notebooks(page, tmp_path):
    """Every cell, one after the other, in a process whose working directory lies as the notebook's does."""
    pytest.importorskip("peft")
    cells = [cell for cell in json.loads(page.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells), "they are kept without outputs"
    code = "import matplotlib\nmatplotlib.use('Agg')\n" + "\n".join("".join(cell["source"]) for cell in cells)
    code = code.replace("../../recipes", str(ROOT / "recipes"))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_figures_are_drawn_from_the_rows_alone(tmp_path):
    for rows in [*ROOT.glob("kernels/*/bench/**/*.jsonl"), *ROOT.glob("model_cards/**/*.jsonl")]:
        copy = tmp_path / rows.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(rows.read_text())
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "figures.py", tmp_path], capture_output=True, text=True, check=True
    )
    drawn = [Path(line) for line in done.stdout.splitlines()]
    drawings = [path for path in drawn if path.suffix == ".svg"]
    assert {ROOT / path.relative_to(tmp_path) for path in drawings} == set((ROOT / "docs").glob("*.svg"))
    for path in drawings:
        assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text(), "run `make figures`"
    drawn = [path for path in drawn if path not in drawings]
    folders = {path.parent for path in drawn}
    beside = {path for folder in folders for path in (ROOT / folder.relative_to(tmp_path)).glob("*.png")}
    assert {ROOT / path.relative_to(tmp_path) for path in drawn} == beside
    assert all(path.stat().st_size > 100 for path in drawn)


def bench_rows() -> list[dict]:
    return [json.loads(line) for path in ROOT.glob("kernels/*/bench/**/bench.jsonl") for line in path.open()]


def least(row: dict, key: str, names: tuple[str, ...]) -> float:
    return min(row[f"{name}_{key}"] for name in names if f"{name}_{key}" in row)


def test_ratios_are_of_their_rows():
    """Dense over sparse, the best of either's variants; of generation, the variants that it names."""
    dense = ("eager", "compiled", "liger", "grouped_mm", "batched_mm")
    sparse = ("sparse", "sparse_compiled")
    for row in bench_rows():
        if row["bench"] in ("serve", "vllm"):  # a row for each side
            continue
        if row["bench"] == "generate":
            if "step_speedup" in row:
                assert row["step_speedup"] == pytest.approx(row["dense_step_ms"] / row["sparse_step_ms"], rel=0.005)
            if "speedup" in row:
                assert row["speedup"] == pytest.approx(
                    row["sparse_tokens_per_s"] / row["dense_tokens_per_s"], rel=0.005
                )
            continue
        assert row["speedup"] == pytest.approx(least(row, "ms", dense) / least(row, "ms", sparse), rel=0.005)
        if "peak_share" in row:
            share = least(row, "peak_mib", sparse) / least(row, "peak_mib", dense)
            assert row["peak_share"] == pytest.approx(share, rel=0.005)


def test_energy_is_a_power_that_the_board_has():
    """Of these cards, which take 700 W at most; a figure for a batch, or of several blocks, would be far from it."""
    watts = []
    for row in bench_rows():
        for key in row:
            if key.endswith("_mj_per_token"):
                tokens = row["batch"] * row.get("length", 1) if "batch" in row else row["tokens"]
                watts.append(row[key] * tokens / row[key.replace("mj_per_token", "ms")])
    assert len(watts) >= 9, "of prefill and training, each variant"
    assert all(300 < power < 800 for power in watts)
