"""The CUDA operators where a GPU's memory runs out."""

import contextlib
import subprocess
import sys

import pytest
import torch
from accelerate.utils.memory import should_reduce_batch_size

from hf_twell.ops import api
from tests.kernels.test_cuda_kernels import _missing, cuda_ffn, gpu_case
from tests.kernels.test_cuda_training import _no_hopper, grad_of_y, leaves_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_missing()), reason=_missing())]
SPARE = 32 << 20  # bytes: less than any tensor that a call below needs beside small ones
FULL = r"^CUDA out of memory\."
# Where the operator itself allocates; torch 2.13 gives PyTorch's words.
TOLD = FULL + (r" hf_twell tried to allocate \d+ MiB" if torch.__version__ < (2, 13) else "")
CHILD = """
import torch
from accelerate.utils.memory import should_reduce_batch_size
from hf_twell.ops import api

with torch.no_grad():
    shapes = (32_768, 1024), (64, 1024), (1024, 64)
    x, w_up, w_down = (torch.ones(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    api.ffn(x[:1], w_up, w_down, backend="cuda")
    try:
        x[torch.tensor([x.shape[0]], device="cuda")].cpu()
    except RuntimeError:
        pass
    try:
        api.ffn(x, w_up, w_down, backend="cuda")
    except RuntimeError as error:
        assert not should_reduce_batch_size(error), error
        assert "device-side assert" in str(error), error
    else:
        raise AssertionError("computed after an error")
"""


@contextlib.contextmanager
def hardly_more_memory():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + SPARE) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def assert_runs_out_and_works_again(function, match=TOLD):
    """Of a function that returns tensors: none of the first call's stays on the GPU, whose blocks it would hold."""
    expected = [t.cpu() for t in function()]
    with hardly_more_memory(), pytest.raises(RuntimeError, match=match) as raised:
        function()
    assert should_reduce_batch_size(raised.value)
    torch.testing.assert_close([t.cpu() for t in function()], expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_inference(dtype):
    """In float32 it is PyTorch's functions that allocate."""
    case = gpu_case(32_768, 1024, 2816, 0.01, dtype)
    with torch.no_grad():
        assert_runs_out_and_works_again(lambda: [cuda_ffn(case)], TOLD if dtype == torch.bfloat16 else FULL)


def test_a_weight_that_becomes_contiguous():
    tokens, hidden, width = 1, 1024, 32_768
    wide = torch.ones(width, 2 * hidden, device="cuda", dtype=torch.bfloat16)
    case = {"x": wide[:tokens, :hidden], "w_up": wide[:, ::2], "w_down": wide[:, :hidden].t()}
    with torch.no_grad():
        assert_runs_out_and_works_again(lambda: [cuda_ffn(case)], FULL)


def test_an_earlier_error_is_not_called_out_of_memory():
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(bool(_no_hopper()), reason=_no_hopper())
@pytest.mark.parametrize("capacity", [None, 2816])
def test_training_forward_and_backward(capacity):
    leaves = leaves_of(gpu_case(32_768, 1024, 2816, 0.01, torch.bfloat16))
    wanted, grad_y = [t for t in leaves.values() if t is not None], grad_of_y(leaves)

    def forward():
        return api.ffn(**leaves, capacity=capacity, backend="cuda")

    assert_runs_out_and_works_again(lambda: [forward().detach()])
    torch.cuda.empty_cache()
    y = forward()
    assert_runs_out_and_works_again(lambda: torch.autograd.grad(y, wanted, grad_y, retain_graph=True))
