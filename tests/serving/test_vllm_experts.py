"""Mixtures of experts in vLLM, against Transformers."""

import torch
import transformers as tf

from hf_twell import sparsify
from hf_twell.serving import vllm_engine
from tests.mixtures import mixture
from tests.serving.test_vllm import EAGER, FP32, SEVERAL, in_vllm, kernel_rows
from tests.vllm_engines import SAME, SIZES, distance, expected, save

ROUTED = {**SIZES, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "bos_token_id": 1}
# vLLM's shape and Transformers' alike: a dense layer and a mixture; a shared expert beside the routed ones.
MODELS = {
    "qwen3_moe": (tf.Qwen3MoeForCausalLM, tf.Qwen3MoeConfig(**ROUTED, head_dim=64, mlp_only_layers=[0])),
    "mixtral": (tf.MixtralForCausalLM, tf.MixtralConfig(**{**SIZES, "intermediate_size": 64}, bos_token_id=1)),
    "qwen2_moe": (tf.Qwen2MoeForCausalLM, tf.Qwen2MoeConfig(**ROUTED, shared_expert_intermediate_size=64)),
}


def routed(name):
    torch.manual_seed(0)
    cls, config = MODELS[name]
    return cls(config).eval()


@in_vllm
def test_mixtures_give_the_tokens_of_transformers(run, tmp_path):
    """By kernels, though experts this small are faster by matmuls; by matmuls the last, whose density is not known."""
    runs, models = [], {name: routed(name) for name in MODELS}
    for name, model in models.items():
        settings = {"kernels": True, "density": None if name == "qwen2_moe" else 0.03}
        options = {"additional_config": {"hf_twell": settings}}
        path, calls = save(model, tmp_path / name, None), [{"prompts": SEVERAL, "logprobs": True}]
        runs.append({"model": path, "options": FP32 | EAGER | options, "calls": calls})
    for result, (name, model) in zip(run(runs), models.items(), strict=True):
        assert "error" not in result, result
        truth = expected(model, SEVERAL)
        assert result["calls"][0]["tokens"] == truth["tokens"]
        assert distance(result["calls"][0]["logprobs"], truth["logprobs"]) < SAME
        assert bool(kernel_rows(result)[0]) == (name != "qwen2_moe")


@in_vllm
def test_two_ranks_of_tensor_and_expert_parallelism(run, tmp_path):
    """Each with half of a dense block's neurons, and half of the experts."""
    model = routed("qwen3_moe")
    options = FP32 | EAGER | {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    (result,) = run([{"model": save(model, tmp_path / "model"), "options": options, "calls": [{"prompts": SEVERAL}]}])
    assert "error" not in result, result
    assert result["blocks"] == ["SparseFfn", "Qwen3MoeSparseMoeBlock"]
    assert result["calls"][0]["tokens"] == expected(model, SEVERAL)["tokens"]


@in_vllm
def test_what_mixtures_do_not_run_with_is_refused(run, tmp_path):
    path = save(routed("mixtral"), tmp_path / "model", None)
    others = {"trust_remote_code": True, "model_impl": "transformers"}  # where vLLM puts in experts of its own
    runs = [{"model": path, "options": FP32 | EAGER | each, "calls": []} for each in ({"enable_lora": True}, others)]
    lora, transformers = run(runs)
    assert "the plugin of hf_twell serves no sparse mixture of experts with LoRA" in lora["error"]
    assert "TwellMixtralModel does not run in vllm, which may compute SiLU" in transformers["error"]


def test_a_mixture_goes_to_a_vllm_that_can_exchange_its_experts(tmp_path, vllm_with):
    path, model = str(tmp_path / "model"), sparsify(mixture("qwen2_moe"))
    model.config.twell |= {"density": [0.1] * 4}  # two blocks a layer
    model.save_pretrained(path)
    vllm_with("Qwen2MoeForCausalLM")
    assert vllm_engine.refusal(path) == (
        "the vLLM here has no layer of experts in which the plugin of hf_twell could put twell_qwen2_moe; vLLM 0.32 has"
    )
    layers = tmp_path / "site" / "vllm" / "model_executor" / "layers" / "fused_moe"
    layers.mkdir(parents=True)
    (layers / "routed_experts.py").touch()
    assert vllm_engine.refusal(path) is None
    assert vllm_engine.why_not("auto", path) is None
    assert vllm_engine.describe(path) == "is sparse: the plugin of hf_twell computes its blocks"
