"""The CPU operators where memory runs out, in a process of its own whose address space is limited."""

import os
import subprocess
import sys

import pytest

from hf_twell.ops import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not build.status("cpu", build=True).available, reason=build.status("cpu", build=True).reason),
]
CHILD = r"""
import re, resource, psutil, torch
from accelerate.utils.memory import should_reduce_batch_size
from hf_twell.ops import build

assert build.status("cpu", build=True).available
tokens, hidden, width, spare = 16_384, 1024, 64, 16 << 20
generator = torch.Generator().manual_seed(0)
shapes = (tokens, hidden), (width, hidden), (hidden, width), (width, hidden)
x, *weights = (torch.randn(shape, generator=generator) for shape in shapes)
leaves = [leaf.requires_grad_() for leaf in (x, *(weight / hidden**0.5 for weight in weights))]
dy = torch.randn(tokens, hidden, generator=generator)

def train():
    return torch.ops.hf_twell.ffn(*leaves, None, None, bias, None, None, None, width)[:1]

@torch.no_grad()
def infer():
    return [torch.ops.hf_twell.infer(*leaves, None, None, bias)]

@torch.no_grad()
def infer_one():  # of whose bias the operator makes a buffer of its own
    return [torch.ops.hf_twell.infer(torch.ones(1, 1), column, column.t(), None, column.view(-1), None, None)]

def check(function):
    expected = function()
    in_use = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (in_use + spare, resource.RLIM_INFINITY))
    try:
        function()
    except RuntimeError as error:
        assert should_reduce_batch_size(error), error
        if torch.__version__ < (2, 13) and function is not infer_one:  # later versions give PyTorch's words
            assert re.search(r"tried to allocate \d+ MiB", str(error)), error
    else:
        raise AssertionError(f"{function.__name__} needs no memory")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for again, before in zip(function(), expected, strict=True):
        assert before.any()
        assert torch.equal(again, before)

for bias in (torch.full((width,), -2.0), torch.zeros(width)):  # sparse, and dense by PyTorch's matmuls
    check(train)
    check(infer)
    (y,) = train()
    def backward():
        return torch.autograd.grad(y, leaves, dy, retain_graph=True)
    check(backward)
column = torch.ones(16 << 20, 1)
check(infer_one)
"""


def test_the_error_is_one_by_which_trainers_lower_the_batch_and_calls_work_again():
    # malloc gives back what a call freed at once, so that the next one needs memory again.
    variables = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0, done.stderr
