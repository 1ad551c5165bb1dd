"""What a fine-tuning run tells of itself: estimate, figures beside the dense parent's, warnings, its model's card."""

import dataclasses
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import hf_twell
from hf_twell.cli import main
from hf_twell.files.folders import MEASURED_NAME, check_target
from hf_twell.models.hub import folder_card
from hf_twell.recipe import finetune, measured
from hf_twell.recipe.estimate import COMPILED, PASSES, count_checkpoints, count_steps, estimate_time
from hf_twell.recipe.packing import PackedText
from hf_twell.recipe.schema import load_recipe
from hf_twell.train import learning_rates
from hf_twell.train.parent_loss import parent_loss
from tests.conftest import COMMAND, finished, tiny_llama, write_recipe
from tests.one_step import make_trainer
from tests.paths import DEMO, HELDOUT, ROOT
from tests.rounding import rounding


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    """Four short steps of the demo model, to a density that they cannot reach."""
    monkeypatch.chdir(tmp_path)
    return write_recipe(tmp_path, "target_density: 0.05", documents=20)


def train(recipe: Path, capsys, *changes) -> tuple[dict, str]:
    """The result and what went to stderr."""
    capsys.readouterr()
    assert main(["train", str(recipe), "--json", *changes]) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


def test_a_run_tells_the_dense_parents_loss(recipe, capsys):
    whole, told = train(recipe, capsys)
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype="float32")
    heldout = PackedText(AutoTokenizer.from_pretrained(DEMO / "model"), str(recipe.parent / "heldout.txt"), 32)
    with torch.no_grad():
        losses = [model(input_ids=ids[None], labels=ids[None]).loss.item() for ids in heldout.sequences]
    assert whole["dense"]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert whole["dense"]["loss"] < whole["before"]["loss"]
    for shown in ("measuring the dense parent's loss", "measuring held-out loss", "measuring sparsity"):
        assert shown in told
    assert "4 steps of 64 tokens, 256 in all; on disk 2 checkpoints of 54 MiB and a final model of 9 MiB" in told
    assert told.index("4 steps of 64") < told.index("measuring the dense parent's loss")
    assert re.search(r"training takes about \d+ (seconds|minutes), beside saving\n.*0/4", told, re.DOTALL)
    saved = AutoModelForCausalLM.from_pretrained(whole["model"]).config.twell["density"]
    assert saved == pytest.approx([layer["density"] for layer in whole["after"]["sparsity"]["layers"]], abs=1e-6)


def test_a_run_to_a_union_records_what_was_pressed_on(recipe, capsys):
    changes = ["target_density=null", "target_union=0.3", "share=8", "term=count", "training.max_steps=2"]
    result, _ = train(recipe, capsys, *changes)
    assert all(0 < row["twell/union_8"] <= 1 for row in result["logs"])
    state = json.loads(Path(result["model"], "twell_state.json").read_text())
    assert (state["target_union"], state["share"], state["term"]) == (0.3, 8, "count")
    assert "| active in any of 8 tokens, aimed at | 30.00 % after" in folder_card(result["model"], "me/x")


@pytest.mark.slow
def test_a_resumed_run_does_not_measure_its_start_again(recipe, capsys, monkeypatch):
    whole, _ = train(recipe, capsys)
    out = recipe.parent / "out"
    shutil.rmtree(out / "checkpoint-4")
    shutil.rmtree(out / "final")
    with monkeypatch.context() as patch:
        patch.setattr(measured, "with_activations", None)
        resumed, told = train(recipe, capsys, "--resume")
    assert told.count("measuring held-out loss:   0%") == 1, "that of the end"
    assert all(resumed[key] == whole[key] for key in ("dense", "before", "after"))
    # On other text they would not compare.
    shutil.rmtree(out / "checkpoint-4")
    shutil.rmtree(out / "final")
    (recipe.parent / "heldout.txt").write_text((recipe.parent / "heldout.txt").read_text()[:400])
    other, _ = train(recipe, capsys, "--resume")
    assert other["dense"]["loss"] != whole["dense"]["loss"]


def test_the_table_has_the_dense_parents_row(recipe, capsys):
    assert main(["train", str(recipe), "training.max_steps=1"]) == 0
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[2:5]]
    assert rows == ["dense parent", "before", "fine-tuned"]


def test_a_control_is_the_dense_parent_itself(recipe, capsys):
    result, _ = train(recipe, capsys, "relu=false")
    assert result["dense"] is None


def test_the_final_model_takes_no_more_space_than_its_parent(recipe, capsys):
    result, _ = train(recipe, capsys, "training.max_steps=1")
    sizes = [Path(folder, "model.safetensors").stat().st_size for folder in (DEMO / "model", result["model"])]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)
    assert AutoModelForCausalLM.from_pretrained(result["model"]).dtype == torch.bfloat16
    result, _ = train(recipe, capsys, "training.max_steps=1", "save_dtype=float32", "output_dir=whole")
    whole, half = (load_file(recipe.parent / name / "final" / "model.safetensors") for name in ("whole", "out"))
    assert all(torch.equal(weight.bfloat16(), half[name]) for name, weight in whole.items())


def test_the_card_tells_what_a_run_measured(recipe, capsys):
    result, _ = train(recipe, capsys)
    assert main(["push", result["model"], "me/x", "--dry-run"]) == 0
    printed = capsys.readouterr()
    density = f"{100 * result['after']['sparsity']['density']:.2f} %"
    assert f"| density measured | {density} |" in printed.out
    assert f"so that {density} of a block's neurons are active" in printed.out
    losses = [f"{result[key]['loss']:.3f}" for key in ("dense", "before", "after")]
    assert "| dense parent {}, before training {}, after it {} |".format(*losses) in printed.out
    assert "of `heldout.txt`." in printed.out
    assert "fine-tune it before" not in (printed.out + printed.err).lower()
    assert check_target(recipe.parent / "out" / "final", overwrite=True), "it still is a model's folder"
    path = recipe.parent / "sparsity.json"
    path.write_text(json.dumps({**result["after"]["sparsity"], "density": 0.01}))
    assert main(["push", result["model"], "me/x", "--dry-run", "--sparsity", str(path)]) == 0
    assert "| density measured | 1.00 % |" in capsys.readouterr().out, "figures that are given come first"


def test_the_card_tells_how_a_run_read_and_what_taught(recipe, capsys):
    again = "train=[train.txt, train.txt]"
    changes = ["training.max_steps=3", "training.learning_rate=3e-5", "distill={layers: 2}", again]
    result, _ = train(recipe, capsys, *changes)
    for folder in (Path(result["model"]), recipe.parent / "out" / "checkpoint-3"):
        card = folder_card(folder, "me/x")
        for fact in (
            "tokens read, steps times their size | 192",
            "learning rate | 3e-05",
            "texts | train.txt (2 times)",
            "teacher | the dense parent: its logits, 50 % of the objective and its blocks' outputs, with a weight of 2",
        ):
            assert f"| {fact} |" in card
    other = Path(shutil.copytree(DEMO / "model", recipe.parent / "other"))
    result, _ = train(recipe, capsys, *changes, f"distill={{logits: 1.0, parent: {other}}}", "output_dir=taught")
    assert "| teacher | `other`: its logits, 100 % of the objective |" in folder_card(result["model"], "me/x")
    assert str(recipe.parent) not in folder_card(result["model"], "me/x")


def test_a_model_that_lost_much_is_published_with_a_warning(recipe, capsys, caplog):
    result, _ = train(recipe, capsys, "training.max_steps=1")
    path = Path(result["model"], MEASURED_NAME)
    figures = json.loads(path.read_text())
    figures["after"]["loss"] = 1.5 * figures["dense"]["loss"]
    path.write_text(json.dumps(figures))
    assert main(["push", result["model"], "me/x", "--dry-run"]) == 0
    assert "> **Warning.** Its held-out loss is 50 % above that of its dense parent." in capsys.readouterr().out
    assert "held-out loss is 50 % above" in caplog.text


def test_a_bare_swap_is_published_with_a_warning(tmp_path, capsys, caplog):
    folder, text = tmp_path / "bare", tmp_path / "notes.txt"
    text.write_text(HELDOUT.read_text()[:3000])
    assert main(["sparsify", str(DEMO / "model"), str(folder), "--text", str(text)]) == 0
    capsys.readouterr()
    assert main(["push", str(folder), "me/x", "--dry-run"]) == 0
    card = capsys.readouterr().out
    for shown in ("This is the bare swap to ReLU", "fine-tune it before you use it", "`notes.txt`"):
        assert shown in card
    assert "the bare swap to ReLU" in caplog.text
    # Loaded and saved by others, nothing is recorded; with figures of a sparse model nothing is doubted.
    (folder / "twell_state.json").unlink()
    (folder / MEASURED_NAME).unlink()
    assert "Whether it was fine-tuned after the swap to ReLU is not recorded here" in folder_card(folder, "me/x")
    figures = {"l0": 10.0, "density": 0.01, "dead": 0.0}
    layers = [{"name": f"model.layers.{layer}.mlp", "intermediate_size": 1024} | figures for layer in range(4)]
    sparse = {"tokens": 9, "layers": layers} | figures
    assert "fine-tune it before" not in folder_card(folder, "me/x", sparsity=sparse)


def test_converting_a_trained_model_again_calls_it_no_bare_swap(tmp_path):
    model = hf_twell.sparsify(AutoModelForCausalLM.from_pretrained(DEMO / "model"))
    model.save_pretrained(tmp_path / "sparse")
    AutoTokenizer.from_pretrained(DEMO / "model").save_pretrained(tmp_path / "sparse")
    assert main(["sparsify", str(tmp_path / "sparse"), str(tmp_path / "again")]) == 0
    assert not (tmp_path / "again" / "twell_state.json").exists()


@pytest.mark.parametrize("saved", [True, False])
def test_an_interrupted_run_says_how_it_goes_on(recipe, capsys, monkeypatch, saved):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(finetune, "measure" if saved else "measure_start", interrupt)
    assert main(["train", str(recipe)]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    path = recipe.parent / "out" / "checkpoint-4"
    how = f"go on from {path} with --resume" if saved else "it had no complete checkpoint yet (training.save_steps)"
    assert last == f"hf-twell: interrupted; {how}"


@pytest.mark.parametrize(
    ("options", "rows", "checkpoints"),
    [
        ({"max_steps": 5, "save_steps": 2}, 20, 3),
        ({"num_train_epochs": 2, "gradient_accumulation_steps": 3, "save_strategy": "epoch"}, 20, 2),
        ({"num_train_epochs": 1.5, "dataloader_drop_last": True, "save_steps": 0.5}, 9, 2),
        ({"num_train_epochs": 1, "save_strategy": "no"}, 9, 0),
        ({"max_steps": 6, "save_steps": 1, "save_total_limit": 2}, 20, 3),
    ],
)
def test_the_estimate_counts_as_the_trainer_does(tmp_path, options, rows, checkpoints):
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=2, use_cpu=True, report_to=[], **options)
    data = [{"input_ids": list(range(3, 15)), "labels": list(range(3, 15))}] * rows
    trainer = Trainer(hf_twell.sparsify(tiny_llama()), args, train_dataset=data)
    assert count_checkpoints(args, count_steps(args, rows)) == checkpoints
    trainer.train()
    assert count_steps(args, rows) == trainer.state.max_steps
    assert len(list(tmp_path.glob("checkpoint-*"))) == min(checkpoints, args.save_total_limit or checkpoints)


@pytest.fixture
def told_seconds(recipe, tmp_path):
    """A function: what `estimate_time` says of so many tokens, with distillation or without."""

    def told(tokens: int, forward_seconds: float, *, distilled=False, compiled=False, **options) -> float:
        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **options)
        args.torch_compile = compiled  # which, given, would set variables of the environment
        given = dataclasses.replace(load_recipe(recipe), distill={"logits": 1.0} if distilled else None)
        return seconds_in(estimate_time(args, given, tokens, forward_seconds))

    return told


def seconds_in(line: str) -> float:
    number, unit = re.search(r"training takes about (\d+) (\w+), beside", line).groups()
    return int(number) * {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}[unit]


def test_the_time_is_told_by_that_of_a_forward_pass(told_seconds):
    """Of 2 ms for each of 100,000 tokens: three, with a parent four and with checkpointing five, or less compiled."""
    assert told_seconds(100_000, 2e-3) == 10 * 60
    assert told_seconds(100_000, 2e-3, distilled=True, gradient_checkpointing=True) == 17 * 60
    assert told_seconds(100_000, 2e-3, compiled=True) == 7 * 60


def test_a_forward_pass_is_timed_in_the_precision_of_training(tmp_path):
    trainer = make_trainer(tmp_path, bf16=True)
    dtypes = []
    trainer.model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *args: dtypes.append(args[2].dtype))
    measured.forward_seconds(trainer, PackedText.of(torch.arange(64).view(2, 32)))
    trainer.train()
    assert set(dtypes) == {torch.bfloat16}, dtypes


def rows_in(path: str) -> list[dict]:
    return [json.loads(line) for line in (ROOT / path).read_text().splitlines()]


STEPS = rows_in("kernels/twell_cuda/bench/h200-2026-11-23/bench.jsonl")  # of Llamas of 0.55B and 1.57B
OF_CODER = "model_cards/qwen2.5-coder-0.5b"


def eager_seconds(row: dict) -> float:
    """For each token."""
    return row["eager_ms"] / 1e3 / (row["batch"] * row["length"])


def test_an_eager_and_a_compiled_step_take_as_many_forward_passes_as_in_rows():
    steps = [row for row in STEPS + rows_in(f"{OF_CODER}/speed.jsonl") if row["bench"] == "train"]
    assert len(steps) == 4
    for row in steps:
        assert row["compiled_ms"] / row["eager_ms"] == pytest.approx(COMPILED, rel=0.04)
    (forward,) = (row for row in STEPS if row["bench"] == "prefill")  # whose output head takes little of it
    for row in (row for row in steps if row["layers"] == forward["layers"] == 28):
        assert eager_seconds(row) / eager_seconds(forward) == pytest.approx(PASSES, rel=0.07)


def test_the_time_of_runs_that_were_made_is_as_far_off_as_it_says(told_seconds):
    """A third of an eager step in place of a forward pass, which no row has with its loss."""
    curve = [row for row in rows_in("model_cards/qwen2.5-coder-1.5b/curves.jsonl") if row["run"] == "union25"]
    (first, last) = (row for row in curve if row["step"] in (20, 200))  # between two compilations
    of_its_size = next(row for row in STEPS if row["bench"] == "train" and row["layers"] == 28)
    told = told_seconds(10**12, eager_seconds(of_its_size) / 3, distilled=True, compiled=True)
    took = (last["seconds"] - first["seconds"]) / (180 * 32768) * 10**12
    assert took / told == pytest.approx(1.03, abs=0.02)

    (step,) = (row for row in rows_in(f"{OF_CODER}/speed.jsonl") if row["bench"] == "train")
    forward, many = eager_seconds(step) / 3, 10**5  # runs, as the time is told in whole units
    told = told_seconds(10**12, forward, distilled=True, compiled=True)
    assert 10**12 / 105e3 / told == pytest.approx(0.93, abs=0.02)  # tokens a second of its recipe
    times = []
    for row in rows_in(f"{OF_CODER}/rows.jsonl") + rows_in(f"{OF_CODER}/rows_own_text.jsonl"):
        if training := row.get("training"):
            distilled = "distill=null" not in row["changes"]
            told = told_seconds(many * training["tokens"], forward, distilled=distilled, compiled=True)
            times.append(many * 60 * training["minutes"] / told)
    assert len(times) == 11
    assert (min(times), max(times)) == pytest.approx((1.2, 2.1), abs=0.05)


@pytest.mark.slow
def test_what_is_done_once_is_not_in_the_time(recipe, capsys, monkeypatch):
    """As a first call builds kernels; and to count what is active takes longer than a forward pass."""

    def slow(*args):
        time.sleep(10)
        return measured.measure_start(*args)

    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(finetune, "measure_start", slow)
    monkeypatch.setattr(Trainer, "train", interrupt)
    assert main(["train", str(recipe), "training.max_steps=100_000"]) == 130
    told = capsys.readouterr().err
    assert "6,400,000 in all" in told
    assert seconds_in(told) < 10 * 3600, "ten seconds for some hundred tokens would be thirty hours"


def run_of(tmp_path, rows: int = 64, **options) -> Trainer:
    """Four steps of a tiny model, of many tokens each."""
    ids = torch.randint(3, 90, (rows, 256), generator=torch.Generator().manual_seed(0))
    model = hf_twell.sparsify(tiny_llama(max_position_embeddings=256, num_hidden_layers=1))
    sizes = {"max_steps": 4, "per_device_train_batch_size": 64, "max_grad_norm": 1.0}
    trainer = make_trainer(tmp_path, model=model, term=options, **sizes)
    trainer.train_dataset = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in ids]
    return trainer


def lines_with(caplog, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


def test_a_model_that_is_being_lost_is_told_once(tmp_path, caplog):
    run_of(tmp_path, target_density=0.3, parent_loss=2.0).train()
    (line,) = lines_with(caplog, "is being lost")
    assert line.startswith("step 1: the pretrained model is being lost: a training loss of 5.")
    assert "where the dense parent has 2.00; give more steps, another learning rate than 5e-05, " in line
    assert "layer_shares='free' or a higher target_density" in line
    (line,) = lines_with(caplog, "few for target_density=0.3")
    assert "this run reads 65,536 tokens" in line


def test_a_trainer_knows_the_loss_of_the_parent_that_was_converted(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("hf_twell.train.logs.LOST", 0.5)
    models = [tiny_llama(max_position_embeddings=256, num_hidden_layers=1, hidden_act=act) for act in ("silu", "relu")]
    trainer = run_of(tmp_path / "told", rows=64, target_density=0.3)  # each step reads all of them
    ids = torch.tensor([row["input_ids"] for row in trainer.train_dataset])
    with torch.no_grad():
        loss, of_relu = (model(input_ids=ids, labels=ids).loss.item() for model in models)
    assert abs(of_relu - loss) > 1e-3
    trainer.train()
    assert trainer.model.training
    (line,) = lines_with(caplog, "is being lost")
    assert f"where the dense parent has {loss:.2f}" in line
    callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, hf_twell.SparsityCallback))
    assert abs(callback.parent_loss - loss) <= rounding(64 * 255, loss)

    other = run_of(tmp_path / "given", rows=64, target_density=0.3, parent_loss=loss)
    other.train()
    pairs = zip(trainer.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs), "to know it changes nothing"
    batch = {"input_ids": ids, "labels": ids}
    assert parent_loss(trainer, [batch]) is None, "these weights are no dense parent's any more"


def test_a_model_that_came_with_relu_has_no_parent_to_know(tmp_path):
    hf_twell.sparsify(tiny_llama()).save_pretrained(tmp_path)
    model = hf_twell.sparsify(AutoModelForCausalLM.from_pretrained(tmp_path))
    trainer = make_trainer(tmp_path / "out", model=model)
    ids = torch.randint(3, 90, (2, 8))
    assert parent_loss(trainer, [{"input_ids": ids, "labels": ids}]) is None
    trainer.model = hf_twell.sparsify(tiny_llama())
    assert parent_loss(trainer, [{"input_ids": ids}]) is None, "no labels, no loss"


@pytest.mark.parametrize("compiled", [False, True])
def test_the_parents_loss_is_the_mean_over_labels(tmp_path, compiled):
    """Trainer's own: a micro-batch of a prompt alone has no label, and one of few labels counts less."""
    model = hf_twell.sparsify(tiny_llama())
    if compiled:
        model.loss_function = torch.compile(model.loss_function, backend="eager")
    trainer = make_trainer(tmp_path, model=model)
    ids = torch.randint(3, 90, (3, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 2:], labels[1, 1:] = -100, -100  # one label; the second row's is the first word, which nothing predicts
    with torch.no_grad():
        expected = tiny_llama()(input_ids=ids, labels=labels).loss.item()  # over all rows at once
    batches = [{"input_ids": i[None], "labels": row[None]} for i, row in zip(ids, labels, strict=True)]
    assert abs(parent_loss(trainer, batches) - expected) <= rounding(9, expected)
    assert parent_loss(trainer, batches[1:2]) is None


def test_dead_neurons_are_told(tmp_path, caplog):
    trainer = run_of(tmp_path, l1_weight=1e-3)
    with torch.no_grad():
        for layer in trainer.model.model.layers:
            layer.mlp.gate_proj.weight[: len(layer.mlp.gate_proj.weight) // 2] = 0.0
    trainer.train()
    (line,) = lines_with(caplog, "is being lost")
    assert "of neurons not active for any of 16,384 tokens; give" in line
    assert line.endswith("or a lower l1_weight")


def test_a_run_that_is_well_is_told_nothing(tmp_path, caplog):
    run_of(tmp_path, l1_weight=1e-5, parent_loss=5.0).train()
    assert not lines_with(caplog, "is being lost")
    assert not lines_with(caplog, "few for target_density")


def test_a_recipe_warns_by_its_own_dense_parent(recipe, capsys, monkeypatch, caplog):
    monkeypatch.setattr("hf_twell.train.logs.LOST", 0.5)
    result, _ = train(recipe, capsys)
    (line,) = lines_with(caplog, "is being lost")
    assert f"where the dense parent has {result['dense']['loss']:.2f}" in line


TELLING_IMPORTS = """
import atexit, runpy, sys
atexit.register(lambda: print(*sys.modules.keys() & {"torch", "transformers", "accelerate"}))
"""
COMMANDS = {
    "hf-twell": f"{TELLING_IMPORTS}from hf_twell.cli import main\nsys.exit(main(['train', *sys.argv[1:]]))",
    "script": f"{TELLING_IMPORTS}runpy.run_path({str(ROOT / 'recipes' / 'finetune.py')!r}, run_name='__main__')",
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["learning_rate=1e-3"], "write training.learning_rate"),
        (["train=absent.txt"], "no text file at absent.txt"),
        (["target_density=5"], "give a share between 0 and 1"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_mistakes_are_told_before_the_long_imports(recipe, changes, says, command):
    done = finished(sys.executable, "-c", COMMANDS[command], recipe, *changes, cwd=recipe.parent)
    assert done.returncode == 1
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == "\n", "neither was imported"


DEEPSPEED = """
import logging, sys
logger = logging.getLogger("DeepSpeed")
logger.addHandler(logging.StreamHandler(sys.stdout))
logger.warning("Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.")
logger.warning("another warning of DeepSpeed's")
class DeepSpeedEngine: pass
"""


@pytest.mark.slow
def test_deepspeeds_warning_is_not_in_every_command(tmp_path):
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text(DEEPSPEED)
    (tmp_path / "deepspeed-0.19.8.dist-info").mkdir()
    (tmp_path / "deepspeed-0.19.8.dist-info" / "METADATA").write_text("Name: deepspeed\nVersion: 0.19.8\n")
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = finished(*COMMAND, "sparsify", DEMO / "model", tmp_path / "out", env=environment)
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    assert "another warning of DeepSpeed's" in printed, "it was imported"
    assert "Setting accelerator" not in printed


@pytest.fixture
def judges_small_models(monkeypatch):
    monkeypatch.setattr(learning_rates, "SMALLEST_PRETRAINED", 0)


def rates_told(told: str) -> list[str]:
    return [line for line in told.splitlines() if "learning_rate" in line]


def test_a_recipe_without_a_learning_rate_takes_the_proposed_one_and_keeps_it(
    recipe, capsys, judges_small_models, monkeypatch
):
    result, told = train(recipe, capsys)
    (line,) = rates_told(told)
    assert line.startswith("training has no learning_rate; this run takes 0.0015, proposed for 5M parameters, a guess")
    assert result["logs"][0]["learning_rate"] == 1.5e-3
    out = recipe.parent / "out"
    shutil.rmtree(out / "checkpoint-4")
    shutil.rmtree(out / "final")
    monkeypatch.setattr(learning_rates, "SMALLEST_PRETRAINED", 1e8)  # now none is proposed
    resumed, told = train(recipe, capsys, "--resume")
    assert not rates_told(told)
    assert resumed["logs"] == result["logs"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ("training.learning_rate=6.1e-3", "training.learning_rate 0.0061 may ruin the model: 0.0015 is proposed"),
        ("training.learning_rate=3e-4", "training.learning_rate 0.0003 is so low that the run may hardly learn"),
        ("training.learning_rate=3e-3", None),
        ("relu=false", "training has no learning_rate, so it is 5e-05; none is proposed for such a run"),
        ("training.optim=sgd", "training has no learning_rate, so it is 5e-05; none is proposed for such a run"),
    ],
)
def test_a_recipe_is_told_of_a_learning_rate_far_from_the_proposed_one(
    recipe, capsys, caplog, judges_small_models, changes, says
):
    _, told = train(recipe, capsys, "training.max_steps=1", "training.save_strategy=no", changes)
    assert [says in line for line in rates_told(told)] == ([True] if says else [])
    assert not lines_with(caplog, "learning_rate"), "once"


@pytest.mark.parametrize(("trainable", "says"), [("ffn", True), ("ffn+lora", False)])
def test_adapters_take_other_learning_rates(recipe, capsys, judges_small_models, trainable, says):
    pytest.importorskip("peft")
    changes = ["training.max_steps=1", "training.save_strategy=no", f"trainable={trainable}"]
    _, told = train(recipe, capsys, *changes)
    (line,) = rates_told(told)
    assert ("this run takes 0.0015" in line, "none is proposed" in line) == (says, not says)
