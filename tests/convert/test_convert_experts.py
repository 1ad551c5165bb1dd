"""Mixtures of experts convert as dense models do: exactly, in place, and loaded again anywhere."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
import transformers as tf
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from hf_twell import sparsify, unpatch
from hf_twell.blocks.experts import SparseExperts
from hf_twell.blocks.modeling import SparseBlock, sparse_ffns
from hf_twell.models.quantizing import quantize
from tests.blocks.test_architectures import assert_refused, config_of
from tests.conftest import ids, logits
from tests.mixtures import ALIKE, MIXTURES, SEEING, by_hand, mixture

pytestmark = pytest.mark.numeric


def auto_class(name: str) -> type:
    return tf.AutoModelForImageTextToText if name in SEEING else AutoModelForCausalLM


@pytest.mark.parametrize("name", [*MIXTURES, *ALIKE, *SEEING])
def test_saves_loads_and_goes_back(name, tmp_path):
    model = mixture(name)
    stock, twin, state = type(model), by_hand(model), {key: w.clone() for key, w in model.state_dict().items()}
    assert sparsify(model, backend="reference") is model
    assert {key: torch.equal(w, state[key]) for key, w in model.state_dict().items()} == dict.fromkeys(state, True)
    assert torch.equal(logits(model), logits(twin))
    blocks = sparse_ffns(model)
    mixtures = [module for module, _ in model.named_modules() if module.endswith(".experts")]
    assert [block.twell.name for block in blocks if isinstance(block, SparseExperts)] == mixtures
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert [type(block) for block in sparse_ffns(again)] == [type(block) for block in blocks]
        assert torch.equal(logits(again), logits(twin))

    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [f"Twell{stock.__name__}"]
    assert (config["model_type"], config.get("text_config", config)["ffn_act"]) == (f"twell_{name}", "relu")
    loaded = auto_class(name).from_pretrained(tmp_path)
    assert not sparse_ffns(loaded)
    # Weights are compared, not only logits: a matrix of one row, as a shared expert's gate, is summed in an order that
    # goes by its address where a processor's vectors are short.
    assert {key: torch.equal(w, state[key]) for key, w in loaded.state_dict().items()} == dict.fromkeys(state, True)
    before = logits(loaded)
    torch.testing.assert_close(before, logits(twin))
    torch.testing.assert_close(logits(sparsify(loaded)), logits(twin))
    assert torch.equal(logits(unpatch(loaded)), before)
    assert not [module for module in loaded.modules() if isinstance(module, SparseBlock) or "twell" in vars(module)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_next", "llama4_text", *ALIKE, *SEEING])
def test_plain_transformers_loads_it(name, tmp_path):
    """In a process of its own, without this package: with remote code, and not without, where it would compute SiLU."""
    model = mixture(name)
    twin = by_hand(model)
    sparsify(model).save_pretrained(tmp_path / "model")
    torch.save(logits(twin), tmp_path / "truth.pt")
    code = """
import sys
sys.modules["hf_twell"] = None
import torch
import transformers
Head = getattr(transformers, sys.argv[1])
try:
    Head.from_pretrained("model", trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code=True" in str(error)
else:
    raise AssertionError("loaded by a stock class")
model = Head.from_pretrained("model", trust_remote_code=True).eval()
ids = torch.randint(3, 96, (2, 11), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    torch.testing.assert_close(model(input_ids=ids).logits, torch.load("truth.pt"))
"""
    subprocess.run([sys.executable, "-c", code, auto_class(name).__name__], cwd=tmp_path, check=True)


def test_a_llama_4_that_sees(tmp_path):
    """Its text model is a causal language model, which `AutoModelForCausalLM` takes out of the whole."""
    patches = {"image_size": 16, "patch_size": 4, "projector_input_dim": 16, "projector_output_dim": 16}
    vision = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vision_output_dim": 16}
    vision |= {"intermediate_size": 64, **patches}
    torch.manual_seed(0)
    config = tf.Llama4Config(text_config=MIXTURES["llama4_text"][1](), vision_config=vision, image_token_index=95)
    model = tf.Llama4ForConditionalGeneration(config).eval()
    inputs = {"input_ids": ids().clamp(max=94), "pixel_values": torch.randn(1, 3, 16, 16)}
    inputs["input_ids"][0, 2:6] = 95
    twin = by_hand(model)
    with torch.no_grad():
        wanted = twin(**inputs).logits
        assert torch.equal(sparsify(model, backend="reference")(**inputs).logits, wanted)
        assert len(sparse_ffns(model)) == 6
        model.save_pretrained(tmp_path)
        assert torch.equal(tf.AutoModelForImageTextToText.from_pretrained(tmp_path)(**inputs).logits, wanted)
        text = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(text).__name__ == "TwellLlama4ForCausalLM"
    assert torch.equal(logits(text), logits(twin.language_model))


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_every_implementation_of_transformers(implementation):
    model = mixture("qwen2_moe")
    model.set_experts_implementation(implementation)
    twin = by_hand(model)
    assert torch.equal(logits(sparsify(model, backend="reference")), logits(twin))


def test_layers_are_the_models():
    model = sparsify(mixture("qwen2_moe"), layers=[-1])
    blocks = [(block.twell.name, block.twell.layer, block.twell.place) for block in sparse_ffns(model)]
    assert blocks == [("model.layers.1.mlp.experts", 1, 2), ("model.layers.1.mlp.shared_expert", 1, 3)]
    assert model.config.twell == {"version": 1, "layers": [1]}
    assert isinstance(model.model.layers[0].mlp.experts.act_fn, nn.ReLU)
    sparsify(model, layers=range(2))
    assert len(sparse_ffns(model)) == 4
    assert model.config.twell == {"version": 1, "layers": None}
    assert_refused(model, "layers=[2]", "2 layers", layers=[2])


def test_lora_on_attention():
    from peft import LoraConfig, get_peft_model

    model = mixture()
    config = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    model = get_peft_model(model, config).eval()
    twin = by_hand(model)
    sparsify(model, backend="reference")
    assert torch.equal(logits(model), logits(twin))
    merged = model.merge_and_unload()
    assert len(sparse_ffns(merged)) == 2
    assert torch.equal(logits(merged), logits(twin.merge_and_unload()))


@pytest.mark.parametrize("first", ["sparsify", "lora"])
@pytest.mark.parametrize("name", [*MIXTURES, *ALIKE, *SEEING])
def test_lora_on_experts(name, first, tmp_path):
    """By `target_parameters`, in either order: PEFT puts wrappers between a layer and its experts."""
    from peft import LoraConfig, get_peft_model

    targets = [f"experts.{matrix}" for matrix in ("gate_up_proj", "down_proj")]
    config = LoraConfig(target_modules=["q_proj"], target_parameters=targets, init_lora_weights=False)

    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(1)
        return get_peft_model(model, config).eval()

    twin = adapted(by_hand(mixture(name)))
    if first == "lora":
        model = sparsify(adapted(mixture(name)), backend="reference")
    else:
        model = adapted(sparsify(mixture(name), backend="reference"))
    routed = [module for module, _ in mixture(name).named_modules() if module.endswith(".experts")]
    adapters = [weight for weight, _ in model.named_parameters() if ".experts." in weight and "lora_A" in weight]
    assert len(adapters) == 2 * len(routed)
    blocks, wanted = sparse_ffns(model), sparse_ffns(sparsify(mixture(name)))
    assert [(block.twell.layer, block.twell.part) for block in blocks] == [
        (block.twell.layer, block.twell.part) for block in wanted
    ]
    assert torch.equal(logits(model), logits(twin))
    assert not torch.allclose(logits(model), logits(by_hand(mixture(name))))

    merged = model.merge_and_unload()
    assert torch.equal(logits(merged), logits(twin.merge_and_unload()))
    merged.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(auto_class(name).from_pretrained(tmp_path)), logits(merged))


def test_experts_whose_router_is_out_of_reach_are_refused():
    """A shared expert in the same layer is a block, and does not stand for them."""
    model = mixture("llama4_text")
    moe = model.model.layers[1].feed_forward
    moe.others = moe.experts
    del moe.experts, moe.router
    assert_refused(model, "model.layers.1.feed_forward.others (Llama4TextExperts) is a mixture of experts of another")


def test_a_replaced_forward_is_missed():
    """What others put on the experts and does not call their own is told, as of a dense block."""
    model = sparsify(mixture())
    experts = model.model.layers[0].mlp.experts
    own = experts.forward
    experts.forward = lambda *args: own(*args)
    logits(model)
    experts.forward = lambda x, *_: x
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.experts was replaced after sparsify"):
        logits(model)


def test_what_else_the_model_returns():
    """Of a decoder, too, whose own class changes."""
    options = {"input_ids": ids(), "output_router_logits": True, "output_hidden_states": True}
    model, twin = mixture(), by_hand(mixture())
    bare = sparsify(mixture().model, backend="reference")
    sparsify(model, backend="reference")
    with torch.no_grad():
        torch.testing.assert_close(model(labels=ids(), **options).loss, twin(labels=ids(), **options).loss)
        wanted, given = twin.model(**options), bare(**options)
    for key in ("hidden_states", "router_logits"):
        torch.testing.assert_close(given[key], wanted[key])


def test_a_mixture_of_a_type_that_we_have_none_for_is_refused():
    torch.manual_seed(0)
    model = tf.SolarOpenForCausalLM(config_of(tf.SolarOpenConfig))
    words = ["model.layers.0.mlp.experts", "holds routed experts", "there is none of solar_open (SolarOpenForCausalLM)"]
    mixtures = "There are types of afmoe, cohere2_moe, deepseek_v2, deepseek_v3, deepseek_v32, dots1, ernie4_5_moe, "
    mixtures += "exaone_moe, flex_olmo, "  # and not falcon_h1, whose blocks are dense
    advice = "To add solar_open, add its line to ACTIVATIONS in hf_twell/blocks/modeling_twell.py."
    assert_refused(model, *words, mixtures, advice)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_would_put_in_experts_of_its_own_is_refused(engine):
    """It makes the model by remote code, and names its attention after itself."""
    config = sparsify(mixture()).config
    config._attn_implementation = engine
    with pytest.raises(ValueError, match=f"TwellOlmoeModel does not run in {engine}, which may compute SiLU"):
        tf.AutoModel.from_config(config)


def test_eight_bit_experts_are_refused(tmp_path):
    pytest.importorskip("torchao")
    sparsify(mixture()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.experts .* holds routed experts, and quantizing"):
        quantize(str(tmp_path), "int8")


class LimitedExperts(OlmoeExperts):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=7.0)) * up


class ScaledExperts(OlmoeExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, 2 * top_k_weights)


@pytest.mark.parametrize("cls", [LimitedExperts, ScaledExperts])
def test_other_formulas_are_refused(cls):
    model = mixture()
    model.model.layers[1].mlp.experts.__class__ = cls
    assert_refused(model, f"model.layers.1.mlp.experts ({cls.__name__})", "more of an expert")


@pytest.mark.parametrize("what", ["meta", "int8"])
def test_weights_that_cannot_be_converted_are_refused(what):
    model = mixture()
    experts = model.model.layers[1].mlp.experts
    weight = experts.down_proj.data
    experts.down_proj = nn.Parameter(
        weight.to("meta") if what == "meta" else weight.to(torch.int8), requires_grad=False
    )
    assert_refused(
        model, "model.layers.1.mlp.experts.down_proj (OlmoeExperts)", "quantized" if what == "int8" else what
    )
