"""The CPU kernels on int8 weights: every instruction set, dtype, size and density against fp64 on dequantized ones."""

import itertools

import pytest
import torch
from torch import library

from hf_twell.ops import api, build, reference
from tests.ffn_cases import cpu_ffn
from tests.quantized_cases import (
    assert_as_good_as_eager,
    assert_scales_reach_their_own_sums,
    dense_in,
    quantize,
    strided,
)
from tests.quantized_cases import quantized_case as int8_case

pytestmark = [
    pytest.mark.usefixtures("poisoned_buffers"),
    pytest.mark.skipif(not build.status("cpu", build=True).available, reason=build.status("cpu", build=True).reason),
]
ORDER = ("x", "w_up", "w_down", "w_gate", "b_up", "b_down", "b_gate", "s_up", "s_down", "s_gate")


@pytest.mark.parametrize("density", [0.0, "one", 0.01, 0.5, 1.0])
def test_every_path_is_as_good_as_eager(isa, dtype, density):
    for tokens, by_column in itertools.product((0, 1, 2, 3, 5, 63, 199), (True, False)):
        assert_as_good_as_eager(cpu_ffn, int8_case(tokens, 40, 172, density, dtype, by_column=by_column))


@pytest.mark.parametrize("gated", [True, False])
def test_odd_sizes_biases_and_no_gate(isa, dtype, gated):
    # 37 and 133 are multiples of no vector, tile, panel or cache line.
    cases = itertools.product((1, 3, 70), (0.05, 1.0), (True, False), (True, False))
    for tokens, density, biases, by_column in cases:
        case = int8_case(tokens, 37, 133, density, dtype, gated=gated, biases=biases, by_column=by_column)
        assert_as_good_as_eager(cpu_ffn, case)


@pytest.mark.parametrize("by_column", [True, False])
def test_rows_longer_than_a_slice_in_threads(isa, by_column):
    """2,085 columns are several of every slice that kernels cut rows into, with something left over."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for tokens in (1, 4, 70):
            case = int8_case(tokens, 2085, 172, 0.06, torch.bfloat16, biases=True, by_column=by_column)
            assert_as_good_as_eager(cpu_ffn, case)
    finally:
        torch.set_num_threads(threads)


def test_wide_blocks_and_many_tokens():
    assert_as_good_as_eager(cpu_ffn, int8_case(63, 48, 18944, 0.01, torch.bfloat16, by_column=True))
    for by_column in (True, False):
        assert_as_good_as_eager(cpu_ffn, int8_case(2304, 40, 172, 0.02, torch.bfloat16, by_column=by_column))
        case = int8_case(2304, 40, 172, 0.01, torch.bfloat16, biases=True, by_column=by_column)
        case["x"][256:512, :8] *= -1  # one block of tokens takes the dense path, its neighbours the sparse one
        assert_as_good_as_eager(cpu_ffn, case)


@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_every_int8_value_is_itself(isa, tokens):
    """Also -128, which has no positive counterpart."""
    q = torch.arange(-128, 128, dtype=torch.int8)
    w_up = q.repeat(3, 1)
    x = torch.zeros(tokens, 256, dtype=torch.bfloat16)
    x[torch.arange(tokens), (torch.arange(tokens) * 7) % 256] = 1.0
    one = torch.ones(3)
    identity = torch.eye(256, 3).to(torch.int8)
    y = cpu_ffn(x, w_up, identity, s_up=one, s_down=torch.ones(256))
    expected = torch.relu(x.float() @ q.float())
    assert torch.equal(y[:, :3].float(), expected[:, None].expand(-1, 3))
    assert torch.equal(
        cpu_ffn(x, -w_up.clamp_min(-127), identity, s_up=one, s_down=torch.ones(256))[:, 0].float(),
        torch.relu(-(x.float() @ q.clamp_min(-127).float())),
    )


@pytest.mark.parametrize("tokens", [1, 4, 70])
@pytest.mark.parametrize("by_column", [True, False])
def test_scales_of_zero_nan_and_infinity(isa, tokens, by_column):
    case = int8_case(tokens, 40, 172, 0.06, torch.bfloat16, by_column=by_column)
    assert_scales_reach_their_own_sums(cpu_ffn, case, lambda case: assert_as_good_as_eager(cpu_ffn, case))


def plain_case(tokens, hidden, intermediate, dtype, *, x=None, bias=-1.0, seed=3):
    """Normal x and weights; `bias` of the gate says how many neurons are active."""
    g = torch.Generator().manual_seed(seed)

    def weight(rows, columns):
        return quantize(torch.randn(rows, columns, generator=g) / columns**0.5)

    x = torch.randn(tokens, hidden, generator=g) if x is None else x
    case = {"x": x.to(dtype), "b_up": None, "b_down": None, "b_gate": torch.full((intermediate,), bias, dtype=dtype)}
    for name, shape in (
        ("up", (intermediate, hidden)),
        ("gate", (intermediate, hidden)),
        ("down", (hidden, intermediate)),
    ):
        case[f"w_{name}"], case[f"s_{name}"] = weight(*shape)
    return case


@pytest.mark.parametrize("hidden", [1, 17, 63, 65, 130])
def test_every_number_of_few_tokens(isa, dtype, hidden):
    # 101 neurons are no multiple of a register tile.
    for tokens in (*range(1, 18), 33, 47):
        assert_as_good_as_eager(cpu_ffn, plain_case(tokens, hidden, 101, dtype))


@pytest.mark.parametrize("seen", [True, False])
def test_outliers_leave_the_other_elements_their_precision(isa, dtype, seen):
    """Also where the weights see only the others."""
    for tokens, hidden, times in itertools.product((1, 3, 20), (65, 512), (16, 40, 100, 200, 300, 1000, 30000)):
        case = plain_case(tokens, hidden, 101, dtype)
        case["x"][0, 5] = times if dtype != torch.float16 or not seen else min(times, 300)  # y is finite
        if not seen:
            case["w_gate"][:, 5] = case["w_up"][:, 5] = 0
        assert_as_good_as_eager(cpu_ffn, case)
        one = {name: t[:1] if name == "x" else t for name, t in case.items()}
        assert_as_good_as_eager(cpu_ffn, one)


@pytest.mark.parametrize("size", [2.0**-24, 2.0**-14, 1.0, 2.0**6])
def test_tokens_of_every_size(isa, dtype, size):
    """Down to the smallest numbers of float16, and to bfloat16's that no power of two of float32 makes large."""
    case = plain_case(5, 130, 101, dtype, bias=0.0)
    case["x"] = case["x"].sign() * size
    assert_as_good_as_eager(cpu_ffn, case)
    if dtype != torch.float16 and size < 1:
        case["x"] = (case["x"].float() * 2.0**-106).to(dtype)  # y is below float32's numbers
        assert cpu_ffn(**case).isfinite().all()


@pytest.mark.parametrize("tokens", [1, 2, 6, 20])
def test_zero_tokens_and_inactive_ones_are_zero(isa, dtype, tokens):
    case = plain_case(tokens, 65, 101, dtype, bias=0.0)
    case["x"][tokens // 2] = 0
    y = cpu_ffn(**case)
    assert not y[tokens // 2].any()
    assert y.any() == (tokens > 1)
    assert not cpu_ffn(**plain_case(tokens, 65, 101, dtype, bias=-100.0)).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_nonfinite_elements_give_what_a_dense_block_gives(isa, dtype, value):
    # Twenty tokens are PyTorch's matmuls. On a matrix unit these read on into the next row, and multiply it by zeros,
    # where a row is no whole number of 32 elements.
    for tokens, hidden, neurons in ((1, 65, 101), (2, 65, 101), (7, 65, 101), (20, 64, 96)):
        case = plain_case(tokens, hidden, neurons, dtype)
        others = torch.arange(tokens) != tokens // 2
        expected = cpu_ffn(**case)[others]
        case["x"][tokens // 2, 7] = value
        y, dense = cpu_ffn(**case), reference.ffn(**dense_in(case, torch.float32) | {"x": case["x"].float()})
        assert torch.equal(y.isnan(), dense.isnan())
        assert torch.allclose(y[others].float(), expected.float(), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("hidden", [16384, 65536, 65600])
def test_sums_as_large_as_they_get(isa, hidden):
    """65,536 products of 255 by -128 are what 32 bits hold."""
    for value, weight in itertools.product((255.0, -256.0), (-128, 127)):
        x = torch.full((2, hidden), value, dtype=torch.bfloat16)
        w_up = torch.full((5, hidden), weight, dtype=torch.int8)
        w_down = torch.zeros(hidden, 5, dtype=torch.int8)
        w_down[0, 0] = 1
        one = torch.ones(5)
        y = torch.ops.hf_twell.infer(x, w_up, w_down, None, None, None, None, one, torch.ones(hidden), None)
        assert y[0, 0].item() == torch.tensor(max(value * weight * hidden, 0.0)).bfloat16().item()


@pytest.mark.parametrize("tokens", [8, 21, 70])
def test_no_gate_near_zero_gets_the_wrong_sign(isa, dtype, tokens):
    """Sums of whole numbers, as exact as kernels must be: -1, 0 or 1 for one token of each neuron, else far below."""
    hidden, neurons, own = 300, 150, torch.arange(150) % tokens
    g = torch.Generator().manual_seed(5)
    x = torch.randint(-100, 101, (tokens, hidden), generator=g).float()
    x[:, :4] = torch.tensor([4096.0, 1, 64, 4096])
    x[:, 4:74] = 0
    x[torch.arange(tokens), 4 + torch.arange(tokens)] = 4096
    w = torch.randint(-128, 128, (neurons, hidden), generator=g).float()
    w[:, :74] = 0
    w[:, 0] = -100
    w[torch.arange(neurons), 4 + own] = 100
    wanted = torch.randint(-1, 2, (neurons,), generator=g).float()
    rest = wanted - (w @ x.T)[torch.arange(neurons), own]
    for column, size in ((3, 4096), (2, 64), (1, 1)):
        w[:, column] = (rest / size).round()
        rest -= w[:, column] * size
    assert w.abs().max() <= 128
    gate = w @ x.T
    assert torch.equal(gate[torch.arange(neurons), own], wanted)
    ones = {"s_up": torch.ones(neurons), "s_down": torch.ones(hidden)}
    y = cpu_ffn(x.to(dtype), w.to(torch.int8), torch.eye(hidden, neurons).to(torch.int8), **ones)
    assert torch.equal(y[:, :neurons].float(), torch.relu(gate).T)


@pytest.mark.parametrize("tokens", [8, 70])
def test_scales_of_either_sign_and_biases_may_turn_a_gate(isa, tokens):
    case = int8_case(tokens, 65, 101, 0.05, torch.bfloat16)
    turned = case | {"w_gate": -case["w_gate"].clamp_min(-127), "s_gate": -case["s_gate"]}
    assert torch.equal(cpu_ffn(**turned), cpu_ffn(**case | {"w_gate": case["w_gate"].clamp_min(-127)}))
    some = case | {"s_gate": case["s_gate"].clone(), "w_gate": case["w_gate"].clone()}
    some["s_gate"][7] *= -1
    some["w_gate"][7] = -some["w_gate"][7].clamp_min(-127)
    assert_as_good_as_eager(cpu_ffn, some)
    assert_as_good_as_eager(cpu_ffn, case | {"b_gate": torch.full((101,), 0.5, dtype=torch.bfloat16)})


def test_nan_inputs_stay_with_their_token(isa, dtype):
    case = int8_case(70, 40, 172, 0.01, dtype)
    case["x"][5] = float("nan")
    y = cpu_ffn(**case)
    assert y[5].isnan().all()
    assert not torch.cat([y[:5], y[6:]]).isnan().any()


def test_noncontiguous_x_scales_and_weights():
    case = int8_case(60, 40, 172, 0.05, torch.bfloat16, biases=True)
    assert torch.equal(cpu_ffn(**strided(case)).flatten(0, 2), cpu_ffn(**case))


def test_autocast_leaves_weights_and_scales_alone():
    case = int8_case(20, 40, 172, 0.05, torch.float32, biases=True)
    expected = cpu_ffn(**{name: t.bfloat16() if name[:2] in ("x", "b_") else t for name, t in case.items()})
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cpu_ffn(**case), expected)


def test_opcheck_and_compilation():
    case = int8_case(10, 40, 172, 0.05, torch.float32, biases=True)
    library.opcheck(torch.ops.hf_twell.infer.default, [case[name] for name in ORDER])
    compiled = torch.compile(lambda **inputs: cpu_ffn(**inputs), fullgraph=True)
    assert torch.equal(compiled(**case), cpu_ffn(**case))


def test_what_is_refused():
    case = int8_case(4, 40, 172, 0.05, torch.bfloat16)

    def refused(message, **changes):
        with pytest.raises(ValueError, match=message):
            api.ffn(**(case | changes))

    refused("w_up is torch.int8 and s_up is None; give int8 for all weights, with scales", s_up=None)
    refused("s_gate was given, and w_gate is torch.bfloat16", w_gate=case["w_gate"].bfloat16())
    refused("w_gate is torch.bfloat16 and s_gate is None", w_gate=case["w_gate"].bfloat16(), s_gate=None)
    refused("s_gate was given, and w_gate is None", w_gate=None)
    refused(
        r"s_down is torch.float32 of shape \(20, 2\); give float32, one for each of w_down's 40 rows",
        s_down=case["s_down"].view(20, 2),
    )
    refused("s_down is torch.bfloat16", s_down=case["s_down"].bfloat16())
    with pytest.raises(ValueError, match="'cpu' cannot compute this: gradients are wanted through int8 weights"):
        cpu_ffn(**(case | {"x": case["x"].requires_grad_()}))


def test_fp8_is_left_to_plain_pytorch():
    """It means the block of the dequantized weights there, too."""
    case = int8_case(4, 40, 172, 0.05, torch.bfloat16, kind="fp8")
    with pytest.raises(ValueError, match="'cpu' cannot compute this: float8_e4m3fn weights on a CPU"):
        cpu_ffn(**case)
    api._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="plain PyTorch: float8_e4m3fn weights on a CPU; the kernels there take int8"):
        y = api.ffn(**case)
    assert torch.equal(y, reference.ffn(**dense_in(case, torch.bfloat16)))
    mixed = case | {"w_gate": case["w_gate"].view(torch.int8)}
    with pytest.raises(ValueError, match=r"w_gate is torch.int8; scales go with float8_e4m3fn, for all weights"):
        api.ffn(**mixed)
    with pytest.raises(RuntimeError):
        torch.ops.hf_twell.infer(*(case[name] for name in ORDER))


def test_gradients_go_through_plain_pytorch():
    case = int8_case(4, 40, 172, 0.05, torch.float32)
    x = case["x"].requires_grad_()
    with pytest.warns(UserWarning, match="plain PyTorch: gradients are wanted through int8 weights"):
        api.ffn(**case).sum().backward()
    found, x.grad = x.grad, None
    reference.ffn(**case).sum().backward()
    assert torch.equal(found, x.grad)


def test_operators_refuse_what_python_would():
    case = int8_case(4, 40, 172, 0.05, torch.bfloat16)
    x, w_up, w_down, w_gate = (case[name] for name in ("x", "w_up", "w_down", "w_gate"))
    nothing = (None, None, None)
    with pytest.raises(RuntimeError, match=r"int8 weights with one float32 scale for each row.*look at w_up and s_up"):
        torch.ops.hf_twell.infer(x, w_up, w_down, w_gate, *nothing)
    with pytest.raises(RuntimeError, match="look at w_down and s_down"):
        torch.ops.hf_twell.infer(x, w_up, w_down, w_gate, *nothing, case["s_up"], case["s_up"], case["s_gate"])
    with pytest.raises(RuntimeError, match="look at w_up"):
        torch.ops.hf_twell.ffn(x, w_up, w_down, w_gate, *nothing, *nothing, 0)
