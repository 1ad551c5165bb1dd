"""Every stock architecture either converts exactly, or is refused with nothing changed."""

import copy
import inspect

import pytest
import torch
import transformers as tf
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_twell import sparsify
from hf_twell.blocks.architectures import activation_keys, find_ffns, has_own_type
from hf_twell.blocks.experts import SparseExperts
from tests.conftest import tiny_llama

pytestmark = pytest.mark.numeric

TEXT = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 52, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
# A config is given what it has of these.
SIZES = {
    **TEXT,
    **{"head_dim": 8, "global_head_dim": 8, "num_kv_shared_layers": 0},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
    **{"topk_group": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    **{"shared_intermediate_size": 16, "q_lora_rank": 8, "kv_lora_rank": 8, "first_k_dense_replace": 1},
    **{"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "word_embed_proj_dim": 32, "ffn_dim": 52},
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8},
    **{"indexer_compress_ratio": 4, "image_size": 16, "patch_size": 8, "num_layers": 1, "num_blocks": 1},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"resampler_n_heads": 4, "resampler_head_dim": 8, "resampler_n_latents": 4, "resampler_depth": 1},
}


def config_of(cls: type, **changes):
    known = {*cls.__dataclass_fields__, *cls.attribute_map}
    parts = {key: part for key, part in cls.sub_configs.items() if getattr(part, "model_type", None)}
    sizes = {key: size for key, size in SIZES.items() if key in known}
    return cls(**{**sizes, **{key: config_of(part) for key, part in parts.items() if key not in changes}, **changes})


def tiny(model_class: type, **changes) -> tuple:
    """A model class, and what makes a config for it."""
    return model_class, lambda: config_of(model_class.config_class, **copy.deepcopy(changes))


VISION = {key: SIZES[key] for key in ("hidden_size", "num_attention_heads", "image_size", "patch_size")}
VISION |= {"intermediate_size": 48, "num_hidden_layers": 1}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 4}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
LLAMA, QWEN2 = config_of(tf.LlamaConfig), config_of(tf.Qwen2Config)
AUDIO = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}

# Beside those that test_causal_lms.py tries.
CONVERTIBLE = {
    "llama_biases": tiny(tf.LlamaForCausalLM, mlp_bias=True),
    "llama_tied": tiny(tf.LlamaForCausalLM, tie_word_embeddings=True),
    "llama_classifier": tiny(tf.LlamaForSequenceClassification),
    "llama_decoder": tiny(tf.LlamaModel),
    "nemotron": tiny(tf.NemotronForCausalLM),
    "arcee": tiny(tf.ArceeForCausalLM),
    "starcoder2": tiny(tf.Starcoder2ForCausalLM),
    "stablelm": tiny(tf.StableLmForCausalLM),
    "helium": tiny(tf.HeliumForCausalLM),
    "persimmon": tiny(tf.PersimmonForCausalLM),
    "gpt_neox": tiny(tf.GPTNeoXForCausalLM),
    "llava": tiny(tf.LlavaForConditionalGeneration, text_config=LLAMA, vision_config=config_of(tf.CLIPVisionConfig)),
    "qwen2_vl": tiny(
        tf.Qwen2VLForConditionalGeneration,
        text_config={**TEXT, **MROPE},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8},
    ),
    # Its vision tower has SiLU blocks of the very same names.
    "qwen2_5_vl": tiny(tf.Qwen2_5_VLForConditionalGeneration, text_config={**TEXT, **MROPE}, vision_config=QWEN_VISION),
    "qwen3_vl": tiny(tf.Qwen3VLForConditionalGeneration),
    "qwen3_vl_moe": tiny(tf.Qwen3VLMoeForConditionalGeneration),
    "idefics3": tiny(tf.Idefics3ForConditionalGeneration, text_config=LLAMA),
    "smolvlm": tiny(tf.SmolVLMForConditionalGeneration, text_config=LLAMA),
    "internvl": tiny(
        tf.InternVLForConditionalGeneration,
        text_config=QWEN2,
        vision_config={**VISION, "image_size": [16, 16], "patch_size": [8, 8]},
    ),
    "mistral3": tiny(
        tf.Mistral3ForConditionalGeneration,
        text_config=config_of(tf.MistralConfig),
        vision_config=config_of(tf.PixtralVisionConfig),
    ),
    "llava_onevision": tiny(
        tf.LlavaOnevisionForConditionalGeneration, text_config=QWEN2, vision_config=config_of(tf.SiglipVisionConfig)
    ),
    "qwen2_audio": tiny(tf.Qwen2AudioForConditionalGeneration, text_config=QWEN2, audio_config=AUDIO),
}


def build(model_class, config) -> nn.Module:
    torch.manual_seed(0)
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # initialised to zero, where nobody would miss them
            nn.init.normal_(parameter, std=0.3)
    return model


def outputs(model) -> torch.Tensor:
    ids = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False)[0]


def snapshot(model) -> dict:
    """Everything that converting could change."""
    return {
        "config": model.config.to_dict(),
        "modules": {name: (module, type(module), module.training) for name, module in model.named_modules()},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "parameters": {name: (parameter, parameter._version) for name, parameter in model.named_parameters()},
    }


def assert_refused(model, *words, **arguments):
    before = snapshot(model)
    with pytest.raises(ValueError) as caught:
        sparsify(model, **arguments)
    after = snapshot(model)
    assert before.keys() == after.keys()
    for key in ("config", "modules", "attributes"):
        assert before[key] == after[key], f"refused, but its {key} changed"
    for name, (parameter, version) in before["parameters"].items():
        assert after["parameters"][name][0] is parameter, name
        assert after["parameters"][name][1] == version, name
    for word in words:
        assert word in str(caught.value)


def assert_converts_exactly(model_class, config):
    """The model, after all that can be asked of any."""
    model, twin = (build(model_class, config) for _ in range(2))
    blocks = {inner for site in find_ffns(model) for inner in site.module.modules()}
    elsewhere = {path: type(module) for path, module in model.named_modules() if module not in blocks}
    own = next(iter(inspect.signature(find_ffns(twin)[0].module.forward).parameters))
    for site in find_ffns(twin):
        setattr(site.module, site.form.activation, nn.ReLU())
    truth, state = outputs(twin), twin.state_dict()
    assert not torch.equal(outputs(model), truth)

    assert sparsify(model, backend="reference") is model
    if not has_own_type(model.config):
        assert {path: type(model.get_submodule(path)) for path in elsewhere} == elsewhere
        text_config, keys = activation_keys(model.config)
        assert {getattr(text_config, key) for key in keys} == {"relu"}
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(outputs(model), truth)
    again = type(model)(type(model.config).from_dict(model.config.to_dict())).eval()
    again.load_state_dict(state)
    assert torch.equal(outputs(again), truth)
    torch.testing.assert_close(outputs(sparsify(model, backend="auto")), truth)  # by kernels, biases included
    block = find_ffns(model)[0].module
    if not isinstance(block, SparseExperts):
        assert_takes_its_input_by_name(block, own)
    return model


def assert_takes_its_input_by_name(block, name):
    """The stock block's, which is hidden_states in some families; and refuses what that refuses."""
    x = torch.randn(2, next(iter(block.parameters())).shape[1])
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(block(**{name: x}), block(x))
        assert torch.equal(block.forward(**{name: x}), block(x))
    for args, named in (((), {}), ((x,), {name: x}), ((x,), {"other": 1}), ((), {"other": x})):
        with pytest.raises(TypeError, match=name):
            block(*args, **named)


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_converts_exactly(name):
    model_class, config = CONVERTIBLE[name]
    model = assert_converts_exactly(model_class, config())
    assert len(find_ffns(model)) == 4


def test_a_compiled_block_takes_its_input_by_its_name():
    block = find_ffns(sparsify(build(tf.PhiForCausalLM, config_of(tf.PhiConfig))))[0].module
    x = torch.randn(2, 32)
    with torch.no_grad():
        compiled = torch.compile(lambda x: block(hidden_states=x), fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), block(x))


SEES = {"text_config": config_of(tf.MistralConfig), "vision_config": VISION}
REFUSED = {
    "gpt_oss": (*tiny(tf.GptOssForCausalLM), ["layers.0.mlp", "GptOssExperts", "mixture of experts"]),
    "lfm2": (*tiny(tf.Lfm2ForCausalLM), ["Lfm2MLP of w1: Linear, "]),
    "seed_oss": (*tiny(tf.SeedOssForCausalLM), ["SeedOssMLP", "dropout"]),
    "bitnet": (*tiny(tf.BitNetForCausalLM), ["BitNetMLP", "more than hidden states"]),
    "gptj": (*tiny(tf.GPTJForCausalLM, rotary_dim=8), ["GPTJMLP of fc_in: Linear, "]),
    "bloom": (*tiny(tf.BloomForCausalLM), ["BloomMLP of dense_h_to_4h: Linear, gelu_impl: "]),
    "mpt": (*tiny(tf.MptForCausalLM), ["MptMLP of up_proj: Linear, act: "]),
    "bert": (*tiny(tf.BertLMHeadModel, is_decoder=True), ["bert.encoder.layer.0 (BertLayer of "]),
    "gpt2": (*tiny(tf.GPT2LMHeadModel), ["transformer.h.0.mlp (GPT2MLP of c_fc: Conv1D, "]),
    "opt": (*tiny(tf.OPTForCausalLM), ["model.decoder.layers.0 (OPTDecoderLayer)"]),
    "mamba": (*tiny(tf.MambaForCausalLM), ["backbone.layers.0 (MambaBlock of "]),
    # The projector of this one, outside the decoder, reads the same config entry.
    "idefics2": (
        *tiny(tf.Idefics2ForConditionalGeneration, **SEES),
        ["model.connector", "outside the feed-forward blocks"],
    ),
    "falcon": (*tiny(tf.FalconForCausalLM), ["FalconConfig names no activation"]),
    "apertus": (*tiny(tf.ApertusForCausalLM), ["mlp.act_fn (XIELU", "parameters"]),
    "starcoder2": (
        *tiny(tf.Starcoder2ForCausalLM, residual_dropout=0.1),
        ["model.layers.0.mlp (Starcoder2MLP)", "dropout"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_unchanged(name):
    model_class, config, words = REFUSED[name]
    assert_refused(build(model_class, config()), *words, "Supported are Llama, Qwen2, Qwen3, Mistral")


class Recorded(torch.Tensor):
    """A tensor subclass, as quantization libraries put in place of a weight."""


def integers(linear, dtype=torch.int8):
    linear.weight = nn.Parameter(linear.weight.data.to(dtype), requires_grad=False)


def subclass(linear):
    linear.weight = nn.Parameter(linear.weight.data.as_subclass(Recorded))


BROKEN_LINEARS = {
    "int8": (integers, ["quantized", "torch.int8"]),
    "uint8": (lambda linear: integers(linear, torch.uint8), ["quantized", "torch.uint8"]),
    "float8": (lambda linear: integers(linear, torch.float8_e4m3fn), ["quantized", "torch.float8_e4m3fn"]),
    "subclass": (subclass, ["quantized", "Recorded"]),
    "meta": (lambda linear: linear.to("meta"), ["meta device"]),
}


@pytest.mark.parametrize("name", BROKEN_LINEARS)
def test_one_broken_linear_in_the_last_layer(name):
    breaks, words = BROKEN_LINEARS[name]
    model = tiny_llama()
    breaks(model.model.layers[2].mlp.down_proj)
    assert_refused(model, "model.layers.2.mlp.down_proj (Linear)", *words)


class ScaledMLP(type(tiny_llama().model.layers[0].mlp)):
    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


def test_every_layer_is_probed():
    model = tiny_llama()
    for layer in model.model.layers:
        layer.mlp.__class__ = ScaledMLP
    model.model.layers[2].mlp.scale = 0.5
    assert_refused(model, "model.layers.2.mlp (ScaledMLP)")
    model.model.layers[2].mlp.scale = 1.0
    sparsify(model)


def test_a_layer_without_a_block_is_named():
    model = tiny_llama()
    model.model.layers[1].mlp.up_proj = Conv1D(52, 32)
    assert_refused(model, "3 layers but 2", "model.layers.1.mlp (LlamaMLP of gate_proj: Linear, ")


def test_blocks_that_layers_share_are_named():
    model = tiny_llama()
    model.model.layers[2].mlp = model.model.layers[0].mlp
    assert_refused(
        model,
        "3 layers but 2",
        "; model.layers.2.mlp is the same block as model.layers.0.mlp, and layers may not share one.",
    )
    model = tiny_llama()
    model.model.layers[1] = model.model.layers[0]  # the whole layer
    assert_refused(model, "; model.layers.1.mlp is the same block as model.layers.0.mlp, and layers may not share one.")


def test_a_model_without_layers():
    assert_refused(tiny_llama(num_hidden_layers=0), "0 layers but 0 feed-forward blocks", "Supported are Llama")


def test_another_activation_beside_the_entry_is_seen_in_a_nested_config():
    model_class, config = CONVERTIBLE["llava"]
    model = sparsify(build(model_class, config()))
    text_config, keys = activation_keys(model.config)
    setattr(text_config, keys[0], "silu")
    assert_refused(model, "says that the model is sparse, but its activation is 'silu'")


def test_replaced_forward():
    model = tiny_llama()
    mlp = model.model.layers[1].mlp
    mlp.forward = mlp.forward
    assert_refused(model, "model.layers.1.mlp (LlamaMLP)", "forward replaced")


@pytest.mark.parametrize(
    "layers", [[3], [-4], [], "", "01", ["0"], [True], [0, False], 1, [1.0], [None], {"a": 1}], ids=repr
)
def test_bad_layers(layers):
    assert_refused(tiny_llama(), "layers=", "from -3 to 2", layers=layers)
    sparse = sparsify(tiny_llama(), layers=[1])
    assert_refused(sparse, "layers=", layers=layers)


@pytest.mark.parametrize("backend", ["fast", "", None, 3, "cuda"])
def test_bad_backends(backend):
    if backend == "cuda" and torch.cuda.is_available():
        pytest.skip("cuda works on this machine")
    assert_refused(tiny_llama(), repr(backend), backend=backend)


@pytest.mark.parametrize("thing", ["meta-llama/Llama-3.2-1B", None, 3, {}, nn.Linear(2, 2), nn.Sequential()], ids=repr)
def test_no_model(thing):
    with pytest.raises(ValueError, match="from_pretrained"):
        sparsify(thing)


def test_module_with_a_config_of_its_own_kind():
    model = nn.Sequential(nn.Linear(2, 2))
    model.config = {"hidden_act": "silu"}
    with pytest.raises(ValueError, match="Sequential"):
        sparsify(model)


@pytest.mark.parametrize("surroundings", ["default dtype", "default device", "autocast", "inference mode"])
def test_the_callers_surroundings_do_not_matter(surroundings):
    model = tiny_llama()
    before = torch.get_rng_state()
    if surroundings == "default dtype":
        torch.set_default_dtype(torch.bfloat16)
        try:
            sparsify(model)
        finally:
            torch.set_default_dtype(torch.float32)
    else:
        contexts = {
            "default device": torch.device("meta"),
            "autocast": torch.autocast("cpu", torch.bfloat16),
            "inference mode": torch.inference_mode(),
        }
        with contexts[surroundings]:
            sparsify(model)
    assert torch.equal(torch.get_rng_state(), before)
