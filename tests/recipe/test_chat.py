"""Conversations: as training text through the tokenizer's chat template, and as lm-eval's prompts."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_twell
from hf_twell.recipe.chat import chat_tokens
from hf_twell.recipe.packing import PackedText, StreamedText
from tests.conftest import needs_lm_eval
from tests.paths import DEMO

pytest.importorskip("datasets")

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|endoftext|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
FORGETFUL = TEMPLATE.replace("m.content +", "(m.content if loop.last else '...') +")
TALK = [
    {"role": "user", "content": "What is the smallest unit of life?"},
    {"role": "assistant", "content": "The cell is."},
    {"role": "user", "content": "And of matter?"},
    {"role": "assistant", "content": "That depends on whom you ask."},
]


@pytest.fixture
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def rows(tmp_path) -> str:
    path = tmp_path / "rows.jsonl"
    talks = [[*TALK, {"role": "user", "content": f"And number {i}?"}, TALK[1]] for i in range(40)]
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return str(path)


def said(tokenizer, ids, labels) -> list[str]:
    """The runs of tokens that have labels, as text."""
    runs = [[]]
    for token, label in zip(ids, labels, strict=True):
        assert label in (token, -100)
        runs = [*runs, []] if label == -100 and runs[-1] else runs
        runs[-1] += [label] if label != -100 else []
    return [tokenizer.decode(run) for run in runs if run]


def test_conversations_go_through_the_chat_template(tokenizer):
    ids, labels = chat_tokens(tokenizer, TALK)
    assert ids == labels == tokenizer.apply_chat_template(TALK, return_dict=True)["input_ids"]


def test_labels_of_the_assistants_tokens_alone(tokenizer):
    ids, labels = chat_tokens(tokenizer, TALK, assistant_only=True)
    assert ids == chat_tokens(tokenizer, TALK)[0]
    ends = "<|endoftext|>\n"
    assert said(tokenizer, ids, labels) == [f"The cell is.{ends}", f"That depends on whom you ask.{ends}"]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "has no chat template to read messages by; take an instruct model's"),
        ("{{ raise_exception('no such role') }}", "the chat template does not take .*: no such role"),
        (FORGETFUL, "writes earlier turns in another way .* trl's SFTTrainer"),
    ],
)
def test_templates_that_cannot_be_used_are_refused(tokenizer, template, says):
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=says):
        chat_tokens(tokenizer, TALK, assistant_only=True)


def test_rows_of_messages_are_packed_and_streamed_alike(tokenizer, rows):
    packed = PackedText(tokenizer, rows, 24, assistant_only=True)
    source = {"hub": "json", "data_files": rows, "streaming": True}
    streamed = list(StreamedText(tokenizer, source, 24, assistant_only=True))
    assert len(packed) == len(streamed) > 10
    for one, other in zip(packed, streamed, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert (one["labels"][1:] != -100).any(), "a loss over no token is NaN"
    everything = PackedText(tokenizer, rows, 24)
    assert torch.equal(everything.labels, everything.sequences)


def test_text_has_no_assistants_tokens(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "some words"}) + "\n")
    with pytest.raises(ValueError, match="assistant_only_loss needs rows of messages, and this is text"):
        PackedText(tokenizer, str(path), 8, assistant_only=True)


def test_train_on_conversations(tokenizer, rows, tmp_path, error_line, run_json):
    """The loss that is told is the mean over the assistant's tokens."""
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "heldout.jsonl").write_text("\n".join(Path(rows).read_text().splitlines()[:4]))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: model\noutput_dir: out\ntrain: rows.jsonl\nheldout: heldout.jsonl\nsequence_length: 48\n"
        "assistant_only_loss: true\nl1_weight: 0.1\nsave_dtype: float32\n"
        "training: {max_steps: 1, per_device_train_batch_size: 2, use_cpu: true, save_strategy: 'no'}\n"
    )
    result = run_json("train", recipe)
    trained = AutoModelForCausalLM.from_pretrained(result["model"])
    heldout = PackedText(tokenizer, str(tmp_path / "heldout.jsonl"), 48, assistant_only=True)
    with torch.no_grad():
        logits = trained(heldout.sequences).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), heldout.labels[:, 1:].flatten())
    assert result["after"]["loss"] == pytest.approx(loss.item(), rel=1e-4)

    saving = ["--json", f"output_dir={tmp_path / 'again'}", "training.save_strategy=steps", "training.save_steps=1"]
    first = run_json("train", recipe, *saving)["before"]["loss"]
    changes = ["--resume", "training.max_steps=2", "assistant_only_loss=false"]
    all_tokens = run_json("train", recipe, *saving, *changes)["before"]["loss"]
    assert abs(all_tokens - first) > 0.01, "measured again, as what it is the mean over has changed"

    (tmp_path / "text.txt").write_text("some words")
    line = error_line("train", recipe, f"heldout={tmp_path / 'text.txt'}", "--overwrite")
    assert "assistant_only_loss: true, and" in line


@needs_lm_eval
def test_eval_through_the_chat_template(tokenizer, tmp_path, error_line):
    """Log-likelihoods of choices after the rendered conversation, in which the example is an earlier turn."""
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype="float32").eval()
    answers = {"text": ["A cell", "A stone"], "label": ["A", "B"]}
    test, example = (
        {"id": question, "question": question, "choices": answers, "answerKey": "A"}
        for question in ("What lives?", "What divides?")
    )
    for split, row in (("Test", test), ("Validation", example)):
        (tmp_path / f"ARC-Easy-{split}.jsonl").write_text(json.dumps(row) + "\n")
    options = {"tasks": "arc_easy", "data_dir": tmp_path, "num_fewshot": 1, "log_samples": True}
    result = hf_twell.evaluate(model, tokenizer, chat_template=True, **options)
    assert result["chat_template"]
    question, answer = "Question: What {}?\nAnswer:", "A cell"
    turns = [
        {"role": "user", "content": question.format("divides")},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": question.format("lives")},
    ]
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    # lm-eval scores the white space at a prompt's end with the answer.
    ids = [tokenizer(text)["input_ids"] for text in (prompt.rstrip(), prompt + answer)]
    with torch.no_grad():
        log_p = model(torch.tensor([ids[1]])).logits[0, :-1].log_softmax(-1)
    expected = log_p.gather(1, torch.tensor(ids[1])[1:, None])[len(ids[0]) - 1 :].sum().item()
    (sample,) = result["tasks"]["arc_easy"]["samples"]
    assert sample["responses"][0][0] == pytest.approx(expected, rel=1e-4)
    plain = hf_twell.evaluate(model, tokenizer, **options)
    assert plain["tasks"]["arc_easy"]["samples"][0]["responses"][0][0] != pytest.approx(expected, rel=1e-2)

    arguments = ["eval", str(DEMO / "model"), "--tasks", "arc_easy", "--data-dir", str(tmp_path), "--chat-template"]
    assert "has no chat template; leave --chat-template out" in error_line(*arguments)
