"""The sparse feed-forward operator and the choice of the backend that computes it."""

import functools
import warnings

import torch

from hf_twell import _density_cpu, build, reference

MAX_HIDDEN = 16384
MAX_INTERMEDIATE = 65536
SMALLEST_H_ELEMENTS = 1 << 17  # below which one pass over h costs more to call than several do


def ffn(
    x,
    w_up,
    w_down,
    w_gate=None,
    *,
    b_up=None,
    b_down=None,
    b_gate=None,
    l1_scale=None,
    token_weight=None,
    tally=None,
    capacity=None,
    backend="auto",
):
    """ReLU feed-forward block, exact at every density.

    Formula: h = relu(x Wg^T + bg) * (x Wu^T + bu), or relu(x Wu^T + bu) without a gate; y = h Wd^T + bd.
    Where a neuron is inactive, 0 times an infinite or NaN weight may give 0 in place of dense arithmetic's NaN.
    With `l1_scale`, backward adds the L1 term's gradient and reports sparsity: see `hf_twell.reference.inject_l1`.

    Shapes:
        x (..., D); w_up, w_gate (F, D); w_down (D, F); b_up, b_gate (F,); b_down (D,); returns (..., D).
        l1_scale () fp32; token_weight x.shape[:-1] fp32, None for ones; tally (1 + F,) fp32 leaf, or None.

    Args:
        capacity: active neurons per token, on average, that forward keeps for backward; a matter of memory and speed
            alone, since backward computes again what did not fit. By default F / 16 on a CPU, F / 44 on a GPU.
        backend: "auto" takes the fastest backend that can compute this call; "reference", "cpu" or "cuda" insist.
            "cuda" computes gradients in bfloat16 and float16 on GPUs of compute capability 9.0; under "auto", calls
            that need others go to "reference", with one warning.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, a capacity below 1, or a backend that was asked
            for by name and cannot compute this.

    Source: arXiv 2603.23198, sections 2 and 3.
    """
    _check_tensors(x, w_up, w_down, w_gate, b_up, b_down, b_gate, token_weight, tally)
    _check_l1_scale(l1_scale, tally)
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity={capacity}; give a number of neurons of at least 1, or None for the default")
    inputs = (x, w_up, w_down, w_gate, b_up, b_down, b_gate)
    biases = {"b_up": b_up, "b_down": b_down, "b_gate": b_gate}
    l1 = {"l1_scale": l1_scale, "token_weight": token_weight, "tally": tally}
    kernels = resolve(backend, x.device.type)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*inputs, tally))
    if kernels == "reference" or not _kernels_take(backend, kernels, needs_grad, *inputs):
        return reference.ffn(x, w_up, w_down, w_gate, **biases, **l1)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        inputs = tuple(None if tensor is None else tensor.to(dtype) for tensor in inputs)
    if not needs_grad:  # nothing reads the report, and the L1 term changes gradients alone
        return torch.ops.hf_twell.infer(*inputs)
    if backend == "auto" and kernels == "cpu":
        x, w_up, w_down, w_gate, b_up, b_down, b_gate = inputs
        if _density_cpu.too_dense_to_train(x, *((w_up, b_up) if w_gate is None else (w_gate, b_gate))):
            # Forward would be as fast here, but backward would compute again what plain matmuls keep.
            return dense_ffn(x, w_up, w_down, w_gate, b_up=b_up, b_down=b_down, b_gate=b_gate, **l1)
    l1_scale, token_weight = (None if t is None else t.to(torch.float32) for t in (l1_scale, token_weight))
    if capacity is None:
        capacity = (saved_capacity_cuda if kernels == "cuda" else saved_capacity_cpu)(w_up.shape[0])
    return torch.ops.hf_twell.ffn(*inputs, l1_scale, token_weight, tally, min(capacity, w_up.shape[0]))[0]


def dense_ffn(
    x, w_up, w_down, w_gate=None, *, b_up=None, b_down=None, b_gate=None, l1_scale=None, token_weight=None, tally=None
):
    """The same block in dense arithmetic: matmuls, with all between them in one pass each way.

    For blocks too dense for `ffn` to pay, of which it is then no slower than compiled PyTorch, and for dtypes that
    `dense_takes`. Arguments as in `ffn`.
    """
    if dense_is_plain(x, w_up):
        return reference.ffn(x, w_up, w_down, w_gate, b_up=b_up, b_down=b_down, b_gate=b_gate)
    linear = torch.nn.functional.linear
    gate, up = linear(x, w_up, b_up), None
    if w_gate is not None:
        gate, up = linear(x, w_gate, b_gate), gate
    l1_scale, token_weight = (None if t is None else t.to(torch.float32) for t in (l1_scale, token_weight))
    return linear(torch.ops.hf_twell.activation(gate, up, l1_scale, token_weight, tally), w_down, b_down)


@torch.compiler.assume_constant_result  # as it stands while a graph is traced, which guards hold it to
def transformed() -> bool:
    """Whether torch.func or forward-mode AD is at work, which the operators know nothing of: tangents would be lost."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def saved_capacity_cpu(intermediate: int) -> int:
    """The CPU backend's default: active neurons per token, on average, that forward keeps for backward."""
    return min(intermediate, max(32, intermediate // 16))


def saved_capacity_cuda(intermediate: int) -> int:
    """The CUDA backend's default, in whole groups of the kernels' lists."""
    return min(intermediate, max(64, (intermediate // 44 + 31) // 32 * 32))


def kernels_train(x) -> bool:
    """Whether x is on a GPU whose kernels also compute gradients in x's dtype, or in autocast's."""
    return x.is_cuda and _training_problem(x) is None


def dense_takes(x) -> bool:
    """Whether kernels compute what lies between a dense block's matmuls, in x's dtype or autocast's."""
    return dtype_of(x) in (torch.bfloat16, torch.float16, *(() if x.is_cuda else (torch.float32,)))


def dense_is_plain(x, w_up) -> bool:
    """Whether `dense_ffn` is plain PyTorch: on a CPU, without gradients, where a kernel's call takes what it saves."""
    intermediate, hidden = w_up.shape
    return x.is_cpu and not torch.is_grad_enabled() and x.numel() * intermediate < SMALLEST_H_ELEMENTS * hidden


def dtype_of(x) -> torch.dtype:
    """What a block computes x in: its own dtype, or autocast's."""
    device = x.device.type
    autocast = torch.is_autocast_enabled(device) and x.dtype != torch.float64  # which autocast leaves alone
    return torch.get_autocast_dtype(device) if autocast else x.dtype


def _training_problem(x) -> str | None:
    dtype = dtype_of(x)
    if dtype not in (torch.bfloat16, torch.float16):
        return f"in {dtype}; its training kernels take bfloat16 and float16: cast the model or use torch.autocast"
    capability = _compute_capability(x.device.index)
    if capability != "9.0":
        return f"on a GPU of compute capability {capability}; its training kernels need 9.0"
    return None


@torch.compiler.assume_constant_result
def _compute_capability(device_index: int) -> str:
    return "{}.{}".format(*torch.cuda.get_device_capability(device_index))


@torch.compiler.assume_constant_result
def resolve(backend: str, device_type: str) -> str:
    """The name of the backend that serves `backend` for tensors on `device_type`; compiles it at first use.

    Raises:
        ValueError: an unknown name, or a backend asked for by name that does not work here.
    """
    if backend == "auto":
        kernels = device_type if device_type in build.BACKENDS else "reference"
        return kernels if build.status(kernels, build=True).available else "reference"
    status = build.status(backend, build=True)
    if not status.available:
        raise ValueError(f"backend {backend!r} does not work here: {status.reason}. Use backend='auto' to fall back.")
    if backend != "reference" and device_type != backend:
        raise ValueError(
            f"backend {backend!r} was asked to compute tensors on {device_type!r}; move them, or use 'auto'"
        )
    return backend


def _kernels_take(backend, kernels, needs_grad, x, *weights) -> bool:
    """Whether these kernels can compute these tensors; if not, "auto" says so once and any other name raises."""
    training_problem = _training_problem(x) if kernels == "cuda" and needs_grad else None
    if training_problem and backend == "auto":
        if not torch.compiler.is_compiling():  # where plain PyTorch is compiled, and training seldom takes kernels
            _warn_once(
                f"hf_twell trains with plain PyTorch: gradients are wanted {training_problem}. Where none are wanted, "
                "use torch.no_grad(); backend='reference' asks for plain PyTorch, without this warning."
            )
        return False
    problem = None
    dtypes = {tensor.dtype for tensor in (x, *weights) if tensor is not None}
    intermediate, hidden = weights[0].shape
    if not dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        problem = f"dtype {x.dtype}; the kernels take float32, bfloat16 and float16"
    elif hidden > MAX_HIDDEN or intermediate > MAX_INTERMEDIATE or hidden == 0 or intermediate == 0:
        problem = f"D = {hidden}, F = {intermediate}; the kernels take 1..{MAX_HIDDEN} and 1..{MAX_INTERMEDIATE}"
    elif transformed():
        problem = "the kernels have no rules for torch.func and forward-mode AD"
    elif training_problem:
        problem = f"gradients are wanted {training_problem}; or train with backend='auto', which uses plain PyTorch"
    if problem is None:
        return True
    if backend != "auto":
        raise ValueError(f"backend {backend!r} cannot compute this: {problem}")
    _warn_once(f"hf_twell computes with plain PyTorch: {problem}.")
    return False


@torch.compiler.assume_constant_result
@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def _check_tensors(x, w_up, w_down, w_gate, b_up, b_down, b_gate, token_weight, tally):
    if w_up.ndim != 2:
        raise ValueError(f"w_up has shape {tuple(w_up.shape)}; expected (F, D), as nn.Linear stores it")
    intermediate, hidden = w_up.shape
    if x.ndim == 0 or x.shape[-1] != hidden:
        raise ValueError(f"x has shape {tuple(x.shape)}; its last size must be {hidden}, the columns of w_up")
    device = x.device
    for name, tensor, shape in (
        ("w_up", w_up, (intermediate, hidden)),
        ("w_down", w_down, (hidden, intermediate)),
        ("w_gate", w_gate, (intermediate, hidden)),
        ("b_up", b_up, (intermediate,)),
        ("b_gate", b_gate, (intermediate,)),
        ("b_down", b_down, (hidden,)),
        ("tally", tally, (1 + intermediate,)),
        ("token_weight", token_weight, x.shape[:-1]),
    ):
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(shape)}")
        if tensor.device != device:
            raise ValueError(f"x is on {device} and {name} on {tensor.device}; move them to one device")
        # Autocast casts all of them; the report and the tokens' weights are float32 beside any dtype.
        mixed = tensor.dtype != x.dtype and name not in ("tally", "token_weight")
        if mixed and not torch.is_autocast_enabled(device.type):
            raise ValueError(f"x is {x.dtype} and {name} is {tensor.dtype}; give both one dtype, or use autocast")


def _check_l1_scale(l1_scale, tally):
    if l1_scale is None:
        if tally is not None:
            raise ValueError("tally was given without l1_scale; to count alone, give l1_scale=torch.zeros(())")
    elif not isinstance(l1_scale, torch.Tensor) or l1_scale.numel() != 1:
        raise ValueError(f"l1_scale is {l1_scale!r}; give a tensor of one element")
