"""The study of a pretrained parent at its smallest: rows, tasks, a report, and second starts that go on."""

import argparse
import dataclasses
import io
import json
import lzma
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from hf_twell.cli import main as hf_twell_main
from hf_twell.models.loading import load_model, load_tokenizer
from hf_twell.recipe.chat import chat_tokens
from hf_twell.recipe.own_text import ROW_BEGINS
from hf_twell.recipe.schema import load_recipe
from tests.conftest import needs_lm_eval, tiny_llama

RECIPES = Path(__file__).parents[1] / "recipes"
YAML = RECIPES / "pretrained_study.yaml"
DENSE = "dense/0.001024M/seed0"
TASKS = ("lambada", "arc_easy", "arc_challenge", "hellaswag")
TEXT = "the cell is a small unit of life and light moves through water in every green leaf "


@pytest.fixture
def scripts(monkeypatch):
    """A script's names, by that of its file; as `python recipes/pretrained_study.py` has them."""
    monkeypatch.syspath_prepend(str(RECIPES))
    ours = [path.stem for path in RECIPES.glob("*.py")]
    yield lambda name: runpy.run_path(str(RECIPES / f"{name}.py"))
    for name in ours:
        sys.modules.pop(name, None)


@pytest.fixture
def parent(scripts, tmp_path) -> Path:
    """A random Llama with 3 layers and a tokenizer of its own."""
    tokenizer = scripts("pretrain")["train_tokenizer"]([(RECIPES / "demo/text/heldout.txt").read_text()], 400, 128)
    tiny_llama(vocab_size=400, tie_word_embeddings=True).save_pretrained(tmp_path / "parent")
    tokenizer.save_pretrained(tmp_path / "parent")
    return tmp_path / "parent"


@pytest.fixture
def eval_dir(tmp_path) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    question = {"choices": {"text": ["air", "a leaf", "water", "light"], "label": list("ABCD")}, "answerKey": "B"}
    ending = {"activity_label": "Tea", "ctx_a": "A cup stands.", "ctx_b": "it", "endings": ["a", "b", "c", "d"]}
    rows = {
        "lambada_openai-test": {"text": "She saw the sea"},
        "ARC-Easy-Test": {"id": "1", "question": "What is green?", **question},
        "ARC-Challenge-Test": {"id": "2", "question": "What grows?", **question},
        "hellaswag-validation": {"ind": 1, "split_type": "indomain", "source_id": "x", "label": "1", **ending},
        "wikitext2_raw_test_documents": {"page": TEXT * 30},
    }
    for name, row in rows.items():
        (folder / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 5)
    return folder


@pytest.fixture
def arguments(parent, tmp_path) -> list[str]:
    return [str(YAML), "--smoke", "--model", str(parent), "--output", str(tmp_path / "out")]


def full_plan(scripts) -> tuple[dict, list[dict]]:
    study = yaml.safe_load(YAML.read_text())
    return study, scripts("pretrained_plan")["plan"](study)


def test_what_is_planned(scripts, tmp_path):
    """Control and conversions as recipes, each with a name of its own; whole steps, what has not run last."""
    study, runs = full_plan(scripts)
    assert len({run["id"] for run in runs}) == len(runs) == 30
    assert [run["id"] for run in runs[:5]] == [
        "parent",
        "books/30M/seed0",
        "averaged",
        "dense/150M/seed0",
        "count/0.335/120M/seed0",
    ]
    assert runs[-1]["id"] == "chats of the parent/0.098/25M/seed0"
    functions = {**scripts("pretrained_plan"), **scripts("pretrained_runs")}
    trained = [run for run in runs if functions["is_trained"](run)]
    recipes = {run["id"]: functions["recipe_of"](run, study, "parent.gguf", tmp_path) for run in trained}
    assert len(recipes) == 28
    control, count = recipes["books/30M/seed0"], recipes["count/0.0195/120M/seed0"]
    assert (control.model, control.relu, control.distill) == ("parent.gguf", False, None)
    assert control.training["max_steps"] == 30_000_000 // 65_536
    assert control.training["gradient_accumulation_steps"] == 4
    assert count.model == count.distill["parent"] == str(tmp_path / "runs" / "averaged" / "final")
    assert (count.term, count.layer_shares, count.distill["logits"]) == ("count", "free", 1.0)
    assert count.training["max_steps"] == 120_000_000 // 16_384
    assert count.training["gradient_accumulation_steps"] == 1
    earlier = recipes["earlier method/0.1/30M/seed0"]
    assert (earlier.model, earlier.distill, earlier.term) == ("parent.gguf", None, "l1")
    assert {functions["needs"](run, study) for run in runs} == {None, "books/30M/seed0", "averaged"}


def test_the_recipe_is_the_row_of_the_study(scripts, tmp_path):
    """recipes/smollm2-135m.yaml says that it has run: as the study's row, which it must be but for places and text."""
    study, runs = full_plan(scripts)
    run = next(run for run in runs if run["id"] == "count/0.098/120M/seed0")
    row = scripts("pretrained_runs")["recipe_of"](run, study, "parent.gguf", tmp_path)
    text = RECIPES / "demo" / "text" / "heldout.txt"
    recipe = load_recipe(RECIPES / "smollm2-135m.yaml", [f"{name}=[{text}]" for name in ("train", "heldout")])
    row = dataclasses.replace(
        row, **{name: getattr(recipe, name) for name in ("model", "output_dir", "train", "heldout")}
    )
    assert row.distill.pop("parent") == str(tmp_path / "runs" / "averaged" / "final"), "which it begins with, too"
    assert (row.training.pop("seed"), row.training.pop("report_to")) == (0, [])
    assert recipe == row


def test_what_cannot_be_run_is_said(scripts, tmp_path):
    study, runs = full_plan(scripts)
    recipe_of, count = scripts("pretrained_runs")["recipe_of"], runs[4]
    for change, message in (
        ({"target_densty": 0.1}, "unknown key 'target_densty'; did you mean 'target_density'"),
        ({"term": "l0"}, "choose one of 'l1', 'count'"),
        ({"tokens_per_step": 20_000}, "a multiple of 16384 a step"),
        ({"tokens": 1000}, "give tokens of one step at least"),
        ({"start": "dens"}, "no run with a model has the name 'dens'"),
    ):
        with pytest.raises(ValueError, match=message):
            recipe_of({**count, **change}, study, "parent.gguf", tmp_path)


def test_what_is_needed_is_asked_for(scripts, tmp_path, capsys):
    main = scripts("pretrained_study")["main"]
    output = ["--output", str(tmp_path)]
    main([str(YAML), *output, "--list"])
    assert len(capsys.readouterr().out.splitlines()) == 30
    for given, wanted in (([], "--model is needed"), (["--model", "m"], "--text is needed")):
        with pytest.raises(SystemExit):
            main([str(YAML), *output, *given])
        assert wanted in capsys.readouterr().err


def row(name: str, losses: tuple, accuracy: float | None = None, **more) -> dict:
    """A row by hand; the four tasks have one accuracy."""
    tasks = {} if accuracy is None else {task: {"acc": accuracy, "stderr": 0.01, "rows": 9} for task in TASKS}
    start = {} if name == "parent" else {"start": "dense", "seed": 0}
    density = more.get("density", 1.0)
    measured = {"density": density, "layers": [{"density": density / 2}, {"density": density * 1.5}]}
    losses = dict(zip(("a", "b"), losses, strict=True))
    return {"id": name, "name": name, **start, "losses": losses, "tasks": tasks, "tokens_read": 5, "minutes": 1} | (
        measured | more
    )


def test_excess_and_kept(scripts, tmp_path):
    report = scripts("pretrained_report")
    parent, control = row("parent", (2.0, 4.0), 0.4), row("dense", (3.0, 3.0), 0.4375, relu=False)
    count = row("count", (2.2, 3.6), 0.3125, density=0.1, target_density=0.1)
    unscored = row("natural", (2.1, 3.0), density=0.4)
    rows = [parent, control, count, unscored]
    excess, kept = ([report[key](each, rows) for each in rows] for key in ("excess", "kept"))
    assert excess == pytest.approx([(0 + 1 / 3) / 2, (0.5 + 0) / 2, (0.1 + 0.2) / 2, (0.05 + 0) / 2])
    assert kept[:3] == pytest.approx([(0.4 - 0.1875) / 0.25, 1.0, 0.5])
    assert kept[3] is None
    few = json.loads(json.dumps(count))
    few["tasks"]["hellaswag"]["rows"] = 5
    assert report["kept"](few, rows) is None, "on other rows than the control"
    assert report["excess"](count, [count, parent]) is report["kept"](count, [count, parent]) is None

    longer = row("dense longer", (2.0, 2.4), 0.5, relu=False, tokens_read=100)
    many = {**count, "tokens_read": 80}
    assert report["excess"](many, [*rows, longer]) == pytest.approx((0.1 + 0.5) / 2), "of as many tokens"
    assert report["kept"](many, [*rows, longer]) == pytest.approx(0.4)
    assert report["excess"](count, [*rows, longer]) == excess[2]
    unread = {**parent, "tokens_read": 0}
    assert report["kept"](unread, [*rows, longer]) == pytest.approx(0.2125 / 0.3125), (
        "read nothing: beside the longest control"
    )

    worse = {**longer, "id": "dense longest", "losses": {"a": 2.0, "b": 2.5}, "tokens_read": 120}
    assert report["control_of"]([*rows, worse, longer], {**count, "tokens_read": 115}) == longer, "worse by more tokens"
    assert report["excess"](worse, [*rows, longer, worse]) == pytest.approx((0 + 0.1 / 2.4) / 2)

    report["report"](rows, tmp_path)
    table = (tmp_path / "study.md").read_text().splitlines()
    assert len(table) == 2 + len(rows)
    assert "| +15.00 % |" in table[4]
    assert "| 50.0 % |" in table[4]
    assert "5.00 % to 15.00 %" in table[4]
    assert "conversations" not in table[0]
    rows[2]["chats_loss"] = 1.25
    chats = report["table"](rows).splitlines()
    assert "| loss: the parent's conversations |" in chats[0]
    assert "| +15.00 % | 1.2500 |" in chats[4]
    del rows[2]["chats_loss"]
    with_points = (tmp_path / "study.png").stat().st_size
    report["report"]([parent], tmp_path)
    assert 5000 < (tmp_path / "study.png").stat().st_size != with_points


def test_what_more_tokens_buy_is_fitted(scripts, tmp_path):
    report = scripts("pretrained_report")
    rows = [row("parent", (2.0, 4.0)), row("dense", (2.5, 3.0), relu=False)]
    for tokens in (4, 16, 64):
        above = 1 + 0.4 * tokens**-0.5
        density = 0.095 + tokens / 10_000  # all are about 10 %
        rows.append(row("count", (2 * above, 3 * above), density=density, target_density=0.1, tokens=tokens * 10**6))
    rows.append(row("count", (2.1, 3.1), density=0.05, target_density=0.05, tokens=10**6))
    (fit,) = report["token_fits"](rows)
    assert (fit["factor"], fit["power"], fit["needed"]) == pytest.approx((0.4, -0.5, 400e6))
    report["report"](rows, tmp_path)
    said = "- count at about 10%, 4, 16, 64 million tokens of its own: excess 40.0 % x (T / 1M)^-0.50; "
    assert f"{said}2 % would take 400M\n" in (tmp_path / "study.md").read_text()
    three_panels = (tmp_path / "study.png").stat().st_size
    report["report"](rows[:4], tmp_path)
    assert not report["token_fits"](rows[:4])
    assert (tmp_path / "study.png").stat().st_size < three_panels
    for each, loss in zip(rows[2:5], (2.2, 2.3, 2.4), strict=True):
        each["losses"]["a"] = loss
        each["losses"]["b"] = 1.5 * loss
    assert "(T / 1M)^0" in report["fit_lines"](rows)
    assert "does not fall" in report["fit_lines"](rows)


def test_figures_are_drawn_from_rows(scripts, tmp_path, monkeypatch):
    """`make figures` draws what lies in model_cards/ too."""
    monkeypatch.syspath_prepend(str(RECIPES.parent / "docs"))
    folder = tmp_path / "model_cards" / "smollm2"
    folder.mkdir(parents=True)
    (folder / "pretrained.jsonl").write_text(json.dumps(row("parent", (2.0, 4.0), 0.4)) + "\n")
    drawn = runpy.run_path(str(RECIPES.parent / "docs" / "figures.py"))["main"](tmp_path)
    assert drawn == [folder / "study.md", folder / "study.png"]
    assert all(path.is_file() for path in drawn)


def test_a_run_begins_when_the_model_that_it_needs_is_made(scripts, tmp_path):
    """Before that one's row, which waits for its tasks' scores."""
    sharing = scripts("study_sharing")
    turns = [sharing["Turn"]("dense", None), sharing["Turn"]("mean", "dense")]
    with sharing["next_turn"](turns, set, tmp_path / "turns", lambda id: False) as first:
        assert first.id == "dense"
        with sharing["next_turn"](turns, set, tmp_path / "turns", lambda id: id == "dense") as second:
            assert second.id == "mean"


def test_a_model_that_another_process_makes_is_waited_for(scripts, tmp_path):
    """And not made twice: neither while it is under way there, nor once it is there."""
    loop = scripts("study_loop")
    sys.modules["study_sharing"].WAIT_S = 0
    elsewhere, looks, made = sys.modules["study_sharing"].Turn("books", None), iter([set(), {"books"}]), []
    assert elsewhere.take(tmp_path / "turns")
    options = {"needs": lambda run: None, "is_made": lambda id: False, "minutes": 1, "started": time.monotonic()}
    loop["in_turns"]([{"id": "books"}], tmp_path, made.append, done=lambda: next(looks), **options)
    elsewhere.leave()
    looks = iter([set(), {"books"}, {"books"}])  # made between the first look and the turn
    loop["in_turns"]([{"id": "books"}], tmp_path, made.append, done=lambda: next(looks), **options)
    assert made == []


@pytest.mark.slow
def test_models_are_made_without_rows(scripts, arguments, tmp_path, capsys):
    """Where their rows are there already, too; what begins with one then runs."""
    main, output, averaged = scripts("pretrained_study")["main"], tmp_path / "out", tmp_path / "out/runs/averaged"
    output.mkdir()
    known = [{**row(name, (3.0, 4.0)), "id": id} for name, id in (("dense", DENSE), ("averaged", "averaged"))]
    for each in known:
        each["losses"] = {"heldout": 3.0}
    (output / "pretrained.jsonl").write_text("".join(json.dumps(each) + "\n" for each in known))
    count = ["--only", "count/0.1/0.000512M"]
    with pytest.raises(SystemExit, match="failed, for what stands above: count"):
        main([*arguments, *count])
    assert "make it with --models-only --only averaged" in capsys.readouterr().err
    models = ["--models-only", "--only", "averaged"]
    for again, made in ((False, [DENSE, "averaged"]), (False, []), (True, ["averaged"])):
        if again:
            shutil.rmtree(averaged / "final")
        assert main([*arguments, *models]) == known
        assert [line[4:] for line in capsys.readouterr().out.splitlines() if line.startswith("---")] == made
        assert (averaged / "final" / "config.json").is_file()
    assert not list(output.glob("runs/*/checkpoint-*"))
    rows = main([*arguments, *count])
    assert rows[:2] == known
    assert [each["tokens_read"] for each in rows[2:]] == [1536]


def test_own_text_is_a_share_of_all(scripts, parent, tmp_path):
    study = {"training": {"use_cpu": True}, "own_text": {"tokens": 200, "length": 16, "batch_size": 4, "share": 0.25}}
    train = torch.full((30, 16), 7)
    begun = json.dumps({"text": "one\u2028document", "tokens": 10, "batch": 0}, ensure_ascii=False)
    (tmp_path / "own.jsonl").write_text(f"{ROW_BEGINS}{begun[1:]}\n", encoding="utf-8")
    with_own_text = scripts("pretrained_text")["with_own_text"]
    mixed = with_own_text(train, study, str(parent), tmp_path)
    assert mixed.shape == (40, 16)
    assert torch.equal(mixed[:30], train)
    (tmp_path / "own.jsonl").unlink()
    assert torch.equal(with_own_text(train, study, str(parent), tmp_path), mixed), "made once"


def test_conversations_are_a_share_of_own_text_and_some_are_held_out(scripts, parent, tmp_path):
    tokenizer = load_tokenizer(parent)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(parent)
    own = {"length": 16, "batch_size": 4}
    study = {"training": {"use_cpu": True}, "heldout_sequences": 100}
    study |= {"own_text": {"tokens": 200, "share": 0.5, **own}, "chats": {"tokens": 900, **own}}
    words = [
        {"role": "user", "content": "light"},
        {"role": "assistant", "content": "moves through water in every leaf"},
    ]
    row = json.dumps({"messages": words, "tokens": 10, "batch": 0})
    (tmp_path / "chats.0.jsonl").write_text(f"{row}\n" * 90)
    functions = scripts("pretrained_text")
    assert functions["heldout_chats"](study, tmp_path) is None
    train = torch.full((40, 16), 7)
    mixed = functions["with_own_text"](train, study, str(parent), tmp_path, 0.25)
    assert mixed.shape == (80, 16)
    assert torch.equal(mixed[:40], train)
    said = chat_tokens(tokenizer, words)[0] * 90
    chats = torch.tensor(said[: len(said) // 16 * 16]).view(-1, 16)
    held = functions["heldout_chats"](study, tmp_path)
    count = -(-len(chats) // 50)
    assert torch.equal(held, chats[:count])
    assert torch.equal(mixed[70:], chats[count : count + 10])


def test_the_mean_of_two_models(scripts, parent, tmp_path):
    average, main = (scripts("average")[name] for name in ("average", "main"))
    other = tiny_llama(vocab_size=400, tie_word_embeddings=True)
    for weight in other.parameters():
        weight.data.mul_(3)
    other.save_pretrained(tmp_path / "other")
    shutil.copy(parent / "tokenizer.json", tmp_path / "other")
    main([str(tmp_path / "other"), str(parent), str(tmp_path / "mean"), "--share", "0.25"])
    saved, _ = load_model(tmp_path / "mean", device="cpu")
    first, _ = load_model(parent, device="cpu")
    for weight, mean in zip(first.parameters(), saved.parameters(), strict=True):
        torch.testing.assert_close(mean, 2.5 * weight)
    tiny_llama(vocab_size=400, num_hidden_layers=2).save_pretrained(tmp_path / "small")
    shutil.copy(parent / "tokenizer.json", tmp_path / "small")
    tiny_llama(vocab_size=400, hidden_act="gelu").save_pretrained(tmp_path / "gelu")
    shutil.copy(parent / "tokenizer.json", tmp_path / "gelu")
    assert hf_twell_main(["sparsify", str(parent), str(tmp_path / "sparse")]) == 0
    for arguments, message in (
        ((tmp_path / "small", parent), "are unlike models: .* differ; average two alike"),
        ((tmp_path / "gelu", parent), "gelu computes gelu, .*parent silu; give two models with the same activation"),
        ((tmp_path / "sparse", parent), "sparse is sparse .* give dense models, and convert the mean"),
        ((parent, tmp_path / "sparse"), "sparse is sparse .* give dense models, and convert the mean"),
        ((parent, parent, 2.0), "share=2.0; give the parent's share, from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            average(*arguments)


@pytest.mark.slow
def test_the_mean_is_refused_in_one_line(parent, tmp_path):
    """And an existing folder is replaced where that is asked for, as its message says."""

    def run(*arguments) -> subprocess.CompletedProcess:
        command = [sys.executable, RECIPES / "average.py", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(RECIPES.parent), "HF_HUB_OFFLINE": "1"}
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    for arguments, message in (
        ((parent, parent, parent), r"parent exists; .* \(--overwrite\)"),
        ((tmp_path / "absent", parent, tmp_path / "mean"), "cannot load a model from .*absent"),
        ((parent, parent, tmp_path / "mean", "--share", "2"), "share=2.0; give the parent's share, from 0 to 1"),
    ):
        done = run(*arguments)
        assert done.returncode == 1
        assert re.match(f"average.py: error: .*{message}", done.stderr.splitlines()[-1])
        assert "Traceback" not in done.stderr
    shutil.copytree(parent, tmp_path / "mean")
    done = run(parent, parent, tmp_path / "mean", "--overwrite")
    assert done.returncode == 0, done.stderr
    load_model(tmp_path / "mean", device="cpu")
    done = run(parent, parent, parent, "--overwrite")
    assert done.returncode == 1
    assert "is the model itself" in done.stderr.splitlines()[-1]


@pytest.mark.slow
@needs_lm_eval
def test_it_runs_skips_what_is_done_and_draws(scripts, arguments, eval_dir, tmp_path, capsys):
    main, output = scripts("pretrained_study")["main"], tmp_path / "out"
    rows = main([*arguments, "--eval", str(eval_dir)])
    assert [row["id"] for row in rows] == [
        "parent",
        DENSE,
        "averaged",
        "count/0.1/0.000512M/seed0",
        "count/0.1/0.001024M/seed0",
        "earlier method/0.1/0.000512M/seed0",
    ]
    parent, dense, averaged, count, _, earlier = rows
    dense_ones = (parent, dense, averaged)
    assert min(row["density"] for row in dense_ones) > 0.98, "SiLU of random weights is seldom exactly 0"
    assert [row["tokens_read"] for row in rows] == [0, 1024, 1024, 1536, 2048, 512]
    own = [json.loads(line) for line in (output / "own.jsonl").read_text().splitlines()]
    assert sum(row["tokens"] for row in own) >= 500
    assert count["loss_before"] > 0
    assert {"twell/kl", "twell/density"} <= count["last_log"].keys()
    assert "twell/kl" not in earlier["last_log"]
    for row in rows:
        assert row["losses"].keys() == row["heldout_tokens"].keys() == {"heldout", "wikitext"}
        assert all(3 < loss < 20 for loss in row["losses"].values())
        assert {task: score["rows"] for task, score in row["tasks"].items()} == dict.fromkeys(TASKS, 4)
        assert row["unscored"] == []
        assert len(row["layers"]) == 3
        assert row["hardware"] == "CPU"
    assert count["settings"]["max_steps"] == count["last_log"]["step"] == 4
    assert not list(output.glob("runs/*/checkpoint-*"))
    assert [json.loads(line) for line in (output / "pretrained.jsonl").read_text().splitlines()] == rows
    assert len((output / "study.md").read_text().splitlines()) == 2 + len(rows)
    assert (output / "study.png").stat().st_size > 5000
    capsys.readouterr()
    assert main(arguments) == rows
    assert "---" not in capsys.readouterr().out, "nothing is trained again"
    main([*arguments, "--list"])
    assert capsys.readouterr().out.count("done ") == len(rows)


@pytest.mark.slow
@needs_lm_eval
def test_tasks_are_scored_later(scripts, arguments, eval_dir, tmp_path, monkeypatch, capsys):
    """On a machine without lm-eval LAMBADA alone; the folder has all that another machine needs."""
    main, arguments = scripts("pretrained_study")["main"], [*arguments, "--only", "parent", "dense"]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "lm_eval", None)
        rows = main([*arguments, "--eval", str(eval_dir)])
        assert [row["unscored"] for row in rows] == [list(TASKS[1:])] * 2
        with pytest.raises(SystemExit):
            main([*arguments, "--score"])
        assert "--score needs lm-eval" in capsys.readouterr().err
    shutil.rmtree(eval_dir)
    (tmp_path / "out").rename(tmp_path / "carried")
    arguments[arguments.index("--output") + 1] = str(tmp_path / "carried")
    scored = main([*arguments, "--score"])
    for before, after in zip(rows, scored, strict=True):
        assert {task: score["rows"] for task, score in after["tasks"].items()} == dict.fromkeys(TASKS, 4)
        assert after["unscored"] == []
        assert after["scored_later"]["hardware"] == "CPU"
        assert {key: after[key] for key in before.keys() - {"tasks", "unscored"}} == {
            key: before[key] for key in before.keys() - {"tasks", "unscored"}
        }
    assert main(arguments) == scored
    shutil.rmtree(tmp_path / "carried" / "runs")
    (tmp_path / "carried" / "pretrained.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["unscored"] for row in main([*arguments, "--score"])] == [[], list(TASKS[1:])]
    assert "dense/0.001024M/seed0: its model is no longer in" in capsys.readouterr().out


@pytest.mark.slow
def test_one_that_fails_leaves_the_others(scripts, arguments, tmp_path, capsys):
    """Without --eval: losses on the sources alone; a run that fails is named, those without it go on."""
    study = yaml.safe_load(YAML.read_text())
    study["smoke"]["runs"][1]["training"]["learning_rate"] = 1e30
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    main = scripts("pretrained_study")["main"]
    with pytest.raises(SystemExit, match=r"dense/0\.001024M/seed0; the same command tries again"):
        main([str(tmp_path / "study.yaml"), *arguments[1:]])
    rows = [json.loads(line) for line in (tmp_path / "out" / "pretrained.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows] == ["parent", "earlier method"]
    assert rows[0]["unscored"] == list(TASKS)
    assert rows[0]["losses"].keys() == {"heldout"}
    assert "training diverged" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_checkpoint(scripts, arguments, tmp_path):
    study = yaml.safe_load(YAML.read_text())
    study["smoke"]["runs"][1]["tokens"] = 256 * 100
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    arguments = [str(tmp_path / "study.yaml"), *arguments[1:], "--only", "dense"]
    process = subprocess.Popen([sys.executable, str(RECIPES / "pretrained_study.py"), *arguments])
    checkpoints = tmp_path / "out" / "runs"
    while process.poll() is None and not list(checkpoints.glob("*/checkpoint-*/twell_state.json")):
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    (row,) = scripts("pretrained_study")["main"](arguments)
    assert row["resumed"]
    assert row["last_log"]["step"] == 100


def test_own_text_that_several_processes_have_written(scripts, parent, tmp_path):
    """It counts: only what is missing is sampled, and all of it is read."""
    with_own_text = scripts("pretrained_text")["with_own_text"]
    settings = {"tokens": 300, "length": 32, "batch_size": 4, "share": 0.5}
    study = {"own_text": settings, "training": {"use_cpu": True}}
    for part in ("a", "b"):
        (tmp_path / part).mkdir()
        rows = [{"text": TEXT * 2, "tokens": 100, "batch": 0}] * (2 if part == "a" else 1)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / part / "own.0.jsonl").write_text(text)
        (tmp_path / part / "own.1.jsonl").write_text(text)
        train = torch.zeros(8, 16, dtype=torch.long)
        mixed = with_own_text(train, study, str(parent), tmp_path / part)
        assert mixed.shape == (16, 16)
    assert not (tmp_path / "a" / "own.jsonl").exists(), "400 tokens were there"
    missing = [json.loads(line) for line in (tmp_path / "b" / "own.jsonl").read_text().splitlines()]
    assert 100 <= sum(row["tokens"] for row in missing) < 100 + 4 * 32


@pytest.fixture
def chained(parent, tmp_path):
    """What `study.sh COMMAND...` prints, for a small study on a CPU whose pieces lie in tmp_path/pieces."""
    study = yaml.safe_load(YAML.read_text())
    study |= {**study.pop("smoke"), "sources": ["books"], "sequence_length": 32}
    count = {**study.pop("conversion"), "name": "count", "target_density": 0.1, "tokens": 256}
    books = {**study.pop("control"), "name": "books", "tokens": 512, "tokens_per_step": 256}
    study["runs"] = [books, {"name": "averaged", "start": "books", "average": 0.3}, count]
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    (tmp_path / "pieces").mkdir()
    text = io.BytesIO()
    tokens = torch.randint(0, 400, (60, 32), dtype=torch.int32)
    torch.save({"train": tokens, "texts": {"books": tokens[:8]}}, text)
    (tmp_path / "pieces" / "text.pt.xz").write_bytes(lzma.compress(text.getvalue()))
    known = {**row("averaged", (3.0, 4.0)), "losses": {"books": 3.0}}
    (tmp_path / "pieces" / "pretrained.jsonl").write_text(json.dumps(known) + "\n")
    places = {"LAB": tmp_path, "STUDY": tmp_path / "study.yaml", "MODEL": parent, "OUT": tmp_path, "SAMPLERS": 1}
    environment = {**os.environ, **{name: str(value) for name, value in places.items()}}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"

    def run(*command: str) -> str:
        script = [str(RECIPES / "experiments" / "study.sh"), *command]
        return subprocess.run(
            script, cwd=RECIPES.parent, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    return run


@pytest.mark.slow
def test_a_chain_from_pieces_to_rows(scripts, chained, tmp_path):
    """On another machine, with one command and one that waits; a row was there, and its model was not."""
    with pytest.raises(subprocess.CalledProcessError) as early:
        chained("chain", "0", "count")
    assert "still to come" in early.value.output
    chained("unpack", str(tmp_path / "pieces"))
    chained("chain", "0,1", "count")
    told = chained("watch", "100")
    known, count = [json.loads(line) for line in (tmp_path / "pretrained.jsonl").read_text().splitlines()]
    assert (known["id"], count["id"], count["tokens_read"]) == ("averaged", "count/0.1/0.000256M/seed0", 512 + 256)
    log = (tmp_path / "logs" / "chain").read_text().splitlines()
    milestones = [line.split(" ", 1)[1].split(" after")[0] for line in log]
    assert milestones[:2] == ["own.0: begun on GPU 1", "models: begun on GPU 0"]
    assert set(milestones[2:4]) == {"own.0: done", "models: done"}
    assert milestones[4:] == ["count: begun on GPU 0", "count: done", "all have ended"]
    assert all(line in told for line in log)
    assert "failed" not in told
    assert not (tmp_path / "out" / "own.jsonl").exists(), "the samplers wrote all"
    functions, study = scripts("pretrained_chain"), yaml.safe_load((tmp_path / "study.yaml").read_text())
    args = argparse.Namespace(gpus=["0", "1"], samplers=2, model="m", study="s", output=tmp_path / "out")
    args.rows = ["count", "averaged"]
    assert functions["stages"](study, args) == [], "all is there"
    (tmp_path / "out" / "pretrained.jsonl").unlink()
    assert [[step[:2] for step in stage] for stage in functions["stages"](study, args)] == [
        [("count", "0"), ("averaged", "1")]
    ]
    (tmp_path / "out" / "own.pt").unlink()
    shutil.rmtree(tmp_path / "out" / "runs")
    first, _ = functions["stages"](study, args)
    assert [step[:2] for step in first] == [("own.0", "1"), ("own.1", "1"), ("models", "0")]
    assert first[2][2][-2:] == ["books/0.000512M/seed0", "averaged"]
    study["runs"][0]["own_text"] = True
    assert [len(stage) for stage in functions["stages"](study, args)] == [2, 1, 2], "the books' model reads it, too"
    args.rows = ["cuont"]
    with pytest.raises(SystemExit, match="no run's id contains 'cuont'"):
        functions["stages"](study, args)
