"""A model's own text: drawn from its whole distribution, split where documents end, and gone on with."""

import json

import pytest
import torch
from transformers import GenerationConfig

from hf_twell.cli import main
from hf_twell.models.loading import load_model, load_tokenizer
from hf_twell.recipe.packing import PackedText
from hf_twell.sampling.documents import ROW_BEGINS, document_start, documents_in, sample_ids, sample_text
from tests.conftest import tiny_llama
from tests.paths import MODEL


@pytest.fixture(scope="module")
def demo():
    return load_model(str(MODEL), device="cpu")


def test_tokens_are_drawn_from_the_models_whole_distribution():
    """Also where its own config asks for greedy decoding, and past an end of a document."""
    model = tiny_llama(vocab_size=24, eos_token_id=2)
    model.generation_config = before = GenerationConfig(do_sample=False, top_k=3, eos_token_id=2)
    count = 4000
    ids_BL = sample_ids(model.train(), 5, 3, count, seed=0)
    assert ids_BL.shape == (count, 3), "an end of a document ends no sample"
    assert (ids_BL[:, 0] == 5).all()
    with torch.no_grad():
        expected = model(torch.tensor([[5]])).logits[0, -1].double().softmax(-1)
    found = torch.bincount(ids_BL[:, 1], minlength=24) / count
    # Five standard deviations of a share of `count` draws.
    assert (found - expected).abs().le(5 * (expected * (1 - expected) / count).sqrt() + 1e-9).all()
    assert model.generation_config is before
    assert model.training
    again, other = sample_ids(model, 5, 3, count, seed=0), sample_ids(model, 5, 3, count, seed=1)
    assert torch.equal(ids_BL, again)
    assert not torch.equal(ids_BL, other)


def test_a_lower_temperature_makes_likelier_words_likelier():
    model, count = tiny_llama(vocab_size=24), 4000
    ids_BL = sample_ids(model, 5, 2, count, seed=0, temperature=0.5)
    with torch.no_grad():
        expected = (model(torch.tensor([[5]])).logits[0, -1].double() / 0.5).softmax(-1)
    found = torch.bincount(ids_BL[:, 1], minlength=24) / count
    assert (found - expected).abs().le(5 * (expected * (1 - expected) / count).sqrt() + 1e-9).all()


def test_words_are_drawn_from_the_likeliest_that_make_up_a_share():
    model, share = tiny_llama(vocab_size=24), 0.6
    ids_BL = sample_ids(model, 5, 2, 4000, seed=0, top_p=share)
    with torch.no_grad():
        likely, words = model(torch.tensor([[5]])).logits[0, -1].softmax(-1).sort(descending=True)
    drawn = words[likely.cumsum(0) - likely < share]  # as many as it takes to reach the share
    assert 1 < len(drawn) < 24
    assert set(ids_BL[:, 1].tolist()) == set(drawn.tolist())


def test_sampling_leaves_the_generators_of_others_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    sample_ids(tiny_llama(vocab_size=24), 5, 2, 2, seed=0)
    torch.manual_seed(3)
    model = tiny_llama(vocab_size=24)
    torch.manual_seed(3)
    sample_ids(model, 5, 2, 2, seed=0)
    assert torch.equal(torch.rand(2), expected)


def test_documents_end_where_the_model_ends_them(demo):
    _, tokenizer = demo
    begin, end = document_start(tokenizer), tokenizer.eos_token_id
    first, second = (tokenizer(text, add_special_tokens=False).input_ids for text in ("The cell is small.", "Light"))
    sample = torch.tensor([[begin, *first, end, end, *second]])
    rows = documents_in(sample, tokenizer, begin)
    assert [row["text"] for row in rows] == ["The cell is small.", "Light"]
    assert [row["tokens"] for row in rows] == [len(first), len(second)]


def test_turns_of_a_chat_stay_together_and_are_read_back_as_they_were():
    tokenizer = load_tokenizer(str(MODEL))
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = "{{ messages }}"
    begin, turn_end = document_start(tokenizer), tokenizer.eos_token_id
    assert begin != turn_end
    chat = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\nLight."
    said = tokenizer(chat, add_special_tokens=False).input_ids
    assert said.count(turn_end) == 1
    rows = documents_in(torch.tensor([[begin, *said, turn_end, begin, *said]]), tokenizer, begin)
    assert len(rows) == 2
    assert all(tokenizer(row["text"], add_special_tokens=False).input_ids == said for row in rows)
    assert all(row["tokens"] == len(said) for row in rows)


def test_what_begins_a_document(demo):
    _, tokenizer = demo
    assert tokenizer.convert_ids_to_tokens(document_start(tokenizer)) == "<|endoftext|>"
    assert document_start(tokenizer, "<|endoftext|>") == document_start(tokenizer)
    with pytest.raises(ValueError, match=r"start='<s>' is no special token of this tokenizer; it has <\|"):
        document_start(tokenizer, "<s>")


def test_line_separators_within_a_document_end_no_row(demo, tmp_path):
    path, row = tmp_path / "own.jsonl", {"text": "a\u2028b\u0085c", "tokens": 100, "batch": 0}
    path.write_text(ROW_BEGINS + json.dumps(row, ensure_ascii=False)[1:] + "\n", encoding="utf-8")
    result = sample_text(*demo, path, tokens=100)
    assert (result["documents"], result["tokens"]) == (1, 100)


def test_a_file_is_gone_on_with(demo, tmp_path):
    """To the same rows as in one go, after a kill in the middle of a line."""
    model, tokenizer = demo
    sizes = {"length": 16, "batch_size": 2}
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    result = sample_text(model, tokenizer, whole, tokens=100, **sizes)
    rows = [json.loads(line) for line in whole.read_text().splitlines()]
    assert result == {"documents": len(rows), "tokens": sum(row["tokens"] for row in rows), "start": "<|endoftext|>"}
    assert 100 <= result["tokens"] < 100 + 2 * 16
    assert all(row["text"].strip() and "<|" not in row["text"] for row in rows)
    sample_text(model, tokenizer, parts, tokens=40, **sizes)
    row = whole.read_bytes().splitlines()[-1]
    written = parts.read_bytes()
    for cut in (len(row), 40, 20, 1, 0):
        parts.write_bytes(written + row[:cut])
        assert sample_text(model, tokenizer, parts, tokens=100, **sizes) == result
        assert parts.read_text() == whole.read_text(), cut
    for cut in (len(row), 40, 0):
        parts.write_bytes(row[:cut])
        assert sample_text(model, tokenizer, parts, tokens=100, **sizes) == result
        assert parts.read_text() == whole.read_text(), f"killed at the first row, {cut}"
    assert sample_text(model, tokenizer, parts, tokens=50, **sizes) == result, "it has them"


def test_it_is_told_after_each_word(demo):
    told = []
    sample_ids(demo[0], 5, 9, 2, seed=0, tell=lambda *how_far: told.append(how_far))
    assert told == [(words, 8) for words in range(1, 9)]


def test_the_command_samples_no_more_at_a_time_than_asked_for(tmp_path, capsys, run_json):
    command = ["sample", str(MODEL), str(tmp_path / "own.jsonl"), "--tokens", "20", "--length", "16", "--device", "cpu"]
    assert run_json(*command)["tokens"] <= 32
    assert main(["sample", "absent", str(tmp_path / "none.jsonl"), "--tokens", "0"]) == 1, "before a model is loaded"
    assert "tokens=0; give at least 1" in capsys.readouterr().err


def test_what_cannot_be_sampled_is_said(demo, tmp_path):
    model, tokenizer = demo
    for changes, message in (
        ({"tokens": 0}, "tokens=0; give at least 1"),
        ({"length": 1}, "length=1; give at least 2"),
        ({"temperature": 0.0}, "temperature=0.0; give a number above 0"),
        ({"top_p": 1.5}, "top_p=1.5; give a number above 0, and at most 1"),
        ({"length": 10**6}, "the model reads at most"),
    ):
        with pytest.raises(ValueError, match=message):
            sample_text(model, tokenizer, tmp_path / "own.jsonl", **{"tokens": 10, **changes})
    assert not (tmp_path / "own.jsonl").exists()


@pytest.mark.parametrize(
    "mine",
    [
        '[{"text": "mine"}]',  # as json.dump writes it
        '{"text": "mine"}',
        '{"text": "mine"}\n',
        '{"text": "mine", "tokens": 1, "batch": 0}\n{"text": "mi',
        "written by hand",
        "{",
        "\n",
        ROW_BEGINS[:-1],
        f'{ROW_BEGINS}"text": "its own", "tokens": 2, "batch": 0}}\n{{"text": "mine"',
        f'{{"text": "mine"}}\n{ROW_BEGINS}"text": "its own", "tokens": 2, "batch": 0}}\n',
    ],
)
def test_a_file_of_ones_own_is_left_as_it_is(mine, demo, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(mine)
    says = "holds what hf-twell sample did not write, and is left as it is; choose anoth"
    with pytest.raises(ValueError, match=says):
        sample_text(*demo, path, tokens=10, length=8)
    assert path.read_text() == mine
    assert main(["sample", "absent", str(path), "--tokens", "10"]) == 1, "before a model is loaded"
    assert "holds what hf-twell sample did not write" in capsys.readouterr().err
    assert path.read_text() == mine


def test_a_place_that_takes_no_file_is_refused_before_a_model_is_loaded(tmp_path, error_line):
    (tmp_path / "folder.jsonl").mkdir()
    for name, says in (("folder.jsonl", "is a folder; name a file"), ("none/own.jsonl", "its folder does not exist")):
        assert says in error_line("sample", "absent", tmp_path / name, "--tokens", "10")


def test_the_command_writes_what_a_recipe_reads(tmp_path, capsys, error_line, run_json):
    file = tmp_path / "own.jsonl"
    command = ["sample", str(MODEL), str(file), "--tokens", "1_00", "--length", "16", "--batch", "4", "--device", "cpu"]
    result = run_json(*command)
    assert result["output"] == str(file)
    assert len(PackedText(load_tokenizer(str(MODEL)), [str(file)], 16)) > 3
    assert main(command) == 0
    assert capsys.readouterr().out.startswith(f"{result['documents']} documents, {result['tokens']:,} tokens in all, ")
    assert "does not end in .jsonl" in error_line("sample", str(MODEL), tmp_path / "own.txt", "--tokens", "5")
