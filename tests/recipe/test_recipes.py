"""Recipes on real models: the really trained 260K Llama becomes sparse, and the demo runs from end to end."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_twell
from hf_twell.cli import main
from hf_twell.files.text import read_documents
from hf_twell.recipe.finetune import finetune
from hf_twell.recipe.packing import PackedText
from hf_twell.recipe.schema import load_recipe
from hf_twell.recipe.trainer import PackedTrainer
from tests.conftest import finished, fsdp2, one_of, shared_path
from tests.paths import HELDOUT, MODEL, ROOT
from tests.rounding import rounding

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
DEEPSPEED = Path(sys.prefix, "deepspeed")  # a folder of packages, which `make test-all` makes
PLAIN_TRANSFORMERS = """
import sys, torch
sys.modules["hf_twell"] = None  # importing it would fail
from transformers import AutoModelForCausalLM
with torch.no_grad():
    torch.save(AutoModelForCausalLM.from_pretrained(sys.argv[1])(torch.load(sys.argv[2])).logits, sys.argv[3])
"""


@pytest.mark.slow
def test_a_trained_llama_becomes_sparse_and_comes_back_from_disk(stories, tmp_path, run_json):
    """Dense to less than half the L0 of the swap in 50 steps, at most 0.5 nats above the same steps without L1."""
    documents = read_documents(shared_path("data/text/tinystories.txt.xz"))
    (tmp_path / "heldout.txt").write_text("\n<|endoftext|>\n".join(documents[::20]))
    (tmp_path / "train.txt").write_text("\n<|endoftext|>\n".join(d for i, d in enumerate(documents) if i % 20))
    (tmp_path / "recipe.yaml").write_text(
        f"model: {stories}\noutput_dir: out\ntrain: train.txt\nheldout: heldout.txt\nsequence_length: 128\n"
        "warmup_steps: 10\ntraining: {max_steps: 50, per_device_train_batch_size: 32, per_device_eval_batch_size: 32, "
        "learning_rate: 5e-3, lr_scheduler_type: cosine, warmup_steps: 5, save_strategy: 'no', use_cpu: true}\n"
    )
    results = {}
    for weight in (0.0, 0.1):
        changes = [f"l1_weight={weight}", f"output_dir={tmp_path / str(weight)}", "--json"]
        results[weight] = run_json("train", tmp_path / "recipe.yaml", *changes)
    swapped, control, sparse = results[0.1]["before"], results[0.0]["after"], results[0.1]["after"]
    assert swapped["sparsity"]["l0"] == pytest.approx(85, abs=3), "about half of 172 neurons after a bare swap"
    assert sparse["sparsity"]["l0"] < swapped["sparsity"]["l0"] / 2
    assert sparse["loss"] <= control["loss"] + 0.5
    assert control["loss"] < swapped["loss"]

    folder = results[0.1]["model"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(documents[0], return_tensors="pt")["input_ids"]
    torch.save(ids, tmp_path / "ids.pt")
    command = [sys.executable, "-c", PLAIN_TRANSFORMERS, folder, tmp_path / "ids.pt", tmp_path / "logits.pt"]
    subprocess.run(command, check=True, cwd=tmp_path)
    model = hf_twell.sparsify(AutoModelForCausalLM.from_pretrained(folder), backend="reference")
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "logits.pt"), model(ids).logits)


WARNINGS = r"(?m)torchao|[Ww]arning|deprecated|^[WE]\d{4} |Failed to"


@pytest.mark.slow
def test_the_demo_runs_from_end_to_end(tmp_path):
    output, heldout = tmp_path / "demo", tmp_path / "heldout.txt"
    heldout.write_text((HELDOUT).read_text()[:2_000])
    changes = [f"output_dir={output}", f"heldout={heldout}", f"train={heldout}", "training.max_steps=2"]
    changes += ["training.per_device_train_batch_size=2", "training.use_cpu=true"]
    env = {"OMP_NUM_THREADS": "1"}  # threads that wait for each other take processor time
    done = finished(sys.executable, ROOT / "recipes" / "demo.py", *changes, env=env, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    for row in ("dense (SiLU)", "swapped to ReLU, untrained", "sparse: ReLU, trained"):
        assert re.search(rf"{re.escape(row)} +\d\.\d+ +\d", done.stdout), row
    for row in ("the model", "one block of a larger model, 2048 x 5632"):
        assert re.search(rf"{re.escape(row)} +\d[\d.]* +\d[\d.]* +\d+\.\d\d\n", done.stdout), row
    assert "generated the same 64 tokens" in done.stdout
    assert "equal logits, to the last bit" in done.stdout
    assert f"hf-twell serve {output / 'final'}\n" in done.stdout
    assert (output / "training.png").stat().st_size > 5000
    assert not re.findall(WARNINGS, done.stderr), "a newcomer reads them as errors"


@pytest.mark.slow
def test_a_script_says_nothing_of_other_packages(tmp_path):
    pytest.importorskip("torchao")
    model, script = MODEL, ROOT / "recipes" / "average.py"
    done = finished(sys.executable, script, model, model, tmp_path / "mean", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not re.findall(WARNINGS, done.stderr)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Enough of the demo's held-out text for a few steps."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((HELDOUT).read_text()[:12_000])
    return path


def small(text: Path, output: Path, steps: int, rows: int) -> list[str]:
    settings = {
        "max_steps": steps, "per_device_train_batch_size": rows, "gradient_accumulation_steps": 1, "use_cpu": "true",
        "bf16": "false", "save_steps": steps, "logging_steps": 1, "warmup_steps": 0,
    }  # fmt: skip
    changes = [f"output_dir={output}", f"train={text}", f"heldout={text}", "sequence_length=32", "save_dtype=float32"]
    return changes + [f"training.{key}={value}" for key, value in settings.items()]


@pytest.mark.parametrize("name", one_of("demo", RECIPES))
def test_every_recipe_runs_two_steps(name, text, tmp_path, run_json):
    recipe, model = ROOT / "recipes" / f"{name}.yaml", MODEL
    if "lora" in name:
        pytest.importorskip("peft")
    (tmp_path / "heldout.txt").write_text(text.read_text()[:1200])
    changes = [f"model={model}", *small(text, tmp_path / "out", 2, 2), f"heldout={tmp_path / 'heldout.txt'}"]
    if name.startswith("qwen2.5-coder"):  # Inductor, too, compiles smollm2-135m alone
        changes.append("training.torch_compile_backend=aot_eager")
    if re.search(r"^share:", recipe.read_text(), re.M):  # sequences have 32 tokens here
        changes.append("share=16")
    result = run_json("train", recipe, *changes)
    assert [row["step"] for row in result["logs"]] == [1, 2]
    assert result["after"]["loss"] < 8
    assert AutoModelForCausalLM.from_pretrained(result["model"]).config.hidden_act == "relu"
    head = recipe.read_text().splitlines()[0]
    if name == "smollm2-135m":  # the row itself is compared below
        assert "row count/0.098/120M of model_cards/smollm2" in head
    elif not name.startswith("demo"):
        assert "NOT RUN" in head
        assert "streaming: true" in recipe.read_text() or name.startswith("qwen2.5-coder")  # of local text


@pytest.mark.parametrize(("compiled", "sizes"), [(True, [2, 2, 2, 2]), (False, [2, 2, 1, 2, 2, 1])])
def test_a_compiled_run_has_batches_of_one_size(compiled, sizes, text, tmp_path, monkeypatch):
    """Another size would be compiled by itself, in the midst of the run: two epochs of five sequences."""
    seen = []
    step = PackedTrainer.training_step
    monkeypatch.setattr(
        PackedTrainer, "training_step", lambda *args: seen.append(len(args[2]["input_ids"])) or step(*args)
    )
    changes = [f"model={MODEL}", *small(text, tmp_path / "out", 2, 2), "training.max_steps=-1"]
    changes += ["training.num_train_epochs=2", "training.save_strategy=no", f"training.torch_compile={compiled}"]
    if compiled:
        changes.append("training.torch_compile_backend=eager")
    sequences = PackedText.of(torch.arange(5 * 32).view(5, 32))
    finetune(load_recipe(ROOT / "recipes" / "demo.yaml", changes), train=sequences)
    assert seen == sizes


def test_text_of_less_than_a_step_stays_whole():
    text = PackedText.of(torch.arange(6).view(3, 2))
    assert len(text.in_whole_steps(2)) == 2
    assert len(text.in_whole_steps(4)) == 3


def test_the_recipe_is_the_row_of_the_study(text):
    """recipes/smollm2-135m.yaml says that it has run: as the study's row, but for places and text."""
    rows = [json.loads(line) for line in (ROOT / "model_cards" / "smollm2" / "pretrained.jsonl").open()]
    (row,) = (row for row in rows if row["id"] == "count/0.098/120M/seed0")
    recipe = load_recipe(ROOT / "recipes" / "smollm2-135m.yaml", [f"{key}=[{text}]" for key in ("train", "heldout")])
    for key in ("sequence_length", "term", "layer_shares", "warmup_steps", "target_density", "freeze"):
        assert getattr(recipe, key) == row[key], key
    assert recipe.distill == {"logits": row["distill"]["logits"]}, "it begins with its teacher"
    assert row["distill"]["parent"] == row["start"]
    settings = {key: value for key, value in row["settings"].items() if key not in ("seed", "report_to")}
    assert recipe.training == settings | {"logging_nan_inf_filter": False}, "which only spares time"


def start_processes(launch: list, *changes, path: str = str(ROOT)) -> subprocess.CompletedProcess:
    """recipes/finetune.py with demo-target.yaml and these changes, started by `launch`."""
    command = [sys.executable, *launch, ROOT / "recipes" / "finetune.py", ROOT / "recipes" / "demo-target.yaml"]
    return finished(*command, *changes, env={"PYTHONPATH": path, "DS_ACCELERATOR": "cpu"}, timeout=240)


def run_processes(launch: list, *changes, **options) -> str:
    """What they print."""
    done = start_processes(launch, *changes, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_script_prints_what_the_command_does(text, tmp_path, capsys):
    changes = small(text, tmp_path / "out", 2, 2)
    assert main(["train", str(ROOT / "recipes" / "demo-target.yaml"), *changes]) == 0
    table = capsys.readouterr().out
    assert "held-out loss" in table
    shutil.rmtree(tmp_path / "out")
    assert run_processes([], *changes) == table
    shutil.rmtree(tmp_path / "out")
    assert json.loads(run_processes([], *changes, "--json"))["model"] == str(tmp_path / "out" / "final")


@pytest.mark.slow
def test_a_mistake_in_two_processes_is_told_without_a_traceback(tmp_path):
    launch = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    done = start_processes(launch, f"output_dir={tmp_path / 'out'}", "target_density=5")
    assert done.returncode != 0
    assert re.search(r"finetune.py: error: \S+: target_density=5; give a share", done.stderr)
    assert 'finetune.py", line' not in done.stderr


def logs_of(checkpoint: Path) -> list[dict]:
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return [row for row in history if "loss" in row]


def assert_same_rows(rows: list[dict], expected: list[dict]) -> None:
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for mine, other in zip(rows, expected, strict=True):
        keys = [key for key in other if key not in ("grad_norm", "twell/kl")]  # kl is of one process's tokens
        assert [mine[key] for key in keys] == pytest.approx([other[key] for key in keys], rel=1e-3, abs=1e-6)


def logs_of_one(output: Path, capsys, *changes) -> list[dict]:
    """Those of the same recipe by `hf-twell train`, in the tests' own process."""
    capsys.readouterr()
    recipe = str(ROOT / "recipes" / "demo-target.yaml")
    assert main(["train", recipe, *changes]) == 0, capsys.readouterr().err
    return logs_of(output / "checkpoint-4")


@pytest.mark.slow
@pytest.mark.parametrize(("streamed", "compiled"), [(False, False), (True, False), (False, True)])
def test_two_processes_train_as_one(text, tmp_path, streamed, compiled, capsys):
    """Controller, revival and distillation see the whole step: the same rows in one process or two, the same logs."""
    changes = ["distill={logits: 0.5}", "revive_after=100"]
    if streamed:
        pytest.importorskip("datasets")
        documents = text.read_text().split("\n\n")
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": words}) + "\n" for words in documents))
        changes = [f"train={{hub: json, data_files: {tmp_path / 'rows.jsonl'}, streaming: true}}"]
    launch = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    compile = ["training.torch_compile=true", "training.torch_compile_backend=aot_eager"] if compiled else []
    printed = run_processes(launch, *small(text, tmp_path / "2", 4, 2), *changes, *compile, "--json")
    assert json.loads(printed)["logs"], "one process prints the result, and nothing else is printed"
    one = logs_of_one(tmp_path / "1", capsys, *small(text, tmp_path / "1", 4, 4), *changes, *compile)
    assert streamed or any(row["twell/revived"] > 0 for row in one)
    assert_same_rows(logs_of(tmp_path / "2" / "checkpoint-4"), one)


# Adam divides a gradient by its own size, so with its usual epsilon of 1e-8 the rounding of a gradient that is nearly
# zero becomes a whole step of the learning rate, and two orders of one sum end 2 x learning rate x steps apart. With an
# epsilon of the size of the gradients, what rounding changes stays as small beside a step as it is in the gradient.
STEADY = "training.adam_epsilon=1e-3"


def assert_moved_alike(final: dict, expected: dict) -> None:
    """Two trainings that sum their gradients in another order moved every matrix by the same, to 1/sqrt(F).

    Sums of a step's 128 tokens differ by rounding(128), 1.5e-5 of their magnitude. More comes only of a neuron whose
    gate lies at zero, active for a token in one training and not in the other: at most its own row differs, which is
    one of F, so 1/sqrt(F) of the move's norm. Gradients that are not averaged over processes, or of which a shard is
    lost, change all of the move.
    """
    start = load_file(MODEL / "model.safetensors")
    neurons = len(start["model.layers.0.mlp.up_proj.weight"])
    assert final.keys() == expected.keys()
    for name, weight in expected.items():
        moved, apart = weight - start[name].float(), final[name] - weight
        assert apart.norm() <= neurons**-0.5 * moved.norm() + rounding(4, weight.norm().item()), name


IN_FLOAT32 = fsdp2("no")  # as bfloat16 hides small mistakes


@pytest.mark.slow
def test_the_fsdp2_config_merges_adapters_into_the_final_model(text, tmp_path, capsys):
    pytest.importorskip("peft")
    changes = ["trainable=ffn+lora", "revive_after=null", STEADY, "term=count", "share=16"]
    run_processes(IN_FLOAT32, *small(text, tmp_path / "two", 2, 2), *changes)
    recipe = str(ROOT / "recipes" / "demo-target.yaml")
    assert main(["train", recipe, "--json", *small(text, tmp_path / "one", 2, 4), *changes]) == 0
    capsys.readouterr()
    final, expected = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("two", "one"))
    assert_moved_alike(final, expected)


@pytest.mark.slow
def test_the_fsdp2_config_trains_saves_and_resumes_in_two_processes(text, tmp_path, run_json):
    """With the losses of one process, which are DDP's; resumed, to the very same weights."""
    launch, output = IN_FLOAT32, tmp_path / "out"
    changes = [*small(text, output, 4, 2), "training.save_steps=2", "revive_after=null", STEADY]
    run_processes(launch, *changes)
    assert (output / "checkpoint-4" / "pytorch_model_fsdp.bin").is_file(), "FSDP wrote the checkpoint"
    rows = logs_of(output / "checkpoint-4")

    recipe = str(ROOT / "recipes" / "demo-target.yaml")
    one = run_json("train", recipe, *small(text, tmp_path / "one", 4, 4), "revive_after=null", STEADY)
    assert_same_rows(rows, one["logs"])
    final, expected = (load_file(Path(folder) / "model.safetensors") for folder in (output / "final", one["model"]))
    assert_moved_alike(final, expected)

    weights = torch.load(output / "checkpoint-4" / "pytorch_model_fsdp.bin")
    shutil.rmtree(output / "checkpoint-4")
    shutil.rmtree(output / "final")
    run_processes(launch, *changes, "--resume", "save_dtype=bfloat16")
    assert logs_of(output / "checkpoint-4") == rows
    again = torch.load(output / "checkpoint-4" / "pytorch_model_fsdp.bin")
    torch.testing.assert_close(again, weights, atol=0, rtol=0)
    half = load_file(output / "final" / "model.safetensors")
    assert json.loads((output / "final" / "config.json").read_text())["dtype"] == "bfloat16"
    expected = {name: weight.to(torch.bfloat16) for name, weight in final.items()}
    torch.testing.assert_close(half, expected, atol=0, rtol=0)


@pytest.mark.slow
def test_the_zero2_config_trains_in_two_processes(text, tmp_path, capsys):
    if not DEEPSPEED.is_dir():
        pytest.importorskip("deepspeed")
    config = str(ROOT / "recipes" / "accelerate" / "zero2.yaml")
    launch = ["-m", "accelerate.commands.launch", "--config_file", config, "--num_processes", "2"]
    changes = ["training.bf16=true", "revive_after=null"]
    run_processes(launch, *small(text, tmp_path / "2", 4, 2), *changes, path=f"{ROOT}{os.pathsep}{DEEPSPEED}")
    checkpoint = tmp_path / "2" / "checkpoint-4"
    assert (checkpoint / "zero_to_fp32.py").is_file(), "DeepSpeed wrote the checkpoint"
    one = logs_of_one(tmp_path / "1", capsys, *small(text, tmp_path / "1", 4, 4), *changes)
    for mine, plain in zip(logs_of(checkpoint), one, strict=True):
        for key in ("loss", "twell/l0"):  # DeepSpeed keeps weights in bfloat16 between steps
            assert mine[key] == pytest.approx(plain[key], rel=0.02)


@pytest.mark.parametrize("name", ["fsdp2", "zero2"])
def test_accelerate_reads_the_configs(name):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(ROOT / "recipes" / "accelerate" / f"{name}.yaml"))
    assert config.distributed_type == {"fsdp2": "FSDP", "zero2": "DEEPSPEED"}[name]
    assert config.mixed_precision == "bf16"
