"""The sparse feed-forward operator and the choice of the backend that computes it."""

import functools
import warnings

import torch

from hf_twell.ops import build, policy, policy_cpu, policy_cuda, reference, sampling
from hf_twell.ops.checks import QUANTIZED, check_l1_scale, check_quantize_x, check_tensors, name_of
from hf_twell.ops.limits import limit

SMALLEST_H_ELEMENTS = 1 << 17  # of h, (T, F): below, calling one kernel takes longer than several of PyTorch's


def ffn(
    x,
    w_up,
    w_down,
    w_gate=None,
    *,
    b_up=None,
    b_down=None,
    b_gate=None,
    s_up=None,
    s_down=None,
    s_gate=None,
    l1_scale=None,
    token_weight=None,
    tally=None,
    capacity=None,
    quantize_x=False,
    backend="auto",
):
    """ReLU feed-forward block, exact at every density.

    Formula: h = relu(x Wg^T + bg) * (x Wu^T + bu), or relu(x Wu^T + bu) without a gate; y = h Wd^T + bd.
    Where a neuron is inactive, 0 times an infinite or NaN weight may give 0 in place of dense arithmetic's NaN.
    8-bit weights (int8 or float8_e4m3fn, all of one) have a scale for each row: the block is that of the weights
    s_n w_nk, and x stays as it is, unless `quantize_x` asks for x_t = s_t v_t in gate and up, as torchao's
    Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()) has it: v_t the e4m3 values and s_t = max|x_t| / 448
    the scale of token t (`hf_twell.ops.reference.quantized_rows`). h is not quantized, as torchao's is.
    With `l1_scale`, backward adds the L1 term's gradient and reports sparsity: see `hf_twell.ops.reference.inject_l1`.

    Shapes:
        x (..., D); w_up, w_gate (F, D); w_down (D, F); b_up, b_gate (F,); b_down (D,); returns (..., D).
        s_up, s_gate (F,) or (F, 1), s_down (D,) or (D, 1), float32: where the weights are 8-bit, all of them.
        l1_scale () fp32; token_weight x.shape[:-1] fp32, None for ones; tally (1 + F,) fp32 leaf, or None.

    Args:
        capacity: active neurons per token, on average, that forward keeps for backward; a matter of memory and speed
            alone, since backward computes again what did not fit. By default F / 16 on a CPU, F / 44 on a GPU.
        quantize_x: whether x is quantized, in calls of more than 64 tokens: a matmul of fewer is bound by the bytes of
            its weights, so nothing would be gained there. For float8_e4m3fn weights, and without gradients. "cuda"
            does so on GPUs of compute capability 9.0, for an x in bfloat16 or float16 and D a multiple of 16.
        backend: "auto" takes the fastest backend that can compute this call; "reference", "cpu" or "cuda" insist.
            "cuda" computes gradients in bfloat16 and float16 on GPUs of compute capability 9.0; under "auto", calls
            that need others go to "reference", with one warning. 8-bit weights: the kernels take them where no
            gradients are wanted, "cpu" int8 alone, "cuda" for more than 64 tokens (on 9.0 with D a multiple of 16,
            192) by dequantizing them in each call, as "reference" does.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, a capacity below 1, quantize_x beside other
            weights than float8_e4m3fn or where gradients are wanted, or a backend that was asked for by name and
            cannot compute this.

    Source: arXiv 2603.23198, sections 2 and 3; of quantized x, torchao 0.18.
    """
    scales = (s_up, s_down, s_gate)
    check_tensors(x, w_up, w_down, w_gate, b_up, b_down, b_gate, *scales, token_weight, tally)
    check_l1_scale(l1_scale, tally)
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity={capacity}; give a number of neurons of at least 1, or None for the default")
    if quantize_x:
        x = x.to(dtype_of(x))  # autocast's, before anything is quantized
    inputs = (x, w_up, w_down, w_gate, b_up, b_down, b_gate)
    beside = {"b_up": b_up, "b_down": b_down, "b_gate": b_gate, "s_up": s_up, "s_down": s_down, "s_gate": s_gate}
    l1 = {"l1_scale": l1_scale, "token_weight": token_weight, "tally": tally}
    kernels = resolve(backend, x.device.type)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*inputs, tally))
    if quantize_x:
        check_quantize_x(w_up, needs_grad)
    if kernels == "reference" or not _kernels_take(backend, x.device.type, needs_grad, *inputs, quantize_x=quantize_x):
        return reference.ffn(x, w_up, w_down, w_gate, **beside, **l1, quantize_x=quantize_x)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        inputs = tuple(t if t is None or t.dtype in QUANTIZED else t.to(dtype) for t in inputs)
    if not needs_grad:  # nothing reads the report, and the L1 term changes gradients alone
        return torch.ops.hf_twell.infer(*inputs, *scales, *((True,) if quantize_x else ()))
    if backend == "auto" and x.is_cpu:
        x, w_up, w_down, w_gate, b_up, b_down, b_gate = inputs
        if _too_dense_to_train(x, *((w_up, b_up) if w_gate is None else (w_gate, b_gate))):
            # Kernels' forward would be as fast, but their backward computes again what plain matmuls keep.
            return dense_ffn(x, w_up, w_down, w_gate, b_up=b_up, b_down=b_down, b_gate=b_gate, **l1)
    l1_scale, token_weight = (None if t is None else t.to(torch.float32) for t in (l1_scale, token_weight))
    if capacity is None:
        capacity = (policy_cuda if x.is_cuda else policy_cpu).saved_capacity(w_up.shape[0])
    return torch.ops.hf_twell.ffn(*inputs, l1_scale, token_weight, tally, min(capacity, w_up.shape[0]))[0]


def dense_ffn(
    x, w_up, w_down, w_gate=None, *, b_up=None, b_down=None, b_gate=None, l1_scale=None, token_weight=None, tally=None
):
    """The same block by PyTorch's matmuls, and one kernel each way for all that lies between them.

    For blocks too dense for `ffn` to pay, in a dtype that `dense_takes`. It is no slower than compiled PyTorch.
    Arguments as in `ffn`.
    """
    if dense_is_plain(x, w_up):
        return reference.ffn(x, w_up, w_down, w_gate, b_up=b_up, b_down=b_down, b_gate=b_gate)
    linear = torch.nn.functional.linear
    gate, up = linear(x, w_up, b_up), None
    if w_gate is not None:
        gate, up = linear(x, w_gate, b_gate), gate
    l1_scale, token_weight = (None if t is None else t.to(torch.float32) for t in (l1_scale, token_weight))
    return linear(torch.ops.hf_twell.activation(gate, up, l1_scale, token_weight, tally), w_down, b_down)


@torch.compiler.assume_constant_result  # Dynamo's own guards trace a graph anew when the answer changes
def transformed() -> bool:
    """Whether torch.func or forward-mode AD is at work: the operators have no rules for them, and lose tangents."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def kernels_train(x) -> bool:
    """Whether x is on a GPU whose kernels also compute gradients in x's dtype, or in autocast's."""
    return x.is_cuda and _training_problem(x) is None


def linears_quantize(x) -> bool:
    """Whether an x on a GPU that is to be quantized is best left to torchao's linears.

    No kernel of ours quantizes it, but there are tensor cores for e4m3, which plain PyTorch's matmuls leave idle.
    """
    return _quantizing_problem(x) is not None and float(_compute_capability(x.device.index)) >= 8.9


def dense_takes(x) -> bool:
    """Whether kernels compute what lies between a dense block's matmuls, in x's dtype or autocast's."""
    return dtype_of(x) in (torch.bfloat16, torch.float16, *(() if x.is_cuda else (torch.float32,)))


def dense_is_plain(x, w_up) -> bool:
    """Whether `dense_ffn` calls no kernel: on a CPU without gradients, where h is so small that none would pay."""
    intermediate, hidden = w_up.shape
    return x.is_cpu and not torch.is_grad_enabled() and x.numel() * intermediate < SMALLEST_H_ELEMENTS * hidden


def dtype_of(x) -> torch.dtype:
    """What a block computes x in: its own dtype, or autocast's."""
    device = x.device.type
    autocast = torch.is_autocast_enabled(device) and x.dtype != torch.float64  # which autocast leaves alone
    return torch.get_autocast_dtype(device) if autocast else x.dtype


def too_large(intermediate: int, hidden: int) -> str | None:
    """Why a block of these sizes is too large for the kernels of any device, or None."""
    largest = limit("kMaxHidden"), limit("kMaxWidth")
    if 0 < hidden <= largest[0] and 0 < intermediate <= largest[1]:
        return None
    return f"D = {hidden}, F = {intermediate}; the kernels take 1..{largest[0]} and 1..{largest[1]}"


def _training_problem(x) -> str | None:
    """Why the CUDA kernels compute no gradients for x, or None: the end of a sentence "gradients are wanted ..."."""
    dtype = dtype_of(x)
    if dtype not in (torch.bfloat16, torch.float16):
        return f"in {dtype}; its training kernels take bfloat16 and float16: cast the model or use torch.autocast"
    capability = _compute_capability(x.device.index)
    if capability != "9.0":
        return f"on a GPU of compute capability {capability}; its training kernels need 9.0"
    return None


def _quantizing_problem(x) -> str | None:
    """Why the CUDA kernels do not quantize x, or None.

    How many tokens there are is asked last: a compiled graph is not guarded by it where the answer would be the same.
    """
    capability, dtype = _compute_capability(x.device.index), dtype_of(x)
    hidden, most = x.shape[-1], reference.MAX_TOKENS_PLAIN_X
    if capability == "9.0" and hidden % 16 == 0 and dtype in (torch.bfloat16, torch.float16):
        return None
    if x.numel() <= most * hidden:
        return None
    return (
        f"x of more than {most} tokens is to be quantized, in {dtype} with D = {hidden} on a GPU of compute "
        f"capability {capability}; the kernels quantize bfloat16 and float16 with D a multiple of 16 on 9.0"
    )


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
        for name, device in build.DEVICE_OF.items():  # in every call of a block: no list, no generator
            if device == device_type and build.status(name, build=True).available:
                return name
        return "reference"
    status = build.status(backend, build=True)
    if not status.available:
        raise ValueError(f"backend {backend!r} does not work here: {status.reason}. Use backend='auto' to fall back.")
    if backend != "reference" and device_type != build.DEVICE_OF[backend]:
        raise ValueError(
            f"backend {backend!r} was asked to compute tensors on {device_type!r}; move them, or use 'auto'"
        )
    return backend


def _kernels_take(backend, device_type, needs_grad, x, *weights, quantize_x=False) -> bool:
    """Whether the device's kernels can compute these tensors; if not, "auto" says so once and any other name raises."""
    training_problem = _training_problem(x) if needs_grad and device_type == "cuda" else None
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
    kind = weights[0].dtype  # where it is an 8-bit one, the others' too
    quantized = kind in QUANTIZED
    if not dtypes <= {torch.float32, torch.bfloat16, torch.float16, *((kind,) if quantized else ())}:
        problem = f"dtype {x.dtype}; the kernels take float32, bfloat16 and float16"
    elif kind == torch.float8_e4m3fn and device_type == "cpu":
        problem = "float8_e4m3fn weights on a CPU; the kernels there take int8"
    elif quantized and needs_grad:
        problem = f"gradients are wanted through {name_of(kind)} weights; the kernels compute none: use torch.no_grad()"
    elif sizes_problem := too_large(intermediate, hidden):
        problem = sizes_problem
    elif quantize_x and (quantizing_problem := _quantizing_problem(x)):
        problem = quantizing_problem
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


def _too_dense_to_train(x, w_gate, b_gate=None) -> bool:
    """Whether plain matmuls train faster on a CPU. Equal inputs get equal answers, so recomputation repeats the choice.

    Always False in a compiled graph, which cannot sample the density.
    """
    if torch.compiler.is_compiling() or x.numel() == 0:
        return False
    tokens, density = x.numel() // x.shape[-1], sampling.sampled_density(x, w_gate, b_gate)
    return not policy.takes_kernels(tokens, w_gate.numel(), x.dtype, "cpu", density, training=True)


@torch.compiler.assume_constant_result
@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)
