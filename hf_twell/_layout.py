"""The memory order of down_proj: by columns in evaluation, where kernels gather them; as it was, in training.

The parameter stays the same object with the same shape and values; only its strides change, so it computes, saves and
reloads alike. No copy is kept, hence none can go stale when an adapter is merged into the weight or it is replaced.
"""

import torch

from hf_twell import ops

SPARSE = 0.1  # below this density columns pay at any number of tokens; above ops.MAX_DENSITY rows do
MANY_TOKENS = 64  # so many make the sample's time negligible


def settle_down(ffn: torch.nn.Module, x: torch.Tensor) -> None:
    """Give a (D, F) weight on CPU the strides (1, D) for evaluation, and (F, 1) again where gradients are wanted.

    Left alone are: calls outside evaluation without gradients, compiled graphs (their guards hold the strides), blocks
    too dense for it to pay, and weights that others may reach by their memory: shared storage, a gradient waiting for
    an optimizer step, or any process group (FSDP2 gathers each forward's weights into the memory it remembers).
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.numel() == 0:
        return
    form = ffn.twell.form
    weight = getattr(ffn, form.down).weight
    by_column = weight.stride() == (1, weight.shape[0])
    if torch.is_grad_enabled() and weight.requires_grad:
        if by_column and _swappable(weight):
            _swap(weight, weight.detach().contiguous())
    elif not (ffn.training or torch.is_grad_enabled() or _distributed()) and _swappable(weight):
        if by_column and x.numel() < MANY_TOKENS * x.shape[-1]:
            return
        first = getattr(ffn, form.gate or form.up)
        density = ops.sampled_density(x, first.weight, first.bias)
        if by_column and density > ops.MAX_DENSITY:
            _swap(weight, weight.detach().contiguous())
        elif weight.is_contiguous() and density < SPARSE:
            _swap(weight, weight.detach().t().contiguous().t())


def restore_down(ffn: torch.nn.Module) -> None:
    """Give the weight the memory order in which stock models hold it."""
    weight = getattr(getattr(ffn, ffn.twell.form.down), "weight", None)
    if weight is not None and not weight.is_contiguous() and _swappable(weight):
        _swap(weight, weight.detach().contiguous())


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _swappable(weight: torch.Tensor) -> bool:
    alone = weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    return alone and min(weight.shape) > 1 and weight.grad is None and type(weight) is torch.nn.Parameter


def _swap(weight: torch.nn.Parameter, value: torch.Tensor) -> None:
    # An inference tensor could never be trained again.
    with torch.inference_mode(False), torch.no_grad():
        weight.data = value.clone(memory_format=torch.preserve_format) if value.is_inference() else value
