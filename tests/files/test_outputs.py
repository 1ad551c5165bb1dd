"""What commands write: never over what they read or what is another's, and never lost after the work."""

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from hf_twell.files.folders import check_target, whole_folder
from tests.paths import DEMO
from tests.train.test_checkpoints import make_model_folder


def mount(*arguments) -> None:
    if shutil.which("mount") is None or subprocess.run(["mount", *map(str, arguments)], capture_output=True).returncode:
        pytest.skip("only root may mount, and not everywhere")


@pytest.fixture(params=["tmpfs", "bind"])
def mounted(request, tmp_path):
    """A folder that is a mount point: of a file system of its own, or of a part of the same one."""
    folder, other = tmp_path / "a mount", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    mount(*(("-t", "tmpfs", "none") if request.param == "tmpfs" else ("--bind", other)), folder)
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_mount_point_is_refused_before_the_work_and_takes_folders(mounted, error_line):
    for overwrite in (False, True):
        says = r"a mount is a mount point, .*; name a folder in it, such as .*/a mount/m"
        with pytest.raises(ValueError, match=says):
            check_target(mounted, overwrite=overwrite)
    assert "is a mount point" in error_line("sparsify", "absent", mounted), "before a model is loaded"
    with whole_folder(mounted / "model") as folder:
        (folder / "config.json").write_text("{}")
    assert [path.name for path in mounted.iterdir()] == ["model"]


def test_a_run_whose_final_model_would_lie_on_a_mount_point_is_refused(tmp_path, error_line):
    final = tmp_path / "out" / "final"
    final.mkdir(parents=True)
    mount("-t", "tmpfs", "none", final)
    try:
        for options in ([], ["--overwrite"]):
            line = error_line("train", DEMO.with_suffix(".yaml"), f"output_dir={tmp_path / 'out'}", *options)
            assert "is a mount point" in line
    finally:
        subprocess.run(["umount", final], check=True)


def test_work_outlasts_a_place_that_cannot_be_taken(tmp_path):
    """A folder in an image's layer, which a container may write to and not rename."""
    for name in ("layer", "upper", "work", "seen"):
        (tmp_path / name).mkdir()
    make_model_folder(tmp_path / "layer" / "model")
    layers = f"lowerdir={tmp_path / 'layer'},upperdir={tmp_path / 'upper'},workdir={tmp_path / 'work'}"
    mount("-t", "overlay", "-o", f"{layers},redirect_dir=off", "none", tmp_path / "seen")
    try:
        target = tmp_path / "seen" / "model"
        with pytest.raises(ValueError, match=r"cannot be replaced: .*What was to lie there is in .*model-") as caught:  # noqa: SIM117
            with whole_folder(target, overwrite=True) as folder:
                (folder / "model.safetensors").write_text("new")
        assert (target / "model.safetensors").read_text() == "old"
        assert Path(str(caught.value).rpartition(" ")[2], "model.safetensors").read_text() == "new"
        assert len(list(target.parent.iterdir())) == 2
    finally:
        subprocess.run(["umount", tmp_path / "seen"], check=True)


@pytest.mark.parametrize("command", ["eval", "inspect"])
def test_results_are_written_over_nothing_that_is_read(command, tmp_path, error_line):
    model, texts = tmp_path / "model", tmp_path / "texts"
    make_model_folder(model)
    texts.mkdir()
    for path in (model / "weights.gguf", texts / "ARC-Easy-Test.jsonl", texts / "notes.txt", model / "README.md"):
        path.write_text("old")
    read = ["--text", str(texts / "notes.txt")] + (["--data-dir", str(texts)] if command == "eval" else [])
    given = {
        model: [model / "config.json", model / "model.safetensors", model / "weights.gguf", model / "README.md"],
        model / "weights.gguf": [model / "weights.gguf"],
        "absent/name": [texts / "notes.txt", *([texts / "ARC-Easy-Test.jsonl"] if command == "eval" else [])],
    }
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name, outputs in given.items():
        for output in outputs:
            line = error_line(command, name, *read, "--output", output)
            assert line.endswith(f"--output {output} is read itself, and would be lost; name another file")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    (model / "scores.json").write_text("{}")
    line = error_line(command, model, *read, "--output", model / "scores.json")
    assert "is read itself" not in line, "a result of before may be replaced"


def test_an_input_is_not_replaced(tmp_path):
    model = tmp_path / "model"
    make_model_folder(model)
    (model / "tokenizer-text.json").write_text("{}")
    (tmp_path / "link").symlink_to(model)
    for item, says in ((tmp_path / "link", "is the model itself"), (model / "tokenizer-text.json", "is where .* lies")):
        with pytest.raises(ValueError, match=f"{says}, which would be lost"):
            check_target(model, overwrite=True, inputs=["a/name", None, str(item)])
    assert check_target(model, overwrite=True, inputs=["a/name", None, str(tmp_path)]) == model


def test_a_run_does_not_replace_the_model_that_it_begins_with(tmp_path, error_line):
    final = tmp_path / "out" / "final"
    shutil.copytree(DEMO / "model", final, ignore=shutil.ignore_patterns("README.md", "pretrain.json"))
    changes = [f"output_dir={final.parent}", "--overwrite"]
    for change in (f"model={final}", f"distill={{parent: {final}}}"):
        line = error_line("train", DEMO.with_suffix(".yaml"), change, *changes)
        assert "is the model itself, which would be lost" in line


def test_a_run_leaves_the_checkpoints_of_another_training_alone(tmp_path, error_line):
    checkpoint = tmp_path / "out" / "checkpoint-20"
    make_model_folder(checkpoint)
    (checkpoint / "trainer_state.json").write_text("{}")
    line = error_line("train", DEMO.with_suffix(".yaml"), f"output_dir={checkpoint.parent}", "--overwrite")
    assert "checkpoint-20 is from another training, or its saving was interrupted; this one would write over it" in line


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("bench.jsonl", '{"text": "mine"}\n', "bench.jsonl, line 1 is no row of hf-twell bench; name another folder"),
        ("bench.jsonl", '{"bench": "ffn"}\n{"ben', "bench.jsonl, line 2 is no JSON"),
        ("bench.jsonl", '{"bench": "ffn"}', "bench.jsonl ends within a line"),
        ("bench.png", "mine", "bench.png lies there without rows, so it is another's"),
    ],
)
def test_bench_adds_to_its_checkpoint_rows_alone(name, content, says, tmp_path, error_line):
    pytest.importorskip("matplotlib")
    (tmp_path / name).write_text(content)
    assert says in error_line("bench", "ffn", "--tokens", "1", "--device", "cpu", "--output", tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, content)]


def test_pretraining_writes_over_nothing(tmp_path, capsys):
    script = runpy.run_path(str(DEMO.parent / "pretrain.py"))
    (tmp_path / "train.txt").write_text("mine")
    given = [str(DEMO / "pretrain.yaml"), "--text", str(tmp_path), "--output"]
    for output, bundle in ((tmp_path, tmp_path / "new"), (tmp_path / "new", tmp_path)):
        with pytest.raises(SystemExit):
            script["main"]([*given, str(output), "--bundle", str(bundle)])
        assert "exists, and would be written over" in capsys.readouterr().err.splitlines()[-1]


def test_an_average_does_not_replace_what_it_is_made_of(tmp_path, capsys):
    model = tmp_path / "model"
    make_model_folder(model)
    script = runpy.run_path(str(DEMO.parent / "average.py"))
    for pair in ((str(model), "absent/name"), ("absent/name", str(model))):
        with pytest.raises(SystemExit, match="1"):
            script["main"]([*pair, str(model), "--overwrite"])
        assert "is the model itself, which would be lost" in capsys.readouterr().err
