"""`api.ffn` as users and patched modules call it: the choice of a backend, autocast, checkpointing, compilation."""

import contextlib
import re

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import hf_twell
from hf_twell.dispatch import key as dispatch_key
from hf_twell.dispatch import limits
from hf_twell.dispatch.activity import active_share
from hf_twell.ops import api, build, reference
from tests.conftest import tiny_llama
from tests.ffn_cases import KINDS, Operators, assert_as_good_as_eager, make_case, relative_rms, run
from tests.rounding import rounding

pytestmark = pytest.mark.numeric

needs_cpu_kernels = pytest.mark.skipif(
    not build.status("cpu", build=True).available, reason=build.status("cpu", build=True).reason
)


def sparse_block(hidden=48, intermediate=688, density=0.03, dtype=torch.float32, seed=0):
    """A patched Llama block whose gates are sparse and far from zero, and an input for it."""
    case = make_case(40, hidden, intermediate, density, dtype, seed=seed)
    model = tiny_llama(hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=1)
    block = hf_twell.sparsify(model.to(dtype)).model.layers[0].mlp
    for name in ("up", "down", "gate"):
        getattr(block, f"{name}_proj").weight.data = case[f"w_{name}"].clone()
    return block, case["x"].view(2, 20, hidden).clone()


@needs_cpu_kernels
@pytest.mark.parametrize("density", [0.02, 0.9])
def test_auto_runs_the_kernels_where_they_pay(density, monkeypatch):
    case, calls = make_case(64, 40, 688, density, torch.bfloat16), []
    monkeypatch.setattr(api, "dense_ffn", lambda *a, _f=api.dense_ffn, **k: calls.append(1) or _f(*a, **k))
    run(api.ffn, case, torch.bfloat16)
    assert len(calls) == (density > 0.5)
    run(api.ffn, case, torch.bfloat16, backend="cpu")
    assert len(calls) == (density > 0.5), "a backend by name insists"
    monkeypatch.undo()
    assert_as_good_as_eager(api.ffn, case)


@needs_cpu_kernels
@pytest.mark.parametrize("gated", [True, False])
def test_biases_count_where_density_decides(gated, monkeypatch):
    """Without them nine in ten neurons would be active."""
    case, calls = make_case(64, 40, 688, 0.9, torch.float32, gated=gated, biases=True), []
    case["b_gate" if gated else "b_up"] -= 9
    monkeypatch.setattr(api, "dense_ffn", lambda *a, _f=api.dense_ffn, **k: calls.append(1) or _f(*a, **k))
    run(api.ffn, case, torch.float32)
    assert not calls


@needs_cpu_kernels
def test_dense_evaluation_of_few_tokens_is_plain(monkeypatch):
    monkeypatch.undo()  # sizes as users have them
    block, x = sparse_block(density=0.9, dtype=torch.bfloat16)
    for tokens, one_pass in ((4, False), (200, True)):
        with torch.no_grad(), Operators() as ran:
            block.eval()(x.reshape(-1, 48)[:1].expand(tokens, -1))
        assert ("hf_twell.activation.default" in ran.names) == one_pass


@needs_cpu_kernels
def test_nothing_is_kept_for_a_backward_that_cannot_come():
    case = make_case(5, 40, 172, 0.05, torch.float32)
    case["w_up"].requires_grad_()
    for grad, operator in ((torch.no_grad, "infer"), (torch.inference_mode, "infer"), (torch.enable_grad, "ffn")):
        with grad(), Operators() as ran:
            api.ffn(**case, backend="cpu")
        assert ran.names == [f"hf_twell.{operator}.default"]


@needs_cpu_kernels
@pytest.mark.parametrize("training", [True, False])
def test_a_block_insists_on_a_backend_by_name(training):
    block, x = sparse_block()
    block.double().train(training).twell.backend = "cpu"
    with pytest.raises(ValueError, match=r"backend 'cpu' cannot compute this: dtype torch\.float64"):
        block(x.double())


def test_without_kernels_auto_falls_back_and_a_name_insists(monkeypatch):
    broken = build.BackendStatus("cpu", False, "no C++ compiler found")
    monkeypatch.setitem(build._outcomes, "cpu", broken)
    case = make_case(5, 40, 172, 0.05, torch.float32)
    expected = run(reference.ffn, case, torch.float32)
    for name, value in run(api.ffn, case, torch.float32).items():
        assert torch.equal(value, expected[name])
    with pytest.raises(ValueError, match=r"backend 'cpu' does not work here: no C\+\+ compiler found"):
        api.ffn(case["x"], case["w_up"], case["w_down"], backend="cpu")


@needs_cpu_kernels
def test_what_the_kernels_cannot_take_is_refused_by_name_and_falls_back_under_auto():
    x, w = torch.randn(3, 8).double(), torch.randn(4, 8).double()
    with pytest.raises(ValueError, match=r"dtype torch\.float64; the kernels take float32, bfloat16 and float16"):
        api.ffn(x, w, w.t(), backend="cpu")
    api._warn_once.cache_clear()  # whatever tests came before
    with pytest.warns(UserWarning, match=r"computes with plain PyTorch: dtype torch\.float64"):
        api.ffn(x, w, w.t())
    with pytest.raises(ValueError, match=re.escape("x has shape (3, 7); its last size must be 8")):
        api.ffn(torch.randn(3, 7), w, w.t())
    with pytest.raises(ValueError, match="'cuda'"):
        api.ffn(x.float(), w.float(), w.float().t(), backend="cuda")
    says = "backend 'cpu' was asked to compute tensors on 'meta'; move them, or use 'auto'"
    with pytest.raises(ValueError, match=says):
        api.ffn(x.to("meta"), w.to("meta"), w.t().to("meta"), backend="cpu")
    with pytest.raises(ValueError, match="x is on cpu and w_up on meta; move them to one device"):
        api.ffn(x, w.to("meta"), w.t())


@needs_cpu_kernels
def test_a_patched_block_agrees_with_its_stock_one_in_every_mode():
    block, x = sparse_block()
    truth = reference.ffn(x, block.up_proj.weight, block.down_proj.weight, block.gate_proj.weight).detach()
    block.eval()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert relative_rms(block(x), truth) < 1e-6
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = block(x)
        assert y.dtype == torch.bfloat16
        assert relative_rms(y, truth) < 2**-7


@needs_cpu_kernels
@pytest.mark.parametrize("density", [0.03, 0.9])
def test_biases_of_a_block_count(density):
    case = make_case(40, 48, 688, density, torch.float32, biases=True)
    model = tiny_llama(hidden_size=48, intermediate_size=688, num_hidden_layers=1, mlp_bias=True)
    block, results = hf_twell.sparsify(model).model.layers[0].mlp, []
    for name in ("up", "down", "gate"):
        linear = getattr(block, f"{name}_proj")
        linear.weight.data, linear.bias.data = case[f"w_{name}"], case[f"b_{name}"]
    for block.twell.backend in ("auto", "reference"):
        with torch.no_grad():
            evaluated = [block.eval()(case["x"]) for _ in range(2)]
        trained = block.train()(case["x"])
        gradients = torch.autograd.grad(trained.square().sum(), block.parameters())
        results.append([*evaluated, trained, *gradients])
    for ours, truth in zip(*results, strict=True):
        assert relative_rms(ours, truth) < 1e-6


class MovesMemory(TorchDispatchMode):
    """Gives a weight new memory while an operator computes with it, as another thread's first call does."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.moved = weight, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function).startswith("hf_twell."):
            self.moved += 1
            self.weight.data = torch.full_like(self.weight, torch.nan)
        return function(*args, **(kwargs or {}))


@needs_cpu_kernels
@pytest.mark.parametrize("density", [0.03, 0.5])
def test_evaluation_in_threads_keeps_the_memory_it_computes_with(density):
    block, x = sparse_block(density=density)
    with torch.no_grad():
        truth = block.eval()(x)
        block(x)
        with MovesMemory(block.down_proj.weight) as moves:
            y = block(x)
    assert moves.moved == 1
    assert torch.equal(y, truth)


def tangent(function, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


@needs_cpu_kernels
@pytest.mark.parametrize("density", [0.03, 0.5])
def test_function_transforms_and_forward_mode_are_exact(density):
    block, x = sparse_block(density=density)
    weights = block.up_proj.weight.detach(), block.down_proj.weight.detach(), block.gate_proj.weight.detach()
    functions = {
        "jvp": lambda f: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
        "dual numbers": lambda f: tangent(f, x),
        "vmap": lambda f: torch.func.vmap(f)(x),
        "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(x),
    }
    blocks = {"block": block, "ffn": lambda x: api.ffn(x, *weights)}
    for training in (True, False):
        block.train(training)
        for transform, apply in functions.items():
            truth = apply(lambda x: reference.ffn(x, *weights))
            for name, function in blocks.items():
                for mode in (torch.enable_grad, torch.no_grad):
                    with mode():
                        # Not to the last bit: libraries order sums by shape and memory, on some processors alone.
                        apart = relative_rms(apply(function), truth)
                        assert apart <= rounding(2 * sum(weights[0].shape)), (transform, name, training, mode)
    compiled = torch.compile(functions["jvp"], backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(block), functions["jvp"](block))
        assert relative_rms(torch.compile(block, backend="aot_eager", fullgraph=True)(x), block(x)) < 1e-6
    with pytest.raises(ValueError, match=r"no rules for torch\.func"):
        torch.func.jvp(lambda x: api.ffn(x, *weights, backend="cpu"), (x,), (x,))


@needs_cpu_kernels
@pytest.mark.parametrize("density", [0.03, 0.5])
def test_second_derivatives_are_refused_except_by_the_reference(density):
    block, x = sparse_block(density=density)
    x.requires_grad_()
    for backend in ("auto", "reference"):
        block.twell.backend = backend
        (slope,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
        objective = slope.square().sum() + block.up_proj.weight.sum()
        if backend == "reference":
            objective.backward()
        else:
            with pytest.raises(NotImplementedError, match="no second derivatives"):
                objective.backward()


@needs_cpu_kernels
@pytest.mark.parametrize("density", [0.03, 0.5])
def test_the_l1_term_takes_one_number(density):
    case = {name: value for name, value in make_case(20, 48, 100, density, torch.float32).items() if value is not None}
    tally = torch.zeros(101, requires_grad=True)
    for scale in (0.1, torch.full((2,), 0.1)):
        with pytest.raises(ValueError, match="give a tensor of one element"):
            api.ffn(**case, l1_scale=scale, tally=tally)
    with pytest.raises(ValueError, match="tally was given without l1_scale"):
        api.ffn(**case, tally=tally)


@needs_cpu_kernels
@pytest.mark.parametrize("density", [0.03, 0.5])
def test_gradients_of_an_evaluated_block_in_threads_keep_the_memory_they_compute_with(density):
    """As where one thread generates and another scores without `no_grad`."""
    block, x = sparse_block(density=density)
    results = []
    for mode in (contextlib.nullcontext(), MovesMemory(block.eval().down_proj.weight)):
        before = block.down_proj.weight.data
        inputs = x.clone().requires_grad_()
        with mode:
            y = block(inputs)
            y.sum().backward()
        results.append((y.detach(), inputs.grad, block.down_proj.weight.grad))
        block.down_proj.weight.data = before
        block.zero_grad()
    assert mode.moved >= 1
    for value, truth in zip(*results, strict=True):
        assert torch.equal(value, truth)


@needs_cpu_kernels
@pytest.mark.parametrize("density", [0.03, 0.5])
def test_the_l1_term_takes_masks_and_numbers_of_other_dtypes(density, monkeypatch):
    monkeypatch.undo()  # sizes as users have them
    case, results = make_case(20, 48, 100, density, torch.float32), []
    mask = torch.arange(20) % 3 > 0
    for scale, weight in ((torch.tensor(0.5), mask.float()), (torch.tensor(0.5, dtype=torch.float64), mask.long())):
        x, tally = case["x"].clone().requires_grad_(), torch.zeros(101, requires_grad=True)
        y = api.ffn(**(case | {"x": x}), l1_scale=scale, token_weight=weight, tally=tally)
        results.append((y.detach(), *torch.autograd.grad(y.sum(), (x, tally))))
    assert all(map(torch.equal, *results))


@needs_cpu_kernels
@pytest.mark.parametrize("name", ["w_up", "w_down", "w_gate", "b_up", "b_down", "b_gate"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_mixed_dtypes_are_refused_except_under_autocast(name, backend):
    w = torch.randn(16, 8)
    tensors = {"w_up": w, "w_down": w.t(), "w_gate": w, "b_up": w[:, 0], "b_down": w[0], "b_gate": w[:, 0]}
    tensors = {key: value.bfloat16() for key, value in tensors.items()} | {name: tensors[name]}
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=f"x is torch.bfloat16 and {name} is torch.float32; give both one dtype"):
        api.ffn(x, **tensors, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        assert api.ffn(x, **tensors, backend=backend).dtype == torch.bfloat16


@needs_cpu_kernels
@pytest.mark.parametrize("name", ["w_down", "w_gate", "b_up", "b_down", "b_gate", "tally", "token_weight"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_shapes_that_do_not_fit_are_refused_by_name(name, backend):
    x, w = torch.randn(3, 8), torch.randn(16, 8)
    tensors = {"w_up": w, "w_down": w.t(), "w_gate": w, "b_up": w[:, 0], "b_down": w[0], "b_gate": w[:, 0]}
    tensors |= {"l1_scale": torch.tensor(0.1), "tally": torch.zeros(17), "token_weight": torch.ones(3)}
    api.ffn(x, **tensors, backend=backend)
    right, wrong = tensors[name].shape, tensors[name][1:].shape
    with pytest.raises(ValueError, match=re.escape(f"{name} has shape {tuple(wrong)}; expected {tuple(right)}")):
        api.ffn(x, **(tensors | {name: tensors[name][1:]}), backend=backend)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_what_is_no_matrix_or_has_no_size_is_refused(backend):
    w = torch.randn(16, 8)
    with pytest.raises(ValueError, match=re.escape("w_up has shape (8,); expected (F, D)")):
        api.ffn(torch.randn(3, 8), w[0], w.t(), backend=backend)
    with pytest.raises(ValueError, match=re.escape("x has shape (); its last size must be 8")):
        api.ffn(torch.tensor(1.0), w, w.t(), backend=backend)


@needs_cpu_kernels
@pytest.mark.parametrize(("hidden", "intermediate"), [(16_385, 2), (1, 65_537), (0, 4), (8, 0)])
def test_sizes_beyond_the_kernels_are_refused_by_name_and_fall_back_under_auto(hidden, intermediate):
    x, w_up, w_down = torch.randn(3, hidden), torch.randn(intermediate, hidden), torch.randn(hidden, intermediate)
    says = f"D = {hidden}, F = {intermediate}; the kernels take 1..16384 and 1..65536"
    with pytest.raises(ValueError, match=f"backend 'cpu' cannot compute this: {says}"):
        api.ffn(x, w_up, w_down, backend="cpu")
    api._warn_once.cache_clear()  # whatever tests came before
    with pytest.warns(UserWarning, match=says) as caught:
        results = [api.ffn(x, w_up, w_down) for _ in range(2)]
    assert len(caught) == 1, "once"
    assert all(torch.equal(y, reference.ffn(x, w_up, w_down)) for y in results)


def test_autocast_trains_fp32_weights():
    block, x = sparse_block()
    with torch.autocast("cpu", torch.bfloat16):
        block(x).float().square().sum().backward()
    mine = {name: p.grad.clone() for name, p in block.named_parameters()}
    block.zero_grad()
    block.twell.backend = "reference"
    with torch.autocast("cpu", torch.bfloat16):
        block(x).float().square().sum().backward()
    for name, p in block.named_parameters():
        assert mine[name].dtype == torch.float32
        assert relative_rms(mine[name], p.grad) < 2**-6, name


@needs_cpu_kernels
@pytest.mark.parametrize(
    ("tokens", "frozen", "kernels"), [(1, False, False), (40, False, False), (1, True, True), (800, False, True)]
)
def test_autocast_casts_weights_once_where_stock_blocks_do(tokens, frozen, kernels):
    """As text is generated: many calls of few tokens in one context, which keeps its casts of trainable weights."""
    block, _ = sparse_block(density=0.01)
    block.eval().requires_grad_(not frozen)
    x = make_case(tokens, 48, 688, 0.01, torch.float32)["x"]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        first = block(x)
        with Operators() as ran:
            assert torch.equal(block(x), first)
    assert ("hf_twell.infer.default" in ran.names) == kernels
    casts = ran.names.count("aten._to_copy.default")
    assert casts == (4 if kernels else 2), "x and the three weights, or x for either projection as in stock blocks"


@needs_cpu_kernels
@pytest.mark.parametrize("amx", [True, False])
def test_density_decides_in_the_dtype_of_autocast(amx, monkeypatch):
    monkeypatch.setattr(dispatch_key, "device_class", lambda kind, index=None: (kind, "amx" if amx else ""))
    block, _ = sparse_block(density=0.1)
    x = make_case(800, 48, 688, 0.1, torch.float32)["x"]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Operators() as ran:
        block.eval()(x)
    assert ("hf_twell.infer.default" in ran.names) == (not amx), "matrix units make dense bfloat16 matmuls cheap"


@needs_cpu_kernels
def test_compiles_without_breaks_and_recompiles():
    block, x = sparse_block()
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    y = compiled(x)
    y.square().sum().backward()
    grads = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    eager = block(x)
    eager.square().sum().backward()
    assert torch.equal(y, eager)
    for grad, p in zip(grads, block.parameters(), strict=True):
        assert torch.equal(grad, p.grad)
    block.zero_grad()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (3, 4, 17):
            compiled(torch.randn(2, tokens, 48))


@needs_cpu_kernels
def test_down_proj_lies_by_columns_in_evaluation_only(tmp_path):
    block, x = sparse_block()
    weight, values = block.down_proj.weight, block.down_proj.weight.detach().clone()
    block.eval()
    with torch.inference_mode():
        first = block(x)
        assert weight.stride() == (1, 48)
        assert torch.equal(weight, values)
        assert torch.equal(block(x), first)
    assert block.down_proj.weight is weight
    assert not weight.is_inference()
    block.train()
    block(x).sum().backward()
    assert weight.stride() == weight.grad.stride() == (688, 1)
    assert torch.equal(weight, values)
    block.eval().twell_state.recent.look_in = 0  # the next call looks at the density
    with torch.no_grad():
        block(x)
    assert weight.stride() == (688, 1), "a gradient waits for its optimizer step"


@needs_cpu_kernels
@pytest.mark.parametrize("evaluate", [torch.inference_mode, torch.no_grad])
def test_a_model_made_in_inference_mode_stays_whole(evaluate):
    """Its weights are inference tensors, and other code that uses them (a hooked projection, a merge) still can."""
    with torch.inference_mode():
        block, x = sparse_block()
    with evaluate():
        first = block.eval()(x)
        weight = block.down_proj.weight
        assert weight.stride() == (1, 48)
        assert weight.is_inference()
        assert weight.view_as(weight).t().shape == (688, 48)
        block.down_proj.register_forward_hook(lambda *_: None)
        torch.testing.assert_close(block(x), first)


@needs_cpu_kernels
def test_down_proj_changes_its_order_without_gradients_in_evaluation_and_back_for_its_own():
    block, x = sparse_block()
    weight, orders = block.down_proj.weight, []
    for training, gradients, of_weight in (
        (True, False, True),  # as re-entrant checkpointing runs forward
        (False, True, False),  # frozen, where gradients of others are wanted
        (False, False, False),
        (False, True, False),
        (False, True, True),
    ):
        block.training = training
        weight.requires_grad_(of_weight)
        with torch.set_grad_enabled(gradients):
            block(x)
        orders.append(weight.stride())
    assert orders == [(688, 1), (688, 1), (1, 48), (1, 48), (688, 1)]


def set_density(block, percent):
    gate = block.gate_proj.weight.data
    gate[:, :KINDS] = torch.where(torch.arange(len(gate)) % 100 < percent, 2.0, -2.0)[:, None]


@needs_cpu_kernels
def test_between_sparse_and_dense_down_proj_keeps_its_order():
    block, x = sparse_block()
    orders = []
    for percent in (14, 3, 14, 97, 14):
        set_density(block.eval(), percent)
        block.twell_state.recent.look_in = 0  # the next call looks at the density
        with torch.no_grad():
            block(x)
        assert block.twell_state.recent.density == pytest.approx(percent / 100, abs=0.02)
        orders.append(block.down_proj.weight.stride())
    assert orders == [(688, 1), (1, 48), (1, 48), (688, 1), (688, 1)]


@needs_cpu_kernels
@torch.no_grad()
def test_a_density_that_eager_calls_sampled_compiles_nothing_anew():
    block, x = sparse_block()
    torch._dynamo.reset()
    compiled = torch.compile(block.eval(), fullgraph=True, backend="eager")
    set_density(block, 14)
    compiled(x)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for percent in (14, 97):
            set_density(block, percent)
            block.twell_state.recent.look_in = 0  # the next call looks at the density
            truth = block(x)
            assert relative_rms(compiled(x), truth) < 1e-6


@needs_cpu_kernels
@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad])
def test_no_tokens_at_all_in_evaluation(grad):
    block, x = sparse_block()
    with grad():
        y = block.eval()(x[:0])
    assert (y.shape, y.dtype) == ((0, 20, 48), torch.float32)


@needs_cpu_kernels
@pytest.mark.parametrize(
    ("backend", "dtype"), [("auto", torch.float32), ("cpu", torch.float32), ("auto", torch.bfloat16)]
)
def test_small_blocks_keep_plain_matmuls_in_evaluation(backend, dtype, monkeypatch):
    monkeypatch.undo()  # sizes as users have them
    block, x = sparse_block(dtype=dtype)
    plain = backend == "auto" and dtype == torch.float32
    block.eval().twell.backend = backend
    calls = []
    monkeypatch.setattr(api, "ffn", lambda *a, _f=api.ffn, **k: calls.append(1) or _f(*a, **k))
    with torch.no_grad():
        y = block(x[:, :1])
    assert (len(calls), block.down_proj.weight.stride()) == ((0, (688, 1)) if plain else (1, (1, 48)))
    truth = reference.ffn(x[:, :1], block.up_proj.weight, block.down_proj.weight, block.gate_proj.weight)
    assert relative_rms(y, truth) < (1e-6 if dtype == torch.float32 else 2**-7)
    calls.clear()
    block.train()(x[:, :1])
    assert len(calls) == 1, "in training the operator chooses"


@needs_cpu_kernels
def test_down_proj_stays_put_in_a_process_group():
    block, x = sparse_block()
    block.eval()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with torch.no_grad():
            block(x)
        assert block.down_proj.weight.stride() == (688, 1)
    finally:
        torch.distributed.destroy_process_group()


@needs_cpu_kernels
def test_down_proj_stays_put_where_other_processes_share_it():
    block, x = sparse_block()
    block.eval().share_memory()
    with torch.no_grad():
        block(x)
    assert block.down_proj.weight.is_shared()
    assert block.down_proj.weight.stride() == (688, 1)


def in_a_buffer(block):
    weight = block.down_proj.weight
    buffer = torch.cat([torch.zeros(7), weight.detach().t().flatten()])
    weight.data = buffer[7:].view(688, 48).t()


def waits_for_an_optimizer(block):
    block.down_proj.weight.grad = torch.zeros_like(block.down_proj.weight)


SHARED = {"processes": lambda block: block.share_memory(), "buffer": in_a_buffer, "gradient": waits_for_an_optimizer}


@needs_cpu_kernels
@pytest.mark.parametrize("by", SHARED)
def test_training_leaves_down_proj_where_others_reach_it(by):
    block, x = sparse_block()
    with torch.no_grad():
        block.eval()(x)
    SHARED[by](block)
    weight = block.down_proj.weight
    place = weight.data_ptr()
    block.train()(x).sum().backward()
    assert (weight.data_ptr(), weight.stride()) == (place, (1, 48))


@needs_cpu_kernels
@pytest.mark.parametrize("repeats", [1, 2])
def test_down_proj_lies_by_rows_where_tokens_are_dense(repeats):
    block, x = sparse_block()
    block.eval()
    many = x.repeat(repeats, repeats, 1)
    with torch.no_grad():
        block(many)
        assert block.down_proj.weight.stride() == (1, 48)
        block.gate_proj.weight.neg_()  # 3 % active before, 97 % now
        for _ in range(limits.limit("kCpuSampleCalls")):  # the density is sampled now and then
            y = block(many)
        assert block.down_proj.weight.stride() == (688, 1)
        truth = reference.ffn(many, block.up_proj.weight, block.down_proj.weight, block.gate_proj.weight)
    assert relative_rms(y, truth) < 1e-6


@needs_cpu_kernels
@torch.no_grad()
def test_a_block_that_is_too_dense_looks_again_at_each_sample_and_for_another_shape(monkeypatch):
    monkeypatch.setitem(limits.read(), "kCpuSmallestH", 1 << 17)  # as users have it
    block, x = sparse_block()
    many, gate = x.repeat(2, 2, 1), block.eval().gate_proj.weight
    gate.neg_()  # 97 % active
    for _ in range(2 * limits.limit("kCpuSampleCalls")):
        block(many)
    assert (block.twell_state.last_call.shape, block.twell_state.last_call.compute) == (many.shape, None)
    assert block.twell_state.recent.look_in < block.twell_state.last_call.weight, "the next call looks"
    block(x)
    assert block.twell_state.last_call.shape == x.shape
    gate.neg_()
    for _ in range(limits.limit("kCpuSampleCalls")):
        y = block(many)
    assert block.twell_state.recent.density < 0.1
    assert block.twell_state.last_call.compute is not None
    assert relative_rms(y, reference.ffn(many, block.up_proj.weight, block.down_proj.weight, gate)) < 1e-6


@needs_cpu_kernels
@torch.no_grad()
def test_a_block_first_called_with_too_few_tokens_for_kernels_is_sampled_once_there_are_more(monkeypatch):
    monkeypatch.undo()  # as users have it
    block, x = sparse_block()
    for _ in range(3):
        block.eval()(x[:1, :1])
    assert block.twell_state.recent.density is None
    block(x.repeat(2, 2, 1))
    assert block.twell_state.recent.density == pytest.approx(0.03, abs=0.02)


@needs_cpu_kernels
def test_a_model_saves_and_reloads_alike_after_evaluation(tmp_path):
    model = hf_twell.sparsify(tiny_llama(intermediate_size=688)).eval()
    for layer in model.model.layers:
        case = make_case(1, 32, 688, 0.02, torch.float32)
        layer.mlp.gate_proj.weight.data = case["w_gate"]
        layer.post_attention_layernorm.weight.data[8:] *= 0.01
    tokens = torch.randint(1, 96, (2, 24))
    with torch.no_grad():
        logits = model(tokens).logits
    model.save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(stock(tokens).logits, logits, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("every", [2, 8, 11, 64])
def test_the_sampled_density_is_not_that_of_one_kind_of_neurons(every):
    """Strides over a layer whose every 8th neuron is active meet all of these or none."""
    weight = torch.full((2048, 1), -1.0)
    weight[::every] = 1.0
    estimate = active_share(torch.ones(8, 1), weight).item()
    assert abs(estimate - 1 / every) <= 4 / 256


@pytest.mark.parametrize(("sequences", "length"), [(64, 2048), (8, 1024), (1, 512), (33, 48), (1, 3)])
def test_the_sampled_density_is_not_that_of_first_tokens(sequences, length):
    """As in real text, the first tokens of each 1,024 are dense; strides over whole sequences meet all or none."""
    x = torch.full((sequences, length, 1), -1.0)
    x.view(-1, 1)[torch.arange(sequences * length) % min(length, 1024) < length // 64] = 1.0
    truth = (x > 0).float().mean().item()
    estimate = active_share(x, torch.ones(256, 1), kind="Cuda").item()
    assert abs(estimate - truth) <= 3 / 64
