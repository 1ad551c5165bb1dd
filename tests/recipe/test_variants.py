"""Which weights a recipe trains, and text that is read as training goes on."""

import itertools
import json
import time
from pathlib import Path

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils._python_dispatch import TorchDispatchMode

from hf_twell import sparsify
from hf_twell.cli import main
from hf_twell.models.attention import WITHOUT_MASK, without_masks
from hf_twell.models.loading import load_model
from hf_twell.recipe import finetune
from hf_twell.recipe.arguments import training_arguments
from hf_twell.recipe.packing import PackedText, StreamedText
from hf_twell.recipe.schema import load_recipe
from hf_twell.recipe.trainer import PackedTrainer
from hf_twell.recipe.variants import LoraOutsideFfns
from hf_twell.recipe.yaml12 import read_yaml
from tests.conftest import TINY, logits, tiny_llama
from tests.paths import DEMO, HELDOUT

IDS = torch.arange(3, 19).view(2, 8)


@pytest.fixture
def recipe(tmp_path) -> Path:
    documents = HELDOUT.read_text().split("<|endoftext|>\n")
    (tmp_path / "heldout.txt").write_text("<|endoftext|>\n".join(text[:800] for text in documents[:2]))
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
    return dict(tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())


@pytest.mark.parametrize("trainable", ["ffn", "ffn+lora"])
def test_what_is_trained_and_what_is_saved(recipe, trainable, run_json):
    pytest.importorskip("peft")
    pytest.importorskip("datasets")
    changes = [f"trainable={trainable}", "training.learning_rate=1e-3", "layers=[0, 2]"]
    folder = run_json("train", recipe, *changes)["model"]
    before, after = weights_of(DEMO / "model"), weights_of(folder)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    ffns = {name for name in before if ".mlp." in name}
    attention = {name for name in before if "self_attn" in name and "proj" in name}
    assert changed == (ffns if trainable == "ffn" else ffns | attention)
    entry = tf.AutoConfig.from_pretrained(folder).twell
    assert len(entry.pop("density")) == 4, "as measured at the end"
    assert {len(of_layers) for of_layers in entry.pop("unions").values()} == {4}
    assert entry == {"version": 1, "layers": [0, 2]}
    for step in (2, 4) if trainable == "ffn+lora" else ():
        with pytest.raises(ValueError, match=r"unfinished: .*its LoRA adapters are not merged"):
            load_model(recipe.parent / "out" / f"checkpoint-{step}")


def test_what_is_frozen_stays(recipe, error_line, run_json):
    pytest.importorskip("datasets")
    changes = ["freeze=[embed_tokens, norm]", "training.learning_rate=1e-3"]
    folder = run_json("train", recipe, *changes)["model"]
    before, after = weights_of(DEMO / "model"), weights_of(folder)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "proj" in name}
    changes += ["training.max_steps=6"]
    line = error_line("train", recipe, "--resume", *changes, "freeze=[norm]")
    assert "was trained with freeze=['embed_tokens', 'norm'], which a resumed run keeps" in line
    assert main(["train", str(recipe), "--resume", *changes]) == 0


def test_what_cannot_be_frozen_is_said(recipe, error_line):
    for value, message in (("norm", "give a list of parts of weights' names"), ("[embd]", "freeze has 'embd'")):
        assert message in error_line("train", recipe, f"freeze={value}")
    parts = error_line("train", recipe, "freeze=[embd]").partition("parts of their names: ")[2].split(", ")
    assert {"embed_tokens", "q_proj", "norm"} <= set(parts)
    assert len(parts) == len(set(parts)), "layers have the same parts, and are many"


@pytest.mark.slow
def test_two_runs_with_adapters_are_alike(recipe, run_json):
    """They begin at random."""
    pytest.importorskip("peft")
    pytest.importorskip("datasets")
    logs = []
    for run in range(2):
        torch.manual_seed(run)
        changes = ["trainable=ffn+lora", "training.max_steps=2", "training.learning_rate=1e-3"]
        changes += ["training.save_strategy='no'", f"output_dir={recipe.parent / str(run)}"]
        logs.append(run_json("train", recipe, *changes)["logs"])
    assert logs[0] == logs[1]


def test_adapters_are_merged_exactly():
    pytest.importorskip("peft")
    model = sparsify(tiny_llama(), backend="reference").eval()
    adapters = LoraOutsideFfns(model, {"r": 2})
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
    assert all(parameter.requires_grad for parameter in model.parameters())
    sparsify(model)


@pytest.mark.parametrize("targets", [["q_proj", "up_proj"], ["mlp.down_proj"], "all-linear", r".*(q|gate)_proj"])
def test_adapters_in_the_blocks_are_refused(targets):
    pytest.importorskip("peft")
    model = sparsify(tiny_llama())
    with pytest.raises(ValueError, match=r"lora: .*_proj is in the feed-forward blocks"):
        LoraOutsideFfns(model, {"target_modules": targets})
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in tiny_llama().named_parameters()}
    sparsify(model)


def test_a_stream_gives_the_sequences_of_the_packed_text(recipe):
    pytest.importorskip("datasets")

    tokenizer = tf.AutoTokenizer.from_pretrained(DEMO / "model")
    source = {"hub": "json", "data_files": str(recipe.parent / "rows.jsonl"), "column": "words", "skip": 3, "take": 5}
    packed = PackedText(tokenizer, source, 32)
    streamed = list(StreamedText(tokenizer, {**source, "streaming": True}, 32))
    assert len(packed) == len(streamed) > 10
    for one, other in zip(packed, streamed, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])
    with pytest.raises(ValueError, match="no column 'text'; it has words"):
        PackedText(tokenizer, {**source, "column": "text"}, 32)


@pytest.mark.slow
def test_a_recipe_trains_on_local_parquet_as_on_the_same_rows_elsewhere(recipe, run_json):
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
        logs.append(run_json("train", recipe, *changes)["logs"])
    assert len(logs[0]) == 4
    assert logs[0] == logs[1]


@pytest.mark.slow
@pytest.mark.parametrize("trainable", ["all", "ffn+lora"])
def test_a_streamed_run_resumes_to_the_same_model(recipe, trainable, run_json):
    pytest.importorskip("datasets")
    if "lora" in trainable:
        pytest.importorskip("peft")
    changes = [f"trainable={trainable}", "training.learning_rate=1e-3"]
    whole = run_json("train", recipe, *changes, f"output_dir={recipe.parent / 'whole'}")
    (recipe.parent / "whole").rename(recipe.parent / "out")
    for name in ("checkpoint-4", "final"):
        (recipe.parent / "out" / name).rename(recipe.parent / name)
    resumed = run_json("train", recipe, *changes, "--resume")
    assert len(whole["logs"]) == 4
    for mine, row in zip(resumed["logs"], whole["logs"], strict=True):
        assert mine == pytest.approx(row, rel=1e-5, abs=1e-6)
    assert resumed["after"]["loss"] == pytest.approx(whole["after"]["loss"], abs=1e-6)


def words(ends_itself=False, eos="<eos>") -> tf.PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "a": 2, "b": 3, "c": 4}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if ends_itself:
        made.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 0)])
    return tf.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=eos)


@pytest.mark.parametrize("ends_itself", [False, True])
def test_every_document_ends_once(tmp_path, ends_itself):
    path = tmp_path / "text.txt"
    path.write_text("a b\n<|endoftext|>\nc\n<|endoftext|>\nb c a\n<|endoftext|>\n")
    packed = PackedText(words(ends_itself), [str(path)], 3)
    assert packed.sequences.tolist() == [[2, 3, 0], [4, 0, 3], [4, 2, 0]]
    assert torch.equal(packed[1]["labels"], packed[1]["input_ids"])
    assert PackedText(words(eos=None), str(path), 4).sequences.tolist() == [[2, 3, 4, 3]], (
        "what is left is less than one"
    )
    assert len(PackedText(words(), str(path), 9)) == 1
    with pytest.raises(ValueError, match="9 tokens, less than one sequence of 10"):
        PackedText(words(), str(path), 10)


class Book:
    """A tokenizer to which every document has 2,000,000 tokens."""

    eos_token_id = None

    def __call__(self, texts, **_):
        return {"input_ids": [list(range(2_000_000)) for _ in texts]}


def test_each_sequence_of_a_long_document_takes_the_same_time(tmp_path):
    (tmp_path / "book.txt").write_text("a book")
    sequences = iter(StreamedText(Book(), [str(tmp_path / "book.txt")], 8))
    next(sequences)  # which reads it
    begun = time.monotonic()
    following = [sequence["input_ids"].tolist() for sequence in itertools.islice(sequences, 1000)]
    assert time.monotonic() - begun < 2, "10 ms each and more where all that follows is copied for it"
    assert following == [list(range(start, start + 8)) for start in range(8, 8008, 8)]


def test_paths_of_a_recipe_start_from_its_folder_and_changes_do_not(recipe, monkeypatch):
    (recipe.parent / "parent").mkdir()
    recipe.write_text(
        "model: some/name\noutput_dir: out\ntrain: heldout.txt\nheldout: [heldout.txt]\nl1_weight: 2e-4\n"
    )
    monkeypatch.chdir(DEMO)
    text = str(recipe.parent / "heldout.txt")
    read = load_recipe(recipe, ["distill.logits=0.25"])
    assert (read.model, read.output_dir) == ("some/name", str(recipe.parent / "out"))
    assert (read.train, read.heldout) == ([text], [text])
    assert read.distill == {"logits": 0.25}
    assert (read.sparsity["l1_weight"], read.sparsity["target_density"]) == (2e-4, None)
    args = training_arguments(read)
    assert (args.output_dir, args.report_to, args.logging_steps) == (read.output_dir, [], 10)
    read = load_recipe(recipe, ["training.max_steps=5", "training.max_steps=null", "training.num_train_epochs=2"])
    args = training_arguments(read)
    assert (args.max_steps, args.num_train_epochs) == (-1, 2), "null is as if it was not there"
    with recipe.open("a") as file:
        file.write("distill: {parent: parent}\n")
    read = load_recipe(recipe, ["model=./model", "train=text/heldout.txt", "distill.layers=1", "l1_weight=0"])
    assert (read.model, read.train) == ("./model", "text/heldout.txt")
    assert read.distill == {"parent": str(recipe.parent / "parent"), "layers": 1}
    assert read.sparsity["l1_weight"] == 0
    recipe.write_text(recipe.read_text().replace("some/name", "./absent"))
    assert load_recipe(recipe).model == str(recipe.parent / "absent"), "a folder, though not there, and no name"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0100", 100),
        ("-07", -7),
        ("0o17", 15),
        ("0x1F", 31),
        ("1_000", 1000),
        ("0b11", "0b11"),
        ("1:30", "1:30"),
        ("1:30.5", "1:30.5"),
        ("2e-4", 2e-4),
        (".5", 0.5),
        ("-.5e3", -500.0),
        ("1.", 1.0),
        ("-.inf", -float("inf")),
        ("no", "no"),
        ("true", True),
        ("2026-11-23", "2026-11-23"),
        ("~", None),
        ("", None),
        ("1.2.3", "1.2.3"),
        ("{a: &a {b: 1}, c: {<<: *a, b: 2}}", {"a": {"b": 1}, "c": {"b": 2}}),
    ],
)
def test_scalars_are_those_of_yaml_12(text, value):
    read = read_yaml(text, "here")
    assert (read, type(read)) == (value, type(value))


def test_a_key_that_is_there_twice_is_told(recipe):
    with recipe.open("a") as file:
        file.write("training: {max_steps: 5, max_steps: 6}\n")
    with pytest.raises(ValueError, match=r"recipe.yaml is not readable as YAML: the key 'max_steps' is there twice"):
        load_recipe(recipe)
    with pytest.raises(ValueError, match=r"here is not readable as YAML: invalid literal for int\(\)"):
        read_yaml("!!int five", "here")


def test_batches_are_copied_to_a_gpu_without_waiting_for_the_step_before(recipe, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    args = training_arguments(load_recipe(recipe, ["training.use_cpu=null"]))
    assert args.accelerator_config.non_blocking
    assert args.dataloader_pin_memory
    for change in ("use_cpu=true", "dataloader_pin_memory=false", "accelerator_config={non_blocking: false}"):
        args = training_arguments(load_recipe(recipe, ["training.use_cpu=null", f"training.{change}"]))
        assert not args.accelerator_config.non_blocking, change


class Reads(TorchDispatchMode):
    """Counts the values that the host reads, for which it would wait on a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


def test_whole_sequences_are_not_searched_for_padding():
    model = tiny_llama()
    expected = logits(model)
    with without_masks(model), Reads() as reads:
        assert torch.equal(logits(model), expected)
    assert not reads.count
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("case", ["sliding window", "eager"])
def test_models_that_need_masks_keep_them(case):
    torch.manual_seed(0)
    model = tiny_llama() if case == "eager" else tf.MistralForCausalLM(tf.MistralConfig(**TINY, sliding_window=4))
    if case == "eager":
        model.set_attn_implementation("eager")
    expected, before = logits(model), model.config._attn_implementation
    with without_masks(model):
        assert torch.equal(logits(model), expected)
    assert model.config._attn_implementation == before


def test_a_recipe_trains_without_masks(recipe, monkeypatch):
    pytest.importorskip("datasets")
    seen, step = [], PackedTrainer.training_step

    def look(self, model, inputs, *args, **kwargs):
        parent = next(c for c in self.callback_handler.callbacks if hasattr(c, "distillation")).distillation.parent
        seen.append((set(inputs), *(each.config._attn_implementation for each in (model, parent))))
        return step(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(PackedTrainer, "training_step", look)
    finetune.finetune(load_recipe(recipe, ["distill={logits: 1.0}", f"output_dir={recipe.parent / 'out'}"]))
    assert seen == [({"input_ids", "labels"}, WITHOUT_MASK, WITHOUT_MASK)] * 4
    assert WITHOUT_MASK not in (recipe.parent / "out/checkpoint-2/config.json").read_text()


def test_recipes_that_lack_keys(recipe):
    recipe.write_text("model: some/name\ntrain: heldout.txt\n")
    with pytest.raises(ValueError, match=r"lacks output_dir, heldout$"):
        load_recipe(recipe)
    recipe.write_text("- model\n")
    with pytest.raises(ValueError, match="holds no mapping"):
        load_recipe(recipe)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["distill={}"], (0.5, 0.0, torch.float32)),
        (["distill={logits: 0.25, layers: 2}", "dtype=bfloat16"], (0.25, 2, torch.bfloat16)),
        (["distill.layers=1", "training.bf16=true"], (0.5, 1, torch.bfloat16)),
        (["distill.dtype=float16", "training.bf16=true"], (0.5, 0.0, torch.float16)),
    ],
)
def test_the_teacher_that_a_recipe_asks_for(recipe, changes, expected):
    model = sparsify(tf.AutoModelForCausalLM.from_pretrained(DEMO / "model"))
    assert finetune.teacher(load_recipe(recipe), model) is None
    other = tf.AutoModelForCausalLM.from_pretrained(DEMO / "model")
    other.model.norm.weight.data += 0.5
    other.save_pretrained(recipe.parent / "other")
    tf.AutoTokenizer.from_pretrained(DEMO / "model").save_pretrained(recipe.parent / "other")
    for parent in (DEMO / "model", recipe.parent / "other"):
        more = [] if parent == DEMO / "model" else [f"distill.parent={parent}"]
        teacher = finetune.teacher(load_recipe(recipe, [*changes, *more]), model)
        dtype = expected[2]
        assert (teacher.logits, teacher.layers, teacher.parent.dtype) == (*expected[:2], dtype)
        theirs = tf.AutoModelForCausalLM.from_pretrained(parent, dtype=dtype)
        assert torch.equal(teacher.parent.model.norm.weight, theirs.model.norm.weight)


def test_a_change_fills_a_mapping_that_the_recipe_leaves_out(recipe):
    assert load_recipe(recipe, ["distill=null", "distill.logits=0.25"]).distill == {"logits": 0.25}
