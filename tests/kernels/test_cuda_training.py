"""Gradients of the CUDA kernels on a Hopper GPU: every one, at every size and density, against exact results."""

import functools
import itertools
import math

import pytest
import torch

from hf_twell.ops import api, reference
from tests.ffn_cases import FEW_PAIRS, GRADIENTS, assert_gradients_are_not_copied, near_zero, relative_rms
from tests.kernels.test_cuda_kernels import (
    NAMES,
    _missing,
    by_columns,
    exact_fp32,  # noqa: F401
    first_tokens,
    gpu_case,
    patterned_case,
    poison,
    scattered_case,
)


def _no_hopper() -> str:
    if _missing():
        return _missing()
    capability = torch.cuda.get_device_capability()
    return "" if capability == (9, 0) else f"training kernels need a GPU of compute capability 9.0, not {capability}"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_no_hopper()), reason=_no_hopper())]
DTYPES = (torch.bfloat16, torch.float16)
TOKENS = (1, 2, 15, 63, 199, 257, 4097)
L1_SCALE = 0.03
KEPT = ("pairs", "columns")  # between forward and backward


def capacity_of(case, kept):
    """One that keeps this: F keeps columns, and of few neurons the default is F."""
    width = len(case["w_up"])
    return width if kept == "columns" else None if width > 64 else max(1, width - 1)


def l1_inputs(case, *, weighted=True):
    device, tokens = case["x"].device, case["x"].shape[:-1]
    weight = torch.linspace(0.5, 1.0, math.prod(tokens), device=device).view(tokens)
    return {
        "l1_scale": torch.tensor(L1_SCALE, device=device),
        "token_weight": weight if weighted else None,
        "tally": torch.zeros(1 + len(case["w_up"]), device=device, requires_grad=True),
    }


def leaves_of(case, dtype=None, wanted=NAMES):
    """Strides stay as they are."""
    return {
        name: None if t is None else t.detach().to(dtype or t.dtype, copy=True).requires_grad_(name in wanted)
        for name, t in case.items()
    }


def grad_of_y(case):
    g = torch.Generator(case["x"].device).manual_seed(7)
    return torch.randn(case["x"].shape, generator=g, device=case["x"].device).to(case["x"].dtype)


def run(function, case, dtype=None, *, l1="weighted", count=0.0, runs=None, grad_y=None, **options):
    """y and every gradient by name, with the tally's where there is an L1 term. `count`: the count term's scale.
    `runs`: of tokens, which it counts, too."""
    leaves = leaves_of(case, dtype)
    extra = l1_inputs(case, weighted=l1 == "weighted") if l1 else {}
    if count:
        extra["count_scale"] = torch.tensor(count, device=case["x"].device)
    if runs is not None:
        extra |= {"runs": runs, "unions": torch.zeros(1, device=case["x"].device, requires_grad=True)}
    y = function(**leaves, **extra, **options)
    y.backward((grad_of_y(case) if grad_y is None else grad_y).to(y.dtype))
    results = {"y": y} | {name: t.grad for name, t in (leaves | extra).items() if getattr(t, "requires_grad", False)}
    return {name: results[name].detach() for name in GRADIENTS if name in results}


cuda_ffn = functools.partial(api.ffn, backend="cuda")


def assert_as_good_as_eager(case, ours=None, *, certain=True, **options):
    """At most twice the error of same-dtype eager PyTorch against fp64; zero where that is zero.

    certain: no gate is so near zero that rounding decides whether it is active.
    """
    dtype, l1 = case["x"].dtype, options.get("l1", "weighted")
    terms = {"l1": l1, "count": options.get("count", 0.0), "runs": options.get("runs")}
    if ours is None:
        poison()
        ours = run(cuda_ffn, case, **options)
    truth, eager = run(reference.ffn, case, torch.float64, **terms), run(reference.ffn, case, **terms)
    assert ours.keys() == truth.keys()
    first, bias = ("w_up", "b_up") if case["w_gate"] is None else ("w_gate", "b_gate")
    few = (torch.nn.functional.linear(case["x"], case[first], case[bias]) > 0).sum() < 64
    for name, value in ours.items():
        assert (value.shape, value.dtype) == (eager[name].shape, eager[name].dtype), name
        assert not value.isnan().any(), name
        if not truth[name].any():
            assert not value.any(), f"{name} must be exactly zero"
            continue
        bound = max(2 * relative_rms(eager[name], truth[name]), 2**-21)
        if few or name == "tally":
            bound = max(bound, FEW_PAIRS[dtype])
        error = relative_rms(value, truth[name])
        assert error <= bound, f"{name}: error {error:.2e}, at most {bound:.2e} is allowed"
        if certain and value.ndim == 2 and name != "w_down":
            dead = ~truth[name].any(1)
            assert not value[dead].any(), f"rows of {name} without an active pair must be exactly zero"
    if certain:
        dead = ~truth["w_down"].any(0)
        assert not ours["w_down"][:, dead].any(), "columns of w_down without an active pair must be exactly zero"
    if certain and l1:  # sums of weights, exact but for the order of sums in fp32
        torch.testing.assert_close(ours["tally"][1:], truth["tally"][1:], rtol=1e-4, atol=1e-4)


def assert_equal(results, expected):
    assert results.keys() == expected.keys()
    for name, value in results.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.0, "one", 0.005, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kept", KEPT)
def test_every_gradient_is_as_good_as_eager(dtype, density, gated, kept):
    for tokens in TOKENS:
        case = gpu_case(tokens, 72, 344, density, dtype, gated=gated, biases=tokens % 2 == 1)
        assert_as_good_as_eager(case, capacity=capacity_of(case, kept))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 63, 127])
def test_many_pairs_of_few_tokens(tokens):
    """Less than a block of tokens: all neurons are heavy from four tokens on, or from three without a gate."""
    for gated, biases in itertools.product((True, False), repeat=2):
        case = gpu_case(tokens, 72, 344, 1.0, torch.bfloat16, gated=gated, biases=biases)
        assert_as_good_as_eager(case, capacity=343)


@pytest.mark.parametrize(("hidden", "intermediate"), [(8, 16), (33, 70), (64, 1), (100, 129), (576, 1536), (1000, 999)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", KEPT)
def test_awkward_sizes_biases_no_gate_and_both_orders_of_down(dtype, hidden, intermediate, kept):
    for gated, biases, columns in itertools.product((True, False), repeat=3):
        case = gpu_case(257, hidden, intermediate, 0.05, dtype, gated=gated, biases=biases)
        case = by_columns(case) if columns else case
        for tokens in (2, 63, 257):
            some = first_tokens(case, tokens)
            ours = run(cuda_ffn, some, capacity=capacity_of(some, kept))
            assert_as_good_as_eager(some, ours)
            if min(hidden, intermediate) > 1:
                assert ours["w_down"].stride() == case["w_down"].stride()


@pytest.mark.parametrize(("hidden", "intermediate"), [(896, 4864), (2048, 5632), (100, 65536), (16384, 520)])
@pytest.mark.parametrize("density", [0.005, 0.02, 1.0])
@pytest.mark.parametrize("kept", KEPT)
def test_wide_blocks(hidden, intermediate, density, kept):
    case = gpu_case(600, hidden, intermediate, density, torch.bfloat16)
    for tokens in (15, 199, 600):
        assert_as_good_as_eager(first_tokens(case, tokens), capacity=capacity_of(case, kept))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.001, 0.005, 0.02, 0.2, 0.5])
@pytest.mark.parametrize("kept", KEPT)
def test_tokens_that_share_no_neurons(dtype, density, kept):
    """Of 0.001 some neurons are active in most runs of tokens that columns take together, others in few."""
    for tokens in (1, 33, 300, 4097):
        case = scattered_case(tokens, 1024, 3072, density, dtype)
        assert_as_good_as_eager(case, certain=False, capacity=capacity_of(case, kept))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", KEPT)
def test_tokens_that_share_most_of_their_neurons(dtype, kept):
    """6 % of the pairs in a quarter of the neurons; in another run of tokens another quarter."""
    for tokens in (300, 2100):
        g = torch.Generator("cuda").manual_seed(tokens)
        active_TF = torch.rand(tokens, 999, generator=g, device="cuda") < 0.24
        for token in range(tokens):
            active_TF[token] &= torch.arange(999, device="cuda") % 4 == token // 100 % 4
        case = patterned_case(active_TF, tokens + 20, dtype)
        assert_as_good_as_eager(case, capacity=capacity_of(case, kept))


@pytest.mark.parametrize("density", [0.02, 1.0])
@pytest.mark.parametrize("kept", KEPT)
def test_more_tokens_than_sixteen_bits_count(density, kept):
    case = gpu_case(65_537, 40, 344, density, torch.bfloat16)
    assert_as_good_as_eager(case, capacity=capacity_of(case, kept))


@pytest.mark.parametrize(
    "options", [{"density": 1.0}, {"density": 0.02, "capacity": 1}, {"density": 0.02, "capacity": 14_336}]
)
def test_many_chunks_that_were_not_kept(options):
    """Each adds to the weights' gradients, and none may round them away."""
    case = gpu_case(32_768, 64, 14_336, options["density"], torch.bfloat16)
    assert_as_good_as_eager(case, **{key: value for key, value in options.items() if key == "capacity"})


@pytest.mark.parametrize("density", [0.005, 1.0])
def test_more_pairs_of_token_and_neuron_than_32_bits_count(density):
    """200,000 x 10,752, against fp64 piece by piece, which would not fit as a whole."""
    case, pieces = gpu_case(200_000, 64, 10_752, density, torch.bfloat16), 8
    grad_y = grad_of_y(case)
    ours = run(cuda_ffn, case, l1=None, grad_y=grad_y)
    truth = {}
    for x, dy in zip(case["x"].chunk(pieces), grad_y.chunk(pieces), strict=True):
        part = run(reference.ffn, case | {"x": x}, torch.float64, l1=None, grad_y=dy)
        for name, value in part.items():
            truth[name] = [*truth.get(name, []), value] if name in ("y", "x") else truth.get(name, 0) + value
    for name, value in ours.items():
        exact = torch.cat(truth[name]) if name in ("y", "x") else truth[name]
        error = relative_rms(value, exact)
        assert error <= FEW_PAIRS[torch.bfloat16], f"{name}: error {error:.2e}"


@pytest.mark.parametrize("kept", KEPT)
def test_one_full_token_among_empty_ones(kept):
    for dtype, tokens, density in itertools.product(DTYPES, (1, 64, 300, 4097), (0.0, 0.01)):
        case = gpu_case(tokens, 40, 5632, density, dtype)
        case["x"][tokens // 2, :8] = (-torch.eye(8)[0] - float(density > 0)).to(dtype)
        assert_as_good_as_eager(case, capacity=capacity_of(case, kept))


@pytest.mark.parametrize("kept", KEPT)
def test_dense_tokens_between_sparse_ones(kept):
    for tokens, first, last in [(64, 16, 32), (2304, 256, 512), (2304, 300, 1100)]:
        case = gpu_case(tokens, 40, 1376, 0.01, torch.bfloat16, biases=True)
        case["x"][first:last, :8] *= -1
        assert_as_good_as_eager(case, capacity=capacity_of(case, kept))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capacity", [1, 8, 22, 344])
def test_pairs_beyond_the_capacity_are_computed_again(dtype, capacity):
    """Every block, some of them, or none: 21 neurons a token are active, and 344 in some tokens."""
    for gated in (True, False):
        case = gpu_case(2304, 40, 344, 0.06, dtype, gated=gated, biases=True)
        assert_as_good_as_eager(case, capacity=capacity)
        case["x"][300:700, :8] *= -1
        assert_as_good_as_eager(case, capacity=capacity)
    assert_as_good_as_eager(scattered_case(1000, 256, 1024, 0.02, dtype), certain=False, capacity=capacity)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capacity", [1, 4, 24])
@pytest.mark.parametrize("gated", [True, False])
def test_the_state_lies_as_its_layout_says(dtype, capacity, gated):
    """The first blocks that fit, whole, and nothing else (kernels/shared/twell_state.h)."""
    tokens, width = 1000, 344
    g = torch.Generator("cuda").manual_seed(0)
    active_TF = torch.rand(tokens, width, generator=g, device="cuda") < 0.002
    hot_F = torch.arange(width, device="cuda") % 5 == 0  # few: in nearly full tiles all neurons would be listed
    active_TF[256:512] |= hot_F & (torch.rand(256, width, generator=g, device="cuda") < 0.25)
    active_TF[600:620] = False
    case = patterned_case(active_TF, 1024, dtype)
    if not gated:
        case |= {"w_up": case["w_gate"], "w_gate": None}
    state = torch.ops.hf_twell.ffn(*(case[name] for name in NAMES), None, None, None, capacity)[2].cpu()
    truth = [torch.nn.functional.linear(case["x"].float(), case["w_gate" if gated else "w_up"].float()).relu().cpu()]
    if gated:
        truth.append(torch.nn.functional.linear(case["x"].float(), case["w_up"].float()).cpu())

    blocks, groups = math.ceil(tokens / 128), math.ceil(min(width, 256 + 20 * capacity) / 32)
    sizes = (512 * groups, 256 * capacity * len(truth), 64 * groups, math.ceil(4 * groups / 32) * 32, 32, 32)
    assert (128, sum(sizes)) == tuple(torch.ops.hf_twell.cuda_state_block(width, capacity, gated))
    masks, values, neurons, first_pairs, totals, places = state.split([blocks * size for size in sizes])
    bits = (masks.view(torch.int32)[:, None] >> torch.arange(32) & 1).bool().view(-1, 128)  # (entries, tokens)
    values = values.view(dtype).view(-1, len(truth)).float()  # (pairs, relu(gate) and up)
    neurons, first_pairs = neurons.view(torch.int16).int() & 0xFFFF, first_pairs.view(torch.int32)

    kept = entries = pairs = 0
    for block, rows in enumerate(active_TF.cpu().split(128)):
        first, second = rows[:64].any(0), rows[64:].any(0)
        classes = [part.nonzero().flatten() for part in (first & ~second, first & second, ~first & second)]
        listed = torch.cat(classes)
        room = math.ceil(len(listed) / 32) * 32
        count = int(rows.sum())
        if entries + room > blocks * groups * 32 or pairs + count > blocks * 128 * capacity:
            break
        place = places[32 * block : 32 * (block + 1)]
        assert place.view(torch.int32)[:4].tolist() == [*map(len, classes), count]
        assert place.view(torch.int64)[2:].tolist() == [entries, pairs]
        assert torch.equal(neurons[entries : entries + len(listed)], listed.int())
        of_entries = torch.zeros(room, 128, dtype=torch.bool)
        of_entries[: len(listed), : len(rows)] = rows[:, listed].t()
        assert torch.equal(bits[entries : entries + room], of_entries)
        before = of_entries.view(-1, 32 * 128).sum(1).cumsum(0).roll(1)
        before[:1] = 0
        assert first_pairs[entries // 32 : (entries + room) // 32].tolist() == before.tolist()
        entry, token = of_entries.nonzero(as_tuple=True)
        for kind, wide in enumerate(truth):
            expected = wide[128 * block + token, listed[entry]]
            torch.testing.assert_close(values[pairs : pairs + count, kind], expected, rtol=2**-7, atol=2**-8)
        kept, entries, pairs = kept + 1, entries + room, pairs + count
    assert totals.view(torch.int64)[:3].tolist() == [kept, entries, pairs]
    assert kept == {1: 2, 4: 3, 24: blocks}[capacity]


@pytest.mark.parametrize("l1", ["plain", None])
@pytest.mark.parametrize("kept", KEPT)
def test_l1_without_token_weights_and_no_l1(l1, kept):
    for tokens, density, gated in itertools.product((2, 199, 4097), (0.0, 0.02, 1.0), (True, False)):
        case = gpu_case(tokens, 72, 344, density, torch.bfloat16, gated=gated)
        assert_as_good_as_eager(case, l1=l1, capacity=capacity_of(case, kept))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("l1", ["weighted", "plain", None])
def test_the_count_term_beside_l1_and_alone(dtype, gated, l1):
    """Through pairs that were kept, through blocks that were not (too dense, or without room), and through columns."""
    for tokens, density, capacity in itertools.product((2, 199, 4097), ("one", 0.02, 0.5, 1.0), (None, 1, 344)):
        case = near_zero(gpu_case(tokens, 72, 344, density, dtype, gated=gated, biases=tokens == 199))
        assert_as_good_as_eager(case, l1=l1, count=0.02, capacity=capacity)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capacity", [None, 1, 344])
@pytest.mark.parametrize("density", [0.02, 1.0])
def test_the_count_term_is_rounded_once_and_acts_on_the_gate_alone(dtype, capacity, density):
    """Where nothing else presses: of a y without a gradient, dx and the gate's are the term's own."""
    case = near_zero(gpu_case(300, 72, 344, density, dtype, biases=True))
    none = torch.zeros_like(case["x"])
    found = run(cuda_ffn, case, l1=None, count=0.02, grad_y=none, capacity=capacity)
    truth = run(reference.ffn, case, torch.float64, l1=None, count=0.02, grad_y=none)
    for name in ("x", "w_gate", "b_gate"):
        assert truth[name].any()
        assert relative_rms(found[name], truth[name]) < {torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype], name
    for name in ("w_up", "w_down", "b_up"):
        assert not found[name].any(), name


@pytest.mark.parametrize("kept", KEPT)
def test_padding_counts_nothing_in_the_report(kept):
    case = gpu_case(300, 72, 344, 0.05, torch.bfloat16)
    extra = l1_inputs(case)
    extra["token_weight"] = (torch.arange(300, device="cuda") % 3 > 0).float()
    cuda_ffn(**leaves_of(case), **extra, capacity=capacity_of(case, kept)).sum().backward()
    h = torch.relu(case["x"].double() @ case["w_gate"].double().t()) * (case["x"].double() @ case["w_up"].double().t())
    truth = reference.count(h, extra["token_weight"])
    torch.testing.assert_close(extra["tally"].grad, truth, rtol=2**-8, atol=1e-4)
    torch.testing.assert_close(extra["tally"].grad[1:], truth[1:])


@pytest.mark.parametrize("tokens", [63, 300])
@pytest.mark.parametrize("kept", KEPT)
def test_each_subset_of_gradients(tokens, kept):
    case = gpu_case(tokens, 40, 172, 0.05, torch.bfloat16, biases=True)
    capacity = capacity_of(case, kept)
    everything, grad_y = run(cuda_ffn, case, l1="plain", capacity=capacity), grad_of_y(case)
    for count in range(1, len(NAMES) + 1):
        for wanted in itertools.combinations(NAMES, count):
            leaves = leaves_of(case, wanted=wanted)
            extra = l1_inputs(case, weighted=False)
            extra["tally"].requires_grad_(count % 2 == 0)
            cuda_ffn(**leaves, **extra, capacity=capacity).backward(grad_y)
            for name, leaf in leaves.items():
                assert (leaf.grad is not None) == (name in wanted)
                if name in wanted:
                    assert relative_rms(leaf.grad, everything[name]) <= 2**-8, (name, wanted)


@pytest.mark.parametrize("kept", KEPT)
def test_no_tokens_at_all(kept):
    for gated in (True, False):
        case = gpu_case(0, 40, 172, 0.05, torch.bfloat16, gated=gated, biases=True)
        results = run(cuda_ffn, case, capacity=capacity_of(case, kept))
        assert results["x"].shape == (0, 40)
        assert not any(value.any() for value in results.values())


def test_strided_misaligned_and_many_dimensional_inputs():
    case = gpu_case(240, 40, 172, 0.05, torch.bfloat16, biases=True)
    grad_y = grad_of_y(case)
    flat = run(cuda_ffn, case, l1="plain")
    strided = case["x"].view(3, 4, 20, 40).transpose(0, 2).contiguous().transpose(0, 2)
    strided_grad = grad_y.view(3, 4, 20, 40).transpose(0, 2).contiguous().transpose(0, 2)
    results = run(cuda_ffn, case | {"x": strided}, l1="plain", grad_y=strided_grad)
    assert_equal(results | {name: results[name].reshape(240, 40) for name in ("y", "x")}, flat)
    shifted = {}
    for name, tensor in case.items():  # contiguous, but at no 16-byte border
        buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
        shifted[name] = buffer[1:].view(tensor.shape).copy_(tensor).detach().requires_grad_()
    extra = l1_inputs(case, weighted=False)
    cuda_ffn(**shifted, **extra).backward(grad_y)
    assert_equal({name: leaf.grad for name, leaf in shifted.items()}, {name: flat[name] for name in NAMES})
    ones = torch.ones((), dtype=torch.bfloat16, device="cuda").expand(240, 40)  # what y.sum() sends back
    assert_equal(run(cuda_ffn, case, grad_y=ones), run(cuda_ffn, case, grad_y=ones.contiguous()))


def test_a_second_backward_adds_to_the_first():
    case = gpu_case(300, 72, 344, 0.05, torch.bfloat16, biases=True)
    other = first_tokens(gpu_case(300, 72, 344, 0.05, torch.bfloat16, biases=True, seed=1), 130)
    leaves, extra = leaves_of(case, wanted=NAMES[1:]), l1_inputs(case, weighted=False)
    for x in (case["x"], other["x"]):
        cuda_ffn(**(leaves | {"x": x}), **extra).backward(grad_of_y({"x": x}))
    one, two = (run(cuda_ffn, case | {"x": x}, l1="plain") for x in (case["x"], other["x"]))
    for name, leaf in (leaves | extra).items():
        if name in NAMES[1:] or name == "tally":
            assert torch.equal(leaf.grad, one[name] + two[name]), name


@pytest.mark.parametrize("columns", [True, False])
def test_gradients_are_not_copied(columns):
    case = gpu_case(300, 72, 344, 0.05, torch.bfloat16, biases=True)
    leaves = leaves_of(by_columns(case) if columns else case)
    assert_gradients_are_not_copied(leaves.values(), cuda_ffn(**leaves), grad_of_y(case))


@pytest.mark.parametrize("kept", KEPT)
def test_a_graph_kept_for_another_backward(kept):
    case = gpu_case(300, 72, 344, 0.05, torch.bfloat16)
    leaves = leaves_of(case)
    y = cuda_ffn(**leaves, capacity=capacity_of(case, kept))
    wanted = [leaf for leaf in leaves.values() if leaf is not None]
    first, second = (torch.autograd.grad(y, wanted, grad_of_y(case), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_a_bare_call_under_auto_trains_by_kernels_and_fp32_by_pytorch():
    case = gpu_case(300, 72, 344, 0.05, torch.bfloat16)
    assert_equal(run(api.ffn, case), run(cuda_ffn, case))
    wide = {name: None if t is None else t.float() for name, t in case.items()}
    assert_equal(run(api.ffn, wide), run(reference.ffn, wide))
    with pytest.raises(ValueError, match=r"gradients are wanted in torch\.float32; its training kernels take bfloat16"):
        run(cuda_ffn, wide)


def test_repeats_are_equal_in_deterministic_mode(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        for tokens, capacity, density in itertools.product((1, 64, 5000), (8, 64, None, 2048), (0.001, 0.02)):
            case = scattered_case(tokens, 512, 2048, density, torch.bfloat16)
            first = run(cuda_ffn, case, capacity=capacity)
            for _ in range(5):
                assert_equal(run(cuda_ffn, case, capacity=capacity), first)
    finally:
        torch.use_deterministic_algorithms(False)
