"""8-bit checkpoints of compressed-tensors in vLLM: by the kernels, on what the weights stand for, or plain."""

import json
from pathlib import Path

import pytest
import torch

from tests.serving.test_vllm import BF16, EAGER, FP32, ONE, PLAIN_LINE, SEVERAL, SPARSE_LINE, in_vllm, kernel_rows
from tests.vllm_engines import AS_NEAR, ROUNDED, SAME, distance, expected, prompts, save_quantized, tiny

# What is left in 16 or 32 bits, so that vLLM's own rounding of activations is nowhere but in the blocks.
BLOCKS_ALONE = {"part": "mlp", "ignore": ("lm_head", "re:.*self_attn.*")}
OFF = {"additional_config": {"hf_twell": {"kernels": False}}}
# Of such a width vLLM's own int8 goes by oneDNN on every processor. Of multiples of 32 it goes by AMX where there is
# one, which takes no float32.
ODD = {"hidden_size": 264, "head_dim": 64}


@in_vllm
def test_int8_blocks_are_those_of_the_weights_that_int8_stands_for(run, tmp_path):
    """Compiled, eager, on two ranks, and with new weights; vLLM's own blocks round activations, ours do not."""
    model, other = tiny(**ODD), tiny(seed=5, **ODD)
    path, other_path = (
        save_quantized(each, tmp_path / name, **BLOCKS_ALONE) for name, each in (("model", model), ("other", other))
    )
    several, one, after = expected(model, SEVERAL), expected(model, ONE), expected(other, SEVERAL)
    calls = [{"prompts": SEVERAL, "logprobs": True}, {"prompts": ONE}]
    anew = [{"prompts": SEVERAL}, {"prompts": SEVERAL, "reload": other_path}]
    options = [({}, calls), (EAGER | {"tensor_parallel_size": 2}, calls), (EAGER, anew), (EAGER | OFF, calls)]
    results = run([{"model": path, "options": FP32 | each, "calls": calls} for each, calls in options])
    for result in results:
        assert "error" not in result, result
    compiled, ranks, reloaded, dense = results
    assert compiled["lines"] == [SPARSE_LINE + "1.00% to 1.00%, from the checkpoint's twell entry"]
    for result in (compiled, ranks):
        assert result["blocks"] == ["SparseQuantizedFfn"] * 2
        assert [call["tokens"] for call in result["calls"]] == [several["tokens"], one["tokens"]]
        assert distance(result["calls"][0]["logprobs"], several["logprobs"]) < SAME
    assert kernel_rows(compiled) == [[4, 74], [1, 25]]
    assert [call["tokens"] for call in reloaded["calls"]] == [several["tokens"], after["tokens"]]
    assert kernel_rows(reloaded) == [[4, 74]] * 2
    assert dense["blocks"] == ["LlamaMLP"] * 2
    assert distance(dense["calls"][0]["logprobs"], several["logprobs"]) > ROUNDED, "vLLM's own rounds what comes in"


@in_vllm
def test_an_int8_model_is_as_near_to_its_weights_as_vllms_own_path(run, tmp_path):
    """All linears in int8 here, as such checkpoints are; attention rounds its activations in both."""
    model = tiny().bfloat16()
    path = save_quantized(model, tmp_path / "model")
    truth = expected(model, SEVERAL)["logprobs"]
    calls = [{"prompts": SEVERAL, "logprobs": True}]
    runs = [{"model": path, "options": BF16 | EAGER | each, "calls": calls} for each in (OFF, {})]
    dense, sparse = run(runs)
    assert dense["lines"] == [PLAIN_LINE + "blocks: additional_config turns the kernels off"]
    assert (dense["blocks"], sparse["blocks"]) == (["LlamaMLP"] * 2, ["SparseQuantizedFfn"] * 2)
    errors = [distance(result["calls"][0]["logprobs"], truth) for result in (dense, sparse)]
    assert 0 < errors[1] < AS_NEAR * errors[0], errors


def changed(path, weights=None, activations=None, **others):
    """The checkpoint, after these changes to what its config says of its quantization."""
    file = Path(path) / "config.json"
    config = json.loads(file.read_text())
    entry = config["quantization_config"] | others
    group = entry["config_groups"]["group_0"]
    group["weights"] |= weights or {}
    group["input_activations"] = None if activations == "none" else group["input_activations"] | (activations or {})
    file.write_text(json.dumps(config | {"quantization_config": entry}))
    return path


@in_vllm
def test_what_kernels_do_not_read_stays_plain(run, tmp_path):
    """By the config, before any weight is loaded."""
    static, four_bits = {"strategy": "tensor", "dynamic": False}, {"num_bits": 4}
    cases = [
        ({"weights": {"strategy": "tensor"}}, "quantized, and their scales are not one for each row"),
        ({"activations": static}, "quantized, and their activations have scales of their own"),
        ({"activations": {"symmetric": False}}, "quantized, and their activations are not quantized symmetrically"),
        (
            {"weights": four_bits, "activations": "none", "format": "pack-quantized"},
            "quantized, and there are no kernels for CompressedTensorsWNA16 on cpu",
        ),
    ]
    reasons, paths = [f"their weights are {reason}" for _, reason in cases], []
    for changes, _ in cases:
        paths.append(changed(save_quantized(tiny(), tmp_path / str(len(paths))), **changes))
    for reason, model, options in (
        (
            "their weights are quantized, and there are no kernels for CompressedTensorsW8A8Fp8 on cpu",
            tiny(),
            {"kind": "fp8"},
        ),
        ("they have biases", tiny(mlp_bias=True), {}),
        ("they are too dense for kernels to be faster", tiny(), {"density": 0.03}),
    ):
        paths.append(save_quantized(model, tmp_path / str(len(paths)), **options))
        reasons.append(reason)
    options = BF16 | EAGER | {"load_format": "dummy"}
    results = run([{"model": path, "options": options, "calls": []} for path in paths])
    for reason, result in zip(reasons, results, strict=True):
        assert "error" not in result, (reason, result)
        assert result["lines"] == [f"{PLAIN_LINE}blocks: {reason}"]
        assert (result["blocks"], result["activations"]) == (["LlamaMLP"] * 2, ["ReluAndMul"] * 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA GPU")
@in_vllm
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_on_a_gpu_blocks_are_as_near_to_their_weights_as_vllms_own(run, tmp_path, kind):
    """Eager, in CUDA graphs, and with new weights. Of more than 64 tokens, fp8 quantizes x, and int8 is vLLM's own.

    Where both are vLLM's own, in eager mode and in a graph, only chance makes one nearer: so that call has many tokens.
    """
    model, other = tiny().bfloat16(), tiny(seed=5).bfloat16()
    path, other_path = (
        save_quantized(each, tmp_path / name, kind, **BLOCKS_ALONE)
        for name, each in (("model", model), ("other", other))
    )
    few, many = SEVERAL[:3], prompts(*[64] * 8)  # 44 and 512 tokens
    calls = [{"prompts": each, "logprobs": True} for each in (few, many)]
    calls.append({"prompts": few, "logprobs": True, "reload": other_path})
    truths = [expected(model, few), expected(model, many), expected(other, few)]
    options = BF16 | {"kv_cache_memory_bytes": 1 << 28}
    runs = [{"model": path, "options": options | each, "calls": calls} for each in (EAGER | OFF, EAGER, {})]
    denser = {"density": 0.02}, {"density": 0.02, "kernels": True}
    for settings in denser:
        more = EAGER | {"additional_config": {"hf_twell": settings}}
        runs.append({"model": path, "options": options | more, "calls": []})
    *results, plain, asked = run(runs)
    for result in (*results, plain, asked):
        assert "error" not in result, result
    assert plain["lines"] == [f"{PLAIN_LINE}blocks: they are too dense for kernels to be faster"]
    assert asked["blocks"] == ["SparseQuantizedFfn"] * 2
    dense, eager, _ = results
    assert [result["blocks"] for result in results] == [["LlamaMLP"] * 2, *[["SparseQuantizedFfn"] * 2] * 2]
    assert kernel_rows(dense) == [[]] * 3
    assert kernel_rows(eager) == [[3, 44], [8, 512] if kind == "fp8" else [8], [3, 44]]
    for number, truth in enumerate(truths):
        theirs, *ours = [result["calls"][number] for result in results]
        error = distance(theirs["logprobs"], truth["logprobs"])
        for call in ours:
            assert 0 < distance(call["logprobs"], truth["logprobs"]) < AS_NEAR * error
            assert same_tokens(call, truth) >= same_tokens(theirs, truth) / 2, "one that differs changes all after it"


def same_tokens(call, truth) -> int:
    return sum(
        a == b
        for row, other in zip(call["tokens"], truth["tokens"], strict=True)
        for a, b in zip(row, other, strict=True)
    )
