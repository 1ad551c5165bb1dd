"""Scores on a card: the parent's beside the model's, what is kept, and that written answers were not scored."""

import json

import pytest
import transformers as tf

import hf_twell
from hf_twell.cli import main
from hf_twell.files.folders import has_chat_template, save_model
from hf_twell.models.card_scores import ALONE, FAR_LESS, UNWRITTEN, kept
from hf_twell.models.cards import model_card
from tests.conftest import tiny_llama
from tests.paths import MODEL


def task(value: float, *, stderr=0.01, metric="acc", written=False, chance=0.25, **changes) -> dict:
    metrics = {metric: {"value": value, "stderr": stderr}}
    settings = {"split": "test", "num_fewshot": 0, "n_samples": 100, **changes}
    return {**settings, "metrics": metrics, "written": written, "chance": chance}


def programs(value: float, **changes) -> dict:
    return task(value, metric="pass@1,create_test", written=True, chance=0.0, **changes)


def scores(tasks: dict | None = None, text: dict | None = None, **how) -> dict:
    return {"dtype": "bfloat16", "batch_size": 8, "limit": None, "tasks": tasks or {}, "text": text or {}, **how}


def loss(nats: float, tokens: int = 5000) -> dict:
    return {"tokens": tokens, "context": 512, "nats_per_token": nats, "perplexity": 9.0, "bits_per_byte": 1.0}


ARC = scores({"arc_easy": task(0.4)})


@pytest.mark.parametrize(
    ("given", "parent", "chat", "says"),
    [
        (None, None, False, ""),
        (None, None, True, UNWRITTEN),
        (ARC, None, False, UNWRITTEN),
        (ARC, ARC, True, UNWRITTEN),
        (scores({"humaneval": programs(0.2)}), None, True, ALONE),
        ([ARC, scores({"humaneval": programs(0.2)})], ARC, True, ALONE),
        (scores({"humaneval": programs(0.2)}), scores({"humaneval": programs(0.2)}), True, ""),
        # Scores that do not say whether an answer is written.
        (scores({"arc_easy": {key: of for key, of in task(0.4).items() if key != "written"}}), None, True, ""),
    ],
)
def test_a_card_says_that_written_answers_were_not_scored(given, parent, chat, says):
    card = model_card("me/x", {}, scores=given, parent_scores=parent, chat=chat)
    for note in (UNWRITTEN, ALONE, FAR_LESS):
        assert (note in card) == bool(says and note in (says, FAR_LESS))
    assert ("## Evaluation" in card) == bool(given or chat)


def test_the_parents_scores_stand_beside_the_models():
    plain = scores({"arc_easy": task(0.4)}, {"/mine/book.txt": loss(3.3)})
    chat = scores({"humaneval_instruct": programs(0.12)}, chat_template=True)
    parents = [
        scores({"humaneval_instruct": programs(0.6), "gsm8k_cot": programs(0.5)}, chat_template=True),
        scores({"arc_easy": task(0.5), "hellaswag": task(0.5)}, {"/its/book.txt": loss(3.0)}),
    ]
    card = model_card("me/x", {}, method={"step": 9}, scores=[plain, chat], parent_scores=parents)
    for line in (
        "| arc_easy | test | 0 | 100 | acc | 0.5000 ± 0.0100 | 0.4000 ± 0.0100 | 60 % |",
        "| humaneval_instruct | test | 0 | 100 | pass@1,create_test | 0.6000 ± 0.0100 | 0.1200 ± 0.0100 | 20 % |",
        "| book.txt | 5,000 | 3.3 | 9 | 1 | 3 | +10.0 % |",
        "> **Warning.** It solves fewer rows than its dense parent: 20 % as many in humaneval_instruct. Compare",
        "In bfloat16, batch size 8, tasks' prompts through the chat template.",
    ):
        assert line in card
    assert "gsm8k" not in card, "which was not asked of this model"
    text = scores({}, {"book.txt": {"tokens": 5000, "nats_per_token": 3.3}})
    assert "| book.txt | 5,000 | 3.3 |\n" in model_card("me/x", {}, scores=text), "the other figures are not there"


@pytest.mark.parametrize(
    ("own", "its", "share"),
    [
        (task(0.4), task(0.5), 0.6),
        (task(0.6), task(0.5), 1.4),
        (task(0.2), task(0.5), 0.0),
        (task(0.26), task(0.265), None),  # which may be guessing's
        (task(0.4, chance=None), task(0.5), None),
        (task(9.0, metric="perplexity", chance=0.0), task(5.0, metric="perplexity"), None),
        (task(0.4), task(0.5, metric="acc_norm"), None),
        (task(None), task(0.5), None),
        (programs(0.0), programs(0.5), 0.0),
        (programs(0.1, stderr=None), programs(0.0, stderr=None), None),
    ],
)
def test_kept_is_of_what_is_above_guessing(own, its, share):
    (metric,) = own["metrics"]
    assert kept(own, its, metric) == (None if share is None else pytest.approx(share))


def test_a_model_that_writes_as_well_is_not_warned_of():
    parent = scores({"humaneval_instruct": programs(0.6)})
    for value, warned in ((0.41, True), (0.43, False)):
        own = scores({"humaneval_instruct": programs(value)})
        card = model_card("me/x", {}, method={"step": 9}, scores=own, parent_scores=parent)
        assert ("solves fewer rows" in card) == warned


def test_files_of_scores_make_the_card_or_are_refused_in_one_line(tmp_path, capsys, caplog, error_line):
    model, tokenizer = hf_twell.sparsify(tiny_llama()), tf.AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = "{{ messages }}"
    save_model(model, tmp_path / "sparse", tokenizer, method={"l1_weight": 1.0, "step": 2})
    push = ["push", str(tmp_path / "sparse"), "me/x", "--dry-run"]

    def file(name: str, result: object) -> str:
        (tmp_path / name).write_text(json.dumps(result))
        return str(tmp_path / name)

    assert main(push) == 0
    assert UNWRITTEN in capsys.readouterr().out
    plain, chat = file("plain", ARC), file("chat", scores({"gsm8k_cot": programs(0.1)}, chat_template=True))
    its = file("its", scores({"gsm8k_cot": programs(0.5)}, chat_template=True))
    assert main([*push, "--scores", plain, "--scores", chat, "--parent-scores", its]) == 0
    card = capsys.readouterr().out
    assert "| acc |  | 0.4000 ± 0.0100 |  |" in card
    assert "| 0.5000 ± 0.0100 | 0.1000 ± 0.0100 | 20 % |" in card
    assert "20 % as many in gsm8k_cot. The card says so" in caplog.text

    for result, says in (
        (scores({"arc_easy": task(0.5, n_samples=20)}), "of arc_easy have n_samples=20, and the model's n_samples=100"),
        (scores({"arc_easy": task(0.5)}, chat_template=True), "have chat_template=True, and the model's chat_template"),
        (scores({"hellaswag": task(0.5)}), "have no task and no text that the model's have"),
        ({"layers": []}, "these are no scores"),
    ):
        assert says in error_line(*push, "--scores", plain, "--parent-scores", file("other", result))
    assert "have no task and no text that the model's have" in error_line(*push, "--parent-scores", plain)
    assert "no file at" in error_line(*push, "--scores", plain, "--parent-scores", str(tmp_path / "absent"))
    book, shorter = (file(f"book-{tokens}", scores({}, {"book.txt": loss(3.0, tokens)})) for tokens in (5000, 90))
    assert "of book.txt have tokens=90" in error_line(*push, "--scores", book, "--parent-scores", shorter)


@pytest.mark.parametrize("template", [None, "{{ messages }}", {"default": "{{ messages }}", "tools": "{{ tools }}"}])
def test_a_folder_tells_whether_its_tokenizer_has_a_chat_template(template, tmp_path):
    tokenizer = tf.AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "own-file")
    assert has_chat_template(tmp_path / "own-file") == (template is not None)
    tokenizer.save_pretrained(tmp_path / "in-config", save_jinja_files=False)
    assert has_chat_template(tmp_path / "in-config") == (template is not None)
    assert not has_chat_template(tmp_path)


def test_a_trainers_card_knows_its_tokenizer(tmp_path):
    tokenizer = tf.AutoTokenizer.from_pretrained(MODEL)
    for template in (None, "{{ messages }}"):
        tokenizer.chat_template = template
        args = tf.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        trainer = tf.Trainer(hf_twell.sparsify(tiny_llama()), args, processing_class=tokenizer)
        hf_twell.use_model_card(trainer)
        trainer.create_model_card(model_name="me/x")
        assert (UNWRITTEN in (tmp_path / "README.md").read_text()) == (template is not None)
    hf_twell.use_model_card(trainer, scores=ARC, parent_scores=ARC)
    trainer.create_model_card(model_name="me/x")
    assert "| 0.4000 ± 0.0100 | 0.4000 ± 0.0100 | 100 % |" in (tmp_path / "README.md").read_text()
