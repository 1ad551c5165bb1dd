"""The CPU operators where memory runs out, in a process of its own whose address space is limited."""

import subprocess
import sys

import pytest

from hf_twell.ops import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not build.status("cpu", build=True).available, reason=build.status("cpu", build=True).reason),
]
# Each tensor of which a call needs another is larger than any block that malloc keeps when it is freed (32 MiB).
CHILD = """
import resource, sys, torch
from accelerate.utils.memory import should_reduce_batch_size
from hf_twell.ops import build

assert build.status("cpu", build=True).available
tokens, hidden, width, spare = 16_384, 1024, 64, 16 << 20
generator = torch.Generator().manual_seed(0)
shapes = (tokens, hidden), (width, hidden), (hidden, width), (width, hidden)
leaves = [(torch.randn(shape, generator=generator) / 32).requires_grad_() for shape in shapes]
dy = torch.randn(tokens, hidden, generator=generator)

def train():
    return torch.ops.hf_twell.ffn(*leaves, None, None, bias, None, None, None, width)[0]

@torch.no_grad()
def infer():
    return torch.ops.hf_twell.infer(*leaves, None, None, bias)

@torch.no_grad()
def infer_one():  # of whose bias the operator makes a buffer of its own
    return torch.ops.hf_twell.infer(torch.ones(1, 1), column, column.t(), None, column.view(-1), None, None)

def check(function):
    expected = function()
    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + spare, resource.RLIM_INFINITY))
    try:
        function()
    except RuntimeError as error:
        assert should_reduce_batch_size(error), error
    else:
        raise AssertionError(f"{function.__name__} needs no memory")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    torch.testing.assert_close(function(), expected, rtol=1e-3, atol=1e-3)

for bias in (torch.full((width,), -3.0), torch.zeros(width)):  # sparse, and dense by PyTorch's matmuls
    check(train)
    check(infer)
    y = train()
    def backward():
        return torch.autograd.grad(y, leaves, dy, retain_graph=True)
    check(backward)
column = torch.ones(16 << 20, 1)
check(infer_one)
"""


def test_the_error_is_one_by_which_trainers_lower_the_batch_and_calls_work_again():
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
