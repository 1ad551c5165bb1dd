"""The count term of runs of neighbouring tokens, by the compiled CPU kernels, against an exact result."""

import pytest
import torch
from torch import library

from hf_twell.ops import api, build, reference
from hf_twell.ops.runs import Runs
from tests.ffn_cases import (
    PADDING,
    Operators,
    assert_as_good_as_eager,
    assert_gradients_are_not_copied,
    cpu_ffn,
    exact_gates,
    make_case,
    make_runs,
    near_zero,
    relative_rms,
    run,
)

pytestmark = [
    pytest.mark.usefixtures("poisoned_buffers"),
    pytest.mark.skipif(not build.status("cpu", build=True).available, reason=build.status("cpu", build=True).reason),
]
COUNT = 0.02
LENGTHS = {1: (1, 7), 3: (5, 41), 16: (3, 67), 64: (2, 150), 128: (1, 301), 301: (2, 301)}


@pytest.mark.parametrize("share", LENGTHS)
@pytest.mark.parametrize("padding", PADDING)
def test_every_length_and_padding_and_what_is_computed_again(isa, dtype, share, padding):
    rows, length = LENGTHS[share]
    case = exact_gates(make_case(rows * length, 40, 172, 0.1, dtype))
    for capacity in (None, 1):
        runs = make_runs(rows, length, share, padding)
        assert_as_good_as_eager(cpu_ffn, case, count=COUNT, runs=runs, capacity=capacity)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("density", [0.0, "one", 0.05, 1.0])
def test_every_density_biases_and_no_gate(isa, dtype, gated, density):
    """Of a call as dense as that, too, no token's pairs are left to plain matmuls."""
    case = exact_gates(make_case(142, 37, 133, density, dtype, gated=gated, biases=True))
    assert_as_good_as_eager(cpu_ffn, case, count=COUNT, runs=make_runs(2, 71, 16, "right"))


def test_rows_that_neighbours_share(isa, dtype):
    """By a matrix unit where there is one."""
    case = exact_gates(make_case(300, 200, 172, 0.02, dtype))
    case["w_gate"][:40, :8] = case["w_gate"][:40, :8].abs()
    assert_as_good_as_eager(cpu_ffn, case, count=COUNT, runs=make_runs(4, 75, 64, "left"))


def test_dense_tokens_between_sparse_ones(dtype):
    case = exact_gates(make_case(2304, 40, 172, 0.01, dtype))
    case["x"][1000:1256, :8] *= -1
    assert_as_good_as_eager(cpu_ffn, case, count=COUNT, runs=make_runs(9, 256, 100, "holes"))


def test_gates_of_any_value(isa):
    case = near_zero(make_case(201, 40, 172, 0.1, torch.float32, biases=True))
    assert_as_good_as_eager(cpu_ffn, case, count=COUNT, runs=make_runs(3, 67, 16, "holes"))


def test_the_term_of_runs_is_a_part_of_the_gradient_that_shows_and_acts_on_the_gate_alone(isa, dtype):
    case, runs = exact_gates(make_case(201, 40, 172, 0.1, dtype)), make_runs(3, 67, 16)
    found = run(cpu_ffn, case, dtype, l1=False, count=1.0, runs=runs)
    truth, bare = (run(reference.ffn, case, torch.float64, l1=False, count=1.0, runs=each) for each in (runs, None))
    assert relative_rms(bare["w_gate"], truth["w_gate"]) > 0.1
    assert found["unions"].item() == truth["unions"].item() > 0
    for name in ("y", "w_up", "w_down", "w_gate"):
        assert name == "w_gate" or torch.equal(bare[name], truth[name])
        assert relative_rms(found[name], truth[name]) < {torch.float32: 1e-5}.get(dtype, 2**-6), name


def test_tokens_of_a_run_may_have_others_between_them(isa):
    tokens = torch.tensor([[0, 3, 6, 9], [1, 4, 7, -1], [2, 5, 8, -1], [-1, -1, -1, -1]])
    runs = Runs(tokens, torch.tensor([0, 1, 2] * 3 + [0, 3, 3]))
    case = exact_gates(make_case(12, 40, 172, 0.3, torch.float32))
    assert_as_good_as_eager(cpu_ffn, case, count=COUNT, runs=runs)


def test_equally_strong_tokens_take_equal_parts_and_padding_none(isa, dtype):
    """Four tokens with one neuron each, of gates 1/4, 1/4, 1/8 and, of padding, 1/2."""
    x = torch.tensor([[1.0], [1.0], [0.5], [2.0]]).to(dtype)
    weights = [torch.tensor([[value]]).to(dtype) for value in (1.0, 0.0, 0.25)]  # up, down and gate
    gate = weights[2].requires_grad_()
    runs, unions = Runs(torch.tensor([[0, 1, 2], [-1] * 3]), torch.tensor([0, 0, 0, 1])), reference.new_tally(1)
    scale, weight = torch.tensor(1.0), torch.zeros(4)
    y = cpu_ffn(x, *weights, count_scale=scale, token_weight=weight, runs=runs, unions=unions)
    y.backward(torch.ones_like(y))
    value = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)
    torch.tanh(value / 0.2).backward()
    # dL/da of the first two, half of 3 p'(1/4) each, times x.
    expected = 3 * value.grad.item()
    assert gate.grad.item() == pytest.approx(expected, rel={torch.float32: 1e-6}.get(dtype, 2**-7))
    assert unions.grad.item() == 3


def test_a_run_whose_strongest_is_nan_adds_nothing_and_is_counted(isa, dtype):
    case, runs = exact_gates(make_case(24, 40, 172, 0.3, dtype)), make_runs(1, 24, 8)
    for token in (3, 8):
        nan = {**case, "x": case["x"].clone()}
        nan["x"][token] = torch.nan
        ours = run(cpu_ffn, nan, dtype, count=COUNT, runs=runs)
        # Not in `dtype`: on a matrix unit PyTorch's products carry a NaN over into the neighbouring row.
        truth = run(reference.ffn, nan, torch.float64, count=COUNT, runs=runs)
        assert ours["unions"].item() == truth["unions"].item()
        whole = [t for t in range(24) if t != token]
        torch.testing.assert_close(ours["x"][whole].double(), truth["x"][whole], rtol=2**-6, atol=2**-6)


def test_active_gates_that_are_rounded_to_zero_are_equally_strong_and_counted_once(isa):
    """Of 2^-27 in float16, which is exact in float32: half of a run's eight tokens, and of three neurons in a row."""
    x, gates = torch.eye(16).half() / 8, torch.full((3, 16), -(2.0**-24)).half()
    gates[:, ::2] *= -1
    w_gate, unions = gates.clone().requires_grad_(), reference.new_tally(1)
    w_up, w_down = torch.zeros(3, 16).half(), torch.zeros(16, 3).half()
    y = cpu_ffn(x, w_up, w_down, w_gate, count_scale=torch.tensor(COUNT), runs=make_runs(1, 16, 8), unions=unions)
    y.backward(torch.zeros_like(y))
    assert unions.grad.item() == 3 * 16
    slope = COUNT * (1 + 8 / 4) * reference.count_slope(torch.zeros(())) / 8
    torch.testing.assert_close(w_gate.grad.float(), torch.where(gates > 0, slope, 0.0), rtol=2e-3, atol=0)


def test_gates_saved_and_computed_again_are_equally_strong():
    """Two tokens that are the same, of which one finds no room."""
    case = near_zero(make_case(16, 40, 172, 0.1, torch.bfloat16))
    case["x"][8:] = case["x"][:8]
    tokens = torch.stack([torch.arange(8), torch.arange(8, 16)], 1)
    runs = Runs(torch.cat([tokens, torch.full((1, 2), -1)]), torch.arange(16) % 8)
    room = 172 * 16
    few, all_of_them = (run(cpu_ffn, case, torch.bfloat16, count=1.0, runs=runs, capacity=c) for c in (5, room))
    for name, value in few.items():
        assert relative_rms(value, all_of_them[name]) < 2**-7, name


@pytest.mark.parametrize("ffn", [cpu_ffn, reference.ffn, api.ffn])
def test_no_tokens(ffn):
    case = make_case(0, 40, 172, 0.1, torch.float32)
    found = run(ffn, case, torch.float32, count=COUNT, runs=make_runs(1, 0, 8))
    assert found["unions"].item() == 0
    assert not found["w_gate"].any()


@pytest.mark.parametrize("wanted", ["x", "w_up", "w_down", "w_gate", "b_up", "b_down", "b_gate", None])
def test_only_wanted_gradients_are_made_and_the_report_without_any(dtype, wanted):
    case, runs = exact_gates(make_case(70, 40, 172, 0.1, dtype, biases=True)), make_runs(1, 70, 16, "holes")
    everything = run(cpu_ffn, case, dtype, l1=False, count=COUNT, runs=runs)
    inputs = {name: tensor.clone().requires_grad_(name == wanted) for name, tensor in case.items()}
    unions = reference.new_tally(1)
    y = cpu_ffn(**inputs, count_scale=torch.tensor(COUNT), runs=runs, unions=unions)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(dtype))
    assert torch.equal(unions.grad, everything["unions"])
    if wanted is not None:
        torch.testing.assert_close(inputs[wanted].grad, everything[wanted])


def test_gradients_are_not_copied_and_the_report_may_be_left_out():
    case = exact_gates(make_case(20, 40, 172, 0.1, torch.bfloat16, biases=True))
    leaves = {name: tensor.requires_grad_() for name, tensor in case.items()}
    unions, of_count = torch.zeros(1, requires_grad=True), {"count_scale": torch.tensor(COUNT)}
    of_count["runs"] = make_runs(1, 20, 8)
    y = cpu_ffn(**leaves, **of_count, unions=unions)
    assert_gradients_are_not_copied((*leaves.values(), unions), y, torch.ones_like(leaves["x"]))
    grads = [leaf.grad.clone() for leaf in leaves.values()]
    for leaf in leaves.values():
        leaf.grad = None
    cpu_ffn(**leaves, **of_count).backward(torch.ones_like(leaves["x"]))
    assert all(torch.equal(2 * leaf.grad, twice) for leaf, twice in zip(leaves.values(), grads, strict=True))


def test_threads_and_repeats_change_no_count():
    case, runs = make_case(301, 96, 1024, 0.1, torch.bfloat16), make_runs(1, 301, 64)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3, 3):
            torch.set_num_threads(count)
            found.append(run(cpu_ffn, case, torch.bfloat16, count=COUNT, runs=runs))
    finally:
        torch.set_num_threads(threads)
    assert found[0]["unions"] == found[1]["unions"]
    for name, value in found[2].items():
        assert torch.equal(value, found[1][name]), name


@pytest.mark.parametrize("gated", [True, False])
def test_opcheck(gated):
    case, runs = make_case(20, 40, 172, 0.05, torch.float32, gated=gated, biases=True), make_runs(2, 10, 4, "left")
    x, w_up, w_down, w_gate, b_up, _, b_gate = case.values()
    of_count = torch.tensor(0.1), runs.run, runs.size
    state = torch.ops.hf_twell.ffn(*case.values(), None, None, None, 16)[2]
    for needs in (0, 127):
        arguments = (torch.randn(20, 40), state, x, w_up, w_down, w_gate, b_up, b_gate, None, None, 16, needs)
        library.opcheck(torch.ops.hf_twell.ffn_backward.default, (*arguments, *of_count))
    leaves = [None if t is None else t.clone().requires_grad_() for t in case.values()]
    unions = torch.zeros(1, requires_grad=True)
    # Without the tests that compare two calls: unused bytes of the saved state differ.
    arguments = (*leaves, None, None, torch.zeros(173, requires_grad=True), 16, *of_count, unions)
    library.opcheck(torch.ops.hf_twell.ffn.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
def test_compiled():
    case, runs = exact_gates(make_case(70, 40, 172, 0.1, torch.float32)), make_runs(1, 70, 16, "left")
    compiled = torch.compile(cpu_ffn, fullgraph=True, backend="aot_eager")
    expected, found = (run(ffn, case, torch.float32, count=COUNT, runs=runs) for ffn in (cpu_ffn, compiled))
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("backend", ["reference", "cpu", "auto"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"count_scale": None}, "runs was given without count_scale"),
        ({"runs": None}, "unions was given without runs"),
        ({"runs": (make_runs(1, 20, 8).tokens, make_runs(1, 20, 8).run)}, "runs is a tuple; give what .*runs_of makes"),
        ({"runs": make_runs(1, 19, 8)}, r"runs has shape \(19,\); expected \(20,\)"),
        ({"runs": make_runs(1, 20, 8).to(torch.device("meta"))}, "x is on cpu and runs on meta"),
        ({"unions": torch.zeros(1).bfloat16()}, "unions is torch.bfloat16; give torch.float32"),
        ({"unions": torch.zeros(1, device="meta")}, "x is on cpu and unions on meta"),
        ({"unions": torch.zeros(2)}, r"unions has shape \(2,\); expected \(1,\)"),
    ],
)
def test_what_does_not_fit_is_refused(backend, change, says):
    case, runs = make_case(20, 40, 172, 0.1, torch.float32), make_runs(1, 20, 8)
    options = {"count_scale": torch.tensor(COUNT), "runs": runs, "unions": torch.zeros(1)} | change
    with pytest.raises(ValueError, match=says):
        api.ffn(**case, **options, backend=backend)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tokens, run: (tokens[0], run), r"tokens of runs has shape \(8,\); expected \(R, share\)"),
        (lambda tokens, run: (tokens[:, :0], run), "with both at least 1"),
        (lambda tokens, run: (tokens, run[None]), r"run of runs has shape \(1, 20\); expected \(T,\)"),
        (lambda tokens, run: (tokens, run.int()), "run of runs is torch.int32; give torch.int64"),
        (lambda tokens, run: (tokens.int(), run), "tokens of runs is torch.int32; give torch.int64"),
        (lambda tokens, run: (tokens, run.to("meta")), "tokens of runs is on cpu and run on meta"),
        (lambda tokens, run: (tokens + 1, run), "tokens of runs holds 20, and run has 20 tokens"),
        (lambda tokens, run: (tokens, run - 1), r"run holds -1; give each token a row of tokens, of 0\.\.3"),
        (lambda tokens, run: (tokens, run + 2), r"run holds 4; give each token a row of tokens, of 0\.\.3"),
        (lambda tokens, run: (tokens, run.roll(1)), "token 0 has row 2 in run and row 0 in tokens"),
        (lambda tokens, run: (tokens, run.clamp(min=1)), "token 0 has row 1 in run and row 0 in tokens"),
        (lambda tokens, run: (tokens.clamp(max=18), run), "token 19 has row 2 in run and row 3 in tokens, where"),
        (lambda tokens, run: (tokens[:3], run), "holds 20 places, and run has 16 tokens besides padding"),
        (lambda tokens, run: (tokens[:, [*range(8), 0]], run), "holds 23 places, and run has 20 tokens besides"),
        (lambda tokens, run: (torch.where(tokens < 0, 19, tokens), run), "token 19 has row 2 in run and row"),
    ],
)
def test_what_are_no_runs_is_refused(change, says):
    runs = make_runs(1, 20, 8)
    with pytest.raises(ValueError, match=says):
        Runs(*change(runs.tokens, runs.run))


@pytest.mark.parametrize("density", [0.05, 1.0])
def test_a_bare_call_counts_runs_whichever_way_it_takes(density):
    """Kernels or, so dense, plain matmuls, between which kernels would know no runs."""
    case, runs = exact_gates(make_case(64, 40, 172, density, torch.float32)), make_runs(1, 64, 16)
    assert_as_good_as_eager(api.ffn, case, count=COUNT, runs=runs)
    with Operators() as ran, torch.no_grad():
        api.ffn(**case, count_scale=torch.tensor(COUNT), runs=runs)
    assert "hf_twell.infer.default" in ran.names, "without gradients nothing counts"


def test_a_call_does_not_look_at_its_runs():
    """They were looked at when they were made: all layers of a batch have the same."""
    case, runs = make_case(20, 40, 172, 0.1, torch.float32), make_runs(1, 20, 8)
    leaves = {name: None if tensor is None else tensor.requires_grad_() for name, tensor in case.items()}
    of_count = {"count_scale": torch.tensor(COUNT), "runs": runs, "unions": reference.new_tally(1)}
    with Operators() as ran:
        cpu_ffn(**leaves, **of_count)
    assert ran.names == ["hf_twell.ffn.default"]
