"""The memory order of down_proj: by columns in evaluation, where kernels gather them; as it was, in training.

The parameter stays the same object with the same shape and values; only its strides change, so it computes, saves and
reloads alike. No copy is kept, hence none can go stale when an adapter is merged into the weight or it is replaced.
"""

import torch

from hf_twell import ops


def settle_down(ffn: torch.nn.Module, x: torch.Tensor) -> None:
    """Give a (D, F) weight on CPU the strides (1, D) for evaluation, and (F, 1) again where gradients are wanted.

    Left alone are: calls outside evaluation without gradients, compiled graphs (their guards hold the strides), blocks
    too dense for it to pay, and weights that others may reach by their memory: shared storage, or a gradient waiting
    for an optimizer step.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return
    form = ffn.twell.form
    weight = getattr(ffn, form.down).weight
    if torch.is_grad_enabled() and weight.requires_grad:
        if weight.stride() == (1, weight.shape[0]) and _swappable(weight):
            _swap(weight, weight.detach().contiguous())
    elif not (ffn.training or torch.is_grad_enabled()) and weight.is_contiguous() and _swappable(weight):
        first = getattr(ffn, form.gate or form.up)
        if not ops.looks_dense(x, first.weight, first.bias):
            _swap(weight, weight.detach().t().contiguous().t())


def _swappable(weight: torch.Tensor) -> bool:
    alone = weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    return alone and min(weight.shape) > 1 and weight.grad is None and type(weight) is torch.nn.Parameter


def _swap(weight: torch.nn.Parameter, value: torch.Tensor) -> None:
    # An inference tensor could never be trained again.
    with torch.inference_mode(False), torch.no_grad():
        weight.data = value.clone(memory_format=torch.preserve_format) if value.is_inference() else value
