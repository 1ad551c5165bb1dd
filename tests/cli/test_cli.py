"""The commands as a user meets them: what they print, what they leave behind, and what they say when it goes wrong."""

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

from hf_twell.cli import COMMANDS, main
from hf_twell.cli.endings import ending_in_one_line
from hf_twell.cli.output import write_json
from hf_twell.cli.train import result_tables
from hf_twell.files.checkpoints import finished_checkpoints, write_state
from hf_twell.files.folders import training_record
from hf_twell.files.packages import how_to_install
from hf_twell.recipe.packing import PackedText
from hf_twell.recipe.runs import check_run
from tests.conftest import COMMAND, finished, needs_lm_eval, one_of, started, write_recipe
from tests.paths import DEMO, HELDOUT, MODEL, ROOT

ROWS = str(ROOT / "kernels" / "twell_cpu" / "bench" / "epyc-2026-11-21" / "bench.jsonl")


@pytest.fixture
def recipe(tmp_path) -> Path:
    return write_recipe(tmp_path, "l1_weight: 1e-1\nwarmup_steps: 2\nsave_dtype: float32", documents=40)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"\n  hf-twell {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("package", "options"),
    [
        ("matplotlib", ["ffn", "--tokens", "1", "--output", "{tmp_path}/out"]),
        ("aiohttp", ["serve", "{tmp_path}", "--engine", "transformers"]),
    ],
)
def test_a_missing_package_is_named_with_what_installs_it(package, options, tmp_path):
    code = f"import sys\nsys.modules['{package}'] = None\nfrom hf_twell.cli import main\nsys.exit(main(sys.argv[1:]))"
    (tmp_path / "config.json").write_text('{"model_type": "llama", "twell": {"version": 1}}')
    done = finished(sys.executable, "-c", code, "bench", *(option.format(tmp_path=tmp_path) for option in options))
    assert done.returncode == 1
    said = f"hf-twell: error: this needs the package {package}: {how_to_install(package)}"
    assert done.stderr.splitlines()[-1] == said
    assert not done.stdout, "said before anything is measured"


def test_what_installs_a_package_installs_what_its_feature_needs():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, extra in {"datasets": "train", "lm_eval": "eval", "gguf": "gguf", "uvicorn": "serve"}.items():
        wanted = {Requirement(line).name for line in extras[extra]}
        assert {Requirement(each).name for each in shlex.split(how_to_install(package))[2:]} == wanted
    assert how_to_install("trl") == "pip install trl"


def test_nobody_is_told_to_install_a_name_that_no_index_has():
    texts = [ROOT / "README.md", *(each for of in ("hf_twell", "docs") for each in (ROOT / of).rglob("*.[mp][dy]"))]
    texts += ROOT.glob("model_cards/*.md")
    invitation = re.compile(r"""pip install (-\S+ )*["']?hf[_-]twell|hf[_-]twell\[\w""")
    assert not [path for path in texts if invitation.search(path.read_text())]


def test_help_does_not_wait_for_torch():
    code = "import sys\nfrom hf_twell.cli import main\ntry: main(['train', '--help'])\nexcept SystemExit: pass\n"
    done = finished(sys.executable, "-c", code + "assert not {'torch', 'transformers'} & set(sys.modules)")
    assert done.returncode == 0, done.stderr


def test_doctor_names_every_backend_and_why(capsys, run_json):
    result = run_json("doctor")
    assert set(result["backends"]) == {"reference", "cpu", "cuda"}
    assert result["backends"]["reference"]["available"]
    assert all(row["reason"] for row in result["backends"].values())
    assert result["packages"]["torch"]["version"] == importlib.metadata.version("torch")
    assert main(["doctor"]) == 0
    assert "reference  yes" in capsys.readouterr().out


def test_sparsify_writes_a_stock_model_and_measures_it(tmp_path, capsys, error_line, run_json):
    output = tmp_path / "sparse"
    command = ["sparsify", str(MODEL), str(output), "--text", str(HELDOUT), "--tokens", "1024", "--json"]
    result = run_json(*command)
    assert 0.2 < result["sparsity"]["density"] < 0.5
    assert result["sparsity"]["tokens"] == 1024
    config = json.loads((output / "config.json").read_text())
    assert (config["hidden_act"], config["architectures"]) == ("relu", ["LlamaForCausalLM"])
    assert config["dtype"] == "bfloat16"
    entry = AutoModelForCausalLM.from_pretrained(output).config.twell
    assert entry["density"] == pytest.approx([layer["density"] for layer in result["sparsity"]["layers"]], abs=1e-6)

    assert "exists" in error_line(*command)
    assert main(["sparsify", str(output), str(tmp_path / "again")]) == 0
    printed = capsys.readouterr().out
    assert "4 feed-forward blocks used ReLU already" in printed
    assert "act on" not in printed
    assert "fine-tune" not in printed
    shutil.rmtree(tmp_path / "again")
    assert main([*command[:3], "--overwrite", "--layers", "0", "-1"]) == 0
    assert json.loads((output / "config.json").read_text())["twell"]["layers"] == [0, 3]
    printed = capsys.readouterr().out
    assert "LlamaForCausalLM: 4 feed-forward blocks" in printed
    assert "kernels and the L1 term act on 2 of them: layers 0, 3\n" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["sparse"]


def test_a_model_that_was_made_with_relu_is_told_so(tmp_path, capsys):
    """It has no twell entry, but no quality is lost either."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(DEMO / "model", hidden_act="relu"))
    model.save_pretrained(tmp_path / "native")
    assert main(["sparsify", str(tmp_path / "native"), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "4 feed-forward blocks used ReLU already" in printed
    assert "costs quality" not in printed
    assert main(["sparsify", str(DEMO / "model"), str(tmp_path / "swapped")]) == 0
    assert "blocks now use ReLU" in (printed := capsys.readouterr().out)
    assert "The swap alone costs quality" in printed


def test_figures_that_make_no_card_end_in_one_line(tmp_path, error_line):
    model, given = tmp_path / "sparse", tmp_path / "given.json"
    assert main(["sparsify", str(DEMO / "model"), str(model)]) == 0
    given.write_text('{"layers": [3]}')
    line = error_line("push", model, "me/x", "--dry-run", "--sparsity", given)
    assert f"or recorded in {model}, make no card (AttributeError: " in line
    (model / "twell_measured.json").write_text('{"after": 3}')
    assert f"or recorded in {model}, make no card (AttributeError: " in error_line("push", model, "me/x", "--dry-run")


def test_a_model_that_had_relu_keeps_what_is_recorded_of_it(recipe, capsys, error_line, run_json):
    """And one that gets ReLU does not: its record is of another model."""
    folder, text = recipe.parent, recipe.parent / "heldout.txt"
    assert main(["train", str(recipe), f"output_dir={folder / 'out'}", "training.max_steps=1"]) == 0
    trained = training_record(folder / "out" / "final")
    assert trained["method"]["step"] == 1
    assert trained["measured"]["after"]["loss"] > 0
    assert main(["sparsify", str(folder / "out" / "final"), str(folder / "same")]) == 0
    assert training_record(folder / "same") == trained
    capsys.readouterr()
    sparsity = run_json("sparsify", folder / "same", folder / "measured", "--text", text)["sparsity"]
    again = training_record(folder / "measured")
    assert again["method"] == trained["method"]
    after = {"loss": trained["measured"]["after"]["loss"], "sparsity": sparsity}
    assert again["measured"] == {**trained["measured"], "after": after}

    shutil.copytree(DEMO / "model", folder / "dense")
    for name in ("twell_state.json", "twell_measured.json"):
        shutil.copy(folder / "same" / name, folder / "dense")
    assert main(["sparsify", str(folder / "dense"), str(folder / "swapped")]) == 0
    assert training_record(folder / "swapped") == {"method": {"step": 0}, "measured": None}
    (folder / "same" / "twell_state.json").write_text("[]")
    line = error_line("sparsify", folder / "same", folder / "broken")
    assert "twell_state.json holds no JSON object; copy it again, or remove it" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sparsify", "no/such/folder", "out"], "no/such/folder"),
        (["sparsify", str(DEMO), "out"], "config.json"),
        (["sparsify", str(DEMO / "model"), "missing/out"], "missing is not a folder"),
        (["sparsify", str(DEMO / "model"), "out", "--layers", "9"], "from -4 to 3"),
        (["sparsify", str(DEMO / "model"), "out", "--text", "absent.txt"], "absent.txt"),
        (["sparsify", str(DEMO / "model"), "out", "--tokens", "0"], "--tokens 0; give at least 1"),
        (["train", "absent.yaml"], "absent.yaml"),
        (["eval", str(DEMO / "model"), "--text", ROWS], "bench.jsonl holds rows"),
        (["inspect", str(DEMO / "model"), "--text", ROWS], "bench.jsonl holds rows"),
        (["inspect", str(DEMO / "model"), "--text", ROWS, "--html", "."], "--html . is a folder"),
        (["inspect", "x", "--text", ROWS, "--html", "a", "--output", "a"], "--html and --output name the same file"),
        (["eval", str(DEMO / "model"), "--text", str(HELDOUT), "--output", "."], "is a folder"),
        (["eval", str(DEMO / "model"), "--text", str(HELDOUT), "--device", "mps"], "give cpu"),
        (["eval", "no/such/folder", "--text", str(HELDOUT)], "no/such/folder"),
        pytest.param(["eval", "x", "--tasks", "arc_easy", "--data-dir", "absent"], "absent", marks=needs_lm_eval),
        pytest.param(["eval", MODEL, "--tasks", "arc_eazy"], "arc_easy", marks=[needs_lm_eval, pytest.mark.slow]),
    ],
)
def test_mistakes_end_in_one_line(arguments, says, tmp_path, error_line, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in error_line(*arguments)
    assert not list(tmp_path.iterdir())


STREAM = "train={hub: json, data_files: rows.jsonl, streaming: true, skip: 2}"
DENSITY = ["l1_weight=null", "target_density=0.1"]
RECIPE_MISTAKES = [
    (["nothing"], "key=value"),
    (["layers=[0"], "YAML"),
    (["l1_wieght=1"], "did you mean 'l1_weight'"),
    (["learning_rate=1e-3"], "write training.learning_rate"),
    (["distill.logit=0.5"], "did you mean 'logits'"),
    (["heldout.take=3"], "heldout holds no keys"),
    ([*DENSITY, "target_density.start=0.5"], "target_density holds no keys"),
    (["model="], "a folder or a Hub name"),
    (["model=no/such/model"], "no/such/model"),
    (["output_dir=5"], "give a folder"),
    (["output_dir=heldout.txt"], "output_dir heldout.txt cannot be made (File exists)"),
    (["output_dir=/proc/absent"], "output_dir /proc/absent cannot be made"),
    (["train=absent.txt"], "absent.txt"),
    (["train=recipe.yaml"], ".parquet"),
    (["train=null"], "give text files"),
    (["heldout={split: test}"], "give text files"),
    (["heldout={hub: json, streaming: true}"], "how many rows to take"),
    (
        ["heldout={hub: json, take: '10'}"],
        "has heldout: {'hub': 'json', 'take': '10'}; take: '10'; give a whole number of at least 1",
    ),
    (["train={hub: json, skip: 1.5}"], "; skip: 1.5; give a whole number of at least 0"),
    ([STREAM, "training.max_steps=-1"], "give max_steps"),
    ([STREAM, "training.dataloader_num_workers=2"], "at most one dataloader_num_workers"),
    (["sequence_length=1"], "at least 2"),
    (["sequence_length=513"], "sequence_length: 513 is more than the 512 positions of the model"),
    (["relu=no"], "relu: 'no'; give true or false"),
    (["trainable=most"], "'ffn+lora'"),
    (["dtype=float12"], "bfloat16"),
    (["l1_weight=much"], "l1_weight: 'much'; give a number"),
    (["l1_weight=-1"], "l1_weight: -1; give at least 0"),
    (["target_density=0.1"], "give one of them"),
    (["term=l0"], "term: 'l0'; give 'l1' or 'count'"),
    (["share=1"], "share: 1; give at least 2"),
    ([*DENSITY, "l1_bounds=0.5"], "l1_bounds: 0.5; give the lowest and the highest"),
    (
        ["blend_steps=0.2"],
        "has blend_steps, and blending is gone; leave it out, and the activation becomes ReLU at once",
    ),
    (["revive_after=soon"], "revive_after: 'soon'; give a whole number of tokens"),
    (["distill=true"], "give a mapping"),
    (["distill={logits: high}"], "logits: 'high'; give a number"),
    (["training=3"], "a mapping"),
    (["training.max_step=1"], "did you mean 'max_steps'"),
    (["training.max_steps=abc"], "max_steps: 'abc'; give a whole number"),
    (["training.gradient_accumulation_steps=0"], "gradient_accumulation_steps: 0; give at least 1"),
    (["training.gradient_checkpointing=no"], "gradient_checkpointing: 'no'; give true or false"),
    (["training.save_strategy=sometimes"], "sometimes"),
    (["training={max_steps: 1, eval_strategy: steps, eval_steps: abc}"], "eval_steps: 'abc'; give a number"),
    (["training.lr_scheduler_kwargs=3"], "lr_scheduler_kwargs: 3; give text or a mapping"),
    (["training.log_level=loud"], "training makes no arguments of Trainer (KeyError: 'loud')"),
    (["training={1: 1}"], "training has an unknown key 1; known keys"),
    (["training.report_to=clearml"], "report_to: clearml, which is not installed: pip install clearml, or leave it"),
    (["training.report_to=paper"], "paper is not supported, only azure_ml"),
    (["dtype=float16"], "'float16'; give 'float32', with training.fp16=true to compute in float16, or 'bfloat16'"),
    (["training.fp16=true"], "fp16: true, which needs a GPU, and this run is on a CPU; write training.fp16=false"),
    (["training.output_dir=elsewhere"], "write output_dir alone"),
    (["training.max_steps=0"], "max_steps: 0; give at least 1, or null"),
    (
        ["training.push_to_hub=true"],
        "push_to_hub, and a run publishes nothing; leave it out, and publish its final model",
    ),
    (
        ["training.resume_from_checkpoint=out/checkpoint-2"],
        "resume_from_checkpoint, which Trainer passes over; leave it out and add --resume",
    ),
]


@pytest.mark.parametrize(("changes", "says"), RECIPE_MISTAKES)
def test_recipe_mistakes_end_in_one_line_before_any_work(recipe, changes, says, capsys, monkeypatch):
    monkeypatch.chdir(recipe.parent)
    assert main(["train", str(recipe), *changes]) == 1
    printed = capsys.readouterr().err
    assert says in printed.splitlines()[-1]
    assert printed.splitlines()[-1].startswith("hf-twell: error: ")
    assert "Traceback" not in printed
    assert "tokenizing" not in printed


def test_a_run_that_fails_before_its_first_step_leaves_no_folder(recipe, error_line):
    (recipe.parent / "heldout.txt").write_text("one word or two")
    assert "less than one sequence of 32" in error_line("train", recipe)
    assert not (recipe.parent / "out").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [("lora.r=text", "lora gives no adapters (TypeError: "), ("lora.bias=text", "NotImplementedError: Requested bias")],
)
def test_settings_that_make_no_adapters_end_in_one_line(recipe, change, says, error_line):
    pytest.importorskip("peft")
    assert says in error_line("train", recipe, "trainable=ffn+lora", change)


@pytest.mark.skipif(is_torch_bf16_gpu_available(), reason="a GPU that trains in bf16")
def test_bf16_needs_a_gpu_or_use_cpu(recipe, error_line):
    changes = ["training.bf16=true", "training.max_steps=1", "training.save_strategy=no"]
    line = error_line("train", recipe, *changes, "training.use_cpu=false")
    assert "training.bf16=false for float32, or training.use_cpu=true" in line
    assert main(["train", str(recipe), *changes, "training.use_cpu=true"]) == 0


@pytest.mark.parametrize("command", ["eval", "inspect"])
def test_one_process_alone(command, error_line, monkeypatch):
    """torchrun's processes would print and write the same twice."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert f"{command} runs in one process" in error_line(command, DEMO / "model", "--text", HELDOUT)
    assert main(["doctor", "--json"]) == 0
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "absent" in error_line(command, "absent", "--text", "absent.txt"), "torchrun's only process goes on"


def test_train_reads_jsonl_and_reports(recipe, capsys, error_line, run_json):
    pytest.importorskip("datasets")
    rows = [json.dumps({"text": text}) for text in (recipe.parent / "train.txt").read_text().split("<|endoftext|>\n")]
    (recipe.parent / "rows.jsonl").write_text("\n".join(rows))
    changes = [f"train={recipe.parent / 'rows.jsonl'}", "training.max_steps=2", "training.save_strategy=no"]
    result = run_json("train", recipe, *changes)
    assert [row["step"] for row in result["logs"]] == [1, 2]
    assert result["logs"][1]["twell/l1_weight"] == 0.05
    assert result["before"]["sparsity"]["l0"] != result["after"]["sparsity"]["l0"]
    configs = [json.loads(Path(model, "config.json").read_text()) for model in (DEMO / "model", result["model"])]
    assert configs[0]["use_cache"] is configs[1]["use_cache"] is True, "the saved model generates as its parent does"
    assert "--overwrite" in error_line("train", recipe, *changes)
    trained = AutoModelForCausalLM.from_pretrained(result["model"])
    assert main(["train", str(recipe), *changes, "--overwrite", "save_dtype=bfloat16"]) == 0
    printed = capsys.readouterr()
    saved = AutoModelForCausalLM.from_pretrained(result["model"])
    assert (trained.dtype, saved.dtype) == (torch.float32, torch.bfloat16)
    for one, other in zip(trained.parameters(), saved.parameters(), strict=True):
        assert torch.equal(one.to(torch.bfloat16), other)
    heldout = PackedText(AutoTokenizer.from_pretrained(DEMO / "model"), str(recipe.parent / "heldout.txt"), 32)
    with torch.no_grad():
        losses = [trained(input_ids=ids[None], labels=ids[None]).loss.item() for ids in heldout.sequences]
    assert len(losses) % 8, "the last batch is smaller than the others"
    assert result["after"]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert "fine-tuned" in printed.out
    assert "l1_weight=" in printed.err, "the progress bar shows the figures"


def test_train_reports_a_model_that_was_sharded():
    """It cannot be measured before its training begins."""
    layer = {"name": "mlp", "intermediate_size": 8, "l0": 1.0, "density": 0.125, "dead": 0.0}
    after = {"loss": 3.25, "sparsity": {**layer, "layers": [layer]}}
    tables = result_tables({"model": "final", "dense": None, "before": None, "after": after, "logs": []})
    assert "before" not in tables
    assert re.search(r"fine-tuned +3\.25 +1 +12\.50 %", tables)


@pytest.mark.slow
@pytest.mark.parametrize("relu", ["true", "false"])
def test_a_killed_training_resumes_to_the_same_model(recipe, relu, capsys, error_line, run_json):
    whole = recipe.parent / "whole"
    recipe.write_text(f"{recipe.read_text()}relu: {relu}\n")
    expected = run_json("train", recipe, f"output_dir={whole}")

    shutil.copytree(whole, recipe.parent / "out", ignore=shutil.ignore_patterns("checkpoint-4", "final"))
    assert "--resume" in error_line("train", recipe)
    done = finished(*COMMAND, "train", recipe, "--resume", "--json")
    assert done.returncode == 0, done.stderr
    assert "missing keys" not in done.stderr, "the demo model's weights are tied"
    resumed = json.loads(done.stdout)
    assert resumed["after"] == expected["after"]
    models = [AutoModelForCausalLM.from_pretrained(result["model"]) for result in (expected, resumed)]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
    line = error_line("train", recipe, "--resume")
    assert "finished: 4 of 4 steps are done; give it more steps, or choose another output_dir" in line

    # Killed after its last step, while the final model was saved.
    half = (recipe.parent / "out" / "final").rename(recipe.parent / "out" / ".final.0123abcd.partial")
    again = run_json("train", recipe, "--resume")
    assert not half.exists()
    assert again["after"] == expected["after"]
    assert again["logs"] == expected["logs"]
    if relu == "true":
        assert main(["push", again["model"], "me/x", "--dry-run"]) == 0
        card = capsys.readouterr().out
        assert "| coefficient of the L1 term | 0.1 after a linear warm-up over 2 steps |" in card
        assert "| optimizer steps | 4 |" in card
    model = AutoModelForCausalLM.from_pretrained(again["model"])
    for one, other in zip(model.parameters(), models[0].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_a_run_that_went_on_and_was_killed_before_its_new_model_makes_it(recipe, error_line):
    """The final model of its first steps still lies there."""
    final = recipe.parent / "out" / "final"
    assert main(["train", str(recipe), "training.max_steps=2"]) == 0
    first = final.rename(recipe.parent / "first")
    assert main(["train", str(recipe), "--resume"]) == 0
    second = final.rename(recipe.parent / "second")
    first.rename(final)
    assert main(["train", str(recipe), "--resume"]) == 0
    assert json.loads((final / "twell_state.json").read_text())["step"] == 4
    weights, expected = (load_file(folder / "model.safetensors") for folder in (final, second))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert "finished: 4 of 4" in error_line("train", recipe, "--resume")


@pytest.mark.slow
def test_a_run_killed_before_its_final_model_makes_it_of_the_best_checkpoint(recipe):
    changes = ["training.eval_strategy=steps", "training.eval_steps=2", "training.load_best_model_at_end=true"]
    changes += ["training.learning_rate=1e-2", "training.lr_scheduler_type=constant"]  # too high: it gets worse
    out = recipe.parent / "out"
    for resume in ([], ["--resume"]):
        assert main(["train", str(recipe), *changes, *resume]) == 0
        weights, best = (load_file(out / name / "model.safetensors") for name in ("final", "checkpoint-2"))
        assert all(torch.equal(weights[name], best[name]) for name in best)
        assert json.loads((out / "final" / "twell_state.json").read_text())["step"] == 2
        shutil.rmtree(out / "final")


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator, for which memory is pinned")
def test_training_on_a_cpu_warns_of_no_pinned_memory(recipe):
    changes = ["training.max_steps=1", "training.use_cpu=false", "training.save_strategy=no"]
    done = finished(*COMMAND, "train", recipe, *changes)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


def test_a_model_is_not_converted_over_itself(tmp_path, error_line, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DEMO / "model", "dense", ignore=shutil.ignore_patterns("README.md", "pretrain.json"))
    Path("link").symlink_to("dense")
    for target in ("dense", "link", "../" + tmp_path.name + "/dense/"):
        assert "is the model itself" in error_line("sparsify", "dense", target, "--overwrite")
    assert "twell" not in json.loads(Path("dense/config.json").read_text())


def test_overwrite_keeps_what_lies_beside_a_model(recipe, error_line, monkeypatch):
    monkeypatch.chdir(recipe.parent)
    shutil.copytree(DEMO / "model", "out/final", ignore=shutil.ignore_patterns("README.md", "pretrain.json"))
    Path("out/final/thesis.txt").write_text("text")
    for command in (["sparsify", str(DEMO / "model"), "out/final"], ["train", str(recipe)]):
        assert "would lose thesis.txt" in error_line(*command, "--overwrite")
    assert not Path("out/checkpoint-2").exists(), "it is said before any training"
    assert Path("out/final/thesis.txt").read_text() == "text"


def test_a_few_words_are_enough_to_measure(tmp_path, run_json):
    (tmp_path / "notes.txt").write_text("The cell is the smallest unit of life.")
    command = ["sparsify", str(DEMO / "model"), str(tmp_path / "out"), "--text", str(tmp_path / "notes.txt"), "--json"]
    assert 5 < run_json(*command)["sparsity"]["tokens"] < 40


FULL_DISK = """
import resource, sys
from hf_twell.cli import main
import torch, transformers
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_full_disk_leaves_nothing_behind(tmp_path):
    done = finished(sys.executable, "-c", FULL_DISK, "sparsify", DEMO / "model", tmp_path / "out", timeout=120)
    assert done.returncode == 1
    assert re.search(r"hf-twell: error: .*(File too large|No space)", done.stderr.strip().splitlines()[-1])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("full_at", [1_000_000, 25_000_000], ids=["weights", "optimizer"])
def test_a_full_disk_ends_training_in_one_line(full_at, recipe):
    arguments = ["train", str(recipe), "training.max_steps=1", "training.save_steps=1"]
    done = finished(sys.executable, "-c", FULL_DISK.replace("1_000_000", str(full_at)), *arguments, timeout=240)
    assert done.returncode == 1
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("hf-twell: error: "))
    assert error.startswith(f"hf-twell: error: could not write {recipe.parent / 'out'}; is the disk full? (")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["eval", "inspect"])
def test_figures_are_shown_though_a_full_disk_does_not_take_them(command, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("The cell is the smallest unit of life.\n" * 20)
    assert main([command, str(DEMO / "model"), "--text", str(text), "--json", "--output", "/dev/full"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["model"] == str(DEMO / "model")
    assert printed.err.splitlines()[-1] == "hf-twell: error: could not write /dev/full: No space left on device"


def test_figures_that_json_has_no_form_for_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json({"loss": float("nan")}, tmp_path / "scores.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_measured_rows_are_shown_though_a_full_disk_does_not_take_them(tmp_path, capsys):
    (tmp_path / "bench.jsonl").symlink_to("/dev/full")
    sizes = ["--tokens", "1", "--l0", "8", "--hidden", "64", "--intermediate", "172", "--no-compile", "--repeats", "1"]
    assert main(["bench", "ffn", *sizes, "--device", "cpu", "--json", "--output", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    (row,) = json.loads(printed.out)["rows"]
    assert row["sparse_ms"] > 0
    says = f"hf-twell: error: could not write {tmp_path / 'bench.jsonl'}: No space left on device"
    assert printed.err.splitlines()[-1] == says


@pytest.mark.slow
@pytest.mark.parametrize("taker", ["a reader that went away", "a full disk"])
def test_output_that_is_not_taken(taker):
    """Little of it waits in a buffer until the end; where Python keeps none, it fails earlier."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    if taker == "a full disk":
        output = os.open("/dev/full", os.O_WRONLY)
        expected = 1, "hf-twell: error: [Errno 28] No space left on device\n"
    else:
        reader, output = os.pipe()
        os.close(reader)
        expected = 0, ""
    done = subprocess.run(
        [*COMMAND, "doctor"], stdout=output, stderr=subprocess.PIPE, text=True, env={**environment, "PYTHONPATH": ROOT}
    )
    os.close(output)
    assert (done.returncode, done.stderr) == expected


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(closed, tmp_path):
    """Their descriptors would be those of the next files opened, which would get what is printed."""
    code = (
        "import os, sys\nfrom hf_twell.cli import main\ncode = main(['doctor', '--json'])\n"
        "sys.exit(code or os.open(os.devnull, os.O_RDONLY) < 3)"
    )
    done = finished("sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, code)
    assert (done.returncode, done.stderr) == (0, "")
    assert (done.stdout == "") == (" >" in f" {closed}")


def ending(tmp_path, monkeypatch, capsys, error: BaseException) -> tuple[int, str, list[str]]:
    """The exit code of a command that raises this, the line that it prints, and the tracebacks that it keeps."""

    def run():
        raise error

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = ending_in_one_line("hf-twell", run)
    (line,) = capsys.readouterr().err.splitlines()
    return code, line, [path.read_text() for path in tmp_path.glob("hf-twell-*.txt")]


def test_a_pipe_that_is_not_our_output_breaks_as_an_error(tmp_path, monkeypatch, capsys):
    code, line, kept = ending(tmp_path, monkeypatch, capsys, BrokenPipeError(32, "Broken pipe"))
    assert (code, line, kept) == (1, "hf-twell: error: [Errno 32] Broken pipe", [])


@pytest.mark.parametrize(
    "error", [RuntimeError("first\nsecond\nthird"), KeyError("first second"), BaseException("first second")]
)
def test_an_error_that_nobody_foresaw_ends_in_one_line_and_keeps_its_traceback(error, tmp_path, monkeypatch, capsys):
    code, line, (kept,) = ending(tmp_path, monkeypatch, capsys, error)
    assert code == 1
    assert re.fullmatch(rf"hf-twell: error: {type(error).__name__}: '?first second'?; its traceback is in \S+", line)
    assert Path(line.split()[-1]).read_text() == kept
    assert "raise error" in kept


def test_a_traceback_that_the_disk_does_not_take_is_left_out(tmp_path, monkeypatch, capsys):
    code, line, kept = ending(tmp_path / "absent", monkeypatch, capsys, MemoryError())
    assert (code, kept) == (1, [])
    assert line == (
        "hf-twell: error: MemoryError: MemoryError; there is no place for its traceback (No such file or directory)"
    )


def test_an_error_of_a_worker_process_is_told_in_its_own_words(tmp_path, monkeypatch, capsys):
    """Its message is a whole traceback."""

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            raise ValueError("rows.jsonl has no text in row 1")

    with pytest.raises(ValueError) as caught:
        next(iter(torch.utils.data.DataLoader(Rows(), num_workers=1)))
    code, line, kept = ending(tmp_path, monkeypatch, capsys, caught.value)
    assert (code, line, kept) == (1, "hf-twell: error: ValueError: rows.jsonl has no text in row 1", [])


def test_settings_may_follow_an_option_and_nothing_else_may(recipe, capsys, run_json):
    changes = ["training.max_steps=1", "training.save_strategy=no"]
    assert [row["step"] for row in run_json("train", recipe, changes[0], changes[1])["logs"]] == [1]
    for arguments, told in ((["train", str(recipe), "--jsno"], "--jsno"), (["doctor", "now"], "now")):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert f"unrecognized arguments: {told}" in capsys.readouterr().err


def in_training(recipe) -> subprocess.Popen:
    """A training without an end, which has made steps."""
    endless = ("training.max_steps=100000", "training.save_strategy='no'")
    training = started("train", recipe, *endless, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    deadline, seen = time.monotonic() + 120, b""
    while b"L0=" not in seen and time.monotonic() < deadline:
        seen += training.stderr.read1()
    return training


@pytest.mark.slow
def test_a_folder_takes_one_training_at_a_time(recipe, error_line):
    first = in_training(recipe)
    try:
        for options in ([], ["--overwrite"], ["--resume"]):
            assert "another run is training into" in error_line("train", recipe, *options)
    finally:
        first.kill()
        first.communicate()
    assert main(["train", str(recipe)]) == 0, "a killed run holds nothing"


@pytest.mark.parametrize(
    ("steps", "epochs", "finished"), [(4, 3, True), (-1, 3, True), (2, 3, True), (5, 3, False), (-1, 4, False)]
)
def test_when_a_run_is_finished(tmp_path, steps, epochs, finished):
    """By its steps, or where they follow from its text, by its epochs; one without a newer final model is not."""
    checkpoint = tmp_path / "checkpoint-4"
    checkpoint.mkdir()
    state = {"global_step": 4, "max_steps": 4, "num_train_epochs": 3}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    write_state(checkpoint, {})
    args = TrainingArguments(str(tmp_path), max_steps=steps, num_train_epochs=epochs, use_cpu=True)
    check_run(str(tmp_path), args, resume=True, overwrite=False)
    shutil.copytree(DEMO / "model", tmp_path / "final", ignore=shutil.ignore_patterns("README.md", "pretrain.json"))
    os.utime(tmp_path / "final")  # copied with its time, which is before the checkpoint's
    with pytest.raises(ValueError, match="is finished") if finished else contextlib.nullcontext():
        check_run(str(tmp_path), args, resume=True, overwrite=False)


def test_a_damaged_checkpoint_still_keeps_a_new_run_out(recipe, error_line):
    folder = recipe.parent / "out" / "checkpoint-2"
    folder.mkdir(parents=True)
    (folder / "optimizer.pt").write_bytes(b"whole")
    write_state(folder, {})
    (folder / "optimizer.pt").write_bytes(b"")
    assert "checkpoint-2 is from an earlier run" in error_line("train", recipe)


@pytest.mark.slow
def test_a_resumed_run_that_is_changed_is_refused_or_told(recipe, capsys, caplog, error_line):
    """Trainer takes the optimizer's figures from the checkpoint, whatever the recipe says by then."""
    assert main(["train", str(recipe), "training.max_steps=2"]) == 0
    resume = ["train", str(recipe), "--resume", "--json"]
    wider = recipe.parent / "wider"
    config = AutoConfig.from_pretrained(DEMO / "model", intermediate_size=2048)
    AutoModelForCausalLM.from_config(config).save_pretrained(wider)
    AutoTokenizer.from_pretrained(DEMO / "model").save_pretrained(wider)
    for change in (
        "training.learning_rate=1e-3", "training.optim=sgd", "trainable=ffn", "layers=[0, 1]", "lora={r: 4}",
        "relu=false", "freeze=[norm]", f"model={wider}",
    ):  # fmt: skip
        line = error_line(*resume, change)
        assert change.partition("=")[0] in line
        assert "checkpoint-2 was trained with" in line
    state = recipe.parent / "out" / "checkpoint-2" / "twell_state.json"
    saved = json.loads(state.read_text())
    for value in (0.2, None):  # as an earlier version saved it
        saved["settings"]["kept"]["blend_steps"] = value
        state.write_text(json.dumps(saved))
        if value:
            assert "trained with blend_steps=0.2, and blending is gone; " in error_line(*resume)
    assert not (recipe.parent / "out" / "checkpoint-4").exists()

    shutil.copytree(recipe.parent, recipe.parent / "moved", ignore=shutil.ignore_patterns("moved"))
    moved = ["train", str(recipe.parent / "moved" / "recipe.yaml"), "--resume"]
    same = ["training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=2"]
    assert main([*moved, *same]) == 0
    assert "was trained with" not in caplog.text
    with open(recipe.parent / "train.txt", "a") as file:
        file.write("and more\n")
    changes = ["training.gradient_accumulation_steps=2", "training.seed=1", "sequence_length=16"]
    changes.append("training.data_seed=7")
    assert main([*resume, *changes]) == 0
    told_of = ("sequences a step=2 and goes on with 4", "training.seed=42 and", "sequence_length=32 and", "train=[[")
    for told in (*told_of, "training.data_seed=None and"):
        assert f"checkpoint-2 was trained with {told}" in caplog.text


def test_a_run_that_diverges_ends_and_keeps_its_last_good_checkpoint(recipe, capsys):
    schedule = ["training.lr_scheduler_type=constant_with_warmup", "training.warmup_steps=0", "training.max_steps=100"]
    assert main(["train", str(recipe), *schedule, "training.learning_rate=1e30", "training.save_steps=1"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]  # after the progress bar
    assert re.search(r"training diverged: at step \d, model\.\S+ holds values that are NaN", line)
    assert "learning_rate" in line
    steps = [folder.name for folder in finished_checkpoints(recipe.parent / "out")]
    assert steps == [f"checkpoint-{len(steps) - i}" for i in range(len(steps))]
    for step in steps:
        weights = load_file(recipe.parent / "out" / step / "model.safetensors")
        assert all(weight.isfinite().all() for weight in weights.values()), step


@pytest.mark.parametrize("lacking", one_of(["pad_token"], [["pad_token"], ["pad_token", "eos_token"]]))
def test_a_tokenizer_without_a_padding_token(recipe, lacking, run_json):
    """As Llama 3.2's: packed sequences need none."""
    model = Path(shutil.copytree(DEMO / "model", recipe.parent / "model"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in lacking}
    (model / "tokenizer_config.json").write_text(json.dumps(kept))
    assert run_json("train", recipe, f"model={model}", "training.max_steps=1")["after"]["loss"] < 8


def test_a_run_without_a_whole_batch_saves_nothing(recipe, error_line):
    changes = ["training.per_device_train_batch_size=100000", "training.dataloader_drop_last=true"]
    assert "no step of training was made" in error_line("train", recipe, *changes)
    assert not (recipe.parent / "out" / "final").exists()


def test_resuming_a_mistyped_folder_does_not_make_it(recipe, error_line):
    line = error_line("train", recipe, "--resume", f"output_dir={recipe.parent / 'mistyped'}")
    assert "holds no complete checkpoint" in line
    assert not (recipe.parent / "mistyped").exists()


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(recipe):
    process = in_training(recipe)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"interrupted" in rest
    assert b"Traceback" not in rest
    assert not (recipe.parent / "out" / "final").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["sparsify", "{model}", "{locked}/new"],
        ["eval", "{model}", "--text", "{text}", "--output", "{locked}/new"],
        ["eval", "{model}", "--text", "{text}", "--output", "{locked}/old"],
        ["inspect", "{model}", "--text", "{text}", "--html", "{locked}/new"],
    ],
)
def test_places_that_cannot_be_written_to_are_refused_before_the_work(tmp_path, arguments):
    locked = tmp_path / "locked"
    locked.mkdir()
    (locked / "old").touch(0o444)
    locked.chmod(0o555)
    names = {"model": DEMO / "model", "text": HELDOUT, "locked": locked}
    command = [*COMMAND, *(argument.format(**names) for argument in arguments)]
    done = finished(*command, preexec_fn=_bound_by_permissions)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert str(locked) in line
    assert "cannot be written to; " in line


def _bound_by_permissions():
    """Root in a container, too: without CAP_DAC_OVERRIDE (1), by PR_CAPBSET_DROP (24)."""
    ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("command", [[*COMMAND, "train"], [sys.executable, ROOT / "recipes" / "finetune.py"]])
def test_a_missing_recipe_is_all_that_is_asked_for(command):
    done = finished(*command)
    assert done.stderr.splitlines()[-1].endswith("error: the following arguments are required: recipe")
