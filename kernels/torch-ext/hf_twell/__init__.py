"""ReLU feed-forward blocks that read the weights of active neurons alone, for inference.

This is the kernel that Hugging Face's `kernels` loads. Training, int8 and fp8, and the choice between these kernels and
plain matmuls by how active a layer is, are in the package hf_twell.
"""

import torch
from torch import library

from . import layers
from ._ops import add_op_namespace_prefix, ops

__all__ = ["ffn", "layers"]


def ffn(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    w_gate: torch.Tensor | None = None,
    b_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    b_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """ReLU feed-forward block without gradients, exact at every density.

    Formula: h = relu(x Wg^T + bg) * (x Wu^T + bu), or relu(x Wu^T + bu) without a gate; y = h Wd^T + bd.
    It is fastest where w_down lies by columns: `w_down.t().contiguous().t()`.

    Shapes:
        x (..., D); w_up, w_gate (F, D); w_down (D, F); b_up, b_gate (F,); b_down (D,); returns (..., D).
        All of one dtype: bfloat16 or float16, on a CPU float32, too.

    Raises:
        RuntimeError: tensors that do not fit together.
    """
    return ops.infer(x, w_up, w_down, w_gate, b_up, b_down, b_gate)


@library.register_fake(add_op_namespace_prefix("infer"))
def _infer_fake(x, *weights, **options):
    return x.new_empty(x.shape)
