"""What neighbours activate together, as the count term of CUDA's training kernels counts it, against its definition."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from hf_twell.ops import reference
from hf_twell.ops.runs import Runs
from tests.ffn_cases import PADDING, make_runs, relative_rms
from tests.kernels.test_cuda_kernels import NAMES, by_columns, exact_fp32, poison, scattered_case  # noqa: F401
from tests.kernels.test_cuda_training import (
    DTYPES,
    _no_hopper,
    assert_as_good_as_eager,
    assert_equal,
    cuda_ffn,
    grad_of_y,
    leaves_of,
    run,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_no_hopper()), reason=_no_hopper())]
SHARES = (1, 3, 16, 64, 128, 200, 1000)
BATCHES = ((1, 1), (1, 63), (1, 64), (2, 65), (3, 100), (1, 1000))  # rows and tokens of each
EVERY = 127  # gradients
COUNT = 0.02
STEP = 1 / 64  # of gates, which 16 bits hold exactly up to 4


def exact_case(tokens, hidden, intermediate, dtype, *, gated=True, biases=False):
    """Gates are whole multiples of STEP, in every type: so the strongest token of a run is the same in each, and often
    several are. 3 % of them are positive, most of these below 0.2, where the count presses."""
    g = torch.Generator("cuda").manual_seed(tokens + intermediate)

    def randn(*shape):
        return torch.randn(*shape, generator=g, device="cuda")

    x, first = randn(tokens, hidden), torch.zeros(intermediate, hidden, device="cuda")
    x[:, :6], x[:, 6] = torch.randint(-1, 2, (tokens, 6), generator=g, device="cuda").float(), 1.0
    first[:, :6] = torch.randint(-16, 17, (intermediate, 6), generator=g, device="cuda") * STEP
    threshold_F = torch.randint(24, 60, (intermediate,), generator=g, device="cuda") * STEP
    first[:, 6] = STEP if biases else -threshold_F
    second, bias_F = randn(intermediate, hidden) * hidden**-0.5, -threshold_F - STEP
    case = {
        "x": x,
        "w_up": second if gated else first,
        "w_down": randn(hidden, intermediate) * intermediate**-0.5,
        "w_gate": first if gated else None,
        "b_up": None if not biases else 0.1 * randn(intermediate) if gated else bias_F,
        "b_down": 0.1 * randn(hidden) if biases else None,
        "b_gate": bias_F if biases and gated else None,
    }
    return {name: None if tensor is None else tensor.to(dtype) for name, tensor in case.items()}


def runs_on_gpu(rows, length, share, padding="none"):
    return make_runs(rows, length, share, padding).to(torch.device("cuda"))


def neurons_in_runs(case, runs):
    """What `unions` gets: a whole number."""
    first, bias = ("w_up", "b_up") if case["w_gate"] is None else ("w_gate", "b_gate")
    wide = [None if case[name] is None else case[name].double() for name in ("x", first, bias)]
    exists_RS = runs.tokens >= 0
    active_RSF = (torch.relu(F.linear(*wide)) != 0)[runs.tokens.clamp(min=0)] & exists_RS.unsqueeze(-1)
    return (exists_RS.sum(1) * active_RSF.any(1).sum(1)).sum().view(1).float()


def backward(case, runs, *, needs=EVERY, count=COUNT):
    """Every gradient that is needed, by name, and "unions" of the neurons in runs; from the operators themselves."""
    x, w_up, w_down, w_gate, b_up, _, b_gate = inputs = [case[name] for name in NAMES]
    scale = None if count is None else torch.tensor(count, device=x.device)
    of_count = (scale,) if runs is None else (scale, runs.run, runs.size)
    grad_y, capacity = grad_of_y(case), len(w_up)
    state = torch.ops.hf_twell.ffn(*inputs, None, None, None, capacity, *of_count)[2]
    kept = state.clone()
    poison()
    *gradients, in_runs = torch.ops.hf_twell.ffn_backward(
        grad_y, state, x, w_up, w_down, w_gate, b_up, b_gate, None, None, capacity, needs, *of_count
    )
    assert torch.equal(state, kept), "another backward may follow"
    wanted = (name if needs >> i & 1 and case[name] is not None else "" for i, name in enumerate(NAMES))
    found = {name: gradient for name, gradient in zip(wanted, gradients, strict=True) if name}
    return found | {"unions": in_runs}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("padding", PADDING)
def test_every_length_and_padding(dtype, gated, share, padding):
    terms = itertools.cycle(["weighted", "plain", None])
    for (rows, length), l1 in zip(BATCHES, terms, strict=False):
        case = exact_case(rows * length, 72, 344, dtype, gated=gated, biases=length % 2 == 1)
        runs = runs_on_gpu(rows, length, share, padding)
        poison()
        ours = run(cuda_ffn, case, l1=l1, count=COUNT, runs=runs)
        assert_as_good_as_eager(case, ours, l1=l1, count=COUNT, runs=runs)
        assert torch.equal(ours["unions"], neurons_in_runs(case, runs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("intermediate", [1, 7, 33, 70, 129, 999, 5632])
def test_awkward_widths_and_both_orders_of_down(dtype, intermediate):
    for gated, share, columns in itertools.product((True, False), (16, 100), (True, False)):
        case = exact_case(517, 40, intermediate, dtype, gated=gated)
        case = by_columns(case) if columns else case
        assert_as_good_as_eager(case, count=COUNT, runs=runs_on_gpu(1, 517, share))


@pytest.mark.parametrize("share", [64, 200, 33_000])
def test_runs_that_go_on_from_one_chunk_to_the_next(share):
    case, runs = exact_case(33_000, 40, 344, torch.bfloat16), runs_on_gpu(1, 33_000, share)
    assert_as_good_as_eager(case, count=COUNT, runs=runs)
    assert torch.equal(backward(case, runs)["unions"], neurons_in_runs(case, runs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_whose_tokens_lie_apart(dtype):
    """In ascending places, with those of other runs between them."""
    for tokens, number in itertools.product((130, 1000), (2, 7, 100)):
        run_T = torch.randint(number, (tokens,), generator=torch.Generator().manual_seed(tokens))
        tokens_RS = torch.full((number + 1, int(run_T.bincount().max())), -1)
        for each in range(number):
            places = (run_T == each).nonzero().flatten()
            tokens_RS[each, : len(places)] = places
        assert_as_good_as_eager(
            exact_case(tokens, 72, 344, dtype), count=COUNT, runs=Runs(tokens_RS.cuda(), run_T.cuda())
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [3, 64, 200])
def test_the_term_alone_acts_on_the_gate_alone(dtype, share):
    """Of a y without a gradient, dx and the gate's are the count's own: rounded as a token's, then with the run's."""
    case = exact_case(1000, 72, 344, dtype, biases=True)
    options = {"l1": None, "count": COUNT, "runs": runs_on_gpu(4, 250, share, "holes")}
    options["grad_y"] = torch.zeros_like(case["x"])
    found, truth = run(cuda_ffn, case, **options), run(reference.ffn, case, torch.float64, **options)
    for name in ("x", "w_gate", "b_gate"):
        assert truth[name].any()
        assert relative_rms(found[name], truth[name]) < {torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype], name
    for name in ("w_up", "w_down", "b_up"):
        assert not found[name].any(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_is_the_strongest_and_has_no_gradient(dtype):
    """It counts as active, and its run's other tokens are weaker."""
    case, runs = exact_case(300, 72, 344, dtype), runs_on_gpu(1, 300, 64)
    case["x"][70] = math.nan
    others, options = torch.arange(300, device="cuda") != 70, {"l1": None, "count": COUNT, "runs": runs}
    found, eager = run(cuda_ffn, case, **options), run(reference.ffn, case, **options)
    truth = run(reference.ffn, case, torch.float64, **options)["x"][others]
    assert torch.equal(found["unions"], neurons_in_runs(case, runs))
    assert truth.isfinite().all()
    assert found["x"][others].isfinite().all()
    assert relative_rms(found["x"][others], truth) <= 2 * relative_rms(eager["x"][others], truth)


@pytest.mark.parametrize("share", [3, 16, 64, 200, 5000])
def test_repeats_are_equal(share):
    for tokens, biases in itertools.product((1000, 5000), (True, False)):
        exact = exact_case(tokens, 512, 2048, torch.bfloat16, biases=biases)
        for case in (exact, scattered_case(tokens, 512, 2048, 0.05, torch.bfloat16)):
            runs = runs_on_gpu(1, tokens, share)
            first = backward(case, runs)
            for _ in range(3):
                assert_equal(backward(case, runs), first)


def test_each_subset_of_gradients():
    case, runs = exact_case(300, 40, 172, torch.bfloat16, biases=True), runs_on_gpu(3, 100, 64)
    everything = backward(case, runs)
    for needs in range(EVERY + 1):
        found = backward(case, runs, needs=needs)
        assert torch.equal(found["unions"], everything["unions"])
        for name, value in found.items():
            assert relative_rms(value, everything[name]) <= 2**-8, (name, needs)


def test_runs_without_a_count_are_only_counted():
    case, runs = exact_case(300, 72, 344, torch.bfloat16), runs_on_gpu(3, 100, 64)
    found, without = backward(case, runs, count=None), backward(case, None, count=None)
    assert torch.equal(found.pop("unions"), neurons_in_runs(case, runs))
    assert without.pop("unions").shape == (0,)
    assert_equal(found, without)


def test_strided_runs():
    case, runs = exact_case(300, 72, 344, torch.bfloat16), runs_on_gpu(3, 100, 64)
    apart = Runs(runs.tokens, torch.stack([runs.run, -runs.run], 1)[:, 0])
    assert_equal(backward(case, apart), backward(case, runs))


def test_no_tokens_at_all():
    none = Runs(torch.full((1, 1), -1, device="cuda"), torch.zeros(0, dtype=torch.int64, device="cuda"))
    found = backward(exact_case(0, 40, 172, torch.bfloat16, biases=True), none)
    assert found["x"].shape == (0, 40)
    assert not any(value.any() for value in found.values())


def test_a_captured_step_follows_its_inputs():
    """Forward and backward, replayed with other tokens and other runs than they were captured with."""
    first = exact_case(1000, 72, 344, torch.bfloat16)
    cases = (first, first | {"x": first["x"].flip(0).contiguous()})
    all_runs = [runs_on_gpu(4, 250, 64, padding) for padding in ("left", "holes")]
    leaves, grad_y, runs = leaves_of(first), grad_of_y(first), Runs(all_runs[0].tokens.clone(), all_runs[0].run.clone())
    unions = torch.zeros(1, device="cuda", requires_grad=True)
    terms = {"count_scale": torch.tensor(COUNT, device="cuda"), "runs": runs, "unions": unions}
    held = {name: leaf for name, leaf in (leaves | {"unions": unions}).items() if leaf is not None}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        cuda_ffn(**leaves, **terms).backward(grad_y)
    torch.cuda.current_stream().wait_stream(stream)
    for leaf in held.values():
        leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cuda_ffn(**leaves, **terms)
        y.backward(grad_y)
    for index in (0, 1, 0):
        with torch.no_grad():
            leaves["x"].copy_(cases[index]["x"])
        for part, now in vars(all_runs[index]).items():
            getattr(runs, part).copy_(now)
        graph.replay()
        results = {"y": y.detach()} | {name: leaf.grad for name, leaf in held.items()}
        assert_equal(results, run(cuda_ffn, cases[index], l1=None, count=COUNT, runs=all_runs[index], grad_y=grad_y))


def test_what_runs_are_taken():
    case, runs = exact_case(300, 72, 344, torch.bfloat16), runs_on_gpu(3, 100, 64)
    x, w_up, w_down, w_gate, b_up, _, b_gate = (case[name] for name in NAMES)
    nothing = x.new_empty(0, dtype=torch.uint8)  # each is refused before any launch

    def refused(message, run, sizes, capacity=344):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.hf_twell.ffn_backward(
                x, nothing, x, w_up, w_down, w_gate, b_up, b_gate, None, None, capacity, EVERY, None, run, sizes
            )

    run, sizes = runs.run, runs.size
    refused("with a capacity of F alone, where columns are kept", run, sizes, capacity=100)
    refused("run and run_size together", run, None)
    refused("run and run_size together", None, sizes)
    refused("run and run_size on x's device", run.cpu(), sizes)
    refused("one-dimensional run and run_size in int64", run.int(), sizes)
    refused("one-dimensional run and run_size in int64", run, sizes[None])
    refused("run with an element for each token", run[:-1], sizes)
    refused("run_size with an element for padding, at least", run, sizes[:0])
