"""The elementwise middle of a dense block on a GPU, against the reference's."""

import pytest
import torch
from torch import library

from hf_twell.bench.workload import make_ffn, patched_block
from hf_twell.blocks.modeling import L1Inputs
from hf_twell.dispatch.choose import dense_dtypes
from hf_twell.dispatch.key import HOPPER, device_class
from hf_twell.ops import build, reference
from hf_twell.serving.vllm_plugin import operator  # noqa: F401  defines torch.ops.hf_twell_vllm.ffn
from tests.ffn_cases import relative_rms

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


@pytest.fixture(autouse=True)
def built():
    assert build.status("cuda", build=True).available


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("shape", [(1, 8), (63, 172), (2, 50, 4864), (4097, 1001), (0, 64)])
@pytest.mark.parametrize("count", [None, 0.25])
def test_one_pass_gives_what_the_reference_gives(shape, gated, dtype, count):
    g = torch.Generator("cuda").manual_seed(0)
    values = (torch.randn(shape, generator=g, device="cuda") for _ in range(3))
    # Away from zero: h that underflows in float16 has no sign.
    gate, up, grad = ((v.abs() + 2**-6).copysign(v).to(dtype) for v in values)
    weight = (torch.rand(shape[:-1], generator=g, device="cuda") > 0.2).float()
    scale = torch.tensor(0.125, device="cuda")
    count_scale = None if count is None else torch.tensor(count, device="cuda")
    results = []
    for wide in (False, True):
        kind = torch.float64 if wide else dtype
        inputs = [t.to(kind, copy=True).requires_grad_() for t in ((gate, up) if gated else (gate,))]
        tally = torch.zeros(1 + shape[-1], device="cuda", requires_grad=True)
        if wide:
            active = torch.relu(inputs[0])
            active = active if count is None else reference.inject_count(active, count_scale, weight)
            h = reference.inject_l1(active * inputs[1] if gated else active, scale, weight, tally)
        else:
            up_or_none = inputs[1] if gated else None
            h = torch.ops.hf_twell.activation(inputs[0], up_or_none, scale, weight, tally, count_scale)
        h.backward(grad.to(kind))
        results.append([h, *(t.grad for t in inputs), tally.grad])
    rounding = 2**-8 if dtype == torch.bfloat16 else 2**-11
    for ours, truth in zip(results[0][:-1], results[1][:-1], strict=True):
        assert (ours.dtype, ours.shape) == (dtype, truth.shape)
        # The count's derivative is within 1e-6 of itself, and what it is added to may be as large.
        torch.testing.assert_close(
            ours.double(), truth.double(), rtol=1.01 * rounding, atol=1e-7 if count is None else 4e-6
        )
    torch.testing.assert_close(results[0][-1], results[1][-1], rtol=2 * rounding, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "width"), [(16, 5632), (64, 172), (700, 1024)])
@torch.no_grad()
def test_vllms_operator_computes_a_dense_block(tokens, width, dtype):
    """At a density at which no kernels run, `down` by columns as it lies there; eager and captured."""
    x, gate, up, down = make_ffn(tokens, 256, width, width / 2, dtype=dtype, device="cuda")
    truth = reference.ffn(*(t.double() for t in (x, up, down, gate)))
    weights = torch.cat([gate, up]), down.t().contiguous().t()

    def compute():
        return torch.ops.hf_twell_vllm.ffn(x, *weights, 1.0, None)

    y = compute()
    assert relative_rms(y, truth) <= 2 * relative_rms(reference.ffn(x, up, down, gate), truth)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compute()
    graph.replay()
    torch.testing.assert_close(captured, y, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (63, 176), (4097, 1024), (130, 172), (17, 5632)])
def test_halves_of_one_matrix_are_read_where_they_lie(tokens, width, dtype):
    """But for widths that are no multiple of 8. Other elements than theirs are NaN."""
    whole = torch.full((tokens, 2 * width + 24), torch.nan, device="cuda", dtype=dtype)
    halves = whole[:, 8 : 8 + width], whole[:, 16 + width : 16 + 2 * width]
    for half in halves:
        half.copy_(torch.randn(tokens, width, device="cuda"))
    h = torch.ops.hf_twell.activation(*halves, None, None, None)
    assert torch.equal(h, torch.ops.hf_twell.activation(*(half.contiguous() for half in halves), None, None, None))
    assert torch.equal(h, torch.relu(halves[0]) * halves[1])
    merged = torch.randn(tokens, 2 * width, device="cuda").to(dtype)
    gate, up = merged.chunk(2, -1)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    h = torch.ops.hf_twell.activation(gate, up, None, None, None)
    if width % 8 == 0:
        assert torch.cuda.max_memory_allocated() - held < 2 * h.nbytes + 4096, "no copies"
    assert torch.equal(h, torch.relu(gate) * up)


def test_a_padded_token_may_hold_nan():
    gate = torch.randn(4, 16, device="cuda", dtype=torch.bfloat16)
    gate[2] = torch.nan
    gate.requires_grad_()
    tally = torch.zeros(17, device="cuda", requires_grad=True)
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0], device="cuda")
    h = torch.ops.hf_twell.activation(gate, None, torch.tensor(1.0, device="cuda"), weight, tally)
    assert h[2].isnan().all()
    h.backward(torch.ones_like(h))
    assert tally.grad.isfinite().all()
    kept = torch.relu(gate[weight > 0].detach())
    assert torch.equal(tally.grad[1:], (kept != 0).sum(0).float())


def test_opcheck():
    gate, up = (torch.randn(9, 24, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    tally = torch.zeros(25, device="cuda", requires_grad=True)
    weight, scale = torch.ones(9, device="cuda"), torch.tensor(0.5, device="cuda")
    library.opcheck(torch.ops.hf_twell.activation.default, (gate, up, scale, weight, tally))
    library.opcheck(torch.ops.hf_twell.activation.default, (gate, None, None, None, None))
    library.opcheck(torch.ops.hf_twell.activation.default, (gate, up, None, weight, tally, scale))


def test_a_dense_block_trains_as_the_reference_does():
    x, w_gate, w_up, w_down = make_ffn(2048, 256, 1024, l0=500, device="cuda")
    outputs = []
    for dense in (True, False):
        block = patched_block(w_gate.clone(), w_up.clone(), w_down.clone()).train().requires_grad_()
        tally = torch.zeros(1025, device="cuda", requires_grad=True)
        scale = torch.tensor(1e-3, device="cuda")
        if dense:
            block.twell_state.l1 = L1Inputs(scale, None, tally)
            y = block(x)
            trains = device_class("cuda", 0)[1] == HOPPER
            assert block.twell_state.on_kernels is (False if trains else None)
        else:
            weights = [block.up_proj.weight, block.down_proj.weight, block.gate_proj.weight]
            y = reference.ffn(x, *weights, l1_scale=scale, tally=tally)
        y.backward(torch.ones_like(y))
        outputs.append([y, *(p.grad for p in block.parameters()), tally.grad])
    for ours, theirs in zip(*outputs, strict=True):
        assert (ours.float() - theirs.float()).norm() <= 2**-7 * theirs.float().norm()
    assert x.dtype in dense_dtypes("cuda")
