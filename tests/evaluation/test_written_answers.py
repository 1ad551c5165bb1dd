"""Tasks whose answers a model writes: GSM8K, and HumanEval with its programs confined."""

import copy
import itertools
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_twell
from hf_twell.cli.eval import format_table
from hf_twell.evaluation import sandbox
from hf_twell.evaluation.humaneval import _run_fenced, _run_plain
from hf_twell.evaluation.tasks import load_tasks
from hf_twell.files.folders import save_model
from tests.conftest import finished, needs_lm_eval, shared_path
from tests.evaluation import test_evaluation
from tests.evaluation.test_evaluation import write_rows

pytestmark = pytest.mark.usefixtures("one_thread")
model, tokenizer = test_evaluation.model, test_evaluation.tokenizer  # fixtures

confines = pytest.mark.skipif(sys.platform != "linux", reason="programs are confined by Linux")
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant>{% endif %}"
GSM8K = [("How much is 2 + 16?", "It is 2+16=<<2+16=18>>18.\n#### 18"), ("How much is 900 + 99?", "#### 999")]
PROBLEMS = [
    {"prompt": 'def one():\n    """Give 1."""\n', "test": "def check(f):\n    assert f() == 1\n", "entry_point": "one"},
    {"prompt": 'def two():\n    """Give 2."""\n', "test": "def check(f):\n    assert f() == 2\n", "entry_point": "two"},
]


@pytest.fixture
def data_dir(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_rows(folder / "gsm8k-test.jsonl.xz", [{"question": q, "answer": a} for q, a in GSM8K])
    write_rows(folder / "humaneval.jsonl.xz", PROBLEMS)
    return folder


def writer(tokenizer, after: str, *pieces: str, context: int = 8192):
    """A model and tokenizer that write `pieces` after a prompt that ends with `after`; the prompts are kept."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(list(pieces))
    tokenizer.chat_template = CHAT
    size = len(tokenizer) + len(tokenizer) % 2
    sizes = {"hidden_size": size, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(**sizes, vocab_size=size, max_position_embeddings=context, bos_token_id=0, eos_token_id=1)
    model = LlamaForCausalLM(config).eval()
    layer = model.model.layers[0]
    chain = [tokenizer(after)["input_ids"][-1], *tokenizer.convert_tokens_to_ids(list(pieces)), 1]
    with torch.no_grad():
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight, model.lm_head.weight):
            weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        for last, following in itertools.pairwise(chain):
            model.lm_head.weight[following, last] = 1
    model.prompts = []

    def keep(_, args, options):
        if options["input_ids"].shape[1] > 1:
            model.prompts += [tokenizer.decode(row, skip_special_tokens=True) for row in options["input_ids"]]

    model.register_forward_pre_hook(keep, with_kwargs=True)
    return model, tokenizer


@needs_lm_eval
def test_gsm8k_with_its_own_examples(tokenizer, data_dir):
    demo = writer(tokenizer, "A:", " So 2+16=18. The answer is 18.", "\n\nQ: And")
    options = {"data_dir": data_dir, "batch_size": 2, "log_samples": True}
    task = hf_twell.evaluate(*demo, "gsm8k_cot", **options)["tasks"]["gsm8k_cot"]
    assert (task["num_fewshot"], task["split"], task["n_samples"], task["version"]) == (8, "test", 2, 3.0)
    assert (task["written"], task["chance"]) == (True, 0)
    metrics = ("exact_match,strict-match", "exact_match,flexible-extract")
    assert task["metrics"] == {name: {"value": 0.5, "stderr": 0.5} for name in metrics}
    samples = {(sample["row"], sample["filter"]): sample for sample in task["samples"]}
    assert {sample["text"] for sample in samples.values()} == {" So 2+16=18. The answer is 18.\n\n"}
    assert samples[0, "strict-match"]["responses"] == ["18"]
    assert samples[1, "flexible-extract"]["metrics"] == {"exact_match": 0.0}
    (prompt,) = [text for text in demo[0].prompts if GSM8K[0][0] in text]
    assert prompt.startswith("Q: There are 15 trees in the grove.")
    assert prompt.endswith(f"The answer is 8.\n\nQ: {GSM8K[0][0]}\nA:")
    assert prompt.count("Q: ") == 9

    demo[0].prompts.clear()
    task = hf_twell.evaluate(*demo, "gsm8k_cot", num_fewshot=0, limit=1, **options)["tasks"]["gsm8k_cot"]
    assert (task["num_fewshot"], task["metrics"]["exact_match,strict-match"]["value"]) == (0, 1.0)
    assert demo[0].prompts == [f"Q: {GSM8K[0][0]}\nA:"]


@needs_lm_eval
def test_gsm8k_through_the_chat_template(tokenizer, data_dir):
    demo = writer(tokenizer, "<assistant>", "The answer is 18.")
    options = {"data_dir": data_dir, "chat_template": True, "limit": 1}
    task = hf_twell.evaluate(*demo, "gsm8k_cot", **options)["tasks"]["gsm8k_cot"]
    assert task["metrics"]["exact_match,strict-match"]["value"] == 1.0
    (prompt,) = demo[0].prompts
    assert prompt.count("<user>Q: ") == prompt.count("<assistant>") == 9
    assert prompt.endswith(f"<user>Q: {GSM8K[0][0]}\nA:<assistant>")


@confines
@needs_lm_eval
def test_humaneval(tokenizer, data_dir):
    demo = writer(tokenizer, "\n", "    return 1", "\ndef three")
    options = {"data_dir": data_dir, "run_code": True, "batch_size": 2, "log_samples": True}
    task = hf_twell.evaluate(*demo, "humaneval", **options)["tasks"]["humaneval"]
    assert task["metrics"] == {"pass@1,create_test": {"value": 0.5, "stderr": 0.5}}
    assert (task["num_fewshot"], task["split"], task["n_samples"]) == (0, "test", 2)
    assert [sample["responses"] for sample in task["samples"]] == [["passed"], ["AssertionError"]]
    assert [sample["text"] for sample in task["samples"]] == ["    return 1"] * 2
    assert sorted(demo[0].prompts) == [problem["prompt"] for problem in PROBLEMS]


@confines
@needs_lm_eval
def test_humaneval_through_the_chat_template(tokenizer, data_dir):
    demo = writer(tokenizer, "\n", "    return 1\n```", "\nIt gives 1.")
    options = {"data_dir": data_dir, "run_code": True, "chat_template": True, "limit": 1}
    result = hf_twell.evaluate(*demo, ["humaneval_instruct"], **options)
    assert result["tasks"]["humaneval_instruct"]["metrics"]["pass@1,create_test"]["value"] == 1.0
    (prompt,) = demo[0].prompts
    assert prompt.startswith("<user>Write a solution to the following problem")
    assert prompt.endswith(f"<assistant>Here is the completed function:\n```python\n{PROBLEMS[0]['prompt']}\n")
    with pytest.raises(ValueError, match="through a chat template use humaneval_instruct"):
        hf_twell.evaluate(*demo, ["humaneval"], **options)


@needs_lm_eval
def test_refusals(tokenizer, data_dir, tmp_path, error_line):
    demo = writer(tokenizer, "\n", "pass", context=512)
    with pytest.raises(ValueError, match=r"humaneval: these run programs .*run_code=True \(--run-code\)"):
        hf_twell.evaluate(*demo, ["gsm8k_cot", "humaneval"], data_dir=data_dir)
    with pytest.raises(ValueError, match=r"humaneval: few-shot examples could only be .*; use num_fewshot=0$"):
        hf_twell.evaluate(*demo, ["humaneval"], data_dir=data_dir, run_code=True, num_fewshot=1)
    with pytest.raises(ValueError, match="num_fewshot=9: gsm8k_cot has 8 rows"):
        hf_twell.evaluate(*demo, ["gsm8k_cot"], data_dir=data_dir, num_fewshot=9)
    with pytest.raises(ValueError, match=r"humaneval lets a model write 1024 tokens .* this one's context is 512"):
        hf_twell.evaluate(*demo, ["humaneval"], data_dir=data_dir, run_code=True)
    (data_dir / "humaneval.jsonl.xz").unlink()
    with pytest.raises(FileNotFoundError, match=r"humaneval_instruct needs humaneval\.jsonl or humaneval\.jsonl\.xz"):
        hf_twell.evaluate(*demo, ["humaneval_instruct"], data_dir=data_dir, run_code=True)
    write_rows(data_dir / "humaneval.jsonl", [{"prompt": "def f():\n"}])
    with pytest.raises(ValueError, match=r"humaneval\.jsonl, line 1 .* entry_point, prompt, test"):
        hf_twell.evaluate(*demo, ["humaneval"], data_dir=data_dir, run_code=True)
    save_model(demo[0], tmp_path / "model", demo[1])
    command = ["eval", str(tmp_path / "model"), "--data-dir", str(data_dir), "--tasks"]
    line = error_line(*command, "gsm8k_cot", "--flips")
    assert "multiple-choice tasks alone, such as arc_easy or hellaswag; gsm8k_cot is none" in line
    assert "--run-code" in error_line(*command, "humaneval")


def test_examples_of_several_tasks_in_the_table():
    result = {"model": "x", "dtype": "float32", "device": "cpu", "batch_size": 8, "limit": None, "chat_template": False}
    metrics = {f"exact_match,{name}": {"value": 0.5, "stderr": 0.1} for name in ("strict-match", "flexible-extract")}
    task = {"split": "test", "n_samples": 2, "metrics": metrics}
    shots = {"gsm8k_cot": 8, "humaneval": 0, "group": None}
    tasks = {name: {**task, "num_fewshot": number} for name, number in shots.items()}
    lines = format_table({**result, "tasks": tasks, "text": {}}).splitlines()
    assert lines[0].endswith("batch size 8, zero-shot and 8-shot)")
    rows = [line.split()[:4] for line in lines if line.startswith("gsm8k_cot")]
    assert rows == [["gsm8k_cot", "test", "2", name] for name in metrics]


@needs_lm_eval
def test_rows_stop_by_themselves_and_write_what_lm_eval_lets_them(model, tokenizer):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from hf_twell.evaluation.generation import StoppingRows

    prompts = ["A star", "Plants need light", "What is 2 + 2?", "Which animal can fly?", "the wood"]

    def write(kind, until):
        settings = {"until": until, "max_gen_toks": 48, "do_sample": False}
        requests = [Instance("generate_until", {}, (prompt, copy.deepcopy(settings)), 0) for prompt in prompts]
        steps = []
        hook = model.register_forward_hook(lambda *_: steps.append(None))
        lm = kind(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=len(prompts))
        texts = lm.generate_until(requests, disable_tqdm=True)
        hook.remove()
        return texts, len(steps)

    whole, _ = write(HFLM, [])
    until = [next(char for char in text[4:] if char.isascii()) for text in whole]
    theirs, longest = write(HFLM, until)
    ours, shorter = write(StoppingRows, until)
    assert ours == theirs
    assert ours != whole
    assert shorter < longest


# A program, and how it ends.
PROGRAMS = {
    "right": ("def f(): return 3\nassert f() == 3", "passed"),
    "numbers": ("import numpy; assert numpy.dot(numpy.ones(99), numpy.ones(99)) == 99", "passed"),
    "wrong": ("assert 1 == 2", "AssertionError"),
    "syntax": ("def f(:", "SyntaxError"),
    "loop": ("while True: pass", "time"),
    "sleep": ("import time; time.sleep(99)", "time"),
    "memory": ("x = [0] * 10**9", "MemoryError"),
    "socket": ("import socket; socket.socket()", "PermissionError"),
    "file": ("open({outside!r}, 'w')", "PermissionError"),
    "truncated": ("import os; os.open({outside!r}, os.O_TRUNC)", "PermissionError"),
    "removed": ("import os; os.remove({outside!r})", "PermissionError"),
    "renamed": ("import os; os.rename({outside!r}, 'x')", "PermissionError"),
    "folder": ("import os; assert os.listdir() == []; os.mkdir('x')", "PermissionError"),
    "fork": ("import os; os.fork()", "PermissionError"),
    "command": ("import subprocess; subprocess.run(['true'])", "PermissionError"),
    "thread": ("import threading; threading.Thread(target=print).start()", "RuntimeError"),
    "signal": ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
    "limits": ("import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (9, 9))", "ValueError"),
    "exit": ("import sys; sys.exit(0)\nassert False", "SystemExit"),
    "left": ("import os; os._exit(0)\nassert False", "died"),
    "claims": ("print('passed')\nimport os; os.write(3, b'passed'); os._exit(0)", "died"),
    "flood": ("import os\nwhile True: os.write(3, b'x' * 4096)", "time"),
    "crash": ("import ctypes; ctypes.string_at(0)", "died"),
    "deep": ("def f(): f()\nf()", "RecursionError"),
    "input": ("input()", "EOFError"),
    "secrets": ("import os; assert 'SECRET_TOKEN' not in os.environ", "passed"),
}


@pytest.mark.slow
@confines
def test_programs_compute_and_do_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    outside = tmp_path / "outside"
    outside.write_text("kept")
    programs = [program.replace("{outside!r}", repr(str(outside))) for program, _ in PROGRAMS.values()]
    found = sandbox.run_programs(programs, cpu_seconds=1, wall_seconds=5)
    assert dict(zip(PROGRAMS, found, strict=True)) == {name: how for name, (_, how) in PROGRAMS.items()}
    assert outside.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [outside]


@confines
def test_a_program_passes_by_coming_to_its_end_alone():
    programs = ["assert 1 == 1", "assert 1 == 2", "import os; os._exit(0)", "import socket; socket.socket()"]
    assert sandbox.run_programs(programs) == ["passed", "AssertionError", "died", "PermissionError"]


@confines
def test_of_what_a_program_says_nothing_is_kept_but_an_exceptions_name():
    said = "import os, sys; os.write(3, (sys._getframe(1).f_locals['secret'] + ' {}').encode()); os._exit(0)"
    named = "class {0}(Exception): pass\nraise {0}"
    programs = [named.format("passed"), named.format("unconfined"), said.format("raised root:x:0:0 of a file")]
    assert sandbox.run_programs(programs) == ["died", "unconfined", "died"]


@confines
@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can start a process of another user")
def test_an_ordinary_user_confines_programs_too():
    """By the script alone, with an interpreter that every user can read."""
    python = Path("/usr/bin/python3")
    if not python.exists():
        pytest.skip(f"no {python}")
    script = Path(sandbox.__file__).with_name("confined.py").read_text()
    for program, how in (("assert True", "passed"), ("import socket; socket.socket()", "raised PermissionError")):
        command = (python, "-I", "-B", "-c", script, 2**30, 5)
        done = finished(*command, input=f"secret\n{program}", user=65534, cwd="/", check=True)
        assert done.stdout == f"secret {how}"


def test_where_programs_cannot_be_confined(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match=r"cannot be confined here \(darwin is not Linux\); run this on Linux"):
        sandbox.check_sandbox()


@pytest.mark.slow
@confines
@needs_lm_eval
def test_humanevals_own_solutions_pass():
    (task,) = load_tasks(["humaneval"], shared_path("data/eval"))[0]["tasks"].values()
    rows = list(task.eval_docs)
    assert len(rows) == 164
    assert set(_run_plain([[row["canonical_solution"]] for row in rows[::10]], rows[::10])) == {"passed"}
    assert "passed" not in _run_plain([["    return None\n"]] * 17, rows[::10])
    assert _run_fenced([[f"{rows[0]['canonical_solution']}\n```\nThat is all."]], rows[:1]) == ["passed"]
