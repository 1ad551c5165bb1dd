"""The kernel as Hugging Face's `kernels` loads it, from a local repository."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.utils.import_utils import is_kernels_available

from hf_twell.ops import reference
from tests.conftest import finished, tiny_llama
from tests.paths import ROOT

REPOSITORY, WITH_CUDA = Path(sys.prefix, "cpu-hub"), ROOT / "out" / "hub"
kernels = pytest.importorskip("kernels")
pytestmark = pytest.mark.slow
on_cpu = pytest.mark.skipif(not REPOSITORY.exists(), reason="no kernel; `make environments` compiles it on x86-64")
by_a_cpu_build = pytest.mark.skipif(torch.version.cuda is not None, reason="`kernels` loads that of PyTorch's build")
has_cuda = torch.cuda.is_available() and list(WITH_CUDA.glob("build/*-cu*"))
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not has_cuda, reason="needs a GPU, and what `make hub-kernel` compiles")]
can_load = is_kernels_available() and find_spec("torchvision")
by_transformers = pytest.mark.skipif(not can_load, reason="Transformers wants torchvision, and its release of kernels")
COUNT = """
import torch
with torch.no_grad(), torch.profiler.profile() as profile:
    model(torch.tensor([[5, 6, 7]], device=model.device))
print([event.count for event in profile.key_averages() if event.key.endswith("::infer")], len(model.model.layers))
"""


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize(
    ("example", "repository"),
    [
        pytest.param(0, REPOSITORY, marks=[on_cpu, by_a_cpu_build], id="kernelize on a CPU"),
        pytest.param(0, WITH_CUDA, marks=on_gpu, id="kernelize on a GPU"),
        pytest.param(1, WITH_CUDA, marks=[*on_gpu, by_transformers], id="KernelConfig"),
    ],
)
def test_the_page_runs_as_it_stands(example, repository, activation, tmp_path):
    """And computes every block by the kernel where the model uses ReLU, none where it uses SiLU."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "hub").symlink_to(repository)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "kernel.md").read_text(), re.DOTALL)[example]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if repository == REPOSITORY else {}
    done = finished(sys.executable, "-c", code.replace("relu", activation) + COUNT, cwd=tmp_path, env=hidden)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == ("[4] 4" if activation == "relu" else "[] 4")


@on_cpu
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


@on_cpu
@by_a_cpu_build
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
