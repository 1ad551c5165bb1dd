"""Every stock architecture either converts exactly, or is refused with nothing changed."""

import inspect

import pytest
import torch
import transformers as tf
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_twell import sparsify
from hf_twell.blocks.architectures import activation_keys, find_ffns
from tests.conftest import tiny_llama

pytestmark = pytest.mark.numeric

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {**TEXT, "head_dim": 8}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 4}
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}

CONVERTIBLE = {
    "llama": (tf.LlamaForCausalLM, lambda: tf.LlamaConfig(**TEXT)),
    "phi3": (tf.Phi3ForCausalLM, lambda: tf.Phi3Config(**TEXT)),  # gate and up in one linear
    "llama_biases": (tf.LlamaForCausalLM, lambda: tf.LlamaConfig(**TEXT, mlp_bias=True)),
    "llama_tied": (tf.LlamaForCausalLM, lambda: tf.LlamaConfig(**TEXT, tie_word_embeddings=True)),
    "llama_classifier": (tf.LlamaForSequenceClassification, lambda: tf.LlamaConfig(**TEXT)),
    "llama_decoder": (tf.LlamaModel, lambda: tf.LlamaConfig(**TEXT)),
    "qwen2": (tf.Qwen2ForCausalLM, lambda: tf.Qwen2Config(**TEXT)),
    "qwen3": (tf.Qwen3ForCausalLM, lambda: tf.Qwen3Config(**HEADS)),
    "nemotron": (tf.NemotronForCausalLM, lambda: tf.NemotronConfig(**HEADS)),
    "arcee": (tf.ArceeForCausalLM, lambda: tf.ArceeConfig(**HEADS)),
    "starcoder2": (tf.Starcoder2ForCausalLM, lambda: tf.Starcoder2Config(**TEXT)),
    "phi": (tf.PhiForCausalLM, lambda: tf.PhiConfig(**TEXT)),
    "stablelm": (tf.StableLmForCausalLM, lambda: tf.StableLmConfig(**TEXT)),
    "helium": (tf.HeliumForCausalLM, lambda: tf.HeliumConfig(**HEADS)),
    "persimmon": (tf.PersimmonForCausalLM, lambda: tf.PersimmonConfig(**TEXT)),
    "gpt_neox": (tf.GPTNeoXForCausalLM, lambda: tf.GPTNeoXConfig(**TEXT)),
    "gemma3": (
        tf.Gemma3ForConditionalGeneration,
        lambda: tf.Gemma3Config(text_config=HEADS, vision_config=VISION, mm_tokens_per_image=4),
    ),
    "llava": (
        tf.LlavaForConditionalGeneration,
        lambda: tf.LlavaConfig(text_config=tf.LlamaConfig(**TEXT), vision_config=tf.CLIPVisionConfig(**VISION)),
    ),
    "qwen2_vl": (
        tf.Qwen2VLForConditionalGeneration,
        lambda: tf.Qwen2VLConfig(
            text_config={**TEXT, "rope_parameters": MROPE},
            vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8},
        ),
    ),
    # Its vision tower has SiLU blocks of the very same names.
    "qwen2_5_vl": (
        tf.Qwen2_5_VLForConditionalGeneration,
        lambda: tf.Qwen2_5_VLConfig(text_config={**TEXT, "rope_parameters": MROPE}, vision_config=QWEN_VISION),
    ),
    "qwen3_vl": (
        tf.Qwen3VLForConditionalGeneration,
        lambda: tf.Qwen3VLConfig(
            text_config={**HEADS, "rope_parameters": MROPE},
            vision_config={**QWEN_VISION, "deepstack_visual_indexes": [0]},
        ),
    ),
    "idefics3": (
        tf.Idefics3ForConditionalGeneration,
        lambda: tf.Idefics3Config(text_config=tf.LlamaConfig(**TEXT), vision_config=VISION),
    ),
    "smolvlm": (
        tf.SmolVLMForConditionalGeneration,
        lambda: tf.SmolVLMConfig(text_config=tf.LlamaConfig(**TEXT), vision_config=VISION),
    ),
    "internvl": (
        tf.InternVLForConditionalGeneration,
        lambda: tf.InternVLConfig(
            text_config=tf.Qwen2Config(**TEXT),
            vision_config={**VISION, "image_size": [16, 16], "patch_size": [8, 8]},
        ),
    ),
    "mistral3": (
        tf.Mistral3ForConditionalGeneration,
        lambda: tf.Mistral3Config(
            text_config=tf.MistralConfig(**HEADS), vision_config=tf.PixtralVisionConfig(**VISION, head_dim=8)
        ),
    ),
    "llava_onevision": (
        tf.LlavaOnevisionForConditionalGeneration,
        lambda: tf.LlavaOnevisionConfig(
            text_config=tf.Qwen2Config(**TEXT), vision_config=tf.SiglipVisionConfig(**VISION)
        ),
    ),
    "qwen2_audio": (
        tf.Qwen2AudioForConditionalGeneration,
        lambda: tf.Qwen2AudioConfig(
            text_config=tf.Qwen2Config(**TEXT),
            audio_config={"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48},
        ),
    ),
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


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_blocks_take_their_input_by_its_name(name):
    """The stock block's, which is hidden_states in some families; and refuse what that refuses."""
    model_class, config = CONVERTIBLE[name]
    model = build(model_class, config())
    block = find_ffns(model)[0].module
    own = next(iter(inspect.signature(block.forward).parameters))
    sparsify(model)
    x = torch.randn(2, next(iter(block.parameters())).shape[1])
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(block(**{own: x}), block(x))
        assert torch.equal(block.forward(**{own: x}), block(x))
    for args, named in (((), {}), ((x,), {own: x}), ((x,), {"other": 1}), ((), {"other": x})):
        with pytest.raises(TypeError, match=own):
            block(*args, **named)


def test_a_compiled_block_takes_its_input_by_its_name():
    model_class, config = CONVERTIBLE["phi"]
    block = find_ffns(sparsify(build(model_class, config())))[0].module
    x = torch.randn(2, 32)
    with torch.no_grad():
        compiled = torch.compile(lambda x: block(hidden_states=x), fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), block(x))


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_converts_exactly(name):
    model_class, config = CONVERTIBLE[name]
    model = build(model_class, config())
    dense, state = outputs(model), {key: value.clone() for key, value in model.state_dict().items()}
    blocks = {inner for site in find_ffns(model) for inner in site.module.modules()}
    elsewhere = {path: type(module) for path, module in model.named_modules() if module not in blocks}

    assert sparsify(model, backend="reference") is model

    assert type(model) is model_class
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert {path: type(model.get_submodule(path)) for path in elsewhere} == elsewhere
    sites = find_ffns(model)
    assert len(sites) == 2
    assert all(isinstance(site.activation, nn.ReLU) for site in sites)
    text_config, keys = activation_keys(model.config)
    assert {getattr(text_config, key) for key in keys} == {"relu"}

    stock = model_class(type(model.config).from_dict(model.config.to_dict())).eval()
    stock.load_state_dict(state)
    assert torch.equal(outputs(model), outputs(stock))
    assert not torch.equal(outputs(model), dense)
    torch.testing.assert_close(outputs(sparsify(model)), outputs(stock))  # by kernels, biases included


GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
OPT = {"vocab_size": 64, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 52, "num_hidden_layers": 2}
IDEFICS_RESAMPLER = {
    "hidden_size": 32,
    "num_key_value_heads": 2,
    "resampler_n_heads": 4,
    "resampler_head_dim": 8,
    "resampler_n_latents": 4,
    "resampler_depth": 1,
}
MIXTURE, ELSEWHERE = "mixture of experts", "outside the feed-forward blocks"

REFUSED = {
    "gpt_oss": (tf.GptOssForCausalLM, lambda: tf.GptOssConfig(**HEADS), ["layers.0.mlp", "GptOssExperts", MIXTURE]),
    "llama4": (tf.Llama4ForCausalLM, lambda: tf.Llama4TextConfig(**HEADS), ["Llama4TextMoe", MIXTURE]),
    "lfm2": (tf.Lfm2ForCausalLM, lambda: tf.Lfm2Config(**TEXT), ["Lfm2MLP of w1: Linear, "]),
    "seed_oss": (tf.SeedOssForCausalLM, lambda: tf.SeedOssConfig(**HEADS), ["SeedOssMLP", "dropout"]),
    "bitnet": (tf.BitNetForCausalLM, lambda: tf.BitNetConfig(**TEXT), ["BitNetMLP", "more than hidden states"]),
    "gptj": (tf.GPTJForCausalLM, lambda: tf.GPTJConfig(**GPT2, rotary_dim=8), ["GPTJMLP of fc_in: Linear, "]),
    "bloom": (
        tf.BloomForCausalLM,
        lambda: tf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
        ["BloomMLP of dense_h_to_4h: Linear, gelu_impl: "],
    ),
    "mpt": (
        tf.MptForCausalLM,
        lambda: tf.MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4),
        ["MptMLP of up_proj: Linear, act: "],
    ),
    "bert": (
        tf.BertLMHeadModel,
        lambda: tf.BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, is_decoder=True
        ),
        ["bert.encoder.layer.0 (BertLayer of "],
    ),
    "gpt2": (tf.GPT2LMHeadModel, lambda: tf.GPT2Config(**GPT2), ["transformer.h.0.mlp (GPT2MLP of c_fc: Conv1D, "]),
    "opt": (
        tf.OPTForCausalLM,
        lambda: tf.OPTConfig(**OPT, num_attention_heads=4),
        ["model.decoder.layers.0 (OPTDecoderLayer)"],
    ),
    "mamba": (
        tf.MambaForCausalLM,
        lambda: tf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
        ["backbone.layers.0 (MambaBlock of "],
    ),
    # The projector of this one, outside the decoder, reads the same config entry.
    "idefics2": (
        tf.Idefics2ForConditionalGeneration,
        lambda: tf.Idefics2Config(
            text_config=tf.MistralConfig(**HEADS), vision_config=VISION, perceiver_config=IDEFICS_RESAMPLER
        ),
        ["model.connector", ELSEWHERE],
    ),
    "falcon": (
        tf.FalconForCausalLM,
        lambda: tf.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
        ["FalconConfig names no activation"],
    ),
    "apertus": (tf.ApertusForCausalLM, lambda: tf.ApertusConfig(**TEXT), ["mlp.act_fn (XIELU", "parameters"]),
    "starcoder2": (
        tf.Starcoder2ForCausalLM,
        lambda: tf.Starcoder2Config(**TEXT, residual_dropout=0.1),
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
    model_class, config = CONVERTIBLE["gemma3"]
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
