"""A chat model's conversations with itself: by its template, from its own distribution, read back as messages."""

import json
import re

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_twell.cli import main
from hf_twell.recipe.chat import chat_tokens
from hf_twell.recipe.packing import PackedText
from hf_twell.sampling import documents
from hf_twell.sampling.conversations import Turns, sample_conversations
from hf_twell.sampling.documents import sample_text
from hf_twell.sampling.draw import sample_after
from tests.conftest import tiny_llama

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
WORDS = [*SPECIAL, "user", "assistant", "be", "kind", *(f"w{i}" for i in range(16))]
TEMPLATE = (
    "<|im_start|> be kind <|im_end|>{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
END = WORDS.index("<|im_end|>")


def tokenizer_of_words():
    """With a template that has a system's turn, as SmolLM2's has; of its marks only two have names of their own."""
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<|pad|>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def tokenizer():
    tokenizer = tokenizer_of_words()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[1:2] + SPECIAL[3:]})
    return tokenizer


@pytest.fixture
def model():
    return tiny_llama(vocab_size=len(WORDS))


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def test_what_a_template_writes_around_a_question(tokenizer):
    turns = Turns(tokenizer)
    assert turns.opening == ids("<|im_start|> be kind <|im_end|> <|im_start|> user")
    assert turns.closing == ids("<|im_end|> <|im_start|> assistant")
    assert turns.question(ids("w1 w2 <|im_end|> w3")) == ids("w1 w2")
    assert turns.question(ids("w1 w2")) == [], "a question that does not end"
    assert turns.question(ids("w1 <|endoftext|> w2 <|im_end|>")) == [], "no turn of a user"
    assert turns.answer(ids("w1 w2 <|endoftext|> w3")) == ids("w1 w2")
    assert turns.answer(ids("w1 w2")) == ids("w1 w2"), "cut where the sample is"


def test_marks_that_only_the_vocabulary_calls_special_end_a_question():
    """As Llama 3's headers."""
    tokenizer = tokenizer_of_words()
    assert WORDS.index("<|im_start|>") not in tokenizer.all_special_ids
    assert Turns(tokenizer).question(ids("w1 <|im_start|> w2 <|im_end|>")) == []


def test_a_turn_that_ends_by_ordinary_words_is_refused(tokenizer):
    """What the model writes may hold them."""
    tokenizer.chat_template = "{% for m in messages %}user {{ m.content }} {% endfor %}assistant "
    with pytest.raises(ValueError, match="by 'assistant', which is no special token"):
        Turns(tokenizer)


def test_answers_are_drawn_anew(model):
    """A CPU's generator keeps 32 bits of a seed, and an answer's are others than its question's."""
    drawn = {"seed": 7}, {"seed": 7 ^ 1 << 31}
    first_BL = torch.full((4, 1), END)
    one, other = (sample_after(model, first_BL, torch.ones_like(first_BL), 20, **seed) for seed in drawn)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("length", [40, 16])
def test_conversations_are_the_models_own(model, tokenizer, length):
    rows = sample_conversations(model, tokenizer, length, 1000, seed=0)
    assert length / 2 < len(rows) < 500, "questions that do not end are left out"
    for row in rows:
        question, answer = row["messages"]
        assert (question["role"], answer["role"]) == ("user", "assistant")
        assert question["content"]
        assert answer["content"]
        assert "<|" not in question["content"] + answer["content"]
        said = chat_tokens(tokenizer, row["messages"])[0]
        assert (said[-1] != END) == answer.get("unfinished", False), "the end of an answer that was cut is not taught"
        assert len(said) == row["tokens"] + (said[-1] == END) <= length + 1
    assert length == 40 or 0 < sum("unfinished" in row["messages"][1] for row in rows) < len(rows)
    assert len({row["messages"][0]["content"] for row in rows}) > 10
    assert sample_conversations(model, tokenizer, length, 1000, seed=0) == rows
    assert sample_conversations(model, tokenizer, length, 1000, seed=1) != rows


def test_of_an_unfinished_answer_all_words_are_the_assistants(tokenizer):
    messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3", "unfinished": True}]
    tokens, labels = chat_tokens(tokenizer, messages, assistant_only=True)
    assert tokens == ids(f"{TEMPLATE.split('{%')[0]} <|im_start|> user w1 <|im_end|> <|im_start|> assistant w2 w3")
    assert [label for label in labels if label != -100] == ids("w2 w3")


def test_first_words_have_the_models_probabilities(model, tokenizer):
    """Of the questions whose second word ends them: the first word's share is its own probability."""
    opening = torch.tensor([Turns(tokenizer).opening])
    with torch.no_grad():
        first = model(opening).logits[0, -1].double().softmax(-1)
        pairs = torch.cat([opening.expand(len(WORDS), -1), torch.arange(len(WORDS))[:, None]], 1)
        ends = model(pairs).logits[:, -1].double().softmax(-1)[:, END]
    expected = first * ends
    count = 4000
    rows = sample_conversations(model, tokenizer, 24, count, seed=0)
    asked = [row["messages"][0]["content"].split() for row in rows]
    for word in range(len(SPECIAL), len(WORDS)):
        share = sum(words == [WORDS[word]] for words in asked) / count
        # Five standard deviations; an empty answer takes a few of them away.
        assert share <= expected[word] + 5 * (expected[word] / count).sqrt()
        assert share >= 0.8 * expected[word] - 5 * (expected[word] / count).sqrt()


def test_padding_on_the_left_changes_nothing(model):
    """All but greedy: each row goes on as its prompt alone does."""
    prompts = [ids("w1"), ids("w2 w3 w4 w5"), ids("user w9")]
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    found = sample_after(model, padded, mask, 6, seed=0, temperature=1e-6)
    for prompt, row in zip(prompts, found, strict=True):
        alone = sample_after(model, torch.tensor([prompt]), torch.ones(1, len(prompt)), 6, seed=1, temperature=1e-6)
        assert row[longest:].tolist() == alone[0, len(prompt) :].tolist()


def test_a_file_of_conversations_is_gone_on_with_and_trained_on(model, tokenizer, tmp_path):
    sizes = {"length": 40, "batch_size": 200, "chats": True}
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    result = sample_text(model, tokenizer, whole, tokens=600, **sizes)
    rows = [json.loads(line) for line in whole.read_text().splitlines()]
    assert result == {"documents": len(rows), "tokens": sum(row["tokens"] for row in rows), "start": "a question"}
    sample_text(model, tokenizer, parts, tokens=100, **sizes)
    assert sample_text(model, tokenizer, parts, tokens=600, **sizes) == result
    assert parts.read_text() == whole.read_text()
    packed = PackedText(tokenizer, [str(whole)], 20, assistant_only=True)
    assert len(packed) > 10
    assert (packed.labels == -100).any()


def test_documents_and_conversations_are_not_mixed(model, tokenizer, tmp_path):
    """No training would read the file."""
    sizes = {"tokens": 100, "length": 40, "batch_size": 200}
    for chats, other in ((True, "documents"), (False, "conversations")):
        file = tmp_path / f"{other}.jsonl"
        sample_text(model, tokenizer, file, chats=chats, **sizes)
        written = file.read_bytes()
        with pytest.raises(ValueError, match=f"{other}.jsonl holds other rows than sampled {other}; choose another"):
            sample_text(model, tokenizer, file, chats=not chats, **sizes | {"tokens": 10_000})
        assert file.read_bytes() == written


def test_what_holds_no_conversations_is_said(model, tokenizer, tmp_path):
    file = tmp_path / "chats.jsonl"
    with pytest.raises(ValueError, match=r"start='<\|endoftext\|>', and conversations begin as the chat template does"):
        sample_text(model, tokenizer, file, tokens=9, length=40, chats=True, start="<|endoftext|>")
    with pytest.raises(ValueError, match="length=10; the chat template alone takes 9 tokens"):
        sample_text(model, tokenizer, file, tokens=9, length=10, chats=True)
    with pytest.raises(ValueError, match="the model asked nothing that ends in time; give a greater length"):
        sample_text(model, tokenizer, file, tokens=9, length=14, chats=True, temperature=1e-6)
    tokenizer.chat_template = "{{ messages[0].content }}{{ messages[0].content }}"
    with pytest.raises(ValueError, match="writes a user's words 2 times, not once"):
        sample_text(model, tokenizer, file, tokens=9, length=40, chats=True)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template to read messages by"):
        sample_text(model, tokenizer, file, tokens=9, length=40, chats=True)


def test_one_batch_without_conversations_is_not_the_end(model, tokenizer, tmp_path, monkeypatch):
    """Of few samples none may ask something; then others are drawn, 64 and more before a model is given up."""
    row, seeds = {"messages": [{"role": "user", "content": "w1"}], "tokens": 9}, []

    def unlucky(*args, seed, **drawn):
        seeds.append(seed)
        return [row] if len(seeds) == 4 else []

    monkeypatch.setattr(documents, "sample_conversations", unlucky)
    sizes = {"tokens": 9, "length": 40, "batch_size": 21, "chats": True}
    assert sample_text(model, tokenizer, tmp_path / "few.jsonl", **sizes)["documents"] == 1
    assert seeds == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="the model asked nothing that ends in time"):
        sample_text(model, tokenizer, tmp_path / "none.jsonl", **sizes)
    assert len(seeds) == 8


def test_the_command_samples_conversations(model, tokenizer, tmp_path, capsys):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    file = tmp_path / "chats.jsonl"
    command = ["sample", str(tmp_path / "model"), str(file), "--tokens", "300", "--length", "40", "--batch", "200"]
    assert main([*command, "--device", "cpu", "--chats"]) == 0
    assert re.search(r"^\d+ conversations, \d+ tokens in all, ", capsys.readouterr().out, re.MULTILINE)
    assert all(json.loads(line)["messages"] for line in file.read_text().splitlines())
