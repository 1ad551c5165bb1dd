"""What the commands load: stock models, the paper authors' checkpoints, and nothing that is damaged or brings code."""

import copy
import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
)

from hf_twell import TwellLlamaForCausalLM, load_adapter, sparsify
from hf_twell.blocks.modeling import sparse_ffns
from hf_twell.cli import main
from hf_twell.models.loading import load_causal_lm, load_model, load_tokenizer
from tests.authors import SparseLlamaConfig, SparseLlamaForCausalLM
from tests.conftest import TINY, tiny_llama
from tests.mixtures import MIXTURES, mixture
from tests.models.test_custom_models import damage_config, damage_weights, logits, nan, pickled
from tests.paths import MODEL

UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture
def folder(tmp_path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_stock_models_come_as_they_are(folder):
    model = load_causal_lm(folder)
    assert model.config.hidden_act == "silu"
    assert not sparse_ffns(model)
    assert load_causal_lm(folder, dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_come_as_they_are(name, tmp_path):
    """Shared experts, too, whose width is another entry of the config than that of dense layers."""
    model = mixture(name)
    for path, given in ((tmp_path / "dense", model), (tmp_path / "sparse", sparsify(copy.deepcopy(model)))):
        given.save_pretrained(path)
        loaded = load_causal_lm(path).state_dict()
        assert all(torch.equal(loaded[name], weight) for name, weight in model.state_dict().items())


def test_layers_for_further_tokens_are_left_out(tmp_path):
    """GLM's and DeepSeek's checkpoints have such a layer behind the model's own."""
    torch.manual_seed(0)
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
    config = Glm4MoeConfig(**TINY, **sizes, head_dim=8, first_k_dense_replace=1)
    Glm4MoeForCausalLM(config).save_pretrained(tmp_path)
    file, layers = tmp_path / "model.safetensors", config.num_hidden_layers
    further = {f"model.layers.{layers}.eh_proj.weight": torch.ones(2, 2)}
    save_file(load_file(file) | further, file, {"format": "pt"})
    damage_config(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match=f"num_hidden_layers={layers}, but the weights have {layers + 1}"):
        load_causal_lm(tmp_path)
    damage_config(tmp_path, num_nextn_predict_layers=1)
    assert len(load_causal_lm(tmp_path).model.layers) == layers


def test_a_model_in_the_midst_of_blending_is_refused(folder):
    """Earlier versions saved such configs, of which Transformers knows no activation."""
    reasons = {"activation": "its activation is silu blended with 0.2500 of relu"}
    entry = {"version": 1, "layers": None, "unfinished": reasons}
    damage_config(folder, hidden_act="unfinished blend of silu and 0.2500 relu", twell=entry)
    says = r"in the midst of blending .*0.2500 of relu.*; convert its dense parent at once"
    with pytest.raises(ValueError, match=says):
        load_causal_lm(folder)
    assert main(["sparsify", str(folder), str(folder.parent / "out")]) == 1


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("gpu", "device 'gpu': give cpu, cuda or cuda:N"),
        ("mps", "device mps: give cpu, cuda or cuda:N"),
        ("cuda:99", r"device cuda:99: this machine has \d+ CUDA devices; try cpu"),
    ],
)
def test_devices_that_are_not_there_are_refused(folder, device, says):
    with pytest.raises(ValueError, match=f"^{says}$"):
        load_model(folder, False, device=device)


def test_a_tokenizer_from_elsewhere_or_none(folder):
    model, tokenizer = load_model(folder, MODEL, device="cpu")
    assert (model.device.type, len(tokenizer)) == ("cpu", len(AutoTokenizer.from_pretrained(MODEL)))
    assert load_model(folder, tokenizer, device="cpu")[1] is tokenizer
    assert load_model(folder, False, device="cpu")[1] is None


def test_dtypes_that_weights_are_not_in_are_refused(folder):
    assert load_causal_lm(folder, dtype="auto").dtype == torch.float32
    for dtype in ("fp16", "int8", "Tensor"):
        with pytest.raises(ValueError, match=f"dtype='{dtype}'; choose one of 'auto', 'bfloat16'"):
            load_causal_lm(folder, dtype=dtype)


def test_zero3_is_refused(folder, monkeypatch):
    """Transformers' own flag, as an active DeepSpeed configuration sets it."""

    class Configuration:
        def is_zero3(self):
            return True

    monkeypatch.setattr("transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref", Configuration)
    with pytest.raises(ValueError, match=r"ZeRO-3 would split the weights .* use ZeRO-2 or FSDP2"):
        load_causal_lm(folder)


def test_authors_checkpoint_through_the_commands(tmp_path, run_json):
    """The demo model as the authors' hybrid training would store it: down_proj as (F, D), SiLU in the config."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    for path in MODEL.iterdir():
        (theirs / path.name).write_bytes(path.read_bytes())
    weights = load_file(MODEL / "model.safetensors")
    for name in [name for name in weights if "down_proj" in name]:
        weights[name] = weights[name].t().contiguous()
    save_file(weights, theirs / "model.safetensors", {"format": "pt"})
    damage_config(theirs, model_type="llama_sparse_relu", sparsity_use_hybrid_kernel=True)
    config = json.loads((theirs / "config.json").read_text())
    model = SparseLlamaForCausalLM(SparseLlamaConfig.from_dict(config)).eval()
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    model.tie_weights()
    truth = logits(model)

    assert run_json("sparsify", theirs, ours)["class"] == "LlamaForCausalLM"
    plain = AutoModelForCausalLM.from_pretrained(ours, dtype="float32")
    assert json.loads((ours / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    torch.testing.assert_close(logits(plain), truth, atol=1e-4, rtol=1e-4)
    assert main(["inspect", str(theirs), "--text", str(MODEL.parent / "text" / "heldout.txt"), "--tokens", "500"]) == 0


@pytest.mark.parametrize("name", ["models/absent", "absent/", "some/deep/path", r"C:\models\llama"])
@pytest.mark.parametrize("load", [load_causal_lm, load_tokenizer])
def test_what_can_only_be_a_path_does_not_go_to_the_hub(name, load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    says = rf"no folder at {re.escape(name)}; give a (model|tokenizer)'s folder, or its name"
    with pytest.raises(OSError, match=says):
        load(name)


def test_a_name_on_the_hub_goes_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=r"couldn't connect|offline"):
        load_causal_lm("some-org/some-model", cache_dir=tmp_path)


@pytest.mark.parametrize("load", [load_causal_lm, load_tokenizer, load_adapter, TwellLlamaForCausalLM])
def test_the_hub_is_asked_once_where_it_cannot_be_reached(load, tmp_path, monkeypatch, caplog):
    """A folder's name with a letter missing might be one on the Hub, which Transformers asks for half a minute."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
        monkeypatch.setattr(constants, name, getattr(constants, name).replace("https://huggingface.co", UNREACHABLE))
    with pytest.raises(OSError, match=f"no folder smol-rel here, and the Hub .{UNREACHABLE}.* cannot be reached"):
        getattr(load, "from_pretrained", load)("smol-rel")
    assert "Retrying" not in caplog.text


QUANTIZED = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize("packed", [False, True], ids=["by its config", "two values a byte"])
def test_quantized_weights_say_that_they_are_not_converted(folder, packed):
    damage_config(folder, quantization_config=QUANTIZED)
    if packed:
        damage_weights(folder, UP, lambda w: torch.zeros(w.numel() // 2, 1, dtype=torch.uint8))
    elif importlib.util.find_spec("bitsandbytes"):
        pytest.skip("bitsandbytes, which is installed, loads it")
    for load in (load_causal_lm, TwellLlamaForCausalLM.from_pretrained):
        says = r"quantized \(bitsandbytes\), and these are not converted; give the model that"
        with pytest.raises(ValueError, match=says):
            load(folder)


def test_what_is_wrong_with_a_model_is_said_before_what_its_tokenizer_lacks(tmp_path, capsys, error_line):
    """A mixture of experts of another form, and nothing at all; neither has a tokenizer."""
    torch.manual_seed(0)
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1}
    GptOssForCausalLM(GptOssConfig(**TINY, **sizes)).save_pretrained(tmp_path / "moe")
    (tmp_path / "text.txt").write_text("some words")
    (tmp_path / "recipe.yaml").write_text(
        "model: moe\noutput_dir: out\ntrain: text.txt\nheldout: text.txt\nl1_weight: 0\ntraining: {use_cpu: true}\n"
    )
    assert "is a mixture of experts" in error_line("train", tmp_path / "recipe.yaml")
    (tmp_path / "empty").mkdir()
    for name, says in (("moe", "is a mixture of experts"), ("empty", "has no config.json")):
        assert main(["sparsify", str(tmp_path / name), str(tmp_path / "converted")]) == 1
        printed = capsys.readouterr().err
        assert says in printed
        assert "no tokenizer" not in printed


UP = "model.layers.2.mlp.up_proj.weight"
Q = "model.layers.1.self_attn.q_proj.weight"
DAMAGES = {
    "shape of a block": (lambda f: damage_weights(f, UP, lambda w: w[:-1].clone()), "up_proj.weight has shape"),
    "shape of attention": (lambda f: damage_weights(f, Q, lambda w: w[:16].clone()), "q_proj.weight has shape"),
    "a tensor missing": (lambda f: damage_weights(f, Q, lambda w: None), "lacks model.layers.1.self_attn.q_proj"),
    "size as text": (lambda f: damage_config(f, hidden_size="32"), "its config.json makes no model"),
    "a list for a config": (lambda f: (f / "config.json").write_text("[]"), "holds no mapping"),
    "NaN": (lambda f: damage_weights(f, Q, nan), "NaN or infinite"),
    "an unknown activation": (lambda f: damage_config(f, hidden_act="evil"), "makes no model (KeyError: 'evil')"),
    "huge depth": (lambda f: damage_config(f, num_hidden_layers=10**9), "num_hidden_layers=1000000000"),
    "huge vocabulary": (lambda f: damage_config(f, vocab_size=10**13), "has shape"),
    "pickle": (pickled, "pickled weights alone"),
    "unknown kind": (lambda f: damage_config(f, model_type="strange"), "strange"),
    "code of its own": (
        lambda f: damage_config(f, model_type="strange", auto_map={"AutoConfig": "evil.Config"}),
        "trust_remote_code",
    ),
    "generation config of a list": (lambda f: (f / "generation_config.json").write_text("[]"), "cannot be used"),
    "another model's output": (lambda f: damage_config(f, output_attentions="x"), "could not write"),
    "tokenizer config of a list": (lambda f: (f / "tokenizer_config.json").write_text("[]"), "make no tokenizer"),
    "tokenizer of no kind": (
        lambda f: (f / "tokenizer_config.json").write_text('{"tokenizer_class": 5}'),
        "make no tokenizer",
    ),
    "tokenizer that is empty": (lambda f: (f / "tokenizer.json").write_text(""), "make no tokenizer: Expecting value"),
    "tokenizer that is torn": (lambda f: (f / "tokenizer.json").write_text('{"version": '), "make no tokenizer"),
    "entry beside SiLU": (lambda f: damage_config(f, twell={"version": 1, "layers": None}), "its activation is 'silu'"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_models_end_in_one_line(folder, tmp_path, error_line, damage):
    change, message = DAMAGES[damage]
    for path in MODEL.glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    change(folder)
    (folder / "evil.py").write_text("raise SystemExit('remote code ran')\n")
    assert message in error_line("sparsify", folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["sparsify", "eval", "inspect"])
def test_a_tokenizer_of_another_model_ends_in_one_line(folder, tmp_path, error_line, command):
    for path in MODEL.glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    output = [str(tmp_path / "out")] if command == "sparsify" else []
    error = error_line(command, folder, *output, "--text", MODEL.parent / "text" / "heldout.txt")
    assert error.startswith("hf-twell: error: the tokenizer (3,072 pieces) makes token")
    assert "the model has only 96 embeddings" in error


@pytest.mark.parametrize("command", ["sparsify", "eval", "inspect"])
def test_a_model_without_a_tokenizer(folder, tmp_path, capsys, command, error_line):
    output = [str(tmp_path / "out")] if command == "sparsify" else []
    line = error_line(command, folder, *output, "--text", MODEL.parent / "text" / "heldout.txt")
    assert "the folder holds none (tokenizer.json, say)" in line
    if command == "sparsify":
        assert main([command, str(folder), *output]) == 0
        assert "holds no tokenizer" in capsys.readouterr().err
        assert load_causal_lm(output[0]).config.hidden_act == "relu"


PUSHED = {
    "config of null": (lambda f: (f / "config.json").write_text("null"), "holds no mapping"),
    "class as a number": (lambda f: damage_config(f, architectures=5), "architectures=5"),
    "one layer less": (lambda f: damage_config(f, num_hidden_layers=2), "num_hidden_layers=2"),
    "entry of other layers": (lambda f: damage_config(f, twell={"version": 1, "layers": [7]}), "for a model of 3"),
}


@pytest.mark.parametrize("damage", PUSHED)
def test_damaged_models_are_not_pushed(tmp_path, error_line, damage):
    sparsify(tiny_llama()).save_pretrained(tmp_path)
    change, message = PUSHED[damage]
    change(tmp_path)
    assert message in error_line("push", tmp_path, "me/model", "--dry-run")
