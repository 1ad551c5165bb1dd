"""The elementwise middle of a dense block on a CPU, against the reference's, and the blocks that train by it."""

import itertools

import pytest
import torch
from torch import library

import hf_twell
from hf_twell.blocks.modeling import L1Inputs
from hf_twell.ops import api, build, reference
from tests.conftest import tiny_llama
from tests.ffn_cases import DTYPES, assert_as_good_as_eager, make_case, relative_rms, run

pytestmark = pytest.mark.skipif(
    not build.status("cpu", build=True).available, reason=build.status("cpu", build=True).reason
)
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def _values(shape, dtype, seed=0):
    """Gate, up and gradient away from zero: h that underflows in float16 has no sign."""
    g = torch.Generator().manual_seed(seed)
    values = (torch.randn(shape, generator=g) for _ in range(3))
    return [(v.abs() + 2**-6).copysign(v).to(dtype) for v in values]


def _through_reference(gate, up, l1_scale, token_weight, tally, count_scale=None):
    active = torch.relu(gate)
    if count_scale is not None:
        active = reference.inject_count(active, count_scale, token_weight)
    return reference.inject_l1(active if up is None else active * up, l1_scale, token_weight, tally)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (63, 172), (2, 50, 4864), (4097, 37), (0, 64), (5,)])
@pytest.mark.parametrize("count", [None, 0.25])
def test_one_pass_gives_what_the_reference_gives(isa, shape, gated, dtype, count):
    gate, up, grad = _values(shape, dtype)
    weight = (torch.rand(shape[:-1], generator=torch.Generator().manual_seed(1)) > 0.2).float()
    scale, count_scale = torch.tensor(0.125), None if count is None else torch.tensor(count)
    results = []
    for function, kind in ((torch.ops.hf_twell.activation, dtype), (_through_reference, torch.float64)):
        inputs = [t.to(kind, copy=True).requires_grad_() for t in ((gate, up) if gated else (gate,))]
        tally = torch.zeros(1 + shape[-1], requires_grad=True)
        h = function(inputs[0], inputs[1] if gated else None, scale, weight, tally, count_scale)
        h.backward(grad.to(kind))
        results.append([h, *(t.grad for t in inputs), tally.grad])
    for ours, truth in zip(results[0][:-1], results[1][:-1], strict=True):
        assert (ours.dtype, ours.shape) == (dtype, truth.shape)
        # The count's derivative is within 4e-7 of itself, and what it is added to may be as large.
        atol = 1e-7 if count is None else 2e-6
        torch.testing.assert_close(ours.double(), truth.double(), rtol=2.01 * ROUNDING[dtype], atol=atol)
    torch.testing.assert_close(results[0][-1][:1], results[1][-1][:1], rtol=2**-18 + ROUNDING[dtype], atol=1e-4)
    assert torch.equal(results[0][-1][1:], results[1][-1][1:]), "counts are whole numbers here, and exact"


@pytest.mark.parametrize("gated", [True, False])
def test_gradients_without_the_l1_term_are_torchs_own(isa, gated):
    """Bit for bit in float32: each element is one product or two, rounded alike."""
    gate, up, grad = _values((70, 133), torch.float32)
    gate[3:5] = 0.0
    results = []
    for ours in (True, False):
        inputs = [t.clone().requires_grad_() for t in ((gate, up) if gated else (gate,))]
        if ours:
            h = torch.ops.hf_twell.activation(*inputs, *[None] * (5 - len(inputs)))
        else:
            h = torch.relu(inputs[0]) * inputs[1] if gated else torch.relu(inputs[0])
        h.backward(grad)
        results.append([h.detach(), *(t.grad for t in inputs)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_h_is_rounded_as_torch_rounds_it(isa, dtype):
    """Bit for bit: halfway cases to even, subnormals, infinities and what overflows to them."""
    numbers = [1.0, 1.5, 1 + 2**-7, 1 + 3 * 2**-7, 1 + 2**-10, 1 + 3 * 2**-10, 2**-14, 3 * 2**-24, 65504.0]
    numbers = torch.tensor(numbers)
    numbers = torch.cat([numbers, torch.tensor([0.0, torch.inf]), _values((40,), torch.float32)[0].abs()]).to(dtype)
    gate, up = (t.reshape(-1) for t in torch.meshgrid(numbers, torch.cat([numbers, -numbers]), indexing="ij"))
    h = torch.ops.hf_twell.activation(gate, up, None, None, None)
    torch.testing.assert_close(h, gate * up, rtol=0, atol=0, equal_nan=True)


def test_what_rounds_to_zero_is_inactive_and_nan_is_active(isa, dtype):
    """As the reference has it: h is what is stored, so an underflowed one has no sign; a NaN has none either."""
    tiny = torch.finfo(dtype).tiny
    gate = torch.tensor([[1.0, tiny, torch.nan, -1.0, -0.0, torch.inf, 2.0, 3.0]] * 3).to(dtype)
    up = torch.tensor([[-1.0, -tiny, 1.0, torch.nan, 1.0, -1.0, torch.nan, 0.0]] * 3).to(dtype)
    weight, scale, results = torch.tensor([1.0, 0.5, 0.0]), torch.tensor(0.25), []
    for function in (torch.ops.hf_twell.activation, _through_reference):
        inputs, tally = [t.clone().requires_grad_() for t in (gate, up)], torch.zeros(9, requires_grad=True)
        function(*inputs, scale, weight, tally).backward(torch.ones_like(gate))
        results.append([*(t.grad for t in inputs), tally.grad])
    (grad_gate, grad_up, tally), (wanted_gate, wanted_up, wanted_tally) = results
    # Through relu, PyTorch's gradient at a NaN and beside an inactive NaN may be either; ours is that of the formula.
    for ours, truth in ((grad_gate, wanted_gate), (grad_up, wanted_up)):
        known = ~(ours.isnan() | truth.isnan())
        assert torch.equal(ours[known], truth[known])
    assert not grad_gate[:, 3:5].any(), "inactive, whatever lies beside it"
    assert torch.equal(tally[1:], wanted_tally[1:])
    assert tally[0].isnan()


@pytest.mark.parametrize("gated", [True, False])
def test_a_padded_token_may_hold_nan(gated):
    gate, up, _ = _values((40, 16), torch.bfloat16)
    gate[2] = torch.nan
    gate.requires_grad_()
    tally, weight = torch.zeros(17, requires_grad=True), torch.ones(40)
    weight[2] = 0
    h = torch.ops.hf_twell.activation(gate, up if gated else None, torch.tensor(1.0), weight, tally)
    assert h[2].isnan().all()
    h.backward(torch.ones_like(h))
    assert torch.equal(tally.grad[1:], (h[weight > 0] != 0).sum(0).float())
    assert tally.grad.isfinite().all()


@pytest.mark.parametrize("density", [0.02, 1.0])
def test_the_sparse_operator_leaves_padding_out_of_its_report_too(density):
    case = make_case(40, 40, 172, density, torch.float32)
    case["x"][2] = torch.nan
    tally, weight = torch.zeros(173, requires_grad=True), torch.ones(40)
    weight[2] = 0
    weights = case["w_up"], case["w_down"], case["w_gate"]
    options = {"l1_scale": torch.tensor(0.1), "token_weight": weight, "tally": tally}
    y = api.ffn(case["x"], *weights, **options, capacity=172, backend="cpu")
    y[weight > 0].sum().backward()
    assert tally.grad.isfinite().all()


def test_strided_inputs_and_repeats():
    gate, up, grad = (t.t() for t in _values((172, 130), torch.bfloat16))
    weight, scale = torch.rand(130, generator=torch.Generator().manual_seed(2)), torch.tensor(0.1)
    threads, results = torch.get_num_threads(), []
    try:
        for order, count in itertools.product((torch.preserve_format, torch.contiguous_format), (1, 3)):
            torch.set_num_threads(count)
            inputs = [t.clone(memory_format=order) for t in (grad, gate, up)]
            results.append(torch.ops.hf_twell.activation_backward(*inputs, scale, weight, True))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for first, value in zip(results[0], other, strict=True):
            assert torch.equal(first, value), "threads and memory order change nothing"


def test_opcheck():
    gate, up, _ = (t.requires_grad_() for t in _values((9, 24), torch.float32))
    tally = torch.zeros(25, requires_grad=True)
    library.opcheck(torch.ops.hf_twell.activation.default, (gate, up, torch.tensor(0.5), torch.ones(9), tally))
    library.opcheck(torch.ops.hf_twell.activation.default, (gate, None, None, None, None))
    library.opcheck(torch.ops.hf_twell.activation.default, (gate, up, None, torch.ones(9), tally, torch.tensor(0.5)))


def test_tensors_that_do_not_fit_together_are_refused():
    with pytest.raises(RuntimeError, match="tensors of one shape and dtype"):
        torch.ops.hf_twell.activation(torch.zeros(2, 8), torch.zeros(2, 4), None, None, None)
    with pytest.raises(RuntimeError, match="tensors of one shape and dtype"):
        torch.ops.hf_twell.activation(torch.zeros(2, 8), torch.zeros(2, 8).half(), None, None, None)


@pytest.mark.parametrize(("gated", "biases"), list(itertools.product([True, False], [True, False])))
@pytest.mark.parametrize("tokens", [0, 3, 199])
def test_a_dense_block_is_as_good_as_eager(dtype, gated, biases, tokens):
    case = make_case(tokens, 40, 172, 0.9, dtype, gated=gated, biases=biases)
    assert_as_good_as_eager(api.dense_ffn, case)
    mine, eager = (run(function, case, dtype, l1=False) for function in (api.dense_ffn, reference.ffn))
    for name, value in mine.items():
        assert relative_rms(value, eager[name]) <= 4 * ROUNDING[dtype] or tokens == 0, name


def _dense_block(dtype=torch.float32):
    """A patched Llama block of which nine in ten gates are positive, and an input for it."""
    case = make_case(40, 48, 688, 0.9, dtype)
    model = tiny_llama(hidden_size=48, intermediate_size=688, num_hidden_layers=1)
    block = hf_twell.sparsify(model.to(dtype)).model.layers[0].mlp
    for name in ("up", "down", "gate"):
        getattr(block, f"{name}_proj").weight.data = case[f"w_{name}"].clone()
    return block, case["x"].view(2, 20, 48).clone()


@pytest.fixture
def activations(monkeypatch):
    """One entry for each call of a dense block."""
    calls = []
    monkeypatch.setattr(api, "dense_ffn", lambda *a, _f=api.dense_ffn, **k: calls.append(1) or _f(*a, **k))
    return calls


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("counts", [True, False])
def test_a_dense_block_trains_as_the_reference_does(counts, autocast, activations):
    block, x = _dense_block()
    block.gate_proj.weight.data /= 16  # near zero, where the count presses
    results = []
    for backend in ("auto", "reference"):
        block.twell.backend = backend
        block.zero_grad()
        tally = torch.zeros(689, requires_grad=True)
        block.twell_state.l1 = L1Inputs(torch.tensor(1e-3), None, tally, counts=counts)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = block(x)
            y.float().square().sum().backward()
        results.append([y.detach(), *(p.grad.clone() for p in block.parameters()), tally.grad])
    assert len(activations) == 1
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        assert relative_rms(ours, theirs) < (2**-6 if autocast else 1e-6)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_a_dense_block_evaluates_in_one_pass(dtype, activations):
    block, x = _dense_block(dtype)
    block.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float64):
        y = [block(x) for _ in range(2)][1]
        truth = reference.ffn(x, block.up_proj.weight, block.down_proj.weight, block.gate_proj.weight)
    assert len(activations) == (0 if dtype == torch.float64 else 2), "autocast leaves float64 alone, and so do kernels"
    assert relative_rms(y, truth) <= 4 * ROUNDING.get(dtype, 2**-53)
