"""The study at its smallest: rows, a table and a plot, and a second start that goes on."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

RECIPES = Path(__file__).parents[1] / "recipes"
ONLY = ["qwen/dense/", "llama/swap/", "llama/logits + layers + L1/0.01", "llama/FATReLU on swap/0.2"]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))  # as `python recipes/study.py` has it
    yield runpy.run_path(str(RECIPES / "study.py"))
    for name in ("pretrain", "study_loop", "study_measure", "study_report", "study_sharing", "study_text"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_it_runs_skips_what_is_done_and_draws(script, tmp_path, capsys):
    (tmp_path / "eval").mkdir()
    with (tmp_path / "eval" / "lambada_openai-test.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": f"She saw the {word}"}) + "\n" for word in ("sea", "cat", "dog"))
    arguments = [str(RECIPES / "study.yaml"), "--output", str(tmp_path / "out"), "--eval", str(tmp_path / "eval")]
    arguments.append("--smoke")
    script["main"]([*arguments, "--only", "llama/dense/"])
    rows = script["main"]([*arguments, "--only", *ONLY])
    assert [row["id"] for row in rows] == [
        "llama/dense/seed0",
        "qwen/dense/seed0",
        "llama/swap/seed0",
        "llama/logits + layers + L1/0.01/seed0",
        "llama/FATReLU on swap/0.2/seed0",
    ]
    dense, qwen, swap, distilled, threshold = rows
    assert dense["density"] == qwen["density"] == 1.0
    assert 0.3 < swap["density"] < 0.7
    assert threshold["density"] < swap["density"]
    assert distilled["last_log"]["twell/kl"] >= 0
    assert distilled["tokens"] == swap["tokens"] == 4 * 4 * 32
    for row in rows:
        assert 4 < row["loss"] < 7
        assert row["loss_stderr"] > 0
        assert row["tasks"]["lambada"]["rows"] == 3
        assert len(row["layers"]) == len(row["training_text"]["layers"]) == 2
        assert 0 < row["training_text"]["tokens"] <= 2**20
        assert row["training_text"]["density"] == pytest.approx(row["density"], rel=0.2)
    kept = (tmp_path / "out" / "study.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in kept] == rows
    table = (tmp_path / "out" / "study.md").read_text()
    assert len(table.splitlines()) == 2 + len(rows)
    assert (tmp_path / "out" / "study.png").stat().st_size > 5000
    capsys.readouterr()
    script["main"]([*arguments, "--list"])
    listed = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("done") for line in listed) == len(rows)


def test_every_run_has_a_name_of_its_own(script, tmp_path):
    runs = script["plan"](yaml.safe_load((RECIPES / "study.yaml").read_text()))
    assert len({run["id"] for run in runs}) == len(runs) > 40
    with pytest.raises(SystemExit):
        script["main"]([str(RECIPES / "study.yaml"), "--output", str(tmp_path)])


def test_text_is_held_out_by_documents_and_seeds_begin_alike(script, tmp_path):
    documents = [" ".join(f"word{(7 * i + j) % 50}" for j in range(40)) + f" number{i}" for i in range(12)]
    (tmp_path / "letters.txt").write_text("".join(f"{text}\n<|endoftext|>\n" for text in documents))
    study = yaml.safe_load((RECIPES / "study.yaml").read_text())
    sizes = study["smoke"]["families"]["llama"]
    study |= {"sources": ["letters"], "held_out_every": 4, "vocab_size": 400, "sequence_length": 8}
    study |= {"heldout_sequences": 5, "families": {"llama": {"model_type": "llama", **sizes}}}
    inits, texts = [], []
    for output in (tmp_path / "one", tmp_path / "two"):
        output.mkdir()
        folder, training, heldout = script["prepare"](study, tmp_path, output)
        for seed in (0, 1):
            run = {"family": "llama", "start": "init", "seed": seed}
            model = AutoModelForCausalLM.from_pretrained(script["start_of"](run, study, output, folder))
            inits.append(model.lm_head.weight)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        texts.append([tokenizer.decode(each.sequences.flatten()) for each in (training, heldout)])
    assert [torch.equal(inits[0], other) for other in inits] == [True, False, True, False]
    assert len(heldout) == 5
    held, trained = (set(re.findall(r"number(\d+)", text)) for text in reversed(texts[0]))
    assert held <= {"3", "7", "11"}
    assert {"0", "1", "2", "4"} <= trained
    assert not trained & {"3", "7", "11"}


def test_no_run_begins_after_the_time_is_over(script, tmp_path, capsys):
    arguments = [str(RECIPES / "study.yaml"), "--smoke", "--output", str(tmp_path), "--only", "llama/dense/"]
    assert script["main"]([*arguments, "--minutes", "0"]) == []
    assert "0 minutes are over; the same command goes on with llama/dense/seed0" in capsys.readouterr().out


@pytest.mark.slow
def test_processes_share_a_folder(tmp_path):
    command = [sys.executable, str(RECIPES / "study.py"), str(RECIPES / "study.yaml"), "--smoke"]
    command += ["--output", str(tmp_path), "--only", "llama/dense", "llama/swap/", "llama/FATReLU on swap/0.2"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    begun = [line for process in processes for line in process.communicate()[0].splitlines() if line.startswith("---")]
    assert [process.returncode for process in processes] == [0, 0]
    rows = [json.loads(line) for line in (tmp_path / "study.jsonl").read_text().splitlines()]
    assert len(begun) == len(rows) == len({row["id"] for row in rows}) == 7
    assert rows[0]["id"] == "llama/dense/seed0"
    assert {row["parent_loss"] for row in rows[1:]} == {rows[0]["loss"]}
    assert len((tmp_path / "study.md").read_text().splitlines()) == 2 + len(rows)


@pytest.mark.slow
def test_a_run_without_its_parent_says_so(tmp_path):
    command = [sys.executable, str(RECIPES / "study.py"), str(RECIPES / "study.yaml"), "--smoke"]
    done = subprocess.run([*command, "--output", str(tmp_path), "--only", "qwen/swap/"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "qwen/swap/seed0 begins with the model of qwen/dense/seed0; run that first"


def test_lambada_by_batches_is_lambada_one_by_one(script, tmp_path):
    import study_measure

    words = (RECIPES / "demo" / "text" / "heldout.txt").read_text().split()
    lengths = [5 + (13 * i) % 60 for i in range(90)]
    with (tmp_path / "lambada_openai-test.jsonl").open("w") as file:
        file.writelines(
            json.dumps({"text": " ".join(words[50 * i : 50 * i + n])}) + "\n" for i, n in enumerate(lengths)
        )
    model = AutoModelForCausalLM.from_pretrained(RECIPES / "demo" / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(RECIPES / "demo" / "model")
    alone = study_measure.lambada(model, tokenizer, tmp_path, 80, batch_size=1)
    assert alone["rows"] == 80
    assert 0.05 < alone["acc"] < 0.95  # else any other guesses could come to the same share
    assert study_measure.lambada(model, tokenizer, tmp_path, 80) == alone
