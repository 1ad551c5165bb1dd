"""8-bit checkpoints of compressed-tensors in vLLM: by the kernels, on what the weights stand for, or plain."""

import pytest
import torch

from tests.test_vllm import BF16, EAGER, FP32, ONE, PLAIN_LINE, SEVERAL, SPARSE_LINE, in_vllm, kernel_rows
from tests.vllm_engines import change_config, distance, expected, run, save_quantized, tiny

# What is left in 16 or 32 bits, so that vLLM's own rounding of activations is nowhere but in the blocks.
BLOCKS_ALONE = {"part": "mlp", "ignore": ("lm_head", "re:.*self_attn.*")}
OFF = {"additional_config": {"hf_twell": {"kernels": False}}}


@in_vllm
def test_int8_blocks_are_those_of_the_weights_that_int8_stands_for(tmp_path):
    """Compiled, eager, on two ranks, and with new weights; vLLM's own blocks round activations, ours do not."""
    model, other = tiny(), tiny(seed=5)
    path, other_path = (
        save_quantized(each, tmp_path / name, **BLOCKS_ALONE) for name, each in (("model", model), ("other", other))
    )
    several, one, after = expected(model, SEVERAL), expected(model, ONE), expected(other, SEVERAL)
    calls = [{"prompts": SEVERAL, "logprobs": True}, {"prompts": ONE}]
    anew = [{"prompts": SEVERAL}, {"prompts": SEVERAL, "reload": other_path}]
    options = [({}, calls), (EAGER | {"tensor_parallel_size": 2}, calls), (EAGER, anew), (EAGER | OFF, calls)]
    results = run(tmp_path, [{"model": path, "options": FP32 | each, "calls": calls} for each, calls in options])
    for result in results:
        assert "error" not in result, result
    compiled, ranks, reloaded, dense = results
    assert compiled["lines"] == [SPARSE_LINE + "3.00% to 3.00%, from the checkpoint's twell entry"]
    for result in (compiled, ranks):
        assert result["blocks"] == ["SparseQuantizedFfn"] * 2
        assert [call["tokens"] for call in result["calls"]] == [several["tokens"], one["tokens"]]
        assert distance(result["calls"][0]["logprobs"], several["logprobs"]) < 2e-5
    assert kernel_rows(compiled) == [[4, 74], [1, 25]]
    assert [call["tokens"] for call in reloaded["calls"]] == [several["tokens"], after["tokens"]]
    assert kernel_rows(reloaded) == [[4, 74]] * 2
    assert dense["blocks"] == ["LlamaMLP"] * 2
    print(distance(dense["calls"][0]["logprobs"], several["logprobs"]), distance(ranks["calls"][0]["logprobs"], several["logprobs"]))


@in_vllm
def test_an_int8_model_is_as_near_to_its_weights_as_vllms_own_path(tmp_path):
    """All linears in int8 here, as such checkpoints are; attention rounds its activations in both."""
    model = tiny().bfloat16()
    path = save_quantized(model, tmp_path / "model")
    truth = expected(model, SEVERAL)["logprobs"]
    calls = [{"prompts": SEVERAL, "logprobs": True}]
    runs = [{"model": path, "options": BF16 | EAGER | each, "calls": calls} for each in (OFF, {})]
    dense, sparse = run(tmp_path, runs)
    assert dense["lines"] == [PLAIN_LINE + "blocks: additional_config turns the kernels off"]
    assert (dense["blocks"], sparse["blocks"]) == (["LlamaMLP"] * 2, ["SparseQuantizedFfn"] * 2)
    errors = [distance(result["calls"][0]["logprobs"], truth) for result in (dense, sparse)]
    print(errors)
    assert 0 < errors[1] < 1.25 * errors[0], errors


def tensors(config, **changes):
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= changes


def activations(config, **changes):
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] |= changes


def weights_alone(config):
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    config["quantization_config"]["format"] = "pack-quantized"


PLAIN = {
    "their scales are not one for each row": lambda config: tensors(config, strategy="tensor"),
    "their activations have scales of their own": lambda config: (
        activations(config, strategy="tensor", dynamic=False),
        tensors(config, strategy="tensor"),
    ),
    "their activations are not quantized symmetrically": lambda config: activations(config, symmetric=False),
    "there are no kernels for CompressedTensorsWNA16 on cpu": weights_alone,
}


@in_vllm
def test_other_8_bit_checkpoints_stay_plain(tmp_path):
    """By their configs, before any weight is loaded."""
    paths = [
        change_config(save_quantized(tiny(), tmp_path / str(number)), change)
        for number, change in enumerate(PLAIN.values())
    ]
    paths.append(save_quantized(tiny(), tmp_path / "fp8", kind="fp8"))
    dummy = {"load_format": "dummy"}
    results = run(tmp_path, [{"model": path, "options": BF16 | EAGER | dummy, "calls": []} for path in paths])
    for result in results:
        print(result)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA GPU")
@in_vllm
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_on_a_gpu(tmp_path, kind):
    pass
