"""Which weights a recipe trains, and text that is read as training goes on."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_twell import sparsify
from hf_twell.cli import main
from hf_twell.loading import load_model
from hf_twell.packing import PackedText, StreamedText
from hf_twell.training import load_recipe
from hf_twell.variants import Adapters, train_ffns_alone
from tests.conftest import tiny_llama

DEMO = Path(__file__).parents[1] / "recipes" / "demo"
IDS = torch.arange(3, 19).view(2, 8)


@pytest.fixture
def recipe(tmp_path) -> Path:
    documents = (DEMO / "text" / "heldout.txt").read_text().split("<|endoftext|>\n")
    (tmp_path / "heldout.txt").write_text("<|endoftext|>\n".join(text[:800] for text in documents[:6]))
    with (tmp_path / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps({"words": text[:800]}) + "\n" for text in documents[6:40])
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {DEMO / 'model'}\noutput_dir: out\ntrain: {{hub: json, data_files: {tmp_path / 'rows.jsonl'}, "
        "streaming: true, column: words, skip: 2}\nheldout: heldout.txt\nsequence_length: 32\ntarget_density: 0.1\n"
        "training: {max_steps: 4, per_device_train_batch_size: 2, logging_steps: 1, save_steps: 2, use_cpu: true}\n"
    )
    return path


def weights_of(folder) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())


@pytest.mark.parametrize("trainable", ["ffn", "ffn+lora"])
def test_what_is_trained_and_what_is_saved(recipe, trainable, capsys):
    pytest.importorskip("peft")
    pytest.importorskip("datasets")
    changes = [f"trainable={trainable}", "training.learning_rate=1e-3"]
    assert main(["train", str(recipe), "--json", *changes]) == 0
    folder = json.loads(capsys.readouterr().out)["model"]
    before, after = weights_of(DEMO / "model"), weights_of(folder)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    ffns = {name for name in before if ".mlp." in name}
    attention = {name for name in before if "self_attn" in name and "proj" in name}
    assert changed == (ffns if trainable == "ffn" else ffns | attention)
    assert AutoConfig.from_pretrained(folder).twell == {"version": 1, "layers": None}
    if trainable == "ffn+lora":
        twell = AutoConfig.from_pretrained(recipe.parent / "out" / "checkpoint-2").twell
        assert "LoRA" in twell["unfinished"]["adapters"], "they are not merged there"


def test_a_blend_and_adapters_each_take_off_their_own_mark(recipe, capsys):
    pytest.importorskip("peft")
    pytest.importorskip("datasets")
    assert main(["train", str(recipe), "--json", "trainable=ffn+lora", "blend_steps=2", "training.save_steps=1"]) == 0
    folder = json.loads(capsys.readouterr().out)["model"]
    for step, parts in ((1, {"adapters", "activation"}), (2, {"adapters"}), (4, {"adapters"})):
        checkpoint = recipe.parent / "out" / f"checkpoint-{step}"
        assert AutoConfig.from_pretrained(checkpoint).twell["unfinished"].keys() == parts, step
        with pytest.raises(ValueError, match=r"unfinished: .*its LoRA adapters are not merged"):
            load_model(checkpoint)
    assert AutoConfig.from_pretrained(folder).twell == {"version": 1, "layers": None}


def test_adapters_are_merged_exactly():
    pytest.importorskip("peft")
    model = sparsify(tiny_llama(), backend="reference").eval()
    adapters = Adapters(model, {"r": 2})
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name or ".mlp." in name), name
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    with pytest.raises(ValueError, match="unfinished"), torch.no_grad():
        sparsify(model)
    with torch.no_grad():
        wanted = model(IDS).logits
        adapters.merge()
        torch.testing.assert_close(model(IDS).logits, wanted, atol=1e-4, rtol=1e-4)
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in tiny_llama().named_parameters()}
    sparsify(model)


@pytest.mark.parametrize("targets", [["q_proj", "up_proj"], ["mlp.down_proj"], "all-linear", r".*(q|gate)_proj"])
def test_adapters_in_the_blocks_are_refused(targets):
    pytest.importorskip("peft")
    model = sparsify(tiny_llama())
    with pytest.raises(ValueError, match=r"lora: .*_proj is in the feed-forward blocks"):
        Adapters(model, {"target_modules": targets})
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in tiny_llama().named_parameters()}
    sparsify(model)


def test_ffns_alone():
    model = tiny_llama()
    train_ffns_alone(model)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if ".mlp." in name
    }


def test_a_stream_gives_the_sequences_of_the_packed_text(recipe):
    pytest.importorskip("datasets")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    source = {"hub": "json", "data_files": str(recipe.parent / "rows.jsonl"), "column": "words", "skip": 3, "take": 5}
    packed = PackedText(tokenizer, source, 32)
    streamed = list(StreamedText(tokenizer, {**source, "streaming": True}, 32))
    assert len(packed) == len(streamed) > 10
    for one, other in zip(packed, streamed, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])
    with pytest.raises(ValueError, match="no column 'text'; it has words"):
        PackedText(tokenizer, {**source, "column": "text"}, 32)


def test_a_recipe_trains_on_local_parquet_as_on_the_same_rows_elsewhere(recipe, capsys):
    datasets = pytest.importorskip("datasets")
    path = recipe.parent / "rows.parquet"
    rows = [json.loads(line)["words"] for line in (recipe.parent / "rows.jsonl").read_text().splitlines()]
    datasets.Dataset.from_dict({"text": rows}).to_parquet(path)
    packed = [
        f"train={{hub: json, data_files: {recipe.parent / 'rows.jsonl'}, column: words}}",
        f"output_dir={recipe.parent / 'other'}",
    ]
    logs = []
    for changes in ([f"train=[{path}]"], packed):
        assert main(["train", str(recipe), "--json", *changes]) == 0
        logs.append(json.loads(capsys.readouterr().out)["logs"])
    assert len(logs[0]) == 4
    assert logs[0] == logs[1]


@pytest.mark.parametrize("trainable", ["all", "ffn+lora"])
def test_a_streamed_run_resumes_to_the_same_model(recipe, trainable, capsys):
    pytest.importorskip("datasets")
    if "lora" in trainable:
        pytest.importorskip("peft")
    changes = [f"trainable={trainable}", "training.learning_rate=1e-3"]
    assert main(["train", str(recipe), "--json", *changes, f"output_dir={recipe.parent / 'whole'}"]) == 0
    whole = json.loads(capsys.readouterr().out)
    (recipe.parent / "whole").rename(recipe.parent / "out")
    for name in ("checkpoint-4", "final"):
        (recipe.parent / "out" / name).rename(recipe.parent / name)
    assert main(["train", str(recipe), "--json", *changes, "--resume"]) == 0
    resumed = json.loads(capsys.readouterr().out)
    assert len(whole["logs"]) == 4
    for mine, row in zip(resumed["logs"], whole["logs"], strict=True):
        assert mine == pytest.approx(row, rel=1e-5, abs=1e-6)
    assert resumed["after"]["loss"] == pytest.approx(whole["after"]["loss"], abs=1e-6)


def test_a_change_fills_a_mapping_that_the_recipe_leaves_out(recipe):
    assert load_recipe(recipe, ["distill=null", "distill.logits=0.25"]).distill == {"logits": 0.25}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("l1_weight=1e-3", "give one of them"),
        ("target_density=2.5", "between 0 and 1"),
        ("layer_shares=some", "'equal', 'free'"),
        ("l1_bounds=0.5", "lowest and the highest"),
        ("trainable=most", "'ffn+lora'"),
        ("distill.logit=0.5", "did you mean 'logits'"),
        ("training.max_steps=-1", "give max_steps"),
        ("training.max_steps=null", "give max_steps"),
        ("training.max_steps=many", "max_steps: 'many'; give a number"),
        ("training.max_steps=[2]", "max_steps: [2]; give a number"),
        ("training.dataloader_num_workers=two", "dataloader_num_workers: 'two'; give a number"),
        ("training.dataloader_num_workers=2", "at most one of dataloader_num_workers"),
        ("heldout={hub: json, streaming: true}", "how many rows to take"),
        ("blend_steps=4", "leaves none"),
        ("revive_after=soon", "a number of at least 0"),
        ("distill=true", "give a mapping"),
        ("training=[1]", "give a mapping"),
        ("heldout.take=3", "heldout holds no keys"),
        ("train=null", "give text files"),
        ("heldout=[3]", "give text files"),
        ("heldout={split: test}", "give text files"),
        ("target_density.start=0.5", "target_density holds no keys"),
        ("model=", "a folder or a Hub name"),
        ("output_dir=5", "give a folder"),
        ("train=5", "give text files"),
        ("train={streaming: true}", "give text files"),
        ("distill={logits: high}", "logits: 'high'; give a number"),
        ("training.gradient_checkpointing=no", "give true or false"),
        ("training.output_dir=elsewhere", "write output_dir alone"),
    ],
)
def test_mistakes_end_in_one_line(recipe, change, says, capsys):
    assert main(["train", str(recipe), change]) == 1
    assert says in capsys.readouterr().err.strip().splitlines()[-1]
