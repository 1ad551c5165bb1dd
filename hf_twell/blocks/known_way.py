"""The short way to the kernels of a CPU for a block in evaluation, whose last call has found out what it must know.

Anybody may have hooked, replaced, moved or quantized a part of a block since its last call, so each call asks many
things. Behind other work, which leaves nothing of that code in the caches, to ask takes a quarter as long as one
token's kernels. Here a call only makes sure that every answer is still the last call's.
"""

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from hf_twell.blocks.layout import SAMPLE_EVERY_CPU_CALLS
from hf_twell.blocks.operands import OWN_FORWARDS
from hf_twell.ops import api

# Bound here: in torch's own large tables each look-up costs a walk through memory.
_grad_enabled, _autocast_enabled = torch.is_grad_enabled, torch.is_autocast_enabled
_transforms_active = torch._C._are_functorch_transforms_active
_Tensor, _Linear, _ReLU, _INT8, _FLOAT32 = torch.Tensor, nn.Linear, nn.ReLU, torch.int8, torch.float32
_linear_forward, _relu_forward = OWN_FORWARDS[nn.Linear], OWN_FORWARDS[nn.ReLU]


class KnownWay:
    """What a call that took kernels looked at, and the operator that it called.

    It holds no tensor and no module, so what is replaced is freed. Copies and pickles of it are None.
    """

    __slots__ = ("backend", "block", "dtype", "form", "forward", "kind", "operator", "settings", "shape", "sizes")

    def __init__(self, ffn, x, up: torch.Tensor):
        self.block, self.settings, self.backend, self.form = type(ffn), ffn.twell, ffn.twell.backend, ffn.twell.form
        self.forward, self.operator = self.block.forward, torch.ops.hf_twell.infer
        self.shape, self.dtype = x.shape, x.dtype
        # Parameters hold the values themselves, or torchao's tensors do.
        self.kind, self.sizes = type(ffn._modules[self.form.up]._parameters["weight"]), (up.shape, up.shape[::-1])

    def __reduce__(self):
        return type(None), ()


def note(ffn, x, weights: tuple, y: torch.Tensor) -> torch.Tensor:
    """y, by the way: keep what the call that made it by kernels has found out, if later ones can go by it.

    Args:
        ffn: a `hf_twell.blocks.modeling.SparseFfn`, with its x.
        weights: of up, down and gate, as the operator took them.
    """
    if torch.compiler.is_compiling() or _grad_enabled() or ffn.training or not x.is_cpu or x.numel() == 0:
        return y
    plain = type(x) is _Tensor and not _autocast_enabled("cpu")
    if plain and api._kernels_take(ffn.twell.backend, "cpu", False, x, *weights):
        ffn.twell_state.known = KnownWay(ffn, x, weights[0])
    return y


def through(ffn, x):
    """The block's y where all is as its last call left it; else None, and nothing is known any more."""
    own = ffn.__dict__
    state = own["twell_state"]
    way = state.known
    if way is None:
        return None
    operands = _operands(own, state, way, type(ffn), x)
    if operands is None:
        state.known = None
        return None
    state.calls += 1
    return way.operator(x, *operands)


def _operands(own, state, way, block, x):
    """What the operator takes beside x; None where something may have changed, or it is time for another sample."""
    if (
        type(x) is not _Tensor
        or x.shape != way.shape
        or x.dtype is not way.dtype
        or not x.is_cpu
        or state.calls % SAMPLE_EVERY_CPU_CALLS == 0
        or own["training"]
        or _grad_enabled()
        or _autocast_enabled("cpu")
        or _transforms_active()
        or forward_ad._current_level >= 0
        or _has_any_global_hook()
        or _Linear.forward is not _linear_forward
        or _ReLU.forward is not _relu_forward
        or block is not way.block
        or block.forward is not way.forward
        or own["twell"] is not way.settings
        or way.settings.backend != way.backend
        or own.get("_compiled_call_impl") is not None
        or _watched(own)
    ):
        return None
    form, modules = way.form, own["_modules"]
    relu = modules[form.activation]
    if type(relu) is not _ReLU or _watched(relu.__dict__):
        return None
    kind, dtype, (rows, columns) = way.kind, way.dtype, way.sizes
    weights, biases, scales = [], [], []
    for name, shape in ((form.up, rows), (form.down, columns), (form.gate, rows)):
        if name is None:
            weights.append(None), biases.append(None), scales.append(None)
            continue
        linear = modules[name]
        if type(linear) is not _Linear or _watched(linear.__dict__):
            return None
        parameters = linear._parameters
        try:
            weight, bias, scale, of = parameters["weight"], parameters["bias"], None, dtype
        except KeyError:  # pruned or weight-normed, or a tensor that is no parameter took its place
            return None
        if type(weight) is not kind:
            return None
        if kind is not nn.Parameter and kind is not _Tensor:
            if weight.act_quant_kwargs is not None or weight.act_pre_scale is not None:
                return None
            weight, scale, of = weight.qdata, weight.scale, _INT8
            if scale.dtype is not _FLOAT32 or scale.shape != (shape[0], 1) or not scale.is_cpu:
                return None
        if weight.dtype is not of or weight.shape != shape or not weight.is_cpu:
            return None
        if bias is not None and (bias.dtype is not dtype or bias.shape != shape[:1] or not bias.is_cpu):
            return None
        weights.append(weight), biases.append(bias), scales.append(scale)
    weights[1] = weights[1].detach()  # another thread may give the parameter new memory while this one computes
    return (*weights, *biases, *scales)


def _watched(own: dict) -> bool:
    """Whether hooks or another forward are on the module whose dictionary this is; without gradients."""
    return "forward" in own or bool(own["_forward_hooks"] or own["_forward_pre_hooks"])
