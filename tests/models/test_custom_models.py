"""The custom classes: what they load, that they save stock models, and everything a stock class can do."""

import copy
import json
import pickle

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import nn

from hf_twell import TwellLlamaForCausalLM, TwellQwen2ForCausalLM, TwellQwen3ForCausalLM, sparsify, unpatch
from hf_twell.blocks.modeling import SparseFfn, sparse_ffns
from tests import authors
from tests.conftest import TINY, logits

pytestmark = pytest.mark.numeric

FAMILIES = {
    "llama": (TwellLlamaForCausalLM, tf.LlamaForCausalLM, tf.LlamaConfig),
    "qwen2": (TwellQwen2ForCausalLM, tf.Qwen2ForCausalLM, tf.Qwen2Config),
    "qwen3": (TwellQwen3ForCausalLM, tf.Qwen3ForCausalLM, tf.Qwen3Config),
}


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def config_of(family, **changes):
    return family[2](**{**TINY, "head_dim": 8, **changes})


def dense(family, **changes) -> nn.Module:
    torch.manual_seed(0)
    return family[1](config_of(family, **changes)).eval()


def relu_twin(model, cls):
    """The stock model that the same weights with ReLU make."""
    twin = cls(type(model.config).from_dict({**model.config.to_dict(), "hidden_act": "relu"})).to(model.dtype).eval()
    twin.load_state_dict(model.state_dict())
    return twin


def test_dense_checkpoints_convert(family, tmp_path):
    twell, stock, _ = family
    model = dense(family)
    model.save_pretrained(tmp_path)
    loaded = twell.from_pretrained(tmp_path, backend="reference")
    assert isinstance(loaded, (twell, stock))
    assert loaded.config.hidden_act == "relu"
    assert len(sparse_ffns(loaded)) == 3
    assert not loaded.training
    assert torch.equal(logits(loaded), logits(relu_twin(model, stock)))
    assert not torch.equal(logits(loaded), logits(model))


def test_subclasses_load(family, tmp_path):
    dense(family).save_pretrained(tmp_path)
    subclass = type("Mine", (family[0],), {})
    model = subclass.from_pretrained(tmp_path)
    assert type(model) is subclass
    assert torch.equal(logits(model), logits(family[0].from_pretrained(tmp_path)))


def test_saves_the_stock_form(family, tmp_path):
    twell, stock, _ = family
    dense(family).save_pretrained(tmp_path / "dense")
    model = twell.from_pretrained(tmp_path / "dense", backend="reference", layers=[0, -1])
    model.save_pretrained(tmp_path / "sparse")
    config = json.loads((tmp_path / "sparse" / "config.json").read_text())
    assert (config["architectures"], config["hidden_act"]) == ([stock.__name__], "relu")
    assert config["twell"] == {"version": 1, "layers": [0, 2]}
    assert "auto_map" not in config
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "sparse")
    assert type(again) is stock
    assert torch.equal(logits(again), logits(model))
    ours = twell.from_pretrained(tmp_path / "sparse", backend="reference")
    assert [ffn.twell.layer for ffn in sparse_ffns(ours)] == [0, 2]
    assert torch.equal(logits(ours), logits(model))
    names = [set(load_file(tmp_path / folder / "model.safetensors")) for folder in ("dense", "sparse")]
    assert names[0] == names[1]


def test_made_from_a_config(family):
    config = config_of(family)
    torch.manual_seed(0)
    model = family[0](config, layers=[1]).eval()
    assert config.hidden_act == "silu", "the caller's config stays as it was"
    assert [ffn.twell.layer for ffn in sparse_ffns(model)] == [1]
    torch.testing.assert_close(logits(model), logits(relu_twin(model, family[1])))
    sparsify(model, layers=range(3), backend="reference")
    assert len(sparse_ffns(model)) == 3
    assert not [m for m in unpatch(model).modules() if isinstance(m, SparseFfn)]


def test_made_from_a_config_and_weights_in_hand(family):
    model = dense(family)
    options = {"config": model.config, "state_dict": model.state_dict(), "backend": "reference"}
    assert torch.equal(logits(family[0].from_pretrained(None, **options)), logits(relu_twin(model, family[1])))


def test_an_unknown_backend_is_refused_at_once(family):
    with pytest.raises(ValueError, match="unknown backend 'fast'; choose one of 'auto', 'reference', 'cpu', 'cuda'"):
        family[0](config_of(family), backend="fast")


def test_arguments_of_the_stock_class(family, tmp_path):
    dense(family).save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    model, info = family[0].from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager", attention_dropout=0.25, output_loading_info=True
    )
    assert (model.dtype, model.config._attn_implementation) == (torch.bfloat16, "eager")
    assert model.config.attention_dropout == 0.25
    assert not info["missing_keys"]
    assert str(model.config._name_or_path) == str(tmp_path)


@pytest.mark.parametrize("shard", ["50GB", "20KB"])
def test_a_variant(family, tmp_path, shard):
    """It is what is checked and loaded, whatever lies beside it, and in a subfolder too."""
    model = sparsify(dense(family), backend="reference")
    inner = tmp_path / "inner"
    model.save_pretrained(inner, variant="v1", max_shard_size=shard)
    loaded = family[0].from_pretrained(tmp_path, variant="v1", subfolder="inner", backend="reference")
    assert torch.equal(logits(loaded), logits(model))
    with pytest.raises(ValueError, match=r"holds no model.v2.safetensors and no model.safetensors.index.v2.json; give"):
        family[0].from_pretrained(inner, variant="v2")
    (inner / "model.safetensors").touch()
    family[0].from_pretrained(inner, variant="v1")
    for part in inner.glob("*.v1*.safetensors"):
        part.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="no whole safetensors file"):
        family[0].from_pretrained(inner, variant="v1")


def test_tied_weights(family, tmp_path):
    model = dense(family, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    loaded = family[0].from_pretrained(tmp_path, backend="reference")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    loaded.save_pretrained(tmp_path / "again")
    assert "lm_head.weight" not in load_file(tmp_path / "again" / "model.safetensors")
    assert torch.equal(logits(family[0].from_pretrained(tmp_path / "again", backend="reference")), logits(loaded))
    loaded.resize_token_embeddings(100)
    assert loaded.lm_head.weight.shape[0] == 100
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_copies_and_pickle(family):
    model = family[0](config_of(family), layers=[0]).eval()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is family[0]
        assert len(sparse_ffns(twin)) == 1
        assert torch.equal(logits(twin), logits(model))


# The checkpoints of the paper's authors, each written by a class that does what theirs does; see `tests/authors.py`.


def authors_model(path, kind="llama", square=False, dtype=torch.float32, max_shard_size="5GB", **changes):
    """Saved by its own save_pretrained; returns the logits that the class itself computed."""
    model_class, config_class = authors.CLASSES[kind]
    torch.manual_seed(3)
    config = {**TINY, "intermediate_size": 40, "tie_word_embeddings": True}
    config = config_class(**config, sparsity_new_intermediate_size=32 if square else 56, **changes)
    model = model_class._from_config(config, dtype=dtype).eval()  # as AutoModelForCausalLM.from_config does
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return logits(model)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_checkpoints_of_the_authors(tmp_path, kind, hybrid, square):
    truth = authors_model(tmp_path / "theirs", kind, square, sparsity_use_hybrid_kernel=hybrid)
    theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (theirs["model_type"], theirs["hidden_act"]) == (f"{kind}_sparse_relu", "silu")
    assert theirs["auto_map"]["AutoModelForCausalLM"].startswith("authors.Sparse")
    assert (tmp_path / "theirs" / "authors.py").is_file(), "code of its own, which is not run"
    twell, stock, _ = FAMILIES[kind]
    model = twell.from_pretrained(tmp_path / "theirs", backend="reference")
    assert torch.equal(logits(model), truth)
    assert model.config.model_type == kind
    assert model.config.intermediate_size == (32 if square else 56)
    model.save_pretrained(tmp_path / "ours")
    raw = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert raw["architectures"] == [stock.__name__]
    assert not [key for key in raw if key.startswith("sparsity_") or key == "auto_map"]
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is stock
    assert torch.equal(logits(again), logits(model))


def test_authors_shards_and_the_arguments_of_the_stock_class(tmp_path):
    truth = authors_model(tmp_path, sparsity_use_hybrid_kernel=True, max_shard_size="20KB")
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 7}')
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    options = {"attention_dropout": 0.25, "attn_implementation": "sdpa", "offload_folder": tmp_path / "offloaded"}
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    for device_map in ("cpu", {**places, "model.layers": "disk"}):
        options |= {"device_map": device_map, "output_loading_info": False}
        model = TwellLlamaForCausalLM.from_pretrained(tmp_path, backend="reference", **options)
        assert torch.equal(logits(model), truth)
        assert model.config.attention_dropout == 0.25
        assert len(sparse_ffns(model)) == 3
        assert model.generation_config.max_new_tokens == 7
        assert model.name_or_path == model.config._name_or_path == str(tmp_path)


def test_a_variant_of_the_authors(tmp_path):
    truth = authors_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model.v1.safetensors")
    model = TwellLlamaForCausalLM.from_pretrained(tmp_path, variant="v1", backend="reference")
    assert torch.equal(logits(model), truth)


def test_authors_down_proj_is_turned_by_its_shape(tmp_path):
    """As where someone has turned it upright and left the config as it was."""
    truth = authors_model(tmp_path, sparsity_use_hybrid_kernel=True)
    for layer in range(3):
        damage_weights(tmp_path, f"model.layers.{layer}.mlp.down_proj.weight", lambda w: w.t().contiguous())
    assert torch.equal(logits(TwellLlamaForCausalLM.from_pretrained(tmp_path, backend="reference")), truth)


def test_authors_biases(tmp_path):
    truth = authors_model(tmp_path / "llama", mlp_bias=True, sparsity_use_hybrid_kernel=True)
    assert torch.equal(logits(TwellLlamaForCausalLM.from_pretrained(tmp_path / "llama", backend="reference")), truth)
    authors_model(tmp_path / "qwen2", "qwen2", mlp_bias=True)
    with pytest.raises(ValueError, match=r"mlp.down_proj.bias has no place in a stock Qwen2ForCausalLM"):
        TwellQwen2ForCausalLM.from_pretrained(tmp_path / "qwen2")


def test_authors_dtype_is_kept(tmp_path):
    truth = authors_model(tmp_path, dtype=torch.bfloat16)
    model = TwellLlamaForCausalLM.from_pretrained(tmp_path, backend="reference")
    assert (model.dtype, model.config.hidden_act) == (torch.bfloat16, "relu")
    assert torch.equal(logits(model), truth)


def test_authors_without_a_gate_are_refused(tmp_path):
    authors_model(tmp_path, sparsity_gated_mlp=False)
    with pytest.raises(ValueError, match="3 blocks and 0 gates"):
        TwellLlamaForCausalLM.from_pretrained(tmp_path)


# Hostile input: one line each, that names what is wrong.


def damage_config(folder, **changes):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **changes}))


def entry(folder, version=1, layers=None, **others):
    damage_config(folder, twell={"version": version, "layers": layers, **others})


def damage_weights(folder, name, change):
    weights = load_file(folder / "model.safetensors")
    weights[name] = change(weights.get(name))
    save_file({key: value for key, value in weights.items() if value is not None}, folder / "model.safetensors")


Q, UP = "model.layers.1.self_attn.q_proj.weight", "model.layers.2.mlp.up_proj.weight"


def nan(weight):
    weight[3, 4] = float("nan")
    return weight


def infinite(weight):
    weight[0, 0], weight[1, 1] = float("inf"), float("-inf")
    return weight


def truncate(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def strange_index(folder, name="../model.safetensors"):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))


def generation(folder, text):
    (folder / "generation_config.json").write_text(text)


def index(folder, **changes):
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    names = {"weight_map": dict.fromkeys(load_file(folder / "model-1.safetensors"), "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, **names, **changes}))


def replaced(folder, name):
    (folder / name).unlink()
    return folder / name


NO_GENERATION = "generation_config.json cannot be used"
DAMAGES = {
    "shape of attention": (lambda f: damage_weights(f, Q, lambda w: w[:16].clone()), "q_proj.weight has shape"),
    "shape of a block": (lambda f: damage_weights(f, UP, lambda w: w[:-1].clone()), "up_proj.weight has shape"),
    "a tensor missing": (lambda f: damage_weights(f, UP, lambda w: None), "lacks model.layers.2.mlp.up_proj.weight"),
    "huge hidden size": (lambda f: damage_config(f, hidden_size=2**40), "has shape"),
    "huge vocabulary": (lambda f: damage_config(f, vocab_size=10**13), "has shape"),
    "huge depth": (lambda f: damage_config(f, num_hidden_layers=10**9), "num_hidden_layers=1000000000"),
    "huge heads": (lambda f: damage_config(f, head_dim=2**40), "q_proj.weight has shape"),
    "NaN": (lambda f: damage_weights(f, Q, nan), "q_proj.weight holds 1 values that are NaN"),
    "infinite": (lambda f: damage_weights(f, UP, infinite), "up_proj.weight holds 2 values that are NaN or inf"),
    "half a file": (truncate, "no whole safetensors file"),
    "pickle": (pickled, "pickled weights alone"),
    "index to elsewhere": (strange_index, "only .safetensors files beside it are read"),
    "index to a pickle": (lambda f: strange_index(f, "weights.bin"), "only .safetensors files beside it are read"),
    "index to nothing": (lambda f: strange_index(f, "absent.safetensors"), "lacks absent.safetensors"),
    "entry beside SiLU": (lambda f: damage_config(f, hidden_act="silu"), "its activation is 'silu'"),
    "entry of no version": (lambda f: damage_config(f, twell={"layers": [0]}), "twell entry is"),
    "entry of the future": (lambda f: damage_config(f, twell={"version": 99}), "version 99"),
    "unfinished entry": (lambda f: entry(f, unfinished="half of it is SiLU"), "is unfinished: half of it is SiLU"),
    "entry as text": (lambda f: damage_config(f, twell="yes"), "twell entry is 'yes'"),
    "entry of other layers": (lambda f: entry(f, layers=[0, 7]), "for a model of 3 layers"),
    "layers as text": (lambda f: entry(f, layers="all"), "layers='all'"),
    "version as truth": (lambda f: entry(f, version=True), "twell entry is"),
    "version zero": (lambda f: entry(f, version=0), "twell entry is"),
    "size as text": (lambda f: damage_config(f, hidden_size="32"), "makes no model (StrictDataclassFieldValidation"),
    "no heads": (lambda f: damage_config(f, num_attention_heads=0), "makes no model (ZeroDivisionError"),
    "unknown activation": (lambda f: damage_config(f, hidden_act="evil", twell=None), "makes no model (KeyError"),
    "unknown rotation": (lambda f: damage_config(f, rope_parameters={"rope_type": "evil"}), "makes no model (KeyError"),
    "unknown dtype": (lambda f: damage_config(f, dtype="load"), "dtype='load'"),
    "kind as a list": (lambda f: damage_config(f, model_type=["llama"]), "model_type=['llama']"),
    "weights under another name": (
        lambda f: damage_config(f, transformers_weights="adapter_model.bin"),
        "transformers_weights='adapter_model.bin'",
    ),
    "parts of other ranks": (
        lambda f: (f / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"evil"),
        "holds parts of a distributed checkpoint (shard-00001-model",
    ),
    "code for attention": (lambda f: damage_config(f, _attn_implementation="me/evil"), "code from 'me/evil'"),
    "a list for a config": (lambda f: (f / "config.json").write_text("[]"), "holds no mapping"),
    "generation config of a list": (lambda f: generation(f, "[]"), f"{NO_GENERATION} (TypeError"),
    "generation config of null": (lambda f: generation(f, "null"), NO_GENERATION),
    "generation config of other types": (lambda f: generation(f, '{"max_new_tokens": "many"}'), NO_GENERATION),
    "generation config, nested": (lambda f: generation(f, "[" * 100_000), NO_GENERATION),
    "dtype as a number": (lambda f: damage_config(f, dtype=16), "dtype=16"),
    "dtype of eight bits": (lambda f: damage_config(f, dtype="float8_e4m3fn"), "dtype='float8_e4m3fn'"),
    "a class as a number": (lambda f: damage_config(f, architectures=5), "architectures=5"),
    "labels without end": (lambda f: damage_config(f, num_labels=10**12), "num_labels=1000000000000"),
    "a method as a number": (lambda f: damage_config(f, to_dict=5), "makes no model"),
    "one layer more": (
        lambda f: damage_weights(f, UP.replace("2", "9"), lambda w: torch.zeros(2, 2)),
        "num_hidden_layers=3, but the weights have 4",
    ),
    "layers beyond number": (lambda f: entry(f, layers=[10**30]), "for a model of 3 layers"),
    "layers as a mapping": (lambda f: entry(f, layers={}), "layers={}"),
    "quantized by a text": (lambda f: damage_config(f, quantization_config="evil"), "makes no model"),
    "index of nothing": (lambda f: index(f, weight_map={}), "names no files"),
    "index without its other half": (lambda f: index(f, metadata=None), "is no index of weights"),
    "index of a list": (lambda f: index(f, metadata=[1]), "is no index of weights"),
    "index to a number": (lambda f: index(f, weight_map={"x": 5}), "names 5; only .safetensors files"),
    "index, nested": (
        lambda f: (index(f), (f / "model.safetensors.index.json").write_text("[" * 100_000)),
        "is no index of weights",
    ),
    "a folder for weights": (lambda f: replaced(f, "model.safetensors").mkdir(), "holds no model.safetensors"),
    "an empty file": (lambda f: replaced(f, "model.safetensors").touch(), "no whole safetensors file"),
    "weights that link to themselves": (
        lambda f: replaced(f, "model.safetensors").symlink_to("model.safetensors"),
        "holds no model.safetensors",
    ),
    "a header without end": (
        lambda f: (f / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}"),
        "no whole safetensors file",
    ),
    "deep nesting": (lambda f: (f / "config.json").write_text("[" * 100_000), "holds no mapping"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    sparsify(dense(FAMILIES["llama"])).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", DAMAGES)
def test_hostile_checkpoints(folder, damage):
    assert_refused_after(damage, folder)


def assert_refused_after(damage, folder):
    change, message = DAMAGES[damage]
    change(folder)
    with pytest.raises(ValueError) as caught:
        TwellLlamaForCausalLM.from_pretrained(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


OF_THE_AUTHORS = [
    *("shape of attention", "shape of a block", "a tensor missing", "huge hidden size", "huge vocabulary"),
    *("huge depth", "NaN", "half a file", "pickle", "generation config of a list", "code for attention"),
    "weights under another name",
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", OF_THE_AUTHORS)
def test_hostile_checkpoints_of_the_authors(tmp_path, damage):
    authors_model(tmp_path, sparsity_use_hybrid_kernel=True)
    assert_refused_after(damage, tmp_path)


def test_missing_tensors_on_request(folder):
    """As with stock classes, for whoever asks which they are."""
    damage_weights(folder, UP, lambda w: None)
    model, info = TwellLlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert info["missing_keys"] == {UP}
    assert model.get_parameter(UP).isfinite().all()


def test_tensors_of_another_shape_on_request(folder):
    damage_weights(folder, UP, lambda w: w[:-1].clone())
    model = TwellLlamaForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)
    assert model.get_parameter(UP).shape == (TINY["intermediate_size"], TINY["hidden_size"])


def test_a_config_in_hand_counts_and_not_the_folders(folder):
    config, truth = tf.LlamaConfig.from_pretrained(folder), logits(TwellLlamaForCausalLM.from_pretrained(folder))
    damage_config(folder, num_hidden_layers=5, intermediate_size=7)
    assert torch.equal(logits(TwellLlamaForCausalLM.from_pretrained(folder, config=config)), truth)


def test_another_architecture_is_refused(folder):
    with pytest.raises(ValueError, match="'llama' model; TwellQwen2ForCausalLM takes qwen2, qwen2_sparse_relu"):
        TwellQwen2ForCausalLM.from_pretrained(folder)


def test_a_folder_that_is_not_there():
    with pytest.raises(OSError, match=r"no folder at \./absent; give a model's folder, or its name on the Hub"):
        TwellLlamaForCausalLM.from_pretrained("./absent")
    with pytest.raises(OSError, match="there is no folder absent here, and as a name on the Hub: "):
        TwellLlamaForCausalLM.from_pretrained("absent")
    with pytest.raises(OSError) as caught:
        TwellLlamaForCausalLM.from_pretrained("someone/absent")
    assert "folder" not in str(caught.value).splitlines()[0]


def test_remote_code_is_never_run(folder):
    damage_config(folder, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit('remote code ran')\n")
    assert TwellLlamaForCausalLM.from_pretrained(folder, trust_remote_code=True).config.model_type == "llama"


def test_large_finite_weights_pass(folder):
    damage_weights(folder, UP, lambda w: torch.full_like(w, 3e38))
    TwellLlamaForCausalLM.from_pretrained(folder)
