"""A projection's weight as the operator takes it: a plain one, or torchao's 8-bit values and their scales."""

import types

import torch
from torch import nn

# torchao's classes whose values some kernel reads: of which type these are, and on which devices it does.
_READ = {
    "Int8Tensor": (torch.int8, ("cpu", "cuda")),
    "Float8Tensor": (torch.float8_e4m3fn, ("cuda",)),
}


# These run in every call, and what they read is read again by the guards of a compiled model: 28 layers had guards of
# 0.4 ms a call, where stock blocks have 0.24, and have 0.33 now. So no more is read than decides, and of attributes
# only a module's own: its parameters as attributes would take an uncompiled call as long as a small matmul.
def plain_parameters(linear: nn.Module):
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


def quantized_parameters(linear: nn.Module):
    """(values (N, K), bias, float32 scales (N, 1)) of a weight that torchao has quantized by rows; else None.

    By its Int8WeightOnlyConfig or, on CUDA, its Float8WeightOnlyConfig, where CPU kernels read int8 alone. They are
    what torchao's tensor holds, and no copies.
    """
    parameters = linear._parameters
    if type(linear) is not nn.Linear or is_hooked(nn.Linear, linear) or "bias" not in parameters:
        return None
    held = quantized_values(parameters.get("weight"))
    return None if held is None else (held[0], parameters["bias"], held[1])


def quantized_values(weight):
    """(values, scales) of a tensor of torchao's that kernels read on its device; else None.

    It has one float32 scale a row, and leaves x as it is.
    """
    kind = type(weight)
    if kind.__name__ not in _READ or kind.__module__ != "torchao.quantization":
        return None
    dtype, devices = _READ[kind.__name__]
    values, scale = weight.qdata, weight.scale
    rows = values.ndim == 2 and values.dtype == dtype and scale.shape == (values.shape[0], 1)
    # fp8 has no scales of x beside those of its quantization.
    weight_only = weight.act_quant_kwargs is None and (dtype != torch.int8 or weight.act_pre_scale is None)
    read = rows and weight_only and scale.dtype == torch.float32 and values.device.type in devices
    return (values, scale) if read else None


def reads_any_order(linear: nn.Module) -> bool:
    """False for 8-bit values that lie by columns: Inductor's own int8 matmul does not take them."""
    held = quantized_parameters(linear)
    return held is None or held[0].is_contiguous()


def is_hooked(cls: type, module: nn.Module) -> bool:
    if not has_forward_of(cls, module):
        return True
    # By length, and not by attribute: of those Dynamo guards neither, and would reuse its code for a layer with hooks.
    own = vars(module)
    if torch.is_grad_enabled() and (len(own["_backward_hooks"]) or len(own["_backward_pre_hooks"])):
        return True
    return bool(len(own["_forward_hooks"]) or len(own["_forward_pre_hooks"]))


def has_forward_of(cls: type, module: nn.Module) -> bool:
    """Whether the module's forward is its class's `cls.forward`: nobody has put another one on the instance."""
    if torch.compiler.is_compiling():  # where a dictionary's keys are not guarded either, but attributes are
        forward = module.forward
        return isinstance(forward, types.MethodType) and forward.__code__ is cls.forward.__code__
    return "forward" not in vars(module)
