"""LoRA on sparsified models: exact while active, merged and unmerged; trained with the L1 term; kept off SiLU bases."""

import copy
import json
import re
import warnings
from pathlib import Path

import pytest
import torch
import transformers as tf
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from hf_twell import (
    L1Penalty,
    SparsityCallback,
    TwellLlamaForCausalLM,
    evaluate,
    load_adapter,
    measure_sparsity,
    save_adapter,
    sparsify,
)
from hf_twell.blocks.modeling import sparse_ffns
from hf_twell.models.hub import folder_card
from tests.conftest import ids, logits, relu_llama, tiny_llama
from tests.one_step import ONE_STEP, make_trainer
from tests.paths import MODEL

pytestmark = pytest.mark.numeric

peft = pytest.importorskip("peft")

ATTENTION, FFN = ["q_proj", "v_proj"], ["gate_proj", "up_proj", "down_proj"]
TARGETS = {"attention": ATTENTION, "ffn": FFN, "both": ATTENTION + FFN}


def with_lora(model, targets=ATTENTION + FFN, seed=1):
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=targets)
    model = peft.get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.2, generator=generator)
    return model


@pytest.fixture
def base(tmp_path) -> Path:
    """A dense SiLU model on disk."""
    tiny_llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_active_merged_unmerged_and_saved(targets, backend, tmp_path):
    check = torch.testing.assert_close if backend == "auto" else lambda a, b: torch.equal(a, b) or pytest.fail("differ")
    model = sparsify(tiny_llama(), backend=backend).eval()
    plain = logits(model)  # in evaluation the kernels may have changed down_proj's memory order
    model, twin = with_lora(model, TARGETS[targets]), with_lora(relu_llama(), TARGETS[targets])
    check(logits(model), logits(twin))
    assert not torch.allclose(logits(model), plain, atol=1e-2)
    with model.disable_adapter():
        check(logits(model), plain)
    for each in (model, twin):
        each.merge_adapter()
    check(logits(model), logits(twin))
    for each in (model, twin):
        each.unmerge_adapter()
    check(logits(model), logits(twin))
    active = logits(model)
    model, twin = model.merge_and_unload(), twin.merge_and_unload()
    assert len(sparse_ffns(model)) == 3
    assert all(ffn._read_weights(eight_bit=False) for ffn in sparse_ffns(model))
    check(logits(model), logits(twin))
    torch.testing.assert_close(logits(model), active, atol=1e-4, rtol=1e-4)
    model.save_pretrained(tmp_path / "merged")
    plain = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert plain.config.hidden_act == "relu"
    check(logits(plain), logits(model))


def test_save_and_load(base, tmp_path):
    model = with_lora(sparsify(tf.AutoModelForCausalLM.from_pretrained(base), layers=[0, 2], backend="reference"))
    truth = logits(model)
    save_adapter(model, tmp_path / "adapter")
    record = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_sparsified_by_hf_twell"]
    assert record == {"version": 1, "layers": [0, 2]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = load_adapter(tmp_path / "adapter", backend="reference")
    assert not [warning for warning in caught if "base_sparsified_by_hf_twell" in str(warning.message)]
    assert not any(module.training for module in loaded.modules())
    assert [(ffn.twell.layer, ffn.twell.backend) for ffn in sparse_ffns(loaded)] == [(0, "reference"), (2, "reference")]
    assert torch.equal(logits(loaded), truth)
    dense = tf.AutoModelForCausalLM.from_pretrained(base)
    assert torch.equal(logits(load_adapter(tmp_path / "adapter", dense, backend="reference")), truth)
    ours = TwellLlamaForCausalLM.from_pretrained(base, backend="reference")
    assert torch.equal(logits(load_adapter(tmp_path / "adapter", ours, backend="reference")), truth)

    again = load_adapter(tmp_path / "adapter", trainable=True)
    assert all(module.training for module in again.modules())
    assert all(p.requires_grad == ("lora_" in name) for name, p in again.named_parameters())
    assert load_adapter(tmp_path / "adapter", dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="dtype='fp32'; choose one of 'auto', 'bfloat16'"):
        load_adapter(tmp_path / "adapter", dtype="fp32")
    tokenizer = tf.AutoTokenizer.from_pretrained(MODEL)
    save_adapter(again, tmp_path / "adapter", tokenizer, overwrite=True)
    assert len(tf.AutoTokenizer.from_pretrained(tmp_path / "adapter")) == len(tokenizer)
    with pytest.raises(ValueError, match="exists"):
        save_adapter(again, tmp_path / "adapter")


def test_a_folder_of_named_adapters_names_them(base, tmp_path):
    """As peft saves several: each in a subfolder of its name."""
    model = with_lora(sparsify(tf.AutoModelForCausalLM.from_pretrained(base)))
    for name in ("math", "code"):
        model.add_adapter(name, model.peft_config["default"])
    model.save_pretrained(tmp_path / "several", selected_adapters=["math", "code"])
    with pytest.raises(ValueError, match=r"several is no adapter: it holds no adapter_config.json") as caught:
        load_adapter(tmp_path / "several")
    assert str(caught.value).endswith("but adapters in subfolders; give the path of one of them: code, math")
    with pytest.raises(ValueError, match=r"adapter_config.json$"):
        load_adapter(base)


def test_auto_peft_model_alone_is_wrong_and_says_so(base, tmp_path):
    model = with_lora(sparsify(tf.AutoModelForCausalLM.from_pretrained(base)))
    save_adapter(model, tmp_path / "adapter")
    with pytest.warns(UserWarning, match="base_sparsified_by_hf_twell"):
        wrong = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert not torch.allclose(logits(wrong), logits(model), atol=1e-2)
    card = (tmp_path / "adapter" / "README.md").read_text()
    for says in ("AutoPeftModel", "wrong outputs", "hf_twell.load_adapter", "- hf_twell\n"):
        assert says in card


def test_a_mistyped_folder_is_named_as_such(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    says = r"no folder at /absent/adapter; give an adapter's folder, or its name on the Hub"
    with pytest.raises(OSError, match=says):
        load_adapter("/absent/adapter")
    for name in ("runs-absent", "out/checkpoint-1"):
        with pytest.raises((OSError, ValueError), match=f"there is no folder {name} here, and as a name on the Hub"):
            load_adapter(name, cache_dir=tmp_path, local_files_only=True)


def test_commands_load_an_adapter_onto_its_base(tmp_path, error_line, run_json):
    """Saved without a tokenizer, it gets the base's. Commands that convert say how to make a whole model of it."""
    model = with_lora(sparsify(tf.AutoModelForCausalLM.from_pretrained(MODEL)))
    save_adapter(model, tmp_path / "adapter")
    text = tmp_path / "text.txt"
    text.write_text("The cell is the smallest unit of life.")
    expected = evaluate(model, tf.AutoTokenizer.from_pretrained(MODEL), text=text)["text"][str(text)]
    arguments = [str(tmp_path / "adapter"), "--text", str(text), "--json"]
    result = run_json("eval", *arguments)
    assert result["model"] == str(tmp_path / "adapter")
    assert result["text"][str(text)]["nats_per_token"] == expected["nats_per_token"]
    assert run_json("inspect", *arguments)["model"] == str(tmp_path / "adapter")
    line = error_line("sparsify", tmp_path / "adapter", tmp_path / "out")
    assert "it is an adapter's; merge it into its base first" in line


def test_adapters_of_a_dense_base_are_refused(base, tmp_path):
    with_lora(tf.AutoModelForCausalLM.from_pretrained(base)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="does not say that its base is sparsified"):
        load_adapter(tmp_path / "adapter")
    with pytest.raises(ValueError, match="base is not sparsified"):
        save_adapter(with_lora(tf.AutoModelForCausalLM.from_pretrained(base)), tmp_path / "other")
    with pytest.raises(ValueError, match="has no adapters"):
        save_adapter(sparsify(tiny_llama()), tmp_path / "other")
    with pytest.raises(ValueError, match="is no adapter"):
        load_adapter(base)


def test_bases_that_cannot_be_converted_are_refused(base, tmp_path):
    save_adapter(with_lora(sparsify(tf.AutoModelForCausalLM.from_pretrained(base))), tmp_path / "adapter")
    wider = tiny_llama(num_hidden_layers=2)
    path = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "base_sparsified_by_hf_twell": {"version": 1, "layers": [2]}}))
    with pytest.raises(ValueError, match="for a model of 2 layers"):
        load_adapter(tmp_path / "adapter", wider)
    path.write_text(json.dumps({**config, "base_sparsified_by_hf_twell": "yes"}))
    with pytest.raises(ValueError, match="base_sparsified_by_hf_twell is 'yes'"):
        load_adapter(tmp_path / "adapter")
    path.write_text(json.dumps(config))
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.rename(weights.with_name("adapter_model.bin"))
    with pytest.raises(ValueError, match="pickled weights are refused"):
        load_adapter(tmp_path / "adapter")


def test_an_adapter_of_another_task_wants_its_base_in_hand(base, tmp_path):
    """A reward model's: loaded onto the causal language model, its head would be dropped in silence."""
    model = sparsify(tf.LlamaForSequenceClassification.from_pretrained(base, num_labels=1))
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=FFN, init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    save_adapter(model.eval(), tmp_path / "lora")
    with pytest.raises(ValueError, match=r"of another task, .* by AutoModelForSequenceClassification, and give it"):
        load_adapter(tmp_path / "lora")
    says = r"holds base_model.model.score.weight, .* LlamaForCausalLM has no place; load"
    with pytest.raises(ValueError, match=says):
        load_adapter(tmp_path / "lora", tf.AutoModelForCausalLM.from_pretrained(base))
    reward = tf.LlamaForSequenceClassification.from_pretrained(base, num_labels=1)
    assert torch.equal(logits(load_adapter(tmp_path / "lora", reward)), logits(model))


TASKS = {
    "CAUSAL_LM": (tf.LlamaForCausalLM, tf.AutoModelForCausalLM),
    "SEQ_CLS": (tf.LlamaForSequenceClassification, tf.AutoModelForSequenceClassification),
    "TOKEN_CLS": (tf.LlamaForTokenClassification, tf.AutoModelForTokenClassification),
    "QUESTION_ANS": (tf.LlamaForQuestionAnswering, tf.AutoModelForQuestionAnswering),
    "FEATURE_EXTRACTION": (tf.LlamaModel, tf.AutoModel),
    None: (tf.LlamaModel, tf.LlamaModel),
}


@pytest.mark.parametrize("task", TASKS)
def test_the_card_of_any_task_says_how_to_load_it(base, tmp_path, monkeypatch, task):
    """Only of a causal language model does it say that it generates text, and what it tells to do is done here."""
    cls, loader = TASKS[task]
    cls(tf.AutoConfig.from_pretrained(base)).save_pretrained(tmp_path / "their" / "base")
    stock = cls.from_pretrained(tmp_path / "their" / "base")
    config = peft.LoraConfig(task_type=task, target_modules=FFN, init_lora_weights=False)
    model = peft.get_peft_model(sparsify(stock, backend="reference"), config).eval()
    (tmp_path / "this").mkdir()
    save_adapter(model, tmp_path / "this" / "adapter")
    saved = (tmp_path / "this" / "adapter" / "README.md").read_text()
    published = folder_card(tmp_path / "this" / "adapter", "this/adapter", base_model="their/base")
    own = tf.AutoModelForCausalLM if task == "CAUSAL_LM" else cls
    for card, named in ((saved, own), (published, loader)):
        assert ModelCard(card).data.get("pipeline_tag") == ("text-generation" if task == "CAUSAL_LM" else None)
        assert f"import {named.__name__}\n" in card
    monkeypatch.chdir(tmp_path)
    for code in re.findall(r"```python\n(.*?)```", published, re.DOTALL):
        made = {}
        exec(code.replace("the/base", "their/base"), made)  # the README's own steps
        torch.testing.assert_close(made["model"].eval()(input_ids=ids())[0], model(input_ids=ids())[0])


def change_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weights(folder, change):
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    name = min(weights)
    weights[name] = change(weights[name])
    save_file({key: value for key, value in weights.items() if value is not None}, path)


def card_alone(folder, metadata):
    change_config(folder, base_sparsified_by_hf_twell=None)
    (folder / "README.md").write_text(f"---\n{metadata}\n---\n")


DAMAGES = {
    "NaN": (lambda f: change_weights(f, lambda w: w * float("nan")), "values that are NaN or infinite"),
    "shape": (lambda f: change_weights(f, lambda w: w[:, :3].clone()), "does not fit its base (RuntimeError"),
    "a tensor missing": (lambda f: change_weights(f, lambda w: None), "lacks base_model.model.model.layers.0"),
    "half a file": (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x" * 50), "no whole safetensors file"),
    "huge rank": (lambda f: change_config(f, r=2**40), "does not fit its base"),
    "unknown kind": (lambda f: change_config(f, peft_type="EVIL"), "does not fit its base (KeyError"),
    "entry of the future": (
        lambda f: change_config(f, base_sparsified_by_hf_twell={"version": 99, "layers": None}),
        "has version 99",
    ),
    "layers as text": (
        lambda f: change_config(f, base_sparsified_by_hf_twell={"version": 1, "layers": "all"}),
        "this package writes {'version': 1, 'layers': ...}",
    ),
    "factor that is no number": (lambda f: change_config(f, lora_alpha=float("nan")), "is no JSON (it holds NaN)"),
    "config of a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "holds no mapping"),
    "config, nested": (lambda f: (f / "adapter_config.json").write_text("[" * 100_000), "is no JSON"),
    "rank as text": (lambda f: change_config(f, r="x"), "does not fit its base"),
    "targets as a number": (lambda f: change_config(f, target_modules=5), "does not fit its base"),
    "tags that are no list": (lambda f: card_alone(f, "tags: 5"), "its README.md cannot be read (TypeError"),
    "code in the card": (
        lambda f: card_alone(f, "tags: !!python/object/apply:os.system ['false']"),
        "its README.md cannot be read (ConstructorError",
    ),
    "task as a list": (lambda f: change_config(f, task_type=["x"]), "Invalid task type: "),
    "base of two lines": (lambda f: change_config(f, base_model_name_or_path="a\nb"), "names the base a b"),
    "base of no name": (lambda f: change_config(f, base_model_name_or_path=5), "does not name its base"),
    "base that is gone": (lambda f: change_config(f, base_model_name_or_path="/absent"), "names the base /absent"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_hostile_adapters(base, tmp_path, damage):
    save_adapter(with_lora(sparsify(tf.AutoModelForCausalLM.from_pretrained(base))), tmp_path / "adapter")
    change, message = DAMAGES[damage]
    change(tmp_path / "adapter")
    with pytest.raises((ValueError, OSError)) as caught:
        load_adapter(tmp_path / "adapter")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["NaN", "of another class"])
def test_a_base_in_hand_is_what_it_was_after_a_refusal(base, tmp_path, damage):
    save_adapter(with_lora(sparsify(tf.AutoModelForCausalLM.from_pretrained(base))), tmp_path / "adapter")
    if damage == "NaN":
        change_weights(tmp_path / "adapter", lambda w: w * float("nan"))
    dense = (tf.AutoModelForCausalLM if damage == "NaN" else tf.AutoModel).from_pretrained(base)
    before = [(name, type(module)) for name, module in dense.named_modules()], dense.config.to_dict()
    with pytest.raises(ValueError, match=r"NaN or infinite|for which LlamaModel has no place"):
        load_adapter(tmp_path / "adapter", dense)
    assert ([(name, type(module)) for name, module in dense.named_modules()], dense.config.to_dict()) == before


# Sparse training with adapters.


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_gradient_of_the_l1_term(targets, backend):
    """Against plain autograd on the definition; with FFN frozen, the term reaches what lies before the blocks."""
    batch = {"input_ids": ids(), "labels": ids()}
    model = with_lora(sparsify(tiny_llama(), backend=backend), TARGETS[targets]).train()
    penalty = L1Penalty(model, l1_weight=0.5)
    for each in penalty.micro_batches([batch]):
        model(**each).loss.backward()
    mine = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    twin, terms = with_lora(relu_llama(), TARGETS[targets]).train(), []
    for layer in twin.base_model.model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: terms.append(args[0].abs().sum(-1).mean()))
    loss = twin(**batch).loss
    (loss + 0.5 * sum(terms) / len(terms)).backward()
    truth = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    assert mine.keys() == truth.keys()
    assert all("lora_" in name for name in mine)
    for name, gradient in truth.items():
        torch.testing.assert_close(mine[name], gradient, atol=1e-5, rtol=1e-4, msg=name)
    twin.zero_grad()
    twin(**batch).loss.backward()
    trained = {name: p.grad for name, p in twin.named_parameters() if p.requires_grad}
    changed = [name for name, gradient in trained.items() if not torch.allclose(gradient, truth[name])]
    assert changed, "the term must matter, or this test compares nothing"

    report = penalty.report()
    measured = measure_sparsity(model, [ids()])
    assert [layer["l0"] for layer in report["layers"]] == pytest.approx([layer["l0"] for layer in measured["layers"]])


def test_named_adapters_bear_the_record_wherever_a_trainer_saves_them(base, tmp_path):
    """peft puts them into folders of their own, without a README.md that would tell."""
    model = with_lora(sparsify(tf.AutoModelForCausalLM.from_pretrained(base), layers=[0, 2], backend="reference"))
    model.add_adapter("other", model.peft_config["default"])
    saves = {"save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(tmp_path / "run", model=model, term={"l1_weight": 0.2}, **saves)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    save_adapter(model, tmp_path / "saved")
    assert "AutoPeftModel" in (tmp_path / "saved" / "README.md").read_text()
    for folder in ("run/checkpoint-1", "run", "saved"):
        for name, part in (("default", ""), ("other", "other")):
            loaded = load_adapter(tmp_path / folder / part, backend="reference")
            assert [ffn.twell.layer for ffn in sparse_ffns(loaded)] == [0, 2], (folder, name)
            model.set_adapter(name)
            assert torch.equal(logits(loaded), logits(model.eval())), (folder, name)


@pytest.mark.parametrize("frozen", [True, False])
def test_trainer(base, tmp_path, frozen):
    generator = torch.Generator().manual_seed(1)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 96, (16, 12), generator=generator)]
    model = sparsify(tf.AutoModelForCausalLM.from_pretrained(base))
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=ATTENTION if frozen else FFN)
    model = peft.get_peft_model(model, config)
    before = copy.deepcopy(model.state_dict())
    options = {"max_steps": 20, "save_strategy": "steps", "save_steps": 10, "learning_rate": 2e-2}
    args = tf.TrainingArguments(str(tmp_path / "run"), **{**ONE_STEP, **options, "max_grad_norm": 1.0})
    trainer = tf.Trainer(model, args, train_dataset=rows)
    trainer.add_callback(SparsityCallback(trainer, l1_weight=0.2))
    trainer.train()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) == ("lora_" not in name), name
    l1 = [row["twell/l1"] for row in trainer.state.log_history if "twell/l1" in row]
    assert l1[-1] < 0.9 * l1[0]
    # The checkpoint in the middle is an adapter of a sparsified base, and training goes on from it.
    for name, layer in load_adapter(tmp_path / "run" / "checkpoint-20").state_dict().items():
        torch.testing.assert_close(layer, model.state_dict()[name].to(layer.dtype), msg=name)
    resumed = tf.Trainer(load_adapter(tmp_path / "run" / "checkpoint-10", trainable=True), args, train_dataset=rows)
    resumed.add_callback(SparsityCallback(resumed, l1_weight=0.2))
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-10"))
    torch.testing.assert_close(logits(resumed.model.eval()), logits(model.eval()), atol=1e-4, rtol=1e-4)
