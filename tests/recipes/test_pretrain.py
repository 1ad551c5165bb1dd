import json
import math
import random
import re
import runpy
from pathlib import Path

import pytest
import torch
import yaml
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

from tests.conftest import tiny_llama
from tests.paths import ROOT

RECIPES = ROOT / "recipes"
DEMO = RECIPES / "demo"
EOS = "<|endoftext|>"


@pytest.fixture(scope="module")
def script() -> dict:
    return runpy.run_path(str(RECIPES / "pretrain.py"))


def documents(path: Path) -> list[str]:
    return [d for d in path.read_text(encoding="utf-8").split(f"\n{EOS}\n") if d]


def invented_story(rng: random.Random) -> str:
    name, animal, place = rng.choice(["Lily", "Tom", "Sue"]), rng.choice(["cat", "dog"]), rng.choice(["park", "sea"])
    return (
        f"One day, {name} saw a {animal} in the {place}. “Hello!” said {name}.\n\n"
        f"The {animal} had {rng.randrange(10**6)} friends — and {name} was happy."
    )


@pytest.fixture(scope="module")
def pretrained(script, tmp_path_factory) -> tuple[Path, dict]:
    """The output of a few steps on invented stories, and the report."""
    folder = tmp_path_factory.mktemp("pretrain")
    rng = random.Random(0)
    for source in ("books", "stories"):
        text = "".join(f"{invented_story(rng)}\n{EOS}\n" for _ in range(240))
        (folder / f"{source}.txt").write_text(text, encoding="utf-8")
    recipe = yaml.safe_load((DEMO / "pretrain.yaml").read_text())
    recipe["sources"] = {"books": {"passage_chars": 40, "min_common": 0.5}, "stories": {}}
    recipe["model"] |= {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    recipe["model"] |= {"max_position_embeddings": 32}
    recipe["train"] |= {"rows_per_step": 8, "warmup_steps": 2, "eval_every": 4}
    recipe["train"]["mixture"] = [
        {"until": 0.5, "books": 0.9, "stories": 0.1},
        {"until": 1.0, "books": 0.4, "stories": 0.6},
    ]
    recipe["prompts"] = ["One day, Lily"]
    recipe["bundle"] = {"heldout": {"books": 300, "stories": 300}, "train": {"books": 600, "stories": 600}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    arguments = [str(folder / "recipe.yaml"), "--text", str(folder), "--output", str(folder / "model")]
    report = script["main"]([*arguments, "--bundle", str(folder / "bundle"), "--max-steps", "8"])
    return folder, report


def test_a_few_steps_on_a_cpu_learn_and_save_a_model_that_loads(pretrained):
    folder, report = pretrained
    assert [row["step"] for row in report["log"]] == [4, 8]
    assert report["log"][1]["stories"] < report["log"][0]["stories"] < math.log(320)
    assert report["tokens_seen"] == 8 * 8 * 32
    assert json.loads((folder / "model" / "pretrain.json").read_text()) == report
    assert report["samples"][0].startswith("One day, Lily")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) == report["parameters"]


def test_a_mixture_of_experts_sparse_from_its_first_step(pretrained, script, tmp_path, capsys):
    """The recipe's own YAML, with a tiny model; what it saves has a type of our own."""
    folder, _ = pretrained
    recipe = yaml.safe_load((RECIPES / "demo" / "pretrain-experts.yaml").read_text())
    tiny = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
    recipe["model"] |= tiny | {"num_hidden_layers": 2, "max_position_embeddings": 32}
    assert recipe["model"]["output_router_logits"]
    sources = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe |= {name: sources[name] for name in ("sources", "prompts")}
    recipe["train"] |= {"rows_per_step": 8, "warmup_steps": 2, "eval_every": 10, "mixture": sources["train"]["mixture"]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    arguments = [str(tmp_path / "recipe.yaml"), "--prepared", str(tmp_path / "prepared"), "--output"]
    sparse = ["--text", str(folder), "--max-steps", "20", "--target-density", "0.1"]
    report = script["main"]([*arguments, str(tmp_path / "model"), *sparse])
    first, last = report["log"]
    assert last["density"] < first["density"] < 0.5
    assert report["target_density"] == 0.1
    assert report["sparsity"]["density"] == pytest.approx(last["density"], rel=0.2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (type(model).__name__, model.config.ffn_act) == ("TwellOlmoeForCausalLM", "relu")
    densities = [layer["density"] for layer in report["sparsity"]["layers"]]
    assert model.config.twell["density"] == pytest.approx(densities, abs=1e-6)  # it keeps six digits
    assert not model.config.output_router_logits

    dense = script["main"]([*arguments, str(tmp_path / "dense"), "--max-steps", "2"])  # without the text
    assert dense["training_tokens"] == report["training_tokens"]
    assert dense["sparsity"]["density"] > 0.99  # an end token is padding, and its embedding stays zero
    assert (tmp_path / "dense" / "tokenizer.json").read_text() == (tmp_path / "model" / "tokenizer.json").read_text()

    recipe["model"]["vocab_size"] = 300
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(SystemExit):
        script["main"]([*arguments, str(tmp_path / "smaller")])
    assert "has 320 tokens, the recipe 300" in capsys.readouterr().err


def test_the_balance_of_a_layer_is_that_of_transformers_and_one_where_experts_are_evenly_used(script):
    torch.manual_seed(0)
    logits = torch.randn(2, 40, 6)
    each = [load_balancing_loss_func((layer,), 6, 2) / 2 for layer in logits]  # theirs is 2 where all are even
    assert script["balance_loss"](tuple(logits), 2).item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-6)
    even = 1e-3 * torch.eye(6).add(torch.eye(6).roll(1, 0))
    assert script["balance_loss"]((even,), 2).item() == pytest.approx(1, rel=1e-6)


def test_the_tokenizer_gives_the_text_back_between_its_special_tokens(pretrained):
    tokenizer = AutoTokenizer.from_pretrained(pretrained[0] / "model")
    text = 'Say "Hi", Tom:  it\'s 1999 é -- yes.\n\nNo.'
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.convert_tokens_to_ids(EOS) == tokenizer.eos_token_id


def test_whole_documents_are_held_out_before_they_are_cut(script, tmp_path):
    paragraphs = [[f"Document {i} paragraph {j} says a few words." for j in range(4)] for i in range(7)]
    (tmp_path / "books.txt").write_text("".join("\n\n".join(p) + f"\n{EOS}\n" for p in paragraphs))
    kept, held_out = script["split_source"](tmp_path, "books", {"passage_chars": 50}, 3)
    assert len(held_out) == 2 * 2  # documents 2 and 5, two passages each
    assert all(p.startswith(("Document 2 ", "Document 5 ")) for p in held_out)
    assert "\n\n".join(kept + held_out).count("Document") == 7 * 4
    assert not any("Document 2 " in p or "Document 5 " in p for p in kept)


def test_common_share_counts_the_words_of_a_passage_that_are_common_in_all(script):
    plain, rare = "The old man saw the sea, and the old man slept.", "zyx qwv plk mnb"
    assert script["common_share"]([plain, plain, rare, f"{rare} the sea"], top=7) == [1.0, 1.0, 0.0, 1 / 3]


def test_a_missing_source_is_named(script, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither poems\.txt nor poems\.txt\.xz"):
        script["read_source"](tmp_path, "poems")


@pytest.mark.parametrize("done", [0.0, 0.84, 0.85, 0.9999])
@pytest.mark.parametrize("rows", [1, 8, 256])
def test_the_rows_of_a_step_add_up(script, done, rows):
    mixture = yaml.safe_load((DEMO / "pretrain.yaml").read_text())["train"]["mixture"]
    counts = script["rows_by_source"](mixture, done, rows)
    assert sum(counts.values()) == rows
    assert min(counts.values()) >= 0


def test_held_out_loss_counts_every_token_once(script):
    stream = torch.arange(23, dtype=torch.int32) % 5

    def one_nat_a_token(window, reduction):
        assert reduction == "sum"
        return (window[:, 1:] >= 0).sum().double()

    for rows in (1, 4):
        result = script["held_out_loss"](one_nat_a_token, stream, 22, 8, rows)
        assert (result["tokens"], result["loss"]) == (22, 1.0)
        assert result["bits_per_byte"] == pytest.approx(1 / math.log(2))


def test_the_bundle_has_one_form_of_quotation_marks_and_dashes(pretrained):
    folder, _ = pretrained
    train, held_out = (set(documents(folder / "bundle" / f"{n}.txt")) for n in ("train", "heldout"))
    assert train
    assert held_out
    assert not any(mark in d for d in train | held_out for mark in "“”—")
    assert not {d for d in train & held_out if re.search(r"\d", d)}, "but for passages without a number, all differ"


def test_documents_are_packed_between_start_and_end_tokens(script):
    tokenizer = script["train_tokenizer"](["a b", "c d"], 300, 32)
    a, c = (tokenizer(letter, add_special_tokens=False).input_ids for letter in "ac")
    assert script["pack"](tokenizer, ["a", "c"]).tolist() == [0, *a, 1, 0, *c, 1]


def test_each_step_reads_other_windows_and_takes_a_gradient_and_learning_rate_of_its_own(script):
    torch.manual_seed(0)
    model = tiny_llama(max_position_embeddings=8)
    windows, fresh, rates = [], [], []

    def forward(module, args, inputs):
        if torch.is_grad_enabled():
            windows.extend(tuple(row.tolist()) for row in inputs["input_ids"])
            fresh.append(all(parameter.grad is None for parameter in model.parameters()))

    model.base_model.register_forward_pre_hook(forward, with_kwargs=True)
    stepped = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    recipe = yaml.safe_load((DEMO / "pretrain.yaml").read_text())["train"]
    recipe |= {"steps": 4, "warmup_steps": 2, "rows_per_step": 4, "eval_every": 2, "learning_rate": 1e-3}
    recipe["mixture"] = [{"until": 0.5, "low": 1.0}, {"until": 1.0, "high": 1.0}]
    text = torch.randint(3, 96, (400,), dtype=torch.int32)
    streams = {"low": text[:200] % 40 + 3, "high": text[200:] % 40 + 50}
    try:
        log = script["train"](model, streams, {"low": (streams["low"], 200)}, recipe, seed=0)
    finally:
        stepped.remove()
    assert all(fresh)
    assert len(windows) == 16
    assert len(set(windows)) > 12
    assert [max(window) < 45 for window in windows] == [True] * 8 + [False] * 8, "the mixture changes half-way"
    cosine = [0.05 + 0.475 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert rates == pytest.approx([1e-3 * warm * factor for warm, factor in zip((0.5, 1, 1, 1), cosine, strict=True)])
    assert [row["step"] for row in log] == [2, 4]
    assert all(2 < row["train"] < 8 for row in log), "the mean of two steps"


def test_the_shipped_model_is_small_and_reads_english():
    assert sum(f.stat().st_size for f in (DEMO / "model").iterdir()) <= 9_900_000
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
    story = next(d for d in documents(DEMO / "text" / "heldout.txt") if len(d) < 1000)
    ids = tokenizer(story, return_tensors="pt").input_ids
    with torch.no_grad():
        assert model(ids, labels=ids).loss < 3.0
    out = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert tokenizer.decode(out[0], skip_special_tokens=True) == "Once upon a time, there was a little"


def test_the_shipped_texts_share_no_document():
    train, held_out = (documents(DEMO / "text" / f"{n}.txt") for n in ("train", "heldout"))
    assert len(train) > 300
    assert len(held_out) > 30
    assert not set(train) & set(held_out)
