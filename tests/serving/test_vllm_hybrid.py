"""Models of our own `model_type` in vLLM: Qwen3.5, whose linear attention keeps SiLU beside blocks of ReLU."""

import copy
import subprocess

import pytest
import torch
import transformers as tf

from hf_twell.blocks import modeling_twell
from hf_twell.serving import vllm_engine
from hf_twell.serving.vllm_plugin import OWN_ARCHITECTURES
from tests.convert.test_own_type import MROPE, TOKENS, VISION, dense
from tests.serving.test_vllm import BF16, EAGER, FP32, SEVERAL, SPARSE_LINE, in_vllm, kernel_rows
from tests.vllm_engines import AS_NEAR, PYTHON, SAME, SIZES, distance, environment, expected, save

LINE = SPARSE_LINE + "2.00% to 2.00%, from the checkpoint's twell entry"
LINEAR = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 64, "value_head_dim": 64}
TEXT = {
    **SIZES,
    **{f"linear_{name}": size for name, size in LINEAR.items()},
    "head_dim": 64,
    "bos_token_id": 1,
    "rope_parameters": {**MROPE, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.25},
}

# As vLLM 0.26 is, which has the model that sees alone.
WITHOUT_TEXT = """
import sys
from vllm import ModelRegistry
from vllm.config import ModelConfig
from vllm.plugins import load_general_plugins
ModelRegistry.models.pop("Qwen3_5ForCausalLM", None)
load_general_plugins()
ModelConfig(model=sys.argv[1], skip_tokenizer_init=True)
"""


def qwen(*layers: str, sees: bool = False):
    """Of our own type from the start: attention in every layer alone would need none."""
    settings = {**TEXT, "layer_types": [f"{kind}_attention" for kind in layers]}
    stock, config = tf.Qwen3_5ForCausalLM, tf.Qwen3_5TextConfig
    if sees:
        stock, config = tf.Qwen3_5ForConditionalGeneration, tf.Qwen3_5Config
        tokens = {f"{name}_token_id": token + 64 for name, token in TOKENS.items()}
        settings = {"text_config": settings, "vision_config": {**VISION, "out_hidden_size": 256}, **tokens}
    torch.manual_seed(0)
    return modeling_twell.twell_class(stock)(modeling_twell.twell_class(config)(**settings)).eval()


@pytest.fixture
def torchvision():
    """vLLM imports it for any of these models, where only some of its builds for CPUs bring one that loads."""
    if subprocess.run([str(PYTHON), "-c", "import torchvision"], capture_output=True, check=False).returncode:
        pytest.skip("needs a torchvision that loads beside vLLM")


@in_vllm
def test_attention_layers_give_the_tokens_of_transformers(run, torchvision, tmp_path):
    """In float32, which vLLM's linear attention does not compute on a CPU: the text model, and the one that sees."""
    text, sees = qwen("full", "full"), qwen("full", "full", sees=True)
    options = FP32 | EAGER | {"enable_prefix_caching": False}  # which wants a layer of linear attention
    unseen = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    calls = [{"prompts": SEVERAL, "logprobs": True}]
    runs = [
        {"model": save(text, tmp_path / "text"), "options": options, "calls": calls},
        {"model": save(sees, tmp_path / "sees"), "options": options | unseen, "calls": calls},
    ]
    for result, model in zip(run(runs), (text, sees), strict=True):
        assert "error" not in result, result
        assert (result["lines"], result["blocks"]) == ([LINE], ["SparseFfn"] * 2)
        truth = expected(model, SEVERAL)
        assert result["calls"][0]["tokens"] == truth["tokens"]
        assert distance(result["calls"][0]["logprobs"], truth["logprobs"]) < SAME
        assert kernel_rows(result) == [[4, 74]]


@in_vllm
def test_linear_attention_is_as_near_to_float32_as_vllms_own_blocks(run, torchvision, tmp_path):
    """In bfloat16: by kernels, compiled and not, and by plain blocks. SiLU in them would be far off."""
    model = qwen("linear", "full").bfloat16()
    path = save(model, tmp_path / "model")
    truth = expected(model.float(), SEVERAL)["logprobs"]
    off = {"additional_config": {"hf_twell": {"kernels": False}}}
    calls = [{"prompts": SEVERAL, "logprobs": True}]
    runs = [{"model": path, "options": BF16 | each, "calls": calls} for each in (EAGER | off, EAGER, {})]
    plain, *sparse = run(runs)
    for result in (plain, *sparse):
        assert "error" not in result, result
    assert (plain["blocks"], plain["activations"]) == (["Qwen2MoeMLP"] * 2, ["ReluAndMul"] * 2)
    error = distance(plain["calls"][0]["logprobs"], truth)
    for result in sparse:
        assert (result["lines"], result["blocks"]) == ([LINE], ["SparseFfn"] * 2)
        assert kernel_rows(result) == [[4, 74]]
        assert 0 < distance(result["calls"][0]["logprobs"], truth) < AS_NEAR * error
    with_silu = copy.deepcopy(model)
    for layer in with_silu.model.layers:
        layer.mlp.act_fn = torch.nn.SiLU()
    assert distance(expected(with_silu, SEVERAL)["logprobs"], truth) > 5 * error


@in_vllm
def test_a_text_model_that_vllm_lacks_is_refused_by_name(torchvision, tmp_path):
    """And not taken for the model that sees."""
    command = [str(PYTHON), "-c", WITHOUT_TEXT, save(qwen("linear", "full"), tmp_path / "model")]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert (
        "the vLLM here has no Qwen3_5ForCausalLM, from which the plugin of hf_twell makes twell_qwen3_5_text; "
        "vLLM 0.32 has"
    ) in done.stderr


def test_vllm_is_asked_where_it_has_the_stock_model(tmp_path, vllm_with):
    paths = {name: save(dense(name), tmp_path / name, None) for name in ("qwen3_5_text", "olmo_hybrid")}
    vllm_with("OlmoHybridForCausalLM", "Qwen3_5ForConditionalGeneration")
    path = paths["qwen3_5_text"]
    assert vllm_engine.refusal(path) == (
        "the vLLM here has no Qwen3_5ForCausalLM, from which the plugin of hf_twell makes twell_qwen3_5_text; "
        "vLLM 0.32 has"
    )
    vllm_with("OlmoHybridForCausalLM", "Qwen3_5ForCausalLM")
    assert vllm_engine.why_not("vllm", path) is None
    assert vllm_engine.describe(path).startswith("is sparse: the plugin of hf_twell computes its blocks, without ke")
    assert "by its plugin alone; leave --model-impl out" in str(
        vllm_engine.refusal(path, ["--model-impl", "transformers"])
    )
    assert vllm_engine.refusal(paths["olmo_hybrid"]) == (
        "vLLM knows no twell_olmo_hybrid, a type of this package's own, of which its plugin brings "
        f"{', '.join(OWN_ARCHITECTURES)} alone"
    )
