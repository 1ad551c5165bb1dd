"""The kernel as Hugging Face's `kernels` loads it, from a local repository and on a CPU."""

import sys
from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_twell.ops import reference
from tests.conftest import tiny_llama

REPOSITORY = Path(sys.prefix, "cpu-hub")
kernels = pytest.importorskip("kernels")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not REPOSITORY.exists(), reason="no compiled kernel; `make environments` makes it on x86-64"),
]


def test_the_operator_is_that_of_the_package():
    twell = kernels.get_local_kernel(REPOSITORY, backend="cpu")
    torch.manual_seed(0)
    x, w_up, w_gate, w_down = (torch.randn(shape) for shape in ((3, 16), (40, 16), (40, 16), (16, 40)))
    expected = reference.ffn(x, w_up, w_down, w_gate)
    torch.testing.assert_close(twell.ffn(x, w_up, w_down, w_gate), expected)
    compiled = torch.compile(twell.ffn, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, w_up, w_down, w_gate), expected)
    with pytest.raises(RuntimeError):
        twell.ffn(x, w_up, w_down[:, 1:], w_gate)


def test_kernelize_takes_it_for_relu_blocks_and_leaves_others(monkeypatch):
    monkeypatch.setattr(LlamaMLP, "kernel_layer_name", "ReLUMLP", raising=False)
    monkeypatch.setattr(LlamaMLP, "kernel_condition", staticmethod(lambda module: True), raising=False)
    layer = kernels.LocalLayerRepository(REPOSITORY, layer_name="ReLUMLP")
    for activation, calls in (("relu", 1), ("silu", 0)):
        block = tiny_llama(hidden_act=activation).eval().model.layers[0].mlp
        x = torch.randn(2, 5, block.hidden_size)
        expected = block(x).detach()
        weights = {name: tensor.clone() for name, tensor in block.state_dict().items()}
        with kernels.use_kernel_mapping({"ReLUMLP": {"cpu": layer}}):
            kernels.kernelize(block, mode=kernels.Mode.INFERENCE, device="cpu")
        assert calls_of_the_operator(block, x) == 0, "gradients are wanted"
        with torch.no_grad():
            torch.testing.assert_close(block(x), expected)
            assert calls_of_the_operator(block, x) == calls
        torch.testing.assert_close(dict(block.state_dict()), weights, rtol=0, atol=0)


def calls_of_the_operator(block, x) -> int:
    with torch.profiler.profile() as profile:
        block(x)
    return sum(event.count for event in profile.key_averages() if "_hf_twell_cpu" in event.key)
