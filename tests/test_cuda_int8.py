"""The CUDA kernels on int8 weights, on a GPU: against fp64 on dequantized ones, as the CPU's are tested.

They are called as they are: `hf_twell.ops.ffn` and patched blocks pass over them until they have been measured.
"""

import pytest
import torch
from torch import library

from hf_twell.ops import build
from tests import test_cuda_kernels
from tests.int8_cases import assert_as_good_as_eager, int8_case
from tests.test_cuda_kernels import DTYPES, on_gpu, path, poison, sizes  # noqa: F401

pytestmark = test_cuda_kernels.pytestmark


@pytest.fixture(autouse=True, scope="module")
def library_of_kernels():
    assert build.status("cuda", build=True).available


ORDER = ("x", "w_up", "w_down", "w_gate", "b_up", "b_down", "b_gate", "s_up", "s_down", "s_gate")


@torch.no_grad()
def cuda_ffn(*args, **case):
    case |= dict(zip(ORDER, args, strict=False))
    return torch.ops.hf_twell.infer(*(case.get(name) for name in ORDER))


def case_of(*args, **options):
    return on_gpu(int8_case(*args, **options))


def assert_right(case):
    poison()
    assert_as_good_as_eager(cuda_ffn, case)
    torch.testing.assert_close(cuda_ffn(**case), cuda_ffn(**case), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.0, "one", 0.02, 0.5, 1.0])
def test_every_path_is_as_good_as_eager(path, dtype, density):  # noqa: F811
    for tokens in sizes(path, 0, 1, 2, 7, 8, 9, 17, 33, 64, 65, 257):
        for by_column in (True, False):
            assert_right(case_of(tokens, 80, 344, density, dtype, by_column=by_column))


# The kernels read rows of a multiple of 16 columns themselves; others are dequantized at any number of tokens.
@pytest.mark.parametrize(("hidden", "width"), [(16, 1), (16, 70), (33, 70), (72, 129), (576, 1536), (1008, 999)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_sizes_biases_no_gate_and_both_orders_of_down(dtype, hidden, width):
    for gated, biases, by_column in ((True, True, False), (True, False, True), (False, True, True)):
        for tokens in (1, 15, 64, 65):
            options = {"gated": gated, "biases": biases, "by_column": by_column}
            assert_right(case_of(tokens, hidden, width, 0.05, dtype, **options))


@pytest.mark.parametrize(("hidden", "width"), [(2048, 5632), (112, 65536), (16384, 520), (4096, 14336)])
def test_wide_blocks(hidden, width):
    case = case_of(300, hidden, width, 0.01, torch.bfloat16, by_column=True)
    for tokens in (1, 2, 16, 40, 64, 300):
        assert_right(case | {"x": case["x"][:tokens]})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 20, 64, 70])
def test_every_int8_value_is_itself(dtype, tokens):
    """Also -128, which has no positive counterpart: as gate, as up and as down."""
    q = torch.arange(-128, 128, dtype=torch.int8, device="cuda")
    x = torch.zeros(tokens, 256, dtype=dtype, device="cuda")
    rows = torch.arange(tokens, device="cuda")
    x[rows, rows * 37 % 256] = 1.0
    value = q[rows * 37 % 256].float()
    one = torch.ones(16, device="cuda")
    spread = torch.eye(256, 16, device="cuda").to(torch.int8)
    ones = torch.ones(256, device="cuda")
    y = cuda_ffn(x, q.repeat(16, 1), spread, s_up=one, s_down=ones)
    assert torch.equal(y[:, :16].float(), value.relu()[:, None].expand(-1, 16)), "as up"
    gate = torch.ones(16, 256, dtype=torch.int8, device="cuda")
    y = cuda_ffn(x, q.repeat(16, 1), spread, gate, s_up=one, s_down=ones, s_gate=one)
    assert torch.equal(y[:, :16].float(), value[:, None].expand(-1, 16)), "as up behind a gate"
    lone = torch.zeros(256, 16, dtype=torch.int8, device="cuda")
    lone[:, 3] = q
    y = cuda_ffn(x, gate, lone, s_up=one, s_down=ones)
    assert torch.equal(y.float(), q.float().expand(tokens, -1)), "as down"


@pytest.mark.parametrize("tokens", [1, 20, 70])
@pytest.mark.parametrize("by_column", [True, False])
def test_scales_of_zero_nan_and_infinity(tokens, by_column):
    case = case_of(tokens, 48, 172, 0.06, torch.bfloat16, by_column=by_column)
    for name in ("up", "gate"):
        case[f"s_{name}"][::3] = 0
        case[f"w_{name}"][::3] = 0
    case["s_down"][::5] = 0
    assert_right(case)
    plain = cuda_ffn(**case)
    for value in (float("nan"), float("inf")):
        broken = case | {"s_down": case["s_down"].clone()}
        broken["s_down"][7] = value
        y = cuda_ffn(**broken)
        assert not y[:, 7].isfinite().any()
        kept = torch.arange(48) != 7
        assert torch.equal(y[:, kept], plain[:, kept])
    broken = case | {"s_gate": case["s_gate"].clone()}
    broken["s_gate"][5] = float("nan")
    assert cuda_ffn(**broken).isnan().any(1).all(), "a NaN gate counts as active"


@pytest.mark.parametrize("tokens", [20, 70])
def test_nan_inputs_stay_with_their_token(tokens):
    case = case_of(tokens, 48, 172, 0.01, torch.bfloat16)
    case["x"][5] = float("nan")
    y = cuda_ffn(**case)
    assert y[5].isnan().all()
    assert not torch.cat([y[:5], y[6:]]).isnan().any()


def test_noncontiguous_x_scales_and_weights():
    case = case_of(60, 48, 172, 0.05, torch.bfloat16, biases=True)
    flat = cuda_ffn(**case)
    x = case["x"].view(3, 4, 5, 48)
    case["x"] = x.transpose(0, 2).contiguous().transpose(0, 2)
    case["w_up"] = torch.stack([case["w_up"]] * 2, 1)[:, 0]
    case["w_down"] = torch.cat([case["w_down"]] * 2, 1)[:, :172]
    case["s_down"] = torch.stack([case["s_down"].flatten()] * 2, 1)[:, 0]
    case["s_up"] = case["s_up"].flatten()
    assert torch.equal(cuda_ffn(**case), flat.view(3, 4, 5, 48))


def test_float32():
    assert_right(case_of(20, 48, 172, 0.05, torch.float32, biases=True))


@pytest.mark.parametrize("tokens", [1, 33, 130])
def test_opcheck_compilation_and_graphs(tokens):
    case = case_of(tokens, 48, 172, 0.05, torch.bfloat16, biases=True, by_column=True)
    library.opcheck(torch.ops.hf_twell.infer.default, [case[name] for name in ORDER])
    expected = cuda_ffn(**case)
    assert torch.equal(torch.compile(lambda **inputs: cuda_ffn(**inputs), fullgraph=True)(**case), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cuda_ffn(**case)
    for factor in (1.0, -1.0):
        case["x"] *= factor
        graph.replay()
        assert torch.equal(y, cuda_ffn(**case))
