"""The norm ahead of a block on a GPU, against fp64, and between blocks beside which it runs."""

import functools

import pytest
import torch
from torch import library

from hf_twell.ops import build

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

EPSILON = 1e-5
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def built():
    assert build.status("cuda", build=True).available


def inputs(shape, dtype=torch.bfloat16, seed=0):
    """x, residual and weight."""
    g = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(size, generator=g, device="cuda").to(dtype) for size in (shape, shape, shape[-1:])]


def add_rms_norm(x, residual, weight):
    return torch.ops.hf_twell.add_rms_norm(x, residual, weight, EPSILON)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "shape",
    [(1, 8), (3, 24), (16, 2048), (2, 5, 576), (129, 896), (133, 4096), (3, 8192), (5, 8200), (7, 16384), (0, 64)],
)
def test_both_results_are_rounded_once(shape, dtype):
    x, residual, weight = inputs(shape, dtype)
    y, total = add_rms_norm(x, residual, weight)
    assert torch.equal(total, x + residual)
    exact = x.double() + residual.double()
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPSILON) * weight.double()
    rounding = 2**-8 if dtype == torch.bfloat16 else 2**-11
    torch.testing.assert_close(y.double(), exact, rtol=1.01 * rounding, atol=2**-24)
    assert (y.shape, total.shape) == (shape, shape)


def test_rows_that_lie_apart_or_off_a_border():
    x, residual, weight = inputs((9, 64))
    expected = add_rms_norm(x, residual, weight)
    apart = torch.full((9, 80), torch.nan, device="cuda", dtype=x.dtype)
    apart[:, 8:72] = x
    off = torch.full((9 * 64 + 1,), torch.nan, device="cuda", dtype=x.dtype)[1:].view(9, 64)
    off.copy_(residual)
    for ours, theirs in zip(add_rms_norm(apart[:, 8:72], off, weight), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_row_of_nan_leaves_the_others():
    x, residual, weight = inputs((4, 64))
    expected = add_rms_norm(x, residual, weight)
    x[2] = torch.nan
    for ours, theirs in zip(add_rms_norm(x, residual, weight), expected, strict=True):
        assert ours[2].isnan().all()
        assert torch.equal(ours[[0, 1, 3]], theirs[[0, 1, 3]])


@pytest.mark.parametrize(
    ("tokens", "hidden", "width"),
    [*((tokens, 1024, 3072) for tokens in (1, 2, 4, 16, 64, 130, 300, 4096)), (4, 2048, 5632)],
)
def test_between_blocks_in_a_graph_results_are_those_of_calls_one_by_one(tokens, hidden, width):
    """Where the kernels around it start early: 12 layers, other values in each, and in each of 20 replays."""
    g = torch.Generator("cuda").manual_seed(1)
    randn = functools.partial(torch.randn, generator=g, device="cuda", dtype=torch.bfloat16)
    layers = [
        (randn(hidden), randn(width, hidden) / 32, randn(width, hidden) / 32, randn(hidden, width) / 16)
        for _ in range(12)
    ]
    threshold = torch.full((width,), -2.3, device="cuda", dtype=torch.bfloat16)  # 1 % active
    x, residual, _ = inputs((tokens, hidden))

    def run(wait):
        y, total = x, residual
        for weight, w_gate, w_up, w_down in layers:
            y, total = add_rms_norm(y, total, weight)
            wait()
            y = torch.ops.hf_twell.infer(y, w_up, w_down, w_gate, None, None, threshold)
            wait()
        return y, total

    run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(lambda: None)
    for seed in range(20):
        for tensor, values in zip((x, residual), inputs((tokens, hidden), seed=seed), strict=False):
            tensor.copy_(values)
        for tensor in results:
            tensor.fill_(torch.nan)
        graph.replay()
        for ours, theirs in zip(results, run(torch.cuda.synchronize), strict=True):
            assert theirs.isfinite().all()
            assert torch.equal(ours, theirs)


def test_what_it_does_not_take():
    x, residual, weight = inputs((3, 64))
    for arguments in (
        (x.float(), residual.float(), weight.float()),
        (x, residual.half(), weight),
        (x, residual, weight.float()),
        (x, residual[:2], weight),
        (x, residual.view(6, 32), weight),
        (x, residual, weight.view(2, 32)),
        (x, residual.cpu(), weight),
        (x, residual, weight.cpu()),
        (x, residual, weight[:32]),
        (x[:, :60], residual[:, :60], weight[:60]),
    ):
        with pytest.raises(RuntimeError, match="hf_twell::add_rms_norm takes"):
            add_rms_norm(*arguments)


def test_the_operator_compiles():
    x, residual, weight = inputs((3, 64))
    library.opcheck(torch.ops.hf_twell.add_rms_norm.default, (x, residual, weight, EPSILON))
    compiled = torch.compile(lambda *tensors: add_rms_norm(*tensors), fullgraph=True)
    for ours, theirs in zip(compiled(x, residual, weight), add_rms_norm(x, residual, weight), strict=True):
        assert torch.equal(ours, theirs)
