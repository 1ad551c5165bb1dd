"""CUDA training with other tools: opcheck, CUDA graphs, compilers, checkpoints, autocast, streams, models, GPUs."""

import copy
import functools
import importlib.util
import itertools
import math
import subprocess
import sys

import pytest
import torch
from torch import library
from torch.utils.checkpoint import checkpoint

from hf_twell.dispatch import limits
from hf_twell.dispatch.limits import limit
from hf_twell.ops import api, reference
from tests import loss_curves
from tests.conftest import in_two_processes
from tests.ffn_cases import FEW_PAIRS, make_case, relative_rms
from tests.kernels.test_cuda_kernels import (
    NAMES,
    by_columns,
    exact_fp32,  # noqa: F401
    first_tokens,
    gpu_case,
    on_gpu,
    scattered_case,
)
from tests.kernels.test_cuda_models import first_block_and_input, on_reference
from tests.kernels.test_cuda_training import (
    DTYPES,
    assert_equal,
    cuda_ffn,
    grad_of_y,
    l1_inputs,
    leaves_of,
    pytestmark,  # noqa: F401
    run,
)

STEPS = limit("kCudaSampleSteps")  # between two samples
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def state_bytes(*sizes) -> int:
    from hf_twell.ops import kernel_ops  # which can only be imported once the operators are there

    return kernel_ops.cuda_state_bytes(*sizes)


@pytest.fixture(autouse=True)
def loaded():
    api.resolve("cuda", "cuda")


@pytest.fixture
def deterministic(monkeypatch):
    """It also fills fresh memory, so that what a state does not use is the same in every run."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capacity", [16, 172])
def test_opcheck(gated, columns, dtype, capacity):
    case = gpu_case(200, 40, 172, 0.05, dtype, gated=gated, biases=True)
    case["x"] = case["x"].view(2, 100, 40)
    case = by_columns(case) if columns else case
    l1 = l1_inputs(case)
    leaves = leaves_of(case)
    library.opcheck(torch.ops.hf_twell.ffn.default, (*[leaves[name] for name in NAMES], *l1.values(), capacity))
    plain = [case[name] for name in NAMES]
    scale, weight = l1["l1_scale"], l1["token_weight"]
    state = torch.ops.hf_twell.ffn(*plain, scale, weight, None, capacity)[2]
    assert state.numel() == state_bytes(200, 172, capacity, gated)
    x, w_up, w_down, w_gate, b_up, _, b_gate = plain
    for needs in (0, 1, 0b101, 127):
        arguments = (grad_of_y(case), state, x, w_up, w_down, w_gate, b_up, b_gate, scale, weight, capacity, needs)
        library.opcheck(torch.ops.hf_twell.ffn_backward.default, arguments)
        library.opcheck(torch.ops.hf_twell.ffn_backward.default, (*arguments, scale))


@pytest.mark.parametrize("capacity", [None, 2048])
def test_a_captured_step_follows_its_inputs(capacity):
    """Forward and backward, replayed with other tokens and another density than they were captured with."""
    for tokens in (64, 1000):
        sparse, dense = (scattered_case(tokens, 512, 2048, density, torch.bfloat16) for density in (0.01, 0.6))
        leaves, extra, grad_y = leaves_of(sparse), l1_inputs(sparse), grad_of_y(sparse)
        held = {name: leaf for name, leaf in (leaves | extra).items() if leaf is not None and leaf.requires_grad}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            cuda_ffn(**leaves, **extra, capacity=capacity).backward(grad_y)
        torch.cuda.current_stream().wait_stream(stream)
        for leaf in held.values():
            leaf.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = cuda_ffn(**leaves, **extra, capacity=capacity)
            y.backward(grad_y)
        for now in (sparse, dense, sparse):
            with torch.no_grad():
                for name, tensor in now.items():
                    if tensor is not None:
                        leaves[name].copy_(tensor)
            graph.replay()
            results = {"y": y.detach()} | {name: leaf.grad for name, leaf in held.items()}
            assert_equal(results, run(cuda_ffn, now, capacity=capacity))


def test_compiles_without_breaks_and_recompiles():
    case = gpu_case(300, 72, 344, 0.05, torch.bfloat16)

    def step(x, w_up, w_down, w_gate):
        return cuda_ffn(x, w_up, w_down, w_gate) * 2

    def gradients(function, tokens):
        leaves = leaves_of(first_tokens(case, tokens))
        wanted = [leaves[name] for name in ("x", "w_up", "w_down", "w_gate")]
        y = function(*wanted)
        return y, *torch.autograd.grad(y, wanted, grad_of_y(leaves))

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    assert all(map(torch.equal, gradients(compiled, 200), gradients(step, 200)))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (3, 64, 130, 300):
            assert all(map(torch.equal, gradients(compiled, tokens), gradients(step, tokens)))


def held_and_peak(forward, grad_y):
    """Bytes alive between forward and backward, and the most in either, above what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = forward()
    held = torch.cuda.memory_allocated() - before
    y.backward(grad_y)
    return held, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_free_the_state_and_change_no_gradient(use_reentrant):
    tokens, hidden, intermediate, capacity, layers = 8192, 256, 4096, 1024, 6
    cases = [scattered_case(tokens, hidden, intermediate, 0.1, torch.bfloat16) for _ in range(layers)]
    state = state_bytes(tokens, intermediate, capacity, True)
    weights = [leaves_of(case) for case in cases]
    x, grad_y = cases[0]["x"].clone().requires_grad_(), grad_of_y(cases[0])

    def layer(x, index):
        return x + cuda_ffn(**(weights[index] | {"x": x}), capacity=capacity)

    def network(each):
        y = x
        for index in range(layers):
            y = each(y, index)
        return y

    def gradients():
        leaves = [x, *(leaf for some in weights for name, leaf in some.items() if leaf is not None and name != "x")]
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return found

    recompute = functools.partial(checkpoint, layer, use_reentrant=use_reentrant)
    for each in (layer, recompute):  # the allocator and the kernels' workspaces settle
        held_and_peak(lambda each=each: network(each), grad_y)
        gradients()
    held, peak = held_and_peak(lambda: network(layer), grad_y)
    expected = gradients()
    held_less, peak_less = held_and_peak(lambda: network(recompute), grad_y)
    assert held >= layers * state
    assert held_less <= held - 0.95 * layers * state
    assert peak_less <= peak - layers / 2 * state
    found = gradients()
    if not use_reentrant:  # else forward is inference, which may round otherwise
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_of_one_block_gives_equal_gradients(use_reentrant):
    case = gpu_case(300, 72, 344, 0.05, torch.bfloat16, biases=True)

    def checkpointed(x, **weights):
        return checkpoint(lambda x: cuda_ffn(x, **weights), x, use_reentrant=use_reentrant)

    results, expected = run(checkpointed, case), run(cuda_ffn, case)
    assert_equal({k: v for k, v in results.items() if k != "y"}, {k: v for k, v in expected.items() if k != "y"})


def test_the_state_may_wait_on_the_cpu():
    case = gpu_case(1000, 72, 344, 0.05, torch.bfloat16, biases=True)

    def offloaded(**arguments):
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return cuda_ffn(**arguments)

    assert_equal(run(offloaded, case), run(cuda_ffn, case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_trains_fp32_weights(dtype):
    case = gpu_case(300, 72, 344, 0.05, torch.float32, biases=True)
    rounded = {name: t.to(dtype) for name, t in case.items()}

    def cast(function, **arguments):
        with torch.autocast("cuda", dtype):
            return function(**arguments)

    truth = run(reference.ffn, {name: t.double() for name, t in rounded.items()}, grad_y=grad_of_y(rounded))
    eager, ours = (run(functools.partial(cast, f), case, grad_y=grad_of_y(rounded)) for f in (reference.ffn, cuda_ffn))
    assert ours["y"].dtype == dtype
    for name, value in ours.items():
        assert value.dtype == eager[name].dtype, name
        bound = max(2 * relative_rms(eager[name], truth[name]), FEW_PAIRS[dtype] if name == "tally" else 0)
        assert relative_rms(value, truth[name]) <= bound, name


def test_a_gradient_scaler_with_fp16():
    """Updates of fp32 weights by both backends, after a step that overflows and is left out."""
    case = gpu_case(512, 72, 344, 0.05, torch.float32)

    def updates(function):
        leaves = leaves_of(case, wanted=("w_up", "w_down", "w_gate"))
        wanted = {name: leaf for name, leaf in leaves.items() if leaf is not None and leaf.requires_grad}
        optimizer = torch.optim.SGD(wanted.values(), 1e-3)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**50, backoff_factor=2.0**-40)
        for step in range(5):
            extra = l1_inputs(case)
            extra["l1_scale"] = scaler.scale(extra["l1_scale"])
            with torch.autocast("cuda", torch.float16):
                y = function(**leaves, **extra)
            scaler.scale(y.float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == 2.0**10
            assert all(torch.equal(leaf, case[name]) for name, leaf in wanted.items()) == (step == 0)
        return [leaf.detach() - case[name] for name, leaf in wanted.items()]

    for mine, theirs in zip(updates(cuda_ffn), updates(reference.ffn), strict=True):
        assert relative_rms(mine, theirs) <= 2**-7


@two_gpus
def test_a_second_gpu():
    case = make_case(300, 72, 344, 0.05, torch.bfloat16, biases=True)
    grad_y = torch.randn(300, 72, generator=torch.Generator().manual_seed(7))
    results = [run(cuda_ffn, on_gpu(case, device), grad_y=grad_y.to(device)) for device in ("cuda:0", "cuda:1")]
    assert results[1]["w_up"].device == torch.device("cuda:1")
    assert_equal(*[{name: value.cpu() for name, value in result.items()} for result in results])
    assert torch.cuda.current_device() == 0


def test_current_stream():
    """Forward on one stream of its own, backward on the same: autograd sees to that."""
    case, stream = gpu_case(1000, 256, 1024, 0.05, torch.bfloat16), torch.cuda.Stream()
    expected = run(cuda_ffn, case)
    x = torch.zeros_like(case["x"])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # ten milliseconds
        x.copy_(case["x"])
        results = run(cuda_ffn, case | {"x": x})
    stream.synchronize()
    assert_equal(results, expected)


@pytest.mark.parametrize("capacity", [16, 4])
def test_a_backward_that_is_the_first_work_of_autograds_thread(capacity):
    """Which has no context then; here other tests' backward made it one."""
    code = "import torch; from tests.kernels import test_cuda_training as t"
    code += "; case = t.gpu_case(257, 8, 16, 0.1, torch.float16)"
    code += f"; t.assert_equal(*(t.run(t.cuda_ffn, case, capacity={capacity}) for _ in range(2)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_waits_for_the_device():
    for tokens, capacity in itertools.product((1, 64, 1000), (4, None, 344)):
        case = gpu_case(tokens, 72, 344, 0.05, torch.bfloat16, biases=True)
        leaves, extra, grad_y = leaves_of(case), l1_inputs(case), grad_of_y(case)
        cuda_ffn(**leaves, **extra, capacity=capacity).backward(grad_y)
        torch.cuda.set_sync_debug_mode("error")
        try:
            cuda_ffn(**leaves, **extra, capacity=capacity).backward(grad_y)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_what_is_kept_is_compact():
    """At L0 = 0.5 %, forward holds less than a quarter of what dense PyTorch does beside x, y and the weights."""
    case = scattered_case(16_384, 512, 5632, 0.005, torch.bfloat16)
    held = []
    for function in (cuda_ffn, reference.ffn):
        leaves = leaves_of(case)
        held.append(held_and_peak(lambda f=function, some=leaves: f(**some), grad_of_y(case))[0])
    y = case["x"].nbytes
    assert held[0] - y <= 0.25 * (held[1] - y)


# In a model


def few_tokens_pay(monkeypatch):
    monkeypatch.setitem(limits.read(), "kCudaTrainingLimits", ((8, 0.0), (math.inf, 0.1)))


def gradients_of(block, x):
    block(x).float().square().sum().backward()
    found = [weight.grad.clone() for weight in block.parameters()]
    with torch.no_grad():
        for weight in block.parameters():
            weight += 0 * weight.grad
            weight.grad = None
    return found


def test_a_block_moves_over_when_it_is_sparse_and_back(monkeypatch):
    few_tokens_pay(monkeypatch)
    block, x = first_block_and_input()
    block.train()
    ways = []
    for step in range(6 * STEPS):
        if step == 3 * STEPS:
            with torch.no_grad():
                block.gate_proj.weight.copy_(torch.randn_like(block.gate_proj.weight))
        found, expected = gradients_of(block, x), gradients_of(on_reference(block), x)
        assert all(relative_rms(mine, theirs) <= 2**-6 for mine, theirs in zip(found, expected, strict=True))
        torch.cuda.synchronize()
        ways.append(block.twell_state.on_kernels)
    assert [now for before, now in itertools.pairwise(ways) if now != before] == [True, False], ways
    assert copy.deepcopy(block).twell_state.step_choice.density is None


def test_a_training_step_of_a_block_never_waits(monkeypatch):
    few_tokens_pay(monkeypatch)
    block, x = first_block_and_input()
    block.train()
    gradients_of(block, x)
    torch.cuda.synchronize()
    gradients_of(block, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2 * STEPS):
            gradients_of(block, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert block.twell_state.on_kernels


def test_a_compiled_block_trains_by_kernels():
    block, x = first_block_and_input()
    block.train()
    block.twell.backend = "cuda"
    expected = gradients_of(block, x)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            for mine, theirs in zip(gradients_of(compiled, x), expected, strict=True):
                assert relative_rms(mine, theirs) <= 2**-7


@pytest.mark.parametrize("padded", [False, True])
def test_a_compiled_block_counts_what_is_active(padded):
    """At a size from which Inductor fuses sums over tokens with sums over neurons, and then loses some in a cat."""
    tokens, hidden, width = 8192, 64, 1024
    case = gpu_case(tokens, hidden, width, 0.05, torch.bfloat16)
    weights = {name: case[name].requires_grad_() for name in ("w_up", "w_down", "w_gate")}
    tally = torch.zeros(1 + width, device="cuda", requires_grad=True)
    token_weight = torch.ones(tokens, device="cuda") if padded else None
    if padded:
        token_weight[::3] = 0

    def report(ffn):
        tally.grad = None
        scale = torch.zeros((), device="cuda")
        ffn(case["x"], **weights, l1_scale=scale, token_weight=token_weight, tally=tally).float().sum().backward()
        return tally.grad.clone()

    expected = report(reference.ffn)
    assert expected[1:].sum() > 0
    torch._dynamo.reset()
    compiled = torch.compile(reference.ffn, fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(report(compiled), expected, rtol=1e-3, atol=0)


def assert_same_curve(mine, theirs, steps):
    """50-step means within half a percent, and the kernels ran in every block of every step."""
    assert (mine["calls"], theirs["calls"]) == (steps * loss_curves.SIZES["num_hidden_layers"], 0)
    ratios = loss_curves.window_means(mine["loss"]) / loss_curves.window_means(theirs["loss"])
    assert (ratios - 1).abs().max() <= 0.005, ratios
    assert mine["density"] < 0.01
    assert mine["density"] == pytest.approx(theirs["density"], rel=0.1)


def test_a_thousand_steps_from_dense_to_sparse_follow_the_reference():
    steps = 1000
    assert_same_curve(*[loss_curves.train(backend, steps=steps) for backend in ("cuda", "reference")], steps)


@two_gpus
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero2", "zero3"])
@pytest.mark.timeout(600)
def test_two_gpus_follow_the_reference(kind, tmp_path):
    pytest.importorskip("accelerate")
    if kind.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    steps, curves = 500, []
    for name in ("kernels", "reference"):
        in_two_processes("tests.loss_curves", kind, name, tmp_path / name, steps)
        curves.append(torch.load(tmp_path / name, weights_only=False))
    wrapped = {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}.get(kind, "DEEPSPEED")
    assert [curve["wrapped"] for curve in curves] == [wrapped] * 2
    assert_same_curve(*curves, steps)
