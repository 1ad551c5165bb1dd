"""The memory order of down_proj: by columns in evaluation, where kernels gather them; as it was, in training.

Llama 4's experts lie transposed. There it is gate and up that get columns, which are neurons, too.

The parameter stays the same object with the same shape and values; only its strides change, so it computes, saves and
reloads alike. No copy is kept, hence none can go stale when an adapter is merged into the weight or it is replaced.
"""

import torch

from hf_twell.blocks.operands import quantized_values
from hf_twell.dispatch.key import EIGHT_BIT
from hf_twell.dispatch.limits import limit


def settle_down(ffn: torch.nn.Module, weight: torch.Tensor, x: torch.Tensor, density: float | None) -> None:
    """Give down's (D, F) weight the strides (1, D) in evaluation, and (F, 1) again where its gradient is wanted.

    `weight` is the parameter, or the values that a tensor of torchao's holds; `density` is that of recent inputs. Of
    experts (E, D, F) each is such a matrix.

    The order stays as it is
    - in compiled graphs (their guards hold the strides), and in calls of neither kind;
    - on a CPU, where the block is too dense for columns to pay;
    - where others may reach the weight by its memory: shared storage, a gradient that waits for an optimizer step, a
      captured CUDA graph, a process group (FSDP2 gathers each forward's weights into the memory it remembers), and in
      evaluation a view or a state dict that somebody keeps.
    """
    if torch.compiler.is_compiling() or x.device.type not in ("cpu", "cuda") or x.numel() == 0:
        return
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        ffn.twell_state.captured = True
    elif torch.is_grad_enabled() and weight.requires_grad:
        if by_column(weight) and _swappable(ffn, weight):
            _swap(weight, weight.detach().contiguous())
    elif not (ffn.training or torch.is_grad_enabled()):
        _settle_evaluated(ffn, weight, x, density)


def _settle_evaluated(ffn: torch.nn.Module, weight: torch.Tensor, x: torch.Tensor, density: float | None) -> None:
    if x.is_cuda:
        # At any density: kernels would transpose rows in every call, dense matmuls read either order equally fast, and
        # sampling the density here would wait for the device.
        wants_columns, wants_rows = True, False
    elif density is None:
        return
    else:
        below = "kCpuColumnsBelow" if weight.ndim == 2 else "kCpuRowsAbove"  # experts never stay as they lie
        wants_columns, wants_rows = density < limit(below), density > limit("kCpuRowsAbove")
    to_columns, to_rows = wants_columns and weight.is_contiguous(), wants_rows and by_column(weight)
    if not (to_columns or to_rows) or _distributed() or not _swappable(ffn, weight) or _held(weight):
        return  # nearly always for the first reason, so the cheapest test comes first
    _swap(weight, weight.detach().mT.contiguous().mT if to_columns else weight.detach().contiguous())


def restore_down(ffn: torch.nn.Module) -> None:
    """Give the weight the memory order in which stock models hold it."""
    weight = getattr(ffn, ffn.twell.form.settled)
    weight = getattr(weight, "weight", None) if isinstance(weight, torch.nn.Module) else weight
    held = quantized_values(weight)
    weight = weight if held is None else held[0]
    if isinstance(weight, torch.Tensor) and not weight.is_contiguous() and _swappable(ffn, weight):
        _swap(weight, weight.detach().contiguous())


def by_column(weight: torch.Tensor) -> bool:
    return weight.stride()[-2:] == (1, weight.shape[-2])


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _swappable(ffn: torch.nn.Module, weight: torch.Tensor) -> bool:
    # A parameter, or the 8-bit values within one; other kinds (DTensor, say) need not even have memory of their own.
    kind = torch.Tensor if weight.dtype in EIGHT_BIT else torch.nn.Parameter
    if type(weight) is not kind or min(weight.shape) <= 1 or weight.grad is not None or ffn.twell_state.captured:
        return False
    alone = weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    return alone and not (weight.is_cpu and weight.is_shared())  # with other processes


def _held(weight: torch.Tensor) -> bool:
    """Whether others hold its memory, and may write to it: a state dict, `.data`, a view, a thread that computes."""
    if weight.dtype in EIGHT_BIT:
        return _users(weight) > _users(weight.new_empty(0))
    # In one expression: a name for the empty tensor would count as a user of the parameter's memory.
    return _users(weight) > _users(torch.nn.Parameter(weight.new_empty(0), requires_grad=False))


def _users(weight: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(weight.untyped_storage()._cdata)


def _swap(weight: torch.nn.Parameter, value: torch.Tensor) -> None:
    # Both are inference tensors or neither is: a mixture could never be trained, or used at all, again.
    inference = weight.is_inference()
    with torch.inference_mode(inference), torch.no_grad():
        alike = value.is_inference() == inference
        weight.data = value if alike else value.clone(memory_format=torch.preserve_format)
