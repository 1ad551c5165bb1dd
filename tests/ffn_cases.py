"""Inputs for the operator's tests, whose masks no rounding can change, and the error bound that every backend keeps."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_twell.blocks.batches import runs_of
from hf_twell.ops import api, reference
from hf_twell.ops.runs import Runs

ISAS = ("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "avx512_bf16_wide", "amx")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GRADIENTS = ("y", "x", "w_up", "w_down", "w_gate", "b_up", "b_down", "b_gate", "tally", "unions")
FEW_PAIRS = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-20}
KINDS = 8  # tokens differ in kind, and a neuron's gate is far from zero for each kind


def make_case(tokens, hidden, intermediate, density, dtype, *, gated=True, biases=False, seed=0):
    """Arguments of `api.ffn` by name. density: a share of the pairs, or "one" for a single active pair.

    Shapes: x (T, D) with D > KINDS; w_up, w_gate (F, D); w_down (D, F).
    """
    g = torch.Generator().manual_seed(seed)

    def randn(*shape, scale=1.0):
        return torch.randn(*shape, generator=g) * scale

    active = torch.rand(intermediate, KINDS, generator=g) < (0.0 if density == "one" else density)
    kind = torch.arange(tokens) % KINDS
    if density == "one" and tokens > 0:
        kind %= KINDS - 1
        kind[tokens // 2] = KINDS - 1
        active[intermediate // 3, KINDS - 1] = True
    x = randn(tokens, hidden)
    x[:, :KINDS] = torch.eye(KINDS)[kind]
    first = randn(intermediate, hidden, scale=0.25 / hidden**0.5)
    first[:, :KINDS] = torch.where(active, 2.0, -2.0)
    second = randn(intermediate, hidden, scale=hidden**-0.5)
    return {
        "x": x.to(dtype),
        "w_up": (second if gated else first).to(dtype),
        "w_down": randn(hidden, intermediate, scale=intermediate**-0.5).to(dtype),
        "w_gate": first.to(dtype) if gated else None,
        "b_up": randn(intermediate, scale=0.1).to(dtype) if biases else None,
        "b_down": randn(hidden, scale=0.1).to(dtype) if biases else None,
        "b_gate": randn(intermediate, scale=0.1).to(dtype) if biases and gated else None,
    }


def near_zero(case):
    """The same case with gates within 0.2 of zero, on the same sides of it, where the count term presses."""
    first = "up" if case["w_gate"] is None else "gate"
    scaled = (f"w_{first}", f"b_{first}")
    return {name: t / 16 if name in scaled and t is not None else t for name, t in case.items()}


def exact_gates(case):
    """The same case with gates that every dtype holds, k / 64 for whole k: many tokens of a run are equally strong."""
    first = "up" if case["w_gate"] is None else "gate"
    weight, bias = case[f"w_{first}"].clone(), case[f"b_{first}"]
    sizes = torch.arange(len(weight) * KINDS).view(-1, KINDS) * 7 % 11 + 1
    weight[:, :KINDS] = torch.where(weight[:, :KINDS] > 0, sizes / 64, -sizes / 64).to(weight.dtype)
    weight[:, KINDS:] = 0
    x = case["x"].clone()
    x[:, :KINDS] *= (1 + torch.arange(len(x)) // KINDS % 3).view(-1, 1)
    return {**case, f"w_{first}": weight, f"b_{first}": None if bias is None else torch.zeros_like(bias), "x": x}


PADDING = ("none", "left", "right", "holes")


def make_runs(rows, length, share, padding="none"):
    """Runs of a batch (rows, length), of which some tokens are padding."""
    place = torch.arange(length).expand(rows, length)
    padded = torch.arange(rows).view(-1, 1) * length // (rows + 1)  # none of the first row
    mask = {
        "none": place >= 0,
        "left": place >= padded,
        "right": place < length - padded,
        "holes": (place + padded) % 5 != 2,
    }[padding]
    return runs_of({"input_ids": mask, "attention_mask": mask}, share)


def run(function, case, dtype, *, l1=True, count=0.0, runs: Runs | None = None, grad=True, **options):
    """y and every gradient of one call, in `dtype`; the incoming gradient is the same for every dtype.

    `count`: the count term's scale; 0 for none.
    """
    inputs = {
        name: None if tensor is None else tensor.detach().to(dtype).requires_grad_(grad)
        for name, tensor in case.items()
    }
    tokens, extra = case["x"].shape[:-1], {}
    if l1:
        weight = torch.linspace(0.5, 1.0, tokens.numel()).view(tokens)
        tally = torch.zeros(1 + case["w_up"].shape[0], requires_grad=grad)
        extra = {"l1_scale": torch.tensor(0.03), "token_weight": weight, "tally": tally}
    if count:
        extra["count_scale"] = torch.tensor(count)
    if runs is not None:
        extra |= {"runs": runs, "unions": torch.zeros(1, requires_grad=grad)}
    positional = [inputs.pop(name) for name in ("x", "w_up", "w_down", "w_gate")]
    y = function(*positional, **inputs, **extra, **options)
    results = {"y": y}
    if grad:
        grad_y = torch.randn(y.shape, generator=torch.Generator().manual_seed(7))
        y.backward(grad_y.to(case["x"].dtype).to(dtype))
        leaves = dict(zip(("x", "w_up", "w_down", "w_gate"), positional, strict=True)) | inputs | extra
        results |= {name: leaves[name].grad for name in GRADIENTS[1:] if leaves.get(name) is not None}
    return {name: value.detach() for name, value in results.items()}


def relative_rms(value, truth):
    return ((value.double() - truth.double()).norm() / truth.double().norm()).item()


def cpu_ffn(*args, **options):
    return api.ffn(*args, **options, backend="cpu")


def assert_as_good_as_eager(function, case, count=0.0, runs=None, **options):
    """At most twice the error of same-dtype eager PyTorch against an exact result; zero where that is all zero."""
    dtype = case["x"].dtype
    of_count = {"count": count, "runs": runs}
    truth = run(reference.ffn, case, torch.float64, **of_count)
    eager, ours = run(reference.ffn, case, dtype, **of_count), run(function, case, dtype, **of_count, **options)
    assert ours.keys() == truth.keys()
    few = truth["tally"][1:].count_nonzero() < 64
    for name, value in ours.items():
        assert (value.shape, value.dtype) == (truth[name].shape, eager[name].dtype), name
        if not truth[name].any():
            assert not value.any(), f"{name} must be exactly zero"
            continue
        bound = max(2 * relative_rms(eager[name], truth[name]), 2**-21)
        if few or name == "tally":
            bound = max(bound, FEW_PAIRS[dtype])
        error = relative_rms(value, truth[name])
        assert error <= bound, f"{name}: error {error:.2e}, at most {bound:.2e} is allowed"
        if name in ("w_up", "w_gate") and value.ndim == 2:
            dead = ~truth[name].any(1)
            assert not value[dead].any(), f"{name}: rows without an active pair must be exactly zero"


class Operators(TorchDispatchMode):
    """The operators that PyTorch runs, by name, and where `hf_twell::ffn_backward` left its results."""

    def __init__(self):
        super().__init__()
        self.names, self.gradients = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        self.names.append(str(function))
        if "ffn_backward" in self.names[-1]:
            self.gradients = [tensor.data_ptr() for tensor in results if tensor.numel() > 0]
        return results


def assert_gradients_are_not_copied(leaves, y, grad_y):
    """Backward runs one operator, and its results themselves become `.grad`; the second time they are added."""
    for then in ("aten.detach.default", "aten.add_.Tensor"):
        with Operators() as ran:
            y.backward(grad_y, retain_graph=True)
        assert ran.names == ["hf_twell.ffn_backward.default", *[then] * len(leaves)]
        grads = {leaf.grad.data_ptr() for leaf in leaves}
        assert grads.isdisjoint(ran.gradients) if "add" in then else grads == set(ran.gradients)
