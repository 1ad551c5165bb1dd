"""Folders are whole or absent, and a killed training run resumes as if nothing had happened.

Run as a script, it trains into the folder named as its argument and kills itself while it saves the second checkpoint.
"""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

from hf_twell import SparsityCallback, last_checkpoint, sparsify
from hf_twell.files.checkpoints import STATE_NAME, read_state, write_json, write_state
from hf_twell.files.folders import clear_dead_savings, save_model, whole_folder
from hf_twell.train.resuming import CompleteCheckpoints
from tests.conftest import tiny_llama, training_rows
from tests.paths import MODEL, ROOT

pytestmark = pytest.mark.usefixtures("one_thread")

SAVE_STEPS, STEPS, WARMUP_STEPS = 3, 10, 7  # resuming from step 3 is in the middle of the warm-up and of an epoch


def rows() -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 96, (20, 8), generator=generator)
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in ids]


def make_trainer(folder, *before, l1_weight=0.5, **arguments) -> Trainer:
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_steps": SAVE_STEPS,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    # Dropout makes the random state part of what must be resumed.
    model = sparsify(tiny_llama(attention_dropout=0.1))
    args = TrainingArguments(str(folder), **{**settings, **arguments})
    trainer = Trainer(model, args, train_dataset=rows(), callbacks=list(before))
    trainer.add_callback(SparsityCallback(trainer, l1_weight, warmup_steps=WARMUP_STEPS))
    return trainer


def parent_loss_of(trainer) -> float | None:
    callbacks = trainer.callback_handler.callbacks
    return next(callback for callback in callbacks if isinstance(callback, SparsityCallback)).parent_loss


class AtSave(TrainerCallback):
    """Does something when the trainer has written its part of a checkpoint, and ours is still missing."""

    def __init__(self, step, action):
        self.step = step
        self.action = action

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action(Path(args.output_dir) / f"checkpoint-{self.step}")


def die(_):
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt(_):
    raise KeyboardInterrupt


class Reporter(TrainerCallback):
    """What TensorBoard and the like see."""

    def __init__(self):
        self.rows = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.rows.append(dict(logs))


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run that nothing interrupts, and what a reporter saw of it."""
    reporter = Reporter()
    trainer = make_trainer(tmp_path_factory.mktemp("whole"), reporter)
    trainer.train()
    return trainer, reporter


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """The folder of the same run, killed before checkpoint-6 was complete."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-m", "tests.train.test_checkpoints", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    return folder


@pytest.fixture
def torn(killed, tmp_path) -> Path:
    """A copy of that folder to work in."""
    return Path(shutil.copytree(killed, tmp_path / "run"))


def test_state_is_written_last(whole_run):
    trainer, _ = whole_run
    folders = sorted(Path(trainer.args.output_dir).iterdir())
    assert [folder.name for folder in folders] == ["checkpoint-10", "checkpoint-3", "checkpoint-6", "checkpoint-9"]
    for folder in folders:
        times = {path.name: path.stat().st_mtime_ns for path in folder.rglob("*")}
        assert max(times.values()) == times[STATE_NAME]
        assert not [name for name in times if "partial" in name]
        state = {"step": int(folder.name[11:]), "l1_weight": 0.5, "warmup_steps": WARMUP_STEPS, "warmup": "linear"}
        assert read_state(folder) == state | {"parent_loss": parent_loss_of(trainer)}
    assert last_checkpoint(trainer.args.output_dir) == str(folders[0])


def test_every_node_that_saves_gets_the_state(tmp_path, monkeypatch):
    """Without a shared disk (`save_on_each_node`) each resumes from its own."""
    trainer = make_trainer(tmp_path, max_steps=3, save_on_each_node=True)
    monkeypatch.setattr(TrainingArguments, "process_index", 8)  # the first of the second node
    trainer.train()
    assert Path(last_checkpoint(tmp_path)).name == "checkpoint-3"


@pytest.mark.slow
def test_a_killed_run_resumes_exactly(torn, whole_run):
    assert (torn / "checkpoint-6" / "model.safetensors").is_file(), "the trainer itself had finished it"
    assert last_checkpoint(torn) == str(torn / "checkpoint-3")
    trainer = make_trainer(torn)
    trainer.train(resume_from_checkpoint=True)

    resumed, whole = training_rows(trainer), training_rows(whole_run[0])
    assert resumed.keys() == whole.keys() == set(range(1, STEPS + 1))
    for step, row in whole.items():
        assert resumed[step] == pytest.approx(row, abs=1e-6), step
        assert row["twell/l1_weight"] == pytest.approx(0.5 * min(1, (step - 1) / WARMUP_STEPS))
    for (name, mine), truth in zip(trainer.model.named_parameters(), whole_run[0].model.parameters(), strict=True):
        torch.testing.assert_close(mine, truth, atol=1e-6, rtol=0, msg=name)
    assert (torn / "checkpoint-6" / STATE_NAME).is_file(), "the torn one is written again"


def test_a_torn_checkpoint_is_refused_by_path(torn):
    for path in (str(torn / "checkpoint-6"), torn / "checkpoint-6"):
        with pytest.raises(ValueError, match=re.escape(f"checkpoint-6 has no {STATE_NAME}")) as caught:
            make_trainer(torn).train(resume_from_checkpoint=path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="nowhere"):
        make_trainer(torn).train(resume_from_checkpoint=str(torn / "nowhere"))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(("optimizer.pt", damage) for damage in ("shortened", "removed")),
        *((STATE_NAME, damage) for damage in ("shortened", "no object")),
        *(("trainer_state.json", damage) for damage in ("shortened", "removed")),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_named(whole_run, tmp_path, name, damage):
    run = Path(shutil.copytree(whole_run[0].args.output_dir, tmp_path / "run"))
    file = run / "checkpoint-10" / name
    if damage == "removed":
        file.unlink()
    elif damage == "no object":
        file.write_text("[]")
    else:
        os.truncate(file, file.stat().st_size // 2)
    with pytest.warns(UserWarning, match=f"checkpoint-10 is passed over: .*{re.escape(file.name)}"):
        assert last_checkpoint(run) == str(run / "checkpoint-9")
    with pytest.raises(ValueError, match=re.escape(file.name)) as caught:
        make_trainer(run).train(resume_from_checkpoint=run / "checkpoint-10")
    assert "\n" not in str(caught.value)
    trainer = make_trainer(run)
    with pytest.warns(UserWarning, match="checkpoint-10 is passed over"):
        trainer.train(resume_from_checkpoint=True)
    assert last_checkpoint(run) == str(run / "checkpoint-10"), "it is written again"


def test_nothing_to_resume_from(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        assert last_checkpoint(folder) is None
        with pytest.raises(ValueError, match="holds no complete checkpoint"):
            make_trainer(folder).train(resume_from_checkpoint=True)


def test_last_checkpoint_goes_by_number(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-100", "checkpoint-x", "other-200", "checkpoint-300.old"):
        (tmp_path / name).mkdir()
        for file in (STATE_NAME, "trainer_state.json"):
            write_json(tmp_path / name / file, {})
    (tmp_path / "checkpoint-100" / STATE_NAME).unlink()
    (tmp_path / "checkpoint-500").touch()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def test_files_that_people_change_in_a_checkpoint(tmp_path):
    (tmp_path / "trainer_state.json").write_text('{"save_steps": 500}')
    (tmp_path / "README.md").write_text("as it was")
    write_state(tmp_path, {"step": 3})
    (tmp_path / "trainer_state.json").write_text('{"save_steps": 5}')
    (tmp_path / "README.md").write_text("more than there was")
    assert read_state(tmp_path) == {"step": 3}


def test_a_run_clears_a_killed_state_before_it_saves(torn):
    """It was listed, and then gone: the checkpoint was damaged for ever."""
    partial = torn / "checkpoint-6" / f".{STATE_NAME}.partial"
    partial.write_text('{"step"')
    found = []
    before = AtSave(6, lambda folder: found.append(partial.exists()))
    make_trainer(torn, before, max_steps=6).train(resume_from_checkpoint=True)
    assert found == [False]
    assert last_checkpoint(torn) == str(torn / "checkpoint-6")


def test_a_changed_schedule_is_told(torn, caplog):
    make_trainer(torn, l1_weight=0.25, max_steps=4).train(resume_from_checkpoint=True)
    messages = [record.getMessage() for record in caplog.records if "trained with" in record.getMessage()]
    assert len(messages) == 1
    assert "l1_weight=0.5 and goes on with 0.25" in messages[0]


def test_a_resumed_run_knows_its_parents_loss(torn, whole_run):
    """Which only a run's first step can measure."""
    trainer = make_trainer(torn, max_steps=4)
    trainer.train(resume_from_checkpoint=True)
    assert parent_loss_of(trainer) == parent_loss_of(whole_run[0]) > 0


def test_a_run_without_the_callback_is_told_apart(torn, caplog):
    """As a recipe with `relu: false` runs, resumed in the folder of one with ReLU."""
    trainer = make_trainer(torn, max_steps=4)
    next(c for c in trainer.callback_handler.callbacks if isinstance(c, SparsityCallback)).detach()
    assert not [c for c in trainer.callback_handler.callbacks if isinstance(c, CompleteCheckpoints)]
    CompleteCheckpoints(trainer, {"relu": True})
    CompleteCheckpoints(trainer, {"relu": False})  # replaces the one before
    trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-3 was trained with relu=None and goes on with False" in caplog.text
    assert read_state(torn / "checkpoint-4") == {"step": 4, "relu": False}


def test_a_checkpoint_written_over_is_not_complete_meanwhile(tmp_path):
    make_trainer(tmp_path, max_steps=SAVE_STEPS).train()
    assert last_checkpoint(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, AtSave(SAVE_STEPS, interrupt), max_steps=SAVE_STEPS).train()
    assert last_checkpoint(tmp_path) is None, "half of it is from another run"


def test_the_last_complete_checkpoint_outlasts_the_saving_of_the_next(tmp_path):
    longer = tmp_path / f"checkpoint-{10 * STEPS}"  # of an earlier run
    longer.mkdir()
    os.utime(longer, (0, 0))  # Trainer goes by the numbers where all times lie within a second
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, AtSave(2 * SAVE_STEPS, interrupt), save_total_limit=1).train()
    assert last_checkpoint(tmp_path) == str(tmp_path / f"checkpoint-{SAVE_STEPS}")
    trainer = make_trainer(tmp_path, save_total_limit=1)
    trainer.train(resume_from_checkpoint=True)
    assert [folder.name for folder in tmp_path.iterdir()] == [f"checkpoint-{STEPS}"]
    assert trainer.args.save_total_limit == 1


def test_a_checkpoint_records_the_limit_that_was_given(tmp_path):
    make_trainer(tmp_path, max_steps=SAVE_STEPS, save_total_limit=2).train()
    file = tmp_path / f"checkpoint-{SAVE_STEPS}" / "training_args.bin"
    assert torch.load(file, weights_only=False).save_total_limit == 2


def test_a_checkpoint_is_complete_when_every_callback_has_saved(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.add_callback(AtSave(SAVE_STEPS, interrupt))  # after SparsityCallback
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert last_checkpoint(tmp_path) is None


def test_a_callback_that_saves_a_model_of_its_own_leaves_the_checkpoint_whole(tmp_path):
    trainer = make_trainer(tmp_path / "run", max_steps=SAVE_STEPS)
    # As a part of the trainer's own saving, so that nothing is pushed to the Hub.
    save = AtSave(SAVE_STEPS, lambda _: trainer.save_model(str(tmp_path / "copy"), _internal_call=True))
    trainer.add_callback(save)
    trainer.train()
    assert last_checkpoint(tmp_path / "run") == str(tmp_path / "run" / f"checkpoint-{SAVE_STEPS}")
    assert (tmp_path / "copy" / "model.safetensors").is_file()
    assert not (tmp_path / "copy" / STATE_NAME).exists()


def test_state_that_cannot_be_written(tmp_path):
    def obstruct(checkpoint):
        (checkpoint / f".{STATE_NAME}.partial").mkdir()

    with pytest.raises(OSError, match=STATE_NAME):
        make_trainer(tmp_path, AtSave(SAVE_STEPS, obstruct)).train()
    assert last_checkpoint(tmp_path) is None


def test_every_reporter_gets_every_key(whole_run):
    trainer, reporter = whole_run
    keys = {f"twell/{key}" for key in ("l0", "density", "l1", "dead", "l1_weight")}
    keys |= {f"twell/layer_{layer:02d}/{key}" for layer in range(3) for key in ("l0", "density", "l1", "dead")}
    logged = training_rows(trainer)
    reported = [row for row in reporter.rows if "loss" in row]
    assert len(reported) == len(logged) == STEPS
    for row, seen in zip(logged.values(), reported, strict=True):
        assert keys <= row.keys()
        assert {**seen, "step": row["step"]} == row
        mean = sum(row[f"twell/layer_{layer:02d}/l0"] for layer in range(3)) / 3
        assert row["twell/l0"] == pytest.approx(mean)
    json.dumps(trainer.state.log_history)
    saved = json.loads(Path(trainer.args.output_dir, "checkpoint-10", "trainer_state.json").read_text())
    assert keys <= saved["log_history"][0].keys()


def test_tensorboard(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from transformers.integrations import TensorBoardCallback

    writer = tensorboard.SummaryWriter(tmp_path)
    make_trainer(tmp_path, TensorBoardCallback(writer), max_steps=2, save_strategy="no").train()
    written = events.EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]
    assert {"train/twell/l0", "train/twell/layer_02/dead"} <= set(written)


def test_console_shows_means_and_the_task_loss(tmp_path, capsys):
    trainer = make_trainer(tmp_path, max_steps=1, save_strategy="no")
    trainer.train()
    printed = capsys.readouterr().out
    assert "twell/l0" in printed
    assert "twell/layer_" not in printed
    measured = make_trainer(tmp_path, max_steps=1, save_strategy="no", l1_weight=0.0)
    measured.train()
    assert training_rows(trainer)[1]["loss"] == training_rows(measured)[1]["loss"]


def test_a_callback_of_another_trainer(tmp_path):
    """It would train without the L1 term, and log nothing."""
    trainer = make_trainer(tmp_path / "one")
    args = TrainingArguments(str(tmp_path / "other"), max_steps=1, use_cpu=True, report_to=[], save_strategy="no")
    other = Trainer(trainer.model, args, train_dataset=rows())
    other.add_callback(trainer.pop_callback(SparsityCallback))
    with pytest.raises(ValueError, match="was made for another trainer"):
        other.train()


def test_whole_folder(tmp_path):
    target = tmp_path / "model"
    with whole_folder(target) as folder:
        (folder / "model.safetensors").write_text("new")
        assert not target.exists()
        assert folder.parent == tmp_path, "a rename must not cross file systems"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (target / "model.safetensors").read_text() == "new"


def make_model_folder(path):
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_text("old")


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("overwrite", [False, True])
def test_whole_folder_when_the_body_fails(tmp_path, error, overwrite):
    target = tmp_path / "model"
    if overwrite:
        make_model_folder(target)

    def body():
        with whole_folder(target, overwrite=overwrite) as folder:
            (folder / "model.safetensors").write_text("half")
            raise error

    with pytest.raises(error):
        body()
    assert [path.name for path in tmp_path.iterdir()] == (["model"] if overwrite else [])
    assert not overwrite or (target / "model.safetensors").read_text() == "old"


def test_whole_folder_when_the_rename_fails(tmp_path):
    target = tmp_path / "model"
    make_model_folder(target)
    with pytest.raises(OSError), whole_folder(target, overwrite=True) as folder:
        folder.rmdir()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (target / "model.safetensors").read_text() == "old"


@pytest.mark.parametrize("kind", ["file", "folder of other things"])
def test_whole_folder_refuses_to_replace_what_is_no_model(tmp_path, kind):
    target = tmp_path / "model"
    if kind == "file":
        target.write_text("old")
    else:
        target.mkdir()
        (target / "thesis.tex").write_text("old")
    for overwrite, says in ((True, "no model folder"), (False, "exists")):
        with pytest.raises(ValueError, match=says), whole_folder(target, overwrite=overwrite):
            pytest.fail("the body must not run")
    assert (target if kind == "file" else target / "thesis.tex").read_text() == "old"


@pytest.mark.parametrize("others", [["thesis.txt"], ["vocab.csv"], ["tokenizer.txt"], ["README.md", "runs", "a.txt"]])
def test_whole_folder_refuses_to_replace_what_lies_beside_a_model(tmp_path, others):
    target = tmp_path / "model"
    make_model_folder(target)
    for name in others:
        (target / name).write_text("old") if "." in name else (target / name).mkdir()
    with pytest.raises(ValueError, match="holds more than a model") as caught, whole_folder(target, overwrite=True):
        pytest.fail("the body must not run")
    assert sum(name in str(caught.value) for name in others) == min(3, len(others))
    assert len(list(target.iterdir())) == 2 + len(others)
    (target / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no model folder"), whole_folder(target, overwrite=True):
        pytest.fail("the body must not run")


def test_whole_folder_keeps_what_came_while_it_was_written(tmp_path):
    """As of two savings under one name: the later one must not replace the earlier."""
    target = tmp_path / "model"

    def write(overwrite, meanwhile):
        with whole_folder(target, overwrite=overwrite) as folder:
            (folder / "model.safetensors").write_text("late")
            meanwhile()

    with pytest.raises(ValueError, match=r"exists.*What was to lie there is in .*model-"):
        write(False, lambda: make_model_folder(target))
    assert (target / "model.safetensors").read_text() == "old"
    with pytest.raises(ValueError, match="would lose thesis"):
        write(True, lambda: (target / "thesis.txt").write_text("old"))
    assert (target / "thesis.txt").read_text() == (target / "model.safetensors").read_text() == "old"
    kept = [path for path in tmp_path.iterdir() if path != target]
    assert len(kept) == 2, "work that is done is not thrown away"
    assert all((path / "model.safetensors").read_text() == "late" for path in kept)


SAVING = """
import sys
from hf_twell.files.folders import whole_folder
with whole_folder(sys.argv[1], overwrite=True) as folder:
    (folder / "model.safetensors").write_text("half")
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_saving_left_is_cleared_by_the_next_and_a_living_one_is_not(tmp_path):
    target, environment = tmp_path / "final", {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SAVING, str(target)]
    saving = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert saving.stdout.readline() == b"writing\n"
    (other,) = tmp_path.iterdir()
    for _ in range(2):
        with whole_folder(target, overwrite=True) as folder:
            (folder / "config.json").write_text("{}")
            (folder / "model.safetensors").write_text("whole")
        assert (other / "model.safetensors").read_text() == "half", "its process lives"
    saving.kill()
    saving.communicate()
    with whole_folder(tmp_path / "final-2"):
        assert other.is_dir(), "of another name"
    with whole_folder(target, overwrite=True):
        assert not other.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "final-2"]


def beside(monkeypatch, owner, name: str, before, after) -> None:
    """What another process may do just before and after each call of a function, by the call's arguments."""
    function, inside = getattr(owner, name), []

    def call(*args, **options):
        if inside:  # the other process's own call
            return function(*args, **options)
        inside.append(1)
        before(*args)
        result = function(*args, **options)
        after(*args)
        inside.clear()
        return result

    monkeypatch.setattr(owner, name, call)


def test_a_living_saving_is_left_alone_at_every_moment(tmp_path, monkeypatch):
    target = tmp_path / "final"
    make_model_folder(target)

    def other(*args):
        clear_dead_savings(target)

    beside(monkeypatch, Path, "rename", other, other)
    beside(monkeypatch, shutil, "rmtree", other, other)
    with whole_folder(target, overwrite=True) as folder:
        (folder / "model.safetensors").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert (target / "model.safetensors").read_text() == "new"


def test_a_name_that_is_taken_at_the_last_moment(tmp_path, monkeypatch):
    target = tmp_path / "final"
    beside(monkeypatch, Path, "rename", lambda *args: target.exists() or make_model_folder(target), lambda *args: None)
    says = r"made by others meanwhile. What was to lie there is in .*final-"
    with pytest.raises(ValueError, match=says) as caught, whole_folder(target) as folder:
        (folder / "model.safetensors").write_text("late")
    assert (target / "model.safetensors").read_text() == "old"
    assert Path(str(caught.value).rpartition(" ")[2], "model.safetensors").read_text() == "late"


def test_an_empty_rest_may_be_of_a_saving_that_begins(tmp_path):
    for name in ("final[1]", "final1"):  # a name is no pattern
        (tmp_path / f".{name}.01234567.partial").mkdir()
    clear_dead_savings(tmp_path / "final[1]")
    assert len(list(tmp_path.iterdir())) == 2
    for rest in tmp_path.iterdir():
        (rest / "config.json").write_text("{}")
    clear_dead_savings(tmp_path / "final[1]")
    assert [path.name for path in tmp_path.iterdir()] == [".final1.01234567.partial"]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_saving_killed_while_it_replaced_a_model_loses_none(tmp_path, replaced):
    target, old = tmp_path / "final", tmp_path / ".final.01234567.old"
    make_model_folder(old)
    if replaced:
        make_model_folder(target)
        (target / "model.safetensors").write_text("new")
    clear_dead_savings(target)
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert (target / "model.safetensors").read_text() == ("new" if replaced else "old")


def test_everything_that_a_saving_writes_may_be_overwritten(tmp_path):
    """Transformers and peft may come to write more; then --overwrite would refuse what it wrote itself."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    model = sparsify(tiny_llama())
    for count in range(2):
        options = {"tokenizer": tokenizer, "overwrite": bool(count), "max_shard_size": "20KB"}
        save_model(model, tmp_path / "model", method={"step": 1}, **options)
    assert (tmp_path / "model" / "model.safetensors.index.json").is_file()
    assert (tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja").is_file()


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_whole_folder_over_something(tmp_path, kind):
    target, real = tmp_path / "model", tmp_path / "real"
    make_model_folder(target if kind == "folder" else real)
    if kind == "link":
        target.symlink_to(real)
    with pytest.raises(ValueError, match="exists"), whole_folder(target):
        pytest.fail("the body must not run")
    with whole_folder(target, overwrite=True) as folder:
        (folder / "model.safetensors").write_text("new")
    assert (target / "model.safetensors").read_text() == "new"
    assert target.is_symlink() == (kind == "link")
    assert sorted(path.name for path in tmp_path.iterdir()) == (["model", "real"] if kind == "link" else ["model"])


@pytest.mark.parametrize("inside", ["", "runs"])
def test_whole_folder_refuses_to_replace_the_working_directory(tmp_path, monkeypatch, inside):
    target = tmp_path / "model"
    make_model_folder(target)
    (target / inside).mkdir(exist_ok=True)
    monkeypatch.chdir(target / inside)
    with pytest.raises(ValueError, match="holds the working directory"), whole_folder(target, overwrite=True):
        pytest.fail("the body must not run")


def test_whole_folder_over_an_empty_one(tmp_path):
    with whole_folder(tmp_path, overwrite=True) as folder:
        (folder / "model.safetensors").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_whole_folder_without_a_parent(tmp_path):
    with pytest.raises(ValueError, match="absent"), whole_folder(tmp_path / "absent" / "model"):
        pytest.fail("the body must not run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_whole_folder_keeps_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        with whole_folder(tmp_path / "model"):
            pass
    finally:
        assert os.umask(before) == mask
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o777 & ~mask


def test_write_json_leaves_nothing_half_written(tmp_path):
    path = tmp_path / "state.json"
    write_json(path, {"step": 1})
    with pytest.raises(TypeError):
        write_json(path, {"step": object()})
    assert [item.name for item in tmp_path.iterdir()] == ["state.json"]
    assert json.loads(path.read_text()) == {"step": 1}


def test_save_model(tmp_path):
    model = sparsify(tiny_llama(vocab_size=4096), backend="reference").eval()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, limits[1]))  # as good as a full disk
    try:
        with pytest.raises(OSError, match="could not write"):
            save_model(model, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
    save_model(model, tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(again(ids).logits, model(ids).logits)


if __name__ == "__main__":
    torch.set_num_threads(1)
    make_trainer(sys.argv[1], AtSave(2 * SAVE_STEPS, die)).train()
