"""Few-shot examples, the perplexity metric for Trainer, and answers that backends flip."""

import argparse
import copy
import itertools
import json
import math
import random
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from hf_twell import sparsify
from hf_twell.blocks.modeling import sparse_ffns
from hf_twell.cli import eval as cli_eval
from hf_twell.cli import main
from hf_twell.evaluation import harness
from hf_twell.evaluation.flips import answer_flips, answers, differing
from hf_twell.evaluation.tasks import _check_examples, _read_rows
from hf_twell.measure.perplexity import METRIC_PATH, token_log_likelihoods
from tests.conftest import needs_lm_eval, shared_path, tiny_llama
from tests.evaluation.test_evaluation import ARC_ROWS, arc_row, load_local, local_task, log_likelihood, write_rows
from tests.paths import MODEL

pytestmark = pytest.mark.usefixtures("one_thread")

POOL = [
    ("Which one is cold?", ["ice", "fire"], "A"),
    ("Which one is wet?", ["sand", "the sea"], "B"),
    ("Which one is loud?", ["a whisper", "thunder", "snow"], "B"),
]


@pytest.fixture(scope="module")
def demo():
    return sparsify(AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")), AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
def data_dir(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_rows(folder / "ARC-Easy-Test.jsonl", [arc_row(*row) for row in ARC_ROWS])
    write_rows(folder / "ARC-Easy-Validation.jsonl.xz", [arc_row(*row) for row in POOL])
    return folder


@needs_lm_eval
def test_examples_are_validation_rows(demo, data_dir):
    """Prompts written by hand: lm-eval's sampler with its seed, over the validation rows."""
    options = {"data_dir": data_dir, "num_fewshot": 2, "log_samples": True}
    task = harness.evaluate(*demo, ["arc_easy"], **options)["tasks"]["arc_easy"]
    assert (task["num_fewshot"], task["split"], task["n_samples"]) == (2, "test", len(ARC_ROWS))
    draw = random.Random(1234)
    for (question, choices, _), sample in zip(ARC_ROWS, task["samples"], strict=True):
        shots = draw.sample(POOL, 2)
        prompt = "".join(f"Question: {q}\nAnswer: {options['AB'.index(key)]}\n\n" for q, options, key in shots)
        prompt += f"Question: {question}\nAnswer:"
        # The demo's tokenizer puts <|startoftext|> before a text, and lm-eval lets it.
        prompt = "<|startoftext|>" + prompt
        expected = [log_likelihood(*demo, prompt, f" {choice}") for choice in choices]
        assert [response[0] for response in sample["responses"]] == pytest.approx(expected, abs=1e-3)


@needs_lm_eval
def test_examples_need_their_file(demo, data_dir):
    (data_dir / "ARC-Easy-Validation.jsonl.xz").unlink()
    with pytest.raises(FileNotFoundError, match=r"ARC-Easy-Validation\.jsonl or ARC-Easy-Validation\.jsonl\.xz"):
        harness.evaluate(*demo, ["arc_easy"], data_dir=data_dir, num_fewshot=2)


@needs_lm_eval
def test_too_few_examples(demo, data_dir):
    with pytest.raises(ValueError, match="num_fewshot=4: arc_easy has 3 rows"):
        harness.evaluate(*demo, ["arc_easy"], data_dir=data_dir, num_fewshot=4)
    (task,) = harness.evaluate(*demo, ["arc_easy"], data_dir=data_dir, num_fewshot=3, limit=1)["tasks"].values()
    assert task["num_fewshot"] == 3


@needs_lm_eval
def test_zero_shot_tasks_take_no_examples(data_dir):
    from lm_eval.tasks import TaskManager

    definition = {
        "task": "zero",
        "dataset_path": "json",
        "custom_dataset": lambda **_: {split: _read_rows(data_dir / "ARC-Easy-Test.jsonl", {"id"}) for split in "ab"},
        "training_split": "a",
        "test_split": "b",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answerKey}}",
        "metric_list": [{"metric": "perplexity"}],
        "output_type": "loglikelihood",
    }
    for changes, refused in (({}, False), ({"num_fewshot": 5}, False), ({"num_fewshot": 0}, True)):
        manager = TaskManager(include_defaults=False)
        (task,) = manager.load([definition | changes])["tasks"].values()
        with pytest.raises(ValueError, match="zero-shot by lm-eval's definition") if refused else nullcontext():
            _check_examples("zero", task)


def rows(lengths) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 96, (length,), generator=generator) for length in lengths]
    return [{"input_ids": row, "labels": row} for row in ids]


@pytest.fixture(scope="module")
def metric(tmp_path_factory):
    evaluate = pytest.importorskip("evaluate")
    return evaluate.load(METRIC_PATH, cache_dir=str(tmp_path_factory.mktemp("metric")))


def test_metric_in_trainer(metric, tmp_path):
    """Over batches of unequal length that are padded with -100, against each sequence by itself."""
    from transformers import DefaultDataCollator

    class Pad(DefaultDataCollator):
        def __call__(self, features, return_tensors=None):
            width = max(len(row["input_ids"]) for row in features)

            def filled(key, fill):
                return torch.stack([F.pad(row[key], (0, width - len(row[key])), value=fill) for row in features])

            return {"input_ids": filled("input_ids", 0), "labels": filled("labels", -100)}

    data = rows((9, 17, 5, 12, 30, 7))
    data[1]["labels"] = data[1]["labels"].clone()
    data[1]["labels"][:6] = -100  # a prompt that is not scored
    model = sparsify(tiny_llama().eval())
    trainer = Trainer(
        model,
        TrainingArguments(str(tmp_path), per_device_eval_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True),
        eval_dataset=data,
        data_collator=Pad(),
        preprocess_logits_for_metrics=token_log_likelihoods,
        compute_metrics=lambda p: metric.compute(predictions=p.predictions, references=p.label_ids),
    )
    result = trainer.evaluate()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for row in data:
            log_p = model(row["input_ids"][None]).logits[0, :-1].double().log_softmax(-1)
            for position, label in enumerate(row["labels"][1:].tolist()):
                if label != -100:
                    total -= log_p[position, label].item()
                    tokens += 1
    assert result["eval_tokens"] == tokens == 9 + 17 + 5 + 12 + 30 + 7 - 6 - 5
    assert result["eval_nats_per_token"] == pytest.approx(total / tokens, rel=1e-5)
    assert result["eval_perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)


def test_metric_by_hand(metric):
    half = math.log(0.5)
    result = metric.compute(
        predictions=[[9.0, half, half], [0.0, 2 * half, 7.0]], references=[[5, 0, 150000], [5, 6, -100]]
    )
    assert result == {
        "perplexity": pytest.approx(2 ** (4 / 3)),
        "nats_per_token": pytest.approx(-4 / 3 * half),
        "tokens": 3,
    }
    unlikely = metric.compute(predictions=[[0.0, -650.1]], references=[[3, 4]])
    assert unlikely["perplexity"] == pytest.approx(math.exp(650.1))
    assert metric.compute(predictions=[[0.0, -800.0]], references=[[3, 4]])["perplexity"] == math.inf
    with pytest.raises(ValueError, match="no token is scored"):
        metric.compute(predictions=[[0.0, 1.0]], references=[[3, -100]])
    with pytest.raises(ValueError, match="3 predictions and 2 references"):
        metric.compute(predictions=[[0.0, 1.0, 2.0]], references=[[3, 4]])


# Answers that flip


@pytest.mark.slow
@needs_lm_eval
def test_flips(tmp_path, capsys, error_line, run_json):
    assert main(["sparsify", str(MODEL), str(tmp_path / "model")]) == 0
    capsys.readouterr()
    options = ["--tasks", "arc_easy", "--data-dir", str(shared_path("data/eval")), "--limit", "24", "--device", "cpu"]
    for dtype in ("float32", "bfloat16"):
        flips = run_json("eval", tmp_path / "model", *options, "--dtype", dtype, "--flips")["flips"]["arc_easy"]
        assert flips["rows"] == 24
        if dtype == "float32":
            assert (flips["kernels_vs_dense"], flips["dense_vs_dense"]) == (0, 0)
        else:
            assert flips["kernels_vs_dense"] <= flips["dense_vs_dense"] + 3
    assert "--flips" in error_line("eval", MODEL, *options, "--flips")


def test_flips_are_counted():
    """The counting can fail: other weights give other answers."""
    samples = [{"responses": [[-1.0, 0], [-2.0, 0]]}, {"responses": [[-3.0, 0], [-2.0, 0], [-2.5, 0]]}]
    assert answers(samples) == [0, 1]
    assert differing([0, 1, 2, 2], [0, 2, 2, 1]) == 2
    with pytest.raises(ValueError, match="multiple-choice tasks alone"):
        answers([{"responses": [[-1.0, 0]]}])


@needs_lm_eval
@pytest.mark.parametrize(
    ("batch_size", "largest", "together"), [(8, 8, [True, False, True]), (1, 4, [False, True, False])]
)
def test_the_dense_path_is_run_at_another_batch_size(demo, data_dir, batch_size, largest, together):
    model, tokenizer = demo
    sizes = []
    hook = model.model.embed_tokens.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    try:
        flips = answer_flips(model, tokenizer, ["arc_easy"], data_dir=data_dir, batch_size=batch_size)
    finally:
        hook.remove()
    assert flips["arc_easy"]["rows"] == len(ARC_ROWS)
    assert max(sizes) == largest
    assert [several for several, _ in itertools.groupby(sizes, lambda size: size > 1)] == together, "of the three runs"
    assert {ffn.twell.backend for ffn in sparse_ffns(model)} == {"auto"}


@needs_lm_eval
def test_flips_are_of_the_rows_and_examples_that_are_scored(data_dir):
    """The command passes on what it was given: here, what is refused."""
    given = {"model": MODEL, "dtype": "auto", "device": "cpu", "data_dir": data_dir, "limit": 2, "batch_size": 2}
    given |= {"chat_template": False, "backend": "reference"}
    for own, says in (
        ({"num_fewshot": 4, "split": None}, "num_fewshot=4: arc_easy has 3 rows"),
        ({"num_fewshot": 1, "split": "validation"}, "the validation rows that are scored"),
    ):
        with pytest.raises(ValueError, match=says):
            cli_eval._flips(argparse.Namespace(**given, **own), ["arc_easy"])


@needs_lm_eval
def test_flips_of_tasks_without_choices_are_refused_at_once(demo, data_dir, monkeypatch, error_line):
    """Before a model is loaded, or computes."""
    changes = {"output_type": "generate_until", "doc_to_target": "{{answerKey}}", "doc_to_choice": None}
    changes |= {"generation_kwargs": {"until": ["."]}, "metric_list": [{"metric": "bypass"}]}
    task = load_local(local_task("arc_easy", data_dir, **changes))  # in the place of lm-eval's, which is on the Hub
    monkeypatch.setattr(harness, "load_tasks", lambda *_: ({"tasks": {"arc_easy": task}}, {}))
    line = error_line("eval", "absent/model", "--tasks", "arc_easy", "--flips")
    assert "multiple-choice tasks alone, such as arc_easy or hellaswag; arc_easy is none" in line
    with pytest.raises(ValueError, match="arc_easy is none"):
        answer_flips(*demo, ["arc_easy"])


@needs_lm_eval
def test_scores_are_kept_where_the_flips_fail(demo, data_dir, tmp_path, monkeypatch, capsys):
    for part in demo:
        part.save_pretrained(tmp_path / "model")

    def fail(*_, **__):
        raise ValueError("out of memory")

    monkeypatch.setattr(cli_eval, "_flips", fail)
    options = ["--tasks", "arc_easy", "--data-dir", str(data_dir), "--device", "cpu", "--json", "--flips"]
    assert main(["eval", str(tmp_path / "model"), *options, "--output", str(tmp_path / "scores.json")]) == 1
    said = capsys.readouterr()
    assert "out of memory" in said.err
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores == json.loads(said.out)
    assert scores["tasks"]["arc_easy"]["n_samples"] == len(ARC_ROWS)


def test_the_table_of_flips():
    task = {"num_fewshot": 2, "split": "test", "n_samples": 24, "metrics": {"acc": {"value": 0.25, "stderr": None}}}
    result = {"model": "me/x", "dtype": "bfloat16", "device": "cpu", "batch_size": 8, "limit": None, "text": {}}
    result["chat_template"] = False
    result["flips"] = {"arc_easy": {"rows": 24, "kernels_vs_dense": 2, "dense_vs_dense": 3}}
    lines = cli_eval.format_table({**result, "tasks": {"arc_easy": task}}).splitlines()
    assert lines[0] == "me/x (bfloat16, cpu, batch size 8, 2-shot)"
    assert "Only the first" not in "".join(lines)
    assert "arc_easy  test     24  acc      0.25  -" in lines
    columns = ("answers that differ", "rows", "kernels from dense", "dense from dense at another batch size")
    assert lines[-3].split("  ") == [*columns]
    assert lines[-1].split() == ["arc_easy", "24", "2", "3"]
    lines = cli_eval.format_table(
        {**result, "tasks": {"arc_easy": {**task, "num_fewshot": 0}}, "limit": 5}
    ).splitlines()
    assert lines[0].endswith("zero-shot)")
    assert "Only the first 5 rows" in lines[2]


@needs_lm_eval
def test_a_wrong_backend_would_show(demo, data_dir, monkeypatch):
    from hf_twell.ops import api

    model, tokenizer = copy.deepcopy(demo)
    for block in sparse_ffns(model):  # so few neurons that kernels are taken
        block.gate_proj.weight.data[torch.arange(block.gate_proj.out_features) % 16 > 0] = 0
    real = api.ffn
    monkeypatch.setattr(api, "ffn", lambda x, up, down, *a, **k: real(x, -up, down, *a, **k))
    flips = answer_flips(model, tokenizer, ["arc_easy"], data_dir=data_dir, backend="cpu")["arc_easy"]
    assert flips["kernels_vs_dense"] > 0
    assert flips["dense_vs_dense"] == 0
