"""What the commands load: stock models, the paper authors' checkpoints, and nothing that is damaged or brings code."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_twell import sparsify
from hf_twell.cli import main
from hf_twell.loading import load_causal_lm, load_model
from hf_twell.modeling import sparse_ffns
from tests.authors import SparseLlamaConfig, SparseLlamaForCausalLM
from tests.conftest import tiny_llama
from tests.test_custom_models import damage_config, damage_weights, logits, nan, pickled

DEMO = Path(__file__).parents[1] / "recipes" / "demo" / "model"


@pytest.fixture
def folder(tmp_path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_stock_models_come_as_they_are(folder):
    model = load_causal_lm(folder)
    assert model.config.hidden_act == "silu"
    assert not sparse_ffns(model)
    assert load_causal_lm(folder, dtype="bfloat16").dtype == torch.bfloat16


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
    model, tokenizer = load_model(folder, DEMO, device="cpu")
    assert (model.device.type, len(tokenizer)) == ("cpu", len(AutoTokenizer.from_pretrained(DEMO)))
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


def test_authors_checkpoint_through_the_commands(tmp_path, capsys):
    """The demo model as the authors' hybrid training would store it: down_proj as (F, D), SiLU in the config."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    for path in DEMO.iterdir():
        (theirs / path.name).write_bytes(path.read_bytes())
    weights = load_file(DEMO / "model.safetensors")
    for name in [name for name in weights if "down_proj" in name]:
        weights[name] = weights[name].t().contiguous()
    save_file(weights, theirs / "model.safetensors", {"format": "pt"})
    damage_config(theirs, model_type="llama_sparse_relu", sparsity_use_hybrid_kernel=True)
    config = json.loads((theirs / "config.json").read_text())
    model = SparseLlamaForCausalLM(SparseLlamaConfig.from_dict(config)).eval()
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    model.tie_weights()
    truth = logits(model)

    assert main(["sparsify", str(theirs), str(ours), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["class"] == "LlamaForCausalLM"
    plain = AutoModelForCausalLM.from_pretrained(ours, dtype="float32")
    assert json.loads((ours / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    torch.testing.assert_close(logits(plain), truth, atol=1e-4, rtol=1e-4)
    assert main(["inspect", str(theirs), "--text", str(DEMO.parent / "text" / "heldout.txt"), "--tokens", "500"]) == 0


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
def test_damaged_models_end_in_one_line(folder, tmp_path, capsys, damage):
    change, message = DAMAGES[damage]
    for path in DEMO.glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    change(folder)
    (folder / "evil.py").write_text("raise SystemExit('remote code ran')\n")
    capsys.readouterr()
    assert main(["sparsify", str(folder), str(tmp_path / "out")]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-twell: error")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["sparsify", "eval", "inspect"])
def test_a_tokenizer_of_another_model_ends_in_one_line(folder, tmp_path, capsys, command):
    for path in DEMO.glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    output = [str(tmp_path / "out")] if command == "sparsify" else []
    assert main([command, str(folder), *output, "--text", str(DEMO.parent / "text" / "heldout.txt")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("hf-twell: error: the tokenizer (3,072 pieces) makes token")
    assert "the model has only 96 embeddings" in error


@pytest.mark.parametrize("command", ["sparsify", "eval", "inspect"])
def test_a_model_without_a_tokenizer(folder, tmp_path, capsys, command):
    output = [str(tmp_path / "out")] if command == "sparsify" else []
    assert main([command, str(folder), *output, "--text", str(DEMO.parent / "text" / "heldout.txt")]) == 1
    assert "the folder holds none (tokenizer.json, say)" in capsys.readouterr().err.splitlines()[-1]
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
def test_damaged_models_are_not_pushed(tmp_path, capsys, damage):
    sparsify(tiny_llama()).save_pretrained(tmp_path)
    change, message = PUSHED[damage]
    change(tmp_path)
    assert main(["push", str(tmp_path), "me/model", "--dry-run"]) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]
