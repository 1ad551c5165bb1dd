"""The sparse feed-forward operator and the choice of the backend that computes it."""

import functools
import warnings
from typing import Any

import torch

from hf_twell.dispatch.activity import UNKNOWN
from hf_twell.dispatch.choose import Way, choose, max_density_of_size, problem, training_problem
from hf_twell.dispatch.constant import assume_constant_result
from hf_twell.dispatch.key import EIGHT_BIT, CallKey, dtype_of, key_of
from hf_twell.dispatch.training import sampled_on_cpu, saved_capacity
from hf_twell.ops import build, reference
from hf_twell.ops.checks import check_quantize_x, check_runs, check_scales_of_terms, check_tensors
from hf_twell.ops.runs import Runs


def ffn(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    w_gate: torch.Tensor | None = None,
    *,
    b_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    b_gate: torch.Tensor | None = None,
    s_up: torch.Tensor | None = None,
    s_down: torch.Tensor | None = None,
    s_gate: torch.Tensor | None = None,
    l1_scale: torch.Tensor | None = None,
    count_scale: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    tally: torch.Tensor | None = None,
    runs: Runs | None = None,
    unions: torch.Tensor | None = None,
    capacity: int | None = None,
    quantize_x: bool = False,
    backend: str = "auto",
    key: CallKey | None = None,
    way: Way | None = None,
) -> torch.Tensor:
    """ReLU feed-forward block, exact at every density.

    Formula: h = relu(x Wg^T + bg) * (x Wu^T + bu), or relu(x Wu^T + bu) without a gate; y = h Wd^T + bd.
    Where a neuron is inactive, 0 times an infinite or NaN weight may give 0 in place of dense arithmetic's NaN.
    8-bit weights (int8 or float8_e4m3fn, all of one) have a scale for each row: the block is that of the weights
    s_n w_nk, and x stays as it is, unless `quantize_x` asks for x_t = s_t v_t in gate and up, as torchao's
    Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()) has it: v_t the e4m3 values and s_t = max|x_t| / 448
    the scale of token t (`hf_twell.ops.reference.quantized_rows`). h is not quantized, as torchao's is.
    With `l1_scale`, backward adds the L1 term's gradient and reports sparsity: see `hf_twell.ops.reference.inject_l1`.
    With `count_scale` it adds the count term's, by `inject_count` of that module, and reports the same. With `runs`
    besides, it adds that of runs of neighbouring tokens, and reports to `unions` what they activate.

    Shapes:
        x (..., D); w_up, w_gate (F, D); w_down (D, F); b_up, b_gate (F,); b_down (D,); returns (..., D).
        s_up, s_gate (F,) or (F, 1), s_down (D,) or (D, 1), float32: where the weights are 8-bit, all of them.
        l1_scale, count_scale () fp32; token_weight x.shape[:-1] fp32, None for ones; tally (1 + F,) fp32 leaf, or None.
        runs: those of x's tokens, x seen as (T, D); unions (1,) fp32 leaf or None.

    Args:
        capacity: active neurons per token, on average, that forward keeps for backward; a matter of memory and speed
            alone, since backward computes again what did not fit. By default F / 16 on a CPU, F / 44 on a GPU. There F
            keeps whole columns of 64 tokens instead, which takes less time where neighbours share their neurons, and
            which it does with `runs` whatever this says.
        quantize_x: whether x is quantized, in calls of more than 64 tokens: a matmul of fewer is bound by the bytes of
            its weights, so nothing would be gained there. For float8_e4m3fn weights, and without gradients. "cuda"
            does so on GPUs of compute capability 9.0, for an x in bfloat16 or float16 and D a multiple of 16.
        backend: "auto" takes the fastest backend that can compute this call; "reference", "cpu" or "cuda" insist.
            "cuda" computes gradients in bfloat16 and float16 on GPUs of compute capability 9.0; under "auto", calls
            that need others go to "reference", with one warning. 8-bit weights: the kernels take them where no
            gradients are wanted, "cpu" int8 alone, "cuda" for more than 64 tokens (on 9.0 with D a multiple of 16,
            192) by dequantizing them in each call, as "reference" does.
        key: the call's, of a caller who has made it for a backend that has kernels; None: it is made here.
        way: what `hf_twell.dispatch.choose.choose` has answered a caller who knows the block's activity; None: it is
            asked here.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, a capacity below 1, quantize_x beside other
            weights than float8_e4m3fn or where gradients are wanted, or a backend that was asked for by name and
            cannot compute this.

    Source: arXiv 2603.23198, sections 2 and 3; of quantized x, torchao 0.18.
    """
    scales = (s_up, s_down, s_gate)
    check_tensors(x, w_up, w_down, w_gate, b_up, b_down, b_gate, *scales, token_weight, tally)
    check_scales_of_terms(l1_scale, count_scale, tally)
    check_runs(x, count_scale, runs, unions)
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity={capacity}; give a number of neurons of at least 1, or None for the default")
    if quantize_x:
        x = x.to(dtype_of(x))  # autocast's, before anything is quantized
    inputs: tuple[torch.Tensor | None, ...] = (x, w_up, w_down, w_gate, b_up, b_down, b_gate)
    beside: dict[str, Any] = {
        "b_up": b_up,
        "b_down": b_down,
        "b_gate": b_gate,
        "s_up": s_up,
        "s_down": s_down,
        "s_gate": s_gate,
    }
    terms: dict[str, Any] = {
        "l1_scale": l1_scale,
        "count_scale": count_scale,
        "token_weight": token_weight,
        "tally": tally,
    }
    of_runs: dict[str, Any] = {} if runs is None else {"runs": runs, "unions": unions}
    if key is not None:
        needs_grad = key.training and torch.is_grad_enabled()
    else:
        needs_grad = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (*inputs, tally, unions)
        )
    if quantize_x:
        check_quantize_x(w_up, needs_grad)
    if key is None and resolve(backend, x.device.type) != "reference":
        asked = backend != "auto"
        has_runs = needs_grad and runs is not None
        key = key_of(x, w_up, w_down, training=needs_grad, runs=has_runs, quantize_x=quantize_x, asked=asked)
    if key is None or not _kernels_take(key, backend):
        return reference.ffn(x, w_up, w_down, w_gate, **beside, **terms, **of_runs, quantize_x=quantize_x)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        inputs = tuple(t if t is None or t.dtype in EIGHT_BIT else t.to(dtype) for t in inputs)
    x, w_up, w_down, w_gate, b_up, b_down, b_gate = inputs
    # A caller in eager evaluation has given the way by a density that it has looked at; else the operator does so.
    looked = way is not None and not (key.compiled or key.training or torch.is_grad_enabled())
    if way is None:
        first = (w_up, b_up) if w_gate is None else (w_gate, b_gate)
        way = choose(key, sampled_on_cpu(key, x, *first) if key.training else UNKNOWN)
    if way != "kernels":
        beside |= {"b_up": b_up, "b_down": b_down, "b_gate": b_gate}
        if way == "plain":
            return reference.ffn(x, w_up, w_down, w_gate, **beside, **terms, **of_runs)
        return dense_ffn(x, w_up, w_down, w_gate, b_up=b_up, b_down=b_down, b_gate=b_gate, **terms)
    if not needs_grad:  # nothing reads the report, and the terms change gradients alone
        most = 1.0 if looked else max_density_of_size(key)
        return torch.ops.hf_twell.infer(*inputs, *scales, quantize_x, most)
    l1_scale, count_scale, token_weight = _in_float32(l1_scale, count_scale, token_weight)
    width = w_up.shape[0]
    capacity = min(capacity or saved_capacity(x.device.type, width), width)
    run, size = (None, None) if runs is None else (runs.run, runs.size)
    if runs is not None and x.is_cuda:  # whose kernels that keep pairs know no runs
        capacity = width
    return torch.ops.hf_twell.ffn(*inputs, l1_scale, token_weight, tally, capacity, count_scale, run, size, unions)[0]


def dense_ffn(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    w_gate: torch.Tensor | None = None,
    b_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    b_gate: torch.Tensor | None = None,
    *,
    l1_scale: torch.Tensor | None = None,
    count_scale: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    tally: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same block by PyTorch's matmuls, and one kernel each way for all that lies between them.

    For blocks too dense for `ffn` to pay, in a dtype of `hf_twell.dispatch.choose.dense_dtypes`. It is no slower than
    compiled PyTorch. Arguments as in `ffn`.
    """
    linear = torch.nn.functional.linear
    gate, up = linear(x, w_up, b_up), None
    if w_gate is not None:
        gate, up = linear(x, w_gate, b_gate), gate
    if not (l1_scale is None and count_scale is None and token_weight is None):
        l1_scale, count_scale, token_weight = _in_float32(l1_scale, count_scale, token_weight)
    return linear(torch.ops.hf_twell.activation(gate, up, l1_scale, token_weight, tally, count_scale), w_down, b_down)


def _in_float32(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.to(torch.float32) for tensor in tensors]


@assume_constant_result  # Dynamo's own guards trace a graph anew when the answer changes
def transformed() -> bool:
    """Whether torch.func or forward-mode AD is at work: the operators have no rules for them, and lose tangents."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


@assume_constant_result
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


def _kernels_take(key: CallKey, backend: str) -> bool:
    """Whether the device's kernels can compute such a call; if not, "auto" says so once and any other name raises."""
    if backend == "auto" and (gradients := training_problem(key)):
        if not key.compiled:  # where plain PyTorch is compiled, and training seldom takes kernels
            _warn_once(
                f"hf_twell trains with plain PyTorch: gradients are wanted {gradients}. Where none are wanted, "
                "use torch.no_grad(); backend='reference' asks for plain PyTorch, without this warning."
            )
        return False
    found = problem(key)
    if found is None and transformed():
        found = "the kernels have no rules for torch.func and forward-mode AD"
    if found is None:
        return True
    if backend != "auto":
        raise ValueError(f"backend {backend!r} cannot compute this: {found}")
    _warn_once(f"hf_twell computes with plain PyTorch: {found}.")
    return False


@assume_constant_result
@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)
