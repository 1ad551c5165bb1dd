"""Models whose config entry means other layers too: a `model_type` of our own, exact wherever it is loaded."""

import copy
import importlib.util
import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import nn
from transformers import AutoModelForCausalLM

import hf_twell
from hf_twell import sparsify, unpatch
from hf_twell.blocks import modeling_twell
from hf_twell.blocks.modeling import SparseFfn, sparse_ffns
from hf_twell.cli import main
from hf_twell.models.adapters import load_adapter, save_adapter
from hf_twell.models.hub import folder_card
from hf_twell.models.loading import load_causal_lm
from hf_twell.models.quantizing import quantize
from tests.blocks.test_causal_lms import model_of
from tests.conftest import TINY, finished
from tests.mixtures import NEXT
from tests.one_step import make_trainer
from tests.paths import MODEL

TEXT = {**TINY, "num_hidden_layers": 4, "bos_token_id": 1, "eos_token_id": 2}
QWEN = {**TEXT, **NEXT}
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
VISION = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 4}
TOKENS = dict(zip(("image", "video", "vision_start", "vision_end"), range(96, 100), strict=True))


def qwen(**changes) -> tf.Qwen3_5TextConfig:
    return tf.Qwen3_5TextConfig(**{**QWEN, **changes})


def seeing_qwen() -> tf.Qwen3_5Config:
    text, tokens = (
        {**QWEN, "vocab_size": 100, "rope_parameters": MROPE},
        {f"{name}_token_id": token for name, token in TOKENS.items()},
    )
    return tf.Qwen3_5Config(text_config=text, vision_config=VISION, **tokens)


def falcon() -> tf.FalconH1Config:
    return tf.FalconH1Config(**TEXT, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8)


MODELS = {
    "qwen3_5_text": (tf.Qwen3_5ForCausalLM, qwen),
    "qwen3_5": (tf.Qwen3_5ForConditionalGeneration, seeing_qwen),
    "qwen3_5_without_a_head": (tf.Qwen3_5Model, seeing_qwen),
    "qwen3_5_classifier": (tf.Qwen3_5TextForSequenceClassification, qwen),
    "gemma4_text": (tf.Gemma4ForCausalLM, lambda: model_of("gemma4_text")[1]),
    "gemma4": (tf.Gemma4ForConditionalGeneration, lambda: model_of("gemma4")[1]),
    "olmo_hybrid": (tf.OlmoHybridForCausalLM, lambda: tf.OlmoHybridConfig(**TEXT)),
    "falcon_h1": (tf.FalconH1ForCausalLM, falcon),
    "falcon_h1_decoder": (tf.FalconH1Model, falcon),
}


def dense(name="qwen3_5_text", **changes) -> nn.Module:
    torch.manual_seed(0)
    cls, config = MODELS[name]
    return cls(config(**changes)).eval()


def by_hand(model) -> nn.Module:
    """The stock model with ReLU put into its blocks."""
    twin = copy.deepcopy(model)
    for name, module in twin.get_decoder().named_modules():
        if name.endswith((".mlp", ".feed_forward")):
            module.act_fn = nn.ReLU()
    return twin


def ids() -> torch.Tensor:
    return torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def outputs(model) -> torch.Tensor:
    return model(input_ids=ids(), use_cache=False)[0]


@pytest.mark.numeric
@pytest.mark.parametrize("name", MODELS)
def test_converts_exactly(name, tmp_path):
    """To the bit, live and loaded again, and with what its config says of other layers kept."""
    model = dense(name)
    stock, twin, before = type(model), by_hand(model), outputs(model)
    config = model.config.get_text_config().to_dict()
    kept = {key: value for key, value in config.items() if key.startswith("hidden_act")}
    assert sparsify(model, backend="reference") is model
    assert type(model).__name__ == f"Twell{stock.__name__}"
    assert isinstance(model, stock)
    text_config = model.config.get_text_config()
    assert text_config.ffn_act == "relu"
    assert all(getattr(text_config, key) == value for key, value in kept.items())
    assert torch.equal(outputs(model), outputs(twin))
    assert not torch.equal(outputs(model), before)
    assert len(sparse_ffns(model)) == 4

    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [f"Twell{stock.__name__}"]
    assert config["model_type"] == f"twell_{stock.config_class.model_type}"
    head = next(head for head, cls in config["auto_map"].items() if cls == f"modeling_twell.Twell{stock.__name__}")
    loaded = getattr(tf, head).from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(outputs(loaded), outputs(twin))
    torch.testing.assert_close(outputs(sparsify(loaded)), outputs(twin))  # by kernels
    unpatch(loaded)
    assert not [module for module in loaded.modules() if isinstance(module, SparseFfn)]
    assert torch.equal(outputs(loaded), outputs(twin))
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(again) is type(model)
        assert torch.equal(outputs(again), outputs(twin))


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5"])
def test_decodes_with_its_cache(name):
    model = dense(name)
    twin, model = by_hand(model), sparsify(model, backend="reference")
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :4] = 0  # padding at the left
    for how in ({}, {"use_cache": False}, {"num_beams": 2}):
        options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, **how}
        assert torch.equal(model.generate(ids(), **options), twin.generate(ids(), **options)), how


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model = dense()
    twin, model = by_hand(model).train(), sparsify(model, backend="reference").train()
    twin(input_ids=ids(), labels=ids()).loss.backward()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model(input_ids=ids(), labels=ids()).loss.backward()
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)


def test_lora(tmp_path, caplog, monkeypatch):
    from peft import LoraConfig, get_peft_model

    dense().save_pretrained(tmp_path / "base")
    config = LoraConfig(target_modules=["gate_proj", "q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(sparsify(base, backend="reference"), config).eval()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    save_adapter(model, tmp_path / "adapter")
    assert "instantiate a model of type" not in caplog.text  # PEFT reads the base's config by our class
    loaded = load_adapter(tmp_path / "adapter", backend="reference")
    assert torch.equal(outputs(loaded), outputs(model))
    loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(outputs(load_causal_lm(tmp_path / "merged")), outputs(model), rtol=1e-4, atol=1e-4)
    # A PEFT model whose base is dense still: the base takes its class.
    wrapped = get_peft_model(dense(), config).eval()
    twin = by_hand(wrapped)
    assert torch.equal(outputs(sparsify(wrapped, backend="reference")), outputs(twin))
    assert type(wrapped.get_base_model()) is modeling_twell.TwellQwen3_5ForCausalLM


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5"])
def test_our_classes_load_both_forms(name, form, tmp_path):
    """And the text model out of one that sees, as Transformers' AutoModelForCausalLM does of the dense one."""
    model = dense(name)
    twin = by_hand(model)
    (model if form == "dense" else sparsify(model)).save_pretrained(tmp_path / form)
    seeing = [hf_twell.TwellQwen3_5ForConditionalGeneration] if name == "qwen3_5" else []
    for cls in (*seeing, hf_twell.TwellQwen3_5ForCausalLM):
        options = {} if cls in seeing else {"attention_dropout": 0.25}
        loaded = cls.from_pretrained(tmp_path / form, backend="reference", **options)
        assert type(loaded) is cls
        assert loaded.config.get_text_config().attention_dropout == options.get("attention_dropout", 0.0)
        assert len(sparse_ffns(loaded)) == 4
        assert torch.equal(outputs(loaded), outputs(twin))
        loaded.save_pretrained(tmp_path / "again")
        assert torch.equal(outputs(cls.from_pretrained(tmp_path / "again", backend="reference")), outputs(twin))
    assert torch.equal(outputs(load_causal_lm(tmp_path / "again")), outputs(twin))


@pytest.mark.parametrize(("name", "head"), [("falcon_h1", "CausalLM"), ("qwen3_5", "MultimodalLM")])
def test_what_holds_the_model_saves_no_stock_name(name, head, tmp_path):
    """By a stock name an engine would compute SiLU, whatever the type: a model converted inside of another, say."""
    model = dense(name)
    twin = by_hand(model)
    sparsify(model.model, backend="reference")
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert saved == [f"Twell{type(model).__name__}"]
    assert torch.equal(outputs(getattr(tf, f"AutoModelFor{head}").from_pretrained(tmp_path)), outputs(twin))


@pytest.mark.parametrize("name", ["qwen3_5", "gemma4"])
def test_a_text_part_is_refused_alone(name):
    """The model around it would save itself as its stock type, which computes SiLU."""
    from peft import LoraConfig, get_peft_model

    model = dense(name)
    before = model.config.to_dict(), [type(module) for module in model.modules()]
    part = model.get_decoder()
    for each in (part, get_peft_model(copy.deepcopy(part), LoraConfig(target_modules=["gate_proj"]))):
        says = f"{type(part).__name__} may be a part of a model that sees: convert the whole"
        with pytest.raises(ValueError, match=says):
            sparsify(each)
    assert (model.config.to_dict(), [type(module) for module in model.modules()]) == before


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5", "gemma4", "olmo_hybrid"])
def test_a_part_of_a_converted_model_saves_our_type(name, tmp_path):
    model = sparsify(dense(name), backend="reference")
    part = model.get_decoder()
    part.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"][0].startswith("Twell")
    loaded = tf.AutoModel.from_pretrained(tmp_path)
    assert type(loaded).__name__.startswith("Twell")
    assert torch.equal(outputs(loaded), outputs(part))


@pytest.mark.parametrize("model_type", modeling_twell.ACTIVATIONS)
def test_every_auto_class_knows_what_it_knows_of_the_stock_type(model_type):
    """`AutoModelForCausalLM` of one that sees takes its text model, say."""
    from transformers.models.auto import modeling_auto

    stock = tf.CONFIG_MAPPING[model_type]
    defaults = {"hunyuan_v1_moe": {"head_dim": 128}, "dots1": {"n_routed_experts": 4, "n_shared_experts": 1}}
    missing = defaults.get(model_type, {})  # their own are none at all
    for name, head in vars(modeling_auto).items():
        names = head._model_mapping._model_mapping if name.startswith("AutoModel") and head._model_mapping else {}
        cls = getattr(tf, names.get(model_type, ""), None)
        if cls is not None and issubclass(cls.config_class, stock | stock.sub_configs.get("text_config", stock)):
            with torch.device("meta"):
                model = head.from_config(modeling_twell.twell_class(stock)(**missing))
            assert type(model) is modeling_twell.twell_class(cls), name


def test_what_it_cannot_compute_is_named():
    model = sparsify(dense())
    model.config.ffn_act = "rellu"
    with pytest.raises(ValueError, match=r"^ffn_act is 'rellu'; allowed are gelu, .*, relu, .*$"):
        type(model)(model.config)


def test_saves_over_its_own_code(tmp_path):
    """Its file may have been loaded from the folder that it is saved to."""
    sparsify(dense()).save_pretrained(tmp_path)
    spec = importlib.util.spec_from_file_location("modeling_of_a_checkpoint", tmp_path / modeling_twell.FILE)
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    code.TwellQwen3_5ForCausalLM.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert (tmp_path / modeling_twell.FILE).read_bytes() == Path(modeling_twell.__file__).read_bytes()


def test_a_class_of_ones_own_is_refused_unchanged():
    model = dense()
    model.__class__ = type("Mine", (type(model),), {})
    before = model.config.to_dict(), type(model)
    says = r"linear_attn .* lies outside .* Convert a model of Transformers' own class, be"
    with pytest.raises(ValueError, match=says):
        sparsify(model)
    assert (model.config.to_dict(), type(model)) == before


def test_what_scales_its_blocks_is_refused():
    """As released Falcon H1 models do."""
    with pytest.raises(ValueError, match=r"feed_forward \(FalconH1MLP\) does more than down\(relu\(gate\) \* up\)"):
        sparsify(tf.FalconH1ForCausalLM(tf.FalconH1Config(**{**falcon().to_dict(), "mlp_multipliers": [0.5, 0.7]})))


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_of_a_model_that_sees_the_text_model_is_taken(form, tmp_path, caplog):
    """As Transformers' AutoModelForCausalLM takes it of the dense one, and said in a line."""
    model = dense("qwen3_5")
    twin = by_hand(model) if form == "sparse" else model
    if form == "sparse":
        sparsify(model, layers=[1])
    model.save_pretrained(tmp_path)
    loaded = load_causal_lm(tmp_path)
    stock = tf.Qwen3_5ForCausalLM
    assert type(loaded) is (modeling_twell.twell_class(stock) if form == "sparse" else stock)
    assert torch.equal(outputs(loaded), outputs(twin))
    if form == "sparse":
        plain = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert plain.config.twell == loaded.config.twell == model.config.twell
        assert len(sparse_ffns(sparsify(loaded))) == len(sparse_ffns(sparsify(plain))) == 1
    assert (
        f"{tmp_path} sees, too; its text model alone is taken, as a {type(loaded).__name__}. For the whole of it give "
        "a model that AutoModelForImageTextToText loads to hf_twell.sparsify, from Python"
    ) in caplog.text


@pytest.mark.slow
def test_the_commands_take_the_text_model_of_one_that_sees(tmp_path, run_json):
    tokenizer = tf.AutoTokenizer.from_pretrained(MODEL)
    text, path = tmp_path / "text.txt", str(tmp_path / "sees")
    text.write_text("in 1912 a letter of the alphabet was read aloud. " * 40)
    model = dense("qwen3_5")
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    told = run_json("sparsify", path, tmp_path / "sparse", "--text", text)
    assert (told["class"], told["config"]["ffn_act"]) == ("TwellQwen3_5ForCausalLM", "relu")
    assert len(told["config"]["twell"]["density"]) == 4
    for given in (path, str(tmp_path / "sparse")):
        assert main(["eval", given, "--text", str(text), "--device", "cpu", "--json"]) == 0
    assert main(["inspect", str(tmp_path / "sparse"), "--text", str(text), "--tokens", "200", "--device", "cpu"]) == 0
    recipe = {
        "model": path,
        "distill": {"logits": 0.5},
        "output_dir": str(tmp_path / "out"),
        "train": str(text),
        "heldout": str(text),
        "sequence_length": 32,
        "l1_weight": 1e-4,
        "training": {"max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 0
    trained = load_causal_lm(tmp_path / "out" / "final")
    assert type(trained) is modeling_twell.TwellQwen3_5ForCausalLM


def test_the_command_and_the_card(tmp_path, capsys):
    tokenizer = tf.AutoTokenizer.from_pretrained(MODEL)
    dense(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    assert main(["sparsify", str(tmp_path / "dense"), str(tmp_path / "sparse")]) == 0
    for how in ([], ["--overwrite"]):
        assert main(["sparsify", str(tmp_path / "sparse"), str(tmp_path / "again"), *how]) == 0
    assert main(["push", str(tmp_path / "sparse"), "me/x", "--dry-run"]) == 0
    assert "modeling_twell.py" in capsys.readouterr().out
    card = folder_card(tmp_path / "sparse", "me/x")
    assert 'AutoModelForCausalLM.from_pretrained("me/x", trust_remote_code=True)' in card
    assert "nothing else is needed, and `trust_remote_code` allows the file that says where ReLU is" in card
    assert "as `ffn_act` in `config.json` says" in card
    assert "give wrong outputs without an error; llama.cpp" not in card
    assert "--model-impl" not in card


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5"])
def test_quantized(name, tmp_path):
    """int8 in its blocks alone, and loaded again; of one that sees, its text model."""
    pytest.importorskip("torchao")
    sparsify(dense(name), layers=[1, 2]).save_pretrained(tmp_path / "model")
    model, _ = quantize(tmp_path / "model", "int8")
    assert type(model) is modeling_twell.TwellQwen3_5ForCausalLM
    assert len(sparse_ffns(model)) == 2
    model.save_pretrained(tmp_path / "quantized")
    loaded = load_causal_lm(tmp_path / "quantized")
    kinds = {name: type(weight.data).__name__ for name, weight in loaded.named_parameters()}
    assert {name.split(".")[-3] for name, kind in kinds.items() if kind == "Int8Tensor"} == {"mlp"}
    for each in (model, loaded):
        sparsify(each, backend="reference")
    assert torch.equal(outputs(loaded), outputs(model))


PLAIN = """
import sys, torch, transformers
heads = [getattr(transformers, f"AutoModelFor{name}") for name in sys.argv[1:]]
for options in ({"trust_remote_code": False}, {}):
    try:
        heads[0].from_pretrained("model", **options)
    except ValueError as error:
        assert "trust_remote_code=True" in str(error), error
    else:
        raise AssertionError(options)
transformers.AutoTokenizer.from_pretrained("model")
models = [head.from_pretrained("model", trust_remote_code=True) for head in heads]
models[0].save_pretrained("again")
models.append(heads[0].from_pretrained("again", trust_remote_code=True))
assert not [name for name in sys.modules if name.startswith("hf_twell")]
ids = torch.load("ids.pt")
torch.save([model(input_ids=ids, use_cache=False)[0].detach() for model in models], "plain.pt")
"""
OURS = """
import sys, torch, transformers, hf_twell
from torch.distributed.fsdp import fully_shard
head, cls = getattr(transformers, f"AutoModelFor{sys.argv[1]}"), getattr(hf_twell, sys.argv[2])
ids = torch.load("ids.pt")
models = [head.from_pretrained("model"), hf_twell.sparsify(head.from_pretrained("again"))]
models += [cls.from_pretrained("model", backend="reference")]
torch.save([model(input_ids=ids, use_cache=False)[0].detach() for model in models], "ours.pt")
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=0, world_size=1)
model = fully_shard(models[-1])
assert type(model).__name__.startswith("FSDP")
weights = {name: weight.full_tensor() for name, weight in model.state_dict().items()}
model.save_pretrained("sharded", state_dict=weights)
torch.distributed.destroy_process_group()
"""
SEEING = ["ImageTextToText", "MultimodalLM", "CausalLM"]


def test_what_a_stock_class_read_of_a_sparse_checkpoint_is_refused(tmp_path):
    """It computes SiLU, as Transformers' warning of another type says, and would be saved as a stock model."""
    model = sparsify(dense(), backend="reference")
    model.save_pretrained(tmp_path)
    stock = tf.Qwen3_5ForCausalLM.from_pretrained(tmp_path).eval()
    assert not torch.equal(outputs(stock), outputs(model))
    with pytest.raises(ValueError, match="says that the model is sparse, but its activation is 'silu' and not 'relu'"):
        sparsify(stock)


def run(folder: Path, code: str, *arguments: str) -> None:
    """In a new process, whose working directory is the folder."""
    tf.AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder / "model")
    torch.save(ids(), folder / "ids.pt")
    env = {"HF_MODULES_CACHE": str(folder / "modules")}
    done = finished(sys.executable, "-c", code, *arguments, cwd=folder, stdin=subprocess.DEVNULL, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_gemma_4_that_sees_is_loaded_by_plain_transformers(tmp_path):
    """Its text part the stock class makes by AutoModel, in a process without this package."""
    model = sparsify(dense("gemma4"), backend="reference")
    model.save_pretrained(tmp_path / "model")
    run(tmp_path, PLAIN, *SEEING)
    for logits in torch.load(tmp_path / "plain.pt"):
        assert torch.equal(logits, outputs(model))
    assert torch.equal(outputs(tf.AutoModelForCausalLM.from_pretrained(tmp_path / "again")), outputs(model))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "heads"), [("qwen3_5_text", ["CausalLM"]), ("qwen3_5", SEEING)])
def test_trained_saved_and_loaded_in_new_processes(name, heads, tmp_path):
    """By this package, and by plain Transformers with remote code; without it, by an error that names the way."""
    model = sparsify(dense(name), backend="reference")
    options = {"max_steps": 20, "learning_rate": 1e-3, "term": {"l1_weight": 1e-4}}
    trainer = make_trainer(tmp_path / "out", model=model, **options)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    truth = outputs(model.eval())
    assert not torch.equal(truth, outputs(by_hand(dense(name))))

    run(tmp_path, PLAIN, *heads)
    for logits in torch.load(tmp_path / "plain.pt"):
        assert torch.equal(logits, truth)
    run(tmp_path, OURS, heads[0], type(model).__name__, str(tmp_path / "meeting"))
    for logits in torch.load(tmp_path / "ours.pt"):
        torch.testing.assert_close(logits, truth)
    assert torch.equal(torch.load(tmp_path / "ours.pt")[-1], truth)
    assert torch.equal(outputs(load_causal_lm(tmp_path / "sharded")), truth)
