"""Norms beside sparse blocks in vLLM on a GPU: which are exchanged, and that what comes out is as near to the truth."""

import pytest
import torch

from tests.serving.test_vllm import BF16, EAGER, SEVERAL, in_vllm
from tests.serving.test_vllm_quantized import BLOCKS_ALONE, OFF
from tests.vllm_engines import AS_NEAR, distance, expected, prompts, save, save_quantized, tiny

OPTIONS = BF16 | {"kv_cache_memory_bytes": 1 << 28}
OURS, STOCK = "AddRmsNorm", "RMSNorm"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]


@in_vllm
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_with_vllms_own_norms(run, tmp_path, family):
    """Eager, a Llama in CUDA graphs, too; of many tokens, and with new weights."""
    model, other = tiny(family).bfloat16(), tiny(family, seed=5).bfloat16()
    path, other_path = (save(each, tmp_path / name) for name, each in (("model", model), ("other", other)))
    few, many = SEVERAL[:3], prompts(*[64] * 8)  # 44 and 512 tokens
    calls = [{"prompts": each, "logprobs": True} for each in (few, many)]
    calls.append({"prompts": few, "logprobs": True, "reload": other_path})
    truths = [expected(model.float(), few), expected(model, many), expected(other.float(), few)]
    runs = [{"model": path, "options": OPTIONS | each, "calls": calls} for each in (EAGER | OFF, EAGER)]
    if family == "llama":
        runs.append({"model": path, "options": OPTIONS, "calls": calls})
    results = run(runs)
    for result in results:
        assert "error" not in result, result
    assert [result["norms"] for result in results] == [[STOCK] * 5, *[[STOCK, *[OURS] * 4]] * (len(runs) - 1)]
    for number, truth in enumerate(truths):
        theirs, *ours = [result["calls"][number] for result in results]
        error = distance(theirs["logprobs"], truth["logprobs"])
        for call in ours:
            assert 0 < distance(call["logprobs"], truth["logprobs"]) < AS_NEAR * error


@in_vllm
def test_norms_beside_a_plain_block_or_a_quantized_attention_stay(run, tmp_path):
    second = save(tiny().bfloat16(), tmp_path / "second", layers=[1])
    blocks = save_quantized(tiny().bfloat16(), tmp_path / "blocks", "int8", **BLOCKS_ALONE)
    whole = save_quantized(tiny().bfloat16(), tmp_path / "whole", "int8")
    results = run([{"model": path, "options": OPTIONS | EAGER, "calls": []} for path in (second, blocks, whole)])
    for result in results:
        assert "error" not in result, result
    assert [result["norms"] for result in results] == [
        [STOCK, STOCK, STOCK, OURS, OURS],
        [STOCK, OURS, OURS, OURS, OURS],
        [STOCK, OURS, STOCK, OURS, OURS],
    ]
