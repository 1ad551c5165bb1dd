"""The compiled CPU kernels: every instruction set, dtype, size and density against an exact result."""

import itertools

import pytest
import torch
from torch import library

import hf_twell
from hf_twell.ops import api, build, reference
from tests import one_step
from tests.conftest import tiny_llama
from tests.ffn_cases import (
    DTYPES,
    KINDS,
    Operators,
    assert_as_good_as_eager,
    assert_gradients_are_not_copied,
    cpu_ffn,
    make_case,
    near_zero,
    relative_rms,
    run,
)

pytestmark = [
    pytest.mark.usefixtures("poisoned_buffers"),
    pytest.mark.skipif(not build.status("cpu", build=True).available, reason=build.status("cpu", build=True).reason),
]


@pytest.mark.parametrize("tokens", [0, 1, 63, 199, 1025])
@pytest.mark.parametrize("density", [0.0, "one", 0.01, 0.5, 1.0])
def test_every_path_is_as_good_as_eager(isa, dtype, tokens, density):
    assert_as_good_as_eager(cpu_ffn, make_case(tokens, 40, 172, density, dtype))


@pytest.mark.parametrize(("gated", "biases"), itertools.product([True, False], [True, False]))
@pytest.mark.parametrize("density", [0.05, 1.0])
def test_odd_sizes_biases_and_no_gate(isa, dtype, gated, biases, density):
    # 37 and 133 are multiples of no vector, tile, panel or cache line.
    for tokens in (3, 70):
        assert_as_good_as_eager(cpu_ffn, make_case(tokens, 37, 133, density, dtype, gated=gated, biases=biases))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("density", [0.01, 0.1, 1.0])
def test_the_count_term_beside_l1_and_alone(isa, dtype, gated, density):
    """Through pairs, those that many tokens share on a matrix unit, recomputed ones and dense tokens."""
    for tokens, capacity in ((3, None), (301, 1), (301, None)):
        case = near_zero(make_case(tokens, 40, 172, density, dtype, gated=gated, biases=True))
        assert_as_good_as_eager(cpu_ffn, case, count=0.02, capacity=capacity)
    with_term, without = (run(cpu_ffn, case, dtype, l1=False, count=count) for count in (0.02, 0.0))
    truth, bare = (run(reference.ffn, case, torch.float64, l1=False, count=count) for count in (0.02, 0.0))
    first = "w_gate" if gated else "w_up"
    of_term = relative_rms(bare[first], truth[first])
    assert of_term > 0.1, "the term is a part of the gradient that shows"
    for name in ("w_up", "w_down"):
        assert name == first or torch.equal(with_term[name], without[name]), "it acts on the gate alone"
    assert relative_rms(with_term[first], truth[first]) < {torch.float32: 1e-5}.get(dtype, 2**-6)


@pytest.mark.parametrize("intermediate", [4864, 5632, 18944])
@pytest.mark.parametrize("tokens", [1, 63, 199])
def test_wide_blocks(dtype, intermediate, tokens):
    assert_as_good_as_eager(cpu_ffn, make_case(tokens, 48, intermediate, 0.01, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("density", [0.02, 1.0])
def test_more_tokens_than_sixteen_bits_count(dtype, density):
    assert_as_good_as_eager(cpu_ffn, make_case(65_537, 16, 96, density, dtype))


@pytest.mark.parametrize("tokens", [2, 20, 199])
@pytest.mark.parametrize("density", [0.02, 1.0])
def test_down_stored_by_columns(dtype, tokens, density):
    case = make_case(tokens, 64, 344, density, dtype, biases=True)
    case["w_down"] = case["w_down"].t().contiguous().t()
    assert_as_good_as_eager(cpu_ffn, case)
    inputs = {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in case.items()}
    w_down = inputs["w_down"].requires_grad_()
    cpu_ffn(inputs["x"], inputs["w_up"], w_down, inputs["w_gate"]).sum().backward()
    assert w_down.grad.stride() == w_down.stride()


@pytest.fixture
def three_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("by_column", [True, False])
def test_rows_longer_than_a_slice_in_threads(isa, dtype, by_column, three_threads):
    """2,085 columns are several of every slice that kernels cut rows into, with something left over."""
    for tokens in (3, 70):
        case = make_case(tokens, 2085, 172, 0.06, dtype, biases=True)
        if by_column:
            case["w_down"] = case["w_down"].t().contiguous().t()
        assert_as_good_as_eager(cpu_ffn, case)


def shared_by_all(case, every):
    """The case in which each so many-th neuron is active for every token, beside those that were active before."""
    first = "w_up" if case["w_gate"] is None else "w_gate"
    case[first][::every, :KINDS] = 2.0
    return case


@pytest.mark.parametrize(("tokens", "hidden"), [(16, 40), (33, 133), (65, 37), (300, 200)])
def test_rows_that_neighbours_share(isa, dtype, tokens, hidden):
    """Products over them, alone and beside gathered pairs; no size is a multiple of a tile, a strip or a panel."""
    for gated, density in ((True, 0.02), (False, 0.0)):
        case = shared_by_all(make_case(tokens, hidden, 335, density, dtype, gated=gated, biases=True), every=11)
        case["w_down"] = case["w_down"].t().contiguous().t()
        assert_as_good_as_eager(cpu_ffn, case)


def runs_matmuls(case):
    with torch.no_grad(), torch.profiler.profile() as profile:
        cpu_ffn(case["x"], case["w_up"], case["w_down"], case["w_gate"])
    return any(event.name == "aten::linear" for event in profile.events())


@pytest.mark.parametrize("tokens", [16, 33, 65, 300])
def test_rows_that_all_share_beside_rows_of_few(isa, tokens):
    """So few that a matrix unit has them, too: one whole tile of rows and five more, which are gathered."""
    case = make_case(tokens, 40, 1005, 0.005, torch.bfloat16, biases=True)
    case["w_gate"][:21, :KINDS] = 2.0
    assert not runs_matmuls(case)
    assert_as_good_as_eager(cpu_ffn, case)


def test_many_dense_tokens_take_kernels_where_they_share_neurons(isa, dtype):
    """As many pairs are active in either case: of the same neurons for all tokens, or of others for each kind."""
    every = 12 if isa == "amx" and dtype == torch.bfloat16 else 4  # above the limit of density, below that by union
    for tokens, alike_pays in ((127, False), (128, True), (1100, True)):
        alike = shared_by_all(make_case(tokens, 40, 320, 0.0, dtype), every)
        different = make_case(tokens, 40, 320, 1 / every, dtype)
        assert runs_matmuls(alike) != alike_pays
        assert runs_matmuls(different)
        changing = {**alike, "x": torch.cat([alike["x"], alike["x"]])}
        changing["x"][tokens:, :KINDS] *= -1  # now the others are active
        assert_as_good_as_eager(cpu_ffn, changing)


@pytest.mark.parametrize("tokens", [16, 300])
def test_neurons_may_be_sorted(isa, tokens):
    """A tenth of them is active for all tokens (with AMX a twentieth): kernels' work, also where they are the first."""
    case = make_case(tokens, 40, 4000, 0.0, torch.bfloat16)
    case["w_gate"][: 200 if isa == "amx" else 400, :KINDS] = 2.0
    assert not runs_matmuls(case)
    assert_as_good_as_eager(cpu_ffn, case)


def test_several_groups_of_neurons_that_many_tokens_share():
    assert_as_good_as_eager(cpu_ffn, make_case(2100, 40, 900, 0.1, torch.bfloat16, biases=True))


def test_an_h_of_zero_has_no_sign_and_is_not_counted(isa, dtype):
    for tokens in (3, 199):
        case = make_case(tokens, 40, 172, 0.06, dtype)
        case["w_up"][::3] = 0
        assert_as_good_as_eager(cpu_ffn, case)


def test_one_full_token_among_empty_ones():
    """It overflows every bounded buffer of its own, and may cost the others nothing in exactness."""
    for dtype in DTYPES:
        case = make_case(300, 40, 1024, 0.0, dtype)
        case["x"][150, :8] = -torch.eye(8)[0].to(dtype)
        assert_as_good_as_eager(cpu_ffn, case)


@pytest.mark.parametrize("first", [256, 2048])
def test_dense_tokens_between_sparse_ones(first):
    """One block of tokens takes the dense path, its neighbours the sparse one: the gradients are sums of both."""
    for dtype in (torch.float32, torch.bfloat16):
        case = make_case(2304, 40, 172, 0.01, dtype, biases=True)
        case["x"][first : first + 256, :8] *= -1
        assert_as_good_as_eager(cpu_ffn, case)


@pytest.mark.parametrize(("tokens", "capacity"), [(199, 1), (199, 3), (199, 172), (900, 1)])
def test_pairs_beyond_the_capacity_are_computed_again(dtype, tokens, capacity, monkeypatch):
    monkeypatch.setattr(api, "saved_capacity", lambda device, intermediate: capacity)
    assert_as_good_as_eager(cpu_ffn, make_case(tokens, 40, 172, 0.06, dtype, biases=True))


def test_saved_state_is_compact():
    case = make_case(512, 64, 5632, 0.005, torch.bfloat16)
    saved = []
    x = case["x"].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        cpu_ffn(x, case["w_up"].requires_grad_(), case["w_down"], case["w_gate"])
    weights = {case[name].data_ptr() for name in ("x", "w_up", "w_down", "w_gate")}
    held = sum(t.numel() * t.element_size() for t in saved if t.data_ptr() not in weights)
    assert held < 0.2 * 512 * 5632 * 2, "less than a fifth of one dense (T, F) tensor"


def test_nan_gates_count_as_active(isa, dtype):
    case = make_case(70, 40, 172, 0.01, dtype)
    case["x"][5] = float("nan")
    y = cpu_ffn(case["x"], case["w_up"], case["w_down"], case["w_gate"])
    assert y[5].isnan().all()
    assert not torch.cat([y[:5], y[6:]]).isnan().any()


def test_noncontiguous_and_many_dimensional_x():
    case = make_case(60, 40, 172, 0.05, torch.bfloat16)
    flat = run(cpu_ffn, case, torch.bfloat16, l1=False, grad=False)["y"]
    x = case["x"].view(3, 4, 5, 40)
    strided = x.transpose(0, 2).contiguous().transpose(0, 2)
    assert not strided.is_contiguous()
    y = cpu_ffn(strided, case["w_up"], case["w_down"], case["w_gate"])
    assert torch.equal(y, flat.view(3, 4, 5, 40))


def test_threads_change_nothing_but_rounding_and_repeats_change_nothing(three_threads):
    case = make_case(130, 96, 1024, 0.03, torch.bfloat16)
    first = run(cpu_ffn, case, torch.bfloat16)
    for name, value in run(cpu_ffn, case, torch.bfloat16).items():
        assert torch.equal(value, first[name]), name
    torch.set_num_threads(1)
    for name, value in run(cpu_ffn, case, torch.bfloat16).items():
        assert relative_rms(value, first[name]) < 2**-8, name


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.float32, 20), (torch.bfloat16, 70)])
def test_only_wanted_gradients_are_made(dtype, tokens):
    case = make_case(tokens, 40, 172, 0.05, dtype, biases=True)
    everything = run(cpu_ffn, case, dtype, l1=False)
    for wanted in ("x", "w_up", "w_down", "w_gate", "b_up", "b_down", "b_gate"):
        inputs = {name: tensor.clone().requires_grad_(name == wanted) for name, tensor in case.items()}
        leaf = inputs[wanted]
        y = cpu_ffn(**inputs)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(dtype))
        torch.testing.assert_close(leaf.grad, everything[wanted])


@pytest.mark.parametrize("by_column", [True, False])
def test_gradients_are_not_copied(by_column):
    case = make_case(20, 40, 172, 0.05, torch.bfloat16, biases=True)
    if by_column:
        case["w_down"] = case["w_down"].t().contiguous().t()
    leaves = {name: tensor.requires_grad_() for name, tensor in case.items()}
    assert_gradients_are_not_copied(leaves.values(), cpu_ffn(**leaves), torch.ones_like(leaves["x"]))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("by_column", [True, False])
def test_opcheck(gated, by_column):
    case = make_case(10, 40, 172, 0.05, torch.float32, gated=gated, biases=True)
    case["x"] = case["x"].view(2, 5, 40)
    if by_column:
        case["w_down"] = case["w_down"].t().contiguous().t()
    order = ("x", "w_up", "w_down", "w_gate", "b_up", "b_down", "b_gate")
    scale, weight = torch.tensor(0.1), torch.rand(2, 5)
    plain = [case[name] for name in order]
    leaves = [None if t is None else t.clone(memory_format=torch.preserve_format).requires_grad_() for t in plain]
    library.opcheck(torch.ops.hf_twell.infer.default, plain)
    library.opcheck(torch.ops.hf_twell.ffn.default, (*plain, None, None, None, 0))
    library.opcheck(torch.ops.hf_twell.ffn.default, (*leaves, scale, weight, torch.zeros(173, requires_grad=True), 16))
    tally = torch.zeros(173, requires_grad=True)
    library.opcheck(torch.ops.hf_twell.ffn.default, (*leaves, None, weight, tally, 16, scale))
    state = torch.ops.hf_twell.ffn(*plain, scale, weight, None, 16)[2]
    x, w_up, w_down, w_gate, b_up, _, b_gate = plain
    for needs in (0, 1, 0b101, 127):
        arguments = (torch.randn(2, 5, 40), state, x, w_up, w_down, w_gate, b_up, b_gate, scale, weight, 16, needs)
        library.opcheck(torch.ops.hf_twell.ffn_backward.default, arguments)
        library.opcheck(torch.ops.hf_twell.ffn_backward.default, (*arguments, scale))


@pytest.mark.parametrize(("backend", "operator"), [("cpu", "ffn_backward"), ("auto", "activation_backward")])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_model_trains_with_the_count_term_by_kernels(backend, operator, micro_batches):
    """Through pairs and through the dense middle, padding included, as autograd has the smooth count itself."""
    model, weight = hf_twell.sparsify(tiny_llama(), backend=backend).train(), 0.5
    penalty, size = hf_twell.L1Penalty(model, weight, term="count"), 8 // micro_batches
    batches = [one_step.pad(one_step.rows()[i : i + size]) for i in range(0, 8, size)]
    with Operators() as ran:
        for batch in penalty.micro_batches(batches):
            model(**batch, num_items_in_batch=one_step.LABELS).loss.backward()
    layers = model.config.num_hidden_layers
    assert ran.names.count(f"hf_twell.{operator}.default") == layers * micro_batches

    truth, gates = hf_twell.sparsify(tiny_llama(), backend="reference").train(), []
    for layer in truth.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda _, __, gate: gates.append(gate))
    batch = one_step.pad(one_step.rows())
    loss = truth(**batch, num_items_in_batch=one_step.LABELS).loss
    counts = [torch.tanh(gate.relu() / 0.2).sum(-1) * batch["attention_mask"] for gate in gates]
    term = weight / layers * sum(count.sum() for count in counts) / batch["attention_mask"].sum()
    without = torch.autograd.grad(term, list(truth.parameters()), retain_graph=True, allow_unused=True)
    (loss + term).backward()
    gradient, wanted = one_step.flat_gradient(model), one_step.flat_gradient(truth)
    assert (gradient - wanted).norm() <= 1e-5 * wanted.norm()
    assert sum(g.square().sum() for g in without if g is not None).sqrt() > 0.1 * wanted.norm(), "the term shows"
    report = penalty.report()
    active = sum(((gate > 0).sum(-1) * batch["attention_mask"]).sum() for gate in gates)
    assert report["l0"] == pytest.approx(active.item() / layers / report["tokens"], rel=1e-6)


def test_a_forced_instruction_set_that_is_missing_is_named(monkeypatch):
    monkeypatch.setenv("HF_TWELL_CPU_ISA", "vector9000")
    with pytest.raises(RuntimeError, match="vector9000 cannot run here; this processor and build take portable"):
        cpu_ffn(torch.zeros(1, 8), torch.zeros(4, 8), torch.zeros(8, 4))
