"""The norms on both sides of a sparse block, by a kernel of ours that overlaps with the block's.

Between attention and a block of few tokens the GPU waits for one kernel after the other. A norm of vLLM's starts when
the kernel ahead has ended, and the next one when the norm has. This one's launch is programmatic: it starts while the
block's last kernel works, and while a norm works the block fetches weights. One H200, 28 blocks of D=2048, F=5632 in
bfloat16, 0.5 % active, 16 sequences: a step of 1.66 ms becomes one of 1.57.

What is used of vLLM is alike in 0.26 and 0.32: `RMSNorm` with `weight`, `variance_epsilon` and
`variance_size_override`, and the names under which layers hold theirs. A version that differs gets its case here.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from hf_twell.dispatch.key import HOPPER, device_class


class AddRmsNorm(nn.Module):
    """Formula: s = x + residual; y = s / sqrt(mean(s^2) + epsilon) * weight. Shapes: (..., D); returns y and s."""

    def __init__(self, stock: RMSNorm) -> None:
        super().__init__()
        self.weight, self.epsilon = stock.weight, stock.variance_epsilon

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.hf_twell.add_rms_norm(x, residual, self.weight, self.epsilon)


def replace_norms(model: nn.Module, sparse: Iterable[int]) -> list[str]:
    """Exchange what norms can be exchanged beside the blocks of these layers; returns their names.

    With tensor parallelism all stay, as vLLM may sum over ranks and normalize in one kernel; and so does one ahead of a
    quantized attention, which it may quantize in the norm's kernel.
    """
    replaced: list[str] = []
    if get_tensor_model_parallel_world_size() > 1:
        return replaced
    for owner, path, name in _beside(model, sparse):
        norm = getattr(owner, name, None)
        if _is_replaceable(norm):
            setattr(owner, name, AddRmsNorm(norm))
            replaced.append(f"{path}{name}")
    return replaced


def _beside(model: nn.Module, sparse: Iterable[int]) -> Iterator[tuple[nn.Module, str, str]]:
    """Owner, its path and the name of each norm that comes right ahead of a sparse block or right after one."""
    for index in sorted(sparse):
        yield model.layers[index], f"layers.{index}.", "post_attention_layernorm"
        if index + 1 == len(model.layers):
            yield model, "", "norm"
            continue
        after = model.layers[index + 1]  # without attention where it is another pipeline stage's
        projection = getattr(getattr(after, "self_attn", None), "qkv_proj", None)
        if type(getattr(projection, "quant_method", None)) is UnquantizedLinearMethod:
            yield after, f"layers.{index + 1}.", "input_layernorm"


def _is_replaceable(norm: Any) -> bool:
    """Whether the kernel computes just what this norm does, on a GPU like those that it was timed on."""
    if type(norm) is not RMSNorm or not norm.has_weight or norm.variance_size_override is not None:
        return False
    weight = norm.weight
    fits = weight.dtype in (torch.bfloat16, torch.float16) and weight.numel() % 8 == 0
    return fits and weight.is_cuda and device_class("cuda", weight.device.index)[1] == HOPPER
