"""What neighbours activate together, as the count term of CUDA's training kernels counts it, against its definition."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from hf_twell.blocks.batches import Runs, runs_of
from hf_twell.ops import reference
from tests.ffn_cases import FEW_PAIRS, relative_rms
from tests.kernels.test_cuda_kernels import NAMES, by_columns, exact_fp32, poison, scattered_case  # noqa: F401
from tests.kernels.test_cuda_training import DTYPES, L1_SCALE, _no_hopper, assert_equal, grad_of_y, leaves_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_no_hopper()), reason=_no_hopper())]
SHARES = (1, 3, 16, 64, 128, 200, None)  # None: all tokens
TOKENS = (1, 63, 64, 130, 300, 1000)
EVERY = 127  # gradients
COUNT = 0.02
STEP = 1 / 64  # of gates, which 16 bits hold exactly up to 4


def exact_case(tokens, hidden, intermediate, dtype, *, gated=True, biases=False):
    """Gates are whole multiples of STEP, in every type: so the strongest token of a run is the same in each, and often
    several are. 2 to 15 % of them are positive, in many cases below 0.2, where the count presses."""
    g = torch.Generator("cuda").manual_seed(tokens + intermediate)

    def randn(*shape):
        return torch.randn(*shape, generator=g, device="cuda")

    x, first = randn(tokens, hidden), torch.zeros(intermediate, hidden, device="cuda")
    x[:, :6], x[:, 6] = torch.randint(-1, 2, (tokens, 6), generator=g, device="cuda").float(), 1.0
    first[:, :6] = torch.randint(-16, 17, (intermediate, 6), generator=g, device="cuda") * STEP
    thresholds_F = torch.randint(24, 60, (intermediate,), generator=g, device="cuda") * STEP
    if biases:
        first[:, 6] = 10 * STEP
        thresholds_F += 10 * STEP
    else:
        first[:, 6] = -thresholds_F
    second = randn(intermediate, hidden) * hidden**-0.5
    case = {
        "x": x,
        "w_up": second if gated else first,
        "w_down": randn(hidden, intermediate) * intermediate**-0.5,
        "w_gate": first if gated else None,
        "b_up": (0.1 * randn(intermediate) if gated else -thresholds_F) if biases else None,
        "b_down": 0.1 * randn(hidden) if biases else None,
        "b_gate": -thresholds_F if biases and gated else None,
    }
    return {name: None if tensor is None else tensor.to(dtype) for name, tensor in case.items()}


def neighbours(tokens, share, padding=None):
    """Runs of one sequence's tokens, of which `padding` lies "left", "right", or as "holes" between others."""
    place = torch.arange(tokens, device="cuda")
    real = {
        None: place >= 0,
        "left": place >= tokens // 3,
        "right": place < tokens - tokens // 3,
        "holes": place % 70 < 50,
    }[padding]
    return runs_of({"input_ids": place[None], "attention_mask": real[None].long()}, share or max(tokens, 1))


def sizes_of(runs):
    return (runs.tokens >= 0).sum(1)


def needs_of(*wanted):
    return sum(1 << NAMES.index(name) for name in wanted)


def l1_of(case, l1):
    """l1_scale and token_weight."""
    device, tokens = case["x"].device, len(case["x"])
    weight = torch.linspace(0.5, 1.0, tokens, device=device) if l1 == "weighted" else None
    return None if l1 is None else torch.tensor(L1_SCALE, device=device), weight


def computed(case, runs, *, l1="weighted", count=COUNT, needs=EVERY, grad_y=None, poisoned=True):
    """Every gradient by name, "unions" that of the neurons in runs, from the operators themselves."""
    x, w_up, w_down, w_gate, b_up, _, b_gate = inputs = [case[name] for name in NAMES]
    l1_scale, weight = l1_of(case, l1)
    scale = None if count is None else torch.tensor(count, device=x.device)
    of_runs = (None, None) if runs is None else (runs.run, sizes_of(runs))
    capacity, grad_y = len(w_up), grad_of_y(case) if grad_y is None else grad_y
    state = torch.ops.hf_twell.ffn(*inputs, l1_scale, weight, None, capacity, scale, *of_runs)[2]
    kept = state.clone()
    if poisoned:
        poison()
    *gradients, in_runs = torch.ops.hf_twell.ffn_backward(
        grad_y, state, x, w_up, w_down, w_gate, b_up, b_gate, l1_scale, weight, capacity, needs, scale, *of_runs
    )
    assert torch.equal(state, kept), "a graph may be kept"
    found = {
        name: gradient
        for i, (name, gradient) in enumerate(zip(NAMES, gradients, strict=True))
        if needs >> i & 1 and case[name] is not None
    }
    return found | {"unions": in_runs}


def defined(case, runs, dtype=None, *, l1="weighted", count=COUNT, grad_y=None):
    """The same by plain PyTorch in `dtype`."""
    leaves = leaves_of(case, dtype)
    unions = torch.zeros(1, device="cuda", requires_grad=True)
    l1_scale, weight = l1_of(case, l1)
    up = F.linear(leaves["x"], leaves["w_up"], leaves["b_up"])
    gated = leaves["w_gate"] is not None
    active = torch.relu(F.linear(leaves["x"], leaves["w_gate"], leaves["b_gate"]) if gated else up)
    active = reference.inject_count(active, torch.tensor(count, device="cuda"), weight, runs, unions)
    h = reference.inject_l1(active * up if gated else active, l1_scale, weight)
    y = F.linear(h, leaves["w_down"], leaves["b_down"])
    y.backward((grad_of_y(case) if grad_y is None else grad_y).to(y.dtype))
    return {name: t.grad for name, t in (leaves | {"unions": unions}).items() if t is not None}


def active_of(case, dtype=torch.float64):
    first, bias = ("w_up", "b_up") if case["w_gate"] is None else ("w_gate", "b_gate")
    wide = [None if case[name] is None else case[name].to(dtype) for name in ("x", first, bias)]
    return torch.relu(F.linear(*wide))


def neurons_in_runs(case, runs):
    """As `unions` has it: whole numbers."""
    active_RSF = (active_of(case) != 0)[runs.tokens.clamp(min=0)] & (runs.tokens >= 0).unsqueeze(-1)
    return (sizes_of(runs) * active_RSF.any(1).sum(1)).sum().view(1).float()


def assert_as_good_as_eager(case, runs, ours=None, **options):
    """At most twice the error of same-dtype eager PyTorch against fp64; what is counted is exact."""
    ours = computed(case, runs, **options) if ours is None else ours
    truth, eager = defined(case, runs, torch.float64, **options), defined(case, runs, **options)
    assert ours.keys() == truth.keys()
    assert torch.equal(ours.pop("unions"), neurons_in_runs(case, runs))
    few = (active_of(case) > 0).sum() < 64
    for name, value in ours.items():
        assert (value.shape, value.dtype) == (eager[name].shape, eager[name].dtype), name
        assert not value.isnan().any(), name
        if not truth[name].any():
            assert not value.any(), f"{name} must be exactly zero"
            continue
        bound = max(2 * relative_rms(eager[name], truth[name]), 2**-21)
        if few:
            bound = max(bound, FEW_PAIRS[case["x"].dtype])
        error = relative_rms(value, truth[name])
        assert error <= bound, f"{name}: error {error:.2e}, at most {bound:.2e} is allowed"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("padding", [None, "left", "right", "holes"])
def test_runs_of_every_length(dtype, gated, share, padding):
    for tokens, l1 in zip(TOKENS, itertools.cycle(["weighted", "plain", None]), strict=False):
        case = exact_case(tokens, 72, 344, dtype, gated=gated, biases=tokens % 2 == 1)
        assert_as_good_as_eager(case, neighbours(tokens, share, padding), l1=l1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("intermediate", [1, 7, 33, 70, 129, 999, 5632])
def test_awkward_widths_and_both_orders_of_down(dtype, intermediate):
    for gated, share in itertools.product((True, False), (16, 100)):
        case = exact_case(517, 40, intermediate, dtype, gated=gated)
        assert_as_good_as_eager(case, neighbours(517, share))
        assert_as_good_as_eager(by_columns(case), neighbours(517, share))


@pytest.mark.parametrize("share", [64, 200, None])
def test_runs_that_go_on_from_one_chunk_to_the_next(share):
    case = exact_case(33_000, 40, 344, torch.bfloat16)
    assert_as_good_as_eager(case, neighbours(33_000, share))


@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_whose_tokens_lie_apart(dtype):
    """In ascending places, with those of other runs between them."""
    for tokens, number in itertools.product((130, 1000), (2, 7, 100)):
        g = torch.Generator().manual_seed(tokens)
        run = torch.randint(number, (tokens,), generator=g)
        length = int(run.bincount().max())
        rows = torch.full((number + 1, length), -1)
        for each in range(number):
            places = (run == each).nonzero().flatten()
            rows[each, : len(places)] = places
        assert_as_good_as_eager(exact_case(tokens, 72, 344, dtype), Runs(rows.cuda(), run.cuda()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [3, 64, 200])
def test_the_term_alone_acts_on_the_gate_alone(dtype, share):
    """Of a y without a gradient, dx and the gate's are the count's own: rounded as a token's, then with the run's."""
    case, runs = exact_case(1000, 72, 344, dtype, biases=True), neighbours(1000, share, "holes")
    options = {"l1": None, "grad_y": torch.zeros_like(case["x"])}
    found, truth = computed(case, runs, **options), defined(case, runs, torch.float64, **options)
    for name in ("x", "w_gate", "b_gate"):
        assert truth[name].any()
        assert relative_rms(found[name], truth[name]) < {torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype], name
    for name in ("w_up", "w_down", "b_up"):
        assert not found[name].any(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_is_the_strongest_and_has_no_gradient(dtype):
    """It counts as active, and its run's other tokens are weaker."""
    case, runs = exact_case(300, 72, 344, dtype), neighbours(300, 64)
    case["x"][70] = math.nan
    others = torch.arange(300, device="cuda") != 70
    found = computed(case, runs, l1=None)
    truth, eager = defined(case, runs, torch.float64, l1=None), defined(case, runs, l1=None)
    assert torch.equal(found["unions"], neurons_in_runs(case, runs))
    assert found["x"][others].isfinite().all()
    error = relative_rms(found["x"][others], truth["x"][others])
    assert error <= 2 * relative_rms(eager["x"][others], truth["x"][others])


@pytest.mark.parametrize("share", [3, 16, 64, 200, None])
def test_repeats_are_equal(share):
    for tokens, case in itertools.product((1000, 5000), ("exact", "scattered")):
        case = (
            exact_case(tokens, 512, 2048, torch.bfloat16)
            if case == "exact"
            else scattered_case(tokens, 512, 2048, 0.05, torch.bfloat16)
        )
        runs = neighbours(tokens, share)
        first = computed(case, runs)
        for _ in range(3):
            assert_equal(computed(case, runs), first)


def test_each_subset_of_gradients():
    case, runs = exact_case(300, 40, 172, torch.bfloat16, biases=True), neighbours(300, 100)
    everything = computed(case, runs)
    for needs in range(EVERY + 1):
        found = computed(case, runs, needs=needs, poisoned=needs % 16 == 0)
        assert torch.equal(found["unions"], everything["unions"])
        for name, value in found.items():
            assert relative_rms(value, everything[name]) <= 2**-8, (name, needs)


def test_runs_without_a_count_are_only_counted():
    case, runs = exact_case(300, 72, 344, torch.bfloat16), neighbours(300, 64)
    found, without = computed(case, runs, count=None), computed(case, None, count=None)
    assert torch.equal(found.pop("unions"), neurons_in_runs(case, runs))
    assert without.pop("unions").shape == (0,)
    assert_equal(found, without)


def test_strided_runs():
    case, runs = exact_case(300, 72, 344, torch.bfloat16), neighbours(300, 64)
    apart = Runs(runs.tokens, torch.stack([runs.run, -runs.run], 1)[:, 0])
    assert_equal(computed(case, apart), computed(case, runs))


def test_no_tokens_at_all():
    case = exact_case(0, 40, 172, torch.bfloat16)
    found = computed(case, Runs(torch.full((1, 1), -1, device="cuda"), torch.zeros(0, dtype=torch.long, device="cuda")))
    assert found["unions"].tolist() == [0.0]


def test_a_captured_step_follows_its_inputs():
    """Replayed with other tokens and other runs than it was captured with."""
    cases = [exact_case(1000, 72, width, torch.bfloat16) for width in (344, 344)]
    cases[1]["x"] = cases[1]["x"].flip(0).contiguous()
    runs = [neighbours(1000, 64, padding) for padding in ("left", "holes")]
    case, now = {name: None if t is None else t.clone() for name, t in cases[0].items()}, runs[0].run.clone()
    sizes = sizes_of(runs[0])
    x, w_up, w_down, w_gate, b_up, _, b_gate = inputs = [case[name] for name in NAMES]
    scale, grad_y, capacity = torch.tensor(COUNT, device="cuda"), grad_of_y(case), len(w_up)

    def step():
        state = torch.ops.hf_twell.ffn(*inputs, None, None, None, capacity, scale, now, sizes)[2]
        return torch.ops.hf_twell.ffn_backward(
            grad_y, state, x, w_up, w_down, w_gate, b_up, b_gate, None, None, capacity, EVERY, scale, now, sizes
        )

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for index in (0, 1, 0):
        case["x"].copy_(cases[index]["x"])
        now.copy_(runs[index].run)
        sizes.copy_(sizes_of(runs[index]))
        graph.replay()
        replayed = [result.clone() for result in results]
        assert all(map(torch.equal, replayed, step()))


def test_what_runs_are_taken():
    case, runs = exact_case(300, 72, 344, torch.bfloat16), neighbours(300, 64)
    x, w_up, w_down, w_gate, b_up, _, b_gate = (case[name] for name in NAMES)

    def backward(run, sizes, capacity=344):
        state = x.new_empty(0, dtype=torch.uint8)  # what is refused is refused before any launch
        arguments = (grad_of_y(case), state, x, w_up, w_down, w_gate, b_up, b_gate, None, None, capacity, EVERY, None)
        torch.ops.hf_twell.ffn_backward(*arguments, run, sizes)

    run, sizes = runs.run, sizes_of(runs)
    with pytest.raises(RuntimeError, match="with a capacity of F alone, where columns are kept"):
        backward(run, sizes, capacity=100)
    with pytest.raises(RuntimeError, match="run and run_size together"):
        backward(run, None)
    with pytest.raises(RuntimeError, match="run and run_size together"):
        backward(None, sizes)
    with pytest.raises(RuntimeError, match="run and run_size on x's device"):
        backward(run.cpu(), sizes)
    with pytest.raises(RuntimeError, match="one-dimensional run and run_size in int64"):
        backward(run.int(), sizes)
    with pytest.raises(RuntimeError, match="one-dimensional run and run_size in int64"):
        backward(run, sizes[None])
    with pytest.raises(RuntimeError, match="run with an element for each token"):
        backward(run[:-1], sizes)
    with pytest.raises(RuntimeError, match="run_size with an element for padding, at least"):
        backward(run, sizes[:0])
