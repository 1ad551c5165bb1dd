"""recipes/study/written.py: what it asks about functions, what it leaves out, and a model that writes through vLLM."""

import json
import random
import subprocess
import sys

import pytest

from hf_twell.recipe.packing import PackedText
from tests.conftest import tiny_llama
from tests.paths import ROOT
from tests.sampling.test_conversations import WORDS, tokenizer_of_words
from tests.vllm_engines import PYTHON, TIMEOUT_S, environment, needs_vllm

SCRIPT = ROOT / "recipes" / "study" / "written.py"
SOURCE = '''
class Basket:
    def weigh(self, apples, stones=()):
        """Return the weight of the apples, and that of the stones.

        Stones count twice.
        """
        return sum(apples) + 2 * sum(stones)

def short(): return 1

def total(prices, rate):
    """Return the sum of all prices with the tax that is due on each of them."""
    taxed = [price * (1 + rate) for price in prices]
    return sum(taxed)
'''


@pytest.fixture
def written(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import written

    yield written
    sys.modules.pop("written", None)


def test_questions_about_functions(written):
    asked = {each for seed in range(40) for each in written.questions_about(SOURCE, random.Random(seed))}
    assert all("weigh" in each or "total" in each or "Return the" in each for each in asked)
    assert not any("def short" in each for each in asked), "too little to ask about"
    whole = [each for each in asked if "taxed = [" in each]
    heads = [each for each in asked if "def total" in each and "taxed" not in each]
    assert whole
    assert heads
    assert all(each.rstrip("`\n").endswith('due on each of them."""') for each in heads)
    assert not any(each.startswith("Complete") and "self" in each for each in asked), "a method is no task by itself"
    assert "Write Python code: Return the weight of the apples, and that of the stones.\nThe function should be called `weigh`." in asked  # fmt: skip  # noqa: E501
    assert not list(written.questions_about("def broken(:", random.Random(0)))


def test_what_shares_twelve_words_with_a_test_is_left_out(written, tmp_path):
    problem = "def first_of(xs):\n    '''Return the first of all of the numbers that are in the list xs.'''"
    row = {"prompt": problem, "canonical_solution": "return xs[0]", "test": "assert first_of([1]) == 1"}
    (tmp_path / "humaneval.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "gsm8k-test.jsonl").write_text(json.dumps({"question": "Two and two?", "answer": "4"}) + "\n")
    left_out = written.held_out(tmp_path)
    assert left_out & written.grams("It should return the FIRST of all of the numbers (that are in the list `xs`).")
    assert not left_out & written.grams("It should return the first of all numbers in the list.")


def test_shares_of_more_than_all_are_refused(written, tmp_path, capsys):
    needed = [f"--{name}={tmp_path}" for name in ("code", "eval", "output")]
    for shares in (["--documents=0.8"], ["--functions=-0.1"]):
        with pytest.raises(SystemExit):
            written.main(["model", *needed, "--tokens=1", *shares])
        assert "give shares that add up to 1 at most" in capsys.readouterr().err


@needs_vllm
def test_a_model_writes(tmp_path):
    tokenizer = tokenizer_of_words()
    model = tmp_path / "model"
    sizes = {"max_position_embeddings": 2048, "head_dim": 32}  # one that vLLM computes on a CPU
    tiny_llama(vocab_size=len(WORDS), **sizes).save_pretrained(model)
    tokenizer.save_pretrained(model)
    (tmp_path / "code.txt").write_text(SOURCE)
    for name, keys in (("humaneval", ("prompt", "canonical_solution", "test")), ("gsm8k-test", ("question", "answer"))):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(dict.fromkeys(keys, "w1")) + "\n")
    command = [PYTHON, SCRIPT, model, "--code", tmp_path / "code.txt", "--eval", tmp_path, "--output", tmp_path / "out"]
    command += ["--tokens", "4000", "--at-once", "32", "--sequences", "16", "--seed", "3", "--eager"]
    subprocess.run(command, env=environment(tmp_path / "run"), check=True, timeout=TIMEOUT_S)
    own, chats = (tmp_path / "out" / f"{name}-3.jsonl" for name in ("own", "chats"))
    documents, conversations = ([json.loads(line) for line in path.read_text().splitlines()] for path in (own, chats))
    assert sum(row["tokens"] for row in documents + conversations) >= 4000
    assert all(set(row["text"].split()) <= set(WORDS) for row in documents)
    asked = [row["messages"][0]["content"] for row in conversations]
    about = [question for question in asked if "Return the" in question or "def " in question]
    assert 0 < len(about) < len(asked), "about functions, and of its own"
    assert all(row["messages"][1]["role"] == "assistant" for row in conversations)
    assert len(PackedText(tokenizer, [str(own), str(chats)], 64)), "a recipe's text"
