"""A projection's weight as the operator takes it: a plain one, or torchao's 8-bit values and their scales."""

import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:  # nothing here needs Transformers
    from hf_twell.blocks.architectures import FfnForm

# torchao's classes whose values some kernel reads: of which type these are, and on which devices it does.
_READ = {
    "Int8Tensor": (torch.int8, ("cpu", "cuda")),
    "Float8Tensor": (torch.float8_e4m3fn, ("cuda",)),
}

# Who puts another on a class, for all its modules at once (to quantize or to watch them), is seen by this.
OWN_FORWARDS = {nn.Linear: nn.Linear.forward, nn.ReLU: nn.ReLU.forward}


class Operands(NamedTuple):
    """What the operator takes beside x, in its order: weights, biases, and the scales of 8-bit weights."""

    w_up: torch.Tensor
    w_down: torch.Tensor
    w_gate: torch.Tensor | None
    b_up: torch.Tensor | None
    b_down: torch.Tensor | None
    b_gate: torch.Tensor | None
    s_up: torch.Tensor | None = None
    s_down: torch.Tensor | None = None
    s_gate: torch.Tensor | None = None


def first_of(operands: Operands) -> tuple:
    """(weight, bias, scales) of the projection whose sign says which neurons are active."""
    if operands.w_gate is None:
        return operands.w_up, operands.b_up, operands.s_up
    return operands.w_gate, operands.b_gate, operands.s_gate


def operands_of(
    modules: Mapping[str, nn.Module], form: "FfnForm", read: Callable[[nn.Module], tuple | None]
) -> Operands | None:
    """What `read`, one of the two functions below, gives of up, down and gate; None unless it reads all of them."""
    up, down = read(modules[form.up]), read(modules[form.down])
    if form.fused:
        gate, up = (None, None) if up is None else _halves(up)
    else:
        gate = (None, None, None) if form.gate is None else read(modules[form.gate])
    if up is None or down is None or gate is None:
        return None
    if len(up) == 2:
        return Operands(up[0], down[0], gate[0], up[1], down[1], gate[1])
    return Operands(up[0], down[0], gate[0], up[1], down[1], gate[1], up[2], down[2], gate[2])


def _halves(parameters: tuple) -> tuple[tuple, tuple]:
    """Gate's and up's rows of one linear's parameters: views, so nothing is copied and gradients reach the whole."""
    halves = [(None, None) if part is None else part.chunk(2) for part in parameters]
    return tuple(half[0] for half in halves), tuple(half[1] for half in halves)


# These run in every call, and what they read is read again by the guards of a compiled model: 28 layers had guards of
# 0.4 ms a call, where stock blocks have 0.24, and have 0.33 now. So no more is read than decides, and of attributes
# only a module's own: its parameters as attributes would take an uncompiled call as long as a small matmul.
def plain_parameters(linear: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """(weight, bias) where the projection is what they say; else None."""
    parameters = linear._parameters
    weight = parameters.get("weight")
    plain = (
        type(linear) is nn.Linear
        and not is_hooked(nn.Linear, linear)
        and type(weight) in (nn.Parameter, torch.Tensor)
        and not weight.is_meta
        and weight.ndim == 2  # what ZeRO-3 has not gathered, or FSDP has flattened, is a vector
        and "bias" in parameters
    )
    return (weight, parameters["bias"]) if plain else None


def quantized_parameters(linear: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor] | None:
    """(values (N, K), bias, float32 scales (N, 1)) of a weight that torchao has quantized by rows; else None.

    By its Int8WeightOnlyConfig or, on CUDA, its Float8WeightOnlyConfig or Float8DynamicActivationFloat8WeightConfig
    (`quantizes_x` tells which), where CPU kernels read int8 alone. They are what torchao's tensor holds, and no copies.
    """
    parameters = linear._parameters
    if type(linear) is not nn.Linear or is_hooked(nn.Linear, linear) or "bias" not in parameters:
        return None
    held = quantized_values(parameters.get("weight"))
    return None if held is None else (held[0], parameters["bias"], held[1])


def quantized_values(weight: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(values, scales) of a weight that is a tensor of torchao's and that kernels read on its device; else None.

    It has one float32 scale a row, and leaves x as it is, or asks for e4m3 with a scale a token.
    """
    kind = type(weight)
    if kind.__name__ not in _READ or kind.__module__ != "torchao.quantization":
        return None
    dtype, devices = _READ[kind.__name__]
    values, scale = weight.qdata, weight.scale
    rows = values.ndim == 2 and values.dtype == dtype and scale.shape == (values.shape[0], 1)
    asked, int8 = weight.act_quant_kwargs, dtype == torch.int8
    # fp8 has no scales of x beside those of its quantization.
    x_as_read = (asked is None and weight.act_pre_scale is None) if int8 else (asked is None or _by_token(asked))
    read = rows and x_as_read and scale.dtype == torch.float32 and values.device.type in devices
    return (values, scale) if read else None


def _by_token(asked: Any) -> bool:
    """Whether what torchao is to do with x is what `hf_twell.ops.ffn` does with `quantize_x`."""
    rows = type(asked.granularity).__name__ == "PerRow" and asked.granularity.dim == -1
    bounds = asked.hp_value_lb is not None or asked.hp_value_ub is not None
    return rows and not bounds and asked.float8_dtype == torch.float8_e4m3fn


def quantizes_x(linear: nn.Module) -> bool:
    """Whether x is to be quantized for a projection that `quantized_parameters` reads."""
    return linear._parameters["weight"].act_quant_kwargs is not None


def quantize_x_alike(*linears: nn.Module) -> bool:
    """Whether one kernel can read the x of all of these, as `quantized_parameters` reads each: (gate,) up and down.

    Gate and up want it quantized or neither does. Down may want its own, h, quantized too, which kernels leave out.
    """
    *first, down = map(quantizes_x, linears)
    return all(first) or not (any(first) or down)


def linear_of(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The projection's own result, but for rows of zeros that torchao quantizes: 0 / 0 makes NaN of them, not 0.

    A token without active neurons is such a row of down's input.
    """
    y = linear(x)
    weight: Any = linear._parameters.get("weight") if type(linear) is nn.Linear else None
    if type(weight).__name__ != "Float8Tensor" or weight.act_quant_kwargs is None:
        return y
    bias = linear._parameters["bias"]
    nothing = y.new_zeros(()) if bias is None else bias.to(y.dtype)
    return torch.where(x.abs().amax(-1, keepdim=True) != 0, y, nothing)


def reads_any_order(linear: nn.Module) -> bool:
    """False for int8 values that lie by columns: Inductor's own matmul does not take them."""
    held = quantized_parameters(linear)
    return held is None or held[0].dtype != torch.int8 or held[0].is_contiguous()


def is_hooked(cls: type[nn.Module], module: nn.Module) -> bool:
    """Whether calling a module of this class, one of `OWN_FORWARDS`, does anything but what PyTorch's own does."""
    if not has_forward_of(cls, module) or cls.forward is not OWN_FORWARDS[cls]:
        return True
    # By length, and not by attribute: of those Dynamo guards neither, and would reuse its code for a layer with hooks.
    own = vars(module)
    if torch.is_grad_enabled() and (len(own["_backward_hooks"]) or len(own["_backward_pre_hooks"])):
        return True
    return bool(len(own["_forward_hooks"]) or len(own["_forward_pre_hooks"]))


def has_forward_of(cls: type[nn.Module], module: nn.Module) -> bool:
    """Whether the module's forward is its class's `cls.forward`: nobody has put another one on the instance."""
    if torch.compiler.is_compiling():  # where a dictionary's keys are not guarded either, but attributes are
        forward = module.forward
        return isinstance(forward, types.MethodType) and forward.__code__ is cls.forward.__code__
    return "forward" not in vars(module)
