"""Scores equal the lm_eval command's, need no network or cache, and leave the model as it was."""

import contextlib
import copy
import json
import lzma
import math
import random
import re
import statistics
import sys
import types
from pathlib import Path

import numpy
import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import hf_twell
from hf_twell.cli import main
from hf_twell.cli.eval import format_table
from hf_twell.evaluation import harness
from hf_twell.evaluation.tasks import _check_examples, _choose_split, _read_rows
from hf_twell.files.folders import save_model
from hf_twell.files.packages import how_to_install
from hf_twell.files.text import read_documents
from hf_twell.inspection.passages import read_pieces
from hf_twell.measure import perplexity
from hf_twell.measure.inference import model_context
from tests.conftest import finished, needs_lm_eval
from tests.paths import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")

DATA = ROOT.parent / "shared" / "data"

ARC_ROWS = [
    ("Which is a star?", ["the Sun", "the Moon", "a lamp", "Mars"], "A"),
    ("What do plants need to grow?", ["plastic", "light and water", "noise"], "2"),
    ("Ice is solid", ["water", "sand", "wood", "air"], "A"),
    ("Which animal can fly?", ["a dog", "a fish", "a cat", "a bird", "a cow"], "D"),
    ("What is 2 + 2?", ["3", "4", "5", "6"], "B"),
]
TEXT = "A star shines. Plants need light and water to grow, and a bird can fly over the sand and the wood."


def arc_row(question, choices, key):
    labels = list("12345" if key.isdigit() else "ABCDE")[: len(choices)]
    return {"id": question, "question": question, "choices": {"text": choices, "label": labels}, "answerKey": key}


def hellaswag_row(index):
    endings = [f"{verb} the ball {index} times." for verb in ("throws", "eats", "paints", "reads")]
    context = {"ctx_a": "A man stands [on] a field.", "ctx_b": "he", "label": str(index % 4), "endings": endings}
    return {"activity_label": "Playing ball", **context}


def write_rows(path, rows):
    with lzma.open(path, "wt") if path.suffix == ".xz" else open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def data_dir(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_rows(folder / "ARC-Easy-Test.jsonl", [arc_row(*row) for row in ARC_ROWS])
    write_rows(folder / "ARC-Easy-Validation.jsonl", [arc_row(*row) for row in ARC_ROWS[:2]])
    write_rows(folder / "ARC-Challenge-Test.jsonl.xz", [arc_row(*row) for row in ARC_ROWS[1:]])
    write_rows(folder / "hellaswag-validation.jsonl.xz", [hellaswag_row(index) for index in range(6)])
    write_rows(folder / "lambada_openai-test.jsonl", [{"text": TEXT}])
    return folder


@pytest.fixture(scope="module")
def tokenizer():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    bpe.train_from_iterator([TEXT, *(row[0] for row in ARC_ROWS)], trainer)
    return tf.PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


@pytest.fixture
def model(tokenizer):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = tf.LlamaConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=256, initializer_range=0.3)
    return tf.LlamaForCausalLM(config).eval()


def log_likelihood(model, tokenizer, prompt, continuation):
    """log p(continuation | prompt) in nats, one sequence at a time."""
    ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, prompt + continuation)]
    whole = torch.tensor([ids[1]])
    with torch.no_grad():
        log_p = model(whole).logits[0, :-1].float().log_softmax(-1)
    scores = log_p.gather(1, whole[0, 1:, None])[len(ids[0]) - 1 :]
    return scores.sum().item()


@needs_lm_eval
def test_three_tasks_from_local_files(model, tokenizer, data_dir):
    result = harness.evaluate(model, tokenizer, data_dir=data_dir, batch_size=3, log_samples=True)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    tasks = result["tasks"]
    counts = {name: (task["n_samples"], task["split"], task["num_fewshot"]) for name, task in tasks.items()}
    expected = {"arc_easy": (5, "test", 0), "arc_challenge": (4, "test", 0), "hellaswag": (6, "validation", 0)}
    assert counts == expected
    assert tasks["arc_easy"]["version"] == 1.0
    chance = statistics.mean(1 / len(choices) for _, choices, _ in ARC_ROWS)
    assert (tasks["arc_easy"]["chance"], tasks["hellaswag"]["chance"]) == (pytest.approx(chance), 0.25)
    assert not any(task["written"] for task in tasks.values())
    assert Path(tasks["arc_challenge"]["data_file"]).name == "ARC-Challenge-Test.jsonl.xz"

    samples = tasks["arc_easy"]["samples"]
    hits = 0
    for (question, choices, key), sample in zip(ARC_ROWS, samples, strict=True):
        prompt = f"Question: {question}\nAnswer:"
        reference = [log_likelihood(model, tokenizer, prompt, f" {choice}") for choice in choices]
        assert [response[0] for response in sample["responses"]] == pytest.approx(reference, abs=1e-4)
        hits += reference.index(max(reference)) == ("12345" if key.isdigit() else "ABCDE").index(key)
    p = hits / len(ARC_ROWS)
    stderr = math.sqrt(p * (1 - p) / (len(ARC_ROWS) - 1))
    assert tasks["arc_easy"]["metrics"]["acc"] == {"value": pytest.approx(p), "stderr": pytest.approx(stderr)}
    # lm-eval's own preprocessing of HellaSwag: brackets go, the second half starts with a capital letter.
    prompt = "Playing ball: A man stands a field. He"
    reference = log_likelihood(model, tokenizer, prompt, " throws the ball 0 times.")
    assert tasks["hellaswag"]["samples"][0]["responses"][0][0] == pytest.approx(reference, abs=1e-4)


@needs_lm_eval
def test_lambada_from_a_local_file(model, tokenizer, data_dir):
    """The last word of a passage, after all before it."""
    passages = ["Ice is solid water.", "A bird can fly over the sand.", "What is 2 + 2? It is 4"]
    write_rows(data_dir / "lambada_openai-test.jsonl", [{"text": text} for text in passages])
    options = {"data_dir": data_dir, "batch_size": 2, "log_samples": True}
    task = harness.evaluate(model, tokenizer, "lambada_openai", **options)["tasks"]["lambada_openai"]
    assert (task["n_samples"], task["split"], task["version"]) == (3, "test", 1.0)
    assert (task["written"], task["chance"]) == (False, 0)
    reference = []
    for passage, sample in zip(passages, task["samples"], strict=True):
        prompt, _, word = passage.rpartition(" ")
        reference.append(log_likelihood(model, tokenizer, prompt, f" {word}"))
        assert sample["responses"][0][0] == pytest.approx(reference[-1], abs=1e-4)
    perplexity = task["metrics"]["perplexity"]
    assert perplexity["value"] == pytest.approx(math.exp(-sum(reference) / 3), rel=1e-4)
    assert perplexity["stderr"] > 0
    assert set(task["metrics"]) == {"perplexity", "acc"}


@needs_lm_eval
def test_model_keeps_its_state(model, tokenizer, data_dir, tmp_path):
    model.train()
    model.model.layers[0].eval()
    model.generation_config.max_new_tokens = 7
    before = {
        "flags": [module.training for module in model.modules()],
        "weights": copy.deepcopy(model.state_dict()),
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict(),
    }
    parameters = list(model.parameters())
    random.seed(3)
    torch.manual_seed(3)
    numpy.random.seed(3)
    states = random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].tolist()
    (tmp_path / "text.txt").write_text(TEXT)
    harness.evaluate(model, tokenizer, ["arc_easy"], data_dir=data_dir, text=[tmp_path / "text.txt"])
    assert [module.training for module in model.modules()] == before["flags"]
    assert all(torch.equal(value, before["weights"][name]) for name, value in model.state_dict().items())
    assert all(now is then and now.grad is None for now, then in zip(model.parameters(), parameters, strict=True))
    assert model.config.to_dict() == before["config"]
    assert model.generation_config.to_dict() == before["generation"]
    assert tokenizer.pad_token is None
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert numpy.random.get_state()[1].tolist() == states[2]
    with pytest.raises(ValueError, match="the model's own context"):
        harness.evaluate(model, tokenizer, (), text=[tmp_path / "text.txt"], context=257)
    assert [module.training for module in model.modules()] == before["flags"]


@needs_lm_eval
def test_split_limit_and_folders_of_the_same_file_names(model, tokenizer, data_dir, tmp_path, monkeypatch):
    validation = harness.evaluate(model, tokenizer, "arc_easy", data_dir=data_dir, split="validation")
    assert validation["tasks"]["arc_easy"]["n_samples"] == 2
    assert validation["tasks"]["arc_easy"]["split"] == "validation"
    one = harness.evaluate(model, tokenizer, ["arc_easy", "arc_easy"], data_dir=data_dir, limit=1)
    assert one["tasks"]["arc_easy"]["n_samples"] == 1
    assert one["tasks"]["arc_easy"]["metrics"]["acc"]["stderr"] is None

    other = tmp_path / "other" / "data"
    other.mkdir(parents=True)
    write_rows(other / "ARC-Easy-Test.jsonl", [arc_row(*row) for row in reversed(ARC_ROWS[:3])])
    other.chmod(0o500)
    monkeypatch.chdir(other.parent)
    options = {"data_dir": "data", "log_samples": True}
    samples = harness.evaluate(model, tokenizer, ["arc_easy"], **options)["tasks"]["arc_easy"]["samples"]
    assert [len(sample["responses"]) for sample in samples] == [4, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tasks": ["arc_eazy"]}, ["'arc_eazy'", "arc_easy", "lm_eval ls tasks"]),
        ({"tasks": ["piqa"], "data_dir": "data"}, ["'piqa'", "arc_easy, arc_challenge, hellaswag"]),
        ({"tasks": ["hellaswag"], "data_dir": "data", "split": "test"}, ["hellaswag", "split=validation"]),
        ({"data_dir": "nowhere"}, ["nowhere", "folder"]),
        ({"data_dir": "data", "split": "train"}, ["'train'", "test or validation"]),
        ({"tasks": (), "text": ()}, ["nothing to evaluate", "arc_easy"]),
        ({"data_dir": "data", "limit": 0}, ["limit=0", "1 or more"]),
        ({"data_dir": "data", "batch_size": "auto"}, ["batch_size='auto'", "1 or more"]),
        ({"data_dir": "data", "num_fewshot": -1}, ["num_fewshot=-1", "0 or more"]),
        ({"data_dir": "data", "num_fewshot": 2, "tasks": ["hellaswag"]}, ["hellaswag", "rows that are scored", "=0"]),
        ({"data_dir": "data", "num_fewshot": 2, "tasks": ["lambada_openai"]}, ["lambada", "rows that are scored"]),
        ({"data_dir": "data", "split": "validation", "tasks": ["lambada_openai"]}, ["no validation", "split=test"]),
        (
            {"data_dir": "data", "num_fewshot": 2, "tasks": ["arc_easy"], "split": "validation"},
            ["arc_easy", "rows that are scored", "score the test rows"],
        ),
        ({"data_dir": "data", "dtype": "float32"}, ["model.to(...)"]),
        ({"tasks": ["arc_easy"], "data_dir": "bad-json"}, ["ARC-Easy-Test.jsonl, line 2", "JSON"]),
        ({"tasks": ["arc_easy"], "data_dir": "bad-row"}, ["ARC-Easy-Test.jsonl, line 1", "answerKey"]),
        ({"tasks": (), "text": ["empty.txt"]}, ["empty.txt", "no text"]),
        ({"tasks": (), "text": ["marks.txt"]}, ["marks.txt", "no text"]),
        ({"tasks": (), "text": ["binary.txt"]}, ["binary.txt", "UTF-8"]),
        ({"tasks": (), "text": ["nul.txt"]}, ["nul.txt", "NUL"]),
        ({"tasks": (), "text": ["cut.txt.xz"]}, ["cut.txt.xz", "unpacked"]),
    ],
)
@needs_lm_eval
def test_refusals_name_what_is_wrong(model, tokenizer, data_dir, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    contents = {"bad-json": '{"id": 1, "question": "", "choices": {}, "answerKey": "A"}\n{"id"', "bad-row": '{"id": 1}'}
    for folder, content in contents.items():
        Path(folder).mkdir()
        Path(folder, "ARC-Easy-Test.jsonl").write_text(content)
    Path("empty.txt").write_text("\n \n")
    Path("marks.txt").write_text("<|endoftext|>\n\n<|endoftext|>")
    Path("binary.txt").write_bytes(b"\x80\x81")
    Path("nul.txt").write_bytes(b"a\0b")
    Path("cut.txt.xz").write_bytes(lzma.compress(b"text" * 99)[:-20])
    with pytest.raises(ValueError) as caught:
        harness.evaluate(model, tokenizer, **arguments)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@needs_lm_eval
def test_missing_files_and_models_are_named(model, tokenizer, data_dir, tmp_path):
    (data_dir / "ARC-Easy-Test.jsonl").unlink()
    needed = r"arc_easy needs ARC-Easy-Test.jsonl or ARC-Easy-Test.jsonl.xz in .*data"
    with pytest.raises(FileNotFoundError, match=needed):
        harness.evaluate(model, tokenizer, data_dir=data_dir)
    with pytest.raises(OSError, match=r"cannot load a model from .*absent"):
        harness.evaluate(tmp_path / "absent", tasks=["hellaswag"], data_dir=data_dir)
    with pytest.raises(FileNotFoundError, match=r"absent.txt"):
        harness.evaluate(model, tokenizer, (), text=[tmp_path / "absent.txt"])


@needs_lm_eval
def test_rows_end_at_newlines_alone(model, tokenizer, data_dir):
    """JSON allows Unicode's other ends of lines inside a string; blank lines are none."""
    row = json.dumps(arc_row("Which\u2028is a\u0085star?", ["the Sun", "the Moon"], "A"), ensure_ascii=False)
    (data_dir / "ARC-Easy-Test.jsonl").write_text(f"{row}\n\n{row}\n \n", encoding="utf-8")
    task = harness.evaluate(model, tokenizer, "arc_easy", data_dir=data_dir)["tasks"]["arc_easy"]
    assert task["n_samples"] == 2


def local_task(name: str, data_dir, **changes) -> dict:
    """A task whose rows are those of `data_dir`, in splits a, b, c."""
    rows = {split: _read_rows(data_dir / "ARC-Easy-Test.jsonl", {"id"}) for split in "abc"}
    return {
        "task": name,
        "dataset_path": "json",
        "custom_dataset": lambda **_: rows,
        "validation_split": "b",
        "test_split": "c",
        "doc_to_text": "{{question}}",
        "doc_to_target": 0,
        "doc_to_choice": "{{choices.text}}",
        "output_type": "multiple_choice",
        "metric_list": [{"metric": "acc"}],
        **changes,
    }


def load_local(definition: dict):
    from lm_eval.tasks import TaskManager

    (task,) = TaskManager(include_defaults=False).load([definition])["tasks"].values()
    return task


@needs_lm_eval
def test_a_split_that_is_asked_for(data_dir):
    """Of a task that has both, the validation rows; of one that has not, none in silence."""
    task = load_local(local_task("both", data_dir))
    _choose_split("both", task, "test")
    assert (task.has_validation_docs(), task.has_test_docs()) == (True, True)
    _choose_split("both", task, "validation")
    assert (task.has_validation_docs(), task.has_test_docs()) == (True, False)
    with pytest.raises(ValueError, match="task both has no test split"):
        _choose_split("both", task, "test")


@needs_lm_eval
@pytest.mark.parametrize(
    ("splits", "scored"),
    [
        ({"test_split": None}, True),
        ({"validation_split": None}, True),
        ({}, False),
        ({"test_split": None, "training_split": "a"}, False),
        ({"test_split": None, "fewshot_split": "a"}, False),
    ],
)
def test_examples_are_never_of_the_rows_that_are_scored(data_dir, splits, scored):
    task = load_local(local_task("some", data_dir, **splits))
    says = "some has no rows for few-shot examples but those that are scored"
    with pytest.raises(ValueError, match=says) if scored else contextlib.nullcontext():
        _check_examples("some", task)


@needs_lm_eval
@pytest.mark.parametrize("mean", [{}, {"aggregate_metric_list": [{"metric": "acc"}]}])
def test_a_groups_mean_stands_beside_its_tasks(model, tokenizer, data_dir, mean):
    """A group that has none only lists its members."""
    from lm_eval.api.group import Group
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)
    group = Group.from_config({"group": "both", **mean})
    for task in manager.load([local_task(name, data_dir) for name in ("one", "two")])["tasks"].values():
        group.add(task)
    options = {"limit": None, "batch_size": 2, "log_samples": False}
    results = harness._run_tasks(model, tokenizer, manager.load([group]), {}, **options)
    assert set(results) == {"one", "two", *(["both"] if mean else [])}
    assert results["one"]["n_samples"] == results["two"]["n_samples"] == 5
    if mean:
        assert (results["both"]["written"], results["both"]["chance"]) == (False, None)
        assert results["both"]["metrics"]["acc"]["value"] == results["one"]["metrics"]["acc"]["value"]


@needs_lm_eval
def test_another_tokenizer_generates_nothing(model, tokenizer, data_dir):
    generates = {"output_type": "generate_until", "doc_to_target": "{{answerKey}}", "doc_to_choice": None}
    generates |= {"generation_kwargs": {"until": ["."], "max_gen_toks": 1}, "metric_list": [{"metric": "bypass"}]}
    loaded = {"tasks": {"some": load_local(local_task("some", data_dir, **generates))}}
    options = {"limit": None, "batch_size": 2, "log_samples": True}
    assert harness._run_tasks(model, tokenizer, loaded, {}, **options)["some"]["n_samples"] == 5
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["star"])
    with pytest.raises(ValueError, match="makes token 320, but the model has only 320 embeddings"):
        harness._run_tasks(model, larger, loaded, {}, **options)


@needs_lm_eval
def test_a_tokenizer_by_its_path(model, tokenizer, data_dir, tmp_path):
    """In place of the one beside the model; `tokenizer.save_pretrained` writes no config.json."""
    for name, some in (("own", tokenizer), ("other", copy.deepcopy(tokenizer))):
        if name == "other":
            some.add_tokens(["Question"])
        some.save_pretrained(tmp_path / name)
    model.config._name_or_path = str(tmp_path / "own")
    assert harness.evaluate(model, tasks="arc_easy", data_dir=data_dir, limit=1)["tasks"]
    with pytest.raises(ValueError, match="makes token 320"):
        harness.evaluate(model, tmp_path / "other", "arc_easy", data_dir=data_dir, limit=1)


@needs_lm_eval
def test_old_lm_eval_is_refused(model, tokenizer, data_dir, monkeypatch):
    monkeypatch.setattr(harness.importlib.metadata, "version", lambda name: "0.4.11")
    with pytest.raises(ValueError, match=r"lm-eval 0.4.11 is too old: pip install 'lm-eval>=0.4.12'"):
        harness.evaluate(model, tokenizer, data_dir=data_dir)


def test_without_lm_eval_only_text_is_scored(model, tokenizer, data_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lm_eval.tasks", raising=False)
    with pytest.raises(ValueError, match=re.escape(how_to_install("lm_eval"))):
        harness.evaluate(model, tokenizer, ["arc_easy"], data_dir=data_dir)
    (tmp_path / "text.txt").write_text(TEXT)
    result = harness.evaluate(model, tokenizer, (), text=tmp_path / "text.txt")
    assert result["text"][str(tmp_path / "text.txt")]["documents"] == 1


@needs_lm_eval
def test_models_and_tokenizers_that_do_not_fit(model, tokenizer, data_dir):
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["Question"])
    with pytest.raises(ValueError, match="makes token 320, but the model has only 320 embeddings"):
        harness.evaluate(model, larger, ["arc_easy"], data_dir=data_dir)
    with pytest.raises(ValueError, match="give the tokenizer too"):
        harness.evaluate(model, None, ["arc_easy"], data_dir=data_dir)
    with pytest.raises(ValueError, match="LlamaModel predicts no tokens; load the model by AutoModelForCausalLM"):
        harness.evaluate(model.model, tokenizer, ["arc_easy"], data_dir=data_dir)
    accelerate = pytest.importorskip("accelerate")
    offloaded = accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(ValueError, match="whose embeddings are offloaded"):
        harness.evaluate(offloaded, tokenizer, ["arc_easy"], data_dir=data_dir)


@needs_lm_eval
def test_no_scores_from_nan(model, tokenizer, data_dir):
    """lm-eval would take each row's first choice, and report the share of rows where that is right."""
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = math.nan
    says = "arc_easy: 20 of 20 log-likelihoods are NaN in float32, .*; load the model in bfloat16 or float32"
    with pytest.raises(ValueError, match=says):
        harness.evaluate(model, tokenizer, ["arc_easy"], data_dir=data_dir)


@pytest.mark.parametrize("length", [1, 2, 8, 9, 10, 11, 13, 40, 41])
@pytest.mark.parametrize(("context", "stride"), [(8, 4), (7, 3), (1, 1)])
def test_windows_score_every_token_once(length, context, stride):
    spans = perplexity.scoring_windows(length, context, stride)
    assert [token for _, first, end in spans for token in range(first, end)] == list(range(1, length))
    for start, first, end in spans:
        assert 0 <= start < first
        assert end - 1 - start <= context
        assert start == 0 or first - start > context - stride


@pytest.mark.parametrize(
    ("config", "own"),
    [
        (tf.LlamaConfig(max_position_embeddings=128), 128),
        (tf.LlamaConfig(max_position_embeddings=8192), 8192),
        (tf.LlavaConfig(text_config=tf.LlamaConfig(max_position_embeddings=64)), 64),
        (tf.PreTrainedConfig(n_positions=32), 32),
        (tf.PreTrainedConfig(n_ctx=32), 32),
        (tf.XLNetConfig(), None),  # says -1
        (tf.BloomConfig(), None),
    ],
)
def test_the_context_is_the_models_own(config, own):
    model = types.SimpleNamespace(config=config)
    assert model_context(model) == min(own or 2048, 2048)
    assert model_context(model, own or 10**6) == (own or 10**6)
    for given in [0, -1] + ([own + 1] if own else []):
        with pytest.raises(ValueError, match=rf"context={given}: give 1 or more .* \({own or 'unknown'}\)"):
            model_context(model, given)


@pytest.mark.parametrize("context", [None, 8, 1])
def test_text_loss_equals_one_token_at_a_time(model, tokenizer, context):
    documents = [TEXT, "fly", TEXT[:40]]
    result = perplexity.text_loss(model, tokenizer, documents, batch_size=3, context=context)
    window = context or 256
    stride = max(1, window // 2)
    assert (result["context"], result["stride"]) == (window, stride)
    losses = []
    for document in documents:
        ids = [tokenizer.bos_token_id, *tokenizer(document, add_special_tokens=False)["input_ids"]]
        for token in range(1, len(ids)):
            # The window that scores this token ends after `end` tokens: `window`, then `stride` more each time.
            end = min(window + stride * max(0, math.ceil((token - window) / stride)), len(ids) - 1)
            inputs = torch.tensor([ids[max(0, end - window) : token]])
            with torch.no_grad():
                losses.append(-model(inputs).logits[0, -1].log_softmax(-1)[ids[token]].item())
    size = sum(len(document.encode()) for document in documents)
    assert (result["tokens"], result["bytes"], result["documents"]) == (len(losses), size, 3)
    mean = sum(losses) / len(losses)
    assert result["nats_per_token"] == pytest.approx(mean, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(mean), rel=1e-4)
    assert result["bits_per_byte"] == pytest.approx(sum(losses) / math.log(2) / size, rel=1e-5)


def test_text_loss_of_special_models(model, tokenizer):
    model.lm_head.weight.data.zero_()
    bfloat16 = copy.deepcopy(model).bfloat16()
    for uniform in (model, bfloat16):  # in bf16, log(320) would be 5.78125
        loss = perplexity.text_loss(uniform, tokenizer, [TEXT])["nats_per_token"]
        assert loss == pytest.approx(math.log(len(tokenizer)), rel=1e-6)
    without_bos = copy.deepcopy(tokenizer)
    without_bos.bos_token = None
    assert perplexity.text_loss(model, without_bos, [TEXT])["tokens"] > 1
    without_bos.eos_token = None
    with pytest.raises(ValueError, match="neither a BOS nor an EOS"):
        perplexity.text_loss(model, without_bos, [TEXT])
    model.lm_head.weight.data.fill_(math.nan)
    assert harness._plain(perplexity.text_loss(model, tokenizer, [TEXT]))["nats_per_token"] is None


def test_documents_are_split_at_lines_of_end_of_text(tmp_path):
    path = tmp_path / "text.txt.xz"
    text = b"one\n\ntwo <|endoftext|> still\n<|endoftext|>\n\n<|endoftext|>\r\nthree\n<|endoftext|>"
    path.write_bytes(lzma.compress(text))
    assert read_documents(path) == ["one\n\ntwo <|endoftext|> still", "three"]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_texts_of_any_line_ends_are_one_text(newline, tmp_path):
    """As Python and `datasets` read them; scored as they are, stories with Windows' line ends lost 0.6 nats a token."""
    path = tmp_path / "text.txt"
    path.write_bytes("one\n\ntwo\n<|endoftext|>\n\nthree\nfour\n".replace("\n", newline).encode())
    assert read_documents(path) == ["one\n\ntwo", "three\nfour"]
    assert list(read_pieces(path)) == [("one\n\ntwo", True), ("three\nfour", True)]


def test_limit_is_of_each_files_documents_and_stands_in_the_result(model, tokenizer, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(f"{TEXT}\n<|endoftext|>\nfly\n<|endoftext|>\n{TEXT[:40]}")
    result = harness.evaluate(model, tokenizer, text=path, limit=2, batch_size=3)
    assert (result["limit"], result["batch_size"], result["tasks"]) == (2, 3, {})
    assert result["text"][str(path)] == perplexity.text_loss(model, tokenizer, [TEXT, "fly"], batch_size=3)
    assert "Only the first 2 rows or documents of each" in format_table(result)


def test_text_loss_refuses_what_it_cannot_score(model, tokenizer, tmp_path):
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["star"])
    with pytest.raises(ValueError, match="makes token 320, but the model has only 320 embeddings"):
        perplexity.text_loss(model, larger, [TEXT])
    with pytest.raises(ValueError, match="notes: the tokenizer makes no token of this text"):
        perplexity.text_loss(model, tokenizer, ["", ""], name="notes")


def test_text_loss_without_dropout(tokenizer):
    config = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": len(tokenizer), "n_positions": 64}
    model, learns = tf.GPT2LMHeadModel(tf.GPT2Config(**config, resid_pdrop=0.5)).train(), []
    model.lm_head.register_forward_hook(lambda module, args, output: learns.append(output.requires_grad))
    losses = [perplexity.text_loss(model, tokenizer, [TEXT])["nats_per_token"] for _ in range(2)]
    assert losses[0] == losses[1]
    assert set(learns) == {False}, "nothing is kept for backward"
    assert model.training


def test_a_loss_that_has_no_perplexity(model, tokenizer):
    model.lm_head.weight.data.mul_(3e3 / perplexity.text_loss(model, tokenizer, [TEXT])["nats_per_token"])
    result = perplexity.text_loss(model, tokenizer, [TEXT])
    assert 710 < result["nats_per_token"] < 7000
    assert result["perplexity"] == math.inf


CLI = """
import argparse, sys
from hf_twell.files.folders import save_model
from hf_twell.cli import eval as cli
from hf_twell.cli import main
from hf_twell.files.text import read_documents
assert "torch" not in sys.modules
parser = argparse.ArgumentParser()
cli.add_arguments(parser)
sys.exit(cli.run(parser.parse_args()))
"""


@pytest.mark.slow
@needs_lm_eval
def test_command_line_offline_without_any_cache(model, tokenizer, data_dir, tmp_path):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "no-folder").write_text("")  # no cache can be made below a file
    command = [sys.executable, "-c", CLI, "model", "--tasks", "arc_easy,hellaswag", "--data-dir", "data"]
    command += ["--text", "text.txt", "--batch-size", "3", "--device", "cpu", "--json", "--output", "scores.json"]
    done = finished(*command, cwd=tmp_path, env={"HF_HOME": str(tmp_path / "no-folder" / "hf")})
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert json.loads((tmp_path / "scores.json").read_text()) == result
    assert "Running loglikelihood requests" in done.stderr
    arguments = {"data_dir": data_dir, "batch_size": 3, "text": [tmp_path / "text.txt"]}
    live = harness.evaluate(model, tokenizer, ["arc_easy", "hellaswag"], **arguments)
    assert result["tasks"] == live["tasks"]
    assert list(result["text"].values()) == list(live["text"].values())
    assert result["backend"] is None


@needs_lm_eval
def test_command_line_table_and_refusals(model, tokenizer, data_dir, tmp_path, capsys, error_line, run_json):
    dense, sparse = tmp_path / "dense", tmp_path / "sparse"
    save_model(model, dense, tokenizer)
    save_model(hf_twell.sparsify(copy.deepcopy(model)), sparse, tokenizer)
    options = ["--tasks", "arc_easy", "--data-dir", str(data_dir), "--limit", "2"]
    assert main(["eval", str(dense), *options]) == 0
    table = capsys.readouterr().out
    rows = [line.split()[:4] for line in table.splitlines() if line.startswith("arc_easy")]
    assert rows == [["arc_easy", "test", "2", "acc"], ["arc_easy", "test", "2", "acc_norm"]]
    (tmp_path / "text.txt").write_text(TEXT)
    options_of_both = ["--text", str(tmp_path / "text.txt"), "--data-dir", str(data_dir), "--limit", "1", "--json"]
    result = run_json("eval", dense, *options_of_both)
    assert result["text"]
    assert list(result["tasks"]) == ["arc_easy", "arc_challenge", "hellaswag"], "--data-dir is not passed over"
    assert "folder does not exist" in error_line("eval", dense, "--output", tmp_path / "absent" / "x.json")
    assert "hf-twell sparsify" in error_line("eval", dense, *options, "--backend", "reference")
    assert run_json("eval", sparse, *options, "--backend", "reference")["backend"] == "reference"


OWN_TASK = """
task: own_{kind}
custom_dataset: !function rows.rows
output_type: {kind}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{target}"
{more}
metric_list: [{{metric: {metric}}}]
"""
OWN_ROWS = f"""
import datasets
def rows(**_):
    rows = [dict(question=question, choices=choices[:3], answer=1) for question, choices, _ in {ARC_ROWS!r}]
    return dict(test=datasets.Dataset.from_list(rows))
"""
UNTIL = 'generation_kwargs: {until: ["."], max_gen_toks: 8, do_sample: false}'
OWN_TASKS = [
    ("multiple_choice", "{{answer}}", "acc", 'doc_to_choice: "{{choices}}"'),
    ("generate_until", "{{choices[1]}}", "exact_match", UNTIL),
    ("loglikelihood_rolling", "{{question}}", "byte_perplexity", ""),
]


@pytest.mark.slow
@needs_lm_eval
def test_tasks_of_your_own_by_lm_eval_itself(model, tokenizer, tmp_path):
    """It takes a sparse model in hand, which runs on the kernels there."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    (tmp_path / "rows.py").write_text(OWN_ROWS)
    for kind, target, metric, more in OWN_TASKS:
        (tmp_path / f"{kind}.yaml").write_text(OWN_TASK.format(kind=kind, target=target, metric=metric, more=more))
    names = [f"own_{kind}" for kind, *_ in OWN_TASKS]
    dense = tf.LlamaForCausalLM(tf.LlamaConfig(**{**model.config.to_dict(), "hidden_act": "relu"})).eval()
    dense.load_state_dict(model.state_dict())
    scores = []
    for each in (hf_twell.sparsify(model), dense):
        lm = HFLM(pretrained=each, tokenizer=copy.deepcopy(tokenizer), batch_size=2)
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        raw = lm_eval.simple_evaluate(lm, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=True)
        scores.append({name: [sample["filtered_resps"] for sample in raw["samples"][name]] for name in names})
    ours, theirs = scores
    assert ours["own_generate_until"] == theirs["own_generate_until"]
    for name in ("own_multiple_choice", "own_loglikelihood_rolling"):
        figures = [torch.tensor([[float(x) for x in numpy.ravel(r)] for r in rows[name]]) for rows in (ours, theirs)]
        torch.testing.assert_close(*figures)
    says = r"no task '.*own.yaml'.*; for a YAML of your own, call lm_eval.simple_evaluate"
    with pytest.raises(ValueError, match=says):
        hf_twell.evaluate(model, tokenizer, tasks=[str(tmp_path / "own.yaml")])


LM_EVAL_TASK = """
include: {stock}
task: {name}_local
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{{files}}}}}
training_split: null
validation_split: validation
test_split: {test}
num_fewshot: {shots}
"""


MISSING = [f"../shared/data/{name}" for name in ("eval", "stories260K-hf") if not (DATA / name).is_dir()]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"missing beside the repository: {', '.join(MISSING)}")
@needs_lm_eval
def test_scores_equal_the_lm_eval_command(tmp_path, capsys, run_json):
    """A sparsified model, with and without examples: the command runs its dense path, ours the reference backend."""
    import lm_eval.tasks

    model = tmp_path / "model"
    assert main(["sparsify", str(DATA / "stories260K-hf"), str(model)]) == 0
    data = tmp_path / "data"
    data.mkdir()
    for split, count in (("Test", 60), ("Validation", 570)):
        rows = (DATA / "eval" / f"ARC-Easy-{split}.jsonl").read_text().splitlines(keepends=True)
        (data / f"ARC-Easy-{split}.jsonl").write_text("".join(rows[:count]))
    with lzma.open(DATA / "eval" / "hellaswag-validation.jsonl.xz", "rt") as file:
        (data / "hellaswag-validation.jsonl").write_text("".join(next(file) for _ in range(40)))

    stock, arc = Path(lm_eval.tasks.__file__).parent, data / "ARC-Easy-Test.jsonl"
    tasks = {
        "arc_easy": ("arc", f"test: {arc}, validation: {data / 'ARC-Easy-Validation.jsonl'}", "test", 3, 60),
        "hellaswag": ("hellaswag", f"validation: {data / 'hellaswag-validation.jsonl'}", "null", 0, 40),
    }
    for name, (folder, files, test, shots, _) in tasks.items():
        options = {"stock": stock / folder / f"{name}.yaml", "name": name, "files": files, "test": test, "shots": shots}
        (tmp_path / f"{name}.yaml").write_text(LM_EVAL_TASK.format(**options))
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--include_path", str(tmp_path)]
    command += ["--model_args", f"pretrained={model},dtype=float32", "--device", "cpu"]
    command += ["--tasks", "arc_easy_local,hellaswag_local", "--batch_size", "16"]
    command += ["--log_samples", "--output_path", str(tmp_path / "out")]
    done = finished(*command, cwd=tmp_path, env={"HF_HOME": str(tmp_path / "hf")})
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "out").rglob("results_*.json")
    theirs = json.loads(results.read_text())["results"]

    options = ["--data-dir", str(data), "--batch-size", "16", "--dtype", "float32", "--device", "cpu"]
    options += ["--backend", "reference", "--log-samples", "--json"]
    for name, (*_, shots, rows) in tasks.items():
        capsys.readouterr()
        ours = run_json("eval", model, "--tasks", name, "--num-fewshot", shots, *options)["tasks"][name]
        for metric, score in ours["metrics"].items():
            expected = theirs[f"{name}_local"]
            assert score == {"value": expected[f"{metric},none"], "stderr": expected[f"{metric}_stderr,none"]}
        (log,) = (tmp_path / "out").rglob(f"samples_{name}_local_*.jsonl")
        samples = sorted((json.loads(line) for line in log.read_text().splitlines()), key=lambda row: row["doc_id"])
        mine = [[response[0] for response in sample["responses"]] for sample in ours["samples"]]
        assert mine == [[float(response[0]) for response in row["filtered_resps"]] for row in samples]
        assert len(mine) == rows
